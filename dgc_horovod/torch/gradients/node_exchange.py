"""The exchange of one torch optimizer with nodes: gradients are averaged inside the node, then exchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from dgc_horovod.exchange.contract import INSIDE
from dgc_horovod.torch.gradients.collectives import BucketRun, Parameter, Pending
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.memory import handed, squares_of, wait_for_streams
from dgc_horovod.wire.bucket import PADDING

CLIPS_NODES = (
    "the script clips gradients, but with a hierarchical exchange a limit applies to the gradient of a node: pass "
    "clip_norm=... to the compression (dgcrun: --dgc-clip-norm), or exchange='flat'"
)


class NodeGradientExchange(GradientExchange):
    """`GradientExchange` with a hierarchical exchange; gradients are averaged, not summed.

    Without ``clip_norm``, each worker of a node gets the average of its slice of a bucket and selects from it while the
    backward pass goes on. ``clip_norm`` limits the node's whole gradient, so every worker gets the whole average after
    the backward pass. A script's own clipping is an error: workers of a node might clip differently.

    Args:
        arguments: see `GradientExchange`; there is a transport of every group.

    Memory: 4 bytes for each element of a bucket, kept from step to step.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._inside, self._whole = self.transports[INSIDE], self.config.clip_norm is not None
        self._engine_scale = lambda: 1.0  # gradients are unscaled before the average: a rank in join has no loss scale
        if not self._whole:
            self.clipping.refuse(CLIPS_NODES)
        # gradients of this worker by bucket, one after another, padded with zeros to G equal slices
        self._memory: dict[str, torch.Tensor] = {}
        self._averaged: deque[tuple[BucketRun, Pending]] = deque()  # averages under way or done, not taken yet
        self._dense_averaging: Pending | None = None

    def _send(self, run: BucketRun, clip: float = 1.0) -> None:
        """Start the average of a complete bucket; send a bucket whose gradients are added to the engine."""
        if run.complete:
            self._average(run)
            self._launch_averaged()
        else:
            super()._send(run, clip)

    def _take_all(self) -> None:
        for run in self.runs:
            self._average(run)
        dense = [self._dense_path.gradients[p] for p in self._dense_path.names]  # in one order on all workers
        if dense:
            self._dense_averaging = self._start_average("dense", dense)
        self._launch_averaged()

    def _average(self, run: BucketRun) -> None:
        """Start the average of a bucket inside the node; `_launch_averaged` continues with it."""
        bucket, run.arrived = run.engine.whole, 0
        wait_for_streams(run.streams)
        gradients = [self._gradient(p, self._given(run, i)) for i, p in enumerate(run.parameters)]
        self._averaged.append((run, self._start_average(bucket.name, gradients, 1 / self._scale_now())))

    def _start_average(self, name: str, gradients: Sequence[torch.Tensor], scale: float = 1.0) -> Pending:
        """Start to average ``scale * gradient`` inside the node.

        Args:
            name: name of the bucket.
            gradients: gradients, dense, of any dtype and layout, at least one; copied.
            scale: factor of this worker's gradients.
        """
        workers, device, start = self._inside.workers, gradients[0].device, 0
        flat = self._memory.get(name)
        if flat is None or flat.device != device:
            numel = sum(gradient.numel() for gradient in gradients)
            flat = torch.empty(workers * -(-numel // workers), dtype=torch.float32, device=device)
            self._memory[name] = flat
        flat[-workers:] = 0  # the padding is shorter
        for gradient in gradients:
            flat[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)
            start += gradient.numel()
        if scale != 1:
            flat *= scale
        received = flat.nbytes // workers * (workers - 1)
        self.counts.traffic.add(inside=2 * received if self._whole else received)
        if self._whole:
            return self._inside.allreduce(flat, f"{name}.node", averages=True)
        return self._inside.alltoall(flat, f"{name}.slices")

    def _average_of(self, name: str, averaging: Pending) -> torch.Tensor:
        """Wait for bucket `name`; return the average of this worker's slice, or if `_whole` of all, with padding."""
        received = self.collectives.wait(averaging)
        if self._whole:
            return received
        by_worker, flat = received.view(self._inside.workers, -1), self._memory[name]
        if received.data_ptr() == flat.data_ptr():  # copied to the host and back
            return by_worker.mean(0)
        return torch.mean(by_worker, 0, out=flat[: by_worker.shape[1]])  # the sent gradients are not needed any more

    def _launch_averaged(self, wait: bool = False) -> None:
        """Send buckets whose average inside the node is done; wait for all if `wait`."""
        if self._averaged and self._whole:
            under_way = [each for _, each in self._averaged]
            if self._dense_averaging is not None:
                under_way.append(self._dense_averaging)
            if wait or all(self.collectives.done(each) for each in under_way):
                self._clip_and_launch()
            return
        while self._averaged and (wait or self.collectives.done(self._averaged[0][1])):
            run, averaging = self._averaged.popleft()
            self._add_slice(run, self._average_of(run.engine.whole.name, averaging))
            self._send(run)
            self.hand_on()

    def _clip_and_launch(self) -> None:
        """Clip the node's complete gradient, the same on all of its workers, and send it."""
        dense, gradients, averages = self._dense_path.gradients, {}, []
        if self._dense_averaging is not None:
            start, flat = 0, self._average_of("dense", self._dense_averaging)
            for p in self._dense_path.names:
                dense[p] = flat[start : start + p.numel()].view(p.shape).to(dense[p])
                start += p.numel()
            self._dense_averaging = None
        for run, averaging in self._averaged:
            averages.append(self._average_of(run.engine.whole.name, averaging))
            for segment, p in zip(run.engine.whole.segments, run.parameters, strict=True):
                gradients[p] = averages[-1][segment.place]
        clip, scale = 1.0, 1 / self._scale_now()
        unscaled = {**gradients, **{p: gradient.float() * scale for p, gradient in dense.items()}}
        if self.clipping.is_of_all:
            clip = self.clipping.of_all(squares_of(unscaled.values(), self._kernels_of), 1.0)
        else:
            self.clipping.measure(unscaled, 1.0)
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
