"""Local steps under Horovod's elastic state: what a commit keeps, what a meeting loses; within a round too."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.helpers.adapters import Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_adapter = on_adapters("Horovod", slow=("Keras",))
H = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 2e-3},
    "SGD": {"lr": 0.02, "momentum": 0.9},
    "RMSprop": {"lr": 1e-3},
}


def in_an_elastic_job(test: Callable[..., None]) -> Callable[..., None]:
    """A newcomer makes its optimizer while the others wait: nothing is compared then."""

    @functools.wraps(test)
    def elastic(**arguments: Any) -> None:
        with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"):
            test(**arguments)

    return elastic


def _started(adapter: Any, name: str, **state: Any) -> tuple[Any, Any]:
    """A run with local steps, and its state."""
    compression = Compression.local(H, density=0.1, min_numel=16, outer_momentum=0.5, outer_rate=0.7, check_every=1)
    run = adapter.start(compression, name, **OPTIONS[name])
    return run, run.state(**state)


def _everything(run: Any) -> list[Any]:
    """Sums of weights, of the inner optimizer, and of what the rank has kept; after an exchange."""
    kept = [float(x.sum(dtype=np.float64)) for parts in run.kept().values() for _, x in sorted(parts.items())]
    return [run.print, run.inner, kept, [float(x.sum()) for x in run.outer], run.counted]


@each_adapter
@pytest.mark.parametrize("begun", [2, 0])
@pytest.mark.parametrize("name", OPTIONS)
@in_an_elastic_job
def test_a_commit_is_gone_back_to_bit_for_bit(adapter, name, begun):
    """Commit, train, go back, train the same again: from within a round, and right after an exchange."""
    run, state = _started(adapter, name)
    state.sync()
    run.train(2 * H + begun)
    state.commit()
    at_commit, steps, runs = run.print, run.steps, []
    for _ in range(3):  # what the second goes on with is not to be what the commit is remembered by
        run.steps = steps
        run.train(3 * H - begun)
        runs.append(_everything(run))
        state.restore()
    assert runs[0] == runs[1] == runs[2] and run.print == at_commit


@each_adapter
@in_an_elastic_job
def test_an_exchange_that_is_broken_off_does_not_touch_the_weights_of_the_commit(adapter):
    """Its end had put the weights of the last exchange over those of the commit; and the next exchange is sound."""
    from horovod.common.exceptions import HorovodInternalError

    run, state = _started(adapter, "AdamW")
    state.sync()
    run.train(H + 2)
    state.commit()
    before = run.print
    with run.failing(HorovodInternalError("a worker has left")):
        assert "a worker has left" in error_of(lambda: run.train(2))
    state.restore()
    assert run.print == before and run.of_round == 2
    run.train(H - 2)
    assert run.apart == 0 and run.of_round == 0


@each_adapter
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@in_an_elastic_job
def test_ranks_that_meet_within_a_round_go_on_from_rank_0_and_keep_what_is_their_own(adapter, name):
    run, state = _started(adapter, name)
    state.sync()
    run.train(3 * H + 2)
    assert run.apart > 0
    first, own = adapter.of_all_ranks(run.weights)[0], [run.inner, run.residual]
    state.sync()
    assert run.apart == 0 and np.array_equal(run.weights, first) and run.of_round == 0
    assert [run.inner, run.residual] == own and len(set(adapter.of_all_ranks(repr(own)))) == 2
    assert any(x.any() for x in run.outer), "the broadcast of the model's weights had dropped the outer momentum"
    if adapter.name == "Horovod":
        parts = {part for parts in run.copied.values() for part in parts}
        assert parts == {"v"}, "an inner momentum had been scaled by M/N when N ranks became M"
    run.train(H + run.left_of_round(H))
    assert run.apart == 0


@each_adapter
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@in_an_elastic_job
def test_a_newcomer_takes_over_the_inner_optimizer_of_rank_0(adapter, name):
    """Adam's moments of zero had been put over them: its first steps were as large as at the start of a training."""
    run, state = _started(adapter, name)
    if adapter.rank == 0:
        run.train(H - 2)  # which needs nobody
        run.push_outer(1.0)
    own = run.inner
    state.sync()
    assert (run.inner == own) == (adapter.rank == 0)
    same_on_ranks(run.inner, [float(x.sum()) for x in run.outer])
    assert run.outer and all((x == 1).all() for x in run.outer)
    run.train(run.left_of_round(H))
    assert run.apart == 0


@each_adapter
@in_an_elastic_job
def test_a_round_goes_on_where_the_exchange_is_made_anew_within_it(adapter):
    """Rounds had gone on with the exchange of before: counters stood still, and records lacked `e`."""
    ends = []
    for anew in (False, True):
        run, state = _started(adapter, "SGD")
        state.sync()
        run.train(2 * H + 2)
        if anew:
            run.renew(state)
        run.train(2 * H - 2)
        ends.append(_everything(run))
    assert ends[0] == ends[1]


@each_adapter
@in_an_elastic_job
def test_a_commit_that_flushes_ends_the_round(adapter):
    """Also where no exchange was made since the last one; where no step was made it does nothing."""
    run, state = _started(adapter, "AdamW", flush_on_commit=True)
    state.sync()
    run.train(H + 2)
    state.commit()
    assert not any(run.residual) and run.apart == 0
    before = run.print
    state.commit()
    assert run.print == before
    run.train(2)
    state.commit()
    assert run.apart == 0
