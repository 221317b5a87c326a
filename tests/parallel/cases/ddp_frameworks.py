"""What accelerate, Lightning's Fabric and transformers put around model and optimizer: stand-ins, and the real ones."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, load_checkpoint, register, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.regression import batches, distance, fingerprint, smooth_model, weights


class Around(torch.optim.Optimizer):
    """As accelerate's wrapper: under fp16 it keeps the step that the optimizer had when it was wrapped."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.__setstate__({})

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the steps anew."""
        if self.scaler is not None:
            step, self.called = self.optimizer.step, False

            def patched(*args: Any, **named: Any) -> Any:
                self.called = True
                return step(*args, **named)

            self._optimizer_original_step_method, self._optimizer_patched_step_method = step, patched

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step as accelerate does."""
        if self.scaler is None:
            return self.optimizer.step(closure)
        self.optimizer.step = self._optimizer_patched_step_method  # type: ignore[method-assign]
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.optimizer.step = self._optimizer_original_step_method  # type: ignore[method-assign]
        assert self.called
        self.called = False


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


def patched_class() -> dict[str, Any]:
    """How often a function around ``step`` on the class, as autologging puts it there, is called in four steps."""
    found, own = {}, torch.optim.SGD.step
    for name, compression in {"dgc": Compression.dgc(0.05), "local": Compression.local(steps=2)}.items():
        calls: list[Any] = []

        @functools.wraps(own)
        def step(optimizer: Any, *args: Any, calls: list[Any] = calls) -> Any:
            calls.append(optimizer)
            return own(optimizer, *args)

        torch.optim.SGD.step = step  # type: ignore[method-assign]
        try:
            model = DistributedDataParallel(smooth_model())
            optimizer = register(model, torch.optim.SGD(model.parameters(), 0.05), compression)
            for x, y in batches(4, dist.get_rank()):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        finally:
            torch.optim.SGD.step = own  # type: ignore[method-assign]
        found[name] = [len(calls), fingerprint(model)]
    return found


def stand_ins() -> dict[str, Any]:
    """Weights by the objects that a user has in hand, beside those by what is inside; a checkpoint by both."""
    found: dict[str, Any] = {}
    for name, scaled in (("plain", False), ("scaled", True)):
        ends = []
        for wrapped in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
            inner = smooth_model()
            model = DistributedDataParallel(inner)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            compiled = nn.Module()
            compiled._orig_mod = inner
            used, stepped = (Called(model, compiled), Around(optimizer, scaler)) if wrapped else (model, None)
            assert register(used, stepped or optimizer, Compression.dgc(0.05)) is (stepped or optimizer)
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
            if wrapped:
                folder = os.environ["DGC_TEST_FOLDER"]
                save_checkpoint(folder, used, stepped)
                load_checkpoint(folder, inner, optimizer)
        found[name] = [*ends, optimizer.compression_stats()["steps"]]
    return found


def fabric() -> dict[str, Any]:
    """What ``Fabric.setup`` returns, beside DDP alone."""
    import lightning

    ours = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    ours.launch()
    ends = []
    for wrapped in (False, True):
        inner = smooth_model()
        inner_optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = DistributedDataParallel(inner), inner_optimizer
        if wrapped:
            model, optimizer = ours.setup(inner, inner_optimizer)
        register(model, optimizer, Compression.dgc(0.05))
        for x, y in batches(4, dist.get_rank()):
            optimizer.zero_grad()
            ours.backward(F.mse_loss(model(x), y))
            optimizer.step()
        ends.append(fingerprint(inner))
    return {"ends": ends, "steps": inner_optimizer.compression_stats()["steps"]}


def accelerate_resumed() -> dict[str, Any]:
    """``save_state`` in the middle, ``load_state`` into new objects: the weights of a run without a break."""
    from accelerate import Accelerator

    from dgc_horovod.torch.integrations.accelerate import compress

    folder, ends, last = os.environ["DGC_TEST_FOLDER"] + "/accelerate", [], None
    for resumed in (False, True):
        accelerator = Accelerator(cpu=True)
        inner = smooth_model()
        made = torch.optim.AdamW(inner.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(inner, made)
        compress(accelerator, model, optimizer, Compression.dgc(0.05))
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
        last = made
    return {"ends": ends, "steps": last.compression_stats()["steps"] if last else 0}


def lightning_resumed() -> dict[str, Any]:
    """A checkpoint of Lightning's Trainer in the middle: the weights of a run without a break."""
    import lightning
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

    folder = os.environ["DGC_TEST_FOLDER"] + "/lightning"
    data = [(x[i], y[i]) for x, y in batches(4, 0) for i in range(len(x))]
    ends, steps = [], 0
    for epochs, start in ((2, None), (1, None), (2, f"{folder}/half.ckpt")):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), max_epochs=epochs, logger=False,
            callbacks=[CompressCallback(Compression.dgc(0.05))], enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, 8, shuffle=False), ckpt_path=start)  # type: ignore[arg-type]
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/half.ckpt")
        ends.append(fingerprint(module.net))
        steps = trainer.optimizers[0].compression_stats()["steps"]  # type: ignore[attr-defined]
    kept = os.path.isdir(f"{folder}/half.ckpt.dgc")
    trainer.strategy.remove_checkpoint(f"{folder}/half.ckpt")
    dist.barrier()
    return {"ends": [ends[0], ends[2]], "steps": steps, "kept": [kept, os.path.isdir(f"{folder}/half.ckpt.dgc")]}


def trainer_resumed() -> dict[str, Any]:
    """A checkpoint of ``transformers.Trainer`` in the middle: the weights of a run without a break."""
    from dgc_horovod.torch.integrations.transformers import CompressCallback

    folder, ends, said = os.environ["DGC_TEST_FOLDER"] + "/trainer", [], []
    moved = f"{folder}/best"
    for start, output in ((None, folder), (moved, f"{folder}/other")):
        if start and dist.get_rank() == 0:
            shutil.copytree(f"{folder}/checkpoint-4", moved)
        dist.barrier()
        made = _trainer(None, output_dir=output, max_steps=8, save_strategy="steps", save_steps=4, optim="adamw_torch")
        made.add_callback(CompressCallback(made, Compression.dgc(0.05)))
        with messages() as told:
            made.train(resume_from_checkpoint=start)
        said += [text for text in told if "residuals" in text]
        ends.append(fingerprint(made.model))
        steps = made.optimizer.optimizer.compression_stats()["steps"]
    return {"ends": ends, "steps": steps, "said": said}


def trainer() -> dict[str, Any]:
    """``transformers.Trainer`` with a GradScaler beside one without; and the model that a callback is given."""
    plain, said, _ = _trained_by_trainer(None)
    scaled, _, steps = _trained_by_trainer(torch.amp.GradScaler("cpu", init_scale=1024.0))
    return {"distance": distance(plain, scaled), "said": said, "steps": steps}


def _trained_by_trainer(scaler: Any) -> tuple[Any, str, int]:
    from transformers import TrainerCallback

    said: list[str] = []

    class Compress(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            said.append(error_of(lambda: register(model, used.optimizer)))
            register(used.model_wrapped, used.optimizer, Compression.dgc(0.05))

    used = _trainer(scaler, output_dir=tempfile.mkdtemp(), max_steps=5, save_strategy="no", optim="sgd")
    used.add_callback(Compress())
    used.train()
    return weights(used.model), said[0], used.optimizer.optimizer.compression_stats()["steps"]


def _trainer(scaler: Any, **arguments: Any) -> Any:
    """A Trainer of a tiny GPT-2."""
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
