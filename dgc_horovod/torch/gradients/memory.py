"""Access to ``p.grad`` after a backward pass: checks of the gradient, and whether kernels can use its memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Array, Kernels

Names = Mapping[torch.Tensor, str]


def given(p: torch.Tensor, names: Names) -> torch.Tensor:
    """Return ``p.grad``; raise UnsupportedUse if it was removed before the end of the step."""
    if p.grad is None:
        raise UnsupportedUse(
            f"the gradient of {names[p]!r} was removed between backward() and step() (model.zero_grad()?), while it "
            "was being exchanged. Clear gradients after step(), or before backward()"
        )
    return p.grad


def given_as_wrapped(p: torch.Tensor, names: Names, numel: int, device: torch.device, moves: bool) -> torch.Tensor:
    """Return ``p.grad`` after a check of its size, device and dtype: kernels read and write it by its address.

    Args:
        p, names: parameter, and the names of all parameters.
        numel, device: size and device of the parameter at wrapping.
        moves: whether the gradient is copied to another device for compression, from any device.
    """
    grad = given(p, names)
    if grad.numel() == numel and (moves or grad.device == device) and grad.dtype.is_floating_point:
        return grad
    raise UnsupportedUse(
        f"the gradient of {names[p]!r} has {grad.numel()} elements of {grad.dtype} on {grad.device}; expected "
        f"{numel} floating-point numbers on {device}, as when the optimizer was wrapped. Move the model to its device, "
        "and set its size, before wrapping the optimizer, or wrap a new optimizer afterwards"
    )


def made_dense(p: torch.Tensor, grad: torch.Tensor, names: Names, allowed: bool) -> torch.Tensor:
    """Return the detached gradient of `p`; a sparse one is made dense if `allowed`, else it is an error."""
    if grad.is_sparse:
        if not allowed:
            raise UnsupportedUse(
                f"the gradient of {names[p]!r} is sparse; pass sparse_as_dense=True to compress it like the others, or "
                "build the embedding with sparse=False"
            )
        grad = grad.to_dense()
    return grad.detach().resolve_neg()


def is_plain(grad: torch.Tensor) -> bool:
    """Return whether kernels can read and write `grad` by its address: fp32 and contiguous."""
    if type(grad) is not torch.Tensor or grad.is_sparse or grad.is_neg():
        return False
    return grad.dtype == torch.float32 and grad.is_contiguous()


def is_in(output: torch.Tensor, grad: torch.Tensor) -> bool:
    """Return whether `output` has the memory of `grad`."""
    return not grad.is_sparse and output.data_ptr() == grad.data_ptr() and grad.is_contiguous()


def handed(x: torch.Tensor, kernels: Kernels) -> Array:
    """Return a contiguous tensor in the form that `kernels` take for gradients and outputs."""
    return x if kernels.takes_tensors else flat_array(x, kernels)


def flat_array(x: torch.Tensor, kernels: Kernels) -> Array:
    """Return a contiguous tensor as an Array of `kernels`, in the same memory."""
    flat = x.detach().view(-1)
    return flat.numpy() if kernels.array_kind == "numpy" else flat


def squares_of(tensors: Iterable[torch.Tensor], kernels_of: Callable[[torch.Tensor], Kernels]) -> float:
    """Return the sum of all squares; elements that are not finite count as zero.

    Args:
        tensors: dense tensors, of any dtype and layout.
        kernels_of: function that returns the kernels for the device of a tensor.
    """
    found: dict[Kernels, list[torch.Tensor]] = {}
    for x in tensors:
        kernels = kernels_of(x)
        found.setdefault(kernels, []).append(flat_array(x.contiguous().to(torch.float32), kernels))
    return sum(kernels.squares(arrays) for kernels, arrays in found.items())


def wait_for_streams(streams: set[torch.cuda.Stream]) -> None:
    """Make the current stream wait for `streams`, and clear the set; the host does not wait."""
    for stream in streams:
        present = torch.cuda.current_stream(stream.device)
        if stream != present:
            present.wait_stream(stream)
    streams.clear()


class TakenMemory:
    """Address ranges that updates of the present step will be written to.

    Autograd can give two parameters one gradient memory, if a view of each is added to the other. DDP can keep many
    gradients in one memory, one after another.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # begin and end, ascending; they do not overlap

    def is_first_in(self, grad: torch.Tensor) -> bool:
        """Take the memory of `grad`, contiguous fp32; return False, and take nothing, if a part is already taken."""
        begin = grad.data_ptr()
        end = begin + 4 * grad.numel()
        i = bisect_right(self._ranges, (begin, end))
        if any(begin < last and first < end for first, last in self._ranges[max(i - 1, 0) : i + 1]):
            return False
        self._ranges.insert(i, (begin, end))
        return True

    def clear(self) -> None:
        """Release all ranges."""
        self._ranges.clear()
