"""Saving and loading what ranks keep beside a Keras model, on real ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from dgc_horovod import WarmupSchedule
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCHES, everything, fingerprint, fit, momentum_sgd, smooth_model, weights

_SMALL: dict[str, Any] = {"density": 0.02, "min_numel": 16, "bucket_bytes": 12_000}
COMPRESSIONS = {
    "dgc, warm-up": Compression.dgc(**_SMALL, warmup=WarmupSchedule(steps=3 * BATCHES // 2)),
    "clipped, per tensor": Compression.dgc(**_SMALL, clip_norm=0.5, scope="tensor"),
    "gaussian, 4bit": Compression.dgc(**_SMALL, rule="gaussian", values="4bit"),
    "topk": Compression.topk(**_SMALL),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": momentum_sgd,
    "Nesterov, decay": lambda: momentum_sgd(nesterov=True, weight_decay=1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(3e-3),
}


RESUMED: dict[str, Any] = {
    **OPTIMIZERS,
    "AdamW, rate rises": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.PolynomialDecay(1e-3, 2 * BATCHES, 4e-3)
    ),
}


def _optimizer(compression: Any, name: str = "SGD", **more: Any) -> Any:
    return DistributedOptimizer(RESUMED[name](), compression=compression, **more)


def _shared_folder(name: str) -> Path:
    """A new folder under one name on every rank."""
    folder = Path(tempfile.gettempdir(), f"dgc-keras-state-{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}-{name}")
    return folder


def resume() -> dict[str, Any]:
    """A run that is stopped and resumed in the middle, beside one that is not: after 104 of 200 steps, and shorter."""
    hvd.init()
    found = {"200 steps, SGD": _resumed(COMPRESSIONS["dgc, warm-up"], "SGD", 13, 25)}
    found["clipped, per tensor, AdamW"] = _resumed(COMPRESSIONS["clipped, per tensor"], "AdamW, rate rises", 1, 2)
    return found


def resume_others() -> dict[str, Any]:
    """The same of what `resume` leaves out."""
    hvd.init()
    pairs = [(name, "SGD") for name in COMPRESSIONS] + [
        ("dgc, warm-up", "AdamW, rate rises"),
        ("clipped, per tensor", "Nesterov, decay"),
        ("topk", "AdamW"),
    ]
    return {f"{name}, {other}": _resumed(COMPRESSIONS[name], other, 1, 2) for name, other in pairs}


def _resumed(compression: Any, optimizer_name: str, half_way: int, epochs: int) -> dict[str, Any]:
    whole = fit(smooth_model(), _optimizer(compression, optimizer_name), epochs)
    half = fit(smooth_model(), _optimizer(compression, optimizer_name), half_way)
    folder = _shared_folder("resume")
    save_checkpoint(folder, half, epoch=1)
    resumed, optimizer = smooth_model(seed=5), _optimizer(compression, optimizer_name)
    extra = load_checkpoint(folder, resumed, optimizer)
    at_half = fingerprint(resumed) == fingerprint(half)
    fit(resumed, optimizer, epochs - half_way)
    # in the run that was saved, too: nothing of it is in the way
    load_checkpoint(folder, half)
    fit(half, half.optimizer, epochs - half_way)
    without, emptied = smooth_model(), _optimizer(compression, optimizer_name)
    load_checkpoint(folder, without, emptied, residuals="ignored")
    fit(without, emptied, epochs - half_way)
    _remove(folder)
    return {
        "same": [at_half, fingerprint(resumed) == fingerprint(whole), fingerprint(half) == fingerprint(whole)],
        "other": fingerprint(without) != fingerprint(whole), "extra": extra, "fingerprint": fingerprint(resumed),
        "rate": _remembered(optimizer), "last rate": _rate_before(optimizer),
    }  # fmt: skip


def _remembered(optimizer: Any) -> float:
    """The learning rate that Adam's second moment knows, of its last step."""
    second = session(optimizer).buckets.second.saved()
    return float(next(iter(second.values()))[3]) if second else 0.0


def _rate_before(optimizer: Any) -> float:
    rate = optimizer._learning_rate
    return float(rate(optimizer.iterations - 1) if callable(rate) else rate)


def _remove(folder: Path) -> None:
    hvd.allreduce(np.zeros(1, np.float32), name="done")
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def flushed() -> dict[str, Any]:
    """After a flush nothing is left, and nothing has been lost."""
    hvd.init()
    found = {}
    compression = Compression.dgc(**_SMALL, dense_values="8bit")
    for name in OPTIMIZERS:
        for op_name, op in (("average", hvd.Average), ("sum", hvd.Sum)):
            model = fit(smooth_model(), _optimizer(compression, name, op=op), 1)
            optimizer = model.optimizer
            before = [weight.numpy().astype(float) for weight in model.weights]
            states = hvd.allgather_object(optimizer.residual_state_dict(), name="states")
            optimizer.flush()
            rate, worst, left = float(optimizer.learning_rate), 0.0, 0.0
            for i, weight in enumerate(model.weights):
                if weight.shape.rank == 2:
                    owed = sum(state["tensors"][str(i)]["v"].astype(float) for state in states) * rate
                    owed = owed / len(states) if op == hvd.Average else owed
                    moved = (before[i] - weight.numpy()).ravel()
                    worst = max(worst, float(np.abs(moved - owed).max() / np.abs(owed).max()))
            for arrays in optimizer.residual_state_dict()["tensors"].values():
                for part, x in arrays.items():
                    if part == "u" or (part == "v" and name != "AdamW") or x.size > 96:
                        left = max(left, float(np.abs(x).max()))
            slots = [
                float(np.abs(slot.numpy()).max()) for slot in getattr(optimizer, "_velocities", optimizer.variables[2:])
            ]
            fit(model, optimizer, 1)
            found[f"{name}, {op_name}"] = {
                "worst": worst, "left": left, "slots": min(slots), "fingerprint": fingerprint(model),
                "finite": all(bool(np.isfinite(weight.numpy()).all()) for weight in model.weights),
            }  # fmt: skip
    return found


def flush_is_linear() -> dict[str, Any]:
    """Where all is sent at once there is nothing to flush but momentum, and that is moved, not changed."""
    hvd.init()
    distances = {}
    for name in ("SGD", "Nesterov, decay"):
        never, often = (
            fit(smooth_model(), DistributedOptimizer(OPTIMIZERS[name](), compression=everything()), 1) for _ in range(2)
        )
        for _ in range(2):
            often.optimizer.flush()
            fit(never, never.optimizer, 1)
            fit(often, often.optimizer, 1)
        distances[name] = float(np.abs(weights(never) - weights(often)).max())
    return distances


def saved_after_a_flush() -> dict[str, Any]:
    """What a flush has put into the optimizer's slots is taken over by the run that is resumed, too."""
    hvd.init()
    found = {}
    for number, name in enumerate(OPTIMIZERS):
        model = fit(smooth_model(), _optimizer(COMPRESSIONS["clipped, per tensor"], name), 1)
        model.optimizer.flush()
        folder = _shared_folder(f"flushed{number}")
        save_checkpoint(folder, model)
        resumed, optimizer = smooth_model(seed=5), _optimizer(COMPRESSIONS["clipped, per tensor"], name)
        load_checkpoint(folder, resumed, optimizer)
        found[name] = fingerprint(fit(resumed, optimizer, 1)) == fingerprint(fit(model, model.optimizer, 1))
        _remove(folder)
    return found


def errors() -> dict[str, Any]:
    """Another model, another method, a missing file: the same error on every rank."""
    hvd.init()
    compression = COMPRESSIONS["clipped, per tensor"]
    model = fit(smooth_model(), _optimizer(compression), 1)
    folder = _shared_folder("errors")
    save_checkpoint(folder, model)
    other = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(3)])
    found = {
        "other model": error_of(lambda: load_checkpoint(folder, other, _optimizer(compression))),
        "other method": error_of(lambda: load_checkpoint(folder, smooth_model(), _optimizer(COMPRESSIONS["topk"]))),
        "extra": error_of(lambda: save_checkpoint(folder, model, what=hvd)),
        "no name": error_of(lambda: save_checkpoint("" if hvd.rank() else folder, model)),
        "no dict": error_of(lambda: model.optimizer.load_residual_state_dict(None)),
        "not distributed": error_of(lambda: save_checkpoint(folder, model, keras.optimizers.SGD())),
    }
    hvd.allreduce(np.zeros(1, np.float32), name="before")
    if hvd.rank() == 0:
        next(folder.glob("*-rank1.npz")).unlink()
    hvd.allreduce(np.zeros(1, np.float32), name="gone")
    found["missing"] = error_of(lambda: load_checkpoint(folder, smooth_model(), _optimizer(compression)))
    load_checkpoint(folder, smooth_model(), _optimizer(compression), residuals="if sound")
    _remove(folder)
    return found


def save_for_others() -> dict[str, Any]:
    """Train and save, to be loaded by another number of ranks."""
    hvd.init()
    model = fit(smooth_model(), _optimizer(COMPRESSIONS["clipped, per tensor"]), 1)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model)
    return {"state": _as_lists(model.optimizer)}


def load_of_others() -> dict[str, Any]:
    """Load what another number of ranks has saved, and go on."""
    hvd.init()
    model, optimizer = smooth_model(seed=5), _optimizer(COMPRESSIONS["clipped, per tensor"])
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    state = _as_lists(optimizer)
    fit(model, optimizer, 1)
    return {"state": state, "fingerprint": fingerprint(model)}


def _as_lists(optimizer: Any) -> dict[str, Any]:
    tensors = optimizer.residual_state_dict()["tensors"]
    return {name: {part: x.tolist() for part, x in arrays.items()} for name, arrays in tensors.items()}
