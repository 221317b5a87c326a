"""The docs name what there is, and no table that a command should have written is empty."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.settings_page import page as page_of_settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="tests run outside the checkout")


def test_no_generated_block_is_empty():
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for name, body in re.findall(r"<!-- ([\w-]+): begin -->(.*?)<!-- \1: end -->", page.read_text(), re.S):
            assert re.search(r"\d", body), f"{page.name}: the block {name} is empty"


def test_every_decision_is_listed_once_by_number():
    pages = [ROOT / "docs" / "design.md", *(ROOT / "docs" / "decisions").glob("*.md")]
    found = [int(n) for page in pages for n in re.findall(r"^(?:## |\*\*)(\d+)\. ", page.read_text(), re.M)]
    listed = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "decisions" / "README.md").read_text(), re.M)
    assert sorted(found) == [int(n) for n in listed] == list(range(1, len(found) + 1))


def test_every_test_that_is_named_exists():
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = "\n".join(re.findall(r"^def (test_\w+)", "\n".join(file.read_text() for file in files), re.M))
    text = (ROOT / "docs" / "reliability.md").read_text() + (ROOT / "docs" / "cuda.md").read_text()
    named = set(re.findall(r"\b(test_\w+\.py)", text))
    assert len(named) > 10 and not named - {file.name for file in files}
    for name in re.findall(r"(?:`|::)(test_\w+)(?=`|\.\.\.)", text):
        assert re.search(rf"^{name}", functions, re.M), f"{name} is no test"


def test_the_page_of_settings_is_the_one_that_the_command_writes():
    assert (ROOT / "docs" / "environment.md").read_text() == page_of_settings()
