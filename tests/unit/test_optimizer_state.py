"""The state of a wrapped optimizer: moments that are the optimizer's own, Adam's steps, and a script's reset."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dgc_horovod import DGCConfig
from dgc_horovod.arithmetic import Adam, Arithmetic
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer
from dgc_horovod.torch.optimizer_state import step_count
from dgc_horovod.torch.updates import Update, update_of
from tests.helpers.regression import UNROUNDED, batches, distance, smooth_model, weights

WHOLE = {"density": 1.0, "factor_masking": False, "min_numel": 64, **UNROUNDED}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9),
    "sgd with decay": lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
RESETS = {
    "clear": lambda optimizer, p: optimizer.state.clear(),
    "clear and save": lambda optimizer, p: (optimizer.state.clear(), optimizer.state_dict()),
    "one tensor": lambda optimizer, p: optimizer.state.pop(p),
}
CLEARED = [(name, "clear") for name in OPTIMIZERS]


class WideAdam(torch.optim.Optimizer):
    """Adam with moments in fp32, made in the constructor or where a gradient comes first."""

    def __init__(self, params, eager):
        super().__init__(params, {"lr": 1e-3})
        for p in self.param_groups[0]["params"] if eager else []:
            self.state[p] = self._zeros(p)

    def _zeros(self, p):
        return {"step": 0, **{key: torch.zeros_like(p, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p] = self.state.get(p) or self._zeros(p)
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad.float(), 0.1)
            state["exp_avg_sq"].lerp_(p.grad.float().square(), 0.001)
            second = state["exp_avg_sq"] / (1 - 0.999 ** state["step"])
            p.sub_(1e-3 * state["exp_avg"] / (1 - 0.9 ** state["step"]) / (second.sqrt() + 1e-8))


@pytest.fixture
def alone():
    """A process group of one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other, for tensors of this size
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def in_bfloat16():
    """The default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def made(make, compression=None):
    """A model and its optimizer, wrapped unless there is no compression."""
    model = smooth_model()
    inner = make(model.parameters())
    return model, DistributedOptimizer(inner, model.named_parameters(), compression) if compression else inner


def both(name, script):
    """Weights after a script, with the stock optimizer and with one that sends everything."""
    for compression in (None, Compression.dgc(**WHOLE)):
        model, optimizer = made(OPTIMIZERS[name], compression)
        script(model, optimizer)
        yield weights(model)


def train(model, optimizer, steps, seed=0):
    for x, y in batches(steps, 0, seed=seed):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("eager", [True, False])
def test_moments_of_an_optimizer_of_another_kind_stay_what_they_are(alone, eager):
    """Zeros in fp32 had become zeros in fp16, and weights NaN; or those of one rank alone, which had saved."""
    ends = []
    for compression in (None, Compression.topk(1.0, min_numel=64, **UNROUNDED)):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(40, 50).half())
        optimizer = WideAdam([w], eager)
        if compression:
            optimizer = DistributedOptimizer(optimizer, [("w", w)], compression)
        for step in range(4):
            optimizer.zero_grad()
            ((w.float() ** 2).sum() * 1e-4 * (step > 0)).backward()  # nothing at first
            optimizer.step()
            optimizer.state_dict()
            assert {optimizer.state[w][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
        ends.append(w.detach())
    assert ends[0].isfinite().all() and torch.equal(*ends)


def test_of_adam_only_the_zeros_that_are_ours_follow_a_cast():
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer, update = torch.optim.Adam([p, q]), Update(Adam(), Arithmetic(), [])
    theirs = optimizer.state[q]["exp_avg"] = torch.zeros(3)
    update.prepare(optimizer, SimpleNamespace(names={p: "p", q: "q"}))
    p.data, q.data = p.data.double(), q.data.double()
    update.begin(optimizer)
    assert {optimizer.state[p][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float64}
    assert optimizer.state[q]["exp_avg"] is theirs and optimizer.state[q]["exp_avg_sq"].dtype == torch.float64


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
def test_adams_steps_are_counted_as_stock_counts_them(default, fused):
    """In bfloat16 they had stopped at 256."""
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    optimizer = torch.optim.Adam([p], fused=fused)
    torch.set_default_dtype(default)
    try:
        optimizer.step()
        count = step_count(p, optimizer.param_groups[0], 256)
    finally:
        torch.set_default_dtype(torch.float32)
    assert count.dtype == optimizer.state[p]["step"].dtype and int(count + 1) == 257


def test_the_norm_that_a_script_is_given_is_not_of_the_default_dtype(alone, in_bfloat16):
    w = torch.nn.Parameter(torch.zeros(40, 50, dtype=torch.float32))
    optimizer = DistributedOptimizer(torch.optim.SGD([w], 0.1, 0.9), [("w", w)], Compression.dgc(0.1))
    for _ in range(3):
        optimizer.zero_grad()
        (w[0, 0] * 257).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_([w], 1e4)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert norm.dtype == torch.float32 and float(norm) == 257


@pytest.mark.parametrize(("name", "reset"), [*CLEARED, ("sgd", "clear and save"), ("sgd", "one tensor")])
def test_a_state_that_a_script_empties_takes_the_momentum_along(alone, name, reset):
    """The engine had kept it, without a word."""
    before = []

    def script(model, optimizer):
        train(model, optimizer, 5)
        before.append(weights(model))
        RESETS[reset](optimizer, model[2].weight)
        train(model, optimizer, 5, seed=1)

    ends = list(both(name, script))
    assert distance(*ends) < 1e-5 < 1e-2 * distance(before[-1], ends[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_flush_a_script_finds_and_resets_the_momentum(alone, name):
    key = "exp_avg" if name == "adam" else "momentum_buffer"

    def script(model, optimizer):
        train(model, optimizer, 5)
        if hasattr(optimizer, "flush"):
            assert all(x is not None for state in optimizer.state.values() for x in state.values())
            optimizer.flush()
        for p in model.parameters():
            assert optimizer.state[p][key].any()
            optimizer.state[p][key].zero_()
        train(model, optimizer, 5, seed=1)

    assert distance(*both(name, script)) < 1e-5


def test_parameter_groups_that_a_script_makes_anew_hold_at_once(alone):
    """The list of the step before had been asked: a momentum was one step late."""

    def script(model, optimizer):
        for step in range(4):
            optimizer.param_groups = [{**group, "momentum": 0.9 - 0.2 * step} for group in optimizer.param_groups]
            train(model, optimizer, 1, seed=step)

    assert distance(*both("sgd", script)) < 1e-5


def test_a_gradient_that_is_refused_can_be_given_up(alone):
    """It had been counted, and was refused for ever."""
    w = torch.nn.Parameter(torch.ones(40, 50))
    optimizer = DistributedOptimizer(torch.optim.SGD([w], 0.1, 0.9), [("w", w)], Compression.dgc(0.1, min_numel=64))
    w.sum().backward()
    optimizer.synchronize()
    with pytest.raises(UnsupportedUse, match="between synchronize"):
        w.sum().backward()
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()
    assert not torch.equal(w, torch.ones(40, 50))


def test_what_waits_survives_a_reset(alone):
    model, optimizer = made(OPTIMIZERS["sgd"], Compression.dgc(0.05, min_numel=64, **UNROUNDED))
    train(model, optimizer, 5)
    before = copy.deepcopy(optimizer.residual_state_dict()["tensors"])
    optimizer.state.clear()
    optimizer.zero_grad()
    (0 * model(torch.ones(1, model[0].in_features))).sum().backward()  # a step sends some of it
    optimizer.step()
    after = optimizer.residual_state_dict()["tensors"]
    compressed = [name for name, parts in before.items() if "u" in parts and parts["u"].any()]
    assert compressed
    for name in compressed:
        left = after[name]["v"] == before[name]["v"]
        assert not after[name]["u"].any() and left.sum() > 0.9 * left.numel() and not after[name]["v"][~left].any()


def test_moments_that_were_emptied_begin_with_their_first_step(alone):
    """Counted as full ones they had let Adam take six times its step."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 27))
    optimizer = DistributedOptimizer(torch.optim.AdamW([p], lr=1e-2), [("w", p)], Compression.local(1000, min_numel=16))
    for _ in range(500):
        p.grad = torch.randn_like(p)
        optimizer.step()
    optimizer.state[p]["exp_avg"][0, 0] = torch.nan
    optimizer.step()
    optimizer.exchange()  # of weights that are not finite: they are those of before the round
    assert p.isfinite().all() and not any(x.any() for x in optimizer.state[p].values())
    for _ in range(10):
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p - before).abs().max() < 1.01e-2 + 1e-3 * before.abs().max()
    optimizer.exchange()


def test_an_optimizer_that_finds_its_own_rate_is_warned_of_under_every_method():
    """With plain error feedback it "may cost quality"; DAdaptAdam at a density of 1% learnt nothing."""

    class DAdaptAdam(torch.optim.RMSprop):
        pass

    class Mine(DAdaptAdam):
        pass

    p = torch.nn.Parameter(torch.zeros(3))
    topk = DGCConfig(momentum_correction=False, factor_masking=False)
    for config in (DGCConfig(), topk):
        (said,) = update_of(Mine([p]), config).notices
        assert said.startswith("Mine finds its learning rate") and "MAY NOT LEARN AT ALL" in said
    assert update_of(torch.optim.RMSprop([p]), topk).notices == []
    (said,) = update_of(torch.optim.RMSprop([p]), DGCConfig()).notices
    assert "RMSprop runs with plain error feedback" in said
