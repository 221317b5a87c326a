"""What cannot be compressed is refused when it is wrapped, on every rank alike; what is only odd works."""

from __future__ import annotations

import re

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"wrapping.{case}" for case in ("refused", "works", "among_other_operations")])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("LBFGS", "LBFGS calls its closure several times.*such as SGD or AdamW"),
        ("SparseAdam", "pass sparse_as_dense=True.*with sparse=False"),
        ("lazy", "'0.weight' has no shape yet.*call the model once"),
        ("meta", r"'0.weight' is on the meta device.*model.to_empty\(device=...\)"),
        ("FSDP2", "'0.weight' is sharded over the ranks.*whole on every rank"),
        ("FSDP", "weight' is sharded over the ranks"),
        ("DDP", "'0.weight' belongs to a model in DistributedDataParallel.*leave the model plain"),
        ("complex", "'extra' is complex.*view_as_real"),
        ("float8", "'extra' is of torch.float8_e5m2"),
        ("sparse layout", "'extra' has the layout torch.sparse_coo"),
        ("twice", "'0.weight' is 2 times in one parameter group"),
        ("superseded", "wrapped by another one since.*step that one"),
    ],
)
def test_refused_in_words(ranks, case, words):
    texts = [rank["wrapping.refused"][case] for rank in ranks]
    assert texts[0] == texts[1] and re.search(f"^UnsupportedUse: .*{words}", texts[0], re.S), texts


@pytest.mark.parametrize(("case", "words"), [("one rank's meta", "meta device"), ("one rank's groups", "ValueError")])
def test_what_one_rank_refuses_stops_all(ranks, case, words):
    texts = [rank["wrapping.refused"][case] for rank in ranks]
    assert texts[0] == texts[1], texts
    assert re.search(f"^RankMismatch: .*refused: rank 0 has nothing, rank 1 has .*{words}", texts[0], re.S), texts


@pytest.mark.parametrize(
    "case", ["empty first", "shared memory", "frozen integers", "DDP gone", "all frozen", "parts", "own methods"]
)
def test_odd_models_train_alike(ranks, case):
    found = [rank["wrapping.works"][case] for rank in ranks]
    assert found[0] == found[1] and found[0][1] == (case == "all frozen"), found


def test_horovods_own_operations_in_the_middle_of_a_step(ranks):
    for rank in ranks:
        found = rank["wrapping.among_other_operations"]
        assert found["same"] and found["results"] == [[2.0, 2.0, 1.0, 2.0, 2.0, 2.0, 1]] * 4
