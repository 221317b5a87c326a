"""Arguments of the TensorFlow adapter, with its ``Compression``, and their checks; Keras' own clipping among them.

Under compression Keras' clipping is local: each rank's gradient is clipped before it is compressed, DGC 3.1. The
exchanged update comes in bursts: a limit for gradients would cut it, and the part that is cut is lost.
``global_clipnorm`` becomes the compression's ``clip_norm``; ``clipnorm`` and ``clipvalue`` are applied in the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.util import split_list
from horovod.tensorflow.compression import Compression as HorovodCompression
from keras.optimizers import Optimizer

from dgc_horovod import __version__, envvars
from dgc_horovod.compression import Presets, config_of
from dgc_horovod.config import AUTO, FIELD_NAMES, DGCConfig, check_predivide, clip_limit
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.notices import AUTO_IN_ELASTIC, NOT_ALL_RANKS, clips_already, clips_locally, tell_stock
from dgc_horovod.tensorflow.variables import Gradient, Key, Source, key_of

_log = logging.getLogger("dgc_horovod")


class Compression(Presets):
    """The compressions. ``none`` and ``fp16`` are Horovod's; the others take any field of DGCConfig as keyword."""

    adapter = "tensorflow"
    none = HorovodCompression.none
    fp16 = HorovodCompression.fp16


_LIBRARIES = ("keras", "tensorflow")
_HARMLESS = ("get_config",)  # it changes nothing


def refuse_own_methods(given: object, factory: str) -> None:
    """Raise UnsupportedUse for an object with a method that a script has set on it, over that of its class.

    Such a function keeps calling `given`, or hides our method: the wrapper would exchange nothing, or step in another
    way than the exchange expects. Other functions on the object, which no library calls, stay.

    Args:
        given: optimizer or tape to wrap.
        factory: name of the function that wraps it.
    """
    bases = [base for base in type(given).__mro__ if base.__module__.split(".")[0] in _LIBRARIES]
    held = [name for name, value in vars(given).items() if callable(value) and name not in _HARMLESS]
    own = [name for name in held if any(callable(getattr(base, name, None)) for base in bases)]
    if own:
        raise UnsupportedUse(
            f"the {type(given).__name__} to wrap has {' and '.join(own)} of its own, set on the object: it would keep "
            f"calling the object from before {factory}, and gradients would not be exchanged. Set it on the result of "
            f"{factory}, around the method there; or define it in a class"
        )


@functools.cache
def warn_once(text: str) -> None:
    """Log `text` on rank 0, once a process."""
    if hvd.rank() == 0:
        _log.warning("dgc_horovod: %s", text)


STOCK = "stock Horovod"
Groups = int | tuple[tuple[Key, ...], ...] | None


@dataclass(frozen=True, eq=False)
class Settings:
    """The way in which gradients are combined. The fields are the arguments of Horovod's factories.

    Either `config` is set, or `compression`, which is Horovod's.
    """

    compression: Any = Compression.none
    config: DGCConfig | None = None
    op: int = hvd.Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    groups: Groups = None
    process_set: hvd.ProcessSet = hvd.global_process_set
    device_dense: str = ""
    device_sparse: str = ""
    scale_local_gradients: bool = True
    clip_norm: float | None = None  # limit of the averages, if compression auto has chosen no compression

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged, not summed."""
        return self.op == hvd.Average

    @property
    def scales(self) -> tuple[float, float]:
        """Factors before and after the sum, for Horovod."""
        factor = self.gradient_predivide_factor
        return (1 / factor, factor) if self.averages else (1.0, 1.0)

    @property
    def local_scale(self) -> Any:
        """Factor of gradients that are not exchanged; in an elastic job N is read when the graph runs."""
        if not self.scale_local_gradients:
            return 1.0
        if envvars.horovod_elastic():
            return 1 / tf.cast(hvd.size_op(process_set_id=self.process_set.process_set_id), tf.float32)
        return 1 / self.process_set.size()

    def as_stock(self, why: str = "") -> Settings:
        """Return the settings without compression; its `clip_norm` limits the averages. Rank 0 tells `why`."""
        if why and hvd.rank() == 0:
            tell_stock(why, STOCK)
        limit = None if self.config is None else self.config.clip_norm
        return dataclasses.replace(self, compression=Compression.none, config=None, clip_norm=limit)

    def agreed_fields(self) -> dict[str, str]:
        """Return the fields that must be equal on every rank, for `check_agreement`."""
        config, shown = self.config, self.compression if self.config is None else self.config
        return {
            "version": __version__,
            "compression": getattr(shown, "__name__", type(shown).__name__),
            "config": "\n".join(f"{name}={getattr(config, name)!r}" for name in FIELD_NAMES) if config else "",
            "op": str(int(self.op)),
            "gradient_predivide_factor": str(float(self.gradient_predivide_factor)),
            "sparse_as_dense": str(self.sparse_as_dense),
        }

    def group_numbers(self, sources: Sequence[Source]) -> list[int]:
        """Return the group of each source, from 0; -1 for those in none."""
        if isinstance(self.groups, int):
            groups: Any = split_list([source.key for source in sources], self.groups)
        else:
            groups = self.groups or ()
        number = {key: i for i, group in enumerate(groups) for key in group}
        return [number.get(source.key, -1) for source in sources]


def make_settings(given: Mapping[str, Any]) -> Settings:
    """Check Horovod's arguments, and return the settings.

    Args:
        given: arguments of a factory, by name; others than fields of `Settings` are ignored, but for ``num_groups``.

    Raises:
        ConfigError: one is out of range.
        UnsupportedUse: TensorFlow 1 graphs, Adasum; a process set under Horovod Elastic.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UnsupportedUse(
            "eager execution is switched off (a TensorFlow 1 graph); dgc_horovod needs TensorFlow 2: remove "
            "tf.compat.v1.disable_eager_execution() and disable_v2_behavior()"
        )
    compression, groups = given["compression"], given["groups"]
    if "torch" in f"{getattr(compression, 'adapter', '')}.{getattr(compression, '__module__', '')}".split("."):
        raise ConfigError(f"{compression!r} is for PyTorch; import Compression from dgc_horovod.tensorflow")
    config = config_of(compression)
    if config is not None:
        config.check_reduction(given["op"] == hvd.Average)
    names = {field.name for field in dataclasses.fields(Settings)}
    fields = {name: value for name, value in given.items() if name in names}
    own = compression if config is None else None  # each call of Compression.dgc() makes another object, of one config
    groups = _groups(groups if groups is not None else given["num_groups"])
    settings = Settings(**{**fields, "compression": own, "config": config, "groups": groups})
    if config is not None and config.strategy not in ("", AUTO, "local"):
        raise UnsupportedUse(f"{config.strategy} is for PyTorch; choose another compression")
    if config is not None and config.automatic and envvars.horovod_elastic():
        settings, config = settings.as_stock(AUTO_IN_ELASTIC), None
    if settings.op not in (hvd.Average, hvd.Sum):
        raise UnsupportedUse("op must be hvd.Average or hvd.Sum; Adasum and the others are not supported under Keras 3")
    check_predivide(settings.gradient_predivide_factor, settings.averages)
    if not isinstance(settings.process_set, hvd.ProcessSet):
        raise ConfigError(f"process_set must be a hvd.ProcessSet, got {settings.process_set!r}; leave it out for all")
    if config is None or not envvars.horovod_elastic():
        return settings
    if settings.process_set.process_set_id != 0:
        raise UnsupportedUse(NOT_ALL_RANKS)
    if config.dense_values == "auto":  # it depends on the number of ranks, which changes while graphs stay
        config = config.replace(dense_values="fp32")
    return dataclasses.replace(settings, config=config)


def _groups(groups: Any) -> Groups:
    if groups is None or (isinstance(groups, int) and groups == 0):
        return None
    if isinstance(groups, (int, np.integer)) and groups > 0:
        return int(groups)
    try:
        keys = tuple(tuple(key_of(variable) for variable in group) for group in groups)
    except TypeError:
        keys = ((),)
    if not all(key for group in keys for key in group) or not all(keys):
        raise ConfigError(f"groups must be a number >= 1 or a list of lists of variables, got {groups!r}")
    return keys


CLIPPINGS = ("clipnorm", "global_clipnorm", "clipvalue")  # in the order in which Keras looks


def clipping_of(optimizer: Optimizer) -> tuple[str, float] | None:
    """Return the kind of Keras' clipping that an optimizer applies, and its limit; None: none."""
    limits = [(kind, getattr(optimizer, kind)) for kind in CLIPPINGS]
    return next(((kind, float(limit)) for kind, limit in limits if limit and limit > 0), None)


def with_clipping(optimizer: Optimizer, settings: Settings) -> Settings:
    """Return `settings` with the clipping of Keras' `optimizer`, and log the change on rank 0.

    A ``clip_norm`` of the compression, if there is one, replaces the optimizer's clipping. With local steps clipping is
    the optimizer's own.

    Raises:
        UnsupportedUse: the optimizer's class has a clipping of its own; the number of ranks may change.
    """
    own, config = clipping_of(optimizer), settings.config
    if config is None or config.exchanges_weights:
        return settings
    if type(optimizer)._clip_gradients is not Optimizer._clip_gradients:
        raise UnsupportedUse(
            f"{type(optimizer).__name__} clips in a way of its own (_clip_gradients), which would cut the exchanged "
            "update; clip each gradient in the script before it is applied, or pass clip_norm=... to the compression "
            "and leave _clip_gradients to Keras"
        )
    if own is None:
        return settings
    kind, limit = own
    told = f"{kind}={limit:g} of the optimizer"
    if config.clip_norm is not None:
        if own != ("global_clipnorm", config.clip_norm):
            _tell(settings, clips_already(config.clip_norm, told))
        return settings
    _check_ranks_stay(kind)
    told = f"in compressed steps {told}" if config.automatic else told
    _tell(settings, clips_locally(told, limit, settings.averages))
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
