"""Horovod's arguments, checked once and kept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list

from dgc_horovod import envvars
from dgc_horovod.compression import config_of
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.tensorflow.compression import Compression
from dgc_horovod.tensorflow.variables import key_of

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True, eq=False)
class Settings:
    """How the ranks' gradients are combined. The fields are the arguments of Horovod's factories."""

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

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged, not summed."""
        return self.op == hvd.Average

    @property
    def scales(self) -> tuple[float, float]:
        """Factors before and after the sum, for Horovod."""
        factor = self.gradient_predivide_factor
        return (1 / factor, factor) if self.averages else (1.0, 1.0)

    def group_numbers(self, sources: Sequence[Any]) -> list[int]:
        """The group of each source, from 0; -1 for those in none."""
        groups = self.groups
        if isinstance(groups, int):
            groups = split_list(list(sources), groups)
        number = {key_of(source): i for i, group in enumerate(groups or []) for source in group}
        return [number.get(key_of(source), -1) for source in sources]


def make_settings(compression: Any, num_groups: int, groups: Groups, **fields: Any) -> Settings:
    """Check Horovod's arguments.

    Raises:
        ConfigError: one is out of range.
        UnsupportedUse: TensorFlow 1 graphs, Adasum, compression under Horovod Elastic.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UnsupportedUse(
            "eager execution is switched off (a TensorFlow 1 graph); dgc_horovod needs TensorFlow 2: remove "
            "tf.compat.v1.disable_eager_execution() and disable_v2_behavior()"
        )
    config = config_of(compression)
    settings = Settings(compression, config, groups=groups if groups is not None else num_groups or None, **fields)
    if settings.op not in (hvd.Average, hvd.Sum):
        raise UnsupportedUse("op must be hvd.Average or hvd.Sum; Adasum and the others have no form under Keras 3")
    if settings.gradient_predivide_factor != 1.0 and not settings.averages:
        raise ConfigError(
            f"gradient_predivide_factor={settings.gradient_predivide_factor} goes with op=hvd.Average only; leave it "
            "at 1.0"
        )
    if isinstance(settings.groups, int) and settings.groups < 1:
        raise ConfigError(f"groups must be >= 1 or lists of variables, got {settings.groups}")
    if config is not None and envvars.horovod_elastic():
        raise UnsupportedUse(
            "compression does not work under Horovod Elastic yet: residuals would not survive a change of ranks; "
            "launch with a fixed -np, or use compression=Compression.none"
        )
    return settings
