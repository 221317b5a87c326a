"""A checkpoint of a job that is another one now, or of a model that changes what it loads: loaded, or refused.

On every rank, before anything is changed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import Compression, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import adamw, sgd, step
from tests.helpers.run import COMPRESSIONS, HALF, SMALL
from tests.helpers.training import batches, fingerprint, first_loss, made, momentum_sgd, smooth_model, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
_DGC = Compression.dgc(**SMALL)


def _trained(frozen: bool, steps: int) -> tuple[Any, Any]:
    model = smooth_model()
    model[0].requires_grad_(not frozen)
    _, optimizer = made(COMPRESSIONS["gaussian, momentum correction"], inner=model)
    train(model, optimizer, steps)
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

    def bits() -> tuple[str, str]:
        return fingerprint(other), str(
            {n: {k: x.tobytes() for k, x in a.items()} for n, a in kept_by(second).tensors.items()}
        )

    before = bits()
    save_checkpoint(tmp_path, model, optimizer)
    error = error_of(lambda: load_checkpoint(tmp_path, other, second))
    assert error.startswith("CheckpointError: ")
    for words in (text, "a layer was frozen or thawed", "call flush() before saving"):
        assert words in error
    assert bits() == before
    optimizer.flush()
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, other, second)
    assert fingerprint(other) == fingerprint(model)
    same_on_ranks(error)
    train(other, second, 2)


def test_residuals_of_the_same_method_with_another_rule_are_taken():
    model, optimizer = made(_DGC)
    train(model, optimizer, 4)
    made(Compression.dgc(**SMALL, rule="sampled"))[1].load_residual_state_dict(optimizer.residual_state_dict())


def test_where_nothing_is_compressed_residuals_are_not_dropped_without_a_word(tmp_path):
    model, optimizer = made(COMPRESSIONS["clipped"], adamw)
    train(model, optimizer, HALF)
    other, dense = made(Compression.none, adamw)
    before = fingerprint(other)
    save_checkpoint(tmp_path, model, optimizer)
    error = error_of(lambda: load_checkpoint(tmp_path, other, dense))
    assert error.startswith("CheckpointError: ") and "nothing is compressed now: flush() before saving" in error
    assert fingerprint(other) == before
    for residuals in ("ignored", "if sound"):
        load_checkpoint(tmp_path, other, dense, residuals=residuals)
    optimizer.flush()
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, other, dense)
    assert fingerprint(other) == fingerprint(model)
    same_on_ranks(error)


def test_stock_checkpoints_go_both_ways(tmp_path):
    """A stock checkpoint in a compressed run; a compressed one without compression."""
    topk, model = COMPRESSIONS["topk"], smooth_model()
    plain = momentum_sgd(model)
    for x, y in 3 * list(batches(1, 0)):
        step(model, plain, x, y)
    other, optimizer = made(topk)
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train(other, optimizer, 3)
    optimizer.flush()  # else residuals would be lost
    save_checkpoint(tmp_path, other, optimizer, epoch=1)
    third, dense = made(Compression.none)
    assert load_checkpoint(tmp_path, third, dense) == {"epoch": 1} and fingerprint(third) == fingerprint(other)
    train(third, dense, 3)
    save_checkpoint(tmp_path, third, dense)
    fourth, again = made(topk)
    load_checkpoint(tmp_path, fourth, again)
    assert fingerprint(fourth) == fingerprint(third)


def test_what_coding_has_left_of_small_tensors_goes_with_the_first_dense_step(tmp_path):
    """Residuals of tensors that went in 8 bits, in a run where they go by allreduce."""
    plain = partial(sgd, lr=0.1, momentum=0.0)
    model, optimizer = made(Compression.dgc(**SMALL, dense_values="8bit"), plain)
    biases = [name for name, p in model.named_parameters() if p.ndim == 1]
    train(model, optimizer, HALF)
    states = hvd.allgather_object(kept_by(optimizer))
    owed = {name: sum(state.tensors[name]["v"].astype(float) for state in states) / hvd.size() for name in biases}
    save_checkpoint(tmp_path, model, optimizer)
    model, optimizer = made(Compression.dgc(**SMALL, dense_values="fp32"), plain)
    load_checkpoint(tmp_path, model, optimizer)
    coded = set(biases) - set(kept_by(optimizer).tensors)  # a bias of one element is coded without error
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (0 * model(torch.zeros(1, 32)).sum()).backward()
    optimizer.step()
    moved = {n: (before[n] - p.detach()).numpy().astype(float) for n, p in model.named_parameters()}
    scale = max(float(abs(v).max()) for v in owed.values())
    assert len(coded) < len(owed) and scale > 0
    for name, v in owed.items():
        assert abs(moved[name] - 0.1 * v).max() < 1e-3 * 0.1 * scale  # of differences of fp32 weights


def test_between_backward_and_step_nothing_is_saved(tmp_path):
    model, optimizer = made(_DGC)
    train(model, optimizer, 2)
    first_loss(model).backward()
    in_flight = error_of(lambda: save_checkpoint(tmp_path, model, optimizer))
    optimizer.synchronize()
    not_applied = error_of(optimizer.residual_state_dict)
    optimizer.step()
    assert in_flight.startswith("CheckpointError: ") and not_applied.startswith("UnsupportedUse: ")
    assert "after step()" in in_flight and "after step()" in not_applied


class Particular(torch.nn.Module):
    """A model that changes what it is given to load, and looks at what it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(64, 64), 0
        self.register_buffer("norm", torch.zeros(()))
        self._register_state_dict_hook(self._write)
        self._register_load_state_dict_pre_hook(self._prepare)
        self.register_load_state_dict_post_hook(self._look)

    @staticmethod
    def _write(module: Any, found: dict[str, Any], prefix: str, _: Any) -> None:
        found["norm"], found["layer.weight"] = module.layer.weight.norm(), 2 * found["layer.weight"]

    def _prepare(self, found: dict[str, Any], *_: Any) -> None:
        found["layer.weight"].div_(2)

    def _look(self, *_: Any) -> None:
        if not torch.allclose(self.norm, self.layer.weight.norm()):
            raise RuntimeError("other weights than were saved")

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": [self.seen]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].pop()

    def load_state_dict(self, found: Any, *arguments: Any, **more: Any) -> Any:
        found["layer.bias"] = found.pop("bias of before", found.get("layer.bias"))
        return super().load_state_dict(found, *arguments, **more)


def _particular() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return made(Compression.dgc(0.1), inner=Particular())


def test_a_model_is_loaded_by_its_own_hooks_once_or_is_what_it_was(tmp_path):
    """By its own methods too; and not at all, where one rank's refuses."""
    model, optimizer = _particular()
    for seen in range(1, 4):
        model.layer(torch.ones(2, 64) * seen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen = seen
    other, second = _particular()
    save_checkpoint(tmp_path, model, optimizer)

    def refuse(*_: Any) -> None:
        if hvd.rank() == 1:
            raise RuntimeError("not mine")

    refusing = other.register_load_state_dict_post_hook(refuse)
    before = fingerprint(other)
    error = error_of(lambda: load_checkpoint(tmp_path, other, second))
    assert "rank 1" in error and "not mine" in error and fingerprint(other) == before
    refusing.remove()
    load_checkpoint(tmp_path, other, second)
    assert fingerprint(other) == fingerprint(model) and other.seen == 3
