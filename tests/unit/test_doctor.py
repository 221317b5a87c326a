"""``dgcrun --doctor``: what is made of facts, and the link measured over the loopback."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import hosts
from dgc_horovod.launch.hosts import HostReport, Ssh
from dgc_horovod.tools import doctor, link
from dgc_horovod.tools.doctor import BAD, NOTE, OK, Facts
from dgc_horovod.tools.link import Link
from dgc_horovod.tools.plan import parse_size

GIGABIT, RESNET50, VGG16 = 1e9, 25_600_000, 138_400_000


# -- plan


@pytest.mark.parametrize(
    "text, size",
    [("25.6M", 25_600_000), ("350k", 350_000), ("1.3B", 1_300_000_000), ("7G", 7 * 10**9), (" 12 ", 12), ("0.5K", 500)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-3M", "2.5", "0", "0.0001K", "12T", "nan", "1,000"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match=r"--model-size must be .* got"):
        parse_size(text)


# -- judging


def marks(findings):
    return [finding.mark for finding in findings]


def test_environment():
    assert marks(doctor.judge_environment({"HOROVOD_AUTOTUNE": "0", "DGC_ENABLED": "1"})) == [OK]
    found = doctor.judge_environment(
        {"HOROVOD_AUTOTUNE": "1", "HOROVOD_CACHE_CAPACITY": "0", "DGC_ENABLED": "0",
         "DGC_CONFIG_FILE": "/etc/dgc.yaml"}
    )  # fmt: skip
    assert marks(found) == [NOTE] * 3 + [OK] and "/etc/dgc.yaml" in found[-1].text
    assert all(finding.advice.startswith("unset it") for finding in found[:3])


def report(host, problem="", **found):
    versions = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow-cpu": "2.21.0", "python_version": "3.11.7"}
    return HostReport(host, {**versions, **found}, problem)


def test_hosts_alike():
    (finding,) = doctor.judge_hosts([report("a"), report("b", **{"tensorflow-cpu": "", "tensorflow": "2.21.0"})])
    assert finding == (OK, "a, b: Horovod 0.28.1, torch 2.13.0, TensorFlow 2.21.0, Python 3.11.7", "")


@pytest.mark.parametrize(
    "other, mark, said",
    [
        ({"torch": "2.12.0"}, BAD, "torch: 2.13.0 on a, b; 2.12.0 on c"),
        ({"torch": ""}, BAD, "torch: 2.13.0 on a, b; none on c"),
        ({"horovod": "0.27.0"}, BAD, "Horovod: 0.28.1 on a, b; 0.27.0 on c"),
        ({"tensorflow-cpu": "2.20.0"}, BAD, "TensorFlow: 2.21.0 on a, b; 2.20.0 on c"),
        ({"python_version": "3.12.1"}, NOTE, "Python: 3.11.7 on a, b; 3.12.1 on c"),
    ],
)
def test_hosts_that_differ(other, mark, said):
    fit, finding = doctor.judge_hosts([report("a"), report("b"), report("c", **other)])
    assert finding[:2] == (mark, said) and finding.advice
    assert fit.mark == OK and said.split(":")[0] not in fit.text


def test_hosts_that_are_not_fit():
    silent = HostReport("b", {}, "no answer within 60 s; is ssh to it possible without a password?")
    fit, finding = doctor.judge_hosts([report("a"), silent])
    assert fit.text.startswith("a: ")
    assert finding == (BAD, "b: no answer within 60 s", "is ssh to it possible without a password?")
    (alone,) = doctor.judge_hosts([HostReport("b", {}, "python cannot be run there: no such file")])
    assert alone.text == "b: python cannot be run there: no such file" and alone.advice


def facts(mpirun="/usr/bin/mpirun", packages=(), **frameworks):
    built_for = {"pytorch": "2.13.0+cpu", "tensorflow": "2.21.0"}
    versions = {"horovod": "0.28.1", "torch": "2.13.0+cpu", "tensorflow": "2.21.0", "built_for": built_for}
    kernels = {"kernels": "native", "instructions": "AVX2"}
    return Facts("python", {**versions, **kernels, **dict(packages)}, frameworks, mpirun)


TORCH = {"version": "2.13.0+cpu", "parts": ["gloo", "mpi"], "cuda": False, "cuda_built": None}


def test_horovod():
    assert marks(doctor.judge_horovod(facts(torch=TORCH, tensorflow={"version": "2.21.0", "parts": []}))) == [OK] * 4
    assert marks(doctor.judge_horovod(facts(torch={**TORCH, "version": "2.14.0"}))) == [OK, BAD, OK]
    assert marks(doctor.judge_horovod(facts(torch=TORCH, mpirun=""))) == [OK, OK, NOTE]
    assert marks(doctor.judge_horovod(facts(torch={**TORCH, "parts": []}))) == [OK, OK, BAD]
    assert marks(doctor.judge_horovod(facts(torch={"error": "it crashed with SIGSEGV"}))) == [OK, BAD]
    assert marks(doctor.judge_horovod(facts(packages={"horovod": "0.27.0"}, torch=TORCH))) == [NOTE, OK, OK]
    assert marks(doctor.judge_horovod(facts())) == [OK, BAD]
    assert marks(doctor.judge_horovod(facts(packages={"horovod": None}))) == [BAD]


def test_a_framework_that_horovod_was_not_built_for_stops_no_job_of_the_other():
    other = facts(packages={"built_for": {"pytorch": "2.13.0+cpu"}}, torch=TORCH, tensorflow={"error": "ImportError"})
    assert marks(doctor.judge_horovod(other)) == [OK, OK, NOTE, OK]


def test_cuda():
    cuda = {**TORCH, "cuda": True, "cuda_built": "13.0", "cuda_kernels": "torch_eager"}
    *_, without = doctor.judge_horovod(facts(torch=cuda))
    assert without.mark == BAD and "without CUDA: it ends the process" in without.text
    *_, nccl = doctor.judge_horovod(facts(torch={**cuda, "parts": ["gloo", "cuda"]}))
    assert nccl.text == "built without NCCL: GPU gradients go through host memory"
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in nccl.advice
    assert not any("NCCL" in each.text for each in doctor.judge_horovod(facts(torch=TORCH)))
    with_nccl = facts(torch={**cuda, "parts": ["gloo", "nccl", "cuda"]}, packages={"triton": "3.6.0"})
    assert marks(doctor.judge_horovod(with_nccl)) == [OK] * 3
    cpu, gpu = doctor.judge_kernels(with_nccl)
    assert cpu == (OK, "CPU tensors: native (AVX2)", "")
    assert gpu.mark == NOTE and "torch_eager" in gpu.text and "Triton 3.6.0" in gpu.text
    hidden = doctor.judge_kernels(facts(torch={**cuda, "cuda": False}))[-1]
    assert "no CUDA device" in hidden.text


def test_kernels():
    slow = facts(packages={"kernels": "torch_eager", "not_native": "it was not built"})
    assert doctor.judge_kernels(slow)[0].mark == NOTE and "compiler" in doctor.judge_kernels(slow)[0].advice
    asked = facts(packages={"kernels": "reference"})
    assert "DGC_BACKEND" in doctor.judge_kernels(asked)[0].text
    none = facts(packages={"kernels": None, "error": "ModuleNotFoundError: No module named 'dgc_horovod'"})
    assert marks(doctor.judge_kernels(none)) == [BAD]


def test_links():
    good, lame, cut = Link("a", 941e6, 940e6, 2e-4), Link("b", 941e6, 94e6, 2e-4), Link("c", problem="no connection")
    found = doctor.judge_links([good, lame, cut], True)
    assert marks(found) == [OK, NOTE, BAD]
    assert found[0].text == "a: 941 Mbit/s there, 940 Mbit/s back, round trip 0.20 ms"
    assert "memory" in doctor.judge_links([], False)[0].text and marks(doctor.judge_links([], True)) == [NOTE]


# -- all of it


@pytest.mark.parametrize("script, said", [("kill -SEGV $$", "SIGSEGV"), ("echo lost >&2; exit 3", "exit code 3: lost")])
def test_an_interpreter_that_does_not_work_is_a_finding(tmp_path, capsys, script, said):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert doctor.diagnose("", str(python), Ssh()) == 1
    out = capsys.readouterr().out
    assert said in out and "3 of the findings, marked BAD, would stop a compressed job" in out
    assert out.endswith("dgcrun --plan --model-size 25.6M --step-ms 180 --link-gbps 1 --workers-per-node 1\n")


def test_the_current_folder_is_not_where_its_modules_come_from(tmp_path, monkeypatch):
    """A json.py, or a folder horovod/, had been run."""
    for name in ("json.py", "runpy.py", "subprocess.py", "horovod/__init__.py", "torch.py", "dgc_horovod.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("open('canary', 'w'); raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    for safe in ("", "1"):
        monkeypatch.setenv("PYTHONSAFEPATH", safe)
        found = hosts.ask("localhost", sys.executable, doctor._PACKAGES, Ssh())
        assert found["horovod"] and found["kernels"] and "error" not in found
        assert run_here(["127.0.0.1", "1"], "token")["error"].startswith("ConnectionRefusedError: ")
        (report,) = hosts.examine(["localhost"], sys.executable, Ssh())
        assert report.problem == ""
    assert not (tmp_path / "canary").exists()


# -- link


def run_here(arguments, token):
    assert token not in arguments, "ps would show it"
    return hosts.ask("localhost", sys.executable, doctor._LINK, Ssh(), 60, arguments, token)


def test_the_link_is_really_measured():
    found = link.measure("here", "127.0.0.1", run_here)
    assert found.problem == ""
    assert 1e8 < found.there_bits < 1e13 and 1e8 < found.back_bits < 1e13
    assert 1e-6 < found.round_trip < 0.1


@pytest.mark.parametrize("stranger", [b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 32])
def test_a_stranger_is_turned_away(stranger):
    """Whatever comes without the token is closed, and the wait for the right one ends in time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers = []

        def knock():
            with socket.create_connection(listener.getsockname(), 10) as connection:
                connection.settimeout(10)
                connection.sendall(stranger)
                connection.shutdown(socket.SHUT_WR)
                try:
                    answers.append(connection.recv(1))
                except ConnectionResetError:
                    answers.append(b"")

        thread = threading.Thread(target=knock)
        thread.start()
        with pytest.raises(TimeoutError, match=r"no connection from that host to 127\.0\.0\.1"):
            link.serve(listener, "1" * 32, 1.0)
        thread.join(20)
    assert answers == [b""]


def test_nobody_comes():
    begin = time.monotonic()
    found = link.measure("a", "127.0.0.1", lambda *arguments: time.sleep(1.5) or run_here(*arguments), patience=0.5)
    assert "within 0.5 s" in found.problem and found.there_bits == 0
    assert 1 < time.monotonic() - begin < 30
    gone = link.measure("a", "127.0.0.1", lambda *arguments: {"error": "ModuleNotFoundError: gone"})
    assert gone.problem.endswith("has not connected back (ModuleNotFoundError: gone)")
