"""Every bit of training is what it was: of weights, u, v and packets, over both frameworks and two to four ranks."""

from __future__ import annotations

import json

import pytest

from tests.helpers.transcripts import FILE, transcripts

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_training_is_bit_for_bit_what_it_was():
    before, now = json.loads(FILE.read_text()), transcripts()
    assert list(before) == list(now)
    for group, runs in before.items():
        if runs["stock"] != now[group]["stock"]:
            pytest.skip(f"{group}: this machine computes a plain run in other bits than the one that has recorded them")
        assert len(runs) > 15
        for name, hashes in runs.items():
            assert hashes == now[group][name], (group, name)
        assert list(runs) == list(now[group])
