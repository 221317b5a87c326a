"""The docs name what there is, and no table that a command should have written is empty."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dgc_horovod import envvars

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="tests run outside the checkout")
def test_docs():
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for name, body in re.findall(r"<!-- ([\w-]+): begin -->(.*?)<!-- \1: end -->", page.read_text(), re.S):
            assert re.search(r"\d", body), f"{page.name}: the block {name} is empty"
    design = (ROOT / "docs" / "design.md").read_text()
    for variable in envvars.ALL:
        assert f"| `{variable.name}` | {variable.default} | {variable.meaning} |" in design
