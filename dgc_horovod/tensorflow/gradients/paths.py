"""The graph of one bucket, and of the variables outside of buckets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from dgc_horovod import envvars
from dgc_horovod.config import AUTO, densities
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.exchange import IMPLEMENTATIONS
from dgc_horovod.exchange.contract import Round, start
from dgc_horovod.kernels.contract import Kernels
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.settings import Settings
from dgc_horovod.tensorflow.variables import Gradient, Source, combined
from dgc_horovod.wire.bucket import PADDING

_HOROVOD_CANNOT = {tf.bfloat16: tf.float32}


class DensePath:
    """The dense exchange of one optimizer or tape.

    Args:
        collectives: transport of that optimizer or tape.
        settings: Horovod's arguments.
        compression: Horovod's ``Compression.none`` or ``Compression.fp16``.
        sources: variables of the gradients; a group of them is reduced as one operation.
    """

    def __init__(
        self, collectives: Collectives, settings: Settings, compression: type[Compressor], sources: Sequence[Source]
    ) -> None:
        self._collectives, self._settings = collectives, settings
        self._compression, self._groups = compression, settings.group_numbers(sources)

    def nbytes(self, gradients: Iterable[Gradient]) -> int:
        """Return the bytes of `gradients` when sent, by their static shapes; sparse ones are not counted."""
        half = self._compression is not hvd.Compression.none
        return sum(
            (2 if half else gradient.dtype.size) * (gradient.shape.num_elements() or 0)
            for gradient in gradients
            if not isinstance(gradient, tf.IndexedSlices)
        )

    def __call__(self, gradients: Mapping[int, Gradient]) -> dict[int, Gradient]:
        """Return the combined gradient for each index."""
        if self._collectives.alone:
            return dict(gradients)
        results: dict[int, Gradient] = {}
        together: dict[str, list[int]] = {}  # indices of dense gradients, by name of their collective
        for i, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices):
                with tf.device(self._settings.device_sparse):
                    results[i] = self._gathered(gradient, i)
            else:
                group = self._groups[i]
                together.setdefault(f"dense.{i}" if group < 0 else f"dense.group.{group}", []).append(i)
        with tf.device(self._settings.device_dense):
            for name, members in together.items():
                given = [gradients[i] for i in members]
                results.update(zip(members, self._reduced(given, name, self._groups[members[0]] >= 0), strict=True))
        return results

    def _reduced(self, gradients: Sequence[tf.Tensor], name: str, grouped: bool) -> list[tf.Tensor]:
        """Return the combined dense gradients of a group, or of one variable in none."""
        sent = [tf.cast(gradient, _HOROVOD_CANNOT.get(gradient.dtype, gradient.dtype)) for gradient in gradients]
        before, after = self._settings.scales
        how = {"op": self._settings.op, "prescale_factor": before, "postscale_factor": after}
        operation, given = (hvd.grouped_allreduce, sent) if grouped else (hvd.allreduce, sent[0])
        reduced = self._collectives.run(operation, given, name, compression=self._compression, **how)
        found = reduced if grouped else [reduced]
        return [tf.cast(tensor, gradient.dtype) for tensor, gradient in zip(found, gradients, strict=True)]

    def _gathered(self, gradient: tf.IndexedSlices, i: int) -> tf.IndexedSlices:
        fits = tf.cast(gradient.values, _HOROVOD_CANNOT.get(gradient.dtype, gradient.dtype))
        sent, context = self._compression.compress(fits)
        values = self._compression.decompress(self._collectives.allgather(sent, f"rows.{i}"), context)
        values = tf.cast(values, gradient.dtype)
        if self._settings.averages:
            values = values / self._collectives.size(gradient.dtype)
        # a rank without a gradient sends int64, and all ranks must send the same dtype
        indices = self._collectives.allgather(tf.cast(gradient.indices, tf.int64), f"indices.{i}")
        return combined(tf.IndexedSlices(values, indices, gradient.dense_shape))


_ALIGNMENT = 64  # bytes; TensorFlow copies memory with less alignment


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


MESSAGE = [tf.int32, tf.uint8]  # index of a collective among those of its round, and bytes
_Form = tuple[str, str, str] | None


class BucketRun:
    """A bucket in a graph.

    Args:
        engine: its engine, replaced when the ranks change.
        members: indices of its tensors in the list of gradients.

    Attributes:
        index: its place among the buckets.
        blocks: memory for its updates.
    """

    def __init__(self, engine: BucketEngine, members: tuple[int, ...]) -> None:
        self.engine, self.members, self.index = engine, members, engine.bucket.index
        self.blocks = Blocks([segment.numel for segment in engine.whole.segments])

    @property
    def kernels(self) -> Kernels:
        """Kernels of its device."""
        return self.engine.kernels

    def new_updates(self) -> list[Any]:
        """Return memory for one update of each tensor."""
        if self.kernels.array_kind == "numpy":
            return self.blocks.take()
        return [self.kernels.new(segment.numel) for segment in self.engine.whole.segments]

    def of_slice(self, gradients: Sequence[Any], whole: bool) -> list[Any]:
        """Return the gradients of this worker's slice of a bucket, from the flat slice, or from whole gradients."""
        segments, engine = self.engine.bucket.segments, self.engine
        if not whole:
            (flat,) = gradients
            return [flat[segment.place] for segment in segments]
        of_name = {segment.name: gradient for segment, gradient in zip(engine.whole.segments, gradients, strict=True)}
        of_name[PADDING] = self.kernels.new(engine.topology.node_size)
        return [of_name[segment.name][segment.offset :][: segment.numel] for segment in segments]

    @cached_property
    def alternatives(self) -> list[dict[_Form, Round | None]]:
        """Possible collectives of each round, by form; None: the round may not exist."""
        config, engine = self.engine.config, self.engine
        if envvars.horovod_elastic():
            wire = engine.spec(config.density).wire
            owners = config.shards or (config.exchange == AUTO and config.max_bytes_per_step is not None)
            allowed = [each for each in IMPLEMENTATIONS.values() if owners or not each.keeps_remainder]
            possible = [exchange.rounds_of(wire, engine.workers) for exchange in allowed]
        else:
            possible = [engine.spec(density).rounds for density in densities(config.density, config.warmup)]
        most = max(map(len, possible))
        found: list[dict[_Form, Round | None]] = [{} for _ in range(most)]
        for rounds in possible:
            for number in range(most):
                collective = rounds[number] if number < len(rounds) else None
                found[number].setdefault(_form(collective), collective)
        return found

    def message(self, number: int, buffer: np.ndarray | None) -> list[Any]:
        """Return the message of round `number` for `carried`; `buffer` None: there is no such round."""
        rounds = self.engine.exchange.rounds
        form = _form(rounds[number] if number < len(rounds) else None)
        which = np.int32(list(self.alternatives[number]).index(form))
        if buffer is None:
            return [which, np.empty(0, np.uint8)]
        # the engine writes the next packet to the same memory
        return [which, (buffer.copy() if buffer.dtype == np.uint8 else buffer).view(np.uint8)]

    def carried(self, transports: Mapping[str, Any], number: int, message: list[tf.Tensor]) -> tf.Tensor:
        """Run round `number`; return the bytes of its result, none if there is no such round."""
        which, data = message

        def carry(collective: Round | None) -> tf.Tensor:
            if collective is None:
                return tf.zeros([0], tf.uint8)
            is_packets = collective.dtype == "uint8"
            given = data if is_packets else tf.bitcast(tf.reshape(data, [-1, 4]), tf.float32)
            received = start(transports, collective, given, self.engine.bucket.name)
            return received if is_packets else tf.reshape(tf.bitcast(received, tf.uint8), [-1])

        branches = [partial(carry, collective) for collective in self.alternatives[number].values()]
        return branches[0]() if len(branches) == 1 else tf.switch_case(which, branches)


def _form(collective: Round | None) -> _Form:
    """Return the properties that distinguish collectives of a graph; sizes may differ between densities."""
    return None if collective is None else (collective.name, collective.kind, collective.dtype)
