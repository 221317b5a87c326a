"""Keras and TensorFlow variables, seen alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Variable = Any  # a keras.Variable or a tf.Variable
Gradient = Any  # a tf.Tensor, tf.IndexedSlices or None


def native(variable: Variable) -> Any:
    """The tf.Variable inside a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def key_of(source: Any) -> tuple[Any, ...]:
    """What tells one source of gradients from another; for a tensor that is no variable, its shape and dtype."""
    inner = native(source)
    unique = getattr(inner, "_unique_id", None)
    if unique is not None:
        return (unique,)
    return ("tensor", tuple(inner.shape.as_list()), inner.dtype.name)


def name_of(source: Any) -> str:
    """How the user knows it."""
    return getattr(source, "path", None) or getattr(source, "name", None) or type(source).__name__


def shape_of(source: Any) -> tuple[int, ...]:
    """Its shape."""
    return tuple(int(n) for n in source.shape)


def dtype_of(source: Any) -> str:
    """The name of its dtype."""
    return tf.as_dtype(native(source).dtype).name


def cuda_device(source: Any) -> str | None:
    """ "cuda:0" for a source on the first GPU, None for one on the host."""
    device = tf.DeviceSpec.from_string(getattr(native(source), "device", "") or "")
    return f"cuda:{device.device_index or 0}" if device.device_type == "GPU" else None


def kind_of(gradient: Gradient) -> str:
    """ "none", "sparse" or "dense"."""
    if gradient is None:
        return "none"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def zeros_for(source: Any, kind: str) -> Gradient:
    """A gradient of nothing, where this rank has none and another has one of that kind."""
    shape, dtype = shape_of(source), tf.as_dtype(native(source).dtype)
    if kind == "sparse":
        rows = tf.zeros((0, *shape[1:]), dtype)
        return tf.IndexedSlices(rows, tf.zeros((0,), tf.int64), tf.constant(shape, tf.int64))
    return tf.zeros(shape, dtype)


def combined(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once: what a step adds row by row must not meet a row twice."""
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def keys_of(sources: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """`key_of` each."""
    return tuple(key_of(source) for source in sources)
