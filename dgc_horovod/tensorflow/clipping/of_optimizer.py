"""Keras' own clipping under compression: each rank's gradient is clipped before it is compressed, DGC 3.1.

The exchanged update comes in bursts: a limit for gradients would cut it, and the part that is cut is lost.
``global_clipnorm`` becomes the compression's ``clip_norm``; ``clipnorm`` and ``clipvalue`` are applied in the graph.
"""

from __future__ import annotations

import dataclasses
import logging

import tensorflow as tf
from keras.optimizers import Optimizer

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig, clip_limit
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.tensorflow.wrapping.settings import Settings
from dgc_horovod.tensorflow.wrapping.variables import Gradient

_log = logging.getLogger("dgc_horovod")
KINDS = ("clipnorm", "global_clipnorm", "clipvalue")  # in the order in which Keras looks


def clipping_of(optimizer: Optimizer) -> tuple[str, float] | None:
    """Return the kind of Keras' clipping that an optimizer applies, and its limit; None: none."""
    limits = [(kind, getattr(optimizer, kind)) for kind in KINDS]
    return next(((kind, float(limit)) for kind, limit in limits if limit and limit > 0), None)


def with_clipping(optimizer: Optimizer, settings: Settings) -> Settings:
    """Return `settings` with the clipping of Keras' `optimizer`, and log the change on rank 0.

    A ``clip_norm`` of the compression, if there is one, replaces the optimizer's clipping. With local steps clipping is
    the optimizer's own.

    Raises:
        UnsupportedUse: the optimizer's class has a clipping of its own; the number of ranks may change.
    """
    own, config = clipping_of(optimizer), settings.config
    if config is not None and config.exchanges_weights:
        return settings
    if config is not None and type(optimizer)._clip_gradients is not Optimizer._clip_gradients:
        raise UnsupportedUse(
            f"{type(optimizer).__name__} clips in a way of its own (_clip_gradients), which would cut the exchanged "
            "update; clip each gradient in the script before it is applied, or pass clip_norm=... to the compression "
            "and leave _clip_gradients to Keras"
        )
    if own is None or config is None:
        return settings
    kind, limit = own
    if config.clip_norm is not None:
        if own != ("global_clipnorm", config.clip_norm):
            _tell(
                settings,
                f"clip_norm={config.clip_norm:g} of the compression is used; {kind}={limit:g} of the optimizer is not "
                "applied",
            )
        return settings
    _check_ranks_stay(kind)
    _tell(
        settings,
        f"{'in compressed steps ' if config.automatic else ''}{kind}={limit:g} of the optimizer clips each rank's own "
        f"gradient before it is compressed, at {'sqrt(N)' if settings.averages else '1/sqrt(N)'} times {limit:g}; the "
        "exchanged update is not clipped",
    )
    if kind != "global_clipnorm":
        return settings
    return dataclasses.replace(settings, config=config.replace(clip_norm=limit))


def clipped(gradient: Gradient, optimizer: Optimizer, settings: Settings, local: bool) -> Gradient:
    """Clip one variable's `gradient` by ``clipnorm`` or ``clipvalue`` of `optimizer`, if nothing else clips.

    Args:
        local: whether the variable is not exchanged, so that its noise is not averaged.
    """
    own = clipping_of(optimizer)
    if own is None or settings.config is None or settings.config.clip_norm is not None:
        return gradient
    kind, c = own
    _check_ranks_stay(kind)
    limit = clip_limit(c, 1 if local else settings.process_set.size(), settings.averages)
    dense = tf.convert_to_tensor(gradient)
    return tf.clip_by_norm(dense, limit) if kind == "clipnorm" else tf.clip_by_value(dense, -limit, limit)


def averages_clipped(gradients: list[tf.Tensor], optimizer: Optimizer, settings: Settings) -> list[tf.Tensor]:
    """Clip the averages of all ranks as Keras does, or by ``clip_norm`` of the compression."""
    assert settings.config is not None
    limit = settings.config.clip_norm
    if limit is not None and clipping_of(optimizer) != ("global_clipnorm", limit):
        norms = [tf.norm(tf.cast(gradient, tf.float32)) for gradient in gradients]  # dtypes may differ
        factor = limit / tf.maximum(tf.norm(tf.stack(norms)), limit)
        return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
    return list(Optimizer._clip_gradients(optimizer, gradients))


def check_change(optimizer: Optimizer, config: DGCConfig | None, kind: str, limit: float | None) -> None:
    """Raise UnsupportedUse if a limit that is set after wrapping would have no effect."""
    if config is None or config.exchanges_weights or limit == getattr(optimizer, kind):
        return  # with local steps clipping is the optimizer's own
    if kind == "global_clipnorm" or config.clip_norm is not None:
        raise UnsupportedUse(
            f"{kind}={limit} was set after the optimizer was wrapped, and the limit of each rank "
            f"(clip_norm={config.clip_norm}) is fixed then; set it on the Keras optimizer, and wrap that one again"
        )


def _check_ranks_stay(kind: str) -> None:
    if kind != "global_clipnorm" and envvars.horovod_elastic():
        raise UnsupportedUse(
            "clipnorm and clipvalue depend on the number of ranks, which changes under Horovod Elastic; use "
            "global_clipnorm, or clip_norm of the compression"
        )


def _tell(settings: Settings, text: str) -> None:
    if settings.process_set.included() and settings.process_set.rank() == 0:
        _log.warning("dgc_horovod: %s", text)
