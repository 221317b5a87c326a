"""What a backward pass has left is looked at before a kernel reads and writes it by its address."""

from __future__ import annotations

import pytest
import torch

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.testing.loopback import Loopback
from dgc_horovod.torch.gradients.collectives import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.memory import given, given_as_wrapped

HOST = torch.device("cpu")


def of(size=6, device="cpu", dtype=torch.float32):
    """A parameter with a gradient, and its name."""
    p = torch.nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
    p.grad = torch.zeros_like(p)
    return p, {p: "a.weight"}


def test_a_gradient_as_it_was_wrapped_is_taken():
    for more in ({}, {"dtype": torch.bfloat16}):
        p, names = of(**more)
        assert given_as_wrapped(p, names, 6, HOST, moves=False) is p.grad


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"size": 5}, "'a.weight' has 5 elements of torch.float32 on cpu; expected 6 floating-point numbers on cpu"),
        ({"size": 7}, "has 7 elements"),
        ({"device": "meta"}, "on meta; .* Move the model to its device"),
        ({"dtype": torch.complex64}, "complex64"),
    ],
    ids=str,
)
def test_another_size_device_or_kind_is_refused(more, words):
    with pytest.raises(UnsupportedUse, match=words):
        given_as_wrapped(*of(**more), 6, HOST, moves=False)


def test_where_gradients_are_copied_to_the_host_they_may_be_anywhere():
    p, names = of(device="meta")
    assert given_as_wrapped(p, names, 6, HOST, moves=True) is p.grad


def test_a_gradient_that_is_gone_is_named():
    p, names = of()
    p.grad = None
    with pytest.raises(UnsupportedUse, match=r"'a\.weight' was removed between"):
        given(p, names)


def test_the_scale_of_a_step_is_asked_once():
    asked, board = [], {}
    p, _ = of(4096)
    config, transports = DGCConfig(density=0.5, clip_norm=1.0), {ALL: Loopback(0, 1, board)}
    exchange = GradientExchange(
        {"a.weight": p}, {p: 0}, config, transports, ReduceSettings(True), lambda: float(asked.append(1) or len(asked))
    )
    for step in (1, 2):
        exchange.begin_step({}, {})
        p.grad = exchange.take(p)()
        assert exchange.finish() and len(asked) == step
        board.clear()
