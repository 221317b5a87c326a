"""A torch optimizer's arithmetic (`dgc_horovod.arithmetic`) in its groups and its state, and what steps its weights.

The exchange brings ``mean(s)`` into ``p.grad``. For plain error feedback the user's optimizer takes it as a gradient.
Where its arithmetic is split, it steps tensors that are not compressed, and the others are stepped here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from dgc_horovod.arithmetic import SGD, Adam, Arithmetic, Left, Options, choose, without_own
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import NotFinite
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.notices import LOOKS, made_not_finite
from dgc_horovod.state.residual_state import MOMENTUM, RESIDUAL, Arrays, ResidualState
from dgc_horovod.torch.gradients.collectives import not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.optimizer_state import (
    SLOTS,
    STEP,
    Group,
    Made,
    Optimizer,
    Parameter,
    State,
    drop_momentum,
    fill_state,
    flat,
    put_slots,
    refit_state,
)

States = MutableMapping[Parameter, State]  # of an optimizer
OwnStep = Callable[[], Any]
Own = dict[Parameter, tuple[Arrays, int | None]]  # a rank's own: slots by part, and Adam's steps

STOCK: dict[type[Optimizer], Arithmetic] = {torch.optim.SGD: SGD(), torch.optim.AdamW: Adam(), torch.optim.Adam: Adam()}


def update_of(optimizer: Optimizer, config: DGCConfig) -> Update:
    """How `optimizer`, not yet wrapped, is updated; of a subclass that overrides ``step`` no arithmetic is known.

    Raises:
        UnsupportedUse: an option of the optimizer that the split would get wrong.
    """
    step, stock = inspect.unwrap(type(optimizer).step), Arithmetic()
    for base, arithmetic in STOCK.items():
        if isinstance(optimizer, base) and step is inspect.unwrap(base.step):
            stock = arithmetic
            break
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    options = (options_of(group, decoupled) for group in optimizer.param_groups)  # of any optimizer, unless asked for
    return Update(stock, *choose(stock, type(optimizer), options, config), decoupled)


def options_of(group: Group, decoupled: bool = False) -> Options:
    """Those of a group of an optimizer that is known. `decoupled`: whether weight decay is, whatever the group says."""
    b1, b2 = group.get("betas", (0.0, 0.0))
    return Options(
        float(group.get("momentum", 0.0)),
        bool(group.get("nesterov")),
        float(group.get("dampening", 0.0)),
        float(b1),
        float(b2),
        float(group.get("eps", 0.0)),
        bool(group.get("amsgrad")),
        float(group["weight_decay"]),
        decoupled or bool(group.get("decoupled_weight_decay")),
        bool(group["maximize"]),
    )


class Update:
    """What an optimizer does with what was exchanged.

    Of SGD ``momentum_buffer`` goes on with what is the same on every rank, so that a stock checkpoint's buffer loads
    into it exactly. Adam's moments leave the state; a step at which everything is sent is Adam's own.

    Args:
        stock: arithmetic of the user's optimizer.
        arithmetic: that of what is exchanged.
        notices: texts for the user, each said once.
        decoupled: whether weight decay is, whatever a group says.

    Attributes:
        dense: whether the step under way is the user's optimizer's own, as everything is sent.
    """

    def __init__(
        self, stock: Arithmetic, arithmetic: Arithmetic, notices: Collection[str] = (), decoupled: bool = False
    ) -> None:
        self.stock, self.arithmetic, self.notices, self._decoupled = stock, arithmetic, list(notices), decoupled
        self.dense = False
        self._taken: set[Parameter] = set()  # whose state has been looked at since `prepare`
        self._made: Made = []  # by `prepare` since the last step
        self._looks = 0 if stock.is_split else LOOKS  # that are left, see `check_weights`

    def _options(self, group: Group) -> Options:
        return options_of(group, self._decoupled) if self.arithmetic.is_split else Options()

    # -- gradients in

    @torch.no_grad()
    def entering(
        self, group_of: Callable[[Parameter], Group], states: States, exchange: GradientExchange
    ) -> tuple[dict[str, Accumulation], dict[Parameter, float]]:
        """How gradients enter the residual in the step that begins; see `GradientExchange.begin_step`.

        Args:
            group_of: function that gives the group of a parameter.
            states: the optimizer's state, which the engine takes over.
            exchange: exchange of the optimizer.
        """
        self.dense = self.arithmetic.dense_is_stock and exchange.as_stock
        accumulations: dict[str, Accumulation] = {}
        decays: dict[Parameter, float] = {}
        options: dict[int, Options] = {}  # of a group, made once for all of its tensors
        for p, name in exchange.sparse.items() if not self.dense else ():
            group = group_of(p)
            known = options.get(id(group)) or options.setdefault(id(group), self._options(group))
            self._adopt_state(p, group, states, exchange)
            accumulations[name] = self.arithmetic.accumulation(known, exchange, name)
            if decay := self.arithmetic.decay_before(known):
                decays[p] = decay
        return accumulations, decays

    def decay_before(self, group: Group) -> float:
        """Weight decay that belongs to the gradient itself, added before everything else."""
        return 0.0 if self.dense else self.arithmetic.decay_before(self._options(group))

    def fading(self, group: Group) -> float:
        """The factor, in [0, 1), by which the engine's momentum falls in a step without a gradient."""
        return self._options(group).momentum

    @property
    def sends_directions(self) -> bool:
        """Whether updates are steps already, and no gradients."""
        return self.arithmetic.dense_is_stock and not self.dense

    # -- updates out

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer's own step comes: the zeros of `prepare` become what the parameters have become since."""
        refit_state(optimizer, self._made)
        self._made = []

    def step(self, optimizer: Optimizer, exchange: GradientExchange, own_step: OwnStep) -> None:
        """Apply one exchanged step: `own_step` runs the user's optimizer on every ``p.grad`` there is."""
        if self.dense:
            fill_state(optimizer, self.stock, exchange.names)
        if self.dense or not self.arithmetic.is_split:
            return own_step()
        held = {p: p.grad for p in exchange.sparse}
        for p in held:
            p.grad = None
        try:
            own_step()
        finally:
            for p, grad in held.items():
                p.grad = grad
        with torch.no_grad():
            for group in optimizer.param_groups:
                options, rate = self._options(group), float(group["lr"])
                for p in group["params"]:
                    update = held.get(p)
                    if update is not None:
                        self._apply(p, update, options, rate, optimizer.state[p])
        return None

    def _apply(self, p: Parameter, update: torch.Tensor, options: Options, rate: float, state: State) -> None:
        key = SLOTS[MOMENTUM]
        velocity = state.get(key) if options.momentum else None
        if options.momentum and options.decay and velocity is None:
            velocity = state[key] = torch.zeros_like(p)
        shared = self.arithmetic.shared(p, velocity, options)
        if options.decoupled and options.decay:
            p.mul_(1 - rate * options.decay)
        p.add_(update, alpha=-_sign(options) * rate)
        if shared is not None:
            p.add_(shared, alpha=-rate)

    def check_weights(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """After a step: raise NotFinite if an optimizer whose arithmetic is not known has spoilt the weights.

        In the first steps that are compressed only; the same on every rank, as the weights are.
        """
        if self._looks and exchange.counts.density_now < 1:
            self._looks -= 1
            if name := not_finite_of(exchange.names):
                raise NotFinite(made_not_finite(exchange.steps - 1, name, type(optimizer).__name__))

    # -- the optimizer's state

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """Let the optimizer's state have what stock's has, on every rank: zeros where the engine keeps the real thing.

        A second moment that the ranks share is there as stock Adam has it. Called after wrapping, after loading a
        state, and whenever somebody asks for it.
        """
        for p in self._taken:
            self._follow_emptied(p, optimizer.state, exchange)
        for group in optimizer.param_groups if self.arithmetic.dense_is_stock else ():
            for p in self._taken.intersection(group["params"]):
                moment = exchange.second[exchange.names[p]]
                if p in optimizer.state and moment.known:
                    found = self.arithmetic.give_back(exchange, exchange.names[p], self._options(group), moment.steps)
                    put_slots(p, group, optimizer.state[p], found, moment.steps)
        self._made += fill_state(optimizer, self.stock, exchange.names)
        self._taken = set()

    def _adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        """Let the engine take over what stands in the optimizer's state: that of a stock checkpoint, or dense steps.

        Of SGD that stays, but for the zeros of `prepare`, before u takes up memory: without decay b would stay zero.
        """
        if not self.arithmetic.is_split or not self._was_placeholder(p, states, exchange):
            return
        state, buffer = states[p], SLOTS[MOMENTUM]
        if not self.arithmetic.is_linear:
            steps = int(state.get(STEP, 1)) if state else 0  # one that counts none has made some
            if steps and not exchange.second[exchange.names[p]].known:
                self._take_over(p, group, state, exchange, steps)
            state.clear()
        elif not group["weight_decay"] and state.get(buffer) is not None and not state[buffer].any():
            del state[buffer]  # not None, which scripts that look for the key would take for a tensor

    @torch.no_grad()
    def end_dense_steps(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """The optimizer has stepped alone, the same on every rank; from now on it does with what was exchanged.

        SGD's b becomes every rank's u, as if that had been there from the start: b would cost passes of its own.
        """
        for group in optimizer.param_groups if self.arithmetic.is_linear else ():
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if p in exchange.sparse and state.get(SLOTS[MOMENTUM]) is not None:
                    self._take_over(p, group, state, exchange, 1)
                    del state[SLOTS[MOMENTUM]]

    def _take_over(self, p: Parameter, group: Group, state: State, exchange: GradientExchange, steps: int) -> None:
        options, (first, *others) = self._options(group), self.arithmetic.slots
        share = 1 if exchange.settings.averages else exchange.collectives.workers  # each has its part of a sum
        owed = self.arithmetic.owes(options) / share * _sign(options) * state[SLOTS[first]]
        slots = {first: flat(owed), **{part: flat(state[SLOTS[part]]) for part in others}}
        self.arithmetic.take_over(exchange, exchange.names[p], slots, options, steps)

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
            if self.arithmetic.dense_is_stock:
                exchange.second.forget(exchange.names[p])

    # -- what is this rank's alone

    def add_own(self, optimizer: Optimizer, exchange: GradientExchange, state: ResidualState) -> None:
        """Add to a rank's record what of the optimizer's state is this rank's alone."""
        for p, name in exchange.names.items() if self.arithmetic.own else ():
            own = optimizer.state.get(p, {})
            kept = {part: own.get(SLOTS[part]) for part in self.arithmetic.own}
            slots = {part: flat(x).copy() for part, x in kept.items() if x is not None}
            if not all(np.isfinite(x).all() for x in slots.values()):
                continue  # no file takes others
            if slots:
                state.tensors.setdefault(name, {}).update(slots)
            if STEP in own and name in state.tensors:
                state.directions[name] = int(own[STEP])

    def split_own(self, exchange: GradientExchange, state: ResidualState) -> tuple[ResidualState, Own]:
        """The record without that, and that, for `take_own`; nothing is changed.

        Raises:
            CheckpointError: it is of another model.
        """
        of_name = {name: p for p, name in exchange.names.items()}
        rest, own = without_own(state, self.arithmetic.own, {name: p.numel() for name, p in of_name.items()})
        found = {of_name[name]: (slots, state.directions.get(name)) for name, slots in own.items()}
        return dataclasses.replace(rest, directions={}), found

    @torch.no_grad()
    def take_own(self, optimizer: Optimizer, own: Own) -> None:
        """Put back what `split_own` has found."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in own:
                    put_slots(p, group, optimizer.state[p], *own[p])

    # -- nothing left behind

    @torch.no_grad()
    def flush(
        self, optimizer: Optimizer, exchange: GradientExchange, left: Mapping[Parameter, Left], own_step: OwnStep
    ) -> dict[Parameter, torch.Tensor]:
        """Apply what all ranks together had kept, see `Arithmetic.flushed`.

        Args:
            optimizer: wrapped torch optimizer.
            exchange: its exchange.
            left: combined u and v of every tensor in a bucket, by part.
            own_step: function that runs the user's optimizer on every ``p.grad`` there is.

        Returns:
            What cannot be applied, by parameter, and is to be kept on every rank.
        """
        if self.arithmetic.flush_is_step:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = left[p][RESIDUAL].to(p.dtype) if p in left else None
            own_step()
            return {}
        kept = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in left:
                    state = optimizer.state[p] if self.arithmetic.is_split else {}
                    kept[p] = self._flush_one(p, group, state, exchange, left[p])
        exchange.second.clear()
        return {p: v for p, v in kept.items() if v is not None}

    def _flush_one(
        self, p: Parameter, group: Group, state: State, exchange: GradientExchange, left: Left
    ) -> torch.Tensor | None:
        options, name, is_gradient, steps = self._options(group), exchange.names[p], p not in exchange.sparse, 0
        if self.arithmetic.dense_is_stock and not is_gradient:
            steps = exchange.second[name].steps
            stock = self.arithmetic.give_back(exchange, name, options, steps)
            left, is_gradient = {**left, **stock}, not stock
        change = self.arithmetic.flushed(left, options, is_gradient, ends=True)
        if change.momentum is not None:
            buffer, momentum = state.get(SLOTS[MOMENTUM]), _sign(options) * change.momentum.to(p.dtype)
            state[SLOTS[MOMENTUM]] = momentum if buffer is None else buffer.add_(momentum)
        if change.slots:
            put_slots(p, group, state, change.slots, steps)
        if change.step is not None and change.rate is not None:
            p.sub_(change.step.to(p.dtype).mul(change.rate))  # not fused: see `LocalRounds.receive`
        elif change.step is not None:
            p.add_(_sign(options) * change.step.to(p.dtype), alpha=-change.ahead * float(group["lr"]))
        return change.kept


def _sign(options: Options) -> float:
    """Stock's slots are of what is descended."""
    return -1.0 if options.maximize else 1.0
