"""The gradients of the step under way: which have come, and whether their updates stand in ``p.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dgc_horovod.errors import UnsupportedUse

Parameter = torch.Tensor
Result = Callable[[], torch.Tensor]  # waits for the exchange of a gradient, and gives what belongs into ``p.grad``
TOO_MANY_PASSES = (
    "a parameter got a gradient more than backward_passes_per_step={passes} times before step(); pass the number of "
    "backward passes that are summed"
)


@dataclass(frozen=True)
class Held:
    """Backward passes of a step that is still to come, set aside."""

    results: dict[Parameter, Result | None]
    left: dict[Parameter, int]


class Passes:
    """The backward passes of one optimizer's step.

    Args:
        parameters: parameters that are exchanged, in one order on all ranks.
        per_step: backward passes that are summed before one exchange, >= 1.

    Attributes:
        results: by parameter that has got a gradient in this step: its exchange, None before the last of its passes.
        synchronized: whether all exchanges have been waited for, and ``p.grad`` holds updates.
        skips: whether ``step`` is called inside of ``skip_synchronize``.
    """

    def __init__(self, parameters: Iterable[Parameter], per_step: int) -> None:
        self._parameters = tuple(parameters)
        self.results: dict[Parameter, Result | None] = {}
        self.synchronized = self.skips = False
        self.sum_up(per_step)

    def sum_up(self, per_step: int) -> None:
        """From now on so many passes make a step."""
        self.per_step = per_step
        self._left = dict.fromkeys(self._parameters, per_step)

    def comes(self, p: Parameter) -> bool:
        """A pass has accumulated into ``p.grad``; returns whether it was the last one of this step.

        Raises:
            UnsupportedUse: there were more than a step has.
        """
        self._left[p] -= 1
        if self._left[p] < 0:
            raise UnsupportedUse(TOO_MANY_PASSES.format(passes=self.per_step))
        self.results[p] = None
        return self._left[p] == 0

    def gives_back(self, p: Parameter) -> None:
        """What `comes` has counted was not taken: the gradient of `p` was refused."""
        self.results.pop(p, None)
        self._left[p] += 1

    @property
    def missing(self) -> list[Parameter]:
        """Parameters whose gradient has not been handed to the exchange."""
        return [p for p in self._parameters if self.results.get(p) is None]

    @property
    def launched(self) -> bool:
        """Whether a gradient has been handed to the exchange: not in an accumulation before its last pass."""
        return any(result is not None for result in self.results.values())

    @property
    def none_yet(self) -> bool:
        """Whether no backward pass of this step has reached any parameter."""
        return bool(self._left) and set(self._left.values()) == {self.per_step}

    def close(self) -> None:
        """The step's exchanges are over, or given up."""
        self.results.clear()
        self.sum_up(self.per_step)

    def begin_anew(self) -> None:
        """Know nothing of any pass: another state is loaded."""
        self.synchronized = self.skips = False
        self.close()

    def set_aside(self) -> Held:
        """Forget the passes of a step that is still to come; for `put_back`."""
        held = Held(dict(self.results), dict(self._left))
        self.close()
        return held

    def put_back(self, held: Held) -> None:
        """Go on with the passes that were set aside."""
        self.results.update(held.results)
        self._left.update(held.left)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside, ``step`` applies what stands in ``p.grad`` after ``synchronize``."""
        self.skips = True
        try:
            yield
        finally:
            self.skips = False
