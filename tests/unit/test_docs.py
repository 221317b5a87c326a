"""The docs name what there is, and no table that a command should have written is empty."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dgc_horovod.launch.environment_page import page as page_of_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="tests run outside the checkout")
def test_docs():
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for name, body in re.findall(r"<!-- ([\w-]+): begin -->(.*?)<!-- \1: end -->", page.read_text(), re.S):
            assert re.search(r"\d", body), f"{page.name}: the block {name} is empty"


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="tests run outside the checkout")
def test_the_page_of_settings_is_the_one_that_the_command_writes():
    assert (ROOT / "docs" / "environment.md").read_text() == page_of_settings()
