"""Habits of scripts that had once trained wrongly, leaked or crashed under the TensorFlow adapter, without a word."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, WarmupSchedule, callbacks, load_model
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import (
    BATCH,
    fingerprint,
    fit,
    fitted,
    keras,
    momentum_sgd,
    shard,
    smooth_model,
    weights,
)
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import EVERYTHING, everything

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def _wrapped(compression: Any = None, **options: Any) -> Any:
    """SGD with momentum, and `options`."""
    return DistributedOptimizer(momentum_sgd(**options), compression=compression or everything())


def _pair() -> list[Any]:
    return [keras.Variable(tf.ones((20, 30))), keras.Variable(tf.ones((30, 20)))]


def _rank_gradients(steps: int) -> list[list[Any]]:
    rng = np.random.default_rng(hvd.rank())
    return [[tf.constant(rng.standard_normal(s), tf.float32) for s in ((20, 30), (30, 20))] for _ in range(steps)]


ORDERS: dict[str, Callable[[int], list[int]]] = {
    "all": lambda step: [0, 1],
    "other order every second step": lambda step: [0, 1] if step % 2 else [1, 0],
    "one of them every second step": lambda step: [0, 1] if step % 2 else [0],
    "in turns": lambda step: [step % 2],
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_set_of_variables_in_any_order(order):
    """Density 1 equals dense whichever variables are given, as whatever iterables."""
    ends = []
    for compression in (Compression.none, everything()):
        variables, optimizer = _pair(), _wrapped(compression)
        optimizer.build(variables)
        for step, gradients in enumerate(_rank_gradients(6)):
            chosen = ORDERS[order](step)
            optimizer.apply((gradients[i] for i in chosen), itertools.chain(variables[i] for i in chosen))
        ends.append(weights(variables))
    assert np.abs(ends[0] - 1).max() > 0.1 and np.abs(ends[0] - ends[1]).max() < 1e-5


@pytest.mark.parametrize(
    ("shapes", "moved"), [([(0, 5), (20, 30), (7,)], 0.1), ([(20, 30), (0,), (7,)], 0.1), ([(0, 5)], 0.0)]
)
def test_variables_without_an_element(shapes, moved):
    """First, in the middle, alone. The comparison of weights had an IndexError where the first one has none."""
    ends = []
    for compression in (Compression.none, everything(check_every=1), everything(clip_norm=1e9)):
        variables, optimizer = [keras.Variable(tf.ones(shape)) for shape in shapes], _wrapped(compression)
        for _ in range(3):
            optimizer.apply([tf.fill(shape, 1.0 + hvd.rank()) for shape in shapes], variables)
        ends.append(weights(variables))
    assert np.abs(ends[0] - 1).max(initial=0) >= moved
    assert all(np.abs(ends[0] - other).max(initial=0) < 1e-5 for other in ends[1:])


def test_a_loaded_checkpoint_empties_all_sets():
    """No set of variables brings back what another had kept."""
    variables, steps, states = _pair(), _rank_gradients(3), []
    for history in (True, False):
        optimizer = _wrapped(Compression.dgc(0.1, min_numel=1))
        optimizer.build(variables)
        if history:
            optimizer.apply(steps[0], variables)
            optimizer.apply(steps[1][:1], variables[:1])
            optimizer.set_weights([variable.numpy() for variable in optimizer.variables])
        optimizer.apply(steps[2], variables)
        states.append(session(optimizer).exchanges[0].steps.buckets.state_arrays())
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None and len(states[0]) == 2
    for name, parts in states[0].items():
        assert all(np.array_equal(parts[part], states[1][name][part]) for part in ("u", "v"))


def test_a_failed_step_changes_nothing():
    """One that fails in the backward pass, caught by the script: nothing is lost and nothing applied twice."""
    variables, given = _pair(), [np.zeros((20, 30)), np.zeros((30, 20))]
    compression = Compression.topk(0.1, values="fp32", min_numel=1, bucket_bytes=2400)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, op=hvd.Sum)

    @tf.function
    def step(first: Any, second: Any, row: Any) -> None:
        factor = tf.reduce_sum(tf.gather(tf.ones(3), row))  # fails on the host where there is no such row
        optimizer.apply([first * factor, second * factor], variables)

    for number, gradients in enumerate(_rank_gradients(8)):
        if number == 4:
            with pytest.raises(tf.errors.InvalidArgumentError):
                step(*gradients, 7)
            time.sleep(0.5)
            continue
        step(*gradients, 0)
        for total, gradient in zip(given, gradients, strict=True):
            total += gradient.numpy()
    state = session(optimizer).buckets.state_arrays()
    for i, (variable, total) in enumerate(zip(variables, given, strict=True)):
        kept = next(arrays["v"] for name, arrays in state.items() if name.startswith(f"{i} ")).reshape(variable.shape)
        everyone = hvd.allreduce(tf.constant(total - kept), op=hvd.Sum, name=f"everyone.{i}").numpy()
        assert np.abs((1 - variable.numpy()) - everyone).max() < 1e-4


@pytest.mark.parametrize("leave_out", [True, False], ids=["left out", "no gradient"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "tape"])
def test_a_frozen_layer_stays_where_it_is(kind, leave_out):
    """What waited for it had moved it on for a hundred steps, or all at once when it was trained again."""
    topk, variables = Compression.topk(0.1, min_numel=1), _pair()
    optimizer = {"sgd": momentum_sgd, "adam": keras.optimizers.Adam, "tape": keras.optimizers.SGD}[kind]()
    if kind != "tape":
        optimizer = DistributedOptimizer(optimizer, compression=Compression.dgc(0.1, min_numel=1))

    def step(gradients: list[Any], of: list[Any]) -> None:
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
    assert np.array_equal(variables[0].numpy(), before)
    variables[0].trainable = True
    for _ in range(8 if kind != "adam" else 0):  # Adam's moments go on, as in stock
        step([tf.zeros((20, 30)), tf.zeros((30, 20))], variables)
    assert np.array_equal(variables[0].numpy(), before)


def test_a_tape_that_is_used_again():
    """One tape object for every step has one exchange; what belongs to a model that is gone goes too."""
    variable = tf.Variable(tf.random.normal((40, 50)))
    tape = DistributedGradientTape(tf.GradientTape(), compression=Compression.topk(0.01, min_numel=1))
    for _ in range(5):
        with tape:
            loss = tf.reduce_sum(variable**2)
        tape.gradient(loss, [variable])
    distribution = session(tape)
    assert len(distribution.exchanges) == 1 and tape.compression_stats()["steps"] == 5
    assert "has no jacobian" in error_of(lambda tape=tape: tape.jacobian(tf.ones(1), []))
    gone = weakref.ref(distribution.exchanges[0])
    del variable, loss, tape
    gc.collect()
    assert len(distribution.exchanges) == 0 and gone() is None


def test_a_scaled_loss_of_eager_steps():
    variable = keras.Variable(tf.ones((20, 30)))
    optimizer = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(momentum_sgd()), compression=everything())
    for _ in range(2):
        optimizer.apply([tf.fill((20, 30), 2.0**15)], [variable])
    optimizer.apply([tf.fill((20, 30), float("inf") if hvd.rank() else 1.0)], [variable])
    # two steps of momentum SGD with gradient 1, the third is skipped
    assert float(variable.numpy().mean()) == pytest.approx(1 - 0.05 * (1 + 1.9))
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**14
    same_on_ranks(weights([variable]).tolist())


@pytest.mark.parametrize("compression", [Compression.none, Compression.dgc(0.05)], ids=["none", "dgc"])
def test_functions_that_run_eagerly(compression):
    tf.config.run_functions_eagerly(True)
    try:
        same_on_ranks(fingerprint(fitted(momentum_sgd(), compression, epochs=1)))
    finally:
        tf.config.run_functions_eagerly(False)


EITHER = pytest.mark.parametrize(
    "compression", [Compression.none, Compression.topk(1.0, **EVERYTHING)], ids=["none", "topk"]
)


@EITHER
@pytest.mark.parametrize("options", [{}, {"clipnorm": 1.0}, {"clipvalue": 0.1}])
def test_local_variables_are_clipped_like_the_others(compression, options):
    """What is left to each rank: embeddings."""
    table, weight, rank = keras.Variable(tf.ones((6, 2))), keras.Variable(tf.ones((30, 40))), hvd.rank()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, **options), compression=compression)
    optimizer.register_local_var(table)
    rows = tf.IndexedSlices(tf.fill((1, 2), 4.0 + rank), tf.constant([rank]), tf.constant([6, 2]))
    optimizer.apply([rows, tf.ones((30, 40))], [table, weight])
    moved = 1 - table.numpy()
    if "clipnorm" in options:
        assert float((moved**2).sum()) == pytest.approx(1.0, abs=1e-3)
    elif "clipvalue" in options:
        assert moved.max() == pytest.approx(0.1)
    else:
        own = np.zeros((6, 2))
        own[rank] = (4.0 + rank) / 2
        np.testing.assert_allclose(moved, own, atol=1e-5)


@EITHER
def test_local_variables_are_summed_over_passes_like_the_others(compression):
    table, weight = keras.Variable(tf.ones((6, 2))), keras.Variable(tf.ones((30, 40)))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, backward_passes_per_step=2)
    optimizer.register_local_var(table)
    for _ in range(2):
        optimizer.apply([tf.ones((6, 2)), tf.ones((30, 40))], [table, weight])
    assert (float(table.numpy()[0, 0]), float(weight.numpy()[0, 0])) == (0.0, -1.0), "the local one is divided by N"


def test_local_variables_may_differ():
    """A rank's share of a table: nothing is to be said."""
    part, weight = keras.Variable(tf.fill((6 + hvd.rank(), 2), 1.0 + hvd.rank())), keras.Variable(tf.ones((30, 40)))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=everything())
    optimizer.register_local_var(part)
    with messages() as said:
        optimizer.apply([tf.ones(part.shape), tf.ones((30, 40))], [part, weight])
    assert float(part.numpy().mean()) == 0.5 + hvd.rank() and not [text for text in said if "DIFFERENT" in text]


@pytest.mark.parametrize("built", [False, True])
def test_passes_leave_a_stock_file(built, tmp_path):
    """backward_passes_per_step is no state, before and after building."""
    model, optimizer, path = smooth_model(), momentum_sgd(), str(tmp_path / f"{hvd.rank()}.keras")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if built:
            fit(model, optimizer, 1)
        fit(model, DistributedOptimizer(optimizer, backward_passes_per_step=2), 1)
        model.save(path)
        stock, ours = keras.models.load_model(path), load_model(path, backward_passes_per_step=2)
    assert not [text for text in (str(warning.message)[:150] for warning in said) if "optimizer" in text]
    pairs = zip(model.optimizer.momentums, stock.optimizer.momentums, strict=True)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
    assert stock.optimizer.gradient_accumulation_steps is None and len(ours.optimizer.variables) == 10


@keras.saving.register_keras_serializable("mine")
class Own(keras.optimizers.SGD):
    """A user's optimizer."""


def test_a_registered_class_is_saved_under_its_name(tmp_path):
    path = str(tmp_path / f"{hvd.rank()}.keras")
    fit(smooth_model(), DistributedOptimizer(Own(0.01)), 1).save(path)
    assert type(keras.models.load_model(path).optimizer).__name__ == "Own"


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(way):
    for inner in (Own(0.01), keras.optimizers.LossScaleOptimizer(momentum_sgd())):
        assert "would train undistributed" in error_of(lambda inner=inner: way(DistributedOptimizer(inner)))


BEGIN = [callbacks.BroadcastGlobalVariablesCallback(0)]


def test_a_model_that_was_not_compiled_again_says_so():
    plain = fit(smooth_model(), momentum_sgd(), 1)
    plain.optimizer = DistributedOptimizer(plain.optimizer)
    x, y = shard(hvd.rank())
    error = error_of(lambda: plain.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=BEGIN))
    assert "compile the model again" in error


def test_a_model_that_is_compiled_with_what_was_given():
    """By one rank alone, or inside of another optimizer; then with another one, of which one rank speaks once."""
    given = [momentum_sgd(), momentum_sgd()]
    wrapped = [_wrapped_of(each) for each in given]
    inside = [lambda: fit(smooth_model(), given[0] if hvd.rank() else wrapped[0], 1, BEGIN)]
    inside += [lambda: fit(smooth_model(), keras.optimizers.LossScaleOptimizer(given[1]), 1, BEGIN)]
    for rank, attempt in zip((1, 0), inside, strict=True):
        error = error_of(attempt)
        assert error.startswith(f"UnsupportedUse: the model of rank {rank} is compiled with the optimizer that"), error
        same_on_ranks(error)
    with messages() as said:
        fit(smooth_model(), momentum_sgd(), 1, BEGIN)
        wrapped.clear()
        del inside, attempt
        gc.collect()
        fit(smooth_model(), momentum_sgd(), 1, BEGIN)
    # the first time only: the second, no wrapped optimizer is left
    assert len([text for text in said if "Compile the model with the returned" in text]) == (hvd.rank() == 0)


def _wrapped_of(optimizer: Any) -> Any:
    return DistributedOptimizer(optimizer, compression=Compression.dgc(0.05))


def test_a_second_model_has_its_own_warm_up():
    selected = []
    for _ in range(2):
        optimizer = _wrapped(Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2)))
        selected.append(fit(smooth_model(), optimizer, 1, BEGIN).optimizer.compression_stats()["selected"])
    assert selected[0] == selected[1]


def test_one_optimizer_wrapped_twice_is_two():
    """They had shared their variables."""
    ends = []
    for base in (momentum_sgd(), None):
        models = [smooth_model(seed) for seed in (3, 4)]
        for each in models:
            fit(each, _wrapped_of(base or momentum_sgd()), 1)
        ends.append([[fingerprint(each), len(each.optimizer.variables)] for each in models])
    assert ends[0] == ends[1]
    same_on_ranks(ends)


def test_weights_in_half_precision():
    half = keras.Variable(tf.zeros((40, 50)), dtype="float16")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1e-4, momentum=0.9), compression=everything())
    for _ in range(4):
        optimizer.apply([tf.fill((40, 50), tf.constant(3e4, tf.float16))], [half])
    assert float(half.numpy().astype(np.float32).mean()) == pytest.approx(-3.0 * (1 + 1.9 + 2.71 + 3.439), rel=1e-2)


def test_metrics_of_other_names():
    names = callbacks.MetricAverageCallback()
    error = error_of(lambda: names.on_epoch_end(0, {"mae" if hvd.rank() else "mape": 1.0}))
    assert "metrics: rank 0 has mape, rank 1 has mae" in error


def _put(thing: Any, name: str) -> Any:
    """A function that a script has put over a method, on the object."""
    before = getattr(thing, name)
    setattr(thing, name, lambda *given, **named: before(*given, **named))
    return thing


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("apply_gradients", everything()),
        ("update_step", everything()),
        ("build", everything()),
        ("apply", Compression.none),
        ("_clip_gradients", Compression.none),
        ("stateless_apply", Compression.local(2)),
        ("check_finite", Compression.none),
        ("inner apply", Compression.none),
        ("gradient", None),
    ],
)
def test_methods_that_a_script_has_put_on_the_object_are_refused(name, compression):
    """They went on calling the optimizer from before: nothing was exchanged, without a word."""
    scaler, method = keras.optimizers.LossScaleOptimizer, name.split()[-1]
    if name == "gradient":
        error = error_of(lambda: DistributedGradientTape(_put(tf.GradientTape(), "gradient")))
    else:
        optimizer = momentum_sgd() if name == "check_finite" else _put(momentum_sgd(), method)
        optimizer = scaler(optimizer) if name == "inner apply" else optimizer
        optimizer = _put(scaler(optimizer), method) if name == "check_finite" else optimizer
        error = error_of(lambda: DistributedOptimizer(optimizer, compression=compression))
    assert error.startswith("UnsupportedUse: ") and f"has {method} of its own" in error, error


def test_another_method_that_a_script_has_put_on_the_object_is_kept():
    told = DistributedOptimizer(_put(momentum_sgd(), "get_config"), compression=everything())
    assert "get_config" in vars(told)


@pytest.mark.parametrize("name", ["apply_gradients", "apply"])
def test_methods_that_a_script_puts_on_the_object_afterwards_work(name):
    variable = keras.Variable(tf.zeros((40, 50)))
    optimizer = _put(DistributedOptimizer(keras.optimizers.SGD(1.0), compression=everything()), name)
    optimizer.apply_gradients([(tf.fill((40, 50), 1.0 + 2.0 * hvd.rank()), variable)])
    assert float(variable.numpy().mean()) == -2.0


@pytest.mark.slow
@pytest.mark.on_ranks(2, environment={"DGC_TIMEOUT": "4"}, fresh=True)
def test_slow_steps_and_caught_errors_do_not_end_a_job():
    """A step slower than DGC_TIMEOUT is no reason to stop, nor is an error that the script has caught."""
    hvd.init()
    variable = keras.Variable(tf.ones((40, 50)))
    optimizer = _wrapped(Compression.dgc(0.001, warmup=WarmupSchedule(epochs=4, first_density=0.04), min_numel=1))
    optimizer.set_epoch(0)

    @tf.function
    def slow(gradient: Any) -> None:
        def wait(value: Any) -> Any:
            time.sleep(6)
            return value

        optimizer.apply([tf.numpy_function(wait, [gradient], tf.float32)], [variable])

    gradient = tf.constant(np.random.default_rng(0).standard_normal((40, 50)), tf.float32)
    slow(tf.ensure_shape(gradient, (40, 50)))
    optimizer.set_epoch(2 * hvd.rank())
    mismatch = error_of(lambda: optimizer.apply([gradient], [variable]))
    assert "check that every rank sets the same epoch" in mismatch
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        hvd.allreduce(tf.ones(3), name="still here")
        time.sleep(0.5)
    optimizer.set_epoch(3)
    optimizer.apply([gradient], [variable])
