"""The long benchmarks at a size that says whether they still work; what they measure here means nothing."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.jobs import run


@pytest.mark.parametrize(("name", "shown"), [("exchange", "| dgc |"), ("training", "dgc"), ("quality", "| dgc |")])
def test_quick_run_ends_with_a_table(name, shown):
    ended = run([sys.executable, "-m", f"benchmarks.{name}", "--quick"], timeout=170)
    assert ended.code == 0, ended.output
    assert shown in ended.output, ended.output
