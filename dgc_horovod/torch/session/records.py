"""Records of the step under way: parameter groups, gradients that have come, and what a script did to ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.optimizer_state import Group
from dgc_horovod.torch.updates import Update
from dgc_horovod.torch.wrapping.steps import ADDED_LATER

_Seen = tuple[torch.Tensor, int]
_Applied = tuple[torch.Tensor, weakref.ref[torch.Tensor] | None, int]  # parameter, its gradient, version of that
_SAMPLE, _SMALL = 4, 4096  # so many tensors, of at most so many elements, are compared by their content


def _version(p: torch.Tensor) -> int:
    """How often ``p.grad`` has been written to in place; 0 where there is none."""
    grad = p.grad
    return grad._version if grad is not None else 0


def _applied(p: torch.Tensor) -> _Applied:
    """Which tensor ``p.grad`` is, without keeping it alive: a script may give p another one of the same version."""
    grad = p.grad
    return (p, weakref.ref(grad), grad._version) if grad is not None else (p, None, 0)


class GradientWatch:
    """Remembers the state in which each ``p.grad`` was last seen."""

    def __init__(self) -> None:
        self._taken: dict[int, _Seen] = {}  # by id: a tensor's own hash is a call of Python's for each
        self._synchronized: list[_Applied] = []
        self.brought = False  # whether a backward pass has, what the last synchronize has exchanged
        self._applied: list[_Applied] = []
        self._weights: list[_Seen] = []  # some, with the version of themselves
        self._copies: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # of small updates: what goes by way of ``.data`` counts no version

    def taken(self, p: torch.Tensor) -> None:
        """A gradient has been handed to the exchange: a new step has begun."""
        self._taken[id(p)] = p, _version(p)
        if self._synchronized:
            self._synchronized, self._copies = [], []

    def synchronized(self, parameters: Iterable[torch.Tensor], brought: bool) -> None:
        """Every ``p.grad`` now holds its update. `brought`: whether a backward pass has brought its gradient."""
        self._taken, self.brought = {}, brought
        self._synchronized = list(map(_applied, parameters))
        self._weights = [(p, p._version) for p, _, _ in self._synchronized[:_SAMPLE] if p.requires_grad]
        self._copy()

    def _copy(self) -> None:
        there = [p for p, _, _ in self._synchronized if p.grad is not None and not p.grad.is_sparse]
        small = [p for p in there if 0 < p.numel() <= _SMALL and p.device.type == "cpu"]
        self._copies = [(p, p.grad.clone()) for p in small[:_SAMPLE] if p.grad is not None]

    def applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """The optimizer has applied the updates."""
        self._synchronized, self._copies = [], []
        self._applied = list(map(_applied, parameters))

    def look_again(self) -> None:
        """What has changed up to now was meant to, and is known of."""
        self._taken = {key: (p, _version(p)) for key, (p, _) in self._taken.items()}
        self._synchronized = [_applied(p) for p, _, _ in self._synchronized]
        self._copy()

    def changed_since_taken(self) -> bool:
        """Whether a gradient was changed after the exchange had taken it: the change has no effect."""
        return any(_version(p) != seen for p, seen in self._taken.values())

    def changed_since_synchronized(self, loss_scale: float = 1.0) -> bool:
        """Whether an update was changed since synchronize; one that is gone was not.

        Args:
            loss_scale: loss scale, > 0; a GradScaler's unscale_, which divides by it, does not count as a change.
        """
        if any(_version(p) != seen for p, _, seen in self._synchronized if p.grad is not None):
            return True
        return any(p.grad is not None and not _is_same(p.grad, copy, loss_scale) for p, copy in self._copies)

    def writes_to(self, p: torch.Tensor) -> int | None:
        """How often the update of `p` was written to since synchronize; None where ``p.grad`` is another tensor."""
        _, ref, seen = next((each for each in self._synchronized if each[0] is p), (p, None, 0))
        return _version(p) - seen if ref is not None and p.grad is ref() else None

    def weights_changed(self) -> bool:
        """Whether weights were written to in place since synchronize: an update that nobody has told of was applied."""
        return bool(self._weights) and all(p._version != seen for p, seen in self._weights)

    def has_applied(self, grad: torch.Tensor | None) -> bool:
        """Whether `grad` is the tensor that an update of the last step stood in."""
        return grad is not None and any(ref is not None and ref() is grad for _, ref, _ in self._applied)

    def unchanged_since_applied(self) -> bool:
        """Whether every ``p.grad`` is still the update that has been applied."""
        return bool(self._applied) and all(
            ref is not None and p.grad is ref() is not None and _version(p) == seen for p, ref, seen in self._applied
        )


def _is_same(grad: torch.Tensor, copy: torch.Tensor, loss_scale: float) -> bool:
    return torch.equal(grad, copy) or (loss_scale != 1 and torch.allclose(grad, copy / loss_scale, 1e-3, 0.0))


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


FROZEN = 6  # steps after which what waits of a frozen parameter is dropped
_FADED = 1e-8  # so much of a momentum is nothing


class ParameterGroups:
    """The parameter groups of one optimizer.

    Args:
        optimizer: optimizer that has just been wrapped.
        names: name of every parameter of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> None:
        groups = optimizer.param_groups
        self._names, self._optimizer = names, weakref.ref(optimizer)
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        self._count = sum(len(group["params"]) for group in groups)
        # the last known, for one that is in none any more
        self._of: dict[Parameter, Group] = {p: group for group in groups for p in group["params"]}
        self._frozen_for: dict[Parameter, int] = {}  # steps in a row
        self.changed = False  # whether a script may have moved a parameter

    def of(self, p: Parameter) -> Group:
        """The group of `p`."""
        if self.changed:
            self._of |= {p: group for group in self._now for p in group["params"]}
            self.changed = False
        return self._of[p]

    @property
    def _now(self) -> list[Group]:
        """The groups; the list itself may be another one since."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    def check_nothing_unfrozen(self, exchanged: Collection[Parameter]) -> None:
        """A parameter that was frozen at wrapping is in no bucket: were it trained now, replicas would diverge.

        Args:
            exchanged: parameters that have a place.

        Raises:
            UnsupportedUse: one is trained now, or was added since.
        """
        late, groups = self._frozen, self._now
        if sum(len(group["params"]) for group in groups) != self._count:
            late = [p for group in groups for p in group["params"] if p not in exchanged]
        for p in late:
            if p.requires_grad:
                if p not in self._names:
                    raise UnsupportedUse(ADDED_LATER.format(shape=tuple(p.shape)))
                raise UnsupportedUse(
                    f"{self._names[p]!r} did not require a gradient when the optimizer was wrapped and "
                    "does now; wrap the optimizer while it does, and freeze it afterwards"
                )

    def note_frozen(self, p: Parameter, update: Update, exchange: GradientExchange) -> None:
        """Whether `p` is frozen in this step; of one that stays so, what waits is dropped.

        It would go on moving for hundreds of steps. Its momentum still pushes it, as with stock Horovod, and of that,
        too, nothing waits longer than it lasts. Networks that take turns in one optimizer are not frozen for that long.
        """
        if p.requires_grad:
            if self._frozen_for:
                self._frozen_for.pop(p, None)
            return
        steps = self._frozen_for[p] = self._frozen_for.get(p, 0) + 1
        if steps >= FROZEN:
            factor = update.fading(self.of(p))
            if steps == FROZEN or factor**steps > _FADED:
                exchange.fade(self._names[p], 0.0 if steps == FROZEN else factor)

    def stays_frozen(self, p: Parameter) -> bool:
        """Whether nothing waits of `p` any more."""
        return self._frozen_for.get(p, 0) >= FROZEN
