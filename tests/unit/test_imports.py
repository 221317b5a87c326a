"""The one direction of imports (docs/design.md), and what may import or read what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dgc_horovod

PACKAGE = Path(dgc_horovod.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [  # each may import from itself and from those after it
    ["launch"],
    ["torch", "tensorflow"],
    ["compression", "agreement", "report", "exchange", "checkpoint", "manifest", "replicas", "metrics", "recording"],
    ["meter"],
    ["engine", "message", "traffic"],
    ["selection", "packet", "codecs", "bucket", "schedule", "state", "ops"],
    ["config", "envvars", "errors"],
]
# config holds a WarmupSchedule; schedule and bucket are pure and below the kernels
ALLOWED_UPWARD = {("config", "schedule")}


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def part(name: str) -> str:
    return name.split(".")[1] if name.startswith("dgc_horovod.") else ""


def layer(name: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if name in names), None)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported(file):
        top, target = name.split(".")[0], part(name)
        if layer(own) is not None and layer(target) is not None and (own, target) not in ALLOWED_UPWARD:
            assert layer(target) >= layer(own), f"{own} imports {target}"
        if {own, target} == {"torch", "tensorflow"}:
            pytest.fail("the adapters import each other")
        if top == "horovod":
            assert own in ("torch", "tensorflow", "launch")
        if top == "torch":
            assert own == "torch" or file.name == "torch_eager.py" or file.name.startswith("triton_")
        if top in ("tensorflow", "keras"):
            assert own == "tensorflow"
        if top == "triton":
            assert file.name.startswith("triton_")
        if top == "ctypes":
            assert file.name == "native.py"
    # the latter two run before the package can be imported
    if file.name not in ("envvars.py", "build_horovod.py", "sitecustomize.py"):
        assert "os.environ" not in file.read_text() and "getenv" not in file.read_text()


def test_importing_the_package_imports_no_framework():
    frameworks = "{'torch', 'tensorflow', 'horovod', 'keras'}"
    code = f"import sys, dgc_horovod; print(sorted({{m.split('.')[0] for m in sys.modules}} & {frameworks}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert out.stdout.strip() == "[]"


def test_files_stay_readable():
    for file in FILES:
        lines = file.read_text().splitlines()
        assert len(lines) <= 400, f"{file.name} has {len(lines)} lines"
