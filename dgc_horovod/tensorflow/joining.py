"""``hvd.join`` of TensorFlow: refused where gradients are compressed, before anything breaks."""

from __future__ import annotations

import functools
from typing import Any

import horovod.tensorflow as hvd
from horovod.tensorflow import mpi_ops

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.traffic import ledger

_stock_join = mpi_ops.join


@functools.wraps(_stock_join)
def join() -> Any:
    """As Horovod's, and an error while an optimizer or a tape compresses: its packets need every rank at every step.

    Raises:
        UnsupportedUse: something is compressed.
    """
    if any(tally.buckets() is not None for tally in ledger):
        raise UnsupportedUse(
            "hvd.join() with compressed gradients: a packet cannot be exchanged while a rank is in it. Give every rank "
            "the same number of steps (steps_per_epoch, drop_remainder, dataset.repeat()), or use Compression.none "
            "(dgcrun: --compression none)"
        )
    return _stock_join()


def install() -> None:
    """Put `join` in place of Horovod's."""
    hvd.join = mpi_ops.join = join
