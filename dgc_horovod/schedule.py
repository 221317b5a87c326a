"""Warm-up: training step (or epoch) -> density. Pure functions; the clock belongs to the caller."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgc_horovod.errors import ConfigError
from dgc_horovod.settings import FRACTION, WHEN, in_range, normalise, setting, whole


def _no_warmup(name: str, value: object) -> str:
    return "; for no warm-up pass warmup=None (dgcrun: --dgc-warmup-steps none)"


@dataclass(frozen=True, kw_only=True)
class WarmupSchedule:
    """Exponential density warm-up: ``first_density * factor**stage`` until the final density is reached.

    DGC, section 3.3: sparsity 75%, 93.75%, 98.4375%, 99.6%, then 99.9%. The warm-up is divided into as
    many equal stages as the geometric row has members above the final density (four for 0.001), so
    ``WarmupSchedule(epochs=4)`` lowers the density once an epoch, as in the paper.

    Args:
        steps: length in optimizer steps (with local steps: exchanges), >= 1. Give either this or `epochs`.
        epochs: length in epochs, > 0. The epoch is computed from `steps_per_epoch` where that is given,
            otherwise observed (``DistributedSampler.set_epoch``, ``optimizer.set_epoch``).
        steps_per_epoch: optimizer steps (with local steps: exchanges) in an epoch, >= 1; only with `epochs`.
            Where the epoch is observed instead, the density changes at the start of an epoch only.
        first_density: density of the first stage, in (0, 1]; a final density at or above it needs no warm-up.
        factor: ratio of the densities of one stage and the stage before, in (0, 1).
    """

    steps: int | None = setting(
        None, "length of the warm-up in steps (local steps: exchanges), >= 1", whole(1, _no_warmup), WHEN
    )
    epochs: float | None = setting(
        None, "the same in epochs, > 0 (4 in the paper)",
        in_range("a number above 0", lambda value: value > 0, _no_warmup), WHEN,
    )  # fmt: skip
    steps_per_epoch: int | None = setting(
        None, "steps in an epoch, if the epoch cannot be observed", whole(1, _no_warmup), WHEN
    )
    first_density: float = setting(0.25, "density that the warm-up begins with, in (0, 1]", FRACTION, WHEN)
    factor: float = setting(
        0.25, "density of a warm-up stage over the one before, in (0, 1)",
        in_range("in (0, 1)", lambda value: 0 < value < 1), WHEN,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"WarmupSchedule takes either steps or epochs, got steps={self.steps} and epochs={self.epochs}; "
                "e.g. WarmupSchedule(epochs=4, steps_per_epoch=390)"
            )
        normalise(self, "WarmupSchedule: ")
        if self.steps_per_epoch is not None and self.epochs is None:
            raise ConfigError(
                "WarmupSchedule: steps_per_epoch goes with epochs, not with steps; drop it or give epochs"
            )

    @property
    def needs_epoch(self) -> bool:
        """Whether the epoch must be given from outside, because it cannot be computed from the step."""
        return self.epochs is not None and self.steps_per_epoch is None

    def stages(self, final_density: float) -> int:
        """Return the number of densities of the geometric row above `final_density` (0: nothing to warm up)."""
        if self.first_density <= final_density:
            return 0
        return math.ceil(math.log(final_density / self.first_density) / math.log(self.factor) - 1e-9)

    def fraction_done(self, step: int, epoch: int | None) -> float:
        """Return the fraction of the warm-up that is done before `step`: 0 at its start, >= 1 after its end."""
        if self.steps is not None:
            return step / self.steps
        assert self.epochs is not None
        if self.steps_per_epoch is not None:
            return step / self.steps_per_epoch / self.epochs
        if epoch is None:
            raise ConfigError(
                "the warm-up is given in epochs but the epoch is not known: pass steps_per_epoch to WarmupSchedule, "
                "or call DistributedSampler.set_epoch / optimizer.set_epoch before the first step of each epoch "
                "(in Keras BroadcastGlobalVariablesCallback does), or give the warm-up in steps "
                "(dgcrun: --dgc-warmup-steps, or --dgc-warmup-steps-per-epoch beside the epochs)"
            )
        return epoch / self.epochs


def densities(final_density: float, warmup: WarmupSchedule | None) -> set[float]:
    """Return all densities of a run, see `density_at`."""
    if warmup is None:
        return {final_density}
    row = (warmup.first_density * warmup.factor**stage for stage in range(warmup.stages(final_density)))
    return {final_density, *(max(final_density, density) for density in row)}


def density_at(final_density: float, warmup: WarmupSchedule | None, step: int, epoch: int | None = None) -> float:
    """Density of optimizer step `step` (from 0).

    Args:
        final_density: density after the warm-up, in (0, 1].
        warmup: the schedule, or None for no warm-up.
        step: optimizer steps finished so far, >= 0.
        epoch: current epoch from 0, where it is known from outside.

    Returns:
        A density in [final_density, 1].

    Raises:
        ConfigError: the schedule needs an epoch and `epoch` is None.
    """
    if warmup is None:
        return final_density
    stages = warmup.stages(final_density)
    stage = int(warmup.fraction_done(step, epoch) * stages + 1e-9)  # at a boundary the product may be a little less
    if stage >= stages:
        return final_density
    return max(final_density, warmup.first_density * warmup.factor ** max(0, stage))
