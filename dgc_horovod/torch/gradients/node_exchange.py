"""The exchange of one torch optimizer with nodes: gradients are averaged inside the node, then exchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.nodes import Launched, agree
from dgc_horovod.exchange.contract import ALL, INSIDE
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.torch.gradients.collectives import BucketRun, Collectives, Pending, ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange, Parameter
from dgc_horovod.torch.gradients.memory import handed, squares_of, wait_for_streams
from dgc_horovod.wire.bucket import PADDING

CLIPS_NODES = (
    "the script clips gradients, but with a hierarchical exchange a limit applies to the gradient of a node: pass "
    "clip_norm=... to the compression (dgcrun: --dgc-clip-norm), or exchange='flat'"
)


@dataclass(frozen=True)
class Averaging:
    """The average of one bucket's gradients inside the node, under way.

    Args:
        pending: collective under way.
        flat: this worker's gradients, one after another, padded with zeros to G equal slices.
        whole: whether every worker gets the whole average, not only its slice.
    """

    pending: Pending
    flat: torch.Tensor
    whole: bool


class NodeAverage:
    """The dense half of a hierarchical exchange.

    Args:
        inside: transport between the workers of the node.

    Memory: 4 bytes for each element of a bucket, kept from step to step.
    """

    def __init__(self, inside: Collectives) -> None:
        self._inside = inside
        self._memory: dict[str, torch.Tensor] = {}

    def start(
        self, name: str, gradients: Iterable[torch.Tensor], numel: int, whole: bool = False, scale: float = 1.0
    ) -> Averaging:
        """Start to average ``scale * gradient``.

        Args:
            name: name of the bucket.
            gradients: gradients, dense, of any dtype and layout; copied.
            numel: number of elements of all gradients together.
            whole: whether every worker gets the whole average, for twice the bytes.
            scale: factor of this worker's gradients.
        """
        workers, traffic = self._inside.workers, self._inside.traffic
        flat, start = None, 0
        for gradient in gradients:
            if flat is None:
                flat = self._flat(name, workers * -(-numel // workers), gradient.device)
            flat[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)
            start += gradient.numel()
        assert flat is not None and start == numel
        if scale != 1:
            flat *= scale
        received = flat.nbytes // workers * (workers - 1)
        traffic.count_inside(2 * received if whole else received)
        if whole:
            return Averaging(self._inside.allreduce(flat, f"{name}.node", averages=True), flat, whole)
        return Averaging(self._inside.alltoall(flat, f"{name}.slices"), flat, whole)

    def _flat(self, name: str, numel: int, device: torch.device) -> torch.Tensor:
        flat = self._memory.get(name)
        if flat is None or flat.device != device:
            flat = self._memory[name] = torch.empty(numel, dtype=torch.float32, device=device)
        flat[-self._inside.workers :] = 0  # the padding is shorter
        return flat

    def done(self, averaging: Averaging) -> bool:
        """Return whether `take` would return at once."""
        return self._inside.done(averaging.pending)

    def take(self, averaging: Averaging) -> torch.Tensor:
        """Wait; return the average of this worker's slice, or of all elements if `whole`, padding included."""
        received = self._inside.wait(averaging.pending)
        if averaging.whole:
            return received
        by_worker, flat = received.view(self._inside.workers, -1), averaging.flat
        if received.data_ptr() == flat.data_ptr():  # copied to the host and back
            return by_worker.mean(0)
        return torch.mean(by_worker, 0, out=flat[: by_worker.shape[1]])  # the sent gradients are not needed any more


class NodeGradientExchange(GradientExchange):
    """`GradientExchange` with a hierarchical exchange; gradients are averaged, not summed.

    Without ``clip_norm``, each worker of a node gets the average of its slice of a bucket and selects from it while the
    backward pass goes on. ``clip_norm`` limits the node's whole gradient, so every worker gets the whole average after
    the backward pass. A script's own clipping is an error: workers of a node might clip differently.

    Args:
        parameters, boundaries, config, settings, loss_scale: see `GradientExchange`.
        transports: transports of `ALL` workers, `BETWEEN` nodes and `INSIDE` this one.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        boundaries: Mapping[Parameter, int],
        config: DGCConfig,
        transports: Mapping[str, Collectives],
        settings: ReduceSettings,
        loss_scale: Callable[[], float],
    ) -> None:
        inside = transports[INSIDE]
        super().__init__(
            parameters, boundaries, config, transports[ALL], settings, loss_scale, transports, inside.workers
        )
        self._node = NodeAverage(inside)
        self._engine_scale = lambda: 1.0  # gradients are unscaled before the average: a rank in join has no loss scale
        if config.clip_norm is None:
            self.clipping.refuse(CLIPS_NODES)
        self._averaged: deque[tuple[BucketRun, Averaging]] = deque()  # averages under way or done, not taken yet
        self._dense_averaging: Averaging | None = None

    def _send(self, run: BucketRun, clip: float = 1.0) -> None:
        """Start the average of a complete bucket; send a bucket whose gradients are added to the engine."""
        if run.complete:
            self._average(run, whole=False)
            self._launch_averaged()
        else:
            super()._send(run, clip)

    def _take_all(self) -> None:
        for run in self.runs:
            self._average(run, whole=True)
        dense = [self._dense_path.gradients[p] for p in self._dense_path.names]  # in one order on all workers
        if dense:
            numel = sum(gradient.numel() for gradient in dense)
            self._dense_averaging = self._node.start("dense", dense, numel, whole=True)
        self._launch_averaged()

    def _average(self, run: BucketRun, whole: bool) -> None:
        """Start the average of a bucket inside the node; `_launch_averaged` continues with it."""
        bucket, run.arrived = run.engine.whole, 0
        wait_for_streams(run.streams)
        gradients = (self._gradient(p, self._given(run, i)) for i, p in enumerate(run.parameters))
        averaging = self._node.start(bucket.name, gradients, bucket.numel, whole, 1 / self._scale_now())
        self._averaged.append((run, averaging))

    def _launch_averaged(self, wait: bool = False) -> None:
        """Send buckets whose average inside the node is done; wait for all if `wait`."""
        while self._averaged:
            run, averaging = self._averaged[0]
            if averaging.whole:
                under_way = [each for _, each in self._averaged]
                if self._dense_averaging is not None:
                    under_way.append(self._dense_averaging)
                if wait or all(self._node.done(each) for each in under_way):
                    self._clip_and_launch()
                return
            if not (wait or self._node.done(averaging)):
                return
            self._averaged.popleft()
            self._add_slice(run, self._node.take(averaging))
            self._send(run)
            self.hand_on()

    def _clip_and_launch(self) -> None:
        """Clip the node's complete gradient, the same on all of its workers, and send it."""
        dense, gradients, averages = self._dense_path.gradients, {}, []
        if self._dense_averaging is not None:
            start, flat = 0, self._node.take(self._dense_averaging)
            for p in self._dense_path.names:
                dense[p] = flat[start : start + p.numel()].view(p.shape).to(dense[p])
                start += p.numel()
            self._dense_averaging = None
        for run, averaging in self._averaged:
            averages.append(self._node.take(averaging))
            for segment, p in zip(run.engine.whole.segments, run.parameters, strict=True):
                gradients[p] = averages[-1][segment.place]
        clip, scale = 1.0, 1 / self._scale_now()
        unscaled = {**gradients, **{p: gradient.float() * scale for p, gradient in dense.items()}}
        if self.clipping.is_of_all:
            clip = self.clipping.of_all(squares_of(unscaled.values(), self._kernels_of), 1.0)
        else:
            self.clipping.measure(unscaled, 1.0)
            dense.update({p: self.clipping.clipped(p, gradient) for p, gradient in dense.items()})
        for run, average in zip(self.runs, averages, strict=True):
            self._add_slice(run, average.view(self.topology.node_size, -1)[self.topology.local_rank])
        self._averaged.clear()
        self._send_all(clip)

    def _add_slice(self, run: BucketRun, gradients: torch.Tensor) -> None:
        """Add this worker's slice of the node's gradients to the engine, and all outputs of the bucket."""
        engine, kernels = run.engine, run.engine.kernels
        run.outputs.clear()
        parameters = dict(zip((segment.name for segment in engine.whole.segments), run.parameters, strict=True))
        for i in range(len(run.parameters)):
            output, _ = self._output_for(run, i, self._given(run, i))
            engine.outputs.put(i, handed(output, kernels))
        for j, segment in enumerate(engine.bucket.segments):
            gradient = gradients[segment.place]
            if segment.name != PADDING:
                p = parameters[segment.name]
                gradient = self.clipping.clipped(p, gradient)
                if decay := self._decays.get(p):
                    weights = p.detach().contiguous().float().reshape(-1)[segment.offset :][: segment.numel]
                    gradient = gradient + weights * decay
            self.add_gradient(engine, j, handed(gradient, kernels))

    def _dense_result(self, p: Parameter) -> torch.Tensor:
        self._launch_averaged(wait=True)
        return super()._dense_result(p)

    def _decode_launched(self) -> None:
        self._launch_averaged(wait=True)
        super()._decode_launched()

    @property
    def arrived(self) -> bool:
        self._launch_averaged()
        return not self._averaged and super().arrived

    def _forget_step(self) -> None:
        self._averaged.clear()
        self._dense_averaging = None
        super()._forget_step()


def agreed_transports(
    collectives: Collectives,
    config: DGCConfig,
    launched: Launched,
    averages: bool,
    parameters: Mapping[str, torch.Tensor],
    speed: float,
    make: Callable[[Topology], Mapping[str, Collectives]],
) -> Mapping[str, Collectives]:
    """Return the transport of each group if all ranks can use a hierarchical exchange, else the transport of all.

    Args:
        collectives: transport of all workers.
        config, launched, averages, speed: see `agree`.
        parameters: parameters by name, in the model's order.
        make: function that returns the transports of `BETWEEN` and `INSIDE` on a topology, called on every rank.
    """
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in parameters.items()]
    topology = agree(collectives, config, launched, averages, specs, speed)
    found = {ALL: collectives, **(make(topology) if topology.node_size > 1 else {})}
    for each in found.values():
        each.traffic = collectives.traffic
    return found


def exchange_of(
    parameters: Mapping[str, Parameter],
    boundaries: Mapping[Parameter, int],
    config: DGCConfig,
    transports: Mapping[str, Collectives],
    settings: ReduceSettings,
    loss_scale: Callable[[], float],
) -> GradientExchange:
    """Return the exchange over these transports: `NodeGradientExchange` if there is one inside a node."""
    if INSIDE in transports:
        return NodeGradientExchange(parameters, boundaries, config, transports, settings, loss_scale)
    return GradientExchange(parameters, boundaries, config, transports[ALL], settings, loss_scale)
