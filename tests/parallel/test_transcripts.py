"""Every bit of training is what it was: of weights, u, v and packets, over all adapters and two to four ranks."""

from __future__ import annotations

import pytest

from tests.helpers.transcripts import GROUPS, difference, recorded

pytestmark = pytest.mark.parallel
RECORDED = recorded()


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(name, marks=[pytest.mark.ranks(group.workers, group.adapter), *[pytest.mark.slow] * group.slow])
        for name, group in GROUPS.items()
    ],
)
def test_training_is_bit_for_bit_what_it_was(group, tmp_path):
    now = GROUPS[group].run(tmp_path)
    for machine in RECORDED:
        loaded = [{name: runs[name] for name in runs if name.startswith("loaded ")} for runs in (machine[group], now)]
        assert not (found := difference(*loaded)), f"{group}: {found}"  # copies, which every machine makes alike
    like_this = [machine[group] for machine in RECORDED if machine[group]["stock"] == now["stock"]]
    if not like_this:
        pytest.skip(f"{group}: here a run without compression has other bits than where it was recorded")
    for before in like_this:
        assert not (found := difference(before, now)), f"{group}: {found}"


def test_all_is_recorded():
    assert RECORDED
    for machine in RECORDED:
        assert list(machine) == list(GROUPS)
        assert all(len(runs) > 2 for runs in machine.values())
