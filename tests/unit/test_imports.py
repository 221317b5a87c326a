"""The one direction of imports (docs/design.md), and what may import or read what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dgc_horovod

PACKAGE = Path(dgc_horovod.__file__).parent
TRITON = PACKAGE / "kernels" / "triton"
FILES = sorted(PACKAGE.rglob("*.py"))
DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
# each line may import from itself and from those after it
BLOCK = DESIGN.read_text().split("<!-- layers -->\n```\n")[1].split("```")[0] if DESIGN.exists() else ""
LAYERS = [line.split() for line in BLOCK.splitlines()]
OF_TESTING = {"torch.py": "torch", "loopback.py": "torch", "tensorflow.py": "tensorflow"}  # whose parts they show


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


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


@pytest.mark.skipif(not LAYERS, reason="tests run outside the checkout")
def test_every_part_is_in_one_layer():
    parts = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert sorted(name for names in LAYERS for name in names) == sorted(parts)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    framework = OF_TESTING.get(file.name, "") if own == "testing" else own
    for name in imported(file):
        top, target = name.split(".")[0], part(name)
        if LAYERS and target and target != "__version__" and own != "__init__":
            if name in ("dgc_horovod.tools", "dgc_horovod.tools.load") and own != "tools":
                assert ".load(" in file.read_text(), "tools are had by `tools.load`"
            else:
                assert layer(target) >= layer(own), f"{own} imports {target}"
        if {framework, target} == {"torch", "tensorflow"}:
            pytest.fail("the adapters import each other")
        if top == "horovod":
            assert own in ("torch", "tensorflow", "launch", "tools")
            assert not is_without_horovod(file), "what a transport of another kind uses as well"
        if top == "torch":
            assert framework == "torch" or file.name == "torch_eager.py" or file.parent == TRITON
        if top in ("tensorflow", "keras"):
            assert framework == "tensorflow"
        if top == "triton":
            assert file.parent == TRITON
        if top == "ctypes":
            assert file in (PACKAGE / "kernels" / "native" / "library.py", PACKAGE / "leaving.py")
    # the latter two run before the package can be imported
    if file.name not in ("envvars.py", "build_horovod.py", "sitecustomize.py"):
        assert "os.environ" not in file.read_text() and "getenv" not in file.read_text()


# of the torch adapter, what is Horovod's own; everything else does without it
OF_HOROVOD = {"adapter.py", "elastic.py", "horovod_carrier.py", "horovod_functions.py", "optimizer.py"}


def is_without_horovod(file: Path) -> bool:
    """Whether a file is of those parts of the torch adapter that do without Horovod."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] == "torch" and not {"/".join(parts[1:]), parts[1]} & OF_HOROVOD


def said_by(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout


def test_parts_for_torch_do_without_horovod():
    names = [
        ".".join(("dgc_horovod", *file.relative_to(PACKAGE).with_suffix("").parts))
        for file in FILES
        if is_without_horovod(file) and file.name != "__init__.py" and file.parent.name != "integrations"
    ]
    names += [f"dgc_horovod.launch.{name}" for name in ("cli", "job", "activate")]
    names += ["dgc_horovod.tools.report.command"]
    code = f"""
import importlib, sys
sys.modules["horovod"] = None  # as where it is not installed
for name in {names}:
    importlib.import_module(name)
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
try:
    from dgc_horovod.torch import DistributedOptimizer
except ImportError as error:
    print(error)
"""
    assert len(names) > 20 and "needs Horovod built for this PyTorch" in said_by(code)


def test_importing_the_package_imports_no_framework():
    frameworks = "{'torch', 'tensorflow', 'horovod', 'keras'}"
    code = f"import sys, dgc_horovod; print(sorted({{m.split('.')[0] for m in sys.modules}} & {frameworks}))"
    assert said_by(code).strip() == "[]"


def test_files_stay_readable():
    for file in FILES:
        lines = file.read_text().splitlines()
        assert len(lines) <= 400, f"{file.name} has {len(lines)} lines"
