"""Every setting that comes from outside, once: its environment variable, its flag, its key in a config file.

No other file of the package reads ``os.environ``, but for two that run before it can be imported
(``launch/build_horovod.py``, ``launch/site/sitecustomize.py``). `dgcrun`'s flags, the keys of a ``compression:``
section and docs/environment.md all follow from `ALL`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from dgc_horovod.compression import PRESETS
from dgc_horovod.config import (
    DENSE_VALUES,
    EXCHANGES,
    MOMENTUM_DTYPES,
    ON_MISMATCH,
    ON_NONFINITE,
    SCOPES,
    VALUES,
    check_choice,
    check_whole,
)
from dgc_horovod.errors import ConfigError, nearest
from dgc_horovod.rules import RULES

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_SWITCH = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?0*\d{1,3})?", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)  # of ranks, as launchers write them
_MOST_WHOLE, _MOST_SECONDS = 2**63, 1e9  # torch.distributed's own timeout overflows not far above
OF_METHOD = "of the method"
ACTIVATED, EVERYWHERE = "activated", "everywhere"  # where a variable acts; docs/environment.md explains the words


def _switch(text: str) -> bool:
    return _SWITCH[text.lower()]


def number(text: str) -> float:
    """A finite number in ASCII digits: ``12``, ``-0.5``, ``1e-3``. Raises ValueError for anything else."""
    if not math.isfinite(value := float(_exactly(text))):
        raise ValueError
    return value


def _exactly(text: str) -> Decimal:
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError
    return Decimal(text.strip())


def _seconds(text: str) -> float:
    if not 0 < (value := number(text)) <= _MOST_SECONDS:
        raise ValueError
    return value


def _whole(text: str, unit: int = 1) -> int:
    value = _exactly(text) * unit
    if not (abs(value) < _MOST_WHOLE and value == int(value)):
        raise ValueError
    return int(value)


def _size(text: str) -> int:
    amount = text.upper().removesuffix("B")
    unit = amount[-1:] if amount[-1:] in _UNITS else ""
    return _whole(amount.removesuffix(unit), _UNITS[unit])


def can_carry(text: str) -> bool:
    """Whether a variable of the environment, a command line or the name of a file can be `text`."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return False


def _text(text: str) -> str:
    if not can_carry(text):
        raise ValueError
    return text


CARRIED = "without NUL and without lone surrogates"


# How a kind of value is read, what a flag's help calls it, and what a message says of it.
_KINDS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "number": (number, "X", "a number"),
    "seconds": (_seconds, "S", "a positive number of seconds, at most 1e9"),
    "whole": (_whole, "N", "a whole number below 2^63"),
    "size": (_size, "BYTES", "a whole number of bytes below 2^63, such as 2MB or 500kB"),
    "switch": (_switch, "on|off", "on or off (1/0, true/false, yes/no)"),
    "text": (_text, "TEXT", f"a text {CARRIED}"),
    "path": (_text, "PATH", f"a path {CARRIED}"),
}


@dataclass(frozen=True)
class EnvironmentVariable:
    """One setting.

    Args:
        name: name of the environment variable, ``DGC_...``.
        default: default text, as a user would write it; "" for none.
        meaning: one line on what it does, with unit and range.
        kind: kind of the value: "number", "seconds", "whole", "size", "switch", "text" or "path".
        group: heading that it stands under in ``dgcrun --help`` and docs/environment.md.
        flag: flag of dgcrun; "" for none.
        field: field of DGCConfig, or of WarmupSchedule as "warmup.FIELD"; "" for none.
        choices: allowed texts, where there are few.
        acts: scripts in which it acts, ``ACTIVATED`` or ``EVERYWHERE``.
    """

    name: str
    default: str
    meaning: str
    kind: str = "text"
    group: str = "running"
    flag: str = ""
    field: str = ""
    choices: tuple[str, ...] = ()
    acts: str = ACTIVATED

    @property
    def key(self) -> str:
        """Its name in the ``compression:`` section of a config file."""
        return "method" if self.name == "DGC_COMPRESSION" else self.name.removeprefix("DGC_").lower()

    @property
    def metavar(self) -> str:
        """What stands behind its flag in a help text."""
        return self.key.split("_")[-1].upper() if self.choices else _KINDS[self.kind][1]

    @property
    def explained(self) -> str:
        """Its meaning, with the choices."""
        return f"{self.meaning}: {', '.join(self.choices)}" if self.choices else self.meaning

    def read(self) -> str:
        """The value set in the environment, or the default."""
        return os.environ.get(self.name) or self.default

    def parse(self, text: str, source: str = "") -> Any:
        """`text` as a value; None for "none" where there is no default.

        Raises:
            ConfigError: it is not of the kind, or none of the choices; the message names `source`.
        """
        if self.choices:
            check_choice(f"{source or self.name}: {self.key}", text, self.choices)
            return text
        if text.lower() == "none" and not self.default:
            return None
        try:
            return _KINDS[self.kind][0](text)
        except (KeyError, ValueError):
            where = source or self.name
            raise ConfigError(f"{where}: {self.key} must be {_KINDS[self.kind][2]}, got {text!r}") from None


METHODS = ("none", "fp16", *PRESETS)


_FLAGS = {"density": "--density", "max_bytes_per_step": "--dgc-budget"}


def _field(field: str, default: str, meaning: str, kind: str, group: str, **more: Any) -> EnvironmentVariable:
    key = field.replace(".", "_")
    flag = _FLAGS.get(key, f"--dgc-{key.replace('_', '-')}")
    return EnvironmentVariable(f"DGC_{key.upper()}", default, meaning, kind, group, flag, field, **more)


_WHAT, _WHEN, _WIRE, _RUN = "what is sent", "over the run: density warm-up, local steps", "how it travels", "running"
COMPRESSION = EnvironmentVariable(
    "DGC_COMPRESSION", "", "how", "text", _WHAT, "--compression",
    choices=METHODS,
)  # fmt: skip
OF_METHODS = (_WHAT, _WHEN)  # the groups of what is chosen for a method; the others are a matter of the cluster
LOCAL_STEPS = _field("local_steps", "", "local steps: steps of each rank between two exchanges", "whole", _WHEN)
NODE_SIZE = _field("node_size", "", "workers of a node, averaged densely; not given: those of a host", "whole", _WIRE)
FIELDS = (
    _field("density", "0.001", "fraction of elements sent, in (0, 1]", "number", _WHAT),
    _field("rule", OF_METHOD, "selection rule", "text", _WHAT, choices=tuple(RULES)),
    _field("scope", "bucket", "the largest of each bucket, or of each tensor", "text", _WHAT, choices=SCOPES),
    _field("momentum_correction", OF_METHOD, "momentum goes before selection (DGC 3.1)", "switch", _WHAT),
    _field("momentum_dtype", "fp32", "number format of SGD's momentum", "text", _WHAT, choices=MOMENTUM_DTYPES),
    _field("factor_masking", OF_METHOD, "momentum is cleared where an element was sent (DGC 3.2)", "switch", _WHAT),
    _field("clip_norm", "", "L2 norm to clip the averaged gradient at, > 0", "number", _WHAT),
    _field("threshold", "", "least magnitude sent, for method threshold, > 0", "number", _WHAT),
    _field("max_density", "0.01", "most that method threshold may send, in (0, 1]", "number", _WHAT),
    _field("total_steps", "", "steps of the run: method auto takes the density from it", "whole", _WHEN),
    _field("warmup.steps", "", "length of the warm-up in steps (local steps: exchanges), >= 1", "whole", _WHEN),
    _field("warmup.epochs", "", "the same in epochs, > 0 (4 in the paper)", "number", _WHEN),
    _field("warmup.steps_per_epoch", "", "steps in an epoch, where nothing tells the epoch", "whole", _WHEN),
    _field("warmup.first_density", "0.25", "density that the warm-up begins with, in (0, 1]", "number", _WHEN),
    _field("warmup.factor", "0.25", "density of a warm-up stage over the one before, in (0, 1)", "number", _WHEN),
    LOCAL_STEPS,
    _field("local_decay", "0.95", "local steps: factor of the residual at each exchange, in (0, 1]", "number", _WHEN),
    _field("outer_rate", "1.0", "local steps: factor of the mean change, > 0", "number", _WHEN),
    _field("outer_momentum", "0.0", "local steps: Nesterov momentum, in [0, 1)", "number", _WHEN),
    _field("offload", "off", "local steps, PyTorch: residual and last weights lie in host memory", "switch", _WHEN),
    _field("values", "bf16", "number format sent", "text", _WIRE, choices=VALUES),
    _field("dense_values", "auto", "of small tensors, sent whole", "text", _WIRE, choices=DENSE_VALUES),
    _field("exchange", "flat", "algorithm", "text", _WIRE, choices=EXCHANGES),
    NODE_SIZE,
    _field("max_bytes_per_step", "", "most that a network card receives a step: lowers the density", "size", _WIRE),
    _field("min_numel", "1024", "tensors of fewer elements are sent whole, >= 1", "whole", _WIRE),
    _field("compress_1d", "off", "compress biases and norms too", "switch", _WIRE),
    _field("bucket_bytes", "67108864", "bytes of gradient that are exchanged together, >= 1", "whole", _WIRE),
    _field("seed", "0", "seed of rules that draw at random, >= 0", "whole", _WIRE),
    _field("check_every", "100", "steps between comparisons of the ranks' weights, 0: never", "whole", _RUN),
    _field("on_mismatch", "stop", "if the ranks' weights differ", "text", _RUN, choices=ON_MISMATCH),
    _field("on_nonfinite", "skip", "if a gradient is NaN or infinite", "text", _RUN, choices=ON_NONFINITE),
    _field("max_skipped", "100", "steps skipped in a row before every rank stops, 0: never", "whole", _RUN),
)
TIMEOUT = EnvironmentVariable(
    "DGC_TIMEOUT", "120", "seconds a rank waits for the others before it gives up", "seconds", flag="--dgc-timeout",
    acts=EVERYWHERE,
)  # fmt: skip
BACKEND = EnvironmentVariable(
    "DGC_BACKEND", "auto", "kernel backend",
    flag="--dgc-backend", choices=("auto", "native", "triton", "torch_eager", "reference"), acts=EVERYWHERE,
)  # fmt: skip
CUDA_GRAPHS = EnvironmentVariable(
    "DGC_CUDA_GRAPHS", "on", "off: kernels of a GPU are launched one by one, not recorded", "switch", acts=EVERYWHERE
)
METRICS_FILE = EnvironmentVariable(
    "DGC_METRICS_FILE", "", "rank 0's counters: JSON lines, *.prom, */ for TensorBoard, mlflow:NAME", "path",
    flag="--dgc-metrics-file", acts=EVERYWHERE,
)  # fmt: skip
ALLOW_INACTIVE = EnvironmentVariable(
    "DGC_ALLOW_INACTIVE", "off", "exit code 0 although nothing was compressed", "switch", flag="--allow-inactive"
)
ENABLED = EnvironmentVariable(
    "DGC_ENABLED", "on", "off: nothing is activated; scripts that compress by themselves still do", "switch"
)
CONFIG_FILE = EnvironmentVariable(
    "DGC_CONFIG_FILE", "", "a config file for everyone; what a job sets itself goes before it", "path"
)
STATUS_SERVER = EnvironmentVariable(
    "DGC_STATUS_SERVER", "", "where ranks report to their launcher; set by dgcrun", "text", "set by dgcrun"
)
STATUS_KEY = EnvironmentVariable(
    "DGC_STATUS_KEY", "", "with which they may; set by dgcrun, and on no command line", "text", "set by dgcrun"
)
HOSTS = EnvironmentVariable("DGC_HOSTS", "", "the hosts, in rank order; set by dgcrun", "text", "set by dgcrun")
SETTABLE = (COMPRESSION, *FIELDS, TIMEOUT, BACKEND, METRICS_FILE, ALLOW_INACTIVE)  # by flag and config file too
ALL = (*SETTABLE, CUDA_GRAPHS, ENABLED, CONFIG_FILE, STATUS_SERVER, STATUS_KEY, HOSTS)


def from_environment() -> dict[str, str]:
    """What is set of `ALL`, by name; an empty text counts as not set."""
    return {variable.name: os.environ[variable.name] for variable in ALL if os.environ.get(variable.name)}


def is_off(given: Mapping[str, str]) -> bool:
    """Whether ``DGC_ENABLED`` among these texts says so, before which nothing else is looked at.

    Raises:
        ConfigError: it is neither on nor off.
    """
    text = given.get(ENABLED.name, "")
    return bool(text) and not ENABLED.parse(text)


def unknown() -> dict[str, str]:
    """Names in the environment that look like ours and are not, with the nearest that is, or ""."""
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


def environment() -> dict[str, str]:
    """A copy of the whole environment, for a child."""
    return dict(os.environ)


def desk_address() -> str:
    """``KEY@ADDRESS,ADDRESS:PORT`` of `dgcrun`; "" if it has not started this rank."""
    return f"{STATUS_KEY.read()}@{STATUS_SERVER.read()}" if STATUS_SERVER.read() else ""


def store_addresses() -> list[str]:
    """Key-value stores that this rank may report to: that of `dgcrun`, and that of Horovod's Gloo launcher."""
    host, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}") for part in ("ADDR", "PORT"))
    return [*([desk_address()] if desk_address() else []), *([f"dgc@{host}:{port}"] if host and port else [])]


def warn_of_stalls_within(seconds: float) -> None:
    """Let Horovod name the ranks that a collective waits for, within `seconds`, unless the user has set a time."""
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, int(min(60, seconds)))))


def horovod_elastic() -> bool:
    """Whether this process was started by Horovod's elastic launcher."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def torchrun_place() -> tuple[int, int, int]:
    """Index among the ranks of this host, their number, and the host's index, as torchrun says; else alone on one."""
    texts = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    if not all(map(_COUNT.fullmatch, texts)):
        rank = os.environ.get("RANK", "")
        return 0, 1, int(rank) if _COUNT.fullmatch(rank) else 0
    local_rank, local_size, host = map(int, texts)
    return local_rank, local_size, host


def launched_workers() -> int:
    """How many ranks the launcher has started; 0 where it does not say."""
    names = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")
    text = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    return int(text) if _COUNT.fullmatch(text) else 0


def node_size() -> int:
    """DGC_NODE_SIZE, which `dgcrun` sets where hosts have equally many ranks; 0 where it is not set.

    Raises:
        ConfigError: it is no whole number of at least 1.
    """
    found = NODE_SIZE.parse(NODE_SIZE.read() or "none")
    if found is not None:
        check_whole(NODE_SIZE.name, found, 1)
    return found or 0


def cuda_graphs() -> bool:
    """DGC_CUDA_GRAPHS: whether a step's kernels may be recorded."""
    return bool(CUDA_GRAPHS.parse(CUDA_GRAPHS.read()))


def dynamic_process_sets() -> bool:
    """Whether the script adds process sets after ``hvd.init()``."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")


def horovod_autotune() -> bool:
    """Whether Horovod tunes its own parameters, the response cache among them."""
    return os.environ.get("HOROVOD_AUTOTUNE") == "1"


def checkpoint_seconds() -> float:
    """How long a rank waits for others that write or read files: fifteen times `timeout_seconds`."""
    return 15 * timeout_seconds()


def timeout_seconds() -> float:
    """``DGC_TIMEOUT`` as a positive number of seconds.

    Raises:
        ConfigError: it is not a positive number, or above 1e9.
    """
    return TIMEOUT.parse(TIMEOUT.read())
