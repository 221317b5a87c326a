"""Stock Horovod 0.28.1 is silently wrong under Keras 3: should one of these fail, the README's claim is outdated."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_stock.{case}" for case in ("optimizers", "tapes", "callbacks")])


def test_stock_fit_diverges_and_ours_does_not(ranks):
    first, second = (found["keras_stock.optimizers"] for found in ranks)
    assert first["stock"] != second["stock"]
    assert first["ours"] == second["ours"]


def test_stock_tape_crashes_and_ours_does_not(ranks):
    first, second = (found["keras_stock.tapes"] for found in ranks)
    assert "has no attribute 'ref'" in first["stock"]
    assert first["ours"] == second["ours"] and min(first["ours"]) > 0


def test_stock_callbacks_crash(ranks):
    found = dict(ranks[0]["keras_stock.callbacks"])
    assert float(found.pop("distance of equal models")) == 0
    assert all(found.values()), found
