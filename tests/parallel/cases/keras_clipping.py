"""Clipping that a Keras script asks for, under compression: of each rank's gradient, before it is compressed."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_model
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fit, keras, momentum_sgd, smooth_model
from tests.helpers.logs import messages

LIMIT, STEPS = 0.5, 4
SHAPES = ((20, 30), (30,), (40, 50))  # the second is sent whole
DGC = {"density": 0.05, "min_numel": 100}
Gradients = list[Any]


def _gradients(step: int) -> Gradients:
    """Of this rank; some beyond their limit, some within."""
    rng = np.random.default_rng([hvd.rank(), step])
    return [tf.constant(rng.standard_normal(s) * scale, tf.float32) for s, scale in zip(SHAPES, (0.1, 1, 1e-3))]  # noqa: B905


def _weights(optimizer: Any, change: Callable[[Gradients], Gradients] = list, passes: int = 1) -> str:
    """The bits after some steps of `optimizer`, each of them with what `change` makes of the gradients."""
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    for step in range(STEPS * passes):
        optimizer.apply(change(_gradients(step)), variables)
    return np.concatenate([variable.numpy().ravel() for variable in variables]).tobytes().hex()


def _by_hand(kind: str, workers: float) -> Callable[[Gradients], Gradients]:
    """DGC 3.1, each rank's own: sqrt(N) times the limit of an average."""
    limit = LIMIT * math.sqrt(workers)
    if kind == "clipnorm":
        return lambda gradients: [tf.clip_by_norm(gradient, limit) for gradient in gradients]
    return lambda gradients: [tf.clip_by_value(gradient, -limit, limit) for gradient in gradients]


def limits() -> dict[str, bool]:
    """The same bits as with gradients that a script has clipped by hand at the right limit."""
    hvd.init()
    found: dict[str, bool] = {}

    def wrapped(optimizer: Any, clip_norm: float | None = None, **arguments: Any) -> Any:
        return DistributedOptimizer(optimizer, compression=Compression.dgc(**DGC, clip_norm=clip_norm), **arguments)

    for kind in ("clipnorm", "clipvalue"):
        for name, op, workers in (("average", hvd.Average, 2), ("sum", hvd.Sum, 1 / 2)):
            own, plain = wrapped(momentum_sgd(**{kind: LIMIT}), op=op), wrapped(momentum_sgd(), op=op)
            found[f"{kind}, {name}"] = _weights(own) == _weights(plain, _by_hand(kind, workers))
        adam = [wrapped(keras.optimizers.Adam(0.01, **more)) for more in ({kind: LIMIT}, {})]
        found[f"{kind}, Adam"] = _weights(adam[0]) == _weights(adam[1], _by_hand(kind, 2))
    own, given = wrapped(momentum_sgd(global_clipnorm=LIMIT)), wrapped(momentum_sgd(), LIMIT)
    found["global_clipnorm"] = (bits := _weights(own)) == _weights(given)
    found["clips at all"] = bits != _weights(wrapped(momentum_sgd()))
    with messages() as said:
        both = wrapped(momentum_sgd(clipnorm=1e-3), LIMIT)
    found["clip_norm beside clipnorm"] = bits == _weights(both)
    found["and says so"] = any("clip_norm=0.5 of the compression is used; clipnorm=0.001" in text for text in said)
    scaler = keras.optimizers.LossScaleOptimizer(momentum_sgd(clipnorm=LIMIT), initial_scale=8.0)
    scaled = _weights(wrapped(scaler), lambda gradients: [8 * gradient for gradient in gradients])
    found["scaled loss"] = scaled == _weights(wrapped(momentum_sgd(clipnorm=LIMIT)))
    found["negative, as Keras has it"] = _weights(wrapped(momentum_sgd(clipnorm=-1.0))) == _weights(
        wrapped(momentum_sgd())
    )
    return found


def accumulated() -> dict[str, bool]:
    """The gradient that is clipped is the accumulated one: averaged by Keras, summed by backward_passes_per_step."""
    hvd.init()
    found = {}
    for name, arguments, options, factor in (
        ("Keras", {}, {"gradient_accumulation_steps": 2}, 0.5),
        ("Horovod", {"backward_passes_per_step": 2}, {}, 1.0),
    ):
        compression = Compression.dgc(**DGC)
        own = DistributedOptimizer(momentum_sgd(**options, clipnorm=LIMIT), compression=compression, **arguments)
        steps = iter(range(STEPS))

        def both(_: Gradients, steps: Any = steps, factor: float = factor) -> Gradients:
            step = next(steps)
            pairs = zip(_gradients(2 * step), _gradients(2 * step + 1), strict=True)
            return _by_hand("clipnorm", 2)([factor * (first + second) for first, second in pairs])

        plain = DistributedOptimizer(momentum_sgd(), compression=compression)
        found[name] = _weights(own, passes=2) == _weights(plain, both)
    return found


def _clipped_by_script(kind: str, gradients: Gradients) -> tuple[Gradients, Any]:
    if kind == "global_clipnorm":
        return tf.clip_by_global_norm(gradients, LIMIT)
    if kind == "clipnorm":
        return [tf.clip_by_norm(gradient, LIMIT) for gradient in gradients], None
    return [tf.clip_by_value(gradient, -LIMIT, LIMIT) for gradient in gradients], None


def _taped(how: str = "", kind: str = "", clip_norm: float | None = LIMIT) -> tuple[np.ndarray, float]:
    """The weights after some steps with a compressed tape, and the last norm that was returned; `how`: who clips."""
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    optimizer = momentum_sgd(**({kind: LIMIT} if how == "optimizer" else {}))
    optimizer.build(variables)
    compression = Compression.topk(**DGC, clip_norm=clip_norm)

    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(g * v) for g, v in zip(given, variables, strict=True)])
        gradients = DistributedGradientTape(tape, compression=compression).gradient(loss, variables)
        norm = None
        if how == "script":
            gradients, norm = _clipped_by_script(kind, gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return norm if norm is not None else tf.constant(0.0)

    run = tf.function(step)
    norms = [float(run(*_gradients(number))) for number in range(STEPS)]
    return np.concatenate([variable.numpy().ravel() for variable in variables]), norms[-1]


def taped() -> dict[str, Any]:
    """What a tape has returned, clipped by the script or by its optimizer: left out beside clip_norm, else an error."""
    hvd.init()
    expected, norms = _taped()[0], []
    found: dict[str, Any] = {"unclipped": float(np.abs(_taped(clip_norm=None)[0] - expected).max())}
    for kind in ("clipnorm", "clipvalue", "global_clipnorm"):
        for how in ("script", "optimizer"):
            weights, norm = _taped(how, kind)
            norms += [norm] if norm else []
            found[f"{kind}, {how}"] = bool(np.array_equal(weights, expected))
            found[f"{kind}, {how}: refused"] = error_of(lambda h=how, k=kind: _taped(h, k, None))
    own = tf.square(tf.linalg.global_norm(_gradients(STEPS - 1)))
    found["norms"] = [*norms, float(tf.sqrt(hvd.allreduce(own, op=hvd.Average, name="own")))]
    return found


def _of_a_tape(clip_norm: float | None = None) -> tuple[Gradients, list[Any]]:
    variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(g * v) for g, v in zip(_gradients(0), variables, strict=True)])
    tape = DistributedGradientTape(tape, compression=Compression.topk(**DGC, clip_norm=clip_norm))
    return tape.gradient(loss, variables), variables


def tape_refusals() -> dict[str, Any]:
    """What would clip an update is an error that names clip_norm; other gradients are clipped as ever."""
    hvd.init()
    found: dict[str, Any] = {}
    gradients, variables = _of_a_tape(clip_norm=1.0)
    found["some"] = error_of(lambda: tf.clip_by_global_norm(gradients[:2], 1.0))
    found["others"] = error_of(lambda: tf.clip_by_global_norm([*gradients, tf.ones(3)], 1.0))
    gradients, _ = _of_a_tape()
    found["by name"] = error_of(lambda: tf.clip_by_norm(t=gradients[0], clip_norm=1.0))
    found["of Keras"] = error_of(lambda: keras.ops.clip(gradients[0], 0.0, 1.0))
    for name, optimizer in {
        "scaled": keras.optimizers.LossScaleOptimizer(momentum_sgd(clipnorm=1.0)),
        "accumulated": momentum_sgd(clipnorm=1.0, gradient_accumulation_steps=2),
        "exchanged twice": DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(**DGC)),
    }.items():
        gradients, variables = _of_a_tape()
        found[name] = error_of(lambda o=optimizer, g=gradients, v=variables: o.apply(g, v))
    for name, options in {"changed, clipped": {"clipnorm": 1.0}, "changed": {}}.items():
        gradients, variables = _of_a_tape()
        with messages() as said:
            halves = [gradient / 2 for gradient in gradients]
            found[name] = error_of(lambda o=options, v=variables, g=halves: momentum_sgd(**o).apply(g, v))
        found[f"{name}: said"] = [text for text in said if "changes gradients of a compressed tape" in text]
    with messages() as said:
        momentum_sgd(clipnorm=1.0).apply([tf.ones(shape) for shape in SHAPES], variables)  # of no tape
        plain, _ = tf.clip_by_global_norm([tf.ones(4), None], 1.0)
    found["of no tape"] = [plain[0].numpy().tolist(), plain[1], list(said)]
    return found


class Own(keras.optimizers.SGD):
    """With a clipping of its own."""

    def _clip_gradients(self, grads: Gradients) -> Gradients:
        return [tf.sign(gradient) for gradient in grads]


def around() -> dict[str, Any]:
    """What is said, changed later, saved, loaded, and refused."""
    hvd.init()
    dgc = Compression.dgc(**DGC)
    found: dict[str, Any] = {}
    with messages() as said:
        optimizer = DistributedOptimizer(momentum_sgd(clipnorm=LIMIT), compression=dgc)
        _weights(optimizer)
    found["said"] = [text for text in said if "clip" in text]
    before = optimizer.clipnorm
    optimizer.clipnorm = 2 * LIMIT  # as in Keras it acts on what is traced, or run, from now on
    found["changed"] = [before, optimizer.clipnorm]
    fixed = DistributedOptimizer(momentum_sgd(global_clipnorm=LIMIT), compression=dgc)
    found["fixed"] = error_of(lambda: setattr(fixed, "global_clipnorm", 1.0))
    again = type(fixed).from_config({**fixed.get_config(), "global_clipnorm": 3.0})
    found["from_config"] = session(again).settings.config.clip_norm
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"{hvd.rank()}.keras"))
        model = fit(smooth_model(), DistributedOptimizer(momentum_sgd(global_clipnorm=LIMIT), compression=dgc), 1)
        model.save(path)
        found["stock file"] = keras.models.load_model(path).optimizer.global_clipnorm
        found["loaded"] = session(load_model(path, compression=dgc).optimizer).settings.config.clip_norm
    found["own"] = error_of(lambda: DistributedOptimizer(Own(0.1), compression=dgc))
    differing = DistributedOptimizer(momentum_sgd(clipnorm=1.0 + hvd.rank()))
    found["differing"] = error_of(lambda: _weights(differing))
    return found
