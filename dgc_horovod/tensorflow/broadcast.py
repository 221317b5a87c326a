"""``broadcast_variables`` for Keras 3 and TensorFlow variables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from dgc_horovod import envvars
from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import ConfigError
from dgc_horovod.session import base
from dgc_horovod.tensorflow.gradients.transport import Collectives, watched
from dgc_horovod.tensorflow.wrapping.variables import native

# Dtypes that Horovod's broadcast does not support are sent as others of the same width.
_CARRIERS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
}


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables of a Keras optimizer that are each rank's own: its gradient accumulators."""
    return list(getattr(getattr(optimizer, "inner_optimizer", optimizer), "_accumulated_gradients", ()))


def shared_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables of a Keras optimizer that are equal on every rank: all others."""
    own = {id(native(variable)) for variable in own_variables(optimizer)}
    return [variable for variable in optimizer.variables if id(native(variable)) not in own]


def values_of(variables: Iterable[Any]) -> list[np.ndarray]:
    """Return copies of the values of variables."""
    return [variable.numpy() for variable in variables]


def assign(variables: Iterable[Any], values: Iterable[np.ndarray]) -> None:
    """Set variables to values of `values_of`."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    inplace: bool = False,
) -> None:
    """Set `variables` on every rank to the values of `root_rank`, at once or when the tf.function runs.

    Args:
        variables: Keras or TensorFlow variables, the same in the same order on every rank.
        root_rank: rank whose values are sent, 0 <= root_rank < hvd.size().
        process_set: ranks that take part.
        inplace: whether Horovod broadcasts in place; for variables of dtypes that it supports.

    Raises:
        ConfigError: `root_rank` is out of range, or these are no variables.
        RankMismatch: on every rank, if their variables differ in number, shape or dtype.
        CollectiveTimeout: another rank did not join within DGC_TIMEOUT seconds; TensorFlow's error, inside a graph.
    """
    inner = [native(variable) for variable in variables]
    if not 0 <= root_rank < hvd.size():
        raise ConfigError(f"root_rank must be in [0, {hvd.size()}), got {root_rank}")
    if any(not isinstance(variable, tf.Variable) for variable in inner):
        raise ConfigError("broadcast_variables takes variables (model.variables), not their values (get_weights())")
    name = _name_in_graph()
    _agree(inner, process_set, name)
    if inplace or name is None:
        with watched(process_set, f"the broadcast of variables from rank {root_rank}"):
            if inplace:
                inspect.unwrap(hvd.broadcast_variables)(inner, root_rank, process_set, inplace)  # ours under dgcrun
            else:
                tf.function(assign_from, autograph=False)(inner, root_rank, process_set, "dgc.broadcast")
    else:
        collectives, values = Collectives(process_set, name), [variable.read_value() for variable in inner]
        full = collectives.full_name("")
        collectives.in_time("*", values, lambda _: assign_from(inner, root_rank, process_set, full))
    base.weights_set(inner)


def _name_in_graph() -> str | None:
    """Return a name for this broadcast in the tf.function that is traced; None outside of one.

    Two broadcasts of a graph may run at the same time, so they must not share names. Those of different graphs may,
    so that names stay the same however often a script traces.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not isinstance(graph, FuncGraph):
        return None
    while isinstance(graph.outer_graph, FuncGraph):  # branches and loops are graphs in a graph
        graph = graph.outer_graph
    with graph.name_scope(None):  # Keras' own names differ between ranks
        return str(graph.unique_name("dgc.broadcast"))


def _agree(variables: Sequence[tf.Variable], process_set: hvd.ProcessSet, name: str | None) -> None:
    """Raise RankMismatch on every rank if their variables differ; for graphs once, as a rank may trace more often."""
    shapes = "\n".join(f"{i} {tuple(variable.shape)} {variable.dtype.name}" for i, variable in enumerate(variables))
    if name is None:
        check_agreement(Collectives(process_set, "broadcast"), {"variables": shapes})
    elif not envvars.horovod_elastic():  # in an elastic job newcomers trace when the others do not
        _agree_once(process_set, name, shapes)


@functools.cache
def _agree_once(process_set: hvd.ProcessSet, name: str, shapes: str) -> None:
    check_agreement(Collectives(process_set, "broadcast"), {"variables": shapes})


def assign_from(variables: Sequence[Any], root_rank: int, process_set: hvd.ProcessSet, name: str) -> list[Any]:
    """Set `variables` to the values of `root_rank`, all at once; returns the operations, in a graph.

    Collectives are named by place: Keras' own names differ where one rank has built another model as well.
    """
    assigned = []
    for i, variable in enumerate(variables):
        carrier = _CARRIERS.get(variable.dtype, variable.dtype)
        bits = tf.bitcast(variable.read_value(), carrier) if carrier != variable.dtype else variable.read_value()
        sent = hvd.broadcast(bits, root_rank, name=f"{name}.{i}", ignore_name_scope=True, process_set=process_set)
        assigned.append(variable.assign(tf.bitcast(sent, variable.dtype) if carrier != variable.dtype else sent))
    return assigned
