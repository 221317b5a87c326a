"""Records of the present step: parameter groups, gradients that have come, and a script's changes of ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.gradients.collectives import Parameter
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.optimizer_state import Group
from dgc_horovod.torch.updates import Update
from dgc_horovod.torch.wrapping.steps import ADDED_LATER

_Seen = tuple[torch.Tensor, int]
_Applied = tuple[torch.Tensor, weakref.ref[torch.Tensor] | None, int]  # parameter, its gradient, the gradient's version
_SAMPLE, _SMALL = 4, 4096  # number of tensors, and their largest size, that are compared by content
Result = Callable[[], torch.Tensor]  # waits for the exchange of a gradient, and returns the update for ``p.grad``
TOO_MANY_PASSES = (
    "a parameter got a gradient more than backward_passes_per_step={passes} times before step(); set "
    "backward_passes_per_step to the number of backward passes that are summed in a step"
)
FROZEN = 6  # steps after which the residual of a frozen parameter is dropped
_FADED = 1e-8  # share of a momentum that is negligible


def _version(p: torch.Tensor) -> int:
    """Return torch's count of in-place writes to ``p.grad``; 0 without a gradient."""
    grad = p.grad
    return grad._version if grad is not None else 0


def _applied(p: torch.Tensor) -> _Applied:
    """Return a record of the tensor ``p.grad``, by weak reference: a script may replace it by one of equal version."""
    grad = p.grad
    return (p, weakref.ref(grad), grad._version) if grad is not None else (p, None, 0)


class GradientWatch:
    """Remembers the state in which each ``p.grad`` was last seen."""

    def __init__(self) -> None:
        self._taken: dict[int, _Seen] = {}  # by id: a tensor's hash is a Python call
        self._synchronized: list[_Applied] = []
        self.brought = False  # whether a backward pass has made the gradients of the last synchronize
        self._applied: list[_Applied] = []
        self._weights: list[_Seen] = []  # some weights, with their own versions
        # copies of small updates: a write through ``.data`` does not change the version
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def taken(self, p: torch.Tensor) -> None:
        """Record that the gradient of `p` has been passed to the exchange, in a new step."""
        self._taken[id(p)] = p, _version(p)
        if self._synchronized:
            self._synchronized, self._copies = [], []

    def synchronized(self, parameters: Iterable[torch.Tensor], brought: bool) -> None:
        """Record that every ``p.grad`` has its update. `brought`: whether a backward pass has made the gradients."""
        self._taken, self.brought = {}, brought
        self._synchronized = list(map(_applied, parameters))
        self._weights = [(p, p._version) for p, _, _ in self._synchronized[:_SAMPLE] if p.requires_grad]
        self._copy()

    def _copy(self) -> None:
        there = [p for p, _, _ in self._synchronized if p.grad is not None and not p.grad.is_sparse]
        small = [p for p in there if 0 < p.numel() <= _SMALL and p.device.type == "cpu"]
        self._copies = [(p, p.grad.clone()) for p in small[:_SAMPLE] if p.grad is not None]

    def applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that the optimizer has applied the updates."""
        self._synchronized, self._copies = [], []
        self._applied = list(map(_applied, parameters))

    def look_again(self) -> None:
        """Accept all changes up to now."""
        self._taken = {key: (p, _version(p)) for key, (p, _) in self._taken.items()}
        self._synchronized = [_applied(p) for p, _, _ in self._synchronized]
        self._copy()

    def changed_since_taken(self) -> bool:
        """Return whether a gradient was changed after the exchange had taken it, without effect."""
        return any(_version(p) != seen for p, seen in self._taken.values())

    def changed_since_synchronized(self, loss_scale: float = 1.0) -> bool:
        """Return whether an update was changed since synchronize; a removed update does not count.

        Args:
            loss_scale: loss scale, > 0; a division by it (GradScaler's unscale_) does not count as a change.
        """
        if any(_version(p) != seen for p, _, seen in self._synchronized if p.grad is not None):
            return True
        return any(p.grad is not None and not _is_same(p.grad, copy, loss_scale) for p, copy in self._copies)

    def writes_to(self, p: torch.Tensor) -> int | None:
        """Return the number of writes to the update of `p` since synchronize; None if ``p.grad`` is another tensor."""
        _, ref, seen = next((each for each in self._synchronized if each[0] is p), (p, None, 0))
        return _version(p) - seen if ref is not None and p.grad is ref() else None

    def weights_changed(self) -> bool:
        """Return whether weights were written to in place since synchronize, as by a step that bypasses ``step``."""
        return bool(self._weights) and all(p._version != seen for p, seen in self._weights)

    def has_applied(self, grad: torch.Tensor | None) -> bool:
        """Return whether `grad` is a tensor that held an update of the last step."""
        return grad is not None and any(ref is not None and ref() is grad for _, ref, _ in self._applied)

    def unchanged_since_applied(self) -> bool:
        """Return whether every ``p.grad`` is still the update that has been applied."""
        return bool(self._applied) and all(
            ref is not None and p.grad is ref() is not None and _version(p) == seen for p, ref, seen in self._applied
        )


def _is_same(grad: torch.Tensor, copy: torch.Tensor, loss_scale: float) -> bool:
    return torch.equal(grad, copy) or (loss_scale != 1 and torch.allclose(grad, copy / loss_scale, 1e-3, 0.0))


class Passes:
    """The backward passes of one optimizer's step.

    Args:
        parameters: parameters that are exchanged, in one order on all ranks.
        per_step: backward passes that are summed before one exchange, >= 1.

    Attributes:
        results: exchange of each parameter that has a gradient in this step; None before its last pass.
        synchronized: whether all exchanges are done, and ``p.grad`` has updates.
        skips: whether ``step`` is called inside ``skip_synchronize``.
    """

    def __init__(self, parameters: Iterable[Parameter], per_step: int) -> None:
        self._parameters = tuple(parameters)
        self.results: dict[Parameter, Result | None] = {}
        self.synchronized = self.skips = False
        self.sum_up(per_step)

    def sum_up(self, per_step: int) -> None:
        """Set the number of passes of a step."""
        self.per_step = per_step
        self._left = dict.fromkeys(self._parameters, per_step)

    def comes(self, p: Parameter) -> bool:
        """Count a pass that has accumulated into ``p.grad``; return whether it was the last one of this step.

        Raises:
            UnsupportedUse: there are more passes than `per_step`.
        """
        self._left[p] -= 1
        if self._left[p] < 0:
            raise UnsupportedUse(TOO_MANY_PASSES.format(passes=self.per_step))
        self.results[p] = None
        return self._left[p] == 0

    def gives_back(self, p: Parameter) -> None:
        """Undo `comes` for `p`, whose gradient was refused."""
        self.results.pop(p, None)
        self._left[p] += 1

    @property
    def missing(self) -> list[Parameter]:
        """Parameters whose gradient has not been passed to the exchange."""
        return [p for p in self._parameters if self.results.get(p) is None]

    @property
    def launched(self) -> bool:
        """Whether a gradient has been passed to the exchange, which the last of accumulated passes does."""
        return any(result is not None for result in self.results.values())

    @property
    def none_yet(self) -> bool:
        """Whether no backward pass of this step has reached any parameter."""
        return bool(self._left) and set(self._left.values()) == {self.per_step}

    def close(self) -> None:
        """End the step's exchanges, or give them up."""
        self.results.clear()
        self.sum_up(self.per_step)

    def set_aside(self) -> Callable[[], None]:
        """Remove the passes of a step that is not complete; return a function that restores them."""
        results, left = dict(self.results), dict(self._left)
        self.close()

        def restore() -> None:
            self.results.update(results)
            self._left.update(left)

        return restore

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside, ``step`` applies ``p.grad`` without a second ``synchronize``."""
        self.skips = True
        try:
            yield
        finally:
            self.skips = False


class ParameterGroups:
    """The parameter groups of one optimizer.

    Args:
        optimizer: optimizer that is being wrapped.
        names: name of every parameter of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> None:
        groups = optimizer.param_groups
        self._names = names
        self._optimizer: torch.optim.Optimizer = weakref.proxy(optimizer)  # a script may replace its list of groups
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        self._count = sum(len(group["params"]) for group in groups)
        # the last known group, also for parameters that are in no group any more
        self._of: dict[Parameter, Group] = {p: group for group in groups for p in group["params"]}
        self._frozen_for: dict[Parameter, int] = {}  # number of steps in a row
        self.changed = False  # whether a script may have moved a parameter

    def of(self, p: Parameter) -> Group:
        """Return the group of `p`."""
        if self.changed:
            self._of |= {p: group for group in self._optimizer.param_groups for p in group["params"]}
            self.changed = False
        return self._of[p]

    def check_nothing_unfrozen(self, exchanged: Collection[Parameter]) -> None:
        """Check that no parameter frozen at wrapping is trained: it is in no bucket, and replicas would differ.

        Args:
            exchanged: parameters that are exchanged.

        Raises:
            UnsupportedUse: such a parameter is trained now, or was added since.
        """
        late, groups = self._frozen, self._optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != self._count:
            late = [p for group in groups for p in group["params"] if p not in exchanged]
        for p in late:
            if p.requires_grad:
                if p not in self._names:
                    raise UnsupportedUse(ADDED_LATER.format(shape=tuple(p.shape)))
                raise UnsupportedUse(
                    f"{self._names[p]!r} did not require a gradient when the optimizer was wrapped, and "
                    "does now; wrap the optimizer while it requires one, and freeze it afterwards"
                )

    def note_frozen(self, p: Parameter, update: Update, exchange: GradientExchange) -> None:
        """Record whether `p` is frozen in this step; drop the residual of a parameter that stays frozen.

        The residual would move it for hundreds of steps. Its momentum still moves it, as with stock Horovod, and the
        residual of that fades with the momentum. Networks that are trained in turn are not frozen for so long.
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
        """Return whether `p` has been frozen for `FROZEN` steps, so that its residual is dropped."""
        return self._frozen_for.get(p, 0) >= FROZEN
