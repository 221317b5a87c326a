"""One torch optimizer's gradients: put into buckets as they become ready, exchanged, handed back."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.exchange.contract import ALL, start
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback, Kernels
from dgc_horovod.state.residual_state import RESIDUAL, ResidualState
from dgc_horovod.torch.clipping.local import LocalClipping, clips_of
from dgc_horovod.torch.gradients.bucket_run import BucketRun
from dgc_horovod.torch.gradients.collectives import Collectives
from dgc_horovod.torch.gradients.dense_path import DensePath, ReduceSettings, all_finite, laid_out_as
from dgc_horovod.torch.gradients.given import given, given_as_wrapped, made_dense
from dgc_horovod.torch.gradients.memory import (
    TakenMemory,
    handed,
    is_in,
    is_plain,
    squares_of,
    wait_for_streams,
)
from dgc_horovod.torch.gradients.scaling import StepScale
from dgc_horovod.torch.gradients.second_moments import SharedSums

Parameter = torch.Tensor
_NARROW = (torch.float16, torch.bfloat16)
AccumulationOf = Callable[[Parameter], tuple[Accumulation, float]]


class GradientExchange:
    """Everything between ``p.grad`` of one rank and ``p.grad`` of all.

    Args:
        parameters: parameters by name, in the model's order; only those that require a gradient.
        boundaries: number of each parameter; tensors of different numbers never share a bucket.
        config: compression settings.
        collectives: transport of this optimizer's group.
        settings: how gradients are combined.
        loss_scale: function that gives the present factor of the loss, and of gradients, > 0.
        transports, node_size: transport of each group of workers, and G >= 1; None and 1: no nodes are known.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        boundaries: Mapping[Parameter, int],
        config: DGCConfig,
        collectives: Collectives,
        settings: ReduceSettings,
        loss_scale: Callable[[], float],
        transports: Mapping[str, Collectives] | None = None,
        node_size: int = 1,
    ) -> None:
        self.config, self.collectives, self.settings = config, collectives, settings
        self._transports, self._host = transports or {ALL: collectives}, torch.device("cpu") if config.offload else None
        self.names, self.loss_scale = {p: name for name, p in parameters.items()}, loss_scale
        self._scale_now = StepScale(loss_scale)  # no method: what others hold of it must not hold this exchange
        self._taken = TakenMemory()  # into which something of this step will be written
        self._lock = threading.Lock()  # backward of several devices calls hooks from several threads
        specs = [TensorSpec(name, tuple(p.shape), boundaries[p]) for name, p in parameters.items()]
        self._kernels: dict[str, Kernels] = {}
        self.buckets = OptimizerExchange(
            specs,
            config,
            lambda name: self._kernels_of(parameters[name]),
            collectives.rank,
            collectives.workers,
            settings.averages,
            collectives.traffic,
            node_size,
        )
        self.runs = [
            BucketRun(engine, tuple(parameters[segment.name] for segment in engine.whole.segments))
            for engine in self.buckets.engines
        ]
        self.place = {p: (run, i) for run in self.runs for i, p in enumerate(run.parameters)}
        dense = {parameters[name]: name for name in self.buckets.layout.dense}
        self._dense_path = DensePath(dense, collectives, settings, self._scale_now, half=config.dense_values == "fp16")
        self._launched: deque[BucketRun] = deque()  # whose exchange is under way
        self._untaken = deque(self.runs)  # in this step, where they leave in one order
        self._engine_scale: Callable[[], float] = self._scale_now  # factor of the gradients that engines are given
        self._shares_norms = False  # whether all ranks do in the present step
        self._sums = SharedSums(self.buckets.adam, collectives)
        self.clipping = LocalClipping(config.clip_norm, self.names, self.buckets.topology.nodes, settings.averages)

    def _kernels_of(self, p: Parameter) -> Kernels:
        """The kernels for the device on which `p` is compressed, chosen once a device."""
        device = str(self._host or p.device)
        if device not in self._kernels:
            self._kernels[device] = registry.choose(device)
        return self._kernels[device]

    @property
    def compressed(self) -> list[Parameter]:
        """Parameters on the sparse path."""
        return [p for p in self.place if self.is_compressed(p)]

    # -- gradients in

    def is_compressed(self, p: Parameter) -> bool:
        """Whether `p` is on the sparse path."""
        return self.buckets.is_compressed(self.names[p])

    def add_gradient(self, p: Parameter, accumulation_of: AccumulationOf) -> Callable[[], torch.Tensor]:
        """The gradient of `p` is ready; start what it was the last one for.

        This is called between the passes over two buckets, whose data have just gone through the caches: it does
        little, and what a bucket's tensors need is done when all of them are there.

        Args:
            p: parameter with a gradient.
            accumulation_of: function of a compressed parameter: form in which its gradient enters the residual, and the
                weight decay that is added to the gradient before.

        Returns:
            A function that waits for the exchange and gives what belongs into ``p.grad``, in its dtype.
        """
        place = self.place.get(p)
        with self._lock:
            arrived = place[0].arrived if place is not None else 0
            if place is None:
                self._dense_path.gradients[p] = self._gradient(p, given(p, self.names))
            else:
                place[0].arrived += 1
                if p.is_cuda:
                    place[0].streams.add(torch.cuda.current_stream(p.device))
            try:
                self._start_what_is_complete(p, place, accumulation_of)
            except BaseException:  # this gradient was refused: it may come again
                if place is not None:
                    place[0].arrived = arrived
                raise
        return partial(self._dense_result, p) if place is None else partial(self._result, p, *place)

    def _start_what_is_complete(
        self, p: Parameter, place: tuple[BucketRun, int] | None, accumulation_of: AccumulationOf
    ) -> None:
        if self.clipping.active:
            if self._dense_path.complete and all(run.complete for run in self.runs):
                self._take_all(accumulation_of)
        elif not self.collectives.by_name:
            self._take_in_order(accumulation_of)
        elif place is None:
            self._dense_path.launch(p)
        elif place[0].complete:
            self._take_bucket(place[0], accumulation_of)

    def _given(self, run: BucketRun, i: int) -> torch.Tensor:
        """``p.grad`` of the bucket's i-th parameter."""
        return given_as_wrapped(run.parameters[i], self.names, run.sizes[i], run.device, self._host is not None)

    def _gradient(self, p: Parameter, grad: torch.Tensor) -> torch.Tensor:
        return made_dense(p, grad, self.names, self.settings.sparse_as_dense)

    # -- exchange

    def _add_gradients(self, run: BucketRun, accumulation_of: AccumulationOf) -> None:
        """Give the engine every gradient of a bucket."""
        kernels = run.engine.kernels
        wait_for_streams(run.streams)
        run.outputs.clear()
        for i, p in enumerate(run.parameters):
            grad = self._given(run, i)
            accumulation, decay = (ErrorFeedback(), 0.0) if run.engine.bucket.uncompressed else accumulation_of(p)
            output, fits = self._output_for(run, i, grad)
            gradient = output if fits else self._gradient(p, grad).contiguous().to(output)
            gradient = self.clipping.clipped(p, gradient)
            if decay:
                gradient = gradient + p.detach().contiguous().float() * (decay * self._scale_now())
            self.buckets.add_gradient(run.engine, i, handed(gradient, kernels), accumulation)
            run.engine.outputs.put(i, handed(output, kernels))
        run.arrived = 0

    def _launch(self, run: BucketRun, clip: float) -> None:
        engine = run.engine
        engine.clips = self.clipping.is_of_updates
        message = self.buckets.compress(engine, clip, self._engine_scale())
        run.pending = start(self._transports, message.round, torch.from_numpy(message.payload), engine.bucket.name)
        self._go_on()
        self._launched.append(run)

    def _go_on(self) -> None:
        """Start the next round of every bucket whose present one is through, while the backward pass goes on."""
        for run in self._launched if self.collectives.by_name else ():
            while run.engine.has_more_rounds and run.pending is not None and self.collectives.done(run.pending):
                self._take_round(run)

    def _take_round(self, run: BucketRun) -> bool:
        """Wait for the round of a bucket that is under way, and start the next; returns whether there is none."""
        assert run.pending is not None
        received = self.collectives.wait(run.pending).numpy()
        buffer = self.buckets.receive(run.engine, received)
        if buffer is not None:
            run.pending = start(self._transports, run.engine.round, torch.from_numpy(buffer), run.engine.bucket.name)
        return buffer is None

    def _take_bucket(self, run: BucketRun, accumulation_of: AccumulationOf) -> None:
        """Send a bucket, all of whose gradients are there."""
        self._add_gradients(run, accumulation_of)
        self._launch(run, 1.0)

    def _take_in_order(self, accumulation_of: AccumulationOf) -> None:
        """Send what is complete, in the order of the buckets; the dense path comes after the last."""
        while self._untaken and self._untaken[0].complete:
            self._take_bucket(self._untaken[0], accumulation_of)
            self._untaken.popleft()
        if not self._untaken and self._dense_path.complete:
            self._dense_path.launch_all()
            self._share_norms()

    def _take_all(self, accumulation_of: AccumulationOf) -> None:
        """With clipping: the norm needs every gradient, so everything starts with the last one."""
        clip, dense = 1.0, self._dense_path.gradients
        if self.clipping.is_of_all:
            for run in self.runs:
                self._add_gradients(run, accumulation_of)
            squares = squares_of(dense.values(), self._kernels_of)
            clip = self.clipping.of_all(self.buckets.squares(squares), self._scale_now())
        else:
            self.clipping.measure({**self._bucketed(), **dense}, self._scale_now())
            for run in self.runs:
                self._add_gradients(run, accumulation_of)
            dense.update({p: self.clipping.clipped(p, gradient) for p, gradient in dense.items()})
        self._launch_all(clip)

    def _bucketed(self) -> dict[Parameter, torch.Tensor]:
        """The gradient of every parameter that is in a bucket."""
        return {p: self._gradient(p, self._given(run, i)) for p, (run, i) in self.place.items()}

    def _launch_all(self, clip: float) -> None:
        for run in self.runs:
            self._launch(run, clip)
        self._dense_path.launch_all(clip)
        self._share_norms()

    def _share_norms(self) -> None:
        """At one place among the collectives of every rank, that of a rank whose script clips nothing now as well."""
        if self._shares_norms:
            self.clipping.share(self.collectives)

    # -- gradients out

    def _dense_result(self, p: Parameter) -> torch.Tensor:
        return self._dense_path.result(p)

    def _result(self, p: Parameter, run: BucketRun, i: int) -> torch.Tensor:
        if run.finite is None:
            self._decode_launched()
        assert run.finite is not None
        grad, output = given(p, self.names), run.outputs[i]
        return grad if is_in(output, grad) else laid_out_as(output.view(p.shape).to(p.device), grad)

    def _decode_launched(self) -> None:
        """Wait for all that is under way, in order of launch: one bucket is decoded while the next is on the wire."""
        self._sums.launch()
        while self._launched:  # after an error the rest can still be waited for
            run = self._launched[0]
            if not self._take_round(run):
                self._launched.rotate(-1)  # the first rounds of the others are waited for meanwhile
                continue
            run.finite = self.buckets.aggregate(run.engine, self._scale_now())
            self._launched.popleft()

    @property
    def arrived(self) -> bool:
        """Whether everything that is under way has come back."""
        self._go_on()
        pending = [*(run.pending for run in self._launched), *self._dense_path.pending, self._sums.pending]
        return all(each is None or self.collectives.done(each) for each in pending)

    def _output_for(self, run: BucketRun, i: int, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The i-th and next of the bucket's targets: the memory of `grad`, of `_given`, or some beside it.

        Returns:
            The target; whether it lies where `grad` does.
        """
        plain = is_plain(grad)
        run.narrow |= not plain
        fits = plain and self._host is None and self._taken.is_first_in(grad)
        # detached, it keeps the memory, should the script give p.grad another
        beside = self._host or run.device
        output = grad.detach() if fits else torch.empty(run.sizes[i], dtype=torch.float32, device=beside)
        run.outputs.append(output)
        return output, fits

    def finish(self) -> bool:
        """Close the step after every result has been taken; returns whether it may be applied.

        If a gradient was not finite on any rank, every rank takes back what it had sent; if an update alone is not, in
        its parameter's dtype, it is left out. Every ``p.grad`` becomes NaN: a GradScaler skips, too.
        """
        self._share_norms()  # unless that is done
        self.clipping.take()
        self._sums.take()
        finite = all(run.finite for run in self.runs)
        narrow = [p.grad for run in self.runs if run.narrow for p in run.parameters]  # of a dtype of less range
        finite = finite and all_finite(grad for grad in narrow if grad is not None and grad.dtype in _NARROW)
        finite = self.buckets.ending.judge(finite, self._dense_path.finite, self._scale_now)
        self.buckets.close(finite)
        self._shares_norms = self.buckets.all_clip and not self.buckets.ranks_in_join  # as all messages have said
        if not finite:
            for p in self.names:
                if p.grad is not None and not p.grad.is_sparse:
                    p.grad.fill_(math.nan)
                elif p.grad is not None:
                    p.grad = torch.full_like(p, math.nan)
        self._forget_step(finite)
        return finite

    def _forget_step(self, finite: bool = True) -> None:
        for run in self.runs:
            run.pending, run.finite, run.narrow = None, None, False
            for each in (run.outputs, run.engine.outputs):
                each.clear()  # they would keep gradients alive that the script has let go of
        self._launched.clear()
        self._sums.pending, self._untaken = None, deque(self.runs)
        self._taken.clear()
        self._scale_now.forget()
        self._dense_path.clear(finite)

    def abandon(self) -> None:
        """Give up the step under way, if there is one, and the residuals: other weights come."""
        self.buckets.rollback()
        self.clipping.abandon()
        for run in self.runs:
            run.arrived = 0
        self._dense_path.residuals.clear()
        self._forget_step()

    def decay(self, factor: float) -> None:
        """Multiply everything that waits on this rank by `factor`, in (0, 1]."""
        if factor < 1:
            self.buckets.rescale(factor)
            for v in self._dense_path.residuals.values():
                v *= factor

    def fade(self, p: Parameter, factor: float) -> None:
        """Multiply what waits of `p` on this rank by `factor`, in [0, 1]."""
        self._dense_path.residuals.pop(p, None)
        self.buckets.fade(self.names[p], factor)

    def load(self, state: ResidualState) -> None:
        """Go on from what this rank has kept; see `OptimizerExchange.load`."""
        dense = {name: p for p, name in self._dense_path.names.items()}
        left = self.buckets.load(state)
        self._dense_path.residuals.clear()
        self.clipping.goes_on(clips_of(state.clips, self.names), first=not state.step)
        for name, v in left.items():
            self._dense_path.residuals[dense[name]] = torch.from_numpy(v).view(dense[name].shape).to(dense[name].device)

    @property
    def dense_residuals(self) -> dict[Parameter, torch.Tensor]:
        """What dense tensors have from when they were in buckets, for the next step."""
        return self._dense_path.residuals

    def residuals(self) -> ResidualState:
        """A copy of what this rank has kept."""
        state = self.buckets.residuals()
        for p, v in self.dense_residuals.items():
            state.tensors[self.names[p]] = {RESIDUAL: v.reshape(-1).float().cpu().numpy()}
        return state
