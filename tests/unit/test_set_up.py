"""Which Python the set-up takes for .venv: bash runs the real functions, the Pythons on PATH pretend their version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "scripts" / "lib" / "environment.sh"
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="tests run outside the checkout")

WHOLE = "import os; os.path.exists = lambda path: path.endswith('/Python.h')"
NO_VENV = "sys.modules['ensurepip'] = None"
NO_HEADERS = "import os; os.path.exists = lambda path: False"
SHIM = "sys.exit(127)"  # what pyenv puts on PATH for a version that is not switched on
TOOLS = ("dirname", "sort")  # what the functions call besides


def found(folder: Path, kinds: dict[str, str], named: str = "") -> tuple[int, str]:
    """What find_python says: exit status, and its output or error.

    Args:
        folder: becomes PATH.
        kinds: name -> version and kind of each Python there, as "3.12 = CODE".
        named: PYTHON.
    """
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, kind in kinds.items():
        version, code = kind.split(" = ", 1)
        pretend = (
            f"import sys, sysconfig; sys.version_info = ({version.replace('.', ', ')}, 0); {code}; exec(sys.argv[1])"
        )
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$2"\n')
        (folder / name).chmod(0o755)
    command = [str(shutil.which("bash")), "-euc", f'source "{LIBRARY}"; python=$(find_python); echo "$python"']
    environment = {**os.environ, "PATH": str(folder), "PYTHON": named}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return result.returncode, (result.stderr if result.returncode else result.stdout).strip()


def test_the_newest_tested_python_is_taken_that_can_make_an_environment(tmp_path):
    there = {"python3.14": f"3.14 = {WHOLE}", "python3.12": f"3.12 = {WHOLE}", "python3.11": f"3.11 = {WHOLE}"}
    assert found(tmp_path / "all", there) == (0, "python3.12")
    for number, code in enumerate((SHIM, NO_VENV, NO_HEADERS)):
        assert found(tmp_path / str(number), {**there, "python3.12": f"3.12 = {code}"}) == (0, "python3.11"), code


def test_a_python_of_another_name_is_taken_if_its_version_is_tested(tmp_path):
    assert found(tmp_path / "path", {"python3": f"3.10 = {WHOLE}"}) == (0, "python3")


def test_where_no_python_will_do_each_is_named_with_what_it_lacks(tmp_path):
    there = {"python3.13": f"3.13 = {SHIM}", "python3.12": f"3.12 = {NO_VENV}", "python3.11": f"3.11 = {NO_HEADERS}"}
    status, error = found(tmp_path / "path", {**there, "python3": f"3.14 = {WHOLE}"})
    assert status == 1
    assert "python3.13 does not run" in error and "python3 is not tested" in error
    assert re.search(r"python3.12 cannot make a virtual environment \(.*python3.12-venv\)", error), error
    assert re.search(r"python3.11 has no Python.h.*\(.*python3.11-dev\)", error), error


@pytest.mark.parametrize(
    "kind, why",
    [
        (f"3.9 = {WHOLE}", "is 3.9, too old"),
        (f"3.13 = {SHIM}", "does not run"),
        (f"3.13 = {NO_VENV}", "cannot make a virtual environment"),
        (f"3.14 = {WHOLE}", None),  # on the user's own risk, with a warning
    ],
)
def test_a_python_that_the_user_names_is_taken_or_refused_but_never_replaced(tmp_path, kind, why):
    status, said = found(tmp_path / "path", {"python3.12": f"3.12 = {WHOLE}", "mine": kind}, named="mine")
    if why is None:
        assert (status, said) == (0, "mine")
    else:
        assert status == 1 and f"PYTHON=mine {why}" in said, said


def test_the_versions_that_are_said_to_be_tested_are_the_same_everywhere():
    tested = re.search(r"^TESTED_PYTHONS=\(([\d. ]+)\)", LIBRARY.read_text(), re.M)
    assert tested
    versions = tested[1].split()
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]), reverse=True)
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert sorted(classifiers) == sorted(versions)
    for page in ("README.md", "CONTRIBUTING.md", "scripts/test", "scripts/quickstart"):
        assert f"Python {versions[-1]} to {versions[0]}" in (ROOT / page).read_text(), page
