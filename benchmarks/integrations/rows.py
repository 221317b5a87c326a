"""The rows of the table: a library, how it is used, and what is expected of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.integrations.training import CLASSES, RANKS, VOCABULARY

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
DGCRUN = (sys.executable, "-m", "dgc_horovod.launch.cli", "--gloo", "-np", str(RANKS), sys.executable)
ALONE = (sys.executable,)  # the job starts its ranks
DENSITY = 0.05
# Nothing is left out or rounded: the weights of a run without compression.
EXACT: Mapping[str, Any] = {"density": 1.0, "values": "fp32", "dense_values": "fp32", "factor_masking": False}


@dataclass(frozen=True)
class Row:
    """A job in the ways that apply.

    Args:
        title: in the table.
        job: "module.function" in `jobs`.
        lines: what the script has where it compresses by itself; "": it is tried by variables alone.
        needs: packages beside torch.
        classes: of what is predicted.
        differs: whether it is another training where it is not `Run.usual`.
        resumes: whether what it saves holds residuals.
        launcher: words before the job.
        starts: "module.function" that starts the ranks, where the launcher does not.
        edit: what the script has where variables decide.
        dense: variables of a run without compression.
        settings: more fields of DGCConfig.
    """

    title: str
    job: str
    lines: str
    needs: tuple[str, ...] = ()
    classes: int = CLASSES
    differs: bool = False
    resumes: bool = True
    launcher: tuple[str, ...] = TORCHRUN
    starts: str = ""
    edit: str = "none"
    dense: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_HF, _TEXT = ("transformers", "accelerate"), VOCABULARY
ROWS = {
    "trainer": Row("Trainer: SGD, clipping", "trainer.plain", "callback", _HF, _TEXT, differs=True),
    "trainer-everything": Row(
        "Trainer: AdamW, accumulation, bf16, activation checkpointing, evaluation, best model at end, clipping",
        "trainer.everything", "callback", _HF, _TEXT, differs=True,
    ),
    "trainer-scaler": Row(
        "Trainer: AdamW, GradScaler, clipping", "trainer.scaled", "callback", _HF, _TEXT, differs=True
    ),
    "trainer-compile": Row(
        "Trainer: AdamW, torch_compile, clipping", "trainer.compiled", "callback", _HF, _TEXT, differs=True
    ),
    "trainer-lora": Row(
        "Trainer: AdamW, LoRA by peft, clipping", "trainer.lora", "callback", (*_HF, "peft"), _TEXT, differs=True,
        settings={"min_numel": 256},
    ),
    "accelerate": Row(
        "accelerate: prepare(everything), SGD", "accelerated.prepared", "`compress`", ("accelerate",)
    ),
    "accelerate-accumulate": Row(
        "accelerate: AdamW, accumulate, clipping", "accelerated.accumulated", "`compress`", ("accelerate",),
        differs=True,
    ),
    "lightning": Row(
        "Lightning: AdamW, ddp, accumulation, clipping", "lightnings.trainer", "callback", ("lightning",), differs=True
    ),
    "fabric": Row(
        "Fabric: SGD, no_backward_sync, clipping", "lightnings.fabric", "`register`", ("lightning",), differs=True
    ),
    "imagenet": Row(
        "like ImageNet's: SGD, bf16 autocast, GradScaler, set_epoch, StepLR", "loops.imagenet", "`register`",
        differs=True,
    ),
    "mingpt": Row(
        "like minGPT: AdamW of two groups, no_sync, clipping, cosine, torch.distributed.checkpoint", "loops.mingpt",
        "`register`", classes=_TEXT, differs=True,
    ),
    "spawn": Row("mp.spawn: SGD", "loops.plain", "`register`", launcher=ALONE, starts="loops.spawn"),
    "ray-train": Row("Ray Train: SGD", "loops.plain", "`register`", ("ray",), launcher=ALONE, starts="loops.ray"),
    "horovod-run": Row(
        "horovod.run: SGD", "horovods.torch_job", "`DistributedOptimizer`", ("horovod",), launcher=ALONE,
        starts="horovods.start", edit="`activate`",
    ),
    "keras": Row(
        "Keras: model.fit, SGD", "horovods.keras_job", "`DistributedOptimizer`", ("horovod", "keras"), resumes=False,
        launcher=DGCRUN, dense={"DGC_COMPRESSION": "none"},
    ),
}  # fmt: skip
