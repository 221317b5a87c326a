"""What a backward pass has left in ``p.grad``: whether it can be taken, and whether kernels can work in its memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Kernels

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


def is_plain(grad: torch.Tensor) -> bool:
    """Whether kernels can read and write `grad` by its address: fp32, every element in its place."""
    if type(grad) is not torch.Tensor or grad.is_sparse or grad.is_neg():
        return False
    return grad.dtype == torch.float32 and grad.is_contiguous()


def is_in(output: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether `output` lies where `grad` does."""
    return not grad.is_sparse and output.data_ptr() == grad.data_ptr() and grad.is_contiguous()


def handed(x: torch.Tensor, kernels: Kernels) -> Any:
    """A contiguous tensor as `kernels` take gradients and targets."""
    return x if kernels.takes_tensors else flat_array(x, kernels)


def flat_array(x: torch.Tensor, kernels: Kernels) -> Any:
    """A contiguous tensor as an Array of `kernels`."""
    flat = x.detach().view(-1)
    return flat.numpy() if kernels.array_kind == "numpy" else flat


def squares_of(tensors: Iterable[torch.Tensor], kernels_of: Callable[[torch.Tensor], Kernels]) -> float:
    """Sum of all squares; what is not finite counts as zero.

    Args:
        tensors: dense tensors, of any dtype and layout.
        kernels_of: function that gives the kernels for the device of a tensor.
    """
    found: dict[Kernels, list[torch.Tensor]] = {}
    for x in tensors:
        kernels = kernels_of(x)
        found.setdefault(kernels, []).append(flat_array(x.contiguous().to(torch.float32), kernels))
    return sum(kernels.squares(arrays) for kernels, arrays in found.items())


def wait_for_streams(streams: set[torch.cuda.Stream]) -> None:
    """Let the present one go on when the others have done what they were given; the host does not wait."""
    for stream in streams:
        present = torch.cuda.current_stream(stream.device)
        if stream != present:
            present.wait_stream(stream)
    streams.clear()


class TakenMemory:
    """Memory that somebody will write to.

    Autograd gives two parameters one gradient memory where a view of each is added to the other. DDP, where it is asked
    for, keeps many gradients in one memory, one behind the other.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []  # of places that do not overlap, in their order
        self._ends: list[int] = []

    def is_first_in(self, grad: torch.Tensor) -> bool:
        """Whether nothing is in the place of `grad`, which is contiguous fp32, yet; if so, from now on `grad` is."""
        begin = grad.data_ptr()
        end = begin + 4 * grad.numel()
        i = bisect_right(self._begins, begin)
        if (i and self._ends[i - 1] > begin) or (i < len(self._begins) and self._begins[i] < end):
            return False
        self._begins.insert(i, begin)
        self._ends.insert(i, end)
        return True

    def clear(self) -> None:
        """Forget all of it."""
        self._begins.clear()
        self._ends.clear()
