"""What stands around training: callbacks, broadcast, saved models, checkpoints, elastic state."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import broadcast_variables
from dgc_horovod.tensorflow.keras import (
    Compression,
    DistributedOptimizer,
    WarmupSchedule,
    callbacks,
    elastic,
    load_model,
)
from dgc_horovod.tensorflow.variables import own_variables
from tests.helpers.errors import error_of
from tests.helpers.keras_training import everything, fingerprint, fit, keras, momentum_sgd, shard, smooth_model, weights
from tests.helpers.logs import messages


def broadcast() -> dict[str, Any]:
    """Ranks that begin with other weights, dtypes that Horovod does not know, a model that its first batch builds."""
    hvd.init()
    rank = hvd.rank()
    dtypes = ["float32", "float16", "bfloat16", "int64", "uint32", "bool"]
    variables = [tf.Variable(tf.cast(tf.fill((3,), rank), dtype)) for dtype in dtypes]
    broadcast_variables([*variables, keras.Variable(np.full((2,), rank, "float32"))], root_rank=1)
    found: dict[str, Any] = {"dtypes": [float(tf.cast(v, tf.float32)[0]) for v in variables]}

    begin = callbacks.BroadcastGlobalVariablesCallback(0)
    with messages() as said:
        fit(smooth_model(seed=rank), DistributedOptimizer(momentum_sgd()), 1)
    found["forgotten"] = [text for text in said if "DIFFERENT WEIGHTS" in text]
    if rank == 0:
        smooth_model()  # Keras counts on: all names after this one differ between the ranks
    for name, compression in {"none": Compression.none, "dgc": Compression.dgc(0.05)}.items():
        model = smooth_model(seed=rank)
        optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3 * (rank + 1)), compression=compression)
        found[name] = fingerprint(fit(model, optimizer, 1, [begin]))
        found[f"{name}, rate"] = float(optimizer.learning_rate.numpy())
    keras.utils.set_random_seed(rank)
    unbuilt = keras.Sequential([keras.layers.Dense(64, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    with messages() as said:
        fit(unbuilt, DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.05)), 1, [begin])
    found["not forgotten"] = [text for text in said if "DIFFERENT WEIGHTS" in text]
    found["unbuilt"] = fingerprint(unbuilt)
    found["errors"] = {
        "arrays": error_of(lambda: broadcast_variables(unbuilt.get_weights(), 0)),
        "root": error_of(lambda: broadcast_variables(unbuilt.weights, 7)),
        "other shapes": error_of(lambda: broadcast_variables([tf.Variable(tf.ones(2 + rank))], 0)),
    }
    frozen = smooth_model(seed=rank)
    frozen.trainable = False  # as in Horovod's test of this callback
    fit(frozen, DistributedOptimizer(momentum_sgd()), 1, [begin])
    found["all frozen"] = fingerprint(frozen)
    local = smooth_model(seed=rank)
    before = local.weights[0].numpy()
    start = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local.weights[0])
    optimizer = DistributedOptimizer(momentum_sgd(learning_rate=1e-9))
    fit(local, optimizer, 1, [start])
    found["local is kept"] = bool(np.allclose(before, local.weights[0].numpy(), atol=1e-4))
    return found


def schedules() -> dict[str, Any]:
    """Learning rates and averaged metrics as ``fit`` sees them; the epoch reaches a density warm-up."""
    hvd.init()
    rates: list[float] = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def run(*ours: Any, epochs: int = 2, compression: Any = Compression.none) -> Any:
        rates.clear()
        model = smooth_model()
        fit(model, DistributedOptimizer(momentum_sgd(learning_rate=0.04), compression=compression), epochs,
            [*ours, Recorder()])  # fmt: skip
        return model

    model = run(callbacks.LearningRateWarmupCallback(0.04, warmup_epochs=2), callbacks.MetricAverageCallback())
    found: dict[str, Any] = {"warm-up": list(rates), "history": model.history.history}
    run(callbacks.LearningRateScheduleCallback(0.04, lambda epoch: 0.5**epoch))
    found["staircase"] = list(rates)
    run(callbacks.LearningRateScheduleCallback(0.04, 0.1, start_epoch=1, staircase=False), epochs=3)
    found["decay"] = list(rates)
    start = callbacks.BroadcastGlobalVariablesCallback(0)
    warm = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2), dense_values="fp32")
    stats = run(start, epochs=3, compression=warm).optimizer.compression_stats()
    found["selected"] = stats["selected"] / stats["elements"]
    found["errors"] = {
        "no epoch": error_of(lambda: run(compression=warm)),
        "rate": error_of(lambda: callbacks.LearningRateWarmupCallback(-1.0)),
    }
    found["velocity"] = _velocity()
    return found


def _velocity() -> float:
    """Goyal et al.: after a change of the rate, velocity / rate is what it was."""
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(learning_rate=0.04))
    fit(model, optimizer, 1)
    before = optimizer.momentums[0].numpy() / 0.04
    schedule = callbacks.LearningRateScheduleCallback(0.04, lambda epoch: 0.25)
    schedule.set_model(model)
    schedule.on_epoch_begin(0)
    schedule.on_train_batch_begin(0)
    return float(np.abs(optimizer.momentums[0].numpy() / 0.01 - before).max())


def saved() -> dict[str, Any]:
    """A saved model is a stock one; loaded by us it trains on; a restored checkpoint empties u and v, and says so."""
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"{hvd.rank()}.keras"))
        return {**_loaded(path), **_resumed(path), **_restored(str(Path(folder, f"checkpoint{hvd.rank()}")))}


def _loaded(path: str) -> dict[str, Any]:
    model = smooth_model()
    fit(model, DistributedOptimizer(keras.optimizers.Adam(1e-3), compression=Compression.dgc(0.05)), 1)
    model.save(path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stock = keras.models.load_model(path)
        ours = load_model(path, compression=Compression.dgc(0.05))
    return {
        "warnings": [str(warning.message)[:200] for warning in said],
        "stock": (type(stock.optimizer).__mro__[0].__module__, int(stock.optimizer.iterations)),
        "same weights": fingerprint(stock) == fingerprint(model) == fingerprint(ours),
        "ours": (int(ours.optimizer.iterations), hasattr(ours.optimizer, "compression_stats")),
        "trains on": fingerprint(fit(ours, ours.optimizer, 1)),
    }


def _resumed(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dense = smooth_model()
    fit(dense, DistributedOptimizer(momentum_sgd()), 2)
    whole, half = fingerprint(dense), smooth_model()
    fit(half, DistributedOptimizer(momentum_sgd()), 1)
    half.save(path)
    found["dense resumes exactly"] = fingerprint(fit(resumed := load_model(path), resumed.optimizer, 1)) == whole
    resumed = load_model(path, compression=everything())
    fit(resumed, resumed.optimizer, 1)
    found["compressed takes the velocity over"] = float(np.abs(weights(resumed) - weights(dense)).max())
    for name, make in {"sgd": momentum_sgd, "adam": lambda: keras.optimizers.Adam(3e-3)}.items():
        model = smooth_model()
        fit(model, DistributedOptimizer(make(), compression=everything()), 1)
        model.save(path)
        loaded = load_model(path, compression=everything())
        after = [weights(fit(each, each.optimizer, 1)) for each in (model, loaded)]
        found[f"{name} goes on as if not saved"] = float(np.abs(after[0] - after[1]).max())
    return found


def _restored(path: str) -> dict[str, Any]:
    optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.05))
    model = smooth_model()
    fit(model, optimizer, 1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    written = checkpoint.write(path)
    at_checkpoint = weights(model)
    fit(model, optimizer, 1)
    checkpoint.read(written).assert_existing_objects_matched()
    restored = bool(np.array_equal(at_checkpoint, weights(model)))
    with messages() as logged:
        fit(model, optimizer, 1)
    said = [text for text in logged if "checkpoint was loaded" in text]
    return {"restored": restored, "said": said, "after": fingerprint(model)}


def state() -> dict[str, Any]:
    """``KerasState`` saves, restores and sends weights and optimizer."""
    hvd.init()
    model = smooth_model(seed=hvd.rank())
    fit(model, DistributedOptimizer(keras.optimizers.Adam(1e-3)), 1)
    kept = elastic.KerasState(model, batch=3 + hvd.rank())
    before = fingerprint(model)
    fit(model, model.optimizer, 1)
    moved = fingerprint(model)
    kept.restore()
    found = {"moved": moved != before, "restored": fingerprint(model) == before, "batch": kept.batch}
    kept.sync()
    return {**found, "synced": fingerprint(model), "synced batch": kept.batch,
            "iterations": int(model.optimizer.iterations), "accumulators": _accumulators_go_back(),
            "disagree": _newcomer_with_another_config(), "flushed": _flushed_on_commit()}  # fmt: skip


def _accumulators_go_back() -> bool:
    """What this rank has summed of half a step is its own, and goes back with the weights."""
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(gradient_accumulation_steps=2), compression=everything())
    model.compile(optimizer, "mse")
    x, y = shard(hvd.rank())
    model.train_on_batch(x[:16], y[:16])
    kept, at_commit = elastic.KerasState(model), [a.numpy() for a in own_variables(optimizer)]
    kept.sync()
    for _ in range(2):
        model.train_on_batch(x[16:32], y[16:32])
    moved = any(np.any(a.numpy() != b) for a, b in zip(own_variables(optimizer), at_commit, strict=True))
    kept.restore()
    back = all(np.array_equal(a.numpy(), b) for a, b in zip(own_variables(optimizer), at_commit, strict=True))
    return moved and back and any(a.any() for a in at_commit)


def _flushed_on_commit() -> list[bool]:
    """After a commit nothing is left; another one, with no step between, changes nothing, and none waits for it."""
    found = []
    for compression in (Compression.dgc(0.05, min_numel=16), Compression.topk(0.05, min_numel=16)):
        model = smooth_model()
        model.compile(DistributedOptimizer(momentum_sgd(weight_decay=0.1), compression=compression), "mse")
        kept = elastic.KerasState(model, flush_on_commit=True)
        kept.sync()
        kept.commit()
        fit(model, model.optimizer, 1)
        kept.commit()
        tensors = model.optimizer.residual_state_dict()["tensors"].values()
        before = fingerprint(model), int(model.optimizer.iterations)
        kept.commit()
        found += [not any(t["v"].any() for t in tensors if t["v"].size > 96)]
        found += [before == (fingerprint(model), int(model.optimizer.iterations))]
    return found


def _newcomer_with_another_config() -> str:
    model = smooth_model()
    model.compile(DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.1 + 0.1 * hvd.rank())), "mse")
    return error_of(elastic.KerasState(model).sync)
