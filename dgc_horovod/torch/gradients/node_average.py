"""What the workers of a node do before anything is selected: they average their gradients, densely."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dgc_horovod.torch.gradients.collectives import Collectives, Pending


@dataclass(frozen=True)
class Averaging:
    """The gradients of one bucket on their way through the node.

    Args:
        pending: collective under way.
        flat: this worker's gradients, one after another, padded with zeros to G equal slices.
        whole: whether every worker gets the whole average, not its slice alone.
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
            numel: number of their elements together.
            whole: whether every worker is to get the whole average: twice the bytes.
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
        flat[-self._inside.workers :] = 0  # the padding is shorter than that
        return flat

    def done(self, averaging: Averaging) -> bool:
        """Whether `take` would return at once."""
        return self._inside.done(averaging.pending)

    def take(self, averaging: Averaging) -> torch.Tensor:
        """Wait, once; the average of this worker's slice, or of all elements, padding included, as was asked for."""
        received = self._inside.wait(averaging.pending)
        if averaging.whole:
            return received
        by_worker, flat = received.view(self._inside.workers, -1), averaging.flat
        if received.data_ptr() == flat.data_ptr():  # by way of the host and back
            return by_worker.mean(0)
        return torch.mean(by_worker, 0, out=flat[: by_worker.shape[1]])  # what was sent is not needed any more
