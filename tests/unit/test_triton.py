"""The Triton kernels: under the interpreter bit for bit as the NumPy reference, and compiled for real devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks
from benchmarks.gpu.transcript import Size, transcript
from dgc_horovod import DGCConfig
from dgc_horovod.errors import BackendUnavailable
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.reference import ReferenceKernels
from dgc_horovod.kernels.triton.kernels import TritonKernels
from dgc_horovod.kernels.triton.memory import Recorded
from tests.helpers.jobs import ROOT

# The interpreter takes seconds for each; on a GPU `scripts/gpu_check` runs all.
QUICK = ("rule exact", "values 8bit", "under way together", "sums", "measurements")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in checks.CHECKS]
)
def test_check(name):
    assert checks.run(name, checks.INTERPRETED) == ""


@pytest.mark.slow
@settings(max_examples=4)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.sampled_from([0.001, 0.05, 0.3]))
def test_odd_sizes(numels, density):
    size = Size("cpu", tuple(numels), steps=3, ranks=2)
    config = DGCConfig(density=density, values="8bit")
    ours, reference = (transcript(kernels, config, size) for kernels in (TritonKernels("cpu"), ReferenceKernels()))
    assert ours == reference


def test_a_check_can_fail(monkeypatch):
    """A kernel that forgets one element of the update is found."""
    make = TritonKernels.receiver

    def forgetful(self, *arguments):
        receiver = make(self, *arguments)
        aggregate_into = receiver.aggregate_into

        def less(packets, step, outputs, scale):
            aggregate_into(packets, step, outputs, scale)
            largest = max(outputs.arrays, key=lambda output: output.abs().max())
            largest[largest.abs().argmax()] = 0

        receiver.aggregate_into = less
        return receiver

    monkeypatch.setattr(TritonKernels, "receiver", forgetful)
    assert "differ" in checks.run("values fp32", checks.INTERPRETED)


def test_one_check_that_fails_leaves_the_others(monkeypatch):
    def wrong(size):
        raise AssertionError("wrong bits")

    monkeypatch.setattr(command, "INTERPRETED", True)
    monkeypatch.setitem(checks.CHECKS, "wrong", wrong)
    assert command.check(checks.INTERPRETED, ["wrong", "sums"]) == {"wrong": "wrong bits", "sums": ""}


def test_chosen_by_the_registry_unless_it_is_too_old(monkeypatch):
    assert registry.choose("cpu").name == "native", "on a CPU the interpreter is for tests alone"
    monkeypatch.setenv("DGC_BACKEND", "triton")
    assert registry.choose("cpu").name == "triton"
    monkeypatch.setattr("triton.__version__", "3.5.1")
    with pytest.raises(BackendUnavailable, match=r"Triton 3\.5\.1 flushes denormals; 3\.6 or later"):
        registry.choose("cpu")


def test_kernels_are_recorded_once_they_are_launched_alike_for_the_second_time(monkeypatch):
    """And again where something else lies elsewhere; replaying them is left to a GPU (`scripts/gpu_check`)."""
    launched, recorded = [], []
    monkeypatch.setattr(
        Recorded, "_record", lambda self, kernels: recorded.append(1) or SimpleNamespace(replay=kernels)
    )
    steps = Recorded(torch.device("cuda"))
    for key in (1, 1, 1, 2, 2, 1):
        steps.launch(key, lambda key=key: launched.append(key))
    assert launched == [1, 1, 1, 2, 2, 1] and len(recorded) == 2
    monkeypatch.setenv("DGC_CUDA_GRAPHS", "off")
    never = Recorded(torch.device("cuda"))
    for _ in range(3):
        never.launch(1, lambda: launched.append("off"))
    assert launched[6:] == ["off"] * 3 and len(recorded) == 2


def test_kernels_run_where_recording_them_fails(monkeypatch):
    launched, tried = [], []
    monkeypatch.setattr(Recorded, "_record", lambda self, kernels: tried.append(1))
    steps = Recorded(torch.device("cuda"))
    for _ in range(2):
        steps.launch(1, lambda: launched.append(1))
    assert len(launched) == 2 and tried == [1]


@pytest.mark.parametrize(
    ("code", "device", "interprets", "said"),
    [
        ("", "cpu", False, "Triton runs on CUDA devices, not on cpu"),
        ("import sys; sys.modules['tensorflow'] = sys", "cuda:0", True, "cannot be loaded after TensorFlow"),
    ],
    ids=["without a device", "after TensorFlow"],
)
def test_where_it_cannot_be_loaded(code, device, interprets, said):
    code += f"\nfrom dgc_horovod.kernels import registry; registry.choose({device!r})"
    environment = {**os.environ, "DGC_BACKEND": "triton"}
    if not interprets:
        environment.pop("TRITON_INTERPRET")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert BackendUnavailable.__name__ in ended.stderr and said in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["80", "90", "100"]], ids=str)
def test_every_kernel_compiles_and_fuses_nothing(devices):
    command = [sys.executable, "-m", "tests.helpers.triton_compile", *devices]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels = json.loads(ended.stdout)["kernels"]
    assert len({name.split()[0] for name in kernels}) == 12
    loose = {name: found["loose"] for name, found in kernels.items() if found["loose"]}
    assert not loose, "denormals are kept, divisions and roots rounded correctly"
    fused = {name: found["fused"] for name, found in kernels.items() if found["fused"]}
    assert not fused, "products must be rounded before they are added"
    wide = [found["wide"] for name, found in kernels.items() if name.startswith("accumulate") and "ALIGNED=1" in name]
    assert min(wide) >= 4, "16 bytes at a time of v and of the gradient"


def test_where_triton_cannot_run_the_log_says_why_and_torch_does_it(monkeypatch, caplog):
    def missing(device, threads):
        raise BackendUnavailable("not installed")

    monkeypatch.setitem(registry.BACKENDS, "triton", missing)
    monkeypatch.setitem(registry.BACKENDS, "torch_eager", lambda device, threads: f"torch on {device}")
    registry._say_once.cache_clear()
    assert [registry.choose("cuda:0") for _ in range(2)] == ["torch on cuda:0"] * 2
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "torch_eager kernels" in said[0] and "triton: not installed" in said[0]
