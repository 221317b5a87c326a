"""``DistributedOptimizer`` for Keras 3: the user's optimizer, with the gradients of all ranks.

The class of the returned object is made at run time over the user's class and keeps its name, so that a saved model is
a stock one. It takes over the user's optimizer as it is: variables, slots, iterations.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from keras.src.trainers.trainer import Trainer

from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.names import put_around
from dgc_horovod.settings import check_whole
from dgc_horovod.tensorflow.distribution import Distribution
from dgc_horovod.tensorflow.local_steps import LocalSteps
from dgc_horovod.tensorflow.overrides import AgreedScaling, LocalOverrides, Overrides
from dgc_horovod.tensorflow.session import EveryStep, Session, session_of
from dgc_horovod.tensorflow.settings import (
    Compression,
    Settings,
    clipping_of,
    make_settings,
    refuse_own_methods,
    with_clipping,
)
from dgc_horovod.tensorflow.updates import Update, update_of


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a Keras 3 `optimizer` so that every step uses the gradients of all ranks.

    It takes over `optimizer`'s variables; use only the returned object from then on. An optimizer that is wrapped again
    is copied, without its variables. The signature is that of
    ``horovod.tensorflow.DistributedOptimizer``; ``dgc_horovod.tensorflow.keras`` has that of
    ``horovod.tensorflow.keras``.

    Args:
        optimizer: any Keras optimizer, a LossScaleOptimizer too.
        name, use_locking: without effect, for compatibility.
        device_dense, device_sparse: TensorFlow devices on which dense and sparse gradients are reduced.
        compression: ``Compression.none``, ``.fp16``, ``.dgc(...)``, ``.topk(...)``, ..., or a DGCConfig.
        sparse_as_dense: whether IndexedSlices are exchanged as dense tensors; compressed tensors always are.
        backward_passes_per_step: number of gradients accumulated before one exchange, >= 1.
        op: reduction, hvd.Average or hvd.Sum.
        gradient_predivide_factor: divisor of the gradients before the sum, and factor after it, > 0.
        average_aggregated_gradients: whether the backward passes are averaged, instead of summed.
        num_groups, groups: groups of gradients reduced together, or their number; with compression, borders of buckets.
        process_set: ranks that take part.
        scale_local_gradients: whether the gradients of ``register_local_var`` variables are divided by N.

    Returns:
        An instance of ``type(optimizer)`` with ``compression_stats()``, ``set_epoch()``, ``flush()``,
        ``clear_residuals()``, ``residual_state_dict()``, ``load_residual_state_dict()`` and ``register_local_var()``.

    Raises:
        ConfigError: an argument is out of range.
        UnsupportedUse: a combination that would train wrongly; an optimizer of TensorFlow 1 or Keras 2.
    """
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedUse(
            f"optimizer must be a Keras 3 optimizer (keras.optimizers), got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; optimizers of TensorFlow 1 and of Keras 2 (tf_keras) are not supported"
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_distributed(optimizer) or is_distributed(inner) or hasattr(optimizer, "_allreduce_grads"):  # Horovod's own
        raise UnsupportedUse("this optimizer is already a DistributedOptimizer; wrap the Keras optimizer itself")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"the second argument is name, a text, got {name!r}; pass the compression as compression=...")
    check_whole("backward_passes_per_step", backward_passes_per_step, 1)
    settings = make_settings(locals())
    return _distribute(optimizer, settings, int(backward_passes_per_step), average_aggregated_gradients)


def is_distributed(optimizer: object) -> bool:
    """Whether it was returned by `DistributedOptimizer`."""
    return session_of(optimizer) is not None


def set_right(model: keras.Model, explicit: bool = False) -> None:
    """Make a compiled `model` fit for a distributed optimizer, if it has one; after every ``compile``.

    Args:
        model: compiled Keras model.
        explicit: whether the user asked for XLA.
    """
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and is_distributed(optimizer.inner_optimizer):
        if not is_distributed(optimizer):
            model.optimizer = optimizer = _distribute_scaler(optimizer, optimizer.inner_optimizer)
    if is_distributed(optimizer) and model.jit_compile:
        if explicit:
            warnings.warn(
                "jit_compile=True is ignored: no Horovod operation runs inside XLA, which a DistributedOptimizer needs",
                stacklevel=4,
            )
        model.jit_compile = False


def _distribute(optimizer: Optimizer, settings: Settings, passes: int, averaged: bool) -> Any:
    """Return `optimizer` distributed; of a LossScaleOptimizer, the one inside too."""
    refuse_own_methods(optimizer, "DistributedOptimizer")
    if vars(optimizer).get("_dgc_taken"):  # another wrapper has its variables: make a new one, as Horovod does
        optimizer = type(optimizer).from_config(optimizer.get_config())
    rounds = settings.config.local_steps if settings.config is not None else None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _distribute_scaler(optimizer, _distribute(optimizer.inner_optimizer, settings, passes, averaged))
    if passes > 1 and optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"the optimizer has gradient_accumulation_steps={optimizer.gradient_accumulation_steps}; with it leave "
            "backward_passes_per_step at 1"
        )
    if rounds and passes > 1:
        raise UnsupportedUse(
            "local steps: set gradient_accumulation_steps of the Keras optimizer, not backward_passes_per_step"
        )
    if rounds and optimizer.use_ema:
        raise UnsupportedUse(
            "local steps do not support use_ema=True: each rank would average its own weights, so that models differ"
        )

    again = partial(_distribute, settings=settings, passes=passes, averaged=averaged)
    wrapped = _adopt(optimizer, LocalOverrides if rounds else Overrides, again)
    weak: Any = weakref.proxy(wrapped)  # the owner of the objects that refer to it
    stride = rounds or (passes if passes > 1 else wrapped.gradient_accumulation_steps or 1)
    described = " ".join([type(optimizer).__name__, *map(str, clipping_of(optimizer) or ())])  # ranks compare it
    distribution = Distribution(*_split(optimizer, weak, settings), stride, described)
    session = Session(wrapped, distribution, LocalSteps if rounds else EveryStep, passes, averaged, again)
    object.__setattr__(wrapped, "_dgc", session)  # not tracked by Keras
    if passes > 1:
        _accumulate(wrapped, passes)
    object.__setattr__(optimizer, "_dgc_taken", True)
    return wrapped


def _split(optimizer: Optimizer, wrapped: Optimizer, settings: Settings) -> tuple[Settings, Update]:
    """Return the settings with the clipping of `optimizer`, and the split of its arithmetic."""
    kind = type(optimizer)
    try:
        return with_clipping(optimizer, settings), update_of(wrapped, kind, settings.config)
    except UnsupportedUse as refused:
        if settings.config is None or not settings.config.automatic:
            raise
        return settings.as_stock(str(refused)), update_of(wrapped, kind, None)


def _distribute_scaler(scaler: keras.optimizers.LossScaleOptimizer, inner: Optimizer) -> Any:
    """Return a distributed LossScaleOptimizer around `inner`, which is distributed."""
    session: Session = inner._dgc
    if isinstance(session.strategy, LocalSteps):
        raise UnsupportedUse(LocalSteps.no_scaler)
    again = session.again
    refuse_own_methods(scaler, "DistributedOptimizer")
    wrapped = _adopt(scaler, AgreedScaling, lambda plain: _distribute_scaler(plain, again(plain.inner_optimizer)))
    object.__setattr__(wrapped, "_dgc", session)
    wrapped.inner_optimizer = inner
    object.__setattr__(scaler, "_dgc_taken", True)
    session.scaled_by_another = False
    return wrapped


def _adopt(optimizer: Optimizer, overrides: type, again: Callable[[Any], Any]) -> Any:
    """Move `optimizer`'s state into an object of a new class: `overrides` over the user's class, under its name.

    Args:
        again: function that makes another optimizer distributed in the same way.
    """
    user_class: Any = type(optimizer)

    def from_config(cls: type, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        return again(user_class.from_config(config, *([custom_objects] if custom_objects else [])))

    attributes = {name: getattr(user_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    ours = {**attributes, "from_config": classmethod(from_config)}
    final: Any = type(user_class.__name__, (overrides, user_class), ours)
    if user_class in GLOBAL_CUSTOM_NAMES:  # a saved model must name the user's registered class
        GLOBAL_CUSTOM_NAMES[final] = GLOBAL_CUSTOM_NAMES[user_class]
    wrapped: Any = object.__new__(final)
    wrapped.__dict__.update(optimizer.__dict__)
    return wrapped


def _accumulate(optimizer: Optimizer, passes: int) -> None:
    """Set up Keras' accumulation over `passes`, also if its variables exist already."""
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built:
        with tf.init_scope():
            accumulators = [
                optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
                for variable in optimizer._trainable_variables
            ]
        for accumulator in accumulators:
            optimizer._untrack_variable(accumulator)
        object.__setattr__(optimizer, "_accumulated_gradients", accumulators)


# before a script evaluates model.compile(...), which may make the optimizer in its arguments
@put_around(Trainer, "compile")
def _compile(stock: Callable[..., None], model: keras.Model, *args: object, **kwargs: object) -> None:
    stock(model, *args, **kwargs)
    set_right(model, kwargs.get("jit_compile") is True)
