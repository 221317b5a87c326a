"""Every bit of training is what it was: of weights, u, v and packets, over all adapters and two to four ranks."""

from __future__ import annotations

import json

import pytest

from tests.helpers.transcripts import FILE, GROUPS, difference

pytestmark = pytest.mark.parallel
RECORDED = json.loads(FILE.read_text())


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(name, marks=[pytest.mark.ranks(group.workers, group.adapter), *[pytest.mark.slow] * group.slow])
        for name, group in GROUPS.items()
    ],
)
def test_training_is_bit_for_bit_what_it_was(group, tmp_path):
    before, now = RECORDED[group], GROUPS[group].run(tmp_path)
    loaded = [{name: runs[name] for name in runs if name.startswith("loaded ")} for runs in (before, now)]
    assert not (found := difference(*loaded)), f"{group}: {found}"  # copies, which every machine makes alike
    if before["stock"] != now["stock"]:
        pytest.skip(f"{group}: this machine computes a plain run in other bits than the one that has recorded them")
    assert not (found := difference(before, now)), f"{group}: {found}"


def test_all_is_recorded():
    assert list(RECORDED) == list(GROUPS)
    assert all(len(runs) > 2 for runs in RECORDED.values())
