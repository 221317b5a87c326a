"""Activation without edits, in processes of their own: what is replaced, when, and what children see of it."""

from __future__ import annotations

import os
import sys

import pytest

from dgc_horovod.launch.site import FOLDER
from tests.helpers.jobs import run

A_RANK = {"SLURM_PROCID": "0", "DGC_COMPRESSION": "dgc", "DGC_ALLOW_INACTIVE": "1"}
IS_OURS = "hasattr(hvd.DistributedOptimizer, '__wrapped__')"


def python(code: str, *flags: str, **environment: str | None):
    """What a Python prints, by line."""
    finished = run([sys.executable, *flags, "-c", code], 60, {"PYTHONPATH": FOLDER, **A_RANK, **environment})
    assert finished.code == 0, finished.output
    return [
        line for line in finished.output.splitlines() if "absl" not in line and "port.cc" not in line
    ]  # TensorFlow's


@pytest.mark.parametrize(
    ("path", "left"),
    [
        (FOLDER, None),
        pytest.param(f"{FOLDER}{os.pathsep}{FOLDER}", None, marks=pytest.mark.slow),
        pytest.param(f"{FOLDER}/{os.pathsep}/some/where", "/some/where", marks=pytest.mark.slow),
        (f"{os.pathsep}{FOLDER}{os.pathsep}/a{os.pathsep}{FOLDER}{os.pathsep}/b", f"{os.pathsep}/a{os.pathsep}/b"),
    ],
)
def test_pythonpath_is_clean_once_horovod_is_imported(path, left):
    code = f"""
import os, sys
before = os.environ["PYTHONPATH"]
import horovod.torch as hvd
ours_on_path = any(entry.rstrip("/").endswith("launch/site") for entry in sys.path)
print(before, os.environ.get("PYTHONPATH"), {IS_OURS}, ours_on_path)
"""
    assert python(code, PYTHONPATH=path) == [f"{path} {left} True False"]


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": None},
        {"DGC_ENABLED": "0"},
        *(pytest.param({name: None}, marks=pytest.mark.slow) for name in ("PYTHONPATH", "DGC_COMPRESSION")),
    ],
    ids=str,
)
def test_stock_horovod_where_it_is_not_wanted(environment):
    code = f"import horovod.torch as hvd, sys; print({IS_OURS}, 'dgc_horovod.torch' in sys.modules)"
    assert python(code, **environment) == ["False False"]


def test_every_name_of_the_torch_optimizer_is_replaced():
    code = """
import inspect
from horovod.torch.optimizer import DistributedOptimizer
import horovod.torch as hvd, horovod.torch.mpi_ops as ops
stock = inspect.unwrap(hvd.DistributedOptimizer)
print(DistributedOptimizer is hvd.DistributedOptimizer, stock is not DistributedOptimizer, hvd.init is ops.init)
print(DistributedOptimizer.__module__, inspect.signature(DistributedOptimizer) == inspect.signature(stock))
"""
    assert python(code) == ["True True True", "horovod.torch.optimizer True"]


@pytest.mark.slow
def test_keras_names():
    code = """
import horovod.tensorflow as hvd, horovod.keras as k, horovod.tensorflow.keras as tk
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
from dgc_horovod.tensorflow import broadcast_variables
from dgc_horovod.tensorflow.keras import callbacks, elastic
for module in (k, tk):
    print(hasattr(module.DistributedOptimizer, "__wrapped__"), module.elastic.KerasState is elastic.KerasState,
          all(getattr(module.callbacks, n) is getattr(callbacks, n) for n in callbacks.__all__))
print(MetricAverageCallback is callbacks.MetricAverageCallback, hvd.DistributedGradientTape.__wrapped__ is not None)
print(hvd.broadcast_variables.__module__, hvd.init is tk.init is k.init)
"""
    assert python(code) == ["True True True"] * 2 + ["True True", "horovod.tensorflow.functions True"]


def test_what_is_made_in_the_arguments_of_a_call():
    """Python takes `model.compile` and `tf.clip_by_norm` before it makes their arguments: they must be ours by then."""
    code = """
import horovod.tensorflow as hvd, horovod.tensorflow.keras as hvd_keras, tensorflow as tf
hvd.init()
keras = tf.keras
keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=None)
print(hasattr(model.optimizer, "compression_stats"), model.jit_compile)
variable = tf.Variable(tf.ones((40, 50)))
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(variable)
try:
    tf.clip_by_global_norm(hvd.DistributedGradientTape(tape).gradient(loss, [variable]), 1.0)
except RuntimeError as error:
    print("clip_norm=" in str(error))
"""
    said = python(code)
    assert "True False" in said and "True" in said


def test_a_launcher_that_never_imports_horovod_passes_it_on():
    inner = f"import horovod.torch as hvd; print({IS_OURS})"
    code = f"""
import os, subprocess, sys
inner = {inner!r}
subprocess.run([sys.executable, "-c", inner], check=True)
subprocess.run(["bash", "-c", f'exec "$0" -c "$1"', sys.executable, inner], check=True)
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, "-c", inner])
"""
    assert python(code) == ["True"] * 3


def test_children_of_a_rank_are_stock_and_load_nothing():
    inner = "import sys; print([m for m in sys.modules if m.startswith('dgc')], 'sitecustomize' in sys.modules)"
    code = f"import subprocess, sys, horovod.torch; subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
    assert python(code) == ["[] False"]


def test_another_sitecustomize_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.other = __file__")
    code = (
        f"import sys; import horovod.torch as hvd; print(sys.other, sys.modules['sitecustomize'].__file__, {IS_OURS})"
    )
    expected = str(tmp_path / "sitecustomize.py")
    path = f"{FOLDER}{os.pathsep}{tmp_path}"
    assert python(code, PYTHONPATH=path) == [f"{expected} {expected} True"]
    assert python(code.replace("True", "False"), PYTHONPATH=path, SLURM_PROCID=None) == [f"{expected} {expected} False"]


def test_activating_twice_is_once():
    code = """
import horovod.torch as hvd, torch
from dgc_horovod.launch import activate
names = lambda: (hvd.DistributedOptimizer, hvd.optimizer.DistributedOptimizer, hvd.init, hvd.mpi_ops.init,
                 torch.amp.GradScaler.scale)
before = names()
activate.activate(); once = names(); activate.activate(); twice = names()
print(all(a is not b for a, b in zip(before, once)), once == twice)
"""
    assert python(code, PYTHONPATH=None) == ["True True"]


def test_a_python_without_dgc_horovod_says_so():
    code = """
import sys
sys.modules["dgc_horovod"] = None  # as if it were not installed
try:
    import horovod.torch
except ImportError as error:
    print(error)
"""
    (said,) = python(code)
    assert f"{sys.executable} cannot import dgc_horovod" in said and "DGC_ENABLED=0" in said


def test_wrong_settings_stop_the_import():
    finished = run(
        [sys.executable, "-c", "import horovod.torch"], 60, {"PYTHONPATH": FOLDER, **A_RANK, "DGC_DENSITY": "2"}
    )
    assert finished.code == 1 and "ConfigError: environment DGC_DENSITY: density must be in (0, 1]" in finished.output


def test_a_file_for_everyone(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("compression: {method: gaussian, density: 0.02, timeout: 7}")
    code = (
        "import horovod.torch; from dgc_horovod import envvars; from dgc_horovod.launch import activate; "
        "job = activate.our_hook().outcome.job; print(job.method, job.config.density, envvars.timeout_seconds())"
    )
    settings = {"DGC_CONFIG_FILE": str(path), "DGC_COMPRESSION": None, "DGC_TIMEOUT": None}
    assert python(code, **settings) == ["gaussian 0.02 7.0"]


@pytest.mark.slow
def test_switched_off_no_file_is_read():
    """It had been decided after the file for everyone was read."""
    code = (
        f"import horovod.torch as hvd; from dgc_horovod.launch import activate; activate.activate(); print({IS_OURS})"
    )
    assert python(code, DGC_ENABLED="off", DGC_CONFIG_FILE="/nowhere.yaml", PYTHONPATH=None) == ["False"]


@pytest.mark.parametrize(
    "module", ["torch", *(pytest.param(f"tensorflow{part}", marks=pytest.mark.slow) for part in ("", ".keras"))]
)
def test_a_script_that_imports_our_adapter_first(module):
    code = f"import dgc_horovod.{module}, horovod.{module} as hvd; print({IS_OURS})"
    assert python(code) == ["True"]


def test_two_folders_of_ours_are_one(tmp_path):
    """As where dgcrun comes from one environment and the job's Python from another."""
    site = tmp_path / "dgc_horovod" / "launch" / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(open(os.path.join(FOLDER, "sitecustomize.py")).read())
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.other = True")
    code = """
import sys
print(sys.other, sum(getattr(finder, "is_dgc_hook", False) for finder in sys.meta_path))
"""
    assert python(code, PYTHONPATH=os.pathsep.join([str(site), FOLDER, str(tmp_path)])) == ["True 1"]
