"""A bucket on its way through a step of a torch optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.torch.gradients.collectives import Pending


@dataclass
class BucketRun:
    """A bucket, its parameters in segment order, and how far this step has come."""

    engine: BucketEngine
    parameters: tuple[torch.Tensor, ...]
    arrived: int = 0  # gradients
    pending: Pending | None = None
    finite: bool | None = None  # None until the ranks' messages are back
    outputs: list[torch.Tensor] = field(default_factory=list)  # where the engine puts each update
    narrow: bool = False  # whether an update goes into another dtype than fp32
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # on which its gradients have been made

    def __post_init__(self) -> None:
        self.sizes = [segment.numel for segment in self.engine.whole.segments]
        self.device = self.parameters[0].device  # of all of them, at wrapping

    @property
    def complete(self) -> bool:
        """Whether every gradient is there."""
        return self.arrived == len(self.parameters)
