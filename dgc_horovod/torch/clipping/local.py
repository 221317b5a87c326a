"""Clipping as DGC does it: each rank its own gradient, before the momentum; whoever asks for it.

Local gradient clipping (DGC section 3.1) is asked for by ``clip_norm``, or by the script itself: its calls of
``clip_grad_norm_`` and ``clip_grad_value_`` are seen by `calls` and recorded here. Such a call comes when the
gradients have been taken already, so it holds for the next step, in which it is renewed or ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dgc_horovod.core.optimizer_exchange import clip_limit
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state.parts import StatePart
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch.clipping.norms import finite_norm, total_norm
from dgc_horovod.torch.gradients.collectives import Collectives

Parameter = torch.Tensor
MOST = 16  # norms that a message to all ranks has room for
ELEMENTS = math.nan  # in place of the p of a norm: each element is limited by itself


@dataclass(frozen=True)
class Clip:
    """One limit.

    Args:
        parameters: parameters whose gradients are limited, by their norm together.
        limit: limit of the averaged gradient, > 0; inf measures and clips nothing.
        p: order of the norm, > 0 or inf; `ELEMENTS` limits each element's magnitude.
        updates: whether the script clips after synchronize(), where every rank sees the same numbers.
    """

    parameters: tuple[Parameter, ...]
    limit: float
    p: float = 2.0
    updates: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What stays the same from one call of a line in a script to the next."""
        return (math.isnan(self.p), *map(id, self.parameters))


def records_of(clips: Iterable[Clip], names: Mapping[Parameter, str]) -> list[list[Any]]:
    """`clips` as plain values: names of the parameters, limit, order of the norm or None, whether of updates."""
    return [
        [[names[p] for p in clip.parameters], clip.limit, None if math.isnan(clip.p) else clip.p, clip.updates]
        for clip in clips
    ]


def clips_of(records: Iterable[Sequence[Any]], names: Mapping[Parameter, str]) -> list[Clip]:
    """What `records_of` was given, but for parameters that are not there any more."""
    of_name, found = {name: p for p, name in names.items()}, []
    for of, limit, p, updates in records:
        parameters = tuple(of_name[name] for name in of if name in of_name)
        if parameters and 0 < limit < math.inf:
            found.append(Clip(parameters, float(limit), ELEMENTS if p is None else float(p), updates))
    return found


class LocalClipping(StatePart):
    """What limits the gradients of one optimizer on this rank.

    Args:
        given: ``clip_norm`` of the compression, > 0; None: what the script itself asks for.
        names: name of every parameter of the optimizer that is exchanged.
        workers: N >= 1.
        averages: whether gradients are averaged (True) or summed.
    """

    def __init__(self, given: float | None, names: Mapping[Parameter, str], workers: int, averages: bool) -> None:
        self.given, self._names, self._workers, self._averages = given, names, workers, averages
        self._all = tuple(names)
        # with no limit the first step is measured only, should the script clip in it
        first = Clip(self._all, math.inf)
        self.clips: tuple[Clip, ...] = (first if given is None else Clip(self._all, given),)
        self._refusal = ""
        self.adds_decay = False  # whether weight decay enters with some gradient: that is not clipped, as in stock
        self._own_norm = 0.0  # of this rank's gradients in the step under way
        self._late: list[Clip] = []  # first calls that came before the updates were there
        self.norms: dict[tuple[object, ...], float] = {}  # by the key of a clip, before it; of the step under way
        self._noted: dict[tuple[object, ...], Clip] = {}
        self._uncompressed: dict[tuple[object, ...], Clip] = {}  # the same of steps of the framework's own exchange
        self._factors: dict[Parameter, float] = {}
        self._bounds: dict[Parameter, float] = {}
        self._shared: SharedNorms | None = None  # norms on their way to all ranks
        self._number = {p: i for i, p in enumerate(self._all)}  # the same on every rank

    @property
    def active(self) -> bool:
        """Whether anything is clipped in this step: no gradient can be sent before all are there."""
        return bool(self.clips)

    @property
    def is_of_all(self) -> bool:
        """Whether the one limit there is, is of the L2 norm of all gradients together, and one factor will do."""
        return self._whole() is not None and not self.adds_decay

    @property
    def is_of_updates(self) -> bool:
        """Whether the script has clipped after synchronize() in the last step, where ranks should see equal norms."""
        return any(clip.updates for clip in self.clips)

    def refuse(self, why: str) -> None:
        """From now on a limit of the script is an error with the text `why`."""
        self.clips, self._refusal = (), why

    def note(self, clip: Clip) -> float | None:
        """The script has made a call; it will hold for the next step.

        Returns:
            Norm of the same gradients before they were clipped, 0 for elements, if a limit of them holds in this step
            already, so that the call is to change nothing; None if none does.
        """
        if self._refusal:
            raise UnsupportedUse(self._refusal)
        if self.given is not None and not math.isnan(clip.p):
            held = self._noted[self.clips[0].key] = dataclasses.replace(self.clips[0], updates=clip.updates)
            return self._norm_before(held)
        self._keep(clip)
        if any(held.key == clip.key and held.limit < math.inf for held in self.clips):
            return self._norm_before(clip)
        if not clip.updates:
            self._late.append(clip)
        return None

    def _keep(self, clip: Clip) -> None:
        """Record a call of this step; of several the least limit holds, as a large one only measures."""
        before = self._noted.get(clip.key, clip)
        if before.p != clip.p and not math.isnan(clip.p):  # of another norm: the last one holds
            before = clip
        updates, limit = clip.updates or before.updates, min(clip.limit, before.limit)
        self._noted[clip.key] = dataclasses.replace(clip, limit=limit, updates=updates)

    def _norm_before(self, clip: Clip) -> float:
        """As measured; of ``p.grad``, which is a gradient still, where not all gradients have been there to measure."""
        if clip.key in self.norms or math.isnan(clip.p):
            return self.norms.get(clip.key, 0.0)
        return total_norm([finite_norm(p.grad, clip.p) for p in clip.parameters if p.grad is not None], clip.p)

    def cut(self, clip: Clip, steps: Collection[Parameter]) -> float:
        """A call that holds from the next step on: clip the updates of this one, in ``p.grad``, as it says.

        Args:
            clip: limit of the call, recorded already.
            steps: parameters whose updates are no gradients; they stay as they are.

        Returns:
            The norm before; 0 for elements.
        """
        grads = [p.grad for p in clip.parameters if p.grad is not None and not p.grad.is_sparse and p not in steps]
        if math.isnan(clip.p):
            for grad in grads:
                grad.clamp_(-clip.limit, clip.limit)
            return 0.0
        norm = total_norm([finite_norm(grad, clip.p) for grad in grads], clip.p)
        factor = clip.limit / norm if norm > clip.limit else 1.0
        for grad in grads if factor < 1 else []:
            grad.mul_(factor)
        return norm

    @property
    def first_clip(self) -> tuple[float, float] | None:
        """Where the script clips all gradients in the first step: this rank's limit, and what u and v are times too
        large; None where it does not.
        """
        noted = self._noted.get(self.clips[0].key) if self.clips else None
        if noted is None or not self._is_of_first(noted):
            return None
        return self._local(noted.limit), self._factor(noted, self._own_norm)

    def _is_of_first(self, clip: Clip) -> bool:
        """Whether `clip` limits what the first step has measured, which is under way."""
        first = self.clips[0] if self.clips else None
        return first is not None and math.isinf(first.limit) and clip.p == 2 and clip.key in self.norms

    def goes_on(self, asked: Iterable[Clip] = (), first: bool = False) -> None:
        """u and v are of earlier steps too: there is no first one any more.

        Args:
            asked: limits that hold from now on, beside those that do and those of uncompressed steps.
            first: whether no step was made after all, on any rank: the next one is the first, and nothing changes.
        """
        if first:
            return
        held = (*self.clips, *asked, *self._uncompressed.values())
        self._uncompressed.clear()
        if not self._refusal:
            given = [clip for clip in held if self.given is None or clip is held[0] or math.isnan(clip.p)]
            self.clips = tuple({clip.key: clip for clip in given if clip.limit < math.inf}.values())

    def put(self, state: ResidualState) -> None:
        """See `StatePart`: what the script has asked for, and holds in the next step."""
        asked = [clip for clip in self.clips[self.given is not None :] if clip.limit < math.inf]
        state.clips = records_of(asked, self._names)

    def resume(self, state: ResidualState) -> None:
        """See `StatePart`."""
        self.goes_on(clips_of(state.clips, self._names), first=not state.step)

    def note_uncompressed(self, clip: Clip) -> None:
        """The script clips what the framework's own exchange brings: so it will when compression begins."""
        self._keep(clip)

    def uncompressed_step_ends(self) -> None:
        """What the script has clipped in this step holds if the next one is compressed."""
        self._uncompressed, self._noted = self._noted, {}

    def take_late(self) -> list[Clip]:
        """The limits of calls that have clipped gradients of this step in vain, as they had been taken already."""
        late, self._late = self._late, []
        return late

    def step_ends(self, in_join: bool = False) -> None:
        """What was recorded in this step holds in the next.

        Args:
            in_join: whether no script has made this step: what holds goes on, as on the ranks whose scripts do.
        """
        self.goes_on()
        if not in_join:
            given = [] if self.given is None else [self.clips[0]]
            self.clips = tuple({clip.key: clip for clip in (*given, *self._noted.values())}.values())
        for kept in (self._noted, self.norms, self._factors, self._bounds, self._late):
            kept.clear()

    # -- one step

    def of_all(self, squares: float, loss_scale: float) -> float:
        """Where `is_of_all`: the factor, in (0, 1], of all gradients, whose `squares` these are."""
        (whole,) = self.clips
        self._factors.clear()
        self._bounds.clear()
        norm = self._own_norm = self.norms[whole.key] = math.sqrt(squares) / loss_scale
        return self._factor(whole, norm)

    def measure(self, gradients: Mapping[Parameter, torch.Tensor], loss_scale: float) -> None:
        """Find what `clipped` does, in the order of the script's calls.

        Args:
            gradients: all gradients of this rank, by parameter.
            loss_scale: factor of the gradients, > 0.

        Cost: a read of each gradient for each norm that it is part of.
        """
        self._factors.clear()  # of a step that a GradScaler has skipped
        self._bounds.clear()
        for clip in self.clips:
            there = [p for p in clip.parameters if p in gradients]
            if math.isnan(clip.p):
                self.norms[clip.key] = 0.0
                bound = self._local(clip.limit) * loss_scale
                self._bounds.update({p: min(bound, self._bounds.get(p, math.inf)) for p in there})
                continue
            parts = [self._factors.get(p, 1.0) * finite_norm(gradients[p], clip.p) for p in there]
            norm = self.norms[clip.key] = total_norm(parts, clip.p) / loss_scale
            if clip is self._whole():
                self._own_norm = norm
            factor = self._factor(clip, norm)
            self._factors.update({p: factor * self._factors.get(p, 1.0) for p in there})

    def clipped(self, p: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` of `p` within what limits it apart from the others; itself if nothing does."""
        if not (self._factors or self._bounds):
            return gradient
        factor, bound = self._factors.get(p, 1.0), self._bounds.get(p, math.inf)
        if factor < 1:
            gradient = gradient * factor
        if bound < math.inf:  # an overflow must still be seen as one
            gradient = torch.where(gradient.isinf(), gradient, gradient.clamp(-bound, bound))
        return gradient

    def share(self, collectives: Collectives) -> None:
        """Start telling all ranks, unless that is done, the norms that this one's script will ask for."""
        if self._shared is None:
            squares = {what: self.norms[key] ** 2 for what, key in self._told.items()}
            self._shared = SharedNorms(squares, collectives)

    def take(self) -> None:
        """From now on norms that were told are the same on every rank that has measured them."""
        if self._shared is not None:
            shared, self._shared = self._shared, None
            self.norms.update({self._told[what]: norm for what, norm in shared.wait().items()})

    @property
    def _told(self) -> dict[int, tuple[object, ...]]:
        """Key of each norm of this step that all ranks may hear of, by a number that is the same on every rank."""
        asked = [clip for clip in self.clips if clip.updates and not math.isnan(clip.p) and clip.key in self.norms]
        return {self._digest(clip): clip.key for clip in asked}

    def _digest(self, clip: Clip) -> int:
        text = repr((clip.p, [self._number[p] for p in clip.parameters]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def abandon(self) -> None:
        """The step under way is given up; what the script asks for holds all the same, as on other ranks."""
        self._shared = None
        for kept in (self.norms, self._factors, self._bounds, self._late):
            kept.clear()

    def _whole(self) -> Clip | None:
        only = self.clips[0] if len(self.clips) == 1 else None
        return only if only is not None and only.p == 2 and set(self._all) <= set(only.parameters) else None

    def _local(self, limit: float) -> float:
        return clip_limit(limit, self._workers, self._averages)

    def _factor(self, clip: Clip, norm: float) -> float:
        limit = self._local(clip.limit)
        return limit / norm if norm > limit else 1.0


class SharedNorms:
    """Norms of one step, on their way to all ranks in messages of one size: what a rank measures alone makes none wait.

    Args:
        squares: square of each norm of this rank, by a number of 64 bits that says of what it is one, the same on every
            rank; of the first `MOST` the others are told.
        collectives: transport of all ranks, each of which makes one of these.
    """

    def __init__(self, squares: Mapping[int, float], collectives: Collectives) -> None:
        self._own, self._collectives = list(squares)[:MOST], collectives
        message = torch.zeros(2, MOST, dtype=torch.int64)
        for i, what in enumerate(self._own):
            message[0, i] = what
            message[1].view(torch.float64)[i] = squares[what]
        collectives.traffic.count(message.nbytes, (collectives.workers - 1) * message.nbytes)
        self._pending = collectives.allgather(message.view(-1), "clip.norms")

    def wait(self) -> dict[int, float]:
        """The root mean square, over the ranks that have measured it, of each norm of this rank's that was told."""
        gathered = self._collectives.wait(self._pending).view(-1, 2, MOST)
        found = defaultdict(list)
        for what, square in zip(gathered[:, 0].flatten().tolist(), _numbers(gathered[:, 1]), strict=True):
            found[what].append(square)
        return {what: math.sqrt(math.fsum(found[what]) / len(found[what])) for what in self._own}


def _numbers(words: torch.Tensor) -> list[float]:
    """What lies in integers of 64 bits as floating-point numbers."""
    found: list[float] = words.contiguous().view(torch.float64).flatten().tolist()
    return found
