"""Saving, loading and emptying what ranks keep, on real ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.testing.torch import kept_by, session
from dgc_horovod.torch import Compression, DistributedOptimizer, elastic, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.interrupted import COMPRESSIONS, HALF, OPTIMIZERS, SMALL, STEPS, made, nesterov, train_between
from tests.helpers.training import batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights


def _ascending(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, maximize=True)


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """The same new folder on every rank; removed when all have done with it."""
    made = tempfile.mkdtemp(prefix="dgc-state-") if hvd.rank() == 0 else None
    folder = Path(hvd.broadcast_object(made, name="folder"))
    yield folder
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def _states(optimizer: Any) -> list[ResidualState]:
    """Of every rank."""
    return hvd.allgather_object(kept_by(optimizer))


def resume() -> dict[str, Any]:
    """A run that is stopped and resumed in the middle, beside one that is not, in two ways of saving."""
    hvd.init()
    found = {}
    pairs = [(name, "SGD") for name in COMPRESSIONS] + [("dgc, warm-up", other) for other in list(OPTIMIZERS)[1:]]
    for name, optimizer_name in [*pairs, ("topk", "AdamW")]:
        found[f"{name}, {optimizer_name}"] = _resumed(COMPRESSIONS[name], OPTIMIZERS[optimizer_name], HALF, STEPS)
    return found


def resume_late() -> dict[str, Any]:
    """The same at step 100 of 200."""
    hvd.init()
    return _resumed(COMPRESSIONS["dgc, warm-up"], momentum_sgd, 100, 200)


def _resumed(compression: Any, make: Any, half_way: int, steps: int) -> dict[str, Any]:
    whole, optimizer = made(compression, make)
    train_between(whole, optimizer, 0, steps)
    half, first = made(compression, make)
    train_between(half, first, 0, half_way)
    with _shared_folder() as folder:
        save_checkpoint(folder, half, first, epoch=3)
        own = {**first.residual_state_dict()}
        from_file, second = made(compression, make)
        extra = load_checkpoint(folder, from_file, second)
        train_between(from_file, second, half_way, steps)
        from_dicts, third = made(compression, make)
        _check_that_it_goes_through_a_file(own, folder)
        load_checkpoint(folder, from_dicts, third, residuals="ignored")
        third.load_residual_state_dict(own)
        train_between(from_dicts, third, half_way, steps)
        # without the residuals it is another run: the comparison can fail
        without, fourth = made(compression, make)
        without.load_state_dict(torch.load(_model_file(folder), weights_only=True)["model"])
    train_between(without, fourth, half_way, steps)
    return {
        "same": [fingerprint(model) == fingerprint(whole) for model in (from_file, from_dicts)],
        "extra": extra, "other": fingerprint(without) != fingerprint(whole), "fingerprint": fingerprint(from_file),
    }  # fmt: skip


def _model_file(folder: Path) -> Path:
    (file,) = folder.glob("*-model.bin")
    return file


def _check_that_it_goes_through_a_file(record: dict[str, Any], folder: Path) -> None:
    file = folder / f"own{hvd.rank()}.pt"
    torch.save(record, file)
    torch.load(file, weights_only=True)


def save_for_others() -> dict[str, Any]:
    """Train and save, to be loaded by another number of ranks."""
    hvd.init()
    model, optimizer = made(COMPRESSIONS["clipped, per tensor"])
    train_between(model, optimizer, 0, HALF)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    return {"states": _as_lists(_states(optimizer))}


def load_of_others() -> dict[str, Any]:
    """Load what another number of ranks has saved, and go on."""
    hvd.init()
    model, optimizer = made(COMPRESSIONS["clipped, per tensor"])
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    states = _as_lists(_states(optimizer))
    train_between(model, optimizer, HALF, STEPS)
    return {"states": states, "fingerprint": fingerprint(model)}


def _as_lists(states: list[ResidualState]) -> list[dict[str, Any]]:
    return [
        {name: {part: x.tolist() for part, x in arrays.items()} for name, arrays in state.tensors.items()}
        for state in states
    ]


def flushed() -> dict[str, Any]:
    """After a flush nothing is left, and nothing has been lost."""
    hvd.init()
    found = {}
    for name, make in OPTIMIZERS.items():
        for op_name, op in (("average", hvd.Average), ("sum", hvd.Sum)):
            model, optimizer = made(Compression.dgc(**SMALL, dense_values="8bit"), make, op=op)
            train_between(model, optimizer, 0, HALF)
            before, states = weights(model), _states(optimizer)
            optimizer.flush()
            moved = dict(
                zip([n for n, _ in model.named_parameters()], _split(before - weights(model), model), strict=True)
            )
            lr = optimizer.param_groups[0]["lr"]
            worst, left = 0.0, 0.0
            for tensor in (n for n in moved if n.endswith("weight")):
                owed = sum(state.tensors[tensor]["v"].astype(np.float64) for state in states)
                owed = owed / len(states) if op == hvd.Average else owed
                worst = max(
                    worst, float(np.abs(moved[tensor].numpy().ravel() - lr * owed).max() / np.abs(lr * owed).max())
                )
            for state in _states(optimizer):
                kept = [a["v"] for n, a in state.tensors.items() if n.endswith("weight") or name != "AdamW"]
                left = max(left, max(float(np.abs(v).max()) for v in kept), *(float(np.abs(a["u"]).max()) for a in
                           state.tensors.values() if "u" in a), 0.0)  # fmt: skip
            stock = _stock_continues(model, optimizer, make)
            train_between(model, optimizer, HALF, STEPS)
            found[f"{name}, {op_name}"] = {
                "worst": worst, "left": left, "fingerprint": fingerprint(model), "momentum": stock,
                "finite": bool(torch.isfinite(weights(model)).all()),
            }  # fmt: skip
    return found


def flush_is_linear() -> dict[str, Any]:
    """Where all is sent at once there is nothing to flush but momentum, and that is moved, not changed."""
    hvd.init()
    everything = Compression.dgc(1.0, min_numel=1, values="fp32", dense_values="fp32", factor_masking=False)
    distances = {}
    for name in ("SGD", "Nesterov, decay", "ascending"):
        (one, never), (other, often) = (
            made(everything, {**OPTIMIZERS, "ascending": _ascending}[name]) for _ in range(2)
        )
        for first in range(0, STEPS, 4):
            train_between(one, never, first, first + 4)
            train_between(other, often, first, first + 4)
            often.flush()
        distances[name] = distance(weights(one), weights(other))
    return distances


def elastic_state() -> dict[str, Any]:
    """A commit that flushes leaves nothing, another one changes nothing; ranks that differ hear it when they meet."""
    hvd.init()
    flushed = []
    for compression in (COMPRESSIONS["dgc, warm-up"], COMPRESSIONS["topk"]):
        model, optimizer = made(compression, nesterov)
        state = elastic.TorchState(model, optimizer, flush_on_commit=True)
        state.sync()
        state.commit()
        train_between(model, optimizer, 0, HALF)
        state.commit()
        left = [a["v"] for n, a in kept_by(optimizer).tensors.items() if n.endswith("weight")]
        before = fingerprint(model)
        state.commit()
        flushed += [not any(v.any() for v in left), before == fingerprint(model)]
    os.environ["HOROVOD_ELASTIC"] = (
        "1"  # a newcomer makes its optimizer while the others wait: nothing is compared then
    )
    try:
        pair = made(Compression.topk(0.01 + 0.01 * hvd.rank()))
        return {"flushed": flushed, "disagree": error_of(lambda: elastic.TorchState(*pair).sync())}
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def _split(vector: torch.Tensor, model: Any) -> tuple[torch.Tensor, ...]:
    return vector.split([p.numel() for p in model.parameters()])


def _stock_continues(model: Any, optimizer: Any, make: Any) -> bool:
    """Whether a stock optimizer takes the state over, momentum or second moment included."""
    plain = make(model)
    plain.load_state_dict(optimizer.state_dict())
    slots = [state.get("momentum_buffer", state.get("exp_avg_sq")) for state in plain.state.values()]
    return len(slots) == len(list(model.parameters())) and all(slot is not None and bool(slot.any()) for slot in slots)


def stock_and_back() -> dict[str, Any]:
    """A stock checkpoint in a compressed run; a compressed one without compression."""
    hvd.init()
    model = smooth_model()
    plain = momentum_sgd(model)
    x, y = next(iter(batches(1, 0)))
    for _ in range(3):
        plain.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        plain.step()
    other, optimizer = made(COMPRESSIONS["topk"])
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train(other, optimizer, 3)
    optimizer.flush()  # else residuals would be lost
    with _shared_folder() as folder:
        save_checkpoint(folder, other, optimizer, epoch=1)
        third, dense = made(Compression.none)
        extra = load_checkpoint(folder, third, dense)
        same = fingerprint(third) == fingerprint(other)
        train(third, dense, 3)
        save_checkpoint(folder, third, dense)
        fourth, again = made(COMPRESSIONS["topk"])
        load_checkpoint(folder, fourth, again)
    return {"same": same, "extra": extra, "back": fingerprint(fourth) == fingerprint(third)}


def to_the_dense_path() -> dict[str, Any]:
    """Residuals of tensors that went in 8 bits, in a run where they go by allreduce."""
    hvd.init()

    def plain(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made(Compression.dgc(**SMALL, dense_values="8bit"), plain)
    train_between(model, optimizer, 0, HALF)
    owed = {n: sum(s.tensors[n]["v"].astype(float) for s in _states(optimizer)) / hvd.size() for n in _biases(model)}
    with _shared_folder() as folder:
        save_checkpoint(folder, model, optimizer)
        model, optimizer = made(Compression.dgc(**SMALL, dense_values="fp32"), plain)
        load_checkpoint(folder, model, optimizer)
    kept = set(_biases(model)) - set(kept_by(optimizer).tensors)  # a bias of one element is coded without error
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (0 * model(torch.zeros(1, 32)).sum()).backward()
    optimizer.step()
    moved = {n: (before[n] - p.detach()).numpy().astype(float) for n, p in model.named_parameters()}
    scale = max(float(np.abs(v).max()) for v in owed.values())
    worst = max(float(np.abs(moved[n] - 0.1 * v).max()) for n, v in owed.items()) / (0.1 * scale)
    return {"kept": len(kept) < len(owed), "owed": scale, "worst": worst}


def _biases(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.ndim == 1]


def adam_after_a_flush() -> dict[str, float]:
    """AdamW trains on after a flush: how much is left of its second moments, and what another flush leaves in stock."""
    hvd.init()
    model = smooth_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(adamw, model.named_parameters(), compression=Compression.dgc(density=0.05))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def second() -> float:
        return float(session(optimizer).exchange.second["0.weight"].square().sum())

    train(model, optimizer, 30)
    before = second()
    optimizer.flush()
    train(model, optimizer, 1)
    after = second()
    optimizer.flush()
    return {"kept": after / before, "steps": float(optimizer.state[model[0].weight]["step"])}
