"""What scripts do with a Keras optimizer beyond the obvious: each has once gone wrong without a word."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, WarmupSchedule, callbacks, load_model
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import (
    BATCH,
    EVERYTHING,
    everything,
    fingerprint,
    fit,
    keras,
    momentum_sgd,
    shard,
    smooth_model,
)
from tests.helpers.logs import messages


def _pair() -> list[Any]:
    return [keras.Variable(tf.ones((20, 30))), keras.Variable(tf.ones((30, 20)))]


def _rank_gradients(steps: int) -> list[list[Any]]:
    rng = np.random.default_rng(hvd.rank())
    return [[tf.constant(rng.standard_normal(s), tf.float32) for s in ((20, 30), (30, 20))] for _ in range(steps)]


def subsets() -> dict[str, Any]:
    """Density 1 equals dense whichever variables are given, in whatever order, as whatever iterables."""
    hvd.init()
    orders: dict[str, Any] = {
        "all": lambda step: [0, 1],
        "other order every second step": lambda step: [0, 1] if step % 2 else [1, 0],
        "one of them every second step": lambda step: [0, 1] if step % 2 else [0],
        "in turns": lambda step: [step % 2],
    }
    found: dict[str, Any] = {}
    for name, order in orders.items():
        results = []
        for compression in (Compression.none, everything()):
            variables = _pair()
            optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
            optimizer.build(variables)
            for step, gradients in enumerate(_rank_gradients(6)):
                chosen = order(step)
                optimizer.apply((gradients[i] for i in chosen), itertools.chain(variables[i] for i in chosen))
            results.append(np.concatenate([variable.numpy().ravel() for variable in variables]))
        found[name] = float(np.abs(results[0] - results[1]).max())
        found[f"{name}: moved"] = float(np.abs(results[0] - 1).max())
    return found


def empty() -> dict[str, Any]:
    """Variables without an element, first, in the middle, alone: density 1 equals dense."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, shapes in {
        "first": [(0, 5), (20, 30), (7,)],
        "between": [(20, 30), (0,), (7,)],
        "alone": [(0, 5)],
    }.items():
        results = []
        for compression in (Compression.none, everything(check_every=1), everything(scope="tensor", clip_norm=1e9)):
            variables = [keras.Variable(tf.ones(shape)) for shape in shapes]
            optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
            for _ in range(3):
                optimizer.apply([tf.fill(shape, 1.0 + hvd.rank()) for shape in shapes], variables)
            results.append(np.concatenate([variable.numpy().ravel() for variable in variables]))
        found[name] = [float(np.abs(results[0] - other).max(initial=0)) for other in results[1:]]
        found[f"{name}: moved"] = float(np.abs(results[0] - 1).max(initial=0))
    return found


def reloaded() -> dict[str, bool]:
    """After a checkpoint was loaded no set of variables brings back what another had kept."""
    hvd.init()
    variables, steps = _pair(), _rank_gradients(3)
    states = []
    for history in (True, False):
        optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.1, min_numel=1))
        optimizer.build(variables)
        if history:
            optimizer.apply(steps[0], variables)
            optimizer.apply(steps[1][:1], variables[:1])
            optimizer.set_weights([variable.numpy() for variable in optimizer.variables])
        optimizer.apply(steps[2], variables)
        states.append(session(optimizer).exchanges[0].steps.buckets.state_arrays())
    gone = weakref.ref(optimizer)
    del optimizer
    return {
        "gone at once": gone() is None,
        **{
            f"{name} {part}": bool(np.array_equal(states[0][name][part], states[1][name][part]))
            for name in states[0]
            for part in ("u", "v")
        },
    }


def after_a_failure() -> dict[str, Any]:
    """A step that fails in the backward pass, caught by the script: nothing is lost and nothing applied twice."""
    hvd.init()
    variables, given = _pair(), [np.zeros((20, 30)), np.zeros((30, 20))]
    compression = Compression.topk(0.1, values="fp32", min_numel=1, bucket_bytes=2400)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, op=hvd.Sum)

    @tf.function
    def step(first: Any, second: Any, row: Any) -> None:
        factor = tf.reduce_sum(tf.gather(tf.ones(3), row))  # fails on the host where there is no such row
        optimizer.apply([first * factor, second * factor], variables)

    failures = 0
    for number, gradients in enumerate(_rank_gradients(8)):
        row = 7 if number == 4 else 0
        try:
            step(*gradients, row)
        except tf.errors.InvalidArgumentError:
            failures += 1
            time.sleep(0.5)
            continue
        for total, gradient in zip(given, gradients, strict=True):
            total += gradient.numpy()
    state = session(optimizer).buckets.state_arrays()
    error = 0.0
    for i, (variable, total) in enumerate(zip(variables, given, strict=True)):
        kept = next(arrays["v"] for name, arrays in state.items() if name.startswith(f"{i} ")).reshape(variable.shape)
        everyone = hvd.allreduce(tf.constant(total - kept), op=hvd.Sum, name=f"everyone.{i}").numpy()
        error = max(error, float(np.abs((1 - variable.numpy()) - everyone).max()))
    return {"failures": failures, "lost": error}


def frozen() -> dict[str, Any]:
    """How far a layer moves while it is frozen, and afterwards without a gradient: what had waited is gone."""
    hvd.init()
    found: dict[str, Any] = {}
    zeros, topk = [tf.zeros((20, 30)), tf.zeros((30, 20))], Compression.topk(0.1, min_numel=1)
    for name, leave_out in (("left out", True), ("no gradient", False)):
        for kind in ("sgd", "adam", "tape"):
            variables = _pair()
            optimizer = {"sgd": momentum_sgd, "adam": keras.optimizers.Adam, "tape": keras.optimizers.SGD}[kind]()
            if kind != "tape":
                optimizer = DistributedOptimizer(optimizer, compression=Compression.dgc(0.1, min_numel=1))

            def step(gradients: list[Any], of: list[Any], kind: str = kind, optimizer: Any = optimizer) -> None:
                if kind == "tape":
                    with tf.GradientTape() as tape:
                        pairs = zip(gradients, of, strict=True)
                        loss = tf.add_n([tf.reduce_sum(g * v.value) for g, v in pairs if g is not None])
                    gradients = DistributedGradientTape(tape, compression=topk).gradient(loss, of)
                optimizer.apply(gradients, of)

            for gradients in _rank_gradients(5):
                step(gradients, variables)
            variables[0].trainable = False
            before = variables[0].numpy()
            for gradients in _rank_gradients(5):
                step(gradients[1:] if leave_out else [None, gradients[1]], variables[1:] if leave_out else variables)
            moved = [float(np.abs(variables[0].numpy() - before).max())]
            variables[0].trainable = True
            for _ in range(8 if kind != "adam" else 0):  # Adam's moments go on, as in stock
                step(zeros, variables)
            moved.append(float(np.abs(variables[0].numpy() - before).max()))
            found[f"{kind}, {name}"] = moved
    model = fit(smooth_model(), DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.01)), 1)
    model.layers[1].trainable = False
    before = model.layers[1].kernel.numpy()
    model.compile(model.optimizer, "mse")
    fit(model, model.optimizer, 1)
    found["fit"] = [float(np.abs(model.layers[1].kernel.numpy() - before).max()), 0.0]
    return found


def tapes_again() -> dict[str, Any]:
    """One tape object for every step has one exchange; what belongs to a model that is gone goes too."""
    hvd.init()
    variable = tf.Variable(tf.random.normal((40, 50)))
    tape = DistributedGradientTape(tf.GradientTape(), compression=Compression.topk(0.01, min_numel=1))
    for _ in range(5):
        with tape:
            loss = tf.reduce_sum(variable**2)
        tape.gradient(loss, [variable])
    distribution = session(tape)
    found = {"sets": len(distribution.exchanges), "steps": tape.compression_stats()["steps"]}
    found["jacobian"] = error_of(lambda tape=tape: tape.jacobian(tf.ones(1), []))
    gone = weakref.ref(distribution.exchanges[0])
    del variable, loss, tape
    gc.collect()
    return {**found, "after": len(distribution.exchanges), "freed": gone() is None}


def eager_scaling() -> dict[str, Any]:
    """A LossScaleOptimizer eagerly, and everything under run_functions_eagerly."""
    hvd.init()
    variable = keras.Variable(tf.ones((20, 30)))
    scaler = keras.optimizers.LossScaleOptimizer(momentum_sgd())
    optimizer = DistributedOptimizer(scaler, compression=everything())
    for _ in range(2):
        optimizer.apply([tf.fill((20, 30), 2.0**15)], [variable])
    optimizer.apply([tf.fill((20, 30), float("inf") if hvd.rank() else 1.0)], [variable])
    found = {"weights": float(variable.numpy().mean()), "scale": float(optimizer.dynamic_scale.numpy())}
    tf.config.run_functions_eagerly(True)
    try:
        for name, compression in {"none": Compression.none, "dgc": Compression.dgc(0.05)}.items():
            model = fit(smooth_model(), DistributedOptimizer(momentum_sgd(), compression=compression), 1)
            found[name] = fingerprint(model)
    finally:
        tf.config.run_functions_eagerly(False)
    return found


def local_variables() -> dict[str, Any]:
    """What is left to each rank: embeddings, clipped like the rest, summed over passes like the rest."""
    hvd.init()
    table, weight = keras.Variable(tf.ones((6, 2))), keras.Variable(tf.ones((30, 40)))
    found: dict[str, Any] = {}
    for name, compression in {"none": Compression.none, "topk": Compression.topk(1.0, **EVERYTHING)}.items():
        for options in ({}, {"clipnorm": 1.0}, {"clipvalue": 0.1}):
            table.assign(tf.ones((6, 2)))
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, **options), compression=compression)
            optimizer.register_local_var(table)
            rows = tf.IndexedSlices(tf.fill((1, 2), 4.0 + hvd.rank()), tf.constant([hvd.rank()]), tf.constant([6, 2]))
            optimizer.apply([rows, tf.ones((30, 40))], [table, weight])
            found[f"{name} {options}"] = (1 - table.numpy()).ravel().round(5).tolist()
        table.assign(tf.ones((6, 2)))
        weight.assign(tf.ones((30, 40)))
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, backward_passes_per_step=2)
        optimizer.register_local_var(table)
        for _ in range(2):
            optimizer.apply([tf.ones((6, 2)), tf.ones((30, 40))], [table, weight])
        found[f"{name} passes"] = [float(table.numpy()[0, 0]), float(weight.numpy()[0, 0])]
    part = keras.Variable(tf.fill((6 + hvd.rank(), 2), 1.0 + hvd.rank()))  # a rank's share of a table
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=everything())
    optimizer.register_local_var(part)
    with messages() as said:
        optimizer.apply([tf.ones(part.shape), tf.ones((30, 40))], [part, weight])
    found["of other shapes"] = [float(part.numpy().mean()), [text for text in said if "DIFFERENT" in text]]
    return found


def passes_are_no_state() -> dict[str, Any]:
    """backward_passes_per_step leaves a stock file, before and after building, and is not broadcast between fits."""
    hvd.init()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in ("new", "built"):
            model, optimizer = smooth_model(), momentum_sgd()
            if name == "built":
                fit(model, optimizer, 1)
            fit(model, DistributedOptimizer(optimizer, backward_passes_per_step=2), 1)
            path = str(Path(folder, f"{name}{hvd.rank()}.keras"))
            model.save(path)
            stock, ours = keras.models.load_model(path), load_model(path, backward_passes_per_step=2)
            slots = [variable.numpy() for variable in model.optimizer.momentums]
            same = all(np.array_equal(a, b.numpy()) for a, b in zip(slots, stock.optimizer.momentums, strict=True))
            found[name] = [same, stock.optimizer.gradient_accumulation_steps, len(ours.optimizer.variables)]
        texts = [str(warning.message)[:150] for warning in said]
        found["said"] = [text for text in texts if "optimizer" in text]
    variable = keras.Variable(tf.zeros((4, 1)))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.apply([tf.fill((4, 1), 1.0 + hvd.rank())], [variable])
    found["variables"] = len(optimizer.variables)
    optimizer.apply([tf.fill((4, 1), 1.0 + hvd.rank())], [variable])
    found["summed"] = float(variable.numpy().mean())
    return found


@keras.saving.register_keras_serializable("mine")
class Own(keras.optimizers.SGD):
    """A user's optimizer."""


def models_and_optimizers() -> dict[str, Any]:
    """A registered class is saved under its name; copies are refused; a model that was not compiled again says so."""
    hvd.init()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"{hvd.rank()}.keras"))
        model = fit(smooth_model(), DistributedOptimizer(Own(0.01)), 1)
        model.save(path)
        found["own"] = type(keras.models.load_model(path).optimizer).__name__
    import copy
    import pickle

    for name, action in {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}.items():
        found[name] = error_of(lambda action=action: action(model.optimizer))
    scaler = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(momentum_sgd()))
    found["copy of a scaler"] = error_of(lambda: copy.copy(scaler))
    begin = callbacks.BroadcastGlobalVariablesCallback(0)
    plain = fit(smooth_model(), momentum_sgd(), 1)
    plain.optimizer = DistributedOptimizer(plain.optimizer)
    x, y = shard(hvd.rank())
    more = {"batch_size": BATCH, "verbose": 0, "shuffle": False, "callbacks": [begin]}
    found["not compiled again"] = error_of(lambda: plain.fit(x, y, **more))
    given = [momentum_sgd(), momentum_sgd()]
    wrapped = [DistributedOptimizer(each, compression=Compression.dgc(0.05)) for each in given]
    inside = [lambda: fit(smooth_model(), given[0] if hvd.rank() else wrapped[0], 1, [begin])]  # of one rank alone
    inside += [lambda: fit(smooth_model(), keras.optimizers.LossScaleOptimizer(given[1]), 1, [begin])]
    found["compiled with what was given"] = [error_of(each) for each in inside]
    with messages() as said:
        fit(smooth_model(), momentum_sgd(), 1, [begin])
        del wrapped, inside
        gc.collect()
        fit(smooth_model(), momentum_sgd(), 1, [begin])
    found["compiled with another"] = [text for text in said if "Compile the model with the returned" in text]
    selected = []
    for _ in range(2):
        warm = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2))
        optimizer = DistributedOptimizer(momentum_sgd(), compression=warm)
        selected.append(fit(smooth_model(), optimizer, 1, [begin]).optimizer.compression_stats()["selected"])
    found["warm-up of a second model"] = selected
    for name, base in {"one optimizer, twice": momentum_sgd(), "two optimizers": None}.items():
        models = [smooth_model(seed) for seed in (3, 4)]
        for each in models:
            wrapped = DistributedOptimizer(base or momentum_sgd(), compression=Compression.dgc(0.05))
            fit(each, wrapped, 1)
        found[name] = [[fingerprint(each), len(each.optimizer.variables)] for each in models]
    half = keras.Variable(tf.zeros((40, 50)), dtype="float16")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1e-4, momentum=0.9), compression=everything())
    for _ in range(4):
        optimizer.apply([tf.fill((40, 50), tf.constant(3e4, tf.float16))], [half])
    found["half"] = float(half.numpy().astype(np.float32).mean())
    names = callbacks.MetricAverageCallback()
    found["other metrics"] = error_of(lambda: names.on_epoch_end(0, {"mae" if hvd.rank() else "mape": 1.0}))
    return found


def own_methods() -> dict[str, Any]:
    """A function that a script has put over a method, on the object: before wrapping it is refused, after it works."""
    hvd.init()
    found: dict[str, Any] = {}

    def put(thing: Any, name: str) -> Any:
        before = getattr(thing, name)
        setattr(thing, name, lambda *given, **named: before(*given, **named))
        return thing

    scaler = keras.optimizers.LossScaleOptimizer
    given = {
        **{name: (put(momentum_sgd(), name), everything()) for name in ("apply_gradients", "update_step", "build")},
        **{name: (put(momentum_sgd(), name), Compression.none) for name in ("apply", "_clip_gradients")},
        "stateless_apply": (put(momentum_sgd(), "stateless_apply"), Compression.local(2)),
        "check_finite": (put(scaler(momentum_sgd()), "check_finite"), Compression.none),
        "inner apply": (scaler(put(momentum_sgd(), "apply")), Compression.none),
    }
    for name, (optimizer, compression) in given.items():
        found[name] = error_of(lambda o=optimizer, c=compression: DistributedOptimizer(o, compression=c))
    found["gradient"] = error_of(lambda: DistributedGradientTape(put(tf.GradientTape(), "gradient")))
    told = DistributedOptimizer(put(momentum_sgd(), "get_config"), compression=everything())
    found["kept"] = "get_config" in vars(told)
    for name in ("apply_gradients", "apply"):
        variable = keras.Variable(tf.zeros((40, 50)))
        optimizer = put(DistributedOptimizer(keras.optimizers.SGD(1.0), compression=everything()), name)
        optimizer.apply_gradients([(tf.fill((40, 50), 1.0 + 2.0 * hvd.rank()), variable)])
        found[f"{name} afterwards"] = float(variable.numpy().mean())
    return found


def slow_and_caught() -> dict[str, Any]:
    """A step slower than DGC_TIMEOUT is no reason to stop, nor is an error that the script has caught."""
    hvd.init()
    variable = keras.Variable(tf.ones((40, 50)))
    warmup = WarmupSchedule(epochs=4, first_density=0.04)
    compression = Compression.dgc(0.001, warmup=warmup, min_numel=1)
    optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
    optimizer.set_epoch(0)

    @tf.function
    def slow(gradient: Any) -> None:
        def wait(value: Any) -> Any:
            time.sleep(6)
            return value

        optimizer.apply([tf.numpy_function(wait, [gradient], tf.float32)], [variable])

    gradient = tf.constant(np.random.default_rng(0).standard_normal((40, 50)), tf.float32)
    found = {"slow": error_of(lambda: slow(tf.ensure_shape(gradient, (40, 50))))}
    optimizer.set_epoch(2 * hvd.rank())
    found["mismatch"] = error_of(lambda: optimizer.apply([gradient], [variable]))
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        hvd.allreduce(tf.ones(3), name="still here")
        time.sleep(0.5)
    optimizer.set_epoch(3)
    found["afterwards"] = error_of(lambda: optimizer.apply([gradient], [variable]))
    return found
