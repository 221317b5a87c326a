"""The gradient tape of TensorFlow on real ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ("gradients", "in_graphs", "first_step", "sparse_and_local", "half_overflow", "embedding")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_tape.{case}" for case in CASES], fresh=True)


def test_gradients_are_the_average(ranks):
    found = dict(ranks[0]["keras_tape.gradients"])
    assert found.pop("is a tape")
    assert found.pop("topk, density 0.05") > 1e-3, "a compressed gradient equals the dense one"
    assert {name: value for name, value in found.items() if not value < 1e-6} == {}


def test_what_a_tape_does_not_send_comes_later(ranks):
    found = ranks[0]["keras_tape.in_graphs"]
    assert found["one step"] > 0.05 * found["largest"]
    assert found["on average"] < 0.4 * found["largest"]
    assert found["sum"] == ranks[1]["keras_tape.in_graphs"]["sum"]


def test_two_broadcasts_in_the_first_step(ranks):
    """Their tensors had the same names, and a rank that traced once more than the others waited for them."""
    first, second = (found["keras_tape.first_step"] for found in ranks)
    assert first == second and len(first) == 4


def test_sparse_and_local_sources(ranks):
    for rank, found in enumerate(found["keras_tape.sparse_and_local"] for found in ranks):
        assert found["sparse"] and found["rows"] == [0, 1, 5], "rows that repeat are added up"
        expected = [[3.0, 3.0], [6.0, 6.0], *[[0.0, 0.0]] * 3, [4.5, 4.5]]
        assert found["as dense"] == [expected] * 3 and found["kinds"] == [False, False]
        assert found["local"] == [found["own"]] * 2 and found["own"] == 18 * (rank + 1)
        assert found["nan everywhere"]
        assert len(found["nan told"]) == (rank == 0)
        assert all("a tape applies nothing: it returns NaN, on every rank" in text for text in found["nan told"])


def test_half_precision_overflow_is_skipped(ranks):
    """Infinite updates were handed out."""
    first, second = (found["keras_tape.half_overflow"] for found in ranks)
    assert first["applied"] == second["applied"]
    assert not all(first["applied"][:30]) and all(first["applied"][-10:])
    assert len(first["said"]) == 1 and "an update was too large" in first["said"][0] and not second["said"]


def test_embeddings_and_what_is_refused(ranks):
    first, second = (found["keras_tape.embedding"] for found in ranks)
    assert first == second
    errors = first.pop("errors")
    assert len(set(first.values())) == 4
    assert "must be a tf.GradientTape" in errors["no tape"]
    assert "op must be hvd.Average or hvd.Sum" in errors["adasum"]
    assert "TensorFlow 1 and of Keras 2" in errors["tf1"] and "UnsupportedUse" in errors["tf1"]
    assert "from dgc_horovod.tensorflow import DistributedOptimizer" in errors["stock function"]
