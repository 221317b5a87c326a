"""Several hosts, emulated with network namespaces: `dgcrun` starts ranks by ssh, and finds out what is wrong there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import dgc_horovod
from benchmarks.netlab import lab, unavailable
from tests.helpers.jobs import KEY_SEEN, child_environment

PACKAGE = Path(dgc_horovod.__file__).parent
HOSTS = ["-H", "host1:1,host2:1", "-np", "2", "--gloo"]
TORCH = ["examples/unmodified_torch.py", "--epochs", "2"]
WHO = (
    "import os, socket, horovod.torch as hvd; hvd.init(); print('rank', hvd.rank(), 'on', socket.gethostname(), "
    "'density', os.environ['DGC_DENSITY'], 'timeout', os.environ['DGC_TIMEOUT'], 'mine', os.environ['MY_OWN'])"
    + KEY_SEEN
)


@pytest.fixture
def hosts():
    if reason := unavailable():
        pytest.skip(reason)
    with lab(2) as up:
        yield up


def dgcrun(hosts, *words: str, **environment: str):
    """Launch from the first host."""
    variables = child_environment({"MY_OWN": "a b'c$d", **environment})
    ended = hosts.run(1, ["dgcrun", *HOSTS, *words], timeout=120, env=variables)
    return ended.returncode, ended.stdout + ended.stderr


def on_second(hosts, *command: str) -> None:
    """Change what the second host alone sees of the files."""
    ended = hosts.run(2, command)
    assert ended.returncode == 0, ended.stderr


def test_environment_and_config_arrive_and_the_job_is_compressed(hosts, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("compression: {density: 0.01, timeout: 50}\n")
    options = ["--config-file", str(job), "--allow-inactive"]
    code, output = dgcrun(hosts, *options, sys.executable, "-c", WHO, DGC_TIMEOUT="")
    assert code == 0, output
    for rank, host in enumerate(hosts.names):
        assert f"rank {rank} on {host} density 0.01 timeout 50 mine a b'c$d" in output, output
    assert output.count("key seen [] of True") == 2, output
    code, output = dgcrun(hosts, "--dgc", "--density", "0.01", sys.executable, *TORCH)
    assert code == 0 and "accuracy" in output and re.search(r"dgc, density 0.01: 36 steps; ", output), output


def test_a_host_without_the_package_is_named_before_anything_starts(hosts):
    on_second(hosts, "mount", "-t", "tmpfs", "none", str(PACKAGE))
    code, output = dgcrun(hosts, "--dgc", sys.executable, *TORCH)
    assert code == 2 and "accuracy" not in output and "Traceback" not in output
    assert "nothing was started" in output and re.search(r"host2: \S+ has no dgc_horovod .*; install", output), output
    assert "host1:" not in output


@pytest.mark.slow
def test_a_host_with_another_version_is_named(hosts, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other, ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    (other / "__init__.py").write_text((other / "__init__.py").read_text().replace(dgc_horovod.__version__, "0.0.9"))
    on_second(hosts, "mount", "--bind", str(other), str(PACKAGE))
    code, output = dgcrun(hosts, "--dgc", sys.executable, *TORCH)
    assert code == 2 and f"dgc_horovod 0.0.9, here it is {dgc_horovod.__version__}" in output, output


@pytest.mark.slow
def test_a_host_that_does_not_answer(hosts):
    on_second(hosts, "ip", "link", "set", "eth0", "down")
    code, output = dgcrun(hosts, "--dgc", sys.executable, *TORCH)
    assert code == 2 and "nothing was started" in output and "host2: " in output, output


@pytest.mark.slow
def test_a_virtual_environment_in_another_place_on_the_other_host(hosts, tmp_path):
    """There our own folder is missing, and the environment's copy of the package stands at a path of its own."""
    venv, copy = tmp_path / "venv", tmp_path / "venv" / "copy"
    (venv / "bin").mkdir(parents=True)
    shutil.copytree(PACKAGE, copy / "dgc_horovod", ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    shutil.copy(PACKAGE.parent / "dgc_horovod_autoload.py", copy)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{copy}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    on_second(hosts, "mount", "-t", "tmpfs", "none", str(PACKAGE))
    on_second(hosts, "mount", "--bind", str(copy / "dgc_horovod"), str(copy / "dgc_horovod"))
    code, output = dgcrun(hosts, "--dgc", "--density", "0.01", str(python), *TORCH)
    assert code == 0 and re.search(r"dgc, density 0.01: 36 steps; ", output), output


@pytest.mark.slow
def test_doctor_measures_the_link_between_them():
    if reason := unavailable():
        pytest.skip(reason)
    with lab(2, "200mbit") as hosts:
        command = ["dgcrun", "--doctor", *HOSTS]
        ended = hosts.run(1, command, timeout=200, env=child_environment({}))
    found = re.search(r"host2: (\d+) Mbit/s there, (\d+) Mbit/s back", ended.stdout)
    assert ended.returncode == 0 and found, ended.stdout + ended.stderr
    assert all(100 < int(rate) < 215 for rate in found.groups())
    assert re.search(r"--link-gbps 0\.[12]\d* --workers-per-node", ended.stdout), ended.stdout
