"""The exchange of one torch optimizer: gradients are put into buckets as they become ready, and exchanged."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.core.second_moment import INTERVAL
from dgc_horovod.exchange.contract import ALL, start
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import Accumulation, Kernels
from dgc_horovod.state.residual_state import MOMENTUM
from dgc_horovod.torch.gradients import memory
from dgc_horovod.torch.gradients.clipping import LocalClipping
from dgc_horovod.torch.gradients.collectives import (
    BucketRun,
    Collectives,
    DensePath,
    Parameter,
    Pending,
    ReduceSettings,
    all_finite,
    laid_out_as,
)

_NARROW = (torch.float16, torch.bfloat16)


class GradientExchange(OptimizerExchange):
    """The exchange of a torch optimizer: it turns this rank's ``p.grad`` into the update of all ranks.

    Args:
        parameters: parameters by name, in the model's order; only those that require a gradient.
        boundaries: number of each parameter; tensors of different numbers never share a bucket.
        config: compression settings.
        transports: transport of each group of workers: of `ALL`, and with nodes of `BETWEEN` and `INSIDE`.
        settings: reduction of the gradients.
        loss_scale: function that returns the present factor of the loss and of gradients, > 0.

    Attributes:
        names: name of each parameter.
        sparse: name of each parameter on the sparse path.
    """

    transports: Mapping[str, Collectives]

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        boundaries: Mapping[Parameter, int],
        config: DGCConfig,
        transports: Mapping[str, Collectives],
        settings: ReduceSettings,
        loss_scale: Callable[[], float],
    ) -> None:
        self.collectives = collectives = transports[ALL]
        self.settings = settings
        self._host = torch.device("cpu") if config.offload else None
        self.names, self.loss_scale = {p: name for name, p in parameters.items()}, loss_scale
        # of the present step: reading a GradScaler's scale waits for the device. Not a method: references to it must
        # not keep this exchange alive
        self._scale_now = cache(loss_scale)
        self._taken = memory.TakenMemory()  # of updates of this step
        self.lock = threading.Lock()  # backward of several devices calls hooks from several threads
        self._kernels_on = cache(registry.choose)
        super().__init__(
            [TensorSpec(name, tuple(p.shape), boundaries[p]) for name, p in parameters.items()],
            config,
            lambda name: self._kernels_of(parameters[name]),
            transports,
            settings.averages,
        )
        self.runs = [
            BucketRun(engine, tuple(parameters[segment.name] for segment in engine.whole.segments))
            for engine in self.engines
        ]
        self._run_of = {p: (run, i) for run in self.runs for i, p in enumerate(run.parameters)}
        self.sparse = {p: self.names[p] for p in self._run_of if self.names[p] in self.compressed}
        dense = {parameters[name]: name for name in self.layout.dense}
        half = config.dense_values == "fp16"
        self._dense_path = DensePath(dense, collectives, settings, self._scale_now, self.dense_residuals, half)
        self._decays: Mapping[Parameter, float] = {}  # of this step
        self._compressing: deque[BucketRun] = deque()  # buckets whose compression is under way, in order of launch
        self._launched: deque[BucketRun] = deque()  # buckets whose exchange is under way
        self._untaken = deque(self.runs)  # not sent in this step, for transports that need one order
        self._engine_scale: Callable[[], float] = self._scale_now  # factor of the gradients that engines get
        self._sums: Pending | None = None  # of the ranks' measurements for Adam's second moments
        self.clipping = LocalClipping(config.clip_norm, self.names, self.topology.nodes, settings.averages)

    def _kernels_of(self, p: Parameter) -> Kernels:
        """Return the kernels for the device on which `p` is compressed, chosen once a device."""
        return self._kernels_on(str(self._host or p.device))

    # -- gradients in

    def begin_step(self, accumulations: Mapping[str, Accumulation], decays: Mapping[Parameter, float]) -> None:
        """Begin a step.

        Args:
            accumulations: see `OptimizerExchange`.
            decays: weight decay that is added to the gradients of these parameters.
        """
        self.begin()
        self.accumulations, self._decays = accumulations, decays

    def take(self, p: Parameter) -> Callable[[], torch.Tensor]:
        """Take the gradient of `p`; start the exchange of its bucket if it completes the bucket.

        This is called between passes over buckets, whose data fill the caches: it does little work, and the work on a
        bucket's tensors is done when all are there.

        Args:
            p: parameter with a gradient.

        Returns:
            A function that waits for the exchange and returns the update for ``p.grad``, in its dtype.
        """
        run, i = self._run_of.get(p, (None, 0))
        with self.lock:
            if run is None:
                self._dense_path.gradients[p] = self._gradient(p, memory.given(p, self.names))
            else:
                arrived, run.arrived = run.arrived, run.arrived + 1
                if p.is_cuda:
                    run.streams.add(torch.cuda.current_stream(p.device))
            try:
                if self.clipping.clips:  # then all gradients must be there before one is sent
                    if self._dense_path.complete and all(each.complete for each in self.runs):
                        self._take_all()
                elif not self.collectives.by_name:
                    self._send_in_order()
                elif run is None:
                    self._dense_path.launch(p)
                elif run.complete:
                    self._send(run)
                    self.hand_on()
            except BaseException:  # the gradient was refused, and may come again
                if run is not None:
                    run.arrived = arrived
                raise
        return partial(self._dense_result, p) if run is None else partial(self._result, p, run, i)

    def _given(self, run: BucketRun, i: int) -> torch.Tensor:
        """Return ``p.grad`` of the bucket's i-th parameter, checked."""
        return memory.given_as_wrapped(run.parameters[i], self.names, run.sizes[i], run.device, self._host is not None)

    def _gradient(self, p: Parameter, grad: torch.Tensor) -> torch.Tensor:
        return memory.made_dense(p, grad, self.names, self.settings.sparse_as_dense)

    # -- exchange

    def _add_gradients(self, run: BucketRun) -> None:
        """Add every gradient of a bucket to the engine."""
        kernels = run.engine.kernels
        memory.wait_for_streams(run.streams)
        run.outputs.clear()
        for i, p in enumerate(run.parameters):
            grad = self._given(run, i)
            output, fits = self._output_for(run, i, grad)
            gradient = output if fits else self._gradient(p, grad).contiguous().to(output)
            gradient = self.clipping.clipped(p, gradient)
            if self._decays and (decay := self._decays.get(p)):
                gradient = gradient + p.detach().contiguous().to(gradient) * (decay * self._scale_now())
            self.add_gradient(run.engine, i, memory.handed(gradient, kernels))
            run.engine.outputs.put(i, memory.handed(output, kernels))
        run.arrived = 0

    def _send(self, run: BucketRun, clip: float = 1.0) -> None:
        """Begin to compress a bucket whose gradients are complete, or added to the engine already; then `hand_on`."""
        engine = run.engine
        if run.complete:
            self._add_gradients(run)
        self.clips = any(clip.updates for clip in self.clipping.clips)  # so that all ranks share norms
        self.begin_compress(engine, clip, self._engine_scale())
        self._compressing.append(run)

    def hand_on(self, waits: bool = False) -> None:
        """Start the exchange of every bucket whose message is there, in the order in which compression began.

        Which messages are there depends on the speed of this rank's device. Where collectives match by their order,
        the order must not: messages keep theirs, and no other collective of a step (small tensors, norms, second
        moments, further rounds) is started before all of them, as each is preceded by a call that waits.

        Args:
            waits: whether to wait for all messages, and start everything else that waits for a device.
        """
        while self._compressing and (waits or self._compressing[0].engine.ready):
            run = self._compressing.popleft()
            message, bucket = self.message(run.engine), run.engine.bucket
            run.pending = start(self.transports, message.round, torch.from_numpy(message.payload), bucket.name)
            self._go_on()
            self._launched.append(run)
        if waits:
            self._dense_path.launch_waiting()

    @property
    def is_compressing(self) -> bool:
        """Whether `hand_on` has something to wait for."""
        return bool(self._compressing or self._dense_path.waiting)

    def _go_on(self) -> None:
        """Start the next round of every bucket whose present round is done, while the backward pass goes on."""
        for run in self._launched if self.collectives.by_name else ():
            while run.engine.has_more_rounds and run.pending is not None and self.collectives.done(run.pending):
                self._take_round(run)

    def _take_round(self, run: BucketRun) -> bool:
        """Wait for the present round of a bucket, and start the next; return whether it was the last."""
        assert run.pending is not None
        received = self.collectives.wait(run.pending).numpy()
        buffer = self.receive(run.engine, received)
        if buffer is not None:
            run.pending = start(self.transports, run.engine.round, torch.from_numpy(buffer), run.engine.bucket.name)
        return buffer is None

    def _send_in_order(self) -> None:
        """Send complete buckets in their order; the dense path follows the last bucket."""
        while self._untaken and self._untaken[0].complete:
            self._send(self._untaken[0])
            self._untaken.popleft()
            self.hand_on()
        if not self._untaken and self._dense_path.complete:
            self._send_others()

    def _take_all(self) -> None:
        """Clip and send all gradients after the last one has come: the norm needs every gradient."""
        clip, dense = 1.0, self._dense_path.gradients
        if self.clipping.is_of_all:
            for run in self.runs:
                self._add_gradients(run)
            squares = memory.squares_of(dense.values(), self._kernels_of)
            clip = self.clipping.of_all(self.squares(squares), self._scale_now())
        else:
            bucketed = {p: self._gradient(p, self._given(run, i)) for p, (run, i) in self._run_of.items()}
            self.clipping.measure({**bucketed, **dense}, self._scale_now())
            for run in self.runs:
                self._add_gradients(run)
        self._send_all(clip)

    def _send_all(self, clip: float) -> None:
        for run in self.runs:
            self._send(run, clip)
            self.hand_on()  # a device is given all buckets before the host waits for the first
        self._send_others(clip)

    def _send_others(self, clip: float = 1.0) -> None:
        """Start the collectives that follow the last bucket."""
        if self._dense_path.names or self.clipping.shares:
            self.hand_on(waits=True)
        for p in self._dense_path.names:  # in one order on all ranks
            self._dense_path.gradients[p] = self.clipping.clipped(p, self._dense_path.gradients[p])
            self._dense_path.launch(p, clip)
        self._dense_path.launch_waiting()
        self.clipping.share(self.collectives)

    # -- gradients out

    def _dense_result(self, p: Parameter) -> torch.Tensor:
        self.hand_on(waits=True)
        return self._dense_path.result(p)

    def _result(self, p: Parameter, run: BucketRun, i: int) -> torch.Tensor:
        if run.finite is None:
            self._decode_launched()
        grad, output = memory.given(p, self.names), run.outputs[i]
        return grad if memory.is_in(output, grad) else laid_out_as(output.view(p.shape).to(p.device), grad)

    def _decode_launched(self) -> None:
        """Wait for all buckets in order of launch: one is decoded while the next is on the wire."""
        self.share_second()
        while self._launched:  # after an error the rest can still be waited for
            run = self._launched[0]
            if not self._take_round(run):
                self._launched.rotate(-1)  # meanwhile wait for the first rounds of the other buckets
                continue
            self.aggregate(run.engine, self._scale_now())
            self._launched.popleft()
        for run in self.runs:  # a device is waited for once, after all launches
            if run.finite is None:
                run.finite = self.settle(run.engine)

    def share_second(self) -> None:
        """Hand on all messages, then start the allreduce of the measurements of second moments, once.

        Ranks of one process that take turns call it after their last gradient, before any of them waits for a result.
        """
        self.hand_on(waits=True)
        message = self.second.message() if self._sums is None else None
        if message is not None:
            name = f"second moments {self.second.step % INTERVAL}"  # one length for each name: Horovod caches them
            self._sums = self.collectives.allreduce(torch.from_numpy(message), name)

    def take_second(self) -> None:
        """Wait for the allreduce of measurements, if it is under way."""
        if self._sums is not None:
            self.second.receive(self.collectives.wait(self._sums).numpy())
            self._sums = None

    @property
    def arrived(self) -> bool:
        """Whether all collectives of the step are done; for a rank in join, which waits for nothing but its device."""
        self.hand_on(waits=True)
        self._go_on()
        pending = [*(run.pending for run in self._launched), *self._dense_path.pending.values(), self._sums]
        return all(each is None or self.collectives.done(each) for each in pending)

    def _output_for(self, run: BucketRun, i: int, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Add the memory of the bucket's i-th update to `outputs`: that of `grad` if possible, else new memory.

        Returns:
            The output; whether it has the memory of `grad`.
        """
        fits = memory.is_plain(grad) and self._host is None and self._taken.is_first_in(grad)
        # a detached tensor keeps the memory if the script replaces p.grad
        beside = self._host or run.device
        output = grad.detach() if fits else torch.empty(run.sizes[i], dtype=torch.float32, device=beside)
        run.outputs.append(output)
        return output, fits

    def finish(self) -> bool:
        """End the step after every result has been taken; return whether it may be applied.

        If a gradient was not finite on any rank, every rank rolls back; if only an update is not finite, in its
        parameter's dtype, the update is dropped. Every ``p.grad`` becomes NaN, so that a GradScaler skips the step too.
        """
        self.clipping.share(self.collectives)  # if not started yet
        self.clipping.take(self.collectives)
        self.take_second()
        finite = all(run.finite for run in self.runs)
        narrow = (p.grad for p in self._run_of if p.grad is not None and p.grad.dtype in _NARROW)
        finite = finite and all_finite(narrow)  # they are of a smaller range than fp32
        finite = self.end(finite, self._dense_path.finite, self._scale_now)
        self.clipping.shares = self.all_clip and not self.ranks_in_join  # known from all ranks' messages
        if not finite:
            for p in self.names:
                if p.grad is not None and not p.grad.is_sparse:
                    p.grad.fill_(math.nan)
                elif p.grad is not None:
                    p.grad = torch.full_like(p, math.nan)
        self._forget_step()
        return finite

    def _forget_step(self) -> None:
        for run in self.runs:
            run.pending, run.finite = None, None
            for each in (run.outputs, run.engine.outputs):
                each.clear()  # they would keep gradients alive that the script has released
        self._launched.clear()
        self._sums, self._untaken, self._decays = None, deque(self.runs), {}
        self._taken.clear()
        self._scale_now.cache_clear()
        self._dense_path.clear()

    def drop_momentum(self, name: str) -> None:
        """Set this rank's momentum u of a tensor to zero; the residual stays."""
        if name in self.place:
            engine, i = self.place[name]
            engine.state.write(i, {part: x for part, x in engine.state.read(i).items() if part != MOMENTUM})

    def rollback(self) -> None:
        """See `OptimizerExchange`; it waits for messages that are under way, and they are not handed on."""
        super().rollback()
        self._compressing.clear()

    def abandon(self) -> None:
        """Give up the present step, if there is one, before a change of weights."""
        self.rollback()
        self.clipping.abandon()
        for run in self.runs:
            run.arrived = 0
        self._forget_step()
