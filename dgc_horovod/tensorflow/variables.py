"""One view of Keras and TensorFlow variables and their gradients, their sets, and ``broadcast_variables`` for them."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from dgc_horovod import envvars
from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.session import base
from dgc_horovod.tensorflow.gradients.transport import Collectives, watched

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.gradients.exchange import Exchange

Gradient = Any  # a tf.Tensor, tf.IndexedSlices or None
Key = tuple[Any, ...]


def native(variable: object) -> Any:
    """Return the tf.Variable inside a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def key_of(variable: object) -> Key:
    """Return the identity of a variable; () for a tensor, which has none."""
    unique = getattr(native(variable), "_unique_id", None)
    return () if unique is None else (unique,)


def keys_of(given: object, argument: str) -> set[Key]:
    """Return the keys of one variable, or of several, or of none (None).

    Args:
        given: variables that a script has passed.
        argument: name of the argument, for the message.

    Raises:
        ConfigError: an entry is no variable, or its layer is not built: it would be ignored silently.
    """
    several = [] if given is None else [given] if key_of(given) or not isinstance(given, Iterable) else list(given)
    for each in several:
        if not key_of(each):
            raise ConfigError(
                f"{argument} must be variables of layers that are built (layer.weights), got "
                f"{getattr(each, 'path', None) or repr(each)[:80]}; build the model first: give it an Input, or call "
                "model.build(input_shape)"
            )
    return {key_of(each) for each in several}


def weights_of(layers: keras.Layer | Iterable[keras.Layer] | None) -> list[keras.Variable]:
    """Return all weights of one layer, of several, or of none (None); also frozen ones, which may be trained later.

    Raises:
        ConfigError: an entry is no layer of Keras, or not built: its weights would be averaged like all others.
    """
    several = [] if layers is None else [layers] if isinstance(layers, keras.Layer) else list(layers)
    for layer in several:
        if not isinstance(layer, keras.Layer):
            raise ConfigError(f"local_layers must be layers of Keras 3, got {layer!r:.80}; pass model.layers[:n]")
        if not layer.built:
            raise ConfigError(
                f"local_layers: layer {layer.name!r} is not built, so it has no weights yet; build the model first: "
                "give it an Input, or call model.build(input_shape)"
            )
    return [weight for layer in several for weight in layer.weights]


@dataclass(frozen=True)
class Source:
    """Properties of a variable (or a watched tensor) whose gradient is exchanged; does not keep it alive.

    Args:
        key: key of the variable, see `key_of`; of a tensor, its index among the sources.
        name: name of it, for messages.
        shape, dtype: shape and dtype of it and its gradient.
        cuda: torch's name of the GPU that holds it, such as "cuda:0"; None on the host.
    """

    key: Key
    name: str
    shape: tuple[Any, ...]
    dtype: str
    cuda: str | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def sources_of(variables: Iterable[Any]) -> tuple[Source, ...]:
    """A `Source` for each of `variables`."""
    return tuple(_source(i, variable) for i, variable in enumerate(variables))


def _source(i: int, variable: keras.Variable) -> Source:
    inner = native(variable)
    name = getattr(variable, "path", None) or getattr(inner, "name", None) or type(variable).__name__
    shape = tuple(None if n is None else int(n) for n in variable.shape)
    device = tf.DeviceSpec.from_string(getattr(inner, "device", "") or "")
    cuda = f"cuda:{device.device_index or 0}" if device.device_type == "GPU" else None
    return Source(key_of(variable) or ("tensor", i), name, shape, tf.as_dtype(inner.dtype).name, cuda)


def kind_of(gradient: Gradient) -> str:
    """Return the kind of a gradient: "none", "sparse" or "dense"."""
    if gradient is None:
        return "none"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def is_frozen(variable: object) -> bool:
    """Whether its layer is not trained now (``trainable = False``)."""
    return not getattr(variable, "trainable", True)


def is_of_tape(gradient: Gradient) -> bool:
    """Whether a compressed tape has returned it: it is an update of all ranks."""
    return hasattr(gradient, "_dgc_returned")


def zeros_for(source: Source, kind: str) -> Gradient:
    """Return a gradient of zeros, for a rank that has none while another has one of that kind."""
    if kind == "sparse":
        rows = tf.zeros((0, *source.shape[1:]), source.dtype)
        return tf.IndexedSlices(rows, tf.zeros((0,), tf.int64), tf.constant(source.shape, tf.int64))
    return tf.zeros(source.shape, source.dtype)


def scaled(gradient: Gradient, factor: tf.Tensor | float) -> Gradient:
    """Return ``factor * gradient``, also of a sparse one; `factor`: a number or a scalar tensor."""
    if not tf.is_tensor(factor) and factor == 1:
        return gradient
    return mapped(gradient, lambda x: x * tf.cast(factor, x.dtype))


def mapped(gradient: Gradient, function: Callable[[Any], Any]) -> Gradient:
    """Apply `function` to all elements, or to the rows of a sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def combined(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the same gradient with each row once: a step by rows must not get a row twice."""
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def all_finite(tensors: Iterable[Any]) -> tf.Tensor:
    """Whether every element of floating-point tensors is finite. Cost: a read of each."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


class VariableSet:
    """Variables that are given to ``apply`` or ``gradient`` together, and the agreement of the ranks on them.

    Args:
        sources: variables, as the caller gives them.
        kinds: kind of each gradient, over all ranks: "none", "sparse" or "dense".
        local: whether each gradient is not exchanged.

    Attributes:
        given: indices of the variables that have a gradient on some rank.
        active: indices of those that are not local.
        exchange: exchange of those; None: there are none.
    """

    exchange: Exchange | None = None

    def __init__(self, sources: Sequence[Source], kinds: Sequence[str], local: Sequence[bool]) -> None:
        self.sources, self.kinds, self.local = list(sources), list(kinds), list(local)
        self.given = [i for i, kind in enumerate(kinds) if kind != "none"]
        self.active = [i for i in self.given if not local[i]]

    def completed(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return `gradients` with zeros where this rank has none and another may have one."""
        result = []
        for source, kind, gradient in zip(self.sources, self.kinds, gradients, strict=True):
            if kind == "none" and gradient is not None:
                raise UnsupportedUse(
                    f"{source.name!r} had a gradient on no rank at the first step, and has one now; the set of "
                    "exchanged variables is fixed. Give every variable a gradient at the first step, or make a new "
                    "DistributedOptimizer when one is unfrozen"
                )
            if kind != "none" and gradient is None:
                gradient = zeros_for(source, kind)
            if kind == "dense" and isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            result.append(gradient)
        return result


def refuse_what_cannot_be_sent(source: Source) -> None:
    """Raise UnsupportedUse or ConfigError for a variable that no exchange takes."""
    if source.dtype.startswith("complex"):
        raise UnsupportedUse(f"{source.name!r} is complex, which neither Horovod nor the compression can exchange")
    if None in source.shape:
        raise ConfigError(f"{source.name!r} has the shape {source.shape}; every dimension must be known")


def common_kinds(collectives: Collectives, kinds: list[str]) -> list[str]:
    """Return for each source "none" if no rank has a gradient, "sparse" if all gradients are sparse, else "dense"."""
    theirs = [json.loads(data) for data in collectives.gather_bytes(json.dumps(kinds).encode(), "kinds")]
    common = []
    for each in zip(*theirs, strict=True):
        found = {kind for kind in each if kind != "none"}
        common.append("none" if not found else "sparse" if found == {"sparse"} else "dense")
    return common


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


# Dtypes that Horovod's broadcast does not support are sent as others of the same width.
_CARRIERS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
}


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
    shapes = "\n".join(f"{i} {tuple(variable.shape)} {variable.dtype.name}" for i, variable in enumerate(inner))
    if name is None:
        check_agreement(Collectives(process_set, "broadcast"), {"variables": shapes})
    elif not envvars.horovod_elastic():  # in an elastic job newcomers trace when the others do not
        _agree_once(process_set, name, shapes)
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


@functools.cache
def _agree_once(process_set: hvd.ProcessSet, name: str, shapes: str) -> None:
    """Raise RankMismatch on every rank if the variables of graphs differ; once, as a rank may trace more often."""
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
