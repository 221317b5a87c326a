"""``hvd.join()`` with compressed gradients: possible after the same number of steps on all ranks, otherwise an error.

While a rank is in Horovod's join, no packet can be exchanged: the allgather of the others ends Horovod's background
loop with "unordered_map::at". So the ranks meet before they join.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from dgc_horovod.errors import CollectiveTimeout, UnsupportedUse
from dgc_horovod.session.base import sessions
from dgc_horovod.tensorflow.distribution import Distribution, of_tapes
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.session.session import Session

_UNEVEN = (
    "hvd.join(): another rank did not call it. With compressed gradients in TensorFlow it cannot wait for ranks that "
    "have more data: give every rank the same number of steps (drop_remainder, steps_per_epoch, "
    "dataset.repeat().take(n)), or use compression none"
)
_stock_call = mpi_ops.MPI_LIB.horovod_join


def _of_optimizers() -> list[Distribution]:
    return [session.distribution for session in sessions() if isinstance(session, Session)]


def has_unused() -> bool:
    """Whether a compressed optimizer has made no step so far."""
    return any(each.settings.config is not None and not each.used for each in _of_optimizers())


def install() -> None:
    """Let the ranks meet before Horovod's join, from wherever a script imports it."""
    mpi_ops.MPI_LIB.horovod_join = _join


def _join(*args: object, **kwargs: object) -> Any:
    every = [*_of_optimizers(), *of_tapes.values()]
    if any(each.takes_part and each.compresses for each in every):
        _meet()
    for each in every:
        each.joins()
    return _stock_call(*args, **kwargs)


def _meet() -> None:
    """Wait until every rank has called join.

    Raises:
        UnsupportedUse: another rank did not come within DGC_TIMEOUT seconds; its next step fails there too.
    """
    if not tf.executing_eagerly():
        raise UnsupportedUse("hvd.join() inside a tf.function, while gradients are compressed; call it outside")
    try:
        Collectives(hvd.global_process_set, "join").gather_bytes(b"here", "meeting")
    except (CollectiveTimeout, tf.errors.OpError) as error:  # whichever rank's time is over first ends Horovod
        raise UnsupportedUse(_UNEVEN) from error
