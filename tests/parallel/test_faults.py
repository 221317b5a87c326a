"""What is not finite on one rank reaches nothing, and costs that step alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(3)]
each_adapter = on_adapters("Horovod", slow=("DDP", "Keras"))
STEPS, MOMENTUM = 24, 0.9
BAD = {"one NaN": (np.nan, 4), "one Inf": (np.inf, 6), "all overflowed": (-np.inf, 0), "a bias": (np.nan, 1)}


def _started(adapter: Any, **fields: Any) -> Any:
    compression = Compression.dgc(0.02, min_numel=16, bucket_bytes=12_000, **fields)
    return adapter.start(compression, lr=0.1, momentum=MOMENTUM)


def _skip(run: Any, gradients: list[np.ndarray]) -> None:
    """A step that sends and applies nothing; u and v take the gradients in, by NumPy."""
    record = run.optimizer.residual_state_dict()
    for name, gradient in zip(run.names, gradients, strict=True):
        parts, g = record["tensors"][name], gradient.ravel()
        if "u" in parts:
            u = np.asarray(parts["u"])
            u[:] = g = np.float32(MOMENTUM) * u + g
        v = np.asarray(parts["v"])
        v += g
    record["step"] += 1
    run.optimizer.load_residual_state_dict(record)


@each_adapter
@pytest.mark.parametrize("kind", BAD)
def test_after_a_gradient_that_is_not_finite_the_run_is_that_of_the_reference(adapter, kind):
    """One rank's gradient is spoiled at one step; a bias travels in 8 bits."""
    number, (element, tensor) = list(BAD).index(kind), BAD[kind]
    common, own = np.random.default_rng(number), np.random.default_rng(100 * number + adapter.rank)
    spoiled, reference = _started(adapter), _started(adapter)
    at, rank = (int(common.integers(*limits)) for limits in ((3, STEPS - 6), (0, 3)))
    for step in range(STEPS):
        gradients = reference.gradients(*reference.batch())
        bad = list(gradients)
        if step == at and adapter.rank == rank:
            bad[tensor] = gradients[tensor].copy()
            bad[tensor].flat[own.integers(bad[tensor].size) if kind.startswith("one") else slice(None)] = element
            gradients[tensor] = np.nan_to_num(bad[tensor], nan=0, posinf=0, neginf=0)
        before = spoiled.print
        (_skip(reference, gradients) if step == at else reference.apply(gradients))
        spoiled.apply(bad)
        assert (spoiled.print == before) == (step == at)
        if step >= at:
            bits = [[run.print, run.kept_bits] for run in (spoiled, reference)]
            assert bits[0] == bits[1], f"weights, u or v differ after step {step}"
    assert all(np.isfinite(x).all() for arrays in spoiled.kept().values() for x in arrays.values())
    same_on_ranks(spoiled.print)


FEW: dict[str, Any] = {"density": 0.05, "min_numel": 16}
SPOILT: dict[str, tuple[str, Any, str]] = {  # optimizer, compression, what is said
    "made by an optimizer": (
        "Dividing", Compression.dgc(**FEW), "^NotFinite: step 0: Dividing has made the weights of '{0}' that are not"),
    "made by a script": (
        "SGD", Compression.dgc(**FEW), "step 0: the weights of '{2}' are not finite, and so gradients are not"),
    "made by a script, stop": (
        "SGD", Compression.dgc(**FEW, on_nonfinite="stop"),
        "^NotFinite: step 0: the weights of '{2}' are not finite, and so gradients are not"),
    "local steps": (
        "SGD", Compression.local(2), "the weights of '{2}' are not finite on rank {rank}, and so gradients"),
}  # fmt: skip


@each_adapter
@pytest.mark.parametrize("case", SPOILT)
def test_weights_that_are_not_finite_are_named(adapter, case):
    """Gradients were blamed, and every step was skipped to the end."""
    name, compression, said = SPOILT[case]
    run = adapter.start(compression, name)
    if name == "SGD":
        run.move(2, by=np.nan)
    with messages() as texts:
        error = error_of(lambda: [run.apply(run.gradients(*run.batch())) for _ in range(3)])
    found = error + "; ".join(text for text in texts if "weights" in text)
    if case != "made by a script" or adapter.rank == 0:
        assert re.search(said.format(*map(re.escape, run.told), rank=adapter.rank), found), found
    assert "finite on the weights" not in found
    same_on_ranks(error)


@each_adapter
def test_a_job_that_is_to_stop_stops_on_every_rank_with_the_culprit(adapter):
    run = _started(adapter, on_nonfinite="stop")
    for step in range(8):
        gradients = run.gradients(*run.batch())
        if step == 7 and adapter.rank == 1:
            gradients[2][3, 4] = np.nan
        error = error_of(lambda gradients=gradients: run.apply(gradients))
        assert step == 7 or not error
    among = f"2 {run.told[2]}" if adapter.kind == "keras" else run.told[2]
    assert error.startswith(f"NotFinite: step 7: a gradient was not finite on rank 1, among '{among}'; ")
    same_on_ranks(error)


@each_adapter
def test_many_skipped_steps_are_told_again_and_end_in_an_error_on_every_rank(adapter):
    """80 of 90 steps were skipped, with one line at the first of them."""
    run = _started(adapter, max_skipped=12)
    if adapter.rank == 1:
        run.spoilt = {3, 4, *range(6, STEPS)}
    with messages() as texts:
        error = error_of(lambda: run.train(STEPS))
    stats = run.optimizer.compression_stats()
    assert run.steps == stats["steps"] == 18 and stats["skipped"] == 14
    told = "step 17: a gradient was not finite on rank 1, among the 8 tensors from '"
    assert error.startswith(f"NotFinite: {told}") or (adapter.kind == "keras" and told in error), error
    assert "12 in a row were skipped" in error and "--dgc-max-skipped" in error
    if adapter.kind != "keras":
        same_on_ranks(error)
    said = [text for text in texts if "not finite" in text]
    if adapter.rank != 0:
        assert not said, "rank 0 tells for all"
        return
    first, tenth = said
    assert first.endswith("every rank skips the step") and "skipped" not in first
    assert "step 13: " in tenth and tenth.endswith("; skipped 10 of the last 11 steps")


@on_adapters("Horovod")
def test_under_a_grad_scaler_nothing_stops_and_what_is_unusual_is_told(adapter):
    import torch

    from tests.helpers.regression import step

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    model, optimizer = adapter.made(Compression.dgc(0.02, min_numel=16, max_skipped=12), grad_scaler=scaler)
    with messages() as texts:
        for x, y in adapter.batches(STEPS):
            step(model, optimizer, x * (np.nan if adapter.rank == 1 else 1), y, scaler, between=lambda: None)
    assert optimizer.compression_stats()["skipped"] == STEPS and scaler.get_scale() == 2.0 ** (20 - STEPS)
    assert sum("not finite" in text for text in texts) == 2 * (adapter.rank == 0)
