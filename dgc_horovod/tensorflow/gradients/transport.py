"""Horovod's collectives inside TensorFlow graphs, with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod import envvars
from dgc_horovod.config_check import cut
from dgc_horovod.stats import Traffic
from dgc_horovod.tensorflow.gradients.host_calls import host_call
from dgc_horovod.tensorflow.gradients.watchdog import Watch, watched


class Collectives:
    """The exchanges of one optimizer or tape on one process set.

    Args:
        process_set: Horovod's process set; N is its size.
        tag: prefix of every name; names are fixed over the run, so that Horovod's cache always hits.
        timeout: seconds that `gather_bytes` waits for the others; None: DGC_TIMEOUT.
    """

    def __init__(self, process_set: hvd.ProcessSet, tag: str, timeout: float | None = None) -> None:
        self.process_set, self.tag = process_set, tag
        self.workers: int = process_set.size()
        self.rank: int = process_set.rank()
        self.alone = self.workers == 1 and not envvars.horovod_elastic()  # an elastic job may grow
        self.traffic = Traffic()
        self.watch, self._timeout = Watch(process_set), timeout

    def renew(self) -> None:
        """The ranks are others."""
        self.workers, self.rank = self.process_set.size(), self.process_set.rank()
        self.traffic = Traffic()
        self.watch.disarm()
        self.watch = Watch(self.process_set)

    @property
    def first_rank(self) -> int:
        """The first rank of the set, as Horovod numbers all."""
        return self.process_set.ranks[0] if self.process_set.ranks else 0

    def full_name(self, name: str) -> str:
        """The name under which Horovod knows the collective `name`."""
        return f"dgc.{self.tag}.{name}"

    def size(self, dtype: Any) -> tf.Tensor:
        """N as a tensor; in an elastic job it is asked when the graph runs."""
        if envvars.horovod_elastic():
            return tf.cast(hvd.size_op(process_set_id=self.process_set.process_set_id), dtype)
        return tf.cast(self.workers, dtype)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The ranks' tensors after one another, in rank order."""
        if self.alone:
            return tensor
        return hvd.allgather(tensor, self.full_name(name), ignore_name_scope=True, process_set=self.process_set)

    def alltoall(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Part i of N equal ones goes to rank i; what came, in rank order."""
        if self.alone:
            return tensor
        return hvd.alltoall(tensor, name=self.full_name(name), ignore_name_scope=True, process_set=self.process_set)

    def allreduce(
        self, tensor: tf.Tensor, name: str, op: int = hvd.Sum, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """The sum or average over the ranks."""
        if self.alone:
            return tensor
        return hvd.allreduce(
            tensor,
            name=self.full_name(name),
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self.process_set,
            ignore_name_scope=True,
        )

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """What rank `root` of the set has."""
        if self.alone:
            return tensor
        first = self.process_set.ranks[root] if self.process_set.ranks else root
        return hvd.broadcast(tensor, first, self.full_name(name), ignore_name_scope=True, process_set=self.process_set)

    def wait(self, pending: tf.Tensor) -> tf.Tensor:
        """The result itself: TensorFlow waits where it is used, and `watch` has the deadline."""
        return pending

    def in_time(self, name: str, given: Sequence[Any], reduce: Callable[[tf.Tensor], Any]) -> Any:
        """What `reduce` puts into the graph, with the clock running from when all of `given` is there.

        Args:
            name: name of what is waited for.
            given: tensors that this rank contributes.
            reduce: function that makes the operations, and returns their results; it is given what is there when the
                clock runs, see `behind`.
        """

        def arm() -> list[Any]:
            self.watch.arm(self.full_name(name))
            return [np.int32(0)]

        def disarm(_: Any) -> list[Any]:
            self.watch.disarm()
            return [np.bool_(True)]

        with tf.control_dependencies(tf.nest.flatten(list(given), expand_composites=True)):
            armed = host_call(arm, [], [tf.int32])
        results = reduce(armed[0])
        with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            disarmed = host_call(disarm, armed, [tf.bool])
        with tf.control_dependencies(disarmed):
            return tf.nest.map_structure(tf.identity, results)

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """The `data` of every rank, of any length, in rank order. Blocks, in eager mode; two collectives.

        Raises:
            CollectiveTimeout: another rank did not join within DGC_TIMEOUT seconds.
        """
        # a graph may be under construction
        with tf.init_scope(), watched(self.process_set, self.full_name(name), self._timeout):
            lengths = self.allgather(tf.constant([len(data)], tf.int64), f"{name}.lengths").numpy()
            own = tf.constant(np.frombuffer(data, np.uint8))
            everything = self.allgather(own, name).numpy().tobytes()
        return cut(everything, lengths.tolist())
