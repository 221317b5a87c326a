"""A checkpoint of a job that is another one now is refused, on every rank, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest

from dgc_horovod.errors import CheckpointError
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.interrupted import adamw, kept_as_text, made, train_between
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import COMPRESSIONS, HALF, SMALL
from tests.helpers.training import fingerprint, momentum_sgd, smooth_model

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def _trained(frozen: bool, steps: int) -> tuple[Any, Any]:
    model = smooth_model()
    for p in model[0].parameters():
        p.requires_grad_(not frozen)
    compression = COMPRESSIONS["gaussian, momentum correction"]
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
    train_between(model, optimizer, 0, steps)
    return model, optimizer


@pytest.mark.parametrize(
    ("frozen", "text"),
    [
        pytest.param(True, "which is not trained now", id="frozen"),
        pytest.param(False, "there are no residuals", id="thawed"),
    ],
)
def test_other_layers_are_refused_and_change_nothing_but_behind_a_flush(frozen, text, tmp_path):
    """A layer is frozen, or thawed, between two jobs."""
    model, optimizer = _trained(not frozen, HALF)
    other, second = _trained(frozen, 3)
    before = fingerprint(other), kept_as_text(second)
    save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(tmp_path, other, second)
    for words in (text, "a layer was frozen or thawed", "call flush() before saving"):
        assert words in str(refused.value)
    assert (fingerprint(other), kept_as_text(second)) == before
    optimizer.flush()
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, other, second)
    assert fingerprint(other) == fingerprint(model)
    same_on_ranks(str(refused.value))
    train_between(other, second, 0, 2)


_DGC = Compression.dgc(**SMALL)


@pytest.mark.parametrize(
    ("before", "now", "make", "words"),
    [
        (COMPRESSIONS["topk"], Compression.local(steps=4, min_numel=16), momentum_sgd, None),
        (COMPRESSIONS["dgc, warm-up"], COMPRESSIONS["topk"], momentum_sgd, "flush()"),
        (_DGC, _DGC, adamw, "flush()"),
    ],
    ids=["topk, local", "dgc, topk", "SGD, AdamW"],
)
def test_residuals_of_another_method_are_refused(before, now, make, words):
    model, optimizer = made(before)
    train_between(model, optimizer, 0, 4)
    with pytest.raises(CheckpointError, match=r"^the residuals hold ") as refused:
        made(now, make)[1].load_residual_state_dict(optimizer.residual_state_dict())
    assert ("flush()" in str(refused.value)) == (words is not None)


def test_residuals_of_the_same_method_with_another_rule_are_taken():
    model, optimizer = made(_DGC)
    train_between(model, optimizer, 0, 4)
    made(Compression.dgc(**SMALL, rule="sampled"))[1].load_residual_state_dict(optimizer.residual_state_dict())


def test_where_nothing_is_compressed_residuals_are_not_dropped_without_a_word(tmp_path):
    model, optimizer = made(COMPRESSIONS["clipped"], adamw)
    train_between(model, optimizer, 0, HALF)
    other, dense = made(Compression.none, adamw)
    before = fingerprint(other)
    save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError) as required:
        load_checkpoint(tmp_path, other, dense)
    assert "nothing is compressed now: flush() before saving" in str(required.value)
    assert fingerprint(other) == before
    for residuals in ("ignored", "if sound"):
        load_checkpoint(tmp_path, other, dense, residuals=residuals)
    optimizer.flush()
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, other, dense)
    assert fingerprint(other) == fingerprint(model)
    same_on_ranks(str(required.value))
