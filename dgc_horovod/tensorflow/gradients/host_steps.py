"""The host part of a step: Python functions that a TensorFlow graph calls, and the u and v that they hold.

`exchange` builds the graph around them. They work on Arrays of the kernels, and never wait for another rank.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import DGCError, UnsupportedUse
from dgc_horovod.exchange.contract import ALL, INSIDE
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import Array
from dgc_horovod.notices import OF_A_TAPE, of_skipped, stop_if_skipped
from dgc_horovod.state.residual_state import MOMENTUM, ResidualState
from dgc_horovod.stats import PROCESS, ExchangeStats
from dgc_horovod.tensorflow.gradients.paths import BucketRun
from dgc_horovod.tensorflow.gradients.transport import Collectives, host_call, kernels_on
from dgc_horovod.tensorflow.settings import Settings
from dgc_horovod.tensorflow.updates import Holder, SlotOwnership, Update
from dgc_horovod.tensorflow.variables import Source

_log = logging.getLogger("dgc_horovod")
_OUTLIVES = "a graph was run after its DistributedOptimizer was deleted; keep a reference to the optimizer"


class HostCalls:
    """The calls of one exchange's graphs to Python on this rank.

    Args:
        sources: variables whose gradients are exchanged, in that order.
        settings: the compression and Horovod's arguments.
        collectives: transport of all workers.

    Attributes:
        counts: counters of the exchange.
        error: error of ours in a call, which TensorFlow turns into one of its own.
    """

    counts: ExchangeStats
    error: DGCError | None = None

    def __init__(self, sources: Sequence[Source], settings: Settings, collectives: Collectives) -> None:
        self.sources, self.settings, self.collectives = list(sources), settings, collectives

    def call(
        self,
        method: Callable[..., Sequence[Any] | None],
        inputs: Sequence[Any],
        dtypes: Sequence[Any] = (tf.bool,),
        *first: object,
        kernels: Any = None,
    ) -> list[tf.Tensor]:
        """Return the tensors of ``method(*first, *inputs)``, which is called when the graph runs; see `host_call`.

        TensorFlow keeps the graphs of deleted models, so a graph refers to the object of `method` weakly, and `first`
        must not refer to it: u and v are freed with their optimizer.
        """
        known, calls = weakref.WeakMethod(method), weakref.proxy(self)

        def noting(*arrays: Array) -> Sequence[Any] | None:
            alive = known()
            if alive is None:
                raise UnsupportedUse(_OUTLIVES)
            try:
                return alive(*first, *arrays)
            except ReferenceError:  # the optimizer is deleted already
                raise UnsupportedUse(_OUTLIVES) from None
            except DGCError as error:
                calls.error = error
                calls.collectives.watch.disarm()
                raise

        return host_call(noting, inputs, dtypes, kernels)

    def check(self) -> None:
        """Raise the error of a step that cannot be made, before the graph runs."""

    def received_dense(self, nbytes: int) -> None:
        """Note that all gradients have come; `nbytes`: bytes of this rank's on the dense path."""
        self.collectives.watch.disarm()
        self.collectives.traffic.count_allreduce(nbytes, self.collectives.workers)


class StockSteps(HostCalls):
    """The steps of an exchange without compression, which are counted."""

    def __init__(self, sources: Sequence[Source], settings: Settings, collectives: Collectives) -> None:
        super().__init__(sources, settings, collectives)
        self.counts = ExchangeStats(collectives.workers, sum(each.numel for each in sources), collectives.traffic)
        PROCESS.exchanges.append(self.counts)

    def start(self, _: np.ndarray) -> None:
        """Begin a step."""

    def end(self, nbytes: int, _: np.ndarray) -> None:
        """End a step, in which this rank has sent `nbytes`."""
        self.received_dense(nbytes)
        self.counts.end_step()


class HostSteps(HostCalls, Holder):
    """The steps of one compressed exchange on this rank, and the state that they leave.

    Args:
        sources, settings: see `HostCalls`.
        config: settings of the compression.
        transports: transport of each group of workers.
        update: form in which gradients enter the residual.
        ownership: ownership of u and v, shared by all exchanges that may have the same variables; it has these steps as
            one of its holders.
        number: index of the exchange, from 0, among those with the same variables and states of their own.

    Attributes:
        runs: the buckets, by index.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        config: DGCConfig,
        transports: Mapping[str, Collectives],
        update: Update,
        ownership: SlotOwnership,
        number: int,
    ) -> None:
        HostCalls.__init__(self, sources, settings, transports[ALL])
        self.config, self.transports, self.update = config, transports, update
        self._kernels_on = functools.cache(kernels_on)
        names = [f"{i} {source.name}" for i, source in enumerate(sources)]
        Holder.__init__(self, [(number, source.key) for source in sources], names, self._made(names))
        self.counts = self.buckets.counts
        self._ownership: SlotOwnership = weakref.proxy(ownership)  # or it would be a cycle
        self._iterations = 0
        self._idle_since = 0.0  # on the clock of `time.perf_counter`
        self._told = set[str]()
        self.runs = [
            BucketRun(engine, tuple(int(_number_of(segment.name)) for segment in engine.whole.segments))
            for engine in self.buckets.engines
        ]
        if config.clip_norm is not None and len({run.kernels.array_kind for run in self.runs}) > 1:
            raise UnsupportedUse(
                "clip_norm with variables on GPUs and on the host is not supported; place all on one kind of device"
            )
        ownership.add(self)

    def _made(self, names: Sequence[str]) -> OptimizerExchange:
        boundaries: dict[Any, int] = {}
        specs = [
            TensorSpec(name, source.shape, boundaries.setdefault((group, source.cuda), len(boundaries)))
            for name, source, group in zip(names, self.sources, self.settings.group_numbers(self.sources), strict=True)
        ]
        return OptimizerExchange(
            specs,
            self.config,
            lambda name: self._kernels_on(self.sources[int(_number_of(name))].cuda),
            self.transports,
            self.settings.averages,
        )

    # -- what is kept between steps

    def residuals(self) -> ResidualState:
        """Return a copy of the residuals of this rank, by number of the tensor: Keras' names are not stable."""
        if self.buckets.under_way:
            raise UnsupportedUse("residuals can be saved between two steps only")
        return self.buckets.residuals().renamed(_number_of)

    def check_fits(self, state: ResidualState) -> None:
        """See `OptimizerExchange.check_fits`."""
        self.buckets.check_fits(self._named(state))

    def load(self, state: ResidualState) -> None:
        """Go on from a state of `residuals`; without momentum in it, the optimizer's slots are taken over."""
        self.buckets.load(self._named(state))
        if left := len(self.buckets.dense_residuals):
            self.buckets.dense_residuals.clear()
            if self.collectives.rank == 0:
                _log.warning(
                    "dgc_horovod: the residuals of %d small tensors are dropped: these are sent without a residual now",
                    left,
                )
        self.in_slots = not (state.second or any(MOMENTUM in arrays for arrays in state.tensors.values()))

    def _named(self, state: ResidualState) -> ResidualState:
        """Return `state` with the names of buckets in place of numbers."""
        names = {_number_of(name): name for name in self.names}
        return state.renamed(lambda number: names.get(number, number))

    def renew(self) -> None:
        """Make the same buckets anew for the present number of ranks, with empty residuals."""
        self.collectives.renew()
        self.buckets = self._made(self.names)
        self.counts = self.buckets.counts
        for run, engine in zip(self.runs, self.buckets.engines, strict=True):
            run.engine = engine

    # -- a step, in this order

    def check(self) -> None:
        """See `HostCalls`."""
        self.buckets.density()

    def start(self, iterations: np.ndarray, rate: np.ndarray) -> list[Any]:
        """Begin a step; return `iterations`, whether the optimizer's slots are to be taken over, the number of steps
        before, and whether the step is the optimizer's own.

        An unfinished step before this one (an error in the graph) is rolled back. `rate` is the step's learning rate.
        """
        buckets, self._iterations = self.buckets, int(iterations)
        before, now = self.collectives.workers, self.collectives.process_set.size() if envvars.horovod_elastic() else 0
        if now and now != before:  # and nothing has called `renew`
            raise UnsupportedUse(
                f"the number of ranks has changed from {before} to {now}, unknown to the optimizer: use "
                "elastic.KerasState and elastic.run of dgc_horovod.tensorflow.keras"
            )
        buckets.begin()
        self._ownership.step_begins(self, self._iterations)
        buckets.dense = self.update.arithmetic.dense_is_stock and buckets.as_stock
        if not buckets.dense:  # also for tensors of other workers of the node
            buckets.accumulations = self.update.entering(buckets, float(rate))
        fresh = self.begins(buckets.dense)
        return [np.int64(self._iterations), np.bool_(fresh), np.int64(buckets.steps), np.bool_(buckets.dense)]

    def start_as_stock(self, iterations: np.ndarray) -> None:
        """Begin a step of the user's own optimizer."""
        if self.buckets.under_way:
            self.buckets.rollback()
        self._ownership.step_begins(self, int(iterations))

    def take_over(self, indices: Sequence[int], rate: np.ndarray, *slots: np.ndarray) -> None:
        """Move the values of the optimizer's slots into the engines.

        Args:
            indices: indices of the variables.
            rate: learning rate, a scalar.
            slots: values of all slots, variable by variable; each has the same number of them.
        """
        flat = [slot.reshape(-1).astype(np.float32, copy=False) for slot in slots]
        each = len(slots) // len(indices)
        for place, i in enumerate(indices):
            mine = flat[place * each :][:each]
            self.update.take_over(self.buckets, self.names[i], mine, float(rate), self._iterations)

    def compress(self, index: int, _: Array, *gradients: Array) -> list[Array]:
        """Compress the gradients of bucket `index`; return the message of its first round, see `BucketRun.message`."""
        self._add_gradients(self.runs[index], gradients)
        return self._message(self.runs[index], 1.0)

    def compress_clipped(self, _: Array, *gradients: Array) -> list[Array]:
        """Compress all buckets at once, clipped; return also the factor that clips the other gradients."""
        rest = list(gradients)
        for run in self.runs:
            self._add_gradients(run, [rest.pop(0) for _ in run.members], whole=True)
        kernels = self.runs[0].kernels if self.runs else registry.choose("cpu")
        whole = gradients if INSIDE in self.transports else rest  # engines of nodes have slices
        clip = self.buckets.clip_factor(sum(kernels.sums(gradient)[1] for gradient in whole))
        return [part for run in self.runs for part in self._message(run, clip)] + [np.float32(clip)]

    def _add_gradients(self, run: BucketRun, gradients: Sequence[Array], whole: bool = False) -> None:
        if INSIDE in self.transports:
            gradients = run.of_slice(gradients, whole)
            received = 4 * run.engine.bucket.numel * (self.buckets.topology.node_size - 1)
            self.counts.traffic.add(inside=2 * received if whole else received)
        for i, gradient in enumerate(gradients):
            self.buckets.add_gradient(run.engine, i, gradient)

    def second_message(self, _: np.ndarray) -> list[Any]:
        """Return this rank's part of Adam's second moment at this step, for a sum; of equal length on every rank."""
        message = self.buckets.second.message()
        return [np.empty(0, np.float32) if message is None else message]

    def second_of(self, run: BucketRun) -> np.ndarray:
        """Return Adam's second moment of the variables of a bucket, flat; the same on every rank."""
        return np.concatenate([self.buckets.second[segment.name].square() for segment in run.engine.whole.segments])

    def arm(self, _: np.ndarray | None = None) -> None:
        """Start the clock of DGC_TIMEOUT for the other ranks."""
        self.collectives.watch.arm(f"{self.collectives.full_name('*')}, the gradients of step {self._iterations}")

    def _message(self, run: BucketRun, clip: float) -> list[Any]:
        message = self.buckets.compress(run.engine, clip)
        self.arm()
        self._idle_since = time.perf_counter()
        return run.message(0, message.payload)

    def next_round(self, index: int, number: int, data: Array) -> list[Any]:
        """Return the message of the round after `number` of a bucket's exchange, given the result of that one."""
        return self.runs[index].message(number + 1, self._receive(self.runs[index], number, data))

    def decode(self, index: int, number: int, data: Array) -> list[Array]:
        """Return the updates of a bucket from the result of the last round, `number`, and whether they are finite."""
        run = self.runs[index]
        self._receive(run, number, data)
        updates = run.new_updates()
        for i, update in enumerate(updates):
            run.engine.outputs.put(i, update)
        self.buckets.aggregate(run.engine)
        finite = self.buckets.settle(run.engine)
        run.engine.outputs.clear()
        self._idle_since = time.perf_counter()
        return [*updates, np.bool_(finite)]

    def _receive(self, run: BucketRun, number: int, data: Array) -> np.ndarray | None:
        data = run.kernels.to_host(data)
        if not data.size:  # at this density there is no such round
            return None
        self.counts.traffic.add(waiting=time.perf_counter() - self._idle_since)
        is_packets = run.engine.exchange.rounds[number].dtype == "uint8"
        # the engine reads packets until the next ones come, and their memory is TensorFlow's
        buffer = self.buckets.receive(run.engine, data.copy() if is_packets else data.view(np.float32))
        self._idle_since = time.perf_counter()
        return buffer

    def end(self, dense_bytes: int, dense_parts: int, second: np.ndarray, *flags: np.ndarray) -> list[Any]:
        """End the step; returns whether every rank may apply it.

        Args:
            dense_bytes, dense_parts: bytes of this rank's gradients on the dense path, and their number.
            second: sum over the ranks of `second.message`.
            flags: whether each part is finite, those of the dense path first.
        """
        finite = all(flags)
        self.received_dense(dense_bytes)
        if second.size:
            self.buckets.second.receive(second)
        self.buckets.end(all(flags[dense_parts:]), all(flags[:dense_parts]))
        if not finite:
            stop_if_skipped(self.buckets)
            key, text = of_skipped(self.buckets)
            if key not in self._told and self.collectives.rank == 0:
                self._told.add(key)
                _log.warning("dgc_horovod: %s%s", text, OF_A_TAPE if self.update.is_tapes else "")
        return [np.bool_(finite)]

    def count_alone(self, passes: int, calls: np.ndarray) -> None:
        """Count the local steps of a round, of `passes` calls each; the last one is counted with the exchange."""
        self.counts.steps_alone += max(0, int(calls) // passes - 1)


def _number_of(name: str) -> str:
    """Return the number at the begin of a tensor's name."""
    return name.partition(" ")[0]  # padding has none
