"""Scripts that know nothing of dgc_horovod, on real ranks, launched in every way that switches compression on."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

from tests.helpers.jobs import ROOT, child_environment, kill_tree, run
from tests.helpers.launchers import built_controllers

TORCH = [sys.executable, "examples/unmodified_torch.py", "--epochs", "3"]
KERAS = [sys.executable, "examples/unmodified_keras.py", "--epochs", "2"]
DGC = ["--dgc", "--density", "0.01"]
MPI = ["--mpi", "--mpi-args=--oversubscribe --allow-run-as-root"]
CONTROLLERS = {"gloo": ["--gloo"], "mpi": MPI}
NEVER = "no rank has called hvd.init"
NO_OPTIMIZER = "import horovod.torch as hvd; hvd.init(); print('rank', hvd.rank())"
# An optimizer is wrapped, and the model is compiled with the one inside, or only evaluated.
UNUSED = """
import sys, keras, numpy as np, horovod.tensorflow.keras as hvd
hvd.init()
model, x = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)]), np.zeros((32, 64), "float32")
optimizer = keras.optimizers.SGD(0.01)
model.compile(hvd.DistributedOptimizer(optimizer), "mse")
model.evaluate(x, x, verbose=0)
if hvd.size() > 1:
    model.compile(optimizer, "mse")
    model.fit(x, x, verbose=0)
"""
# As a script that resets PYTHONPATH on one rank only.
HALF = 'if [ "$HOROVOD_RANK$OMPI_COMM_WORLD_RANK" = 1 ]; then unset PYTHONPATH; fi; exec '


def dgcrun(*words: str, controller: str = "gloo", workers: int = 2, **environment: str | None):
    if controller not in built_controllers():
        pytest.skip(f"this Horovod was built without {controller}")
    return run(["dgcrun", *CONTROLLERS[controller], "-np", str(workers), *words], 180, environment)


def summary(output: str) -> dict[str, float]:
    """The figures of the one summary line."""
    (found,) = re.findall(r"dgc_horovod: \w+, density (\S+): (\S+) steps; .*? (\S+)x less than fp32 (.*)", output)
    half = re.search(r"(\S+)x less than the fp16", found[3])
    figures = {"density": float(found[0]), "steps": int(found[1]), "ratio": float(found[2])}
    return {**figures, **({"half": float(half[1])} if half else {})}


def weights(folder, kind):
    """Of rank 0 and of rank 1, as lists of arrays."""
    if kind == "torch":
        return [[w.numpy() for w in torch.load(folder / f"w.{rank}").values()] for rank in (0, 1)]
    return [list(np.load(folder / f"w.{rank}.npz").values()) for rank in (0, 1)]


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_torch_script_as_it_is(tmp_path, controller):
    options = ["--fp16-allreduce", "--clip", "0.5", "--save", str(tmp_path / "w")]
    code, output = dgcrun(*DGC, "--dgc-clip-norm", "0.5", *TORCH, *options, controller=controller)
    assert code == 0, output
    figures = summary(output)
    # 28 bits an element at 1% and 0.6% of the elements in 8 bits: 90-130 times less, and half of it than fp16
    assert figures["steps"] == 54 and 0.009 < figures["density"] < 0.011 and 80 < figures["ratio"] < 140
    assert figures["half"] == pytest.approx(figures["ratio"] / 2, rel=0.02)
    first, second = weights(tmp_path, "torch")
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)) and "p.grad was changed" not in output


@pytest.mark.slow
def test_owners_and_a_budget_by_flag():
    """The first line says who exchanges with whom and what a card receives, the last the density that came of it."""
    flags = ["--dgc-exchange", "sharded", "--dgc-budget", "4kB"]
    code, output = dgcrun(*DGC, *flags, *TORCH, workers=4)
    assert code == 0 and "sharded: every element has a shard owner" in output, output
    received, density = re.search(
        r"a network card receives (\S+) kB a step, budget 4 kB, at density (\S+)\n", output
    ).groups()
    assert 3.8 < float(received) <= 4 and 0.0001 < float(density) < 0.01
    assert summary(output)["density"] == pytest.approx(float(density), rel=0.05) and "in the end" not in output


@pytest.mark.slow  # with dgc: a command of docs/guide.md, which CI runs
@pytest.mark.parametrize("method", ["dgc", "none", "fp16"])
def test_a_keras_script_as_it_is(tmp_path, method):
    flags = DGC if method == "dgc" else ["--compression", method]
    code, output = dgcrun(*flags, *KERAS, "--save", str(tmp_path / "w"))
    assert code == 0, output
    first, second = weights(tmp_path, "keras")
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    (line,) = [line for line in output.splitlines() if f"dgc_horovod: {method}" in line]
    ratio = float(re.search(r"(\S+)x less than fp32", line)[1])
    assert 80 < ratio < 140 if method == "dgc" else ratio == {"none": 1, "fp16": 2}[method]


def test_plain_horovodrun_is_untouched(tmp_path):
    """An installed dgc_horovod changes nothing: no name of Horovod's, no module of ours, the bits of a dense run."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "import horovod.torch as hvd; ours = [m for m in sys.modules if m.startswith('dgc_horovod.')]; "
        "print('found', hasattr(hvd.DistributedOptimizer, '__wrapped__'), ours)"
    )
    command = ["horovodrun", "--gloo", "-np", "2", sys.executable, "-c", code, *TORCH[1:], "--save", f"{tmp_path}/w"]
    finished = run(command, 120)
    assert finished.output.count("found False []") == 2, finished.output
    stock = weights(tmp_path, "torch")[0]
    assert finished.code == 0 and "dgc_horovod" not in finished.output
    code, output = dgcrun(*DGC, *TORCH, "--save", str(tmp_path / "w"), DGC_ENABLED="0")
    assert code == 0 and "DGC_ENABLED is off: stock Horovod" in output
    assert all(np.array_equal(a, b) for a, b in zip(stock, weights(tmp_path, "torch")[0], strict=True))


def test_a_config_file_and_a_metrics_file(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        f"controller: gloo\nparams: {{cycle_time_ms: 2}}\n"
        f"compression: {{method: gaussian, density: 0.02, metrics_file: {tmp_path}/metrics.jsonl}}\n"
    )
    code = "import os; print('cycle', os.environ['HOROVOD_CYCLE_TIME']); import runpy, sys; sys.argv = sys.argv[1:]; " \
        "runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip
    command = [
        "dgcrun", "-np", "2", "--config-file", str(job), "--density", "0.01", sys.executable, "-c", code, *TORCH[1:],
    ]  # fmt: skip
    finished = run(command, 120, {"http_proxy": "http://127.0.0.1:9"})  # which is not asked for the status server
    assert finished.code == 0 and finished.output.count("cycle 2") == 2, finished.output
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["final"] for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert last["method"] == "gaussian" and last["steps"] == 54 and 0.007 < last["selected"] / last["elements"] < 0.0105
    assert 0 < last["bytes_sent"] < last["bytes_dense"] / 80


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shell script", "module", "console script"])
def test_however_python_is_started(tmp_path, how):
    (tmp_path / "train_package").mkdir()
    (tmp_path / "train_package" / "__main__.py").write_text((ROOT / "examples" / "unmodified_torch.py").read_text())
    script = tmp_path / "run.sh"
    script.write_text(f"cd {ROOT}\n{shlex.join(TORCH)}\n")
    console = tmp_path / "train"
    console.write_text(f"#!{sys.executable}\n" + (ROOT / "examples" / "unmodified_torch.py").read_text())
    console.chmod(0o755)
    commands = {
        "shell script": ["bash", str(script)],
        "module": [sys.executable, "-m", "train_package", *TORCH[2:]],
        "console script": [str(console), *TORCH[2:]],
    }
    code, output = dgcrun(*DGC, *commands[how], PYTHONPATH=str(tmp_path))
    assert code == 0 and summary(output)["steps"] == 54, output


def test_exports_make_plain_launchers_compress(tmp_path):
    exports = run(["dgcrun", *DGC, "--print-env"], 60).output
    assert "export DGC_COMPRESSION=dgc\n" in exports and "export DGC_DENSITY=0.01\n" in exports
    launchers = [f"horovodrun --gloo -np 2 {shlex.join(TORCH)}"]
    if "mpi" in built_controllers():
        names = " ".join(f"-x {name}" for name in re.findall(r"export (\w+)=", exports))
        launchers.append(f"mpirun -np 2 --oversubscribe --allow-run-as-root {names} {shlex.join(TORCH)}")
    for launcher in launchers:
        finished = run(["bash", "-c", f"{exports}\n{launcher}"], 120)
        assert finished.code == 0 and summary(finished.output)["steps"] == 54, finished.output


# -- fail closed


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_rank_that_is_not_active_stops_every_rank(controller):
    start = time.monotonic()
    code, output = dgcrun(*DGC, "bash", "-c", HALF + shlex.join(TORCH), controller=controller, DGC_TIMEOUT="5")
    assert code != 0 and "accuracy" not in output
    (said,) = re.findall(r"NotActivated: (.*)", output)
    assert "not active on rank 1 (localhost) of 2 ranks" in said and "PYTHONPATH" in said
    assert time.monotonic() - start < 90


@pytest.mark.slow
def test_without_a_store_horovod_names_the_missing_ranks():
    if "mpi" not in built_controllers():
        pytest.skip("this Horovod was built without mpi")
    exports = run(["dgcrun", *DGC, "--print-env"], 60).output
    names = " ".join(f"-x {name}" for name in [*re.findall(r"export (\w+)=", exports), "DGC_TIMEOUT"])
    launcher = (
        f"mpirun -np 2 --oversubscribe --allow-run-as-root {names} bash -c {shlex.quote(HALF + shlex.join(TORCH))}"
    )
    finished = run(["bash", "-c", f"{exports}\n{launcher}"], 120, {"DGC_TIMEOUT": "10"})
    assert finished.code != 0 and "accuracy" not in finished.output
    assert (
        "Missing ranks:" in finished.output and "\n1: [" in finished.output and "CollectiveTimeout" in finished.output
    )


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(["bash", "-c", f"unset PYTHONPATH; exec {shlex.join(TORCH)}"], NEVER, marks=pytest.mark.slow),
        ([sys.executable, "-c", "print('no Horovod here')"], NEVER),
        ([sys.executable, "-c", NO_OPTIMIZER], "has made no DistributedOptimizer"),
        ([sys.executable, "-c", UNUSED], "has exchanged nothing: the script has made no step with what that has ret"),
    ],
    ids=["reset", "no Horovod", "no optimizer", "not used"],
)
def test_what_is_not_compressed_is_said_and_fails(command, reason):
    code, output = dgcrun(*DGC, *command)
    assert code == 3 and output.count("NOT ACTIVE") == 1 and reason in output, output


@pytest.mark.slow
def test_nothing_large_enough_is_not_active():
    code, output = dgcrun(*DGC, "--dgc-min-numel", "1000000", *TORCH)
    assert code == 3 and "every tensor is 1-D or has fewer than min_numel=1000000 elements" in output


def test_a_rank_that_leaves_without_exit_handlers():
    script = "import os, torch, horovod.torch as hvd; hvd.init(); m = torch.nn.Linear(99, 99); "
    script += "hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 1), m.named_parameters()); os._exit(0)"
    found = dgcrun(*DGC, sys.executable, "-c", script, workers=1)
    assert found.code == 0 and "no summary" in found.output, found.output


def test_a_metrics_file_that_breaks_takes_nothing_with_it(tmp_path):
    path = tmp_path / "metrics"
    script = f"import os, horovod.torch as hvd; hvd.init(); os.remove({str(path)!r}); os.mkdir({str(path)!r})"
    code, output = dgcrun(*DGC, "--dgc-metrics-file", str(path), sys.executable, "-c", script, workers=1)
    assert code == 3 and "cannot be written any more" in output and output.count("NOT ACTIVE") == 1, output


@pytest.mark.slow
def test_an_unreachable_desk_is_said():
    """Over Gloo the ranks also report to Horovod's own store: the job runs, and only the last word is missing."""
    code, output = dgcrun(*DGC, "--allow-inactive", "env", "DGC_STATUS_SERVER=127.0.0.1:9", *TORCH)
    assert code == 0 and "dgcrun cannot be reached at 127.0.0.1:9" in output and summary(output)["steps"] == 54, output
    assert "can reach port" in output


def test_the_rest_of_pythonpath_stays_as_it_is(tmp_path):
    """An empty part means the current folder, for scripts in other folders."""
    code = "import os; print('path', [p for p in os.environ['PYTHONPATH'].split(':')][-2:])"
    _, output = dgcrun(*DGC, sys.executable, "-c", code, workers=1, PYTHONPATH=":/foo")
    assert "path ['', '/foo']" in output, output


def test_a_script_that_fails_is_left_alone():
    code, output = dgcrun(*DGC, sys.executable, "-c", NO_OPTIMIZER + "; raise ValueError('of the script')", workers=1)
    assert code == 1 and "of the script" in output and "NOT ACTIVE" not in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-np", "2", "--density", "7", *TORCH], r"density must be in \(0, 1\], got 7"),
        (["-np", "2", "--dgc"], "no command was given"),
        (["-np", "2", "--dgc", "/usr/bin/env", "python0.0", "x.py"], "nothing was started"),
    ],
)
def test_errors_before_anything_is_started(words, said):
    finished = run(["dgcrun", *words], 60)
    assert finished.code == 2 and re.search(said, finished.output) and "Traceback" not in finished.output, (
        finished.output
    )


def test_whoever_reads_its_output_may_stop():
    """`dgcrun --show-config | head -1` had ended in a traceback."""
    finished = run(["bash", "-c", "dgcrun --dgc --show-config | exec true; exit ${PIPESTATUS[0]}"], 60)
    assert finished == (128 + signal.SIGPIPE, ""), finished


def test_switched_off_nothing_of_ours_is_in_the_way():
    """A config file, or --report, had stopped the job."""
    words = ["--dgc", "--density", "7", "--report", "/", sys.executable, "-c", NO_OPTIMIZER]
    code, output = dgcrun(*words, workers=1, DGC_ENABLED="0", DGC_CONFIG_FILE="/nowhere.yaml")
    assert code == 0 and "rank 0" in output and "DGC_ENABLED is off, so there will be no --report" in output, output


def start(controller: str, mark: str) -> subprocess.Popen[str]:
    """A job whose ranks say "up" and wait."""
    command = ["dgcrun", *CONTROLLERS[controller], "-np", "2", *DGC, sys.executable, "-c", mark]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=child_environment({})
    )


@pytest.mark.parametrize(
    ("controller", "number"),
    [
        ("gloo", signal.SIGINT),
        pytest.param("mpi", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("gloo", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("mpi", signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_to_dgcrun_ends_everything(controller, number):
    """As a batch system sends it; not even SIGKILL, which nobody can catch, leaves ranks behind, or what they began."""
    if controller not in built_controllers():
        pytest.skip(f"this Horovod was built without {controller}")
    mark = f"job {time.time()}"
    begins = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)', '{mark}'])"
    script = f"import subprocess, sys, time, horovod.torch as hvd; hvd.init(); {begins}; print('up', flush=True); "
    with start(controller, script + "time.sleep(100)") as process:
        try:
            assert process.stdout is not None
            while "up" not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(1)  # for both ranks to be up
            ranks = _marked(mark)
            process.send_signal(number)
            process.communicate(timeout=60)
            assert process.returncode != 0 and len(ranks) >= 2
            _, alive = psutil.wait_procs(ranks, timeout=20)
            assert not alive
        finally:
            kill_tree(process.pid)
            for rank in _marked(mark):
                rank.kill()


def _marked(mark: str) -> list[psutil.Process]:
    """Ranks, and what they have started."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(mark in word for word in p.info["cmdline"] or [])]
