"""Python functions inside a TensorFlow graph, on the arrays that the kernels work on, without a copy.

They must never wait for another rank: two calls could block the pool's threads in opposite orders on two ranks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.errors import BackendUnavailable
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import Array, Kernels

_log = logging.getLogger("dgc_horovod")
_SCALARS = (tf.bool, tf.int32, tf.int64)  # dtypes that Python functions return as flags, numbers and gates only
_ALIGNMENT = 64  # bytes; TensorFlow copies memory with less alignment


def kernels_on(device: str | None) -> Kernels:
    """Return the kernels for gradients on a GPU (through torch, by DLPack), or on the host, also without torch."""
    if device is not None:
        try:
            return registry.choose(device)
        except BackendUnavailable as error:
            _log.warning("dgc_horovod: gradients on %s go through host memory (%s)", device, error)
    threads = tf.config.threading.get_intra_op_parallelism_threads()  # that TensorFlow uses inside an operation
    return registry.choose("cpu", threads or len(os.sched_getaffinity(0)))


def host_call(
    function: Callable[..., Sequence[Any]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], kernels: Any = None
) -> list[tf.Tensor]:
    """Return the tensors of ``function(*inputs)``, which is called when the graph runs.

    Args:
        function: function of Arrays of `kernels` (NumPy arrays without) that returns one for each of `dtypes`; those of
            `_SCALARS` are scalars.
        inputs: tensors. A NumPy function sees their memory; a torch function gets them by DLPack, on their device.
        dtypes: dtypes of the results.
        kernels: `contract.Kernels` whose arrays the function works on; None: NumPy's.
    """
    if kernels is None or kernels.array_kind == "numpy":
        return _as_list(tf.numpy_function(lambda *arrays: list(function(*arrays)), list(inputs), list(dtypes)))

    def through_dlpack(*tensors: tf.Tensor) -> list[tf.Tensor]:
        arrays = [kernels.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)) for tensor in tensors]
        return [_as_tensor(result, kernels) for result in function(*arrays)]

    return _as_list(tf.py_function(through_dlpack, list(inputs), list(dtypes)))


def behind(gate: tf.Tensor, tensor: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return `tensor` once `gate` is there. Inputs of collectives pass through this, so that they run at every step.

    To TensorFlow a collective has no effect beside its result. It would run one on a constant once, while it optimizes
    the graph, in spite of control dependencies: ranks would hang, or apply that result for ever. Nothing is copied.

    Args:
        gate: scalar, an integer >= 0 that a host call has returned.
        tensor: tensor or IndexedSlices.
    """
    zero = tf.cast(tf.minimum(tf.reshape(gate, [1]), 0), tf.int32)

    def same(part: tf.Tensor) -> tf.Tensor:
        # a slice whose begin depends on the gate; TensorFlow would optimize away a reshape, or a product with zeros
        whole = tf.reshape(tf.slice(tf.reshape(part, [-1]), zero, [-1]), tf.shape(part))
        whole.set_shape(part.shape)
        return whole

    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(same(tensor.values), same(tensor.indices), tensor.dense_shape)
    return same(tensor)


def _as_list(results: tf.Tensor | Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return a list, with known shapes of scalars; in eager mode TensorFlow returns a single result without one."""
    found: list[Any] = list(results) if isinstance(results, (list, tuple)) else [results]
    for result in found:
        if result.dtype in _SCALARS:
            result.set_shape([])
    return found


def _as_tensor(result: Array, kernels: Any) -> tf.Tensor:
    if isinstance(result, (np.ndarray, np.generic)):
        return tf.convert_to_tensor(result)
    return tf.experimental.dlpack.from_dlpack(kernels.to_dlpack(result))


class Blocks:
    """Memory for vectors that are handed to TensorFlow, reused once it has released them.

    A step's updates are as large as the model: new memory for them would cost a page fault for every 4 KiB.

    Args:
        sizes: number of elements of each float32 vector.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        step = _ALIGNMENT // 4
        starts = np.cumsum([0, *(-(-size // step) * step for size in sizes)]).tolist()
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._nbytes = 4 * starts[-1] + _ALIGNMENT
        self._blocks: list[np.ndarray] = []

    def take(self) -> list[np.ndarray]:
        """Return one vector for each size, aligned, in memory that is not in use."""
        for i in range(len(self._blocks)):
            if sys.getrefcount(self._blocks[i]) == 2:  # the list's, and that of the argument: no view is left
                return self._views(self._blocks[i])
        self._blocks.append(np.empty(self._nbytes, np.uint8))
        return self._views(self._blocks[-1])

    def _views(self, block: np.ndarray) -> list[np.ndarray]:
        skip = -block.ctypes.data % _ALIGNMENT
        whole = block[skip : skip + self._nbytes - _ALIGNMENT].view(np.float32)
        return [whole[place] for place in self._places]
