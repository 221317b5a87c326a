"""``model.fit`` on several ranks: replicas, dense against one process, density 1 against dense, every way to run."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, WarmupSchedule
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import (
    alone,
    distance,
    everything,
    fingerprint,
    fit,
    fitted,
    keras,
    momentum_sgd,
    shard,
    smooth_model,
)

CHOICES = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "dgc": Compression.dgc(0.05),
    "gaussian": Compression.gaussian(0.05),
    "dgc, warm-up": Compression.dgc(0.01, warmup=WarmupSchedule(steps=12)),
    "dgc, clipped, per tensor": Compression.dgc(0.05, clip_norm=0.5, scope="tensor"),
}


def replicas() -> dict[str, Any]:
    """Hash of the weights after ``fit``, and what each choice sent."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, compression in CHOICES.items():
        model = fitted(momentum_sgd(), compression)
        found[name] = {"weights": fingerprint(model), "stats": model.optimizer.compression_stats()}
    return found


def dense_is_one_process() -> dict[str, float]:
    """Dense training on N ranks against one process on the concatenated batch."""
    hvd.init()
    return {
        "sgd": distance(alone(momentum_sgd()), fitted(momentum_sgd(), Compression.none)),
        "adam": distance(alone(_adam()), fitted(_adam(), Compression.none)),
        "fp16": distance(alone(momentum_sgd()), fitted(momentum_sgd(), Compression.fp16)),
    }


def _adam(**options: Any) -> Any:
    return keras.optimizers.Adam(3e-3, **options)


def dense_options() -> dict[str, float]:
    """The same for the options of optimizers, and for the arguments of ours."""
    hvd.init()
    optimizers = {
        "sgd, nesterov, decay": lambda: momentum_sgd(nesterov=True, weight_decay=1e-2),
        "adamw, schedule": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(3e-3, 10, 0.5)),
        "rmsprop, global_clipnorm": lambda: keras.optimizers.RMSprop(1e-3, global_clipnorm=0.5),
        "sgd, clipnorm, ema": lambda: momentum_sgd(clipnorm=0.5, use_ema=True),
        "adam, accumulation": lambda: _adam(gradient_accumulation_steps=2),
    }
    found = {name: distance(alone(make()), fitted(make(), Compression.none)) for name, make in optimizers.items()}
    plain, twice = alone(momentum_sgd()), alone(momentum_sgd(gradient_accumulation_steps=2))
    arguments: dict[str, Any] = {"predivide": {"gradient_predivide_factor": 2.0}, "groups": {"groups": 2}}
    for name, given in arguments.items():
        found[name] = distance(plain, fitted(momentum_sgd(), Compression.none, **given))
    summed = momentum_sgd(learning_rate=0.05 / hvd.size())
    found["sum"] = distance(plain, fitted(summed, Compression.none, op=hvd.Sum))
    passes = {"backward_passes_per_step": 2}
    found["passes averaged"] = distance(
        twice, fitted(momentum_sgd(), Compression.none, average_aggregated_gradients=True, **passes)
    )
    found["passes summed"] = distance(twice, fitted(momentum_sgd(learning_rate=0.025), Compression.none, **passes))
    return found


def density_one_is_dense() -> dict[str, float]:
    """Density 1, no masking, fp32, constant learning rate: SGD is dense SGD."""
    hvd.init()
    dense, nesterov = alone(momentum_sgd()), {"nesterov": True, "weight_decay": 1e-2}
    return {
        "wrong on purpose": distance(dense, fitted(momentum_sgd(), Compression.dgc(0.05))),
        "plain": distance(dense, fitted(momentum_sgd(), everything())),
        "nesterov, decay": distance(alone(momentum_sgd(**nesterov)), fitted(momentum_sgd(**nesterov), everything())),
    }


def density_one_options() -> dict[str, float]:
    """The same by every argument and way to run."""
    hvd.init()
    dense = alone(momentum_sgd())
    runs: dict[str, dict[str, Any]] = {
        "eager": {"compiled": {"run_eagerly": True}},
        "steps_per_execution": {"compiled": {"steps_per_execution": 4}},
        "predivide": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": 2},
    }
    found = {name: distance(dense, fitted(momentum_sgd(), everything(), **given)) for name, given in runs.items()}
    for name, fields in {
        "many buckets": {"bucket_bytes": 4096},
        "gaussian": {"rule": "gaussian"},
        "no momentum correction": {"momentum_correction": False},
    }.items():
        found[name] = distance(dense, fitted(momentum_sgd(), everything(**fields)))
    summed = momentum_sgd(learning_rate=0.05 / hvd.size())
    found["sum"] = distance(dense, fitted(summed, everything(), op=hvd.Sum))
    options: dict[str, dict[str, Any]] = {
        "no momentum": {"momentum": 0.0},
        "ema": {"use_ema": True, "ema_overwrite_frequency": 3},
        "accumulation": {"gradient_accumulation_steps": 2},
    }
    for name, given in options.items():
        found[name] = distance(alone(momentum_sgd(**given)), fitted(momentum_sgd(**given), everything()))
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    twice = alone(momentum_sgd(gradient_accumulation_steps=2))
    found["passes averaged"] = distance(twice, fitted(momentum_sgd(), everything(), **passes))
    return found


def _own_step(model: Any, optimizer: Any) -> Any:
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def own_loops() -> dict[str, Any]:
    """A custom loop, in a tf.function that builds the optimizer and eagerly, is ``fit``."""
    hvd.init()
    by_fit = fitted(momentum_sgd(), Compression.dgc(0.05), epochs=1)
    found: dict[str, Any] = {}
    for name in ("graph", "eager"):
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.05))
        step = _own_step(model, optimizer)
        run = tf.function(step) if name == "graph" else step
        x, y = shard(hvd.rank())
        for start in range(0, len(x), 16):
            run(tf.constant(x[start : start + 16]), tf.constant(y[start : start + 16]))
        found[name] = {"distance": distance(by_fit, model), "weights": fingerprint(model)}
    return found


def kinds_of_optimizer() -> dict[str, Any]:
    """What the wrapped optimizer is for Keras: class, config, isinstance, dense Lion, names of ours."""
    hvd.init()
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    plain = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, clipvalue=0.5)
    wrapped = DistributedOptimizer(plain, compression=Compression.dgc(0.05), op=hvd.Sum)
    again = type(wrapped).from_config(wrapped.get_config())
    model = fit(smooth_model(), again, epochs=1)
    sums = session(again).settings.op == hvd.Sum
    return {
        "same class": (type(wrapped).__name__, type(wrapped).__module__, isinstance(wrapped, keras.optimizers.SGD)),
        "config is kept": wrapped.get_config() == plain.get_config(),
        "again": (type(again).__name__, sums, again.get_config() == plain.get_config()),
        "again trains": model.optimizer.compression_stats()["selected"] > 0,
        "lion": fingerprint(fitted(keras.optimizers.Lion(1e-3), Compression.topk(0.05))),
        "adafactor": fingerprint(fitted(keras.optimizers.Adafactor(1e-3), Compression.none)),
        "adam": fingerprint(fitted(keras.optimizers.AdamW(3e-3, weight_decay=1e-2), Compression.dgc(0.05))),
    }
