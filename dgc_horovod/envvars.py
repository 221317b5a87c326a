"""The settings of a process, and the environment, which holds the value of every setting.

No other file of the package reads ``os.environ``, but for two that run before it can be imported
(``tools/build_horovod.py``, ``launch/site/sitecustomize.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgc_horovod import settings
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig, WarmupSchedule
from dgc_horovod.errors import nearest
from dgc_horovod.settings import BY_DGCRUN, EVERYWHERE, PATH, RUNNING, SECONDS, SWITCH, TEXT, WHAT, Setting, choice

_COUNT = re.compile(r"\d{1,18}", re.ASCII)  # of ranks, as launchers write them
METHODS = ("none", "fp16", *PRESETS)
_BACKENDS = ("auto", "native", "triton", "torch_eager", "reference")


def _of_config() -> Iterator[Setting]:
    for row in settings.rows_of(DGCConfig):
        if row.field == "warmup":
            yield from settings.rows_of(WarmupSchedule, "warmup.")
        elif row.group:
            yield row


COMPRESSION = Setting("method", None, "compression method", choice(METHODS), WHAT, "--compression")
FIELDS = tuple(_of_config())
NODE_SIZE, LOCAL_STEPS = (next(row for row in FIELDS if row.field == name) for name in ("node_size", "local_steps"))
TIMEOUT = Setting(
    "timeout", 120, "seconds a rank waits for the others before it raises an error", SECONDS, RUNNING, "--dgc-timeout",
    acts=EVERYWHERE,
)  # fmt: skip
BACKEND = Setting("backend", "auto", "kernel backend", choice(_BACKENDS), RUNNING, "--dgc-backend", acts=EVERYWHERE)
METRICS_FILE = Setting(
    "metrics_file", None, "rank 0's counters: JSON lines, *.prom, */ for TensorBoard, mlflow:NAME", PATH, RUNNING,
    "--dgc-metrics-file", acts=EVERYWHERE,
)  # fmt: skip
ALLOW_INACTIVE = Setting(
    "allow_inactive", False, "exit code 0 although nothing was compressed", SWITCH, RUNNING, "--allow-inactive"
)
CUDA_GRAPHS = Setting(
    "cuda_graphs", True, "off: kernels of a GPU are launched one by one, not recorded", SWITCH, acts=EVERYWHERE
)
ENABLED = Setting("enabled", True, "off: nothing is activated; scripts that compress by themselves still do", SWITCH)
CONFIG_FILE = Setting("config_file", None, "a config file for all jobs; settings of a job itself have priority", PATH)
STATUS_SERVER = Setting("status_server", None, "address to which ranks report; set by dgcrun", TEXT, BY_DGCRUN)
STATUS_KEY = Setting(
    "status_key", None, "secret of that address; set by dgcrun, and on no command line", TEXT, BY_DGCRUN
)
HOSTS = Setting("hosts", None, "the hosts, in rank order; set by dgcrun", TEXT, BY_DGCRUN)
SETTABLE = (COMPRESSION, *FIELDS, TIMEOUT, BACKEND, METRICS_FILE, ALLOW_INACTIVE)  # by flag and config file too
ALL = (*SETTABLE, CUDA_GRAPHS, ENABLED, CONFIG_FILE, STATUS_SERVER, STATUS_KEY, HOSTS)


def value(setting: Setting) -> Any:
    """The value of a setting in the environment, or its default. Raises ConfigError."""
    text = os.environ.get(setting.name)
    return setting.parse(text) if text else setting.default


def from_environment() -> dict[str, str]:
    """Return the variables of `ALL` that are set, by name; an empty text counts as not set."""
    return {variable.name: os.environ[variable.name] for variable in ALL if os.environ.get(variable.name)}


def is_off(given: Mapping[str, str]) -> bool:
    """Whether ``DGC_ENABLED`` among these texts is off; it is read before all other settings.

    Raises:
        ConfigError: it is neither on nor off.
    """
    text = given.get(ENABLED.name, "")
    return bool(text) and not ENABLED.parse(text)


def unknown() -> dict[str, str]:
    """Return unknown variables that begin with DGC_, each with the nearest known name, or ""."""
    known = [variable.name for variable in ALL]
    strangers = [name for name in os.environ if name.startswith("DGC_") and name not in known]
    return {name: nearest(name, known) for name in strangers}


def put_into_environment(values: Mapping[str, str]) -> None:
    """Set variables for this process and its children; "" removes one."""
    for name, text in values.items():
        if text:
            os.environ[name] = text
        else:
            os.environ.pop(name, None)


def put_on_path(folders: Sequence[str]) -> None:
    """Put folders before all others that Python looks for modules in, for children of this process."""
    before = os.environ.get("PYTHONPATH")  # an empty part of it means the current folder
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])


def environment() -> dict[str, str]:
    """A copy of the whole environment, for a child."""
    return dict(os.environ)


def desk_address() -> str:
    """``KEY@ADDRESS,ADDRESS:PORT`` of `dgcrun`; "" if it has not started this rank."""
    return f"{value(STATUS_KEY)}@{value(STATUS_SERVER)}" if value(STATUS_SERVER) else ""


def store_addresses() -> list[str]:
    """Key-value stores that this rank may report to: that of `dgcrun`, and that of Horovod's Gloo launcher."""
    host, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}") for part in ("ADDR", "PORT"))
    return [*([desk_address()] if desk_address() else []), *([f"dgc@{host}:{port}"] if host and port else [])]


def warn_of_stalls_within(seconds: float) -> None:
    """Set Horovod's stall check, which names missing ranks, to at most `seconds`, unless the user has set it."""
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, int(min(60, seconds)))))


def horovod_elastic() -> bool:
    """Whether this process was started by Horovod's elastic launcher."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def elastic_agent() -> bool:
    """Whether torchrun has started this process, and may start it again if it fails."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_place() -> tuple[int, int, int]:
    """Index among the ranks of this host, their number, and the host's index, as torchrun says; else alone on one."""
    texts = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    if not all(map(_COUNT.fullmatch, texts)):
        rank = os.environ.get("RANK", "")
        return 0, 1, int(rank) if _COUNT.fullmatch(rank) else 0
    local_rank, local_size, host = map(int, texts)
    return local_rank, local_size, host


def launched_workers() -> int:
    """Return the number of ranks that the launcher has started; 0 if it does not say."""
    names = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")
    text = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    return int(text) if _COUNT.fullmatch(text) else 0


def dynamic_process_sets() -> bool:
    """Whether the script adds process sets after ``hvd.init()``."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")


def horovod_autotune() -> bool:
    """Whether Horovod tunes its own parameters, the response cache among them."""
    return os.environ.get("HOROVOD_AUTOTUNE") == "1"


def checkpoint_seconds() -> float:
    """Return the seconds that a rank waits for others that write or read files: 15 times `timeout_seconds`."""
    return 15 * timeout_seconds()


def timeout_seconds() -> float:
    """``DGC_TIMEOUT`` as a positive number of seconds.

    Raises:
        ConfigError: it is not a positive number, or above 1e9.
    """
    return float(value(TIMEOUT))
