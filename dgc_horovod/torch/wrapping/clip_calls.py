"""Observation of a script's own clipping by ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``.

For gradients that no optimizer of ours exchanges these functions are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from dgc_horovod.names import put_around
from dgc_horovod.notices import clips_already, clips_locally
from dgc_horovod.torch.gradients.clipping import ELEMENTS, Clip, limit_norm, total_norm
from dgc_horovod.torch.session.session import Session, all_alive, live

_signature = functools.cache(inspect.signature)


def watch() -> None:
    """Report calls that clip gradients to the compressed optimizer of the parameters, from now on."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        put_around(clip_grad, name)(_clip)


def _clip(
    stock: Callable[..., Any], parameters: torch.Tensor | Iterable[torch.Tensor], *args: object, **kwargs: object
) -> Any:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    arguments = _signature(stock).bind(parameters, *args, **kwargs)
    arguments.apply_defaults()
    given = arguments.arguments
    limit = float(given["max_norm"] if "max_norm" in given else given["clip_value"])
    p = float(given["norm_type"]) if "norm_type" in given else ELEMENTS
    norms, left = _tell(parameters, limit, p)
    if not norms:
        try:
            return stock(parameters, *args, **kwargs)
        finally:
            for session in live():  # torch's function has just changed its gradients: no notice to the script
                if any(x in session.exchange.names for x in parameters):
                    session.watch.look_again()
    rest = stock(left, *args, **kwargs) if any(x.grad is not None for x in left) else None
    if math.isnan(p):
        return None
    return _as_tensor(total_norm([*norms, *([] if rest is None else [float(rest)])], p), parameters)


def _tell(parameters: list[torch.Tensor], limit: float, p: float) -> tuple[list[float], list[torch.Tensor]]:
    """Return the norms of gradients that are clipped locally already, and the parameters that torch must clip."""
    norms, left = [], parameters
    known = 0 < limit < math.inf and (math.isnan(p) or p > 0)  # norms of order p <= 0 are left to torch
    for session in all_alive():
        own = tuple(x for x in parameters if x in session.exchange.names)
        if not own:
            continue
        clip = Clip(own, limit, p, session.passes.synchronized)
        session.strategy.sees_clip(clip, known)
        if known and session.is_exchanging and not session.strategy.stock:
            norm = _note(session, clip)
            if norm is not None:
                norms.append(norm)
                left = [x for x in left if x not in session.exchange.names]
    return norms, left


def _note(session: Session, clip: Clip) -> float | None:
    """Record a call of the script, see `LocalClipping.note`. Return None if torch must clip ``p.grad``."""
    clipping, synchronized = session.exchange.clipping, session.passes.synchronized
    norm = clipping.note(clip)
    told = f"the script's clipping of gradients to {clip.limit:g}"
    if clipping.given is None:
        averages = session.exchange.settings.averages
        session.tell_once("clipping", clips_locally(f"from the next step on {told}", clip.limit, averages))
    elif clip.limit != clipping.given and not math.isnan(clip.p):
        session.tell_once("clipping", clips_already(clipping.given, told))
    if synchronized and not session.may_apply:  # NaN, which the script may look for
        return None
    return _cut(session, clip) if norm is None and synchronized else norm


def _cut(session: Session, clip: Clip) -> float:
    """Clip the updates of this step at the script's first call, except updates that are Adam's directions.

    Returns:
        The norm before clipping; 0 for elements.
    """
    sends_directions = session.update.arithmetic.has_second and not session.update.dense
    steps = session.exchange.sparse if sends_directions else {}
    grads = [p.grad for p in clip.parameters if p.grad is not None and not p.grad.is_sparse and p not in steps]
    norm = 0.0
    if not math.isnan(clip.p):
        norm = limit_norm(grads, clip.limit, clip.p)
    else:
        for grad in grads:
            grad.clamp_(-clip.limit, clip.limit)
    session.watch.look_again()
    return norm


def cut_late(session: Session) -> None:
    """Clip the updates of a step if the script's first call came after its gradients had been taken."""
    for clip in session.exchange.clipping.late:
        _cut(session, clip)


def end_step(session: Session) -> None:
    """End the step: the script's clipping calls in it apply from the next step on."""
    exchange, clipping = session.exchange, session.exchange.clipping
    if (first := clipping.first_clip) is not None:
        exchange.clip_first(*first)
    clipping.step_ends(exchange.in_join)


def _as_tensor(norm: float, parameters: list[torch.Tensor]) -> torch.Tensor:
    """Return `norm` as a tensor on the gradients' device, of their dtype but at least fp32."""
    grads = [x.grad for x in parameters if x.grad is not None]
    dtype = next((grad.dtype for grad in grads if grad.is_floating_point()), torch.float32)
    device = grads[0].device if grads else None
    return torch.tensor(norm, dtype=torch.promote_types(dtype, torch.float32), device=device)
