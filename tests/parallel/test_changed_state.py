"""A checkpoint of a job that is another one now is refused, on every rank, before anything is changed."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"changed_state.{case}" for case in ("frozen", "methods", "uncompressed")])


@pytest.mark.parametrize(
    ("name", "text"), [("frozen", "which is not trained now"), ("thawed", "there are no residuals")]
)
def test_other_layers_are_refused_and_change_nothing_but_behind_a_flush(ranks, name, text):
    found = [rank["changed_state.frozen"][name] for rank in ranks]
    assert found[0] == found[1] and found[0]["same"] == [True, True] and found[0]["flushed"]
    for words in (text, "a layer was frozen or thawed", "call flush() before saving"):
        assert words in found[0]["refused"], found[0]["refused"]


def test_residuals_of_another_method_are_refused(ranks):
    for found in (rank["changed_state.methods"] for rank in ranks):
        assert found.pop("dgc, dgc") == ""
        for name, error in found.items():
            assert error.startswith("CheckpointError: the residuals hold "), (name, error)
            assert ("flush()" in error) == ("local" not in name), (name, error)


def test_where_nothing_is_compressed_residuals_are_not_dropped_without_a_word(ranks):
    found = [rank["changed_state.uncompressed"] for rank in ranks]
    assert found[0] == found[1] and found[0]["same"] and found[0]["flushed"]
    assert "nothing is compressed now: flush() before saving" in found[0]["required"]
