"""Keras' own clipping under compression: of each rank's gradient, before it is compressed; never of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_model
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fit, keras, momentum_sgd, smooth_model, weights
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]

LIMIT, STEPS = 0.5, 4
SHAPES = ((20, 30), (30,), (40, 50))  # the second is sent whole
DGC = {"density": 0.05, "min_numel": 100}
Gradients = list[Any]


def _gradients(step: int) -> Gradients:
    """Of this rank; some beyond their limit, some within."""
    rng = np.random.default_rng([hvd.rank(), step])
    return [tf.constant(rng.standard_normal(s) * scale, tf.float32) for s, scale in zip(SHAPES, (0.1, 1, 1e-3))]  # noqa: B905


def _bits(optimizer: Any, change: Callable[[Gradients], Gradients] = list, passes: int = 1) -> str:
    """The bits after some steps of `optimizer`, each of them with what `change` makes of the gradients."""
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    for step in range(STEPS * passes):
        optimizer.apply(change(_gradients(step)), variables)
    return weights(variables).tobytes().hex()


def _by_hand(kind: str, workers: float) -> Callable[[Gradients], Gradients]:
    """DGC 3.1, each rank's own: sqrt(N) times the limit of an average."""
    limit = LIMIT * math.sqrt(workers)
    if kind == "clipnorm":
        return lambda gradients: [tf.clip_by_norm(gradient, limit) for gradient in gradients]
    return lambda gradients: [tf.clip_by_value(gradient, -limit, limit) for gradient in gradients]


def _wrapped(clip_norm: float | None = None, inner: Any = None, arguments: Any = None, **options: Any) -> Any:
    """SGD with `options`, or `inner`, compressed; `arguments` are ours."""
    compression = Compression.dgc(**DGC, clip_norm=clip_norm)
    return DistributedOptimizer(inner or momentum_sgd(**options), compression=compression, **(arguments or {}))


each_kind = pytest.mark.parametrize("kind", ["clipnorm", "clipvalue"])


@each_kind
@pytest.mark.parametrize(("op", "number"), [("Average", 2), ("Sum", 1 / 2)])
def test_the_optimizers_own_clipping_is_local(kind, op, number):
    """The same bits as with gradients that a script has clipped by hand at the right limit."""
    more = {"op": getattr(hvd, op)}
    own, plain = _wrapped(arguments=more, **{kind: LIMIT}), _wrapped(arguments=more)
    assert _bits(own) == _bits(plain, _by_hand(kind, number))


@each_kind
def test_adams_own_clipping_is_local(kind):
    own, plain = (_wrapped(inner=keras.optimizers.Adam(0.01, **more)) for more in ({kind: LIMIT}, {}))
    assert _bits(own) == _bits(plain, _by_hand(kind, 2))


def test_a_norm_of_all_is_clip_norm():
    """Which is used beside another limit, as one rank says."""
    bits = _bits(_wrapped(LIMIT))
    assert _bits(_wrapped(global_clipnorm=LIMIT)) == bits != _bits(_wrapped())
    with messages() as said:
        both = _wrapped(LIMIT, clipnorm=1e-3)
    assert _bits(both) == bits
    told = any("clip_norm=0.5 of the compression is used; clipnorm=0.001" in text for text in said)
    assert told == (hvd.rank() == 0)
    same_on_ranks(bits)


def test_a_limit_is_one_of_the_loss_that_is_not_scaled():
    scaler = keras.optimizers.LossScaleOptimizer(momentum_sgd(clipnorm=LIMIT), initial_scale=8.0)
    scaled = _bits(_wrapped(inner=scaler), lambda gradients: [8 * gradient for gradient in gradients])
    assert scaled == _bits(_wrapped(clipnorm=LIMIT))


def test_a_negative_limit_is_none_as_keras_has_it():
    assert _bits(_wrapped(clipnorm=-1.0)) == _bits(_wrapped())


@pytest.mark.parametrize(
    ("arguments", "options", "factor"),
    [({}, {"gradient_accumulation_steps": 2}, 0.5), ({"backward_passes_per_step": 2}, {}, 1.0)],
    ids=["Keras", "Horovod"],
)
def test_accumulated_gradients_are_clipped_once(arguments, options, factor):
    """Averaged by Keras, summed by backward_passes_per_step."""
    steps = iter(range(STEPS))

    def both(_: Gradients) -> Gradients:
        step = next(steps)
        pairs = zip(_gradients(2 * step), _gradients(2 * step + 1), strict=True)
        return _by_hand("clipnorm", 2)([factor * (first + second) for first, second in pairs])

    own = _bits(_wrapped(arguments=arguments, clipnorm=LIMIT, **options), passes=2)
    assert own == _bits(_wrapped(), both)


def _clipped_by_script(kind: str, gradients: Gradients) -> Gradients:
    if kind == "global_clipnorm":
        return tf.clip_by_global_norm(gradients, LIMIT)[0]
    if kind == "clipnorm":
        return [tf.clip_by_norm(gradient, LIMIT) for gradient in gradients]
    return [tf.clip_by_value(gradient, -LIMIT, LIMIT) for gradient in gradients]


def _taped(how: str = "", kind: str = "", clip_norm: float | None = LIMIT) -> np.ndarray:
    """The weights after some steps with a compressed tape; `how`: who clips."""
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    optimizer = momentum_sgd(**({kind: LIMIT} if how == "optimizer" else {}))
    optimizer.build(variables)
    compression = Compression.topk(**DGC, clip_norm=clip_norm)

    def step(*given: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(g * v) for g, v in zip(given, variables, strict=True)])
        gradients = DistributedGradientTape(tape, compression=compression).gradient(loss, variables)
        if how == "script":
            gradients = _clipped_by_script(kind, gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step)
    for number in range(STEPS):
        run(*_gradients(number))
    return weights(variables)


@pytest.mark.parametrize("kind", ["clipnorm", "clipvalue", "global_clipnorm"])
@pytest.mark.parametrize("how", ["script", "optimizer"])
def test_what_a_tape_has_returned_is_clipped_by_clip_norm_alone(how, kind):
    """A limit that was right for gradients had cut updates: a net on the digits stayed at 84% for 98%.

    Clipped by the script or by its optimizer: left out beside clip_norm, else an error.
    """
    end = _taped()
    assert np.abs(_taped(clip_norm=None) - end).max() > 0.1
    assert np.array_equal(_taped(how, kind), end)
    same_on_ranks(end.tolist())
    refused = error_of(lambda: _taped(how, kind, None))
    assert "UnsupportedUse" in refused and "Pass clip_norm=" in refused


def _of_a_tape(clip_norm: float | None = None) -> tuple[Gradients, list[Any]]:
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(g * v) for g, v in zip(_gradients(0), variables, strict=True)])
    tape = DistributedGradientTape(tape, compression=Compression.topk(**DGC, clip_norm=clip_norm))
    return tape.gradient(loss, variables), variables


CLIPPING: dict[str, Callable[[Gradients], Any]] = {  # of updates that a tape has returned
    "by name": lambda gradients: tf.clip_by_norm(t=gradients[0], clip_norm=1.0),
    "of Keras": lambda gradients: keras.ops.clip(gradients[0], 0.0, 1.0),
    "others": lambda gradients: tf.clip_by_global_norm([*gradients[:2], tf.ones(3)], 1.0),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_what_would_clip_an_update_names_clip_norm(name):
    gradients, _ = _of_a_tape(1.0 if name == "others" else None)
    error = error_of(lambda: CLIPPING[name](gradients))
    assert "UnsupportedUse" in error and "clip_norm=" in error


OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "scaled": (
        lambda: keras.optimizers.LossScaleOptimizer(momentum_sgd()),
        "gradients of a compressed tape are given to a LossScaleOptimizer: the residual has the loss scale of earlier "
        "steps, and the scale changes. Use DistributedOptimizer(LossScaleOptimizer(optimizer))",
    ),
    "exchanged twice": (_wrapped, "exchange and compress them a second time"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_are_not_for_updates(name):
    make, words = OPTIMIZERS[name]
    optimizer, (gradients, variables) = make(), _of_a_tape()
    error = error_of(lambda: optimizer.apply(gradients, variables))
    assert "UnsupportedUse" in error and words in error, error


def test_gradients_of_no_tape_are_clipped_as_ever():
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    with messages() as said:
        momentum_sgd(clipnorm=1.0).apply([tf.ones(shape) for shape in SHAPES], variables)
        plain, _ = tf.clip_by_global_norm([tf.ones(4), None], 1.0)
    assert plain[0].numpy().tolist() == [0.5] * 4 and plain[1] is None and not said


class Own(keras.optimizers.SGD):
    """With a clipping of its own."""

    def _clip_gradients(self, grads: Gradients) -> Gradients:
        return [tf.sign(gradient) for gradient in grads]


def test_a_limit_is_said_once_and_may_be_changed():
    """As in Keras it acts on what is traced, or run, from now on."""
    with messages() as said:
        optimizer = _wrapped(clipnorm=LIMIT)
        _bits(optimizer)
    told = [text for text in said if "clip" in text]
    assert len(told) == (hvd.rank() == 0)
    for text in told:
        assert "clipnorm=0.5 of the optimizer clips each rank's own gradient" in text and "sqrt(N) times 0.5" in text
    assert optimizer.clipnorm == LIMIT
    optimizer.clipnorm = 2 * LIMIT
    assert optimizer.clipnorm == 2 * LIMIT


def test_a_norm_of_all_is_fixed():
    fixed = _wrapped(global_clipnorm=LIMIT)
    error = error_of(lambda: setattr(fixed, "global_clipnorm", 1.0))
    assert "wrap that one again" in error and "UnsupportedUse" in error
    again = type(fixed).from_config({**fixed.get_config(), "global_clipnorm": 3.0})
    assert session(again).settings.config.clip_norm == 3.0


def test_a_norm_of_all_is_saved_and_loaded(tmp_path):
    path = str(tmp_path / f"{hvd.rank()}.keras")
    fit(smooth_model(), _wrapped(global_clipnorm=LIMIT), 1).save(path)
    assert keras.models.load_model(path).optimizer.global_clipnorm == LIMIT
    loaded = load_model(path, compression=Compression.dgc(**DGC))
    assert session(loaded.optimizer).settings.config.clip_norm == LIMIT


def test_clipping_of_its_own_and_different_limits_are_refused():
    assert "clips in a way of its own" in error_of(lambda: _wrapped(inner=Own(0.1)))
    differing = DistributedOptimizer(momentum_sgd(clipnorm=1.0 + hvd.rank()))
    error = error_of(lambda: _bits(differing))
    assert "optimizer: rank 0 has SGD clipnorm 1.0, rank 1 has SGD clipnorm 2.0" in error
    same_on_ranks(error)
