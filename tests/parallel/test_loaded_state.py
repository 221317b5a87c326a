"""What holds when an optimizer goes back to its beginning, or stays with stock Horovod."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ("adam_from_its_beginning", "auto_from_its_beginning", "limit_without_compression")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"loaded_state.{case}" for case in CASES])


def test_adam_begins_with_nothing_once_more(ranks):
    one, other = (rank["loaded_state.adam_from_its_beginning"] for rank in ranks)
    assert one["is"] == other["is"] and not one["known"] and one["learns"]


def test_auto_begins_with_dense_steps_once_more(ranks):
    one, other = (rank["loaded_state.auto_from_its_beginning"] for rank in ranks)
    assert one == other and one["compressed"]


def test_a_limit_holds_where_nothing_is_compressed(ranks):
    for found in (rank["loaded_state.limit_without_compression"] for rank in ranks):
        assert not found["compresses"] and found["distance"] < 1e-6 < 1e-4 < found["unclipped"]
