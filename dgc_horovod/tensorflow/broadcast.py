"""``broadcast_variables`` for Keras 3 and TensorFlow variables."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod.agreement import check_agreement
from dgc_horovod.errors import ConfigError
from dgc_horovod.tensorflow.collectives import Collectives
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


def own_variables(optimizer: Any) -> list[Any]:
    """The variables of a Keras optimizer that each rank has for itself: its gradient accumulators."""
    return list(getattr(getattr(optimizer, "inner_optimizer", optimizer), "_accumulated_gradients", ()))


def shared_variables(optimizer: Any) -> list[Any]:
    """The variables of a Keras optimizer that are the same on every rank: all others."""
    own = {id(native(variable)) for variable in own_variables(optimizer)}
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
        ConfigError: `root_rank` is none, or these are no variables.
        RankMismatch: on every rank, if their variables differ in number, shape or dtype.
        CollectiveTimeout: another rank did not join within DGC_TIMEOUT seconds.
    """
    inner = [native(variable) for variable in variables]
    if not 0 <= root_rank < hvd.size():
        raise ConfigError(f"root_rank must be in [0, {hvd.size()}), got {root_rank}")
    if any(not isinstance(variable, tf.Variable) for variable in inner):
        raise ConfigError("broadcast_variables takes variables (model.variables), not their values (get_weights())")
    shapes = "\n".join(f"{i} {tuple(variable.shape)} {variable.dtype.name}" for i, variable in enumerate(inner))
    check_agreement(Collectives(process_set, "broadcast"), {"variables": shapes})
    with watched(process_set, f"the broadcast of variables from rank {root_rank}"):
        if inplace:
            inspect.unwrap(hvd.broadcast_variables)(inner, root_rank, process_set, inplace)  # ours under dgcrun
        else:
            tf.function(_broadcast, autograph=False)(inner, root_rank, process_set)


def _broadcast(variables: Sequence[Any], root_rank: int, process_set: hvd.ProcessSet) -> None:
    assign_from(variables, root_rank, process_set, "dgc.broadcast")


def assign_from(variables: Sequence[Any], root_rank: int, process_set: hvd.ProcessSet, name: str) -> list[Any]:
    """Set `variables` to what they are on `root_rank`, all at once; returns the operations, in a graph.

    Collectives are named by place: Keras' own names differ where one rank has built another model as well.
    """
    assigned = []
    for i, variable in enumerate(variables):
        carrier = _CARRIERS.get(variable.dtype, variable.dtype)
        bits = tf.bitcast(variable.read_value(), carrier) if carrier != variable.dtype else variable.read_value()
        sent = hvd.broadcast(bits, root_rank, name=f"{name}.{i}", ignore_name_scope=True, process_set=process_set)
        assigned.append(variable.assign(tf.bitcast(sent, variable.dtype) if carrier != variable.dtype else sent))
    return assigned
