"""What the ranks agree on before anything is chosen: whether there is a choice, at which density, from what on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dgc_horovod.notices import SPARSE, tell_stock
from dgc_horovod.planning.density import fitted
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.wrapping.settings import STOCK, Settings


def for_a_choice(settings: Settings, kinds: Sequence[str], run_steps: int | None) -> Settings:
    """`settings` of an exchange that is to be chosen, now that the ranks know what is exchanged; two collectives.

    Args:
        settings: settings with ``automatic`` compression.
        kinds: kind of each gradient that is exchanged, over all ranks.
        run_steps: number of steps of the run, where this rank knows it; the ranks take the largest.

    Returns:
        Those without compression, where gradients are sparse; else those with the density that fits the run.
    """
    config, collectives = settings.config, Collectives(settings.process_set, "start")
    assert config is not None
    if "sparse" in kinds and not settings.sparse_as_dense:
        if collectives.rank == 0:
            tell_stock(SPARSE, STOCK)
        return settings.as_stock()
    told = [int(data) for data in collectives.gather_bytes(b"%d" % (run_steps or 0), "run")]
    if config.total_steps is None and max(told):
        config = config.replace(total_steps=max(told))
    return dataclasses.replace(settings, config=fitted(config))
