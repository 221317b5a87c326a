"""The split of an optimizer's arithmetic, once for all frameworks: the part before selection, and the part after.

With error feedback alone the gradient enters the residual, and the user's optimizer steps with the exchanged update.
Momentum correction splits the arithmetic. Momentum and second moments act on a rank's own gradient, before selection;
the exchanged sum is applied by a plain step, together with weight decay, which is the same on every rank::

    SGD     u = m*u + g;  v += u    (Nesterov: v += g; v += m*u)    w -= lr*(b + mean(s)),  b = m*b + wd*w
    Adam    v += g / den            (`SecondMoments`)               w -= lr*mean(s)
    local   v += change of weights                                  w -= rate*mean(s)

The slots of the stock optimizer are parts of a record: velocity (u), first and second moment. They are taken over when
compression begins, and given back by a flush: by linearity nothing is lost, and nothing applied twice. An adapter names
the slots of its framework, reads and sets them, and applies a `Change` to weights and slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import CheckpointError, UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation, Array, ErrorFeedback, MomentumCorrection
from dgc_horovod.notices import ADAM_AFTER, ADAM_DIRECTIONS, of_other, refusal
from dgc_horovod.state.parts import ADAM_UPDATES, CHANGES, GRADIENTS
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, Arrays, ResidualState

Left = Mapping[str, Array]  # state of a tensor, combined over the ranks, by part
_correction = functools.lru_cache(maxsize=16)(MomentumCorrection)  # one for all tensors of a group


class Options(NamedTuple):
    """Options of an optimizer for a tensor, as they are now; the defaults have no effect.

    Args:
        momentum, nesterov, dampening: SGD's.
        b1, b2, eps, amsgrad: Adam's.
        decay: factor of weight decay.
        decoupled: whether weight decay acts on the weights, and not on the gradient.
        maximize: whether steps go up the gradient; the slots hold negated gradients then.
        rate: learning rate of the present step.
    """

    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    b1: float = 0.0
    b2: float = 0.0
    eps: float = 0.0
    amsgrad: bool = False
    decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False
    rate: float = 0.0

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Options:
        """Return the options in `found`, by name; others of its values are not read."""
        return cls(**{name: type(x)(found.get(name, x)) for name, x in cls._field_defaults.items()})


class Change(NamedTuple):
    """The change of a tensor by a flush.

    Args:
        step: array that is applied as an update; None: nothing.
        ahead: factor of `step`.
        rate: learning rate of `step`; None: that of the optimizer.
        momentum: array that is added to the velocity, in units of gradients; None: nothing.
        slots: new values of slots, by part.
        kept: array that cannot be applied and stays in the residual of every rank; None: nothing.
    """

    step: Array | None = None
    ahead: float = 1.0
    rate: float | None = None
    momentum: Array | None = None
    slots: Mapping[str, Array] = {}
    kept: Array | None = None


class Arithmetic:
    """Error feedback alone; also for optimizers of unknown arithmetic.

    Attributes:
        slots: slots of the stock optimizer, parts of a record in its order. The first is a sum of gradients.
        parts: parts that a rank keeps of a compressed tensor, and a flush gives back.
        own: slots that are each rank's own, in its record.
        holds: content of the residuals, in words that are in checkpoints.
        is_split: whether compressed tensors are stepped by the exchanged sum alone.
        is_linear: whether that is linear in all gradients, so that the stock slots may go on beside the engine's state.
        dense_is_stock: whether a step at which everything is sent is the user's optimizer's own.
        flush_is_step: whether a flush is a step of the user's optimizer.
        decoupled: whether weight decay is decoupled in every group.
        notices: notices to the user, each logged once.
        notices_unsplit: notices if error feedback alone is used in its place.
    """

    slots: tuple[str, ...] = ()
    parts: tuple[str, ...] = (RESIDUAL,)
    own: tuple[str, ...] = ()
    holds = GRADIENTS
    is_split, is_linear, dense_is_stock, flush_is_step = False, False, False, True
    decoupled = False
    notices: tuple[str, ...] = ()
    notices_unsplit: tuple[str, ...] = ()

    def check(self, options: Options) -> None:
        """Raise UnsupportedUse for options that the split does not support."""

    def accumulation(self, options: Options, buckets: OptimizerExchange, name: str) -> Accumulation:
        """Return the way in which the gradient of the compressed tensor `name` enters the residual at this step."""
        return ErrorFeedback()

    @property
    def has_second(self) -> bool:
        """Whether a second moment, shared by all ranks, belongs to the exchange."""
        return SECOND in self.parts

    def momentum(self, options: Options) -> float:
        """Coefficient of the engine's momentum u; 0: there is none."""
        return 0.0

    def decay_before(self, options: Options) -> float:
        """Weight decay that belongs to the gradient itself, added before everything else."""
        return 0.0

    def shared(self, weights: Array, velocity: Array | None, options: Options) -> Array | None:
        """Return the stock update for a gradient of zero, equal on every rank; advances `velocity` in place."""
        return None

    # -- stock's slots

    def owes(self, options: Options) -> float:
        """Return the factor of the first slot that stock would still apply, in gradients."""
        return 1.0

    def take_over(self, buckets: OptimizerExchange, name: str, slots: Arrays, options: Options, steps: int) -> None:
        """Move the content of a tensor's slots into `buckets`.

        Args:
            buckets: exchange of the optimizer.
            name: name of the tensor there.
            slots: whole and flat, float32, by part; the first as this rank's part of the gradients not applied yet.
            options: options of the tensor.
            steps: number of steps that the optimizer has made, >= 1.
        """

    def give_back(self, buckets: OptimizerExchange, name: str, options: Options, steps: int) -> Arrays:
        """Return a tensor's slots as `buckets` hold them, the first in gradients; {} if the slots themselves do."""
        return {}

    def flushed(self, left: Left, options: Options, is_gradient: bool, ends: bool) -> Change:
        """Return the change of a tensor by a flush.

        Args:
            left: state of the tensor, combined over the ranks, by part; for Adam with the second moment.
            options: options of the tensor.
            is_gradient: whether the residual holds gradients, as that of a tensor that is sent dense, and no updates.
            ends: whether no step follows, to whose gradient the residual could be added.
        """
        return Change(kept=left[RESIDUAL])


class SGD(Arithmetic):
    """SGD: u carries the local gradient.

    Stock's velocity b may go on beside u, as it must where weight decay has a momentum of its own: by linearity their
    sum is the stock velocity, so that the velocity of a stock checkpoint may be in either.
    """

    slots, parts, holds = (MOMENTUM,), (RESIDUAL, MOMENTUM), "updates of SGD"
    is_split, is_linear, flush_is_step = True, True, False

    def check(self, options: Options) -> None:
        if options.momentum and options.dampening:
            raise UnsupportedUse(refusal("SGD's dampening", "dampening=0"))

    def accumulation(self, options: Options, buckets: OptimizerExchange, name: str) -> Accumulation:
        self.check(options)  # a script may have changed them
        return _correction(options.momentum, options.nesterov)

    def momentum(self, options: Options) -> float:
        return options.momentum

    def shared(self, weights: Array, velocity: Array | None, options: Options) -> Array | None:
        pull = weights * options.decay if options.decay else None
        if velocity is None:
            return pull
        velocity *= options.momentum
        if pull is not None:
            velocity += pull
        if not options.nesterov:
            return velocity
        ahead = velocity * options.momentum
        return ahead if pull is None else ahead + pull

    def take_over(self, buckets: OptimizerExchange, name: str, slots: Arrays, options: Options, steps: int) -> None:
        if name in buckets.place:
            engine, i = buckets.place[name]
            segment = engine.bucket.segments[i]
            engine.state.add_momentum(i, slots[MOMENTUM][segment.offset :][: segment.numel])

    def give_back(self, buckets: OptimizerExchange, name: str, options: Options, steps: int) -> Arrays:
        if buckets.topology.node_size > 1:  # slices, and zeros in the place of the others would not be momentum
            return {}
        engine, i = buckets.place[name]
        return {part: x for part, x in engine.state.read(i).items() if part == MOMENTUM}

    def flushed(self, left: Left, options: Options, is_gradient: bool, ends: bool) -> Change:
        """Apply all of v, and add u to the velocity. A residual of gradients has no momentum yet."""
        v = left[RESIDUAL]
        if is_gradient and not ends:
            return Change(kept=v)
        momentum = v if is_gradient else left.get(MOMENTUM)
        ahead = 1 + options.momentum if is_gradient and options.nesterov else 1.0
        return Change(v, ahead, momentum=momentum if options.momentum else None)


class Adam(Arithmetic):
    """Adam, AdamW: gradients enter over the root of a second moment that all ranks share, see `SecondMoments`.

    The first moment is left out, beta1 = 0: the delay in v has the effect of momentum. After stock steps, or a stock
    checkpoint, the shared second moment begins with theirs, and the part of each gradient that their first moment has
    not applied yet, ``b1/(1-b1) * m``, enters v.
    """

    slots, parts, holds = (FIRST, SECOND), (RESIDUAL, SECOND), ADAM_UPDATES
    is_split, dense_is_stock, flush_is_step = True, True, False
    notices, notices_unsplit = (ADAM_DIRECTIONS,), (ADAM_AFTER,)

    def check(self, options: Options) -> None:
        if options.amsgrad:
            raise UnsupportedUse(refusal("Adam's amsgrad", "amsgrad=False"))
        if options.maximize and self.decay_before(options):
            raise UnsupportedUse(refusal("Adam's maximize together with coupled weight decay", "AdamW"))

    def accumulation(self, options: Options, buckets: OptimizerExchange, name: str) -> Accumulation:
        return buckets.second.feed(name, options.b2, options.eps, options.rate)

    def decay_before(self, options: Options) -> float:
        return 0.0 if options.decoupled else options.decay

    def owes(self, options: Options) -> float:
        return options.b1 / (1 - options.b1)

    def take_over(self, buckets: OptimizerExchange, name: str, slots: Arrays, options: Options, steps: int) -> None:
        square = slots[SECOND] / np.float32(1 - options.b2**steps)
        buckets.second.take(name, square, slots[FIRST], steps, options.b2, options.eps)

    def give_back(self, buckets: OptimizerExchange, name: str, options: Options, steps: int) -> Arrays:
        if not buckets.second[name].known:
            return {}
        square = buckets.second[name].square()
        return {FIRST: np.zeros_like(square), SECOND: square * np.float32(1 - options.b2**steps)}

    def flushed(self, left: Left, options: Options, is_gradient: bool, ends: bool) -> Change:
        """Apply all of v, and give the second moment to stock Adam.

        A residual of gradients, the rounding error of a tensor that is sent dense, is not applied: Adam would take a
        full step for it, however small it is.
        """
        if is_gradient:
            return Change(kept=left[RESIDUAL])
        return Change(left[RESIDUAL], slots={FIRST: 0 * left[SECOND], SECOND: left[SECOND]})


class AdamW(Adam):
    """Adam with decoupled weight decay, whatever a group says."""

    decoupled = True


class Local(Arithmetic):
    """Local steps: the inner optimizer takes its own gradients, and residuals hold changes of weights.

    Args:
        inner: arithmetic of the inner optimizer; its slots are saved on every rank, unknown ones on the first only.
        rate: outer learning rate, > 0.
    """

    holds, flush_is_step = CHANGES, False

    def __init__(self, inner: Arithmetic, rate: float) -> None:
        self.own, self._rate = inner.slots, rate

    def flushed(self, left: Left, options: Options, is_gradient: bool, ends: bool) -> Change:
        """Apply the change of weights, all of it."""
        return Change(left[RESIDUAL], rate=self._rate)


def choose(
    stock: Arithmetic, user_class: type, options: Iterable[Options], config: DGCConfig
) -> tuple[Arithmetic, list[str]]:
    """Return the arithmetic of the exchange, and notices to the user.

    Args:
        stock: arithmetic of the user's optimizer.
        user_class: class of the user's optimizer.
        options: options of each of its groups.
        config: compression settings.

    Raises:
        UnsupportedUse: an option that the split does not support.
    """
    if config.exchanges_weights:
        return Local(stock, config.outer_rate), []
    splits = config.momentum_correction and stock.is_split
    for each in options if splits else ():
        stock.check(each)
    told = list(stock.notices if splits else stock.notices_unsplit)
    if not stock.is_split:
        told += of_other(user_class, config.momentum_correction)
    return stock if splits else Arithmetic(), told


def without_own(state: ResidualState, own: Collection[str], numel: Mapping[str, int]) -> ResidualState:
    """Return a record without the rank's own slots; `state` is not changed.

    Args:
        state: record of this rank.
        own: parts of the record that are the rank's own slots.
        numel: number of elements of each tensor of the model.

    Raises:
        CheckpointError: the slots are of another model.
    """
    if not own:
        return state
    tensors: dict[str, Arrays] = {}
    for name, arrays in state.tensors.items():
        sizes = sorted({x.size for part, x in arrays.items() if part in own})
        if name in numel and sizes not in ([], [numel[name]]):
            raise CheckpointError(
                f"the optimizer's state of {name!r} has {sizes} elements, the model's tensor has {numel[name]}; "
                "they must be of the same model"
            )
        if rest := {part: x for part, x in arrays.items() if part not in own}:
            tensors[name] = rest
    return dataclasses.replace(state, tensors=tensors, directions={})
