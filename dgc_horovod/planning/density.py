"""Which density fits a run of so many steps."""

from __future__ import annotations

from dgc_horovod.config import DGCConfig

# How often a coordinate is to be sent over a run: fewer lose more (docs/quality.md)
SENT = 20
LEAST = 0.001  # of Lin et al., arXiv 1712.01887, who have no lower one
# Runs that need a higher one are too short: masked, the momentum of an element seldom lasts until it is sent, and is
# lost (docs/quality.md, Short runs and long ones)
MOST = 0.01


def fitting(total_steps: int) -> float:
    """The smallest density at which a coordinate is sent `SENT` times in a run: ``SENT / total_steps``, in [LEAST, 1].

    Args:
        total_steps: number of steps of the run, >= 1.
    """
    return min(1.0, max(LEAST, float(f"{SENT / total_steps:.2g}")))


def is_too_short(total_steps: int) -> bool:
    """Whether a run is so short that a coordinate is sent often enough only at a density above `MOST`."""
    return SENT > MOST * total_steps


def fitted(config: DGCConfig) -> DGCConfig:
    """`config` with the density that fits its ``total_steps``, where they are known."""
    return config if config.total_steps is None else config.replace(density=fitting(config.total_steps))
