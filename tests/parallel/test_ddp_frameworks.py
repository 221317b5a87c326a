"""What accelerate, Lightning's Fabric and transformers put around model and optimizer: stand-ins, and the real ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, load_checkpoint, register, save_checkpoint
from tests.helpers.ddp_training import sgd
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.regression import batches, distance, fingerprint, smooth_model, weights
from tests.helpers.unedited_ddp import Around

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2, timeout=240)]
FEW = Compression.dgc(0.05)


class Called(nn.Module):
    """As Fabric's: what is called is another module than the one whose attributes it shows."""

    def __init__(self, forward_module: nn.Module, shown: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = forward_module, shown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self._forward_module(x)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)


@pytest.mark.parametrize("scaled", [False, True])
def test_objects_of_the_shapes_that_they_have(scaled, tmp_path):
    """Fabric's were refused; under fp16 accelerate stepped by the method of before, which was refused too.

    Weights by the objects that a user has in hand, beside those by what is inside; a checkpoint by both.
    """
    ends = []
    for wrapped in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        inner = smooth_model()
        model = DistributedDataParallel(inner)
        optimizer: Any = sgd(model)
        compiled = nn.Module()
        compiled._orig_mod = inner
        used, stepped = (Called(model, compiled), Around(optimizer, scaler)) if wrapped else (model, None)
        assert register(used, stepped or optimizer, FEW) is (stepped or optimizer)
        for x, y in batches(4, dist.get_rank()):
            optimizer.zero_grad()
            loss = F.mse_loss(used(x), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if wrapped or scaler is None:
                (stepped or optimizer).step()
            else:
                scaler.step(optimizer)
                scaler.update()
        ends.append(fingerprint(model))
        assert optimizer.compression_stats()["steps"] == 4
    assert ends[0] == ends[1]
    save_checkpoint(tmp_path, used, stepped)
    load_checkpoint(tmp_path, inner, optimizer)


@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True)
def test_fabric():
    """What ``Fabric.setup`` returns, beside DDP alone."""
    lightning = pytest.importorskip("lightning")
    ours = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    ours.launch()
    ends = []
    for wrapped in (False, True):
        inner = smooth_model()
        inner_optimizer: Any = sgd(inner)
        model, optimizer = DistributedDataParallel(inner), inner_optimizer
        if wrapped:
            model, optimizer = ours.setup(inner, inner_optimizer)
        register(model, optimizer, FEW)
        for x, y in batches(4, dist.get_rank()):
            optimizer.zero_grad()
            ours.backward(F.mse_loss(model(x), y))
            optimizer.step()
        ends.append(fingerprint(inner))
        assert inner_optimizer.compression_stats()["steps"] == 4
    assert ends[0] == ends[1]


@pytest.mark.on_ranks(2, fresh=True)
def test_accelerate_resumes_from_its_own_checkpoint_bit_for_bit(tmp_path):
    """``save_state`` in the middle, ``load_state`` into new objects."""
    accelerate = pytest.importorskip("accelerate")
    from dgc_horovod.torch.integrations.accelerate import compress

    ends, folder = [], str(tmp_path / "accelerate")
    for resumed in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        inner = smooth_model()
        made: Any = torch.optim.AdamW(inner.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(inner, made)
        compress(accelerator, model, optimizer, FEW)
        if resumed:
            accelerator.load_state(folder)
        for i, (x, y) in enumerate(batches(8, dist.get_rank())):
            if i == 4 and not resumed:
                accelerator.save_state(folder)
            if i < 4 and resumed:
                continue
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
        ends.append(fingerprint(inner))
    assert ends[0] == ends[1] and made.compression_stats()["steps"] == 4


@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True)
def test_lightning_resumes_from_its_own_checkpoint_bit_for_bit(tmp_path):
    """One of its Trainer in the middle; what is beside it goes with it."""
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader

    from dgc_horovod.torch.integrations.lightning import CompressCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = smooth_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    half = tmp_path / "lightning" / "half.ckpt"
    beside = Path(f"{half}.dgc")
    data = [(x[i], y[i]) for x, y in batches(4, 0) for i in range(len(x))]
    ends = []
    for epochs, start in ((2, None), (1, None), (2, str(half))):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), max_epochs=epochs, logger=False,
            callbacks=[CompressCallback(FEW)], enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, 8, shuffle=False), ckpt_path=start)
        if epochs == 1:
            trainer.save_checkpoint(str(half))
        ends.append(fingerprint(module.net))
    assert ends[0] == ends[2] and trainer.optimizers[0].compression_stats()["steps"] == 4
    assert beside.is_dir()
    trainer.strategy.remove_checkpoint(str(half))
    dist.barrier()
    assert not beside.is_dir()


def _trainer(scaler: Any, **arguments: Any) -> Any:
    """A Trainer of a tiny GPT-2."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tokens = torch.arange(64 * 16).view(64, 16) * 7 % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))
    given = TrainingArguments(
        report_to=[], use_cpu=True, ddp_backend="gloo", learning_rate=0.1 if arguments["optim"] == "sgd" else 1e-3,
        logging_strategy="no", disable_tqdm=True, max_grad_norm=0, **arguments,
    )  # fmt: skip
    used = Trainer(model, given, train_dataset=data)
    if scaler is not None:  # on a CPU it makes none for fp16
        used.accelerator.scaler = scaler
    return used


@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True)
def test_trainer_resumes_from_its_own_checkpoint_bit_for_bit(tmp_path):
    """One of ``transformers.Trainer`` in the middle, which was moved since."""
    pytest.importorskip("transformers")
    from dgc_horovod.torch.integrations.transformers import CompressCallback

    ends, said, moved = [], [], tmp_path / "best"
    for start, output in ((None, tmp_path / "trainer"), (moved, tmp_path / "other")):
        if start and dist.get_rank() == 0:
            shutil.copytree(tmp_path / "trainer" / "checkpoint-4", moved)
        dist.barrier()
        made = _trainer(
            None, output_dir=str(output), max_steps=8, save_strategy="steps", save_steps=4, optim="adamw_torch"
        )
        made.add_callback(CompressCallback(made, FEW))
        with messages() as told:
            made.train(resume_from_checkpoint=start and str(start))
        said += [text for text in told if "residuals" in text]
        ends.append(fingerprint(made.model))
    assert ends[0] == ends[1] and made.optimizer.optimizer.compression_stats()["steps"] == 4
    assert not said, "its users lose nothing, and are told nothing"


@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True)
def test_trainer_with_a_scaler(tmp_path):
    """Beside one without; and the model that a callback is given."""
    plain, said, _ = _trained_by_trainer(None, tmp_path)
    scaled, _, steps = _trained_by_trainer(torch.amp.GradScaler("cpu", init_scale=1024.0), tmp_path)
    assert distance(plain, scaled) < 1e-6 and steps == 5
    assert "got GPT2LMHeadModel; a DistributedDataParallel is around it already" in said
    assert "trainer.model_wrapped" in said


def _trained_by_trainer(scaler: Any, folder: Path) -> tuple[Any, str, int]:
    from transformers import TrainerCallback

    said: list[str] = []

    class Compress(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            said.append(error_of(lambda: register(model, used.optimizer)))
            register(used.model_wrapped, used.optimizer, FEW)

    used = _trainer(scaler, output_dir=str(folder), max_steps=5, save_strategy="no", optim="sgd")
    used.add_callback(Compress())
    used.train()
    return weights(used.model), said[0], used.optimizer.optimizer.compression_stats()["steps"]
