"""``broadcast_variables`` for Keras 3 and TensorFlow variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod.tensorflow.variables import native
from dgc_horovod.tensorflow.watch import watched

# What Horovod's broadcast does not know travels as something of the same width: bits are all that matters.
_CARRIERS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
}


def shared_variables(optimizer: Any) -> list[Any]:
    """The variables of a Keras optimizer that are the same on every rank: all but its gradient accumulators."""
    holder = getattr(optimizer, "inner_optimizer", optimizer)
    own = {id(native(variable)) for variable in getattr(holder, "_accumulated_gradients", ())}
    return [variable for variable in optimizer.variables if id(native(variable)) not in own]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Set `variables` on every rank to what they are on `root_rank`.

    Args:
        variables: of Keras or TensorFlow, the same in the same order on every rank.
        root_rank: whose values are sent.
        process_set: the ranks that take part.
        inplace: as in Horovod; for variables of dtypes that it knows.

    Raises:
        CollectiveTimeout: another rank did not join within DGC_TIMEOUT seconds.
    """
    with watched(process_set, f"the broadcast of variables from rank {root_rank}"):
        _broadcast([native(variable) for variable in variables], root_rank, process_set, inplace)


def _broadcast(inner: list[Any], root_rank: int, process_set: hvd.ProcessSet, inplace: bool) -> None:
    known = [variable for variable in inner if variable.dtype not in _CARRIERS]
    if known:
        hvd.broadcast_variables(known, root_rank, process_set, inplace)
    for i, variable in enumerate(variable for variable in inner if variable.dtype in _CARRIERS):
        bits = tf.bitcast(variable.read_value(), _CARRIERS[variable.dtype])
        sent = hvd.broadcast(bits, root_rank, name=f"dgc.broadcast.{i}", process_set=process_set)
        variable.assign(tf.bitcast(sent, variable.dtype))
