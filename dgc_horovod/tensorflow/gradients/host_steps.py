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

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import DGCError, UnsupportedUse
from dgc_horovod.exchange.contract import ALL, INSIDE
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import Array
from dgc_horovod.notices import OF_A_TAPE, of_skipped, stop_if_skipped
from dgc_horovod.state.residual_state import MOMENTUM, Arrays, ResidualState
from dgc_horovod.stats import PROCESS, ExchangeStats
from dgc_horovod.tensorflow.gradients.host_calls import Blocks, HeldCalls, kernels_on
from dgc_horovod.tensorflow.gradients.paths import BucketRun
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.updates import Update
from dgc_horovod.tensorflow.wrapping.settings import Settings
from dgc_horovod.tensorflow.wrapping.slot_ownership import Holder, SlotOwnership
from dgc_horovod.tensorflow.wrapping.variables import Source, numel_of

_log = logging.getLogger("dgc_horovod")


class HostSteps:
    """The steps of one exchange on this rank.

    Args:
        sources: variables whose gradients are exchanged, in that order.
        settings: the compression and Horovod's arguments.
        transports: transport of each group of workers; that of all for its traffic and its watch.
        update: form in which gradients enter the residual.
        ownership: ownership of u and v, shared by all exchanges that may have the same variables.
        number: index of the exchange, from 0, among those with the same variables and states of their own.
        calls: holder of the Python functions of graphs.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        transports: Mapping[str, Collectives],
        update: Update,
        ownership: SlotOwnership,
        number: int,
        calls: HeldCalls,
    ) -> None:
        collectives = transports[ALL]
        self.collectives, self.update = collectives, update
        self.node_size = transports[INSIDE].workers if INSIDE in transports else 1
        self.buckets: OptimizerExchange | None = None
        self.runs: list[BucketRun] = []
        self.place: dict[int, BucketRun] = {}
        self.error: DGCError | None = None
        self._keys = [source.key for source in sources]
        self._names = [f"{i} {source.name}" for i, source in enumerate(sources)]
        self._ownership = ownership
        self.holder: Holder | None = None  # None: without compression
        self._iterations = 0
        self._idle_since = 0.0  # on the clock of `time.perf_counter`
        self._told = set[str]()
        self._calls: HeldCalls = weakref.proxy(calls)
        self._dense = False  # whether the step is the optimizer's own
        if settings.config is not None:
            self.buckets = self._make_buckets(sources, settings, settings.config)
            places = [(number, key) for key in self._keys]
            self.holder = ownership.add(Holder(places, self._names, self.buckets))
            self.counts = self.buckets.counts
        else:
            self.counts = ExchangeStats(collectives.workers, numel_of(sources), collectives.traffic)
            PROCESS.exchanges.append(self.counts)

    def _make_buckets(self, sources: Sequence[Source], settings: Settings, config: DGCConfig) -> OptimizerExchange:
        names = self._names
        index = {name: i for i, name in enumerate(names)}
        keys: dict[Any, int] = {}
        specs = [
            TensorSpec(name, source.shape, keys.setdefault((group, source.cuda), len(keys)))
            for name, source, group in zip(names, sources, settings.group_numbers(sources), strict=True)
        ]
        kernels = functools.cache(kernels_on)
        collectives, node_size = self.collectives, self.node_size  # the function must not refer to this

        def make() -> OptimizerExchange:
            return OptimizerExchange(
                specs,
                config,
                lambda name: kernels(sources[index[name]].cuda),
                collectives.rank,
                collectives.workers,
                settings.averages,
                collectives.traffic,
                node_size,
            )

        self._make, buckets = make, make()
        for engine in buckets.engines:
            segments = engine.whole.segments
            members = tuple(index[segment.name] for segment in segments)
            self.runs.append(BucketRun(engine, members, Blocks([segment.numel for segment in segments])))
        self.place = {i: run for run in self.runs for i in run.members}
        if config.clip_norm is not None and len({run.kernels.array_kind for run in self.runs}) > 1:
            raise UnsupportedUse(
                "clip_norm with variables on GPUs and on the host is not supported; place all on one kind of device"
            )
        return buckets

    def noting(self, function: Callable[..., Sequence[Array]], *first: object) -> Callable[..., Sequence[Array]]:
        """Return ``function(*first, ...)`` that also notes its error, which TensorFlow turns into one of its own."""

        def noting(*arguments: Array) -> Sequence[Array]:
            try:
                return function(*first, *arguments)
            except DGCError as error:
                self.error = error
                self.collectives.watch.disarm()
                raise

        return self._calls.hold(noting)

    # -- what is kept between steps

    def residuals(self) -> ResidualState:
        """Return a copy of the residuals of this rank, by number of the tensor: Keras' names are not stable."""
        assert self.buckets is not None
        if self.buckets.under_way:
            raise UnsupportedUse("residuals can be saved between two steps only")
        return self.buckets.residuals().renamed(_number_of)

    def check_fits(self, state: ResidualState) -> None:
        """See `OptimizerExchange.check_fits`."""
        assert self.buckets is not None
        self.buckets.check_fits(self._named(state))

    def load(self, state: ResidualState) -> None:
        """Go on from a state of `residuals`; without momentum in it, the optimizer's slots are taken over."""
        assert self.buckets is not None and self.holder is not None
        self.buckets.load(self._named(state))
        if left := len(self.buckets.dense_residuals):
            self.buckets.dense_residuals.clear()
            if self.collectives.rank == 0:
                _log.warning(
                    "dgc_horovod: the residuals of %d small tensors are dropped: these are sent without a residual now",
                    left,
                )
        self.holder.in_slots = not (state.second or any(MOMENTUM in arrays for arrays in state.tensors.values()))

    def _named(self, state: ResidualState) -> ResidualState:
        """Return `state` with the names of buckets in place of numbers."""
        assert self.buckets is not None
        names = {_number_of(name): name for name in self.buckets.numel}
        return state.renamed(lambda number: names.get(number, number))

    def renew(self) -> None:
        """Make the same buckets anew for the present number of ranks, with empty residuals."""
        self.collectives.renew()
        if self.holder is not None:
            self.buckets = self.holder.buckets = self._make()
            self.counts = self.buckets.counts
            for run, engine in zip(self.runs, self.buckets.engines, strict=True):
                run.engine = engine

    def take_over_again(self) -> None:
        """Take over the optimizer's slots at the next step: they hold the momentum."""
        if self.holder is not None:
            self.holder.in_slots = True

    # -- a step, in this order

    def start(self, iterations: np.ndarray) -> list[Any]:
        """Begin a step; return `iterations`, whether the optimizer's slots are to be taken over, the number of steps
        before, and whether the step is the optimizer's own.

        An unfinished step before this one (an error in the graph) is rolled back.
        """
        buckets, self._iterations, fresh = self.buckets, int(iterations), False
        if buckets is not None and self.holder is not None:
            self._check_ranks()
            buckets.begin()
            if buckets.config.exchanges_weights:
                buckets.decay(buckets.config.local_decay)  # with local steps the residual decays
            self._ownership.step_begins(self.holder, self._iterations)
            self._dense = self.update.arithmetic.dense_is_stock and buckets.as_stock
            if not self._dense:  # also for tensors of other workers of the node
                buckets.accumulations = self.update.entering(buckets)
            fresh = self.holder.begins(self._dense)
        steps = buckets.steps if buckets is not None else 0
        return [np.int64(self._iterations), np.bool_(fresh), np.int64(steps), np.bool_(self._dense)]

    def start_as_stock(self, iterations: np.ndarray) -> None:
        """Begin a step of the user's own optimizer."""
        assert self.buckets is not None and self.holder is not None
        if self.buckets.under_way:
            self.buckets.rollback()
        self._ownership.step_begins(self.holder, int(iterations))

    def _check_ranks(self) -> None:
        """Raise UnsupportedUse if an elastic job has other ranks now, and nothing has called `renew`."""
        before, now = self.collectives.workers, self.collectives.process_set.size() if envvars.horovod_elastic() else 0
        if now and now != before:
            raise UnsupportedUse(
                f"the number of ranks has changed from {before} to {now}, unknown to the optimizer: use "
                "elastic.KerasState and elastic.run of dgc_horovod.tensorflow.keras"
            )

    def take_over(self, counts: Sequence[tuple[int, int]], rate: np.ndarray, *slots: np.ndarray) -> list[Any]:
        """Move the values of the optimizer's slots into the engines.

        Args:
            counts: index in the list of gradients and number of slots, for each variable.
            rate: learning rate, a scalar.
            slots: values of all slots, variable by variable.
        """
        assert self.buckets is not None
        rest = [slot.reshape(-1).astype(np.float32, copy=False) for slot in slots]
        factor = 1 if self.buckets.averages else self.buckets.workers
        for i, count in counts:
            mine, rest = rest[:count], rest[count:]
            if mine:
                self.update.take_over(self.buckets, self._names[i], mine, float(rate) * factor, self._iterations)
        return [np.bool_(True)]

    def compress(self, run: BucketRun, _: Array, *gradients: Array) -> list[Array]:
        """Compress a bucket's gradients; return the message of its first round, as `BucketRun.triple`."""
        self._add_gradients(run, gradients)
        return self._message(run, 1.0)

    def compress_clipped(self, _: Array, *gradients: Array) -> list[Array]:
        """Compress all buckets at once, clipped; return also the factor that clips the other gradients."""
        assert self.buckets is not None
        rest = list(gradients)
        for run in self.runs:
            self._add_gradients(run, [rest.pop(0) for _ in run.members], whole=True)
        kernels = self.runs[0].kernels if self.runs else registry.choose("cpu")
        whole = gradients if self.node_size > 1 else rest  # engines of nodes have slices
        clip = self.buckets.clip_factor(sum(kernels.sums(gradient)[1] for gradient in whole))
        return [part for run in self.runs for part in self._message(run, clip)] + [np.float32(clip)]

    def _add_gradients(self, run: BucketRun, gradients: Sequence[Array], whole: bool = False) -> None:
        assert self.buckets is not None
        if self.node_size > 1:
            gradients = run.of_slice(gradients, whole)
            received = 4 * run.engine.bucket.numel * (self.node_size - 1)
            self.counts.traffic.count_inside(2 * received if whole else received)
        for i, gradient in enumerate(gradients):
            self.buckets.add_gradient(run.engine, i, gradient)

    def name_of(self, i: int) -> str:
        """Return the name of variable `i` in `buckets`."""
        return self._names[i]

    def second_message(self, _: np.ndarray) -> list[Any]:
        """Return this rank's part of Adam's second moment at this step, for a sum; of equal length on every rank."""
        message = None if self.buckets is None else self.buckets.adam.message()
        return [np.empty(0, np.float32) if message is None else message]

    def second_of(self, run: BucketRun) -> np.ndarray:
        """Return Adam's second moment of the variables of a bucket, flat; the same on every rank."""
        assert self.buckets is not None
        return np.concatenate([self.buckets.second[segment.name].square() for segment in run.engine.whole.segments])

    def keep(self, i: int, arrays: Arrays) -> None:
        """Store the state of variable `i` from whole arrays, of which this rank keeps its slice."""
        assert self.buckets is not None
        self.buckets.keep(self._names[i], arrays)

    def arm(self, started: np.ndarray | int) -> list[Any]:
        """Start the clock of DGC_TIMEOUT for the other ranks; returns `started`."""
        self.collectives.watch.arm(f"{self.collectives.full_name('*')}, the gradients of step {self._iterations}")
        return [np.int64(started)]

    def _message(self, run: BucketRun, clip: float) -> list[Any]:
        assert self.buckets is not None
        message = self.buckets.compress(run.engine, clip)
        self.arm(0)
        self._idle_since = time.perf_counter()
        return run.triple(0, message.payload)

    def next_round(self, run: BucketRun, number: int, data: Array, floats: Array) -> list[Array]:
        """Return the message of round `number` of a bucket's exchange, given the result of the round before."""
        return run.triple(number, self._receive(run, data, floats))

    def decode(self, run: BucketRun, data: Array, floats: Array) -> list[Array]:
        """Return the updates of a bucket from the result of the last round, and whether they are finite."""
        assert self.buckets is not None
        self._receive(run, data, floats)
        updates = run.new_updates()
        for i, update in enumerate(updates):
            run.engine.outputs.put(i, update)
        self.buckets.aggregate(run.engine)
        finite = self.buckets.settle(run.engine)
        run.engine.outputs.clear()
        self._idle_since = time.perf_counter()
        return [*updates, np.bool_(finite)]

    def _receive(self, run: BucketRun, data: Array, floats: Array) -> np.ndarray | None:
        assert self.buckets is not None
        data, floats = run.kernels.to_host(data), run.kernels.to_host(floats)
        if not (data.size or floats.size):  # at this density there is no such round
            return None
        self.counts.traffic.waited(time.perf_counter() - self._idle_since)
        # the engine reads packets until the next ones come, and their memory is TensorFlow's
        buffer = self.buckets.receive(run.engine, data.copy() if data.size else floats)
        self._idle_since = time.perf_counter()
        return buffer

    def end(self, dense_bytes: int, dense_parts: int, second: np.ndarray, *flags: np.ndarray) -> list[Any]:
        """End the step; returns whether every rank may apply it.

        Args:
            dense_bytes, dense_parts: bytes of this rank's gradients on the dense path, and their number.
            second: sum over the ranks of `adam.message`.
            flags: whether each part is finite, those of the dense path first.
        """
        finite = all(flags)
        self.collectives.watch.disarm()
        self.collectives.traffic.count_allreduce(dense_bytes, self.collectives.workers)
        if self.buckets is not None:
            if second.size:
                self.buckets.adam.receive(second)
            self.buckets.end(all(flags[dense_parts:]), all(flags[:dense_parts]))
            if not finite:
                if self._dense:
                    self.buckets.drop_residuals()
                self._tell_skipped(self.buckets)
        else:
            self.counts.end_step()
        return [np.bool_(finite)]

    def _tell_skipped(self, buckets: OptimizerExchange) -> None:
        stop_if_skipped(buckets)
        key, text = of_skipped(buckets)
        if key not in self._told and self.collectives.rank == 0:
            self._told.add(key)
            _log.warning("dgc_horovod: %s%s", text, OF_A_TAPE if self.update.is_tapes else "")


def _number_of(name: str) -> str:
    """Return the number at the begin of a tensor's name."""
    return name.partition(" ")[0]  # padding has none
