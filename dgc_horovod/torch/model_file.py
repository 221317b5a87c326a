"""The model's file of a checkpoint: loaded, or an error behind which model and optimizer are what they were."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.kinds import MAPPING, NAMED, NUMBER, SWITCH, TEXT, Kind, checked, list_of, optional

_FIELDS = {"model": MAPPING, "optimizer": MAPPING, "extra": NAMED}
_GROUPS = {"param_groups": list_of(MAPPING), "state": MAPPING}


def read(name: str, data: bytes) -> dict[str, Any]:
    """What ``save_checkpoint`` has written, by "model", "optimizer" and "extra".

    Args:
        name: name of the file, for messages.
        data: its bytes.

    Raises:
        CheckpointError: it cannot be read, or is of another form.
    """
    try:
        saved = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # of torch, of any kind
        raise CheckpointError(f"the model's file, {name}, cannot be read ({error})") from None
    return checked(f"the model's file, {name}, is damaged", saved, _FIELDS)


@contextmanager
def put_back_on_error(model: Any) -> Iterator[None]:
    """Let parameters and buffers of `model` be what they were, where what is done inside fails.

    A model's own hooks and methods say what can be loaded, and may change what they are given: they are called once.
    What they keep elsewhere is not put back.

    Cost: a copy of the model, on the host.
    """
    found = chain(getattr(model, "parameters", tuple)(), getattr(model, "buffers", tuple)())
    kept = [(x, x.detach().to("cpu", copy=True)) for x in found if not torch.nn.parameter.is_lazy(x)]
    try:
        yield
    except BaseException:
        for x, before in kept:
            if x.shape == before.shape:
                x.detach().copy_(before)
            else:  # a hook has made room
                x.data = before.to(x.device)
        raise


def load_model(name: str, saved: Mapping[str, Any], model: Any) -> None:
    """Load into `model` what `read` has returned; see `put_back_on_error`.

    Raises:
        CheckpointError: it does not fit.
    """
    try:
        model.load_state_dict(saved["model"])
    except Exception as error:  # of torch, or of the model's own hooks
        raise CheckpointError(f"the model's file, {name}, does not fit the model: {error}") from None


def check_fits(name: str, saved: Mapping[str, Any], optimizer: Any) -> None:
    """Raise CheckpointError unless `optimizer` can load what `read` has returned; changes nothing."""
    what = f"the model's file, {name}, does not fit"
    ours, theirs = optimizer.state_dict(), saved["optimizer"]
    if not ours.keys() >= _GROUPS.keys():
        return  # an optimizer with a form of its own
    fields = checked(f"{what} the optimizer", theirs, _GROUPS, within="optimizer.")
    groups = fields["param_groups"]
    if len(groups) != len(ours["param_groups"]):
        raise CheckpointError(
            f"{what} the optimizer: it has {len(groups)} parameter groups, the optimizer {len(ours['param_groups'])}"
        )
    defaults = getattr(optimizer, "defaults", {})  # torch has some for flags that were not known when it was saved
    needed = {key for key, value in defaults.items() if isinstance(value, tuple) or NUMBER.holds(value)}
    own = next(base for base in type(optimizer).__mro__ if base.__module__.partition(".")[0] != "horovod")
    known = own.__module__.startswith("torch.optim")  # what others keep may grow, or be converted when it is loaded
    for i, (our_group, group) in enumerate(zip(ours["param_groups"], groups, strict=True)):
        within = f"optimizer.param_groups[{i}]."
        kinds = {key: kind for key, value in our_group.items() if (kind := _like(value))}
        if known:
            kinds.update({key: _UNSET for key, value in our_group.items() if value is None and key in defaults})
        number = len(our_group["params"])
        kinds["params"] = Kind(f"a list of {number} whole numbers", lambda x, n=number: _is_list(x, n, int))  # type: ignore[misc]
        checked(f"{what} the optimizer", group, kinds, kinds.keys() - needed - {"params"}, within)
    for key, state in ours["state"].items() if known else ():
        if fields["state"].get(key, {}) != {}:
            kinds = {part: kind for part, value in state.items() if (kind := _like(value))}
            if "step" in state:
                kinds["step"] = Kind("a number from 0 on", lambda x: _is_number(x) and 0 <= x < math.inf)
            if "momentum_buffer" in kinds:
                kinds["momentum_buffer"] = optional(kinds["momentum_buffer"])  # torch's, without a step
            within = f"optimizer.state[{key}]."
            checked(f"{what} the optimizer", fields["state"][key], kinds, ("momentum_buffer",), within)


def _like(ours: Any) -> Kind | None:
    """What may be loaded in the place of `ours`; None: anything."""
    if isinstance(ours, torch.Tensor) and ours.numel() != 1:
        shape = ours.shape
        return Kind(f"a tensor of shape {tuple(shape)}", lambda x: isinstance(x, torch.Tensor) and x.shape == shape)
    if isinstance(ours, bool):
        return optional(SWITCH)
    if isinstance(ours, torch.Tensor) or NUMBER.holds(ours):
        return Kind("a number", _is_number)
    if isinstance(ours, tuple) and all(map(NUMBER.holds, ours)):
        number = len(ours)
        return Kind(f"{number} numbers", lambda x: _is_list(x, number) and all(map(_is_number, x)))
    return optional(TEXT) if isinstance(ours, str) else None


_UNSET = Kind("None, a flag or a text", lambda x: x is None or isinstance(x, (bool, str)))  # None lets torch choose


def _is_list(x: Any, length: int, of: type = object) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == length and all(isinstance(each, of) for each in x)


def _is_number(x: Any) -> bool:
    return x.numel() == 1 if isinstance(x, torch.Tensor) else NUMBER.holds(x)
