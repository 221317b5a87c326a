"""What a backward pass has left in ``p.grad``, looked at before it is taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dgc_horovod.errors import UnsupportedUse

Names = Mapping[torch.Tensor, str]


def given(p: torch.Tensor, names: Names) -> torch.Tensor:
    """``p.grad``, which must be there from its hook to the end of the step."""
    if p.grad is None:
        raise UnsupportedUse(
            f"the gradient of {names[p]!r} was removed between backward() and step() (model.zero_grad()?); its "
            "exchange was under way. Clear gradients after step(), or before backward()"
        )
    return p.grad


def given_as_wrapped(p: torch.Tensor, names: Names, numel: int, device: torch.device, moves: bool) -> torch.Tensor:
    """``p.grad``, of the size of wrapping and of floats: kernels read and write it by its address.

    Args:
        p, names: parameter, and the names of all.
        numel, device: what it had when it was wrapped.
        moves: whether it is copied to where it is compressed, from any device.
    """
    grad = p.grad
    if grad is not None and grad.numel() == numel and (moves or grad.device == device):
        if grad.dtype.is_floating_point:
            return grad
    grad = given(p, names)
    raise UnsupportedUse(
        f"the gradient of {names[p]!r} has {grad.numel()} elements of {grad.dtype} on {grad.device}; when the "
        f"optimizer was wrapped the parameter had {numel} on {device}, and what is compressed is of floats. Move the "
        "model to its device, and give it its size, before the optimizer is wrapped, or wrap a new one afterwards"
    )


def made_dense(p: torch.Tensor, grad: torch.Tensor, names: Names, allowed: bool) -> torch.Tensor:
    """The gradient of `p` as its values are, dense if sparse ones are `allowed`."""
    if grad.is_sparse:
        if not allowed:
            raise UnsupportedUse(
                f"the gradient of {names[p]!r} is sparse; pass sparse_as_dense=True to compress it like the others, or "
                "build the embedding with sparse=False"
            )
        grad = grad.to_dense()
    return grad.detach().resolve_neg()
