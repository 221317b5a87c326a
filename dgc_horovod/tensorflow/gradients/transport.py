"""Python functions and Horovod's collectives in a TensorFlow graph, and the watchdog of every wait.

Python functions work on the arrays of the kernels, without a copy. They must never wait for another rank: two calls
could block the pool's threads in opposite orders on two ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod import envvars, leaving
from dgc_horovod.config_check import cut
from dgc_horovod.core.nodes import LAST_STEP_SECONDS, declare, declared, meet_at_exit
from dgc_horovod.errors import BackendUnavailable, CollectiveTimeout
from dgc_horovod.exchange.contract import ALL, BETWEEN, INSIDE
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import Array, Kernels
from dgc_horovod.notices import timed_out
from dgc_horovod.stats import Traffic

_log = logging.getLogger("dgc_horovod")
_SCALARS = (tf.bool, tf.int32, tf.int64)  # dtypes that Python functions return as flags, numbers and gates only


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
    function: Callable[..., Sequence[Any] | None],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType] = (tf.bool,),
    kernels: Any = None,
) -> list[tf.Tensor]:
    """Return the tensors of ``function(*inputs)``, which is called when the graph runs.

    Args:
        function: function of Arrays of `kernels` (NumPy arrays without) that returns one for each of `dtypes`; those of
            `_SCALARS` are scalars. If it returns nothing, the tensor is True.
        inputs: tensors. A NumPy function sees their memory; a torch function gets them by DLPack, on their device.
        dtypes: dtypes of the results.
        kernels: `contract.Kernels` whose arrays the function works on; None: NumPy's.
    """

    def called(*arrays: Array) -> list[Any]:
        found = function(*arrays)
        return [np.bool_(True)] if found is None else list(found)

    if kernels is None or kernels.array_kind == "numpy":
        return _as_list(tf.numpy_function(called, list(inputs), list(dtypes)))

    def through_dlpack(*tensors: tf.Tensor) -> list[tf.Tensor]:
        arrays = [kernels.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)) for tensor in tensors]
        return [_as_tensor(result, kernels) for result in called(*arrays)]

    return _as_list(tf.py_function(through_dlpack, list(inputs), list(dtypes)))


def behind(gate: tf.Tensor, tensor: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return `tensor` once `gate` is there. Inputs of collectives pass through this, so that they run at every step.

    To TensorFlow a collective has no effect beside its result. It would run one on a constant once, while it optimizes
    the graph, in spite of control dependencies: ranks would hang, or apply that result for ever. Nothing is copied.

    Args:
        gate: scalar that a host call has returned, True or an integer >= 0.
        tensor: tensor or IndexedSlices.
    """
    zero = tf.cast(tf.minimum(tf.reshape(tf.cast(gate, tf.int64), [1]), 0), tf.int32)

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


_LOOK_EVERY = 0.25  # seconds
_SHUTDOWN_LASTS = 60.0  # most seconds that the end of the process waits for a shutdown under way


class Watch:
    """The clock of one user of collectives on `process_set`; `timeout` in seconds, None: DGC_TIMEOUT."""

    def __init__(self, process_set: hvd.ProcessSet, timeout: float | None = None) -> None:
        self.process_set = process_set
        self.rank, self._workers = process_set.rank(), process_set.size()
        self.timeout = timeout or envvars.timeout_seconds()
        self.deadline: float | None = None
        self.what = ""
        self.error: CollectiveTimeout | None = None

    @property
    def workers(self) -> int:
        """N; in an elastic job read each time: a set of one rank goes on after the others have shut Horovod down."""
        return self.process_set.size() if envvars.horovod_elastic() else self._workers

    def arm(self, what: str) -> None:
        """Start the clock for `what`: this rank has contributed its part."""
        self.error = None
        if self.workers > 1:
            self.what, self.deadline = what, time.monotonic() + self.timeout
            _watcher.look_after(self)

    def disarm(self) -> None:
        """Stop the clock: the result is there, or no longer needed."""
        self.deadline = None

    def expire(self) -> None:
        """Note and log that the time is over."""
        text = timed_out(self.rank, self._workers, self.what, self.timeout)
        self.error, self.deadline = CollectiveTimeout(text), None
        _log.error("dgc_horovod: CollectiveTimeout: %s. Shutting Horovod down", self.error)


@contextmanager
def watched(process_set: hvd.ProcessSet, what: str, timeout: float | None = None) -> Iterator[None]:
    """Watch blocking operations inside, in eager mode.

    Raises:
        CollectiveTimeout: they did not end within `timeout` seconds (None: DGC_TIMEOUT).
    """
    watch = Watch(process_set, timeout)
    watch.arm(what)
    try:
        yield
    except (tf.errors.OpError, ValueError) as error:  # ValueError: Horovod is not initialized any more
        raise watch.error or error from None
    finally:
        watch.disarm()


class _Watcher:
    """The thread of the watchdog, and the clocks that it watches."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._lock = threading.Lock()  # steps of several threads arm their clocks

    def look_after(self, watch: Watch) -> None:
        """Watch `watch` from now on."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None or not self._thread.is_alive():
                self._ending = False
                self._thread = threading.Thread(target=self._look, name="dgc-watch", daemon=True)
                self._thread.start()

    def wait_for_shutdown(self) -> None:
        """Wait for the end of a shutdown after a timeout, if there is one."""
        if self._ending and self._thread is not None and not leaving.has_given_up.is_set():
            self._thread.join(_SHUTDOWN_LASTS)

    def _look(self) -> None:
        while not self._ending:
            time.sleep(_LOOK_EVERY)
            now = time.monotonic()
            with self._lock:  # a list that outlives this look would keep all watches alive until the next one
                late = [w for w in self._watches if (deadline := w.deadline) is not None and now > deadline]
            for watch in late:
                watch.expire()
            if late:
                self._ending = True
                # At exit Horovod shuts itself down, and of two calls that join its thread at once one waits for ever.
                # Exit handlers run in reverse order, and every hvd.init() registers one: so ours is registered now.
                atexit.unregister(self.wait_for_shutdown)
                atexit.register(self.wait_for_shutdown)
                self._shut_down()

    def _shut_down(self) -> None:
        if envvars.horovod_elastic():  # ranks go on
            hvd.shutdown()
            return
        if not leaving.within(leaving.SHUTDOWN_SECONDS, hvd.shutdown):
            _log.error(
                "dgc_horovod: another rank does not answer, and TensorFlow would wait for it for ever: the process ends"
            )
            leaving.without_others(hvd)
            leaving.end_now()


_watcher = _Watcher()
wait_for_shutdown = _watcher.wait_for_shutdown


class Collectives:
    """The exchanges of one optimizer or tape on one process set.

    Args:
        process_set: Horovod's process set; N is its size.
        tag: prefix of every name; names are fixed over the run, so that Horovod's cache always hits.
        timeout: seconds that `gather_bytes` waits for the others; None: DGC_TIMEOUT.
    """

    def __init__(self, process_set: hvd.ProcessSet, tag: str, timeout: float | None = None) -> None:
        self.process_set, self.tag, self._timeout = process_set, tag, timeout
        self.watch = Watch(process_set)
        self.renew()
        self.alone = self.workers == 1 and not envvars.horovod_elastic()  # an elastic job may grow

    def renew(self) -> None:
        """Adapt to the present ranks."""
        self.watch.disarm()
        self.watch = Watch(self.process_set)
        self.workers: int = self.process_set.size()
        self.rank: int = self.watch.rank
        self.traffic = Traffic()

    def global_rank(self, rank: int) -> int:
        """Return Horovod's number of rank `rank` of the set."""
        return int(self.process_set.ranks[rank]) if self.process_set.ranks else rank

    def full_name(self, name: str) -> str:
        """Return Horovod's name of the collective `name`."""
        return f"dgc.{self.tag}.{name}"

    def arm(self, name: str) -> None:
        """Start the clock for the collective `name`, to which this rank has contributed its part."""
        self.watch.arm(self.full_name(name))

    def size(self, dtype: tf.DType) -> tf.Tensor:
        """Return N as a tensor; in an elastic job it is read when the graph runs."""
        if envvars.horovod_elastic():
            return tf.cast(hvd.size_op(process_set_id=self.process_set.process_set_id), dtype)
        return tf.cast(self.workers, dtype)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the concatenated tensors of all ranks, in rank order."""
        return self.run(hvd.allgather, tensor, name)

    def alltoall(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send part i of N equal ones to rank i; return the received parts, in rank order."""
        return self.run(hvd.alltoall, tensor, name)

    def allreduce(self, tensor: tf.Tensor, name: str, op: int = hvd.Sum) -> tf.Tensor:
        """Return the sum or average over the ranks."""
        return self.run(hvd.allreduce, tensor, name, op=op)

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Return the tensor of rank `root` of the set."""
        return self.run(hvd.broadcast, tensor, name, root_rank=self.global_rank(root))

    def run(self, operation: Callable[..., Any], tensor: Any, name: str, **more: Any) -> Any:
        """Return the result of an `operation` of Horovod; `more`: arguments of its own."""
        if self.alone:
            return tensor
        name = self.full_name(name)
        return operation(tensor, name=name, ignore_name_scope=True, process_set=self.process_set, **more)

    def wait(self, pending: tf.Tensor) -> tf.Tensor:
        """Return the result itself: TensorFlow waits when it is used, and `watch` has the deadline."""
        return pending

    def in_time(self, name: str, given: Sequence[Any], reduce: Callable[[tf.Tensor], Any]) -> Any:
        """Return the results of the operations of `reduce`, with the clock running once all of `given` is there.

        Args:
            name: name of the collective, for messages.
            given: tensors that this rank contributes.
            reduce: function that makes the operations, and returns their results; its argument is a tensor that is
                there once the clock runs, see `behind`.
        """
        with tf.control_dependencies(tf.nest.flatten(list(given), expand_composites=True)):
            armed = host_call(partial(self.arm, name), [])
        results = reduce(armed[0])
        with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            disarmed = host_call(lambda _: self.watch.disarm(), armed)
        with tf.control_dependencies(disarmed):
            return tf.nest.map_structure(tf.identity, results)

    def sum_in_time(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of `tensor` over the ranks, with the clock running once it is there."""
        return self.in_time(name, [tensor], lambda armed: self.allreduce(behind(armed, tensor), name))

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


def node_process_sets(node_size: int | None = None) -> list[hvd.ProcessSet]:
    """Return the process sets that a hierarchical exchange needs, for ``hvd.init(process_sets=node_process_sets(G))``.

    Args:
        node_size: number of workers of a node, >= 1, the same on every rank; None: DGC_NODE_SIZE, which `dgcrun` sets.

    Returns:
        The sets, for `hvd.init`; none if there is one node, one worker a node, or workers do not fill nodes.
    """
    return declare(hvd.ProcessSet, node_size)


def transports(collectives: Collectives, topology: Topology) -> Mapping[str, Collectives]:
    """Return the transport of each group of workers; only that of all workers if no nodes are used."""
    if topology.node_size == 1:
        return {ALL: collectives}
    meet_at_exit(_meet)
    between = Collectives(declared(topology.between), f"{collectives.tag}.between{topology.local_rank}")
    inside = Collectives(declared(topology.inside), f"{collectives.tag}.inside{topology.node}")
    return {ALL: collectives, BETWEEN: between, INSIDE: inside}


def _meet() -> None:
    try:
        Collectives(hvd.global_process_set, "end", LAST_STEP_SECONDS).gather_bytes(b"here", "meeting")
    finally:
        wait_for_shutdown()
