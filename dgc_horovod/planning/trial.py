"""The trials of ``auto``: the densities and exchanges that are tried, for how many steps, and what counts as faster."""

from __future__ import annotations

from dgc_horovod.config import DGCConfig

# Number of times that an element is to be sent over a run: fewer lose more (docs/quality.md)
SENT = 20
LEAST = 0.001  # of Lin et al., arXiv 1712.01887, who have no lower one
# Runs that need a higher one are too short: the momentum of an element is often masked before the element is sent, and
# is lost (docs/quality.md, Short runs and long ones)
MOST = 0.01


def fitting(total_steps: int) -> float:
    """The smallest density at which an element is sent `SENT` times in a run: ``SENT / total_steps``, in [LEAST, 1].

    Args:
        total_steps: number of steps of the run, >= 1.
    """
    return min(1.0, max(LEAST, float(f"{SENT / total_steps:.2g}")))


def is_too_short(total_steps: int) -> bool:
    """Whether a run is so short that an element is sent `SENT` times only at a density above `MOST`."""
    return SENT > MOST * total_steps


def fitted(config: DGCConfig) -> DGCConfig:
    """`config` with the density that fits its ``total_steps``, where they are known."""
    return config if config.total_steps is None else config.replace(density=fitting(config.total_steps))


DENSE, COMPRESSED = "dense", "compressed"
SETTLING, TIMED = 5, 20  # steps after a change that are not timed, at least 1, and steps that are, at least
MOST_TIMED = 100
GAIN = 0.95  # share of the dense step's time at which a compressed one counts as faster
HOPEFUL = 1.1  # share of the dense step's time above which a predicted step is not tried
