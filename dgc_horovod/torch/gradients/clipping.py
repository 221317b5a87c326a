"""Local gradient clipping (DGC section 3.1): each rank clips its own gradient, before the momentum.

The limit is ``clip_norm``, or comes from the script: its calls of ``clip_grad_norm_`` and ``clip_grad_value_`` are
observed by `wrapping.clip_calls` and recorded here. Such a call comes after the gradients have been taken, so it
applies to the next step, in which it is renewed or ends. Norms are here too, with clipping of gradients that the
framework's own exchange has averaged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dgc_horovod.config import clip_limit
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state.parts import StatePart
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch.gradients.collectives import Collectives, Parameter, Pending

MOST = 16  # number of norms in a message to all ranks
_NORM = np.dtype([("what", "<i8"), ("square", "<f8")])  # an entry of such a message
_UNCUT = 1.0, math.inf
ELEMENTS = math.nan  # stands for the order of a norm: each element is limited separately


@dataclass(frozen=True)
class Clip:
    """One limit.

    Args:
        parameters: parameters whose gradients are limited by their common norm.
        limit: limit of the averaged gradient, > 0; inf measures the norm and clips nothing.
        p: order of the norm, > 0 or inf; `ELEMENTS` limits each element's magnitude.
        updates: whether the script clips after synchronize(), where every rank sees the same numbers.
    """

    parameters: tuple[Parameter, ...]
    limit: float
    p: float = 2.0
    updates: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal in repeated calls from one line of a script."""
        return (math.isnan(self.p), *map(id, self.parameters))


class LocalClipping(StatePart):
    """The limits of one optimizer's gradients on this rank.

    Args:
        given: ``clip_norm`` of the compression, > 0; None: limits come from the script's calls.
        names: name of every exchanged parameter of the optimizer.
        workers: N >= 1.
        averages: whether gradients are averaged (True) or summed.
    """

    def __init__(self, given: float | None, names: Mapping[Parameter, str], workers: int, averages: bool) -> None:
        self.given, self._names, self._workers, self._averages = given, names, workers, averages
        # without clip_norm the first step is measured, in case the script clips in it
        self.clips: tuple[Clip, ...] = (Clip(tuple(names), math.inf if given is None else given),)
        self._refusal = ""
        self.adds_decay = False  # whether weight decay is added to a gradient; as in stock, the decay is not clipped
        self.late: list[Clip] = []  # first calls in this step that came before the updates were there
        self.norms: dict[tuple[object, ...], float] = {}  # norms before clipping in the present step, by a clip's key
        self._noted: dict[tuple[object, ...], Clip] = {}
        self._uncompressed: dict[tuple[object, ...], Clip] = {}  # calls in steps of the framework's own exchange
        self._cuts: dict[Parameter, tuple[float, float]] = {}  # factor and bound of gradients in the present step
        self.shares = False  # whether all ranks share norms in the present step, at one place among the collectives
        self._shared: Pending | None = None  # norms on their way to all ranks

    @property
    def is_of_all(self) -> bool:
        """Whether the only limit is one of the L2 norm of all gradients, so that one factor is enough."""
        if self.adds_decay or len(self.clips) != 1:
            return False
        (only,) = self.clips
        return only.p == 2 and self._names.keys() <= set(only.parameters)

    def refuse(self, why: str) -> None:
        """Raise UnsupportedUse with the text `why` for clipping calls of the script from now on."""
        self.clips, self._refusal = (), why

    def note(self, clip: Clip) -> float | None:
        """Record a call of the script, which applies from the next step on.

        Returns:
            If these gradients have a limit in this step already, their norm before clipping, 0 for elements: the call
            must then change nothing. None if they have no limit.
        """
        if self._refusal:
            raise UnsupportedUse(self._refusal)
        if self.given is not None and not math.isnan(clip.p):
            held = self._noted[self.clips[0].key] = dataclasses.replace(self.clips[0], updates=clip.updates)
            return self._norm_before(held)
        self.keep(clip)
        if any(held.key == clip.key and held.limit < math.inf for held in self.clips):
            return self._norm_before(clip)
        if not clip.updates:
            self.late.append(clip)
        return None

    def keep(self, clip: Clip) -> None:
        """Record a call of this step, compressed or not, for later steps.

        The least limit of several applies, as scripts measure norms with a large one.
        """
        before = self._noted.get(clip.key, clip)
        if before.p != clip.p and not math.isnan(clip.p):  # of another norm: the last one applies
            before = clip
        updates, limit = clip.updates or before.updates, min(clip.limit, before.limit)
        self._noted[clip.key] = dataclasses.replace(clip, limit=limit, updates=updates)

    def _norm_before(self, clip: Clip) -> float:
        """Return the measured norm; if it was not measured, the norm of ``p.grad``, which still holds gradients."""
        if clip.key in self.norms or math.isnan(clip.p):
            return self.norms.get(clip.key, 0.0)
        return total_norm([finite_norm(p.grad, clip.p) for p in clip.parameters if p.grad is not None], clip.p)

    @property
    def first_clip(self) -> tuple[float, float] | None:
        """This rank's limit and factor of u and v if the script clips all gradients in the first step, else None."""
        first = self.clips[0] if self.clips else None
        noted = self._noted.get(first.key) if first is not None and math.isinf(first.limit) else None
        if noted is None or noted.p != 2 or noted.key not in self.norms:
            return None
        return self._local(noted.limit), self._factor(noted, self.norms[noted.key])  # in the first step of this rank

    def goes_on(self, asked: Iterable[Clip] = ()) -> None:
        """End the measurement of the first step: u and v hold gradients of earlier steps.

        Args:
            asked: more limits that apply from now on, beside the present ones and those of uncompressed steps.
        """
        held = (*self.clips, *asked, *self._uncompressed.values())
        self._uncompressed.clear()
        if not self._refusal:
            given = [clip for clip in held if self.given is None or clip is held[0] or math.isnan(clip.p)]
            self.clips = tuple({clip.key: clip for clip in given if clip.limit < math.inf}.values())

    def put(self, state: ResidualState) -> None:
        """See `StatePart`: saves the script's limits of the next step.

        Each is a list: names of the parameters, limit, order of the norm or None, `Clip.updates`.
        """
        state.clips = []
        for clip in self.clips[self.given is not None :]:
            if clip.limit < math.inf:
                names, p = [self._names[x] for x in clip.parameters], None if math.isnan(clip.p) else clip.p
                state.clips.append([names, clip.limit, p, clip.updates])

    def resume(self, state: ResidualState) -> None:
        """See `StatePart`; parameters that do not exist any more are left out."""
        of_name, asked = {name: p for p, name in self._names.items()}, []
        for names, limit, p, updates in state.clips:
            parameters = tuple(of_name[name] for name in names if name in of_name)
            if parameters and 0 < limit < math.inf:
                asked.append(Clip(parameters, float(limit), ELEMENTS if p is None else float(p), updates))
        if state.step:  # else the next step is the first
            self.goes_on(asked)

    def uncompressed_step_ends(self) -> None:
        """End an uncompressed step: its clipping calls apply if the next step is compressed."""
        self._uncompressed, self._noted = self._noted, {}

    def step_ends(self, in_join: bool = False) -> None:
        """End the step: its recorded calls apply in the next step.

        Args:
            in_join: whether this rank is in join, without calls of a script: the present limits stay.
        """
        self.goes_on()
        if not in_join:
            given = [] if self.given is None else [self.clips[0]]
            self.clips = tuple({clip.key: clip for clip in (*given, *self._noted.values())}.values())
        for kept in (self._noted, self.norms, self._cuts, self.late):
            kept.clear()

    # -- one step

    def of_all(self, squares: float, loss_scale: float) -> float:
        """Return the factor, in (0, 1], of all gradients from their sum of squares; only if `is_of_all`."""
        (whole,) = self.clips
        self._cuts.clear()
        norm = self.norms[whole.key] = math.sqrt(squares) / loss_scale
        return self._factor(whole, norm)

    def measure(self, gradients: Mapping[Parameter, torch.Tensor], loss_scale: float) -> None:
        """Compute the factors and bounds for `clipped`, in the order of the script's calls.

        Args:
            gradients: all gradients of this rank, by parameter.
            loss_scale: factor of the gradients, > 0.

        Cost: a read of each gradient for each norm that it is part of.
        """
        self._cuts.clear()  # left from a step that a GradScaler has skipped
        for clip in self.clips:
            there = [(p, *self._cuts.get(p, _UNCUT)) for p in clip.parameters if p in gradients]
            norm, (own, limit) = 0.0, _UNCUT
            if math.isnan(clip.p):
                limit = self._local(clip.limit) * loss_scale
            else:
                parts = [factor * finite_norm(gradients[p], clip.p) for p, factor, _ in there]
                norm = total_norm(parts, clip.p) / loss_scale
                own = self._factor(clip, norm)
            self.norms[clip.key] = norm
            self._cuts.update({p: (own * factor, min(limit, bound)) for p, factor, bound in there})

    def clipped(self, p: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return `gradient` of `p` clipped by its factor and bound; the same tensor if there is no limit."""
        if not self._cuts:
            return gradient
        factor, bound = self._cuts.get(p, _UNCUT)
        if factor < 1:
            gradient = gradient * factor
        if bound < math.inf:  # an infinity must stay one
            gradient = torch.where(gradient.isinf(), gradient, gradient.clamp(-bound, bound))
        return gradient

    def share(self, collectives: Collectives) -> None:
        """Start sending the norms of this rank's script to all ranks, if they are shared and it is not started yet.

        Messages are of one size, so that ranks with different norms, or none, do not block.
        """
        if not self.shares or self._shared is not None:
            return
        message = np.zeros(MOST, _NORM)
        for i, (what, key) in enumerate(self._told.items()):
            message[i] = what, self.norms[key] ** 2
        collectives.traffic.add(sent=message.nbytes, received=(collectives.workers - 1) * message.nbytes)
        self._shared = collectives.allgather(torch.from_numpy(message.view(np.uint8)), "clip.norms")

    def take(self, collectives: Collectives) -> None:
        """Wait for shared norms: each becomes its root mean square over the ranks that have measured it."""
        if self._shared is None:
            return
        pending, self._shared = self._shared, None
        received = collectives.wait(pending).numpy().view(_NORM)
        for what, key in self._told.items():
            squares = received["square"][received["what"] == what]
            self.norms[key] = math.sqrt(math.fsum(squares) / len(squares))

    @property
    def _told(self) -> dict[int, tuple[object, ...]]:
        """Keys of the norms that are shared in this step, at most `MOST`, by a number that is equal on every rank."""
        asked = [clip for clip in self.clips if clip.updates and not math.isnan(clip.p) and clip.key in self.norms]
        return dict(list({self._digest(clip): clip.key for clip in asked}.items())[:MOST])

    def _digest(self, clip: Clip) -> int:
        text = repr((clip.p, [self._names[p] for p in clip.parameters]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def abandon(self) -> None:
        """Give up the present step; the script's limits stay, as on other ranks."""
        self._shared = None
        for kept in (self.norms, self._cuts, self.late):
            kept.clear()

    def _local(self, limit: float) -> float:
        return clip_limit(limit, self._workers, self._averages)

    def _factor(self, clip: Clip, norm: float) -> float:
        limit = self._local(clip.limit)
        return limit / norm if norm > limit else 1.0


def clip_all(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip as torch's `clip_grad_norm_`, with sparse gradients too, which that function does not support."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        torch.nn.utils.clip_grad_norm_(list(parameters), limit)
        return
    limit_norm(grads, limit, 2.0)


def limit_norm(grads: Sequence[torch.Tensor], limit: float, p: float) -> float:
    """Scale gradients to a common p-norm of at most `limit`; return their norm before."""
    norm = total_norm([finite_norm(grad, p) for grad in grads], p)
    if norm > limit:
        for grad in grads:
            grad.mul_(limit / norm)
    return norm


def total_norm(norms: Sequence[float], p: float) -> float:
    """Return the p-norm of all elements from the p-norms of the parts."""
    if not norms:
        return 0.0
    if math.isinf(p):
        return max(norms)
    return math.fsum(norm**p for norm in norms) ** (1 / p)


def finite_norm(gradient: torch.Tensor, p: float) -> float:
    """Return the p-norm in fp32; elements that are not finite count as zero, as they enter the momentum."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.dtype == torch.float64:  # torch computes no fp32 norm of it
        gradient = gradient.float()
    norm = float(torch.linalg.vector_norm(gradient, p, dtype=torch.float32))
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(torch.nan_to_num(gradient.float(), 0.0, 0.0, 0.0), p))


def limit_averages(optimizer: torch.optim.Optimizer, limit: float | None) -> None:
    """Clip gradients that stock Horovod or DDP has averaged, before each step.

    Args:
        optimizer: optimizer of stock Horovod, or one whose gradients DDP exchanges.
        limit: limit of the L2 norm of all gradients, > 0; None: no limit.
    """
    if limit is not None:
        optimizer.register_step_pre_hook(partial(_clip, limit))


def _clip(limit: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    if getattr(optimizer, "_handles", None):  # stock Horovod's step runs the hooks before it waits, and again after
        return
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients later
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_all(parameters, limit if scale is None else limit * float(scale))
