"""Keras' own clipping under compression: right from the start, said once, never of what comes back from the ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ("limits", "accumulated", "around", "taped", "tape_refusals")


@pytest.fixture(scope="module")
def ranks():
    found = run_ranks(2, [f"keras_clipping.{case}" for case in CASES])
    return [{name.split(".")[1]: result for name, result in each.items()} for each in found]


def test_the_optimizers_own_clipping_is_local(ranks):
    found = ranks[0]["limits"]
    assert found == ranks[1]["limits"] | {"and says so": True}, "one rank says it"
    assert [name for name, same in found.items() if not same] == [] and len(found) == 12


def test_accumulated_gradients_are_clipped_once(ranks):
    assert all(rank["accumulated"] == {"Keras": True, "Horovod": True} for rank in ranks)


def test_what_is_said_changed_saved_and_refused(ranks):
    first, second = (dict(rank["around"]) for rank in ranks)
    (said,) = first.pop("said")
    assert "clipnorm=0.5 of the optimizer clips each rank's own gradient" in said and "sqrt(N) times 0.5" in said
    assert second.pop("said") == [] and first == second
    assert first["changed"] == [0.5, 1.0] and first["from_config"] == 3.0
    assert "wrap that one again" in first["fixed"] and "UnsupportedUse" in first["fixed"]
    assert first["stock file"] == first["loaded"] == 0.5
    assert "clips in a way of its own" in first["own"]
    assert "optimizer: rank 0 has SGD clipnorm 1.0, rank 1 has SGD clipnorm 2.0" in first["differing"]


def test_what_a_tape_has_returned_is_clipped_by_clip_norm_alone(ranks):
    """A limit that was right for gradients had cut updates: a net on the digits stayed at 84% for 98%."""
    first, second = (dict(rank["taped"]) for rank in ranks)
    assert first == second, "the norm that is returned is the same on every rank"
    returned, own = first.pop("norms")
    assert returned == pytest.approx(own, rel=1e-5) and first.pop("unclipped") > 0.1
    refused = [first.pop(name) for name in list(first) if name.endswith(": refused")]
    assert len(refused) == 6 and all("UnsupportedUse" in text and "pass clip_norm=" in text for text in refused)
    assert len(first) == 6 and all(first.values()), first


def test_what_would_clip_an_update_names_clip_norm(ranks):
    for rank, found in enumerate(dict(rank["tape_refusals"]) for rank in ranks):
        assert found.pop("of no tape") == [[0.5] * 4, None, []]
        assert "exchange and compress them a second time" in found.pop("exchanged twice")
        assert found.pop("changed") == "" and found.pop("changed, clipped: said") == []
        assert len(found.pop("changed: said")) == (rank == 0), "one rank says it"
        assert "gradients of a compressed tape are given to a LossScaleOptimizer" in found.pop("scaled")
        assert len(found) == 6
        for name, text in found.items():
            assert "UnsupportedUse" in text and "clip_norm=" in text, name
