"""What is not finite on one rank reaches nothing, and costs that step alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import Dividing
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(3)]
STEPS, MOMENTUM = 24, 0.9
BAD = {"one NaN": np.nan, "one Inf": np.inf, "all overflowed": -np.inf}


def _gradients(model: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters())))


def _spoiled(gradient: torch.Tensor, kind: str, draw: np.random.Generator) -> torch.Tensor:
    bad = gradient.clone()
    if kind.startswith("one"):
        bad.view(-1)[int(draw.integers(bad.numel()))] = BAD[kind]
    else:
        bad[:] = BAD[kind]
    return bad


class _Run:
    """A model that is trained with gradients that the test has in its hands."""

    def __init__(self, **fields: Any) -> None:
        self.model = smooth_model()
        compression = Compression.dgc(0.02, min_numel=16, bucket_bytes=12_000, **fields)
        self.optimizer = DistributedOptimizer(momentum_sgd(self.model), self.model.named_parameters(), compression)

    def step(self, gradients: list[torch.Tensor]) -> None:
        """A step with these gradients, through the hooks."""
        self.optimizer.zero_grad()
        sum((p * g).sum() for p, g in zip(self.model.parameters(), gradients, strict=True)).backward()
        self.optimizer.step()

    def skip(self, gradients: list[torch.Tensor]) -> None:
        """A step that sends and applies nothing; u and v take the gradients in, by NumPy."""
        record = self.optimizer.residual_state_dict()
        for (name, _), gradient in zip(self.model.named_parameters(), gradients, strict=True):
            parts, g = record["tensors"][name], gradient.reshape(-1).numpy()
            if "u" in parts:
                parts["u"] = torch.from_numpy(np.float32(MOMENTUM) * parts["u"].numpy() + g)
                g = parts["u"].numpy()
            parts["v"] = torch.from_numpy(parts["v"].numpy() + g)
        record["step"] += 1
        self.optimizer.load_residual_state_dict(record)

    def bits(self) -> list[str]:
        """Of weights, u and v."""
        tensors = kept_by(self.optimizer).tensors
        kept = b"".join(x.tobytes() for name in sorted(tensors) for _, x in sorted(tensors[name].items()))
        return [fingerprint(self.model), hashlib.sha256(kept).hexdigest()]


@pytest.mark.parametrize("kind", BAD)
def test_after_a_gradient_that_is_not_finite_the_run_is_that_of_the_reference(kind):
    """One rank's gradient is spoiled at one step."""
    number = list(BAD).index(kind)
    common, own = np.random.default_rng(number), np.random.default_rng(100 * number + hvd.rank())
    at, rank = int(common.integers(3, STEPS - 6)), int(common.integers(hvd.size()))
    spoiled, reference = _Run(), _Run()
    tensor = int(common.integers(len(list(spoiled.model.parameters()))))
    for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
        gradients = _gradients(reference.model, x, y)
        if step != at:
            reference.step(gradients)
            spoiled.step(gradients)
        else:
            bad = list(gradients)
            if hvd.rank() == rank:
                bad[tensor] = _spoiled(gradients[tensor], kind, own)
                gradients[tensor] = torch.nan_to_num(bad[tensor], 0, 0, 0)
            before = fingerprint(spoiled.model)
            reference.skip(gradients)
            spoiled.step(bad)
            assert fingerprint(spoiled.model) == before
        assert step < at or spoiled.bits() == reference.bits(), f"weights, u or v differ after step {step}"
    tensors = kept_by(spoiled.optimizer).tensors
    assert all(np.isfinite(x).all() for arrays in tensors.values() for x in arrays.values())
    same_on_ranks(fingerprint(spoiled.model))


@pytest.mark.parametrize(
    ("stock", "compression", "told"),
    [
        pytest.param(
            Dividing,
            Compression.dgc(0.05, min_numel=16),
            "^NotFinite: step 0: Dividing has made the weights of '0.weight' that are not",
            id="made by an optimizer",
        ),
        pytest.param(
            torch.optim.SGD,
            Compression.dgc(0.05, min_numel=16, on_nonfinite="stop"),
            "^NotFinite: step 0: the weights of '2.weight' are not finite, and so gradients",
            id="made by a script",
        ),
        pytest.param(
            torch.optim.SGD,
            Compression.local(2),
            "the weights of '2.weight' are not finite on rank {rank}, and so gradients",
            id="local steps",
        ),
    ],
)
def test_weights_that_are_not_finite_are_named(stock, compression, told):
    """Gradients were blamed, and every step was skipped to the end."""
    model = smooth_model()
    optimizer = DistributedOptimizer(stock(model.parameters(), lr=0.05), model.named_parameters(), compression)
    if stock is not Dividing:
        model[2].weight.data[3, 4] = torch.nan
    with messages() as said:
        error = error_of(lambda: train(model, optimizer, 1))
    found = error + "; ".join(text for text in said if "weights" in text)
    assert re.search(told.format(rank=hvd.rank()), found), found


def _until_error(run: _Run, is_bad: Callable[[int], bool]) -> tuple[int, str]:
    """Train with a gradient that has a NaN on rank 1 at bad steps; the step that raises an error, and its text."""
    for step, (x, y) in enumerate(batches(STEPS, hvd.rank())):
        gradients = _gradients(run.model, x, y)
        if is_bad(step) and hvd.rank() == 1:
            gradients[2][3, 4] = np.nan
        if error := error_of(partial(run.step, gradients)):
            return step, error
    return STEPS, ""


def test_a_job_that_is_to_stop_stops_on_every_rank_with_the_culprit():
    step, error = _until_error(_Run(on_nonfinite="stop"), lambda step: step == 7)
    assert step == 7
    assert error.startswith("NotFinite: step 7: a gradient was not finite on rank 1, among '2.weight'; ")
    same_on_ranks(error)


def test_many_skipped_steps_are_told_again_and_end_in_an_error_on_every_rank():
    """80 of 90 steps were skipped, with one line at the first of them."""
    run = _Run(max_skipped=12)
    with messages() as texts:
        step, error = _until_error(run, lambda step: step >= 3 and step != 5)
    assert step == 17 and run.optimizer.compression_stats()["skipped"] == 14
    assert error.startswith("NotFinite: step 17: a gradient was not finite on rank 1, among '2.weight'; ")
    assert "12 in a row were skipped" in error and "--dgc-max-skipped" in error
    same_on_ranks(error)
    said = [text for text in texts if "not finite" in text]
    if hvd.rank() != 0:
        assert not said, "rank 0 tells for all"
        return
    first, tenth = said
    assert first.endswith("every rank skips the step") and "skipped" not in first
    assert "step 13: " in tenth and tenth.endswith("; skipped 10 of the last 11 steps")


def test_under_a_grad_scaler_nothing_stops_and_what_is_unusual_is_told():
    scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0**20), smooth_model()
    compression = Compression.dgc(0.02, min_numel=16, max_skipped=12)
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression, grad_scaler=scaler)
    with messages() as texts:
        for x, y in batches(STEPS, hvd.rank()):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y) * (np.nan if hvd.rank() == 1 else 1)).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
    assert optimizer.compression_stats()["skipped"] == STEPS and scaler.get_scale() == 2.0 ** (20 - STEPS)
    assert sum("not finite" in text for text in texts) == 2 * (hvd.rank() == 0)
