"""Unedited scripts under torchrun: compressed by a variable, or not, for a reason that is the same on every rank."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from dgc_horovod.launch.site import FOLDER
from tests.helpers.jobs import ROOT, run
from tests.helpers.launchers import torchrun

pytestmark = pytest.mark.parallel

SCRIPT = ["-m", "tests.helpers.unedited_ddp"]
COMPRESSED = ("plain", "adamw", "two_models", "scaled", "closures", "stages", "state_asked")
REFUSED = {
    "two_optimizers": "in the model but not in the optimizer",
    "own_hook": "hook already",
    "lbfgs": "LBFGS calls",
}
# Nothing is rounded or left out.
WHOLE = {
    "DGC_COMPRESSION": "dgc", "DGC_DENSITY": "1", "DGC_VALUES": "fp32", "DGC_DENSE_VALUES": "fp32",
    "DGC_FACTOR_MASKING": "off",
}  # fmt: skip
BY_PATH = {"PYTHONPATH": f"{FOLDER}:{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
FEW = {**BY_PATH, "DGC_COMPRESSION": "dgc", "DGC_DENSITY": "0.02"}


def by_entry_point(folder: Path) -> dict[str, str]:
    """An environment in which torch finds the entry point, as where the package is installed."""
    info = folder / "dgc_horovod-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dgc-horovod\nVersion: 0.1.0\n")
    lines = re.search(r'entry-points."torch.backends"\]\n(\w+) = "(.*)"', (ROOT / "pyproject.toml").read_text())
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{lines[1]} = {lines[2]}\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def trained(folder: Path, cases, environment):
    """What two ranks print, and the weights of every case, which both have alike."""
    file = folder / "weights.pt"
    code, output = run([*torchrun(2), *SCRIPT, str(file), *cases], 150, environment)
    found = re.findall(r"rank \d+ (\w+) (\w{8})", output)
    assert code == 0 and len(found) == 2 * len(cases) and len(set(found)) == len(cases), output
    return output, torch.load(file)


def dgcrun(*words: str, **environment: str):
    """The command, of this checkout."""
    return run([sys.executable, "-m", "dgc_horovod.launch.cli", *words], 150, environment)


def with_another_rank(folder: Path, workers: int, line: str) -> list[str]:
    """The command in which ranks differ by what a line of a shell does before they start."""
    script = folder / "start.sh"
    script.write_text(f'#!/bin/sh\n{line}\nexec "$@"\n')
    script.chmod(0o755)
    return [*torchrun(workers, "--no-python"), str(script), sys.executable, *SCRIPT, str(folder / "w"), "plain"]


def said(output: str) -> list[str]:
    """The lines that tell why nothing is compressed, as often as they stand there."""
    return re.findall(r"NOT ACTIVE: compression dgc was asked for, but (.*)", output)


def test_compressed_or_refused_in_the_same_words(tmp_path):
    cases = [*COMPRESSED, *REFUSED]
    path = by_entry_point(tmp_path)
    output, dense = trained(tmp_path, cases, {**path, **WHOLE, "DGC_ENABLED": "0"})
    assert "dgc_horovod" not in output
    output, found = trained(tmp_path, cases, {**path, **WHOLE})
    for name in cases:
        assert (dense[name] - found[name]).abs().max() < 1e-6, name
    assert any(not torch.equal(dense[name], found[name]) for name in COMPRESSED)
    reasons = said(output)
    assert len(reasons) == 2 * 4 and all(reasons.count(reason) == 2 for reason in reasons), "once on each rank"
    assert all(any(words in reason for reason in reasons) for words in REFUSED.values())
    # each of nine optimizers makes its first step by DDP's own exchange
    (last,) = re.findall(r"dgc_horovod: dgc, density 1: (\d+) steps; (.*)", output)
    assert last[0] == str(9 * 11) and "SGD cannot be compressed" in last[1] and "(and 3 more)" in last[1]


def test_a_rank_that_is_not_active_is_named_on_every_other(tmp_path):
    """The others do not wait for it in an exchange, and all train by DDP's own."""
    command = with_another_rank(tmp_path, 3, '[ "$RANK" = 1 ] && unset DGC_COMPRESSION DGC_DENSITY DGC_TIMEOUT')
    code, output = run(command, 100, {**FEW, "DGC_TIMEOUT": "4"})
    digests = set(re.findall(r"rank \d plain (\w{8})", output))
    assert code == 0 and len(digests) == 1, output
    first, *others = said(output)
    assert "rank 1 of 3 did not answer within 4 s" in first and set(others) == {first}, output


@pytest.mark.slow
def test_the_last_line_is_there_where_a_process_is_killed_after_its_group(tmp_path):
    """As Ray does with its workers: no exit handler runs."""
    script = tmp_path / "train.py"
    script.write_text("import os\nfrom tests.helpers import unedited_ddp\nunedited_ddp.main()\nos._exit(0)\n")
    command = [*torchrun(2), str(script), str(tmp_path / "w"), "plain"]
    code, output = run(command, 100, FEW)
    assert code == 0 and len(re.findall(r"dgc_horovod: dgc, density \S+: 11 steps; ", output)) == 1, output


ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1, 0.9))
for step in range(12):
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(8, 64)).square().mean())
    optimizer.step()
print(f"weights {net.weight.sum().item()!r}", flush=True)
"""


def test_a_loop_of_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text(ACCELERATE)
    environment = {**BY_PATH, "DGC_COMPRESSION": "dgc", "DGC_DENSITY": "0.02"}
    code, output = run([*torchrun(2), str(script)], 100, environment)
    (less,) = re.findall(r"dgc_horovod: dgc, density 0.02: 11 steps; .*? ([\d.]+)x less than fp32", output)
    weights = re.findall(r"weights (-?[\d.]+)", output)
    assert code == 0 and len(weights) == 2 and len(set(weights)) == 1 and float(less) > 10, output


def test_dgcrun_before_torchrun(tmp_path):
    """Flags, checks before the start, the report, the exit code: as for Horovod; without an entry point."""
    page = tmp_path / "page.html"
    flags = ["--dgc", "--density", "0.02", "--report", str(page)]
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DGC_DENSITY": "0.5"}
    file = str(tmp_path / "w")
    code, output = dgcrun(*flags, *torchrun(2), *SCRIPT, file, "plain", "adamw", **environment)
    (last,) = re.findall(r"dgc_horovod: dgc, density (\S+): 22 steps; .*? (\S+)x less than fp32", output)
    assert code == 0 and 0.015 < float(last[0]) < 0.025 and 25 < float(last[1]) < 60, output
    assert "22 steps" in output and f"the report is {page}" in output and "unedited_ddp" in page.read_text()
    code, output = dgcrun(*flags, "--density", "7", *torchrun(2), *SCRIPT, file, "plain")
    assert code == 2 and "for 7x compression pass density=0.142857" in output and "rank" not in output


@pytest.mark.slow
def test_dgcrun_ends_with_3_where_nothing_was_compressed(tmp_path):
    words = [*torchrun(2, "--max-restarts=2"), *SCRIPT, str(tmp_path / "w"), "own_hook"]
    code, output = dgcrun("--dgc", *words)
    assert code == 3 and output.count("hook already") == 3 and output.count("--allow-inactive makes this") == 3, output
    assert dgcrun("--dgc", "--allow-inactive", *words).code == 0
    assert dgcrun("--compression", "none", *words).code == 0


@pytest.mark.slow
def test_rank_0_is_not_active(tmp_path):
    """It tells dgcrun nothing; the job ended with 0."""
    command = with_another_rank(tmp_path, 2, '[ "$RANK" = 0 ] && export DGC_ENABLED=0')
    code, output = dgcrun("--dgc", "--dgc-timeout", "4", *command)
    assert code == 3 and "rank 0 of 2 did not answer within 4 s" in said(output)[0], output


@pytest.mark.slow
def test_a_command_without_a_launcher(tmp_path):
    code, output = dgcrun("--dgc", sys.executable, str(tmp_path / "train.py"))
    assert code == 2 and "dgcrun --dgc torchrun --nproc-per-node 2 train.py" in output


@pytest.mark.slow
def test_exports_of_dgcrun_serve_torchrun(tmp_path):
    lines = dgcrun("--dgc", "--density", "0.02", "--print-env").output
    words = shlex.join([*torchrun(2), *SCRIPT, str(tmp_path / "w"), "plain"])
    code, output = run(["sh", "-c", f"{lines}\n{words}"], 100, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert code == 0 and re.search(r"dgc_horovod: dgc, density 0.02\d*: 11 steps", output), output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_job_that_torchrun_starts_again(how, tmp_path):
    """Not endlessly, and compressed again."""
    words = [*torchrun(2, "--max-restarts=3"), *SCRIPT, str(tmp_path / "w"), f"ends_once_{how}"]
    environment = {**BY_PATH, **WHOLE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code, output = run(words, 150, environment)
    assert code == 0 and output.count("dgc_horovod: dgc, density 1: 11 steps") == 1, output


def test_nothing_is_imported_where_no_variable_is_set(tmp_path):
    """Every ``import torch`` of every user comes here: 1 ms for it, and 20 for a machine that does something else."""
    code = """
import os, sys, time
times = []
for _ in range(5):
    sys.modules.pop("dgc_horovod_autoload", None)
    begin = time.perf_counter()
    import dgc_horovod_autoload
    dgc_horovod_autoload.load()
    times.append(time.perf_counter() - begin)
import torch
print(min(times), sorted(name for name in sys.modules if name.startswith("dgc_")))
print(torch.distributed.init_process_group.__module__, hasattr(torch.distributed.init_process_group, "dgc_job"))
"""
    environment = {**by_entry_point(tmp_path), "DGC_TIMEOUT": None, "DGC_BACKEND": None}
    out = run([sys.executable, "-c", code], 60, environment).output.split()
    assert float(out[0]) < 0.001 and out[1] == "['dgc_horovod_autoload']", out
    assert out[2:] == ["torch.distributed.distributed_c10d", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", [True, False])
def test_a_wrong_setting(agent, tmp_path):
    """torchrun would start the job again and again if it failed; without it the exit code tells."""
    environment = {**FEW, "DGC_DENSITY": "7"}
    if agent:
        output, _ = trained(tmp_path, ["plain"], environment)
        assert len(said(output)) == 3, "on each rank at the first step, and in the last line"
    else:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        code, output = run([sys.executable, *SCRIPT, str(tmp_path / "w"), "plain"], 60, {**environment, **alone})
        assert code == 3, output
    assert all("for 7x compression pass density=0.142857" in reason for reason in said(output))


@pytest.mark.slow
def test_ranks_with_different_settings(tmp_path):
    code, output = run(with_another_rank(tmp_path, 2, '[ "$RANK" = 1 ] && export DGC_DENSITY=0.03'), 100, FEW)
    assert code == 0 and len(said(output)) == 3, output
    assert set(said(output)) == {"the ranks' settings differ: DGC_DENSITY is 0.02 on rank 0 and 0.03 on rank 1"}


@pytest.mark.slow
def test_a_script_without_ddp(tmp_path):
    code, output = run([*torchrun(2), *SCRIPT, str(tmp_path / "w"), "no_model"], 100, {**BY_PATH, **WHOLE})
    assert code == 0 and len(said(output)) == 1 and "no DistributedDataParallel" in said(output)[0], output


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp16", "auto", "topk"])
def test_other_methods(method, tmp_path):
    output, _ = trained(tmp_path, ["plain"], {**BY_PATH, "DGC_COMPRESSION": method})
    (last,) = [line for line in output.splitlines() if line.startswith(f"dgc_horovod: {method}")][-1:]
    expected = {"fp16": "the uncompressed exchange is not counted", "auto": " 11 steps", "topk": " 11 steps"}[method]
    assert expected in last and "Horovod" not in last, output
