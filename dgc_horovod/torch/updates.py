"""The arithmetic of a torch optimizer (`dgc_horovod.arithmetic`) on its groups and state, and the update of weights.

The exchange writes ``mean(s)`` to ``p.grad``. With plain error feedback the user's optimizer uses it as gradient. If
the arithmetic is split, the user's optimizer steps the dense tensors only, and the compressed ones are stepped here.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from dgc_horovod.arithmetic import SGD, Adam, AdamW, Arithmetic, Left, Options, choose, without_own
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import NotFinite
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.notices import LOOKS, made_not_finite
from dgc_horovod.state.parts import StatePart
from dgc_horovod.state.residual_state import MOMENTUM, RESIDUAL, ResidualState
from dgc_horovod.torch.gradients.collectives import Parameter, not_finite_of
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.optimizer_state import SLOTS, STEP, Group, Made, State, fill_state, flat, put_slots

States = MutableMapping[Parameter, State]  # of an optimizer
OwnStep = Callable[[], Any]

STOCK: dict[type[Optimizer], Arithmetic] = {
    torch.optim.SGD: SGD(),
    torch.optim.AdamW: AdamW(),
    torch.optim.Adam: Adam(),
}


def update_of(optimizer: Optimizer, config: DGCConfig) -> Update:
    """Return the `Update` of `optimizer`, not yet wrapped; its arithmetic is unknown if a subclass overrides ``step``.

    Raises:
        UnsupportedUse: the split does not support an option of the optimizer.
    """
    step = inspect.unwrap(type(optimizer).step)
    known = (kind for base, kind in STOCK.items() if isinstance(optimizer, base) and step is inspect.unwrap(base.step))
    stock = next(known, Arithmetic())
    options = (options_of(group, stock.decoupled) for group in optimizer.param_groups)  # lazy: others may lack some
    return Update(stock, *choose(stock, type(optimizer), options, config))


def options_of(group: Group, decoupled: bool) -> Options:
    """Return the options of a group of a known optimizer. `decoupled`: weight decay is decoupled in every group."""
    b1, b2 = group.get("betas", (0.0, 0.0))
    decoupled = decoupled or group.get("decoupled_weight_decay", False)
    renamed = {"b1": b1, "b2": b2, "decay": group.get("weight_decay", 0.0), "decoupled": decoupled, "rate": group["lr"]}
    return Options.read({**group, **renamed})


class Update:
    """The application of exchanged updates by an optimizer.

    SGD's ``momentum_buffer`` keeps the part of the momentum that is equal on all ranks, so a stock checkpoint's buffer
    loads into it exactly. Adam's moments leave the state; a step at density 1 is Adam's own.

    Args:
        stock: arithmetic of the user's optimizer.
        arithmetic: arithmetic of the exchanged updates.
        notices: texts for the user, each printed once.

    Attributes:
        dense: whether the present step is the user's optimizer's own, at density 1.
    """

    def __init__(self, stock: Arithmetic, arithmetic: Arithmetic, notices: Collection[str]) -> None:
        self.stock, self.arithmetic, self.notices = stock, arithmetic, list(notices)
        self.dense = False
        self._taken: set[Parameter] = set()  # parameters whose state has been checked since `prepare`
        self._made: Made = []  # zeros made by `prepare` since the last step
        self._looks = 0 if stock.is_split else LOOKS  # remaining checks, see `check_weights`

    def _options(self, group: Group) -> Options:
        return options_of(group, self.stock.decoupled) if self.arithmetic.is_split else Options()

    # -- gradients in

    @torch.no_grad()
    def entering(
        self, group_of: Callable[[Parameter], Group], states: States, exchange: GradientExchange
    ) -> tuple[dict[str, Accumulation], dict[Parameter, float]]:
        """Return how gradients enter the residual in the beginning step, for `GradientExchange.begin_step`.

        Args:
            group_of: function that returns the group of a parameter.
            states: the optimizer's state, which the engine takes over.
            exchange: exchange of the optimizer.
        """
        self.dense = exchange.dense = self.arithmetic.dense_is_stock and exchange.as_stock
        accumulations: dict[str, Accumulation] = {}
        decays: dict[Parameter, float] = {}
        options: dict[int, Options] = {}  # by id of a group
        for p, name in exchange.sparse.items() if not self.dense else ():
            group = group_of(p)
            known = options.get(id(group)) or options.setdefault(id(group), self._options(group))
            self._adopt_state(p, group, states, exchange)
            accumulations[name] = self.arithmetic.accumulation(known, exchange, name)
            if decay := self.arithmetic.decay_before(known):
                decays[p] = decay
        return accumulations, decays

    def decay_before(self, group: Group) -> float:
        """Return the weight decay that is added to the gradient before accumulation."""
        return 0.0 if self.dense else self.arithmetic.decay_before(self._options(group))

    def fading(self, group: Group) -> float:
        """Return the factor, in [0, 1), of the engine's momentum in a step without a gradient."""
        return self.arithmetic.momentum(self._options(group))

    # -- updates out

    def begin(self, optimizer: Optimizer) -> None:
        """Prepare for the optimizer's own step: adapt the zeros of `prepare` to parameters that a script has moved.

        Other entries are not changed: an optimizer may keep moments in fp32 for weights in half precision.
        """
        for p, key, reference in self._made:
            state, x = optimizer.state.get(p, {}), reference()
            if x is not None and state.get(key) is x:
                if (x.dtype != p.dtype or x.device != p.device) and not x.any():
                    state[key] = torch.zeros_like(p)
        self._made = []

    def step(self, optimizer: Optimizer, exchange: GradientExchange, own_step: OwnStep) -> None:
        """Apply one exchanged step; `own_step` steps the user's optimizer on every ``p.grad``."""
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
                options = self._options(group)
                for p in group["params"]:
                    if (update := held.get(p)) is not None:
                        self._apply(p, update, options, optimizer.state[p])
        return None

    def _apply(self, p: Parameter, update: torch.Tensor, options: Options, state: State) -> None:
        key = SLOTS[MOMENTUM]
        velocity = state.get(key) if options.momentum else None
        if options.momentum and options.decay and velocity is None:
            velocity = state[key] = torch.zeros_like(p)
        shared = self.arithmetic.shared(p, velocity, options)
        if options.decoupled and options.decay:
            p.mul_(1 - options.rate * options.decay)
        p.add_(update, alpha=-_sign(options) * options.rate)
        if shared is not None:
            p.add_(shared, alpha=-options.rate)

    def check_weights(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """Raise NotFinite after a step if an optimizer with unknown arithmetic has made weights not finite.

        Checked in the first compressed steps only; the result is the same on every rank, as the weights are.
        """
        if self._looks and exchange.counts.density_now < 1:
            self._looks -= 1
            if name := not_finite_of(exchange.names):
                raise NotFinite(made_not_finite(exchange.steps - 1, name, type(optimizer).__name__))

    # -- the optimizer's state

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """Give the optimizer's state the entries of stock's, on every rank: zeros for values that the engine keeps.

        Shared second moments are written in stock Adam's form. Called after wrapping, after loading a state, and before
        ``state_dict()``.
        """
        for p in self._taken:
            self._follow_emptied(p, optimizer.state, exchange)
        for group in optimizer.param_groups if self.arithmetic.has_second else ():
            for p in self._taken.intersection(group["params"]):
                moment = exchange.second[exchange.names[p]]
                if p in optimizer.state and moment.known:
                    found = self.arithmetic.give_back(exchange, exchange.names[p], self._options(group), moment.steps)
                    put_slots(p, group, optimizer.state[p], found, moment.steps)
        self._made += fill_state(optimizer, self.stock, exchange.names)
        self._taken = set()

    def _adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        """Move the optimizer's state, from a stock checkpoint or dense steps, to the engine.

        SGD's state stays in the optimizer; only zeros of `prepare` are removed to save memory, if there is no weight
        decay, which would fill them.
        """
        if not self.arithmetic.is_split:
            return
        known = p in self._taken or p not in states  # a missing state, filled by `prepare`, was removed by a script
        self._taken.add(p)
        if known:
            self._follow_emptied(p, states, exchange)
            return
        state, buffer = states[p], SLOTS[MOMENTUM]
        if not self.arithmetic.is_linear:
            steps = int(state.get(STEP, 1)) if state else 0  # a state without a count has made steps
            if steps and not exchange.second[exchange.names[p]].known:
                self._take_over(p, group, state, exchange, steps)
            state.clear()
        elif not group["weight_decay"] and state.get(buffer) is not None and not state[buffer].any():
            del state[buffer]  # not set to None, which scripts that test for the key would take for a tensor

    @torch.no_grad()
    def end_dense_steps(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """Begin compressed steps after steps of the optimizer itself, which were equal on all ranks.

        SGD's momentum_buffer becomes u of every rank, as if there had been u from the start; a buffer besides u would
        cost passes of its own.
        """
        for group in optimizer.param_groups if self.arithmetic.is_linear else ():
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if p in exchange.sparse and state.get(SLOTS[MOMENTUM]) is not None:
                    self._take_over(p, group, state, exchange, 1)
                    del state[SLOTS[MOMENTUM]]

    def _take_over(self, p: Parameter, group: Group, state: State, exchange: GradientExchange, steps: int) -> None:
        options, (first, *others) = self._options(group), self.arithmetic.slots
        share = 1 if exchange.settings.averages else exchange.collectives.workers  # of a sum each rank takes a part
        owed = self.arithmetic.owes(options) / share * _sign(options) * state[SLOTS[first]]
        slots = {first: flat(owed), **{part: flat(state[SLOTS[part]]) for part in others}}
        self.arithmetic.take_over(exchange, exchange.names[p], slots, options, steps)

    def _follow_emptied(self, p: Parameter, states: States, exchange: GradientExchange) -> None:
        """Drop the engine's momentum of `p` if the script has removed its state, to start without momentum."""
        if p not in states:
            states[p] = {}
            exchange.drop_momentum(exchange.names[p])
            exchange.second.forget(exchange.names[p])

    # -- flush

    @torch.no_grad()
    def flush(
        self, optimizer: Optimizer, exchange: GradientExchange, left: Mapping[Parameter, Left], own_step: OwnStep
    ) -> dict[Parameter, torch.Tensor]:
        """Apply the combined residuals of all ranks, see `Arithmetic.flushed`.

        Args:
            optimizer: wrapped torch optimizer.
            exchange: its exchange.
            left: combined u and v of every tensor in a bucket, by part.
            own_step: function that steps the user's optimizer on every ``p.grad``.

        Returns:
            Residuals that cannot be applied, by parameter; every rank must keep them.
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
        options, name, is_gradient, steps = self._options(group), exchange.names[p], p not in exchange.sparse, None
        if self.arithmetic.has_second and not is_gradient:
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
    """Return -1 with ``maximize``, else 1: stock's slots are of the gradient that is descended."""
    return -1.0 if options.maximize else 1.0


class OwnState(StatePart):
    """The state of the user's optimizer that differs between ranks.

    Args:
        own: parts of a record that are slots of its own on each rank, see `Arithmetic`.
        optimizer: wrapped optimizer, to which this refers weakly.
        names: name of every exchanged parameter.
    """

    in_optimizer = True

    def __init__(self, own: Collection[str], optimizer: Optimizer, names: Mapping[Parameter, str]) -> None:
        self._own, self._names = own, names
        self._optimizer: Optimizer = weakref.proxy(optimizer)

    def put(self, state: ResidualState) -> None:
        """See `StatePart`."""
        for p, name in self._names.items() if self._own else ():
            held = self._optimizer.state.get(p, {})
            kept = {part: held.get(SLOTS[part]) for part in self._own}
            slots = {part: flat(x).copy() for part, x in kept.items() if x is not None}
            if not all(np.isfinite(x).all() for x in slots.values()):
                continue  # a checkpoint cannot hold them
            if slots:
                state.tensors.setdefault(name, {}).update(slots)
            if STEP in held and name in state.tensors:
                state.directions[name] = int(held[STEP])

    def without(self, state: ResidualState) -> ResidualState:
        """See `StatePart`."""
        return without_own(state, self._own, {name: p.numel() for p, name in self._names.items()})

    @torch.no_grad()
    def resume(self, state: ResidualState) -> None:
        """See `StatePart`."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                name = self._names.get(p, "")
                slots = {part: x for part, x in state.tensors.get(name, {}).items() if part in self._own}
                if slots:
                    put_slots(p, group, self._optimizer.state[p], slots, state.directions.get(name))
