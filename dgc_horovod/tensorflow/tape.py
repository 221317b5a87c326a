"""``DistributedGradientTape``: a GradientTape whose gradients are those of all ranks.

Those of a compressed tape are an update: it comes in bursts, of several times the norm of a gradient, and the part that
a limit cuts off is lost. So they carry a mark, which TensorFlow's clipping functions and Keras' optimizers recognize.
Clipping them is an error; with ``clip_norm``, which clips each rank's gradient, it has no effect.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from dgc_horovod import envvars
from dgc_horovod.arithmetic import Arithmetic
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.names import replace_everywhere
from dgc_horovod.notices import clips_already, tell_stock
from dgc_horovod.tensorflow.distribution import Distribution, of_tapes
from dgc_horovod.tensorflow.gradients.exchange import StepInputs
from dgc_horovod.tensorflow.overrides import UsersClass, not_converted
from dgc_horovod.tensorflow.settings import (
    STOCK,
    Compression,
    clipping_of,
    make_settings,
    refuse_own_methods,
    warn_once,
)
from dgc_horovod.tensorflow.updates import Update
from dgc_horovod.tensorflow.variables import (
    Gradient,
    is_frozen,
    is_of_tape,
    key_of,
    keys_of,
    native,
    scaled,
    sources_of,
)

_tell_stock_once = functools.cache(tell_stock)
_NO_OPTIMIZER = "a GradientTape has no optimizer whose momentum could be taken over; DistributedOptimizer has"


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    sparse_as_dense: bool = False,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `gradtape` return the gradients of all ranks. The signature is Horovod's.

    Residuals belong to the variables that ``gradient`` is called with, not to the tape: a script makes a new tape at
    every step. A tape does not know the optimizer, so ``Compression.dgc`` runs with plain error feedback, without
    momentum correction, and a warning says so. If a gradient is not finite on some rank, every rank gets NaN.

    Args:
        gradtape: a GradientTape, persistent or not, before or after its ``with``.
        device_dense, device_sparse, ...: see ``DistributedOptimizer``.

    Returns:
        A tape of the same class; also ``register_local_source(variable)`` and ``compression_stats()``.

    Raises:
        ConfigError, UnsupportedUse: as for ``DistributedOptimizer``.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise UnsupportedUse(f"gradtape must be a tf.GradientTape, got {type(gradtape).__name__}")
    if isinstance(gradtape, _DistributedTape):
        raise UnsupportedUse("this tape is already a DistributedGradientTape; wrap the tf.GradientTape itself")
    refuse_own_methods(gradtape, "DistributedGradientTape")
    settings = make_settings(locals())
    if settings.config is not None and settings.config.automatic:
        if hvd.rank() == 0:
            _tell_stock_once(_NO_OPTIMIZER, STOCK)
        settings = settings.as_stock()
    if settings.config is not None and envvars.horovod_elastic():
        raise UnsupportedUse(
            "under Horovod Elastic a compressed tape cannot learn that the ranks have changed; use "
            "DistributedOptimizer with our KerasState, or compression=Compression.none"
        )
    if settings.config is not None and settings.config.exchanges_weights:
        raise UnsupportedUse("local steps exchange weights, and a tape has gradients only: use DistributedOptimizer")
    if settings.config is not None and settings.config.momentum_correction:
        warn_once(
            "a GradientTape does not know the optimizer's momentum, so it is not corrected (plain error feedback); "
            "DistributedOptimizer corrects it"
        )
    kind: Any = type(gradtape)
    tape = object.__new__(_class_over(kind))
    tape.__dict__.update(gradtape.__dict__)
    key = tuple({**vars(settings), "process_set": settings.process_set.process_set_id}.values())
    if key not in of_tapes:
        of_tapes[key] = Distribution(settings, Update(Arithmetic()))
    tape._dgc = TapeSession(of_tapes[key])
    return tape


class TapeSession:
    """The state of compression of one tape.

    Args:
        distribution: exchanges of all tapes with the same settings.

    Attributes:
        calls: number of calls of ``gradient`` in this step for the same variables, by their keys.
        local: keys of variables whose gradients are not exchanged.
    """

    def __init__(self, distribution: Distribution) -> None:
        self.distribution, self.calls, self.local = distribution, Counter[Any](), set[Any]()

    def exchange(self, variables: list[Any], own: list[Gradient]) -> None:
        """Replace this rank's gradients in `own` by those of all ranks; several calls in a step are possible."""
        key = tuple(source.key for source in sources_of(variables))
        number = self.calls[key]
        self.calls[key] += 1
        here = [i for i, variable in enumerate(variables) if own[i] is not None or not is_frozen(variable)]
        if not here:
            return
        variables, gradients = [variables[i] for i in here], [own[i] for i in here]
        agreed = self.distribution.variable_set(variables, gradients, self.local, number)
        settings, gradients = self.distribution.settings, agreed.completed(gradients)
        for i in agreed.given:
            if agreed.local[i]:
                gradients[i] = scaled(gradients[i], settings.local_scale)
        if agreed.exchange is not None:
            given = [gradients[i] for i in agreed.active]
            weights = [native(variables[i]) for i in agreed.active]
            combined, finite, _ = agreed.exchange(given, StepInputs(weights=weights))
            if finite is not None:
                combined = tf.cond(finite, lambda: combined, lambda: [_not_a_number(g) for g in combined])
            if settings.config is not None:
                for tensor in combined:
                    tensor._dgc_returned = settings.config.clip_norm
            for i, gradient in zip(agreed.active, combined, strict=True):
                gradients[i] = gradient
        for i, gradient in zip(here, gradients, strict=True):
            own[i] = gradient


class _DistributedTape(UsersClass):
    """The methods put over the class of the user's tape."""

    _dgc: TapeSession

    @not_converted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: tf.Tensor | Sequence[tf.Tensor] | None = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return TensorFlow's gradients, combined over the ranks; `use_generic_names` has no effect."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        if not self._dgc.distribution.takes_part:
            return gradients
        own = list(tf.nest.flatten(gradients))
        self._dgc.exchange(tf.nest.flatten(sources), own)
        return tf.nest.pack_sequence_as(sources, own)

    def jacobian(self, *args: object, **kwargs: object) -> Any:
        """Raises UnsupportedUse: each of its rows would be an exchange of its own."""
        raise UnsupportedUse("a DistributedGradientTape has no jacobian; call it on the tape that was wrapped")

    batch_jacobian = jacobian

    def __enter__(self) -> Any:
        self._dgc.calls.clear()  # another step
        return super().__enter__()

    def reset(self) -> None:
        """Reset the tape, as TensorFlow does."""
        self._dgc.calls.clear()
        super().reset()

    def register_local_source(self, source: keras.Variable | Iterable[keras.Variable]) -> None:
        """Leave `source` to each rank: its gradient is not exchanged."""
        self._dgc.local |= keys_of(source, "source")

    def compression_stats(self) -> dict[str, Any]:
        """Return counters of the exchanges of all tapes with these settings; fields as in ``dgc_horovod.torch``."""
        return self._dgc.distribution.stats()

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return (source, gradient) pairs: those of local sources, and the others, as Horovod's function."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if key_of(pair[0]) in self._dgc.local]
        return local, [pair for pair in pairs if key_of(pair[0]) not in self._dgc.local]


def _not_a_number(gradient: tf.Tensor) -> tf.Tensor:
    return tf.fill(tf.shape(gradient), tf.constant(float("nan"), gradient.dtype))


@functools.cache
def _class_over(kind: type) -> Any:
    return type(kind.__name__, (_DistributedTape, kind), {"__module__": kind.__module__})


# -- clipping of gradients that a compressed tape has returned


def _is_left_out(gradients: Sequence[Any], what: str) -> bool:
    """Return whether `gradients`, which `what` would clip, were clipped by a compressed tape's ``clip_norm``.

    Raises:
        UnsupportedUse: the tape has no ``clip_norm``, or some of them are of no compressed tape.
    """
    limits = [gradient._dgc_returned for gradient in gradients if is_of_tape(gradient)]
    if limits and (None in limits or len(limits) < len(gradients)):
        raise UnsupportedUse(
            f"{what} would clip gradients of a compressed tape. They are an update that comes in bursts, and the part "
            "that clipping cuts off is lost. Pass clip_norm=... to the compression (dgcrun: --dgc-clip-norm), which "
            f"clips each rank's gradient; {what} then has no effect on the gradients of a tape, and is an error on "
            "others together with them"
        )
    if limits:
        warn_once(clips_already(limits[0], what))
    return bool(limits)


def _of_a_script(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def clip(*args: Any, **kwargs: Any) -> Any:
        first, given = next(iter(inspect.signature(stock).bind(*args, **kwargs).arguments.items()))
        every = [x for x in given if x is not None] if first == "t_list" else [given]
        if not _is_left_out(every, f"tf.{stock.__name__}"):
            return stock(*args, **kwargs)
        return (list(given), tf.linalg.global_norm(every)) if first == "t_list" else given

    return clip


_stock_clip = BaseOptimizer._clip_gradients


@not_converted
@functools.wraps(_stock_clip)
def _clip_gradients(self: BaseOptimizer, grads: Sequence[Gradient]) -> Any:
    own = clipping_of(self)
    if own is not None and _is_left_out([x for x in grads if x is not None], f"{own[0]} of the optimizer"):
        return grads
    return _stock_clip(self, grads)


_stock_scaled = keras.optimizers.LossScaleOptimizer.apply


@not_converted
@functools.wraps(_stock_scaled)
def _apply_scaled(
    self: keras.optimizers.LossScaleOptimizer, grads: Iterable[Gradient], *args: Any, **kwargs: Any
) -> None:
    grads = list(grads)
    if any(map(is_of_tape, grads)):
        raise UnsupportedUse(
            "gradients of a compressed tape are given to a LossScaleOptimizer: the residual has the loss scale of "
            "earlier steps, and the scale changes. Use DistributedOptimizer(LossScaleOptimizer(optimizer)) in place of "
            "the tape, or mixed_bfloat16, which needs no scale"
        )
    _stock_scaled(self, grads, *args, **kwargs)


# before a script evaluates tf.clip_by_global_norm(tape...), which may make the tape in its arguments
for _stock in (tf.clip_by_global_norm, tf.clip_by_norm, tf.clip_by_value):
    replace_everywhere(_stock, not_converted(_of_a_script(_stock)))
BaseOptimizer._clip_gradients = _clip_gradients
keras.optimizers.LossScaleOptimizer.apply = _apply_scaled
