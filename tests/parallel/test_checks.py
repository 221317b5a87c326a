"""The ranks compare their weights, and find out the one that differs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.adapters import Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import ALONE

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(3)]
each_adapter = on_adapters("Horovod", slow=("DDP", "Keras"))
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {}, "AdamW": {}}


def _started(adapter: Any, name: str = "SGD", seed: int = 0, wrap: Any = None, **fields: Any) -> Any:
    compression = Compression.dgc(0.05, min_numel=16, **fields)
    return adapter.start(compression, name, seed, wrap=wrap, **OPTIONS[name])


def _drift(run: Any, by_hand: bool = False) -> None:
    """12 steps; a weight of rank 1 is changed behind the others' backs after six, and what it knows for Adam."""
    for step in range(12):
        if by_hand:
            run.apply(run.gradients(*run.batch()))
        else:
            run.step()
        if step == 5 and run.adapter.rank == 1:
            run.move(2, by=1e-6)
            run.exchange.second.rescale(2.0)


@each_adapter
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_drifting_replica_stops_all_ranks_with_its_name(adapter, by_hand):
    """In a step of Keras' own the error is TensorFlow's, with our text."""
    run = _started(adapter, check_every=4)
    error = error_of(lambda: _drift(run, by_hand))
    assert run.steps == 9, "it is found before the step after the comparison is applied"
    assert error.startswith("ReplicaMismatch: ") or not by_hand
    assert f"after step 8 rank 1 has other weights than the others: '{run.told[2]}'. " in error
    assert "Likely causes: " in error and "max_norm" in error and "not broadcast" in error


@each_adapter
@pytest.mark.parametrize("name", OPTIONS)
def test_or_all_go_on_with_the_first_rank(adapter, name):
    run = _started(adapter, name, check_every=4, on_mismatch="broadcast")
    _drift(run)
    second = run.exchange.second.packed()
    assert run.steps == 12 and (name == "SGD" or second.any())
    same_on_ranks(run.print, second.tobytes().hex())


@each_adapter
def test_sound_replicas_are_not_disturbed(adapter):
    always, never = (_started(adapter, check_every=every) for every in (1, 0))
    for run in (always, never):
        run.train(16)
    assert always.print == never.print
    same_on_ranks(always.print)


@on_adapters("Horovod")
def test_weights_that_nobody_has_broadcast_are_found_at_once(adapter):
    run = _started(adapter, seed=adapter.rank)
    error = error_of(lambda: run.train(5))
    assert error.startswith("ReplicaMismatch: after step 1 rank")
    assert "Likely causes: weights or optimizer state were not broadcast" in error


@on_adapters("Horovod")
def test_weights_that_the_script_has_set_right_are_right(adapter):
    """The script broadcasts after its first step: what differed when the checksums were sent does not any more."""
    run = _started(adapter, seed=adapter.rank)
    run.train(1)
    adapter.ranks.broadcast_parameters(run.model.state_dict(), 0)
    run.train(3)
    same_on_ranks(run.print)


@on_adapters("Horovod")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_rank_gives_its_optimizer_state_too(adapter, name):
    """Rank 0 alone has loaded a checkpoint, and nobody broadcasts: the ranks do not even have the same entries."""
    run = _started(adapter, name, on_mismatch="broadcast")
    if adapter.rank == 0:
        other = adapter.start(ALONE, name, seed=1, **OPTIONS[name])
        other.train(1)
        run.model.load_state_dict(other.model.state_dict())
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    run.train(6)
    same_on_ranks(run.print, run.inner)


@on_adapters("Horovod")
def test_an_elastic_script_runs_with_a_fixed_number_of_ranks(adapter):
    """A script for Horovod Elastic, started without it, as Horovod allows."""
    run = _started(adapter)

    @adapter.ranks.elastic.run
    def work(state: Any) -> None:
        for _ in range(3):
            run.train(2)
            state.commit()
            state.batch += 2

    state = run.state()
    work(state)
    at_commit = run.print
    run.train(2)
    state.restore()
    assert run.print == at_commit
    assert state.batch == 4, "what was committed before the last increment"
    same_on_ranks(at_commit)
