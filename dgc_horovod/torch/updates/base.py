"""How an optimizer's arithmetic is split: what enters the residual before the exchange, what is applied after.

The exchange brings ``mean(s)`` into ``p.grad``. For plain error feedback the user's optimizer takes it as
a gradient. For SGD with momentum the momentum has already been applied, locally: what is left of the
optimizer for that tensor is linear in the weights (decay) and is applied here, beside ``mean(s)``. For
Adam the gradient has been divided by the root of the second moment, and what is left is the plain step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

from dgc_horovod.errors import NotFinite
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback
from dgc_horovod.notices import ADAM_AFTER, LOOKS, made_not_finite
from dgc_horovod.state.residual_state import REMAINDER, RESIDUAL, ResidualState
from dgc_horovod.torch.gradients.dense_path import not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange

Group = dict[str, Any]
Parameter = torch.Tensor
Optimizer = torch.optim.Optimizer
Left = Mapping[str, torch.Tensor]  # of a tensor, by part
AllLeft = Mapping[Parameter, Left]
Kept = dict[Parameter, torch.Tensor]  # what a flush cannot apply
OwnStep = Callable[[], Any]
States = MutableMapping[Parameter, dict[str, Any]]  # of an optimizer
Made = list[tuple[Parameter, str, "weakref.ref[torch.Tensor]"]]  # parameter, key of its state, what was put there
_STEP, _MOMENTS = "step", ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # in it


class PlainUpdate:
    """Error feedback alone: the gradient enters the residual, the user's optimizer takes what comes back.

    Args:
        kind: name of the user's optimizer's arithmetic: "sgd", "adam" (AdamW too) or "other".
    """

    sends_directions = False  # whether updates are steps already, and no gradients
    dense_is_stock = False  # whether a step at which everything is sent is the user's optimizer's own

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.dense = False  # whether the step under way is such a one
        self._made: Made = []  # by `prepare` since the last step
        self._looks = LOOKS if kind == "other" else 0  # that are left, see `check_weights`
        self.notices = [ADAM_AFTER] if kind == "adam" else []  # for the user, once

    def prepare(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """Let the optimizer's state have what stock's has, on every rank: zeros where the engine keeps the real thing.

        Called after wrapping, after loading a state, and whenever somebody asks for it.
        """
        self._made += fill_state(optimizer, self.kind, exchange.names)

    def check_weights(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """After a step: raise NotFinite if an optimizer whose arithmetic is not known has spoilt the weights.

        In the first steps that are compressed only; the same on every rank, as the weights are.
        """
        if self._looks and exchange.counts.density_now < 1:
            self._looks -= 1
            if name := not_finite_of(exchange.names):
                raise NotFinite(made_not_finite(exchange.steps - 1, name, type(optimizer).__name__))

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer's own step comes: the zeros of `prepare` become what the parameters have become since."""
        refit_state(optimizer, self._made)
        self._made = []

    def accumulation(self, p: Parameter, group: Group, exchange: GradientExchange) -> Accumulation:
        """How this step's gradient of `p` enters the residual."""
        return ErrorFeedback()

    def decay_before(self, group: Group) -> float:
        """Weight decay that belongs to the gradient itself, added before everything else."""
        return 0.0

    def fading(self, group: Group) -> float:
        """The factor, in [0, 1), by which the engine's momentum falls in a step without a gradient."""
        return 0.0

    def step(self, optimizer: Optimizer, exchange: GradientExchange, own_step: OwnStep) -> None:
        """Apply one exchanged step: `own_step` runs the user's optimizer on every ``p.grad`` there is."""
        own_step()

    def adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        """Let the engine take over what stands in the optimizer's state: that of a stock checkpoint, or dense steps."""

    def end_dense_steps(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """The optimizer has stepped alone, the same on every rank; from now on it does with what was exchanged."""

    def add_own(self, optimizer: Optimizer, exchange: GradientExchange, state: ResidualState) -> None:
        """Add to a rank's record what of the optimizer's state is this rank's alone."""

    def split_own(self, exchange: GradientExchange, state: ResidualState) -> tuple[ResidualState, Any]:
        """The record without that, and that, for `take_own`; nothing is changed.

        Raises:
            CheckpointError: it is of another model.
        """
        return state, None

    def take_own(self, optimizer: Optimizer, own: Any) -> None:
        """Put back what `split_own` has found."""

    @torch.no_grad()
    def flush(self, optimizer: Optimizer, exchange: GradientExchange, left: AllLeft, own_step: OwnStep) -> Kept:
        """Apply what all ranks together had kept; here as one step of the user's optimizer with it as gradient.

        Args:
            optimizer: wrapped torch optimizer.
            exchange: its exchange.
            left: combined u and v of every tensor in a bucket, by part.
            own_step: function that runs the user's optimizer on every ``p.grad`` there is.

        Returns:
            What cannot be applied, by parameter, and is to be kept on every rank.
        """
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = left[p][RESIDUAL].to(p.dtype) if p in left else None
        own_step()
        return {}


class SplitUpdate(PlainUpdate):
    """The user's optimizer steps the dense-path tensors only; compressed ones are applied by `apply`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._taken: set[Parameter] = set()  # whose state has been looked at since `prepare`

    def prepare(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        for p in self._taken:
            self._follow_emptied(p, optimizer.state, exchange)
        super().prepare(optimizer, exchange)
        self._taken = set()

    def _was_placeholder(self, p: Parameter, states: States, exchange: GradientExchange) -> bool:
        """Whether the state of `p` has not been looked at since `prepare`."""
        known = p in self._taken or p not in states  # `prepare` has filled it, so it was emptied since
        if known:
            self._follow_emptied(p, states, exchange)
        self._taken.add(p)
        return not known

    def _follow_emptied(self, p: Parameter, states: States, exchange: GradientExchange) -> None:
        """A script has emptied the optimizer's state to begin without momentum: what the engine has of it goes too."""
        if p not in states:
            states[p] = {}
            drop_momentum(exchange, p)

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def flush_one(self, p: Parameter, left: Left, group: Group, state: dict[str, Any], compressed: bool) -> Any:
        """Apply what is left of `p`; returns what cannot be applied, or None."""
        raise NotImplementedError

    @torch.no_grad()
    def flush(self, optimizer: Optimizer, exchange: GradientExchange, left: AllLeft, own_step: OwnStep) -> Kept:
        kept = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in left:
                    kept[p] = self.flush_one(p, left[p], group, optimizer.state[p], p in exchange.sparse)
        return {p: v for p, v in kept.items() if v is not None}

    @torch.no_grad()
    def step(self, optimizer: Optimizer, exchange: GradientExchange, own_step: OwnStep) -> None:
        held = {p: p.grad for p in exchange.sparse}
        for p in held:
            p.grad = None
        try:
            own_step()
        finally:
            for p, grad in held.items():
                p.grad = grad
        for group in optimizer.param_groups:
            for p in group["params"]:
                update = held.get(p)
                if update is not None:
                    self.apply(p, update, group, optimizer.state[p])


def step_count(p: Parameter, group: Group, steps: int = 0) -> torch.Tensor:
    """Adam's ``step`` as stock has it: on the device where kernels read it there."""
    on_device = group.get("capturable") or group.get("fused")
    # not of the default dtype, as in stock: in bfloat16 256 + 1 is 256
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32
    return torch.full((), float(steps), dtype=dtype, device=p.device if on_device else None)


def drop_momentum(exchange: GradientExchange, p: Parameter) -> None:
    """Empty what this rank keeps of the momentum of `p`; what waits to be sent stays."""
    if exchange.names[p] in exchange.place:
        engine, i = exchange.place[exchange.names[p]]
        kept = engine.state.read(i)
        engine.state.write(i, {part: x for part, x in kept.items() if part in (RESIDUAL, REMAINDER)})


def fill_state(optimizer: Optimizer, kind: str, known: Collection[Parameter]) -> Made:
    """Fill the state of SGD, Adam and AdamW with the zeros that they would start from.

    With an empty state Horovod's ``broadcast_optimizer_state`` takes a real step; and where one rank alone
    has loaded a checkpoint, the ranks would broadcast different entries and never meet. An entry with nothing in it
    goes: ranks outside the optimizer's process set, which call that function too, have none.

    Args:
        optimizer, kind: optimizer, and the kind of it.
        known: parameters that are exchanged; one of them may have been frozen since.

    Returns:
        The zeros of moments that were made, for `refit_state`.
    """
    made: Made = []
    # the first buffer of SGD with dampening is the gradient itself, not a part of it: its state stays as it comes
    dampens = kind == "sgd" and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups)
    for group in optimizer.param_groups if kind in ("sgd", "adam") and not dampens else []:
        for p in group["params"]:
            if not p.requires_grad and p not in known:
                continue
            state = optimizer.state.get(p, {})
            for key in _entries(kind, group):
                if state.get(key) is None:
                    state[key] = step_count(p, group) if key == _STEP else torch.zeros_like(p)
                    if key != _STEP:
                        made.append((p, key, weakref.ref(state[key])))
            if state:
                optimizer.state[p] = state
            else:
                optimizer.state.pop(p, None)
    return made


def _entries(kind: str, group: Group) -> tuple[str, ...]:
    """What stock has of a tensor of SGD or Adam, in its order: it is broadcast in that."""
    if kind == "sgd":
        return _MOMENTS[:1] if group["momentum"] else ()
    return (_STEP, *_MOMENTS[1:4]) if group["amsgrad"] else (_STEP, *_MOMENTS[1:3])


def refit_state(optimizer: Optimizer, made: Made) -> None:
    """Let zeros that `fill_state` made follow their parameters: a script has moved or cast the model since.

    All others stay as they are: an optimizer may keep moments in fp32 for weights in half precision.
    """
    for p, key, reference in made:
        state, x = optimizer.state.get(p, {}), reference()
        if x is None or state.get(key) is not x:
            continue
        if (x.dtype != p.dtype or x.device != p.device) and not x.any():
            state[key] = torch.zeros_like(p)
