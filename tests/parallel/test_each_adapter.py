"""What scripts do with an optimizer, where it is the same on Horovod, on DDP, and on torch.distributed without DDP."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_  # by name, before anything of ours is loaded

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression
from tests.helpers.adapters import Adapter, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import SharedGradients, distance, fingerprint, sgd, smooth_model, step, weights
from tests.helpers.run import everything

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.02, min_numel=64)
CHOICES = {"dgc": FEW, "local": Compression.local(steps=2, density=0.05, min_numel=64), "auto": Compression.auto()}
NO_BACKWARD = "step() was called again with no backward pass"
C = 0.3


@on_adapters("Horovod", "without DDP")
def test_a_synchronization_with_nothing_new_does_nothing(adapter):
    """It was an error that spoke of a step() which nobody had called.

    A GAN as Horovod's maintainers advise: each network's optimizer is synchronized before its gradients are cleared.
    """
    ends = []
    for advised in (False, True):
        torch.manual_seed(1)
        generator, discriminator = nn.Linear(64, 64), nn.Linear(64, 64)
        noise = torch.Generator().manual_seed(adapter.rank)
        (_, g), (_, d) = (adapter.made(FEW, inner=model) for model in (generator, discriminator))
        for _ in range(4):
            z = torch.randn(8, 64, generator=noise)
            d.zero_grad()
            discriminator(generator(z).detach()).pow(2).mean().backward()
            d.step()
            if advised:
                g.synchronize()
                g.synchronize()
            g.zero_grad()
            discriminator.requires_grad_(False)
            discriminator(generator(z)).pow(2).mean().backward()
            discriminator.requires_grad_(True)
            g.step()
            if advised:
                d.synchronize()
        ends.append(fingerprint(generator))
        assert not session(g).told and not session(d).told
        for optimizer in (g, d):
            assert NO_BACKWARD in error_of(optimizer.step)
        with g.skip_synchronize():
            g.synchronize()
            assert NO_BACKWARD in error_of(g.step)
        assert fingerprint(generator) == ends[-1]
    assert ends[0] == ends[1]
    g.zero_grad()
    generator(z).mean().backward()
    g.synchronize()
    added = error_of(generator(z).mean().backward)
    assert added.startswith("UnsupportedUse: backward() was called between synchronize() and step()")
    same_on_ranks(ends)


def _matrices() -> nn.Module:
    """What Muon can train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 1, bias=False))


@on_adapters("Horovod", "DDP", "without DDP")
@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adagrad", "Muon", "AdamW", "SGD, momentum"])
def test_a_state_can_be_asked_for_before_the_first_step(adapter, kind):
    """torch makes a trial step for it, maybe on one rank: that waited, left rates at 0, or was a local step ahead.

    torch.distributed.checkpoint asks rank 0 alone, then all, and gives the state back.
    """

    def make(model: nn.Module) -> torch.optim.Optimizer:
        momentum = {"momentum": 0.9} if "momentum" in kind else {}
        return getattr(torch.optim, kind.split(",")[0])(model.parameters(), lr=0.01, **momentum)

    for name, compression in CHOICES.items():
        if name != "dgc" and (adapter.name == "without DDP" or kind not in ("SGD", "RMSprop", "SGD, momentum")):
            continue
        ends = []
        for asks in (False, True):
            model, optimizer = adapter.made(compression, make, _matrices())
            before = fingerprint(model)
            if asks and adapter.rank == 0:
                get_state_dict(model, optimizer)
            if asks:
                state = get_state_dict(model, optimizer)
                set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
            assert fingerprint(model) == before and float(optimizer.param_groups[0]["lr"]) == 0.01, name
            adapter.train(model, optimizer, 4)
            ends.append([fingerprint(model), optimizer.compression_stats()["steps"]])
        assert ends[0] == ends[1], name
        same_on_ranks(ends[0])


@on_adapters("Horovod", "DDP")
@pytest.mark.parametrize("name", ["dgc", "local"])
def test_a_function_around_a_method_of_the_class_stays(adapter, name):
    """One made with functools.wraps, as autologging has it, was taken for torch's own, and left out."""
    calls, own = [], torch.optim.SGD.step

    @functools.wraps(own)
    def stepped(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return own(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", stepped)
        for compression, wanted in ((None, 4), (CHOICES[name], 8)):
            model, optimizer = adapter.made(compression)
            adapter.train(model, optimizer, 4)
            assert len(calls) == wanted
    same_on_ranks(fingerprint(model))


@on_adapters("Horovod", "DDP")
@pytest.mark.parametrize("limit", [C, 1e6], ids=["clipped", "logged"])
def test_a_rank_that_measures_more_than_the_others_makes_nobody_wait(adapter, limit):
    """Ranks told each other as many norms as each had measured, in a collective of that size.

    All ranks clip, or log, and rank 0 logs a layer's norm as well; rank 1 leaves out what it logs now and then.
    """
    model, optimizer = adapter.made(Compression.dgc(0.05, min_numel=64))
    norms: list[float] = []

    def clip(number: int) -> None:
        if adapter.rank == 0 and number % 4 > 1:
            clip_grad_norm_(next(model.parameters()), 1e6)
        for most in (C, 1e6) if limit == C else (1e6,):  # what is clipped is logged after that
            left_out = number == 4 if adapter.name == "DDP" else number % 4 == 2
            if adapter.rank == 0 or limit == C or not left_out:
                norms.append(float(clip_grad_norm_(model.parameters(), most)))

    for number, (x, y) in enumerate(adapter.batches(12)):
        step(model, optimizer, x, y, between=functools.partial(clip, number))
    if limit == C:
        assert session(optimizer).exchange.clipping.clips[-1].limit == C
    if limit == C or adapter.name == "DDP":
        same_on_ranks(norms[-1])
    same_on_ranks(fingerprint(model))


@on_adapters("Horovod", "DDP")
@pytest.mark.parametrize("clip_norm", [None, C])
def test_a_script_that_clips_by_hand_is_told_how_to_clip(adapter, clip_norm):
    """It multiplies every gradient there is, beside a layer that is frozen."""
    unused = {"find_unused_parameters": True} if adapter.name == "DDP" else {}
    model, optimizer = adapter.made(Compression.dgc(0.05, clip_norm=clip_norm), **unused)
    next(model.parameters()).requires_grad_(False)

    def clip() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        for grad in grads:
            grad.data.mul_(min(1.0, 0.1 / norm))

    with messages() as texts:
        for x, y in adapter.batches(3):
            step(model, optimizer, x, y, between=clip)
    told = [text for text in texts if "clip" in text]
    assert len(told) == (adapter.rank == 0)
    for text in told:
        assert "pass clip_norm=c" in text
        assert adapter.name == "DDP" or "changed p.grad between synchronize() and step()" in text
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize(
    ("adapter", "scale"), [(Adapter("Horovod"), 1.0), (Adapter("DDP"), 1.0), (Adapter("DDP"), 1024.0)]
)
def test_networks_that_take_turns_lose_nothing(adapter, scale):
    """What was selected of a frozen layer was thrown away, at every step.

    What was applied, and what waits, are the gradients of two layers that are frozen in turn.
    """
    unused = {"find_unused_parameters": True} if adapter.name == "DDP" else {}
    compression = Compression.topk(0.02, min_numel=64)
    model, optimizer = adapter.made(compression, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **unused)
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=100, enabled=scale > 1)
    layers = [p for p in model.parameters() if p.ndim > 1][:2]
    before, sums = [p.detach().clone() for p in layers], [torch.zeros_like(p) for p in layers]
    for p, total in zip(layers, sums, strict=True):
        p.register_hook(lambda grad, total=total: [total.add_(grad / scale), grad][1])
    for number, (x, y) in enumerate(adapter.batches(8)):
        for i, p in enumerate(layers):
            p.requires_grad_(number % 2 == i)
        step(model, optimizer, x, y, scaler)
    exchange = session(optimizer).exchange
    for p, was, total in zip(layers, before, sums, strict=True):
        waits = exchange.state_arrays()[exchange.names[p]]["v"].reshape(p.shape)
        given = torch.from_numpy(adapter.mean(total.numpy() - waits))
        assert waits.any() and distance(given, (was - p.detach()) / 0.1) < 1e-4


class Around(torch.optim.Optimizer):
    """A wrapper whose ``step`` is that of the optimizer inside, and which has other methods (Lookahead)."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.inside = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.inside.param_groups

    def sync_lookahead(self) -> None:
        """Another method."""

    def step(self, closure: Any = None) -> None:
        """As that of the optimizer inside."""
        self.inside.step()


@on_adapters("Horovod", "DDP")
def test_a_wrapper_whose_step_is_that_of_the_one_inside(adapter):
    ends = []
    for compression in (None, Compression.auto(), everything()):
        model, optimizer = adapter.made(compression, lambda model: Around(model.parameters(), lr=0.05, momentum=0.9))
        adapter.train(model, optimizer, 4)
        ends.append(weights(model))
    optimizer.flush()
    assert max(distance(ends[0], end) for end in ends[1:]) < 1e-5
    same_on_ranks(fingerprint(model))
    if adapter.name == "Horovod":
        error = error_of(optimizer.inside.step)
        assert "its inner optimizer .inside (SGD) was stepped outside of Around.step()" in error


@on_adapters("Horovod", "DDP")
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_in_words(adapter, way):
    optimizer = adapter.made(FEW)[1]
    error = error_of(lambda: way(optimizer))
    assert error.startswith("UnsupportedUse: ") and "cannot be copied or pickled" in error and "state_dict()" in error


@on_adapters("Horovod", "DDP", "without DDP")
@pytest.mark.parametrize(
    ("fields", "most"),
    [({"dense_values": "fp32"}, 1e-6), ({"dense_values": "8bit"}, 2e-2), ({"bucket_bytes": 8192}, 1e-6)],
)
@pytest.mark.usefixtures("workers")
def test_gradients_that_share_memory_get_an_update_each(adapter, fields, most):
    """As where they are averaged by hand; a parameter has no elements."""
    ends = []
    for by_hand in (True, False):
        model = used = SharedGradients()
        if by_hand:
            optimizer = sgd(model)
        else:
            unused = {"find_unused_parameters": True} if adapter.name == "DDP" else {}
            used, optimizer = adapter.made(everything(**{"min_numel": 1024, **fields}), inner=model, **unused)
        generator = torch.Generator().manual_seed(adapter.rank)
        for _ in range(5):
            optimizer.zero_grad()
            used(torch.randn(8, 32, generator=generator)).pow(2).mean().backward()
            if adapter.name != "DDP":
                assert model.a.grad.data_ptr() == model.b.grad.data_ptr(), "not shared any more; find another case"
            for p in model.parameters() if by_hand else ():
                mean = adapter.mean(p.grad.numpy()) if p.grad is not None else torch.zeros_like(p).numpy()
                p.grad = torch.from_numpy(mean)
            optimizer.step()
        ends.append(weights(model))
    assert distance(*ends) < most
    same_on_ranks(fingerprint(model))


@on_adapters("Horovod", "DDP", "without DDP")
def test_a_model_in_bf16(adapter):
    """Gradients are accumulated in fp32, p.grad comes back in its own dtype; replicas are the same, and learn."""
    views = {"gradient_as_bucket_view": True} if adapter.name == "DDP" else {}
    model, optimizer = adapter.made(Compression.dgc(0.1), inner=smooth_model().bfloat16(), **views)
    losses = [step(model, optimizer, x.bfloat16(), y.bfloat16()) for x, y in adapter.batches(30)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    arrays = session(optimizer).exchange.state_arrays()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    assert {str(a.dtype) for d in arrays.values() for a in d.values()} == {"float32"}
    same_on_ranks(fingerprint(model.float()))


@on_adapters("Horovod", "DDP", "without DDP")
@pytest.mark.parametrize("how", ["norm", "largest", "elements", "clip_norm", "auto"])
def test_gradients_in_float64_are_clipped(adapter, how):
    """torch has no norm of them in fp32, so the next step failed: a model in any dtype trains as that in fp32."""
    ends, dtypes = [], [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    given = {"clip_norm": 0.5} if how in ("clip_norm", "auto") else {}
    compression = Compression.auto(**given) if how == "auto" else Compression.dgc(0.1, min_numel=64, **given)
    if how == "auto":  # for which there is nothing to compare with without DDP
        dtypes = dtypes[: 0 if adapter.name == "without DDP" else 2]
    for dtype in dtypes:
        model, optimizer = adapter.made(compression, inner=smooth_model().to(dtype))
        for x, y in adapter.batches(4):
            optimizer.zero_grad()
            F.mse_loss(model(x.to(dtype)).double(), y.double()).backward()
            optimizer.synchronize()
            if how in ("norm", "largest"):
                clip_grad_norm_(model.parameters(), 0.2, 2.0 if how == "norm" else torch.inf)
            elif how == "elements":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        ends.append(weights(model).double())
        assert distance(ends[0], ends[-1]) < (0.2 if "16" in str(dtype) else 1e-3), dtype
        same_on_ranks(float(ends[-1].sum()))
