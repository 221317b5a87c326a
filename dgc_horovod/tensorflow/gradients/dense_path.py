"""Gradients on the dense path: an allreduce each, which Horovod fuses; sparse ones as Horovod sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.wrapping.settings import Settings
from dgc_horovod.tensorflow.wrapping.variables import Gradient, combined

_HOROVOD_CANNOT = {tf.bfloat16: tf.float32}


class DensePath:
    """The dense exchange of one optimizer or tape.

    Args:
        collectives: transport of that optimizer or tape.
        settings: Horovod's arguments.
        compression: Horovod's ``Compression.none`` or ``Compression.fp16``.
        groups: group of each gradient by its index, -1 for none; a group is reduced as one operation.
    """

    def __init__(
        self, collectives: Collectives, settings: Settings, compression: Any, groups: Mapping[int, int]
    ) -> None:
        self._collectives, self._settings = collectives, settings
        self._compression, self._groups = compression, groups

    def nbytes(self, gradients: Iterable[Gradient]) -> int:
        """Bytes that `gradients` are when they are sent, from their static shapes; sparse ones have none."""
        half = self._compression is not hvd.Compression.none
        return sum(
            (2 if half else gradient.dtype.size) * (gradient.shape.num_elements() or 0)
            for gradient in gradients
            if not isinstance(gradient, tf.IndexedSlices)
        )

    def __call__(self, gradients: Mapping[int, Gradient]) -> dict[int, Gradient]:
        """The combined gradient for each index."""
        if self._collectives.alone:
            return dict(gradients)
        sparse = {i: g for i, g in gradients.items() if isinstance(g, tf.IndexedSlices)}
        dense = {i: g for i, g in gradients.items() if i not in sparse}
        with tf.device(self._settings.device_sparse):
            results: dict[int, Gradient] = {i: self._gathered(g, i) for i, g in sparse.items()}
        with tf.device(self._settings.device_dense):
            grouped: dict[int, list[int]] = {}
            for i, g in dense.items():
                group = self._groups.get(i, -1)
                if group < 0:
                    results[i] = self._reduced(g, i)
                else:
                    grouped.setdefault(group, []).append(i)
            for group, members in grouped.items():
                results.update(self._reduced_together(group, {i: dense[i] for i in members}))
        return results

    def _reduced(self, gradient: tf.Tensor, i: int) -> tf.Tensor:
        sent, context = self._coded(gradient)
        reduced = self._collectives.allreduce(sent, f"dense.{i}", self._settings.op, *self._settings.scales)
        return tf.cast(self._compression.decompress(reduced, context), gradient.dtype)

    def _coded(self, gradient: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return self._compression.compress(tf.cast(gradient, _HOROVOD_CANNOT.get(gradient.dtype, gradient.dtype)))

    def _reduced_together(self, group: int, gradients: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        coded = {i: self._coded(gradient) for i, gradient in gradients.items()}
        before, after = self._settings.scales
        reduced = hvd.grouped_allreduce(
            [sent for sent, _ in coded.values()],
            name=self._collectives.full_name(f"dense.group.{group}"),
            op=self._settings.op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self._collectives.process_set,
            ignore_name_scope=True,
        )
        return {
            i: tf.cast(self._compression.decompress(tensor, coded[i][1]), gradients[i].dtype)
            for i, tensor in zip(gradients, reduced, strict=True)
        }

    def _gathered(self, gradient: tf.IndexedSlices, i: int) -> tf.IndexedSlices:
        values, context = self._coded(gradient.values)
        values = self._compression.decompress(self._collectives.allgather(values, f"rows.{i}"), context)
        values = tf.cast(values, gradient.dtype)
        if self._settings.averages:
            values = values / self._collectives.size(gradient.dtype)
        # a rank that has none sends int64, and the width must be everybody's
        indices = self._collectives.allgather(tf.cast(gradient.indices, tf.int64), f"indices.{i}")
        return combined(tf.IndexedSlices(values, indices, gradient.dense_shape))
