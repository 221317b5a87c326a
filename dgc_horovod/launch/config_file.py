"""``--config-file job.yaml``: Horovod's own schema, and a ``compression:`` section that is checked key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from dgc_horovod import envvars, files
from dgc_horovod.errors import ConfigError, shown, unknown
from dgc_horovod.settings import CARRIED, SWITCH, Kind, can_carry, check, choice, is_number, number

SECTION = "compression"
_MOST_BYTES, _MOST_WHOLE = 2**20, 2**63
_LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]  # Horovod's, which may not be installed
_NUMBER = Kind("", "", number, "a finite number", lambda value: is_number(value) and abs(value) < _MOST_WHOLE)
_SWITCH = Kind("", "", str, "on or off", lambda value: value in (True, False))  # 1 and 0 too
_TEXT = Kind("", "", str, f"a text {CARRIED}", lambda value: isinstance(value, str) and can_carry(value))
_EITHER = Kind("", "", str, "gloo or mpi", lambda value: isinstance(value, str) and value.lower() in ("gloo", "mpi"))
# Horovod reads these (horovod/runner/common/util/config_parser.py), ignores every other key without a word, and takes
# every value for what it should be.
HOROVOD_KEYS: dict[str, dict[str, Kind]] = {
    "params": {
        "fusion_threshold_mb": _NUMBER, "cycle_time_ms": _NUMBER, "cache_capacity": _NUMBER,
        "hierarchical_allreduce": _SWITCH, "hierarchical_allgather": _SWITCH, "torus_allreduce": _SWITCH,
    },
    "autotune": {
        "enabled": _SWITCH, "log_file": _TEXT, "warmup_samples": _NUMBER, "steps_per_sample": _NUMBER,
        "bayes_opt_max_samples": _NUMBER, "gaussian_process_noise": _NUMBER,
    },
    "timeline": {"filename": _TEXT, "mark_cycles": _SWITCH},
    "stall_check": {"enabled": _SWITCH, "warning_time_seconds": _NUMBER, "shutdown_time_seconds": _NUMBER},
    "library_options": {
        "mpi_threads_disable": _SWITCH, "num_nccl_streams": _NUMBER, "thread_affinity": _NUMBER,
        "gloo_timeout_seconds": _NUMBER,
    },
    "logging": {"level": choice(_LOG_LEVELS), "with_timestamp": _SWITCH},
}  # fmt: skip
_OFF = "none"  # the method that `compression: off` stands for
_CONTROLLER = "controller"  # of Horovod too, and no section
_VARIABLES = {variable.key: variable for variable in envvars.SETTABLE}


def load(path: str, for_everyone: bool = False) -> dict[str, str]:
    """The ``compression:`` section of a config file.

    Args:
        path: path of a YAML file; its other sections are Horovod's and are checked for unknown keys only.
        for_everyone: whether it is the file that ``DGC_CONFIG_FILE`` names, which Horovod does not read.

    Returns:
        The texts, by name of the environment variable.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has an unknown key; names file, key and nearest key.
    """
    return section_of(path, read(path), for_everyone)


def for_everyone(environment: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Path and texts of the file that ``DGC_CONFIG_FILE`` names; nothing without one, or where ``DGC_ENABLED`` is off.

    Raises:
        ConfigError: see `load`.
    """
    path = environment.get(envvars.CONFIG_FILE.name)
    return [(path, load(path, for_everyone=True))] if path and not envvars.is_off(environment) else []


def section_of(path: str, content: Mapping[str, Any], for_everyone: bool = False) -> dict[str, str]:
    """`load` of a file whose `content` has been read."""
    _check_keys(path, "", content, [_CONTROLLER, *HOROVOD_KEYS, SECTION])
    for section in (_CONTROLLER, *HOROVOD_KEYS):
        if for_everyone and section in content:
            raise ConfigError(
                f"{path}: {section} is Horovod's, which reads its sections from --config-file only; only {SECTION} may "
                f"stand in the file that {envvars.CONFIG_FILE.name} names"
            )
    if content.get(_CONTROLLER) is not None:
        check(f"{path}: {_CONTROLLER}", content[_CONTROLLER], _EITHER)
    for section, kinds in HOROVOD_KEYS.items():
        values = _section(path, section, content)
        _check_keys(path, section, values, kinds)
        for key, value in values.items():
            if value is not None:
                check(f"{path}: {section}.{key}", value, kinds[key])
    off = content.get(SECTION) is False  # YAML's off, no and false
    given = {envvars.COMPRESSION.key: _OFF} if off else _section(path, SECTION, content)
    _check_keys(path, SECTION, given, _VARIABLES)
    texts = {key: _text(path, key, value) for key, value in given.items() if value is not None}
    return {_VARIABLES[key].name: text for key, text in texts.items()}


class _NoDoubles(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in keys.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read(path: str) -> Mapping[str, Any]:
    """What stands in a config file.

    Raises:
        ConfigError: it cannot be read, is no YAML of plain values, or no mapping; names the file.
    """
    try:
        data = files.read(path, _MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES} bytes")
        text = data.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    try:
        content = yaml.load(text, _NoDoubles)
    except Exception as error:  # a value that its tag cannot have, or one too deep, is any kind of error
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if content is None:
        raise ConfigError(f"config file {path} is empty; give it a section, e.g. {SECTION}: {{density: 0.001}}")
    return _mapping(path, "the file", content)


def _section(path: str, name: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section of a file; one that is not there, or has nothing behind its name, is empty."""
    found = content.get(name)
    return {} if found is None else _mapping(path, name, found)


def _mapping(path: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        hint = "; e.g. compression: {method: dgc}, or compression: off" if name == SECTION else ""
        raise ConfigError(f"{path}: {name} must be a mapping of keys to values, got {shown(value)}{hint}")
    return value


def _check_keys(path: str, section: str, given: Mapping[str, Any], allowed: Collection[str]) -> None:
    for key in given:
        if key not in allowed:
            where = f" in {section}" if section else ""
            raise ConfigError(f"{path}: {unknown(f'key {shown(key)}{where}', key, allowed)}")


def _text(path: str, key: str, value: Any) -> str:
    if isinstance(value, bool) and _VARIABLES[key].kind is SWITCH:
        return "on" if value else "off"
    if value is False and key == envvars.COMPRESSION.key:  # as compression: off
        return _OFF
    if isinstance(value, bool):
        words = "on, yes and true" if value else "off, no and false"
        raise ConfigError(
            f"{path}: {SECTION}.{key} must be a text or a number, got {value}, as which YAML reads {words}; put a text "
            "in quotes"
        )
    if isinstance(value, (str, float)) or (type(value) is int and abs(value) < _MOST_WHOLE):
        return str(value)
    raise ConfigError(f"{path}: {SECTION}.{key} must be a single value, got {shown(value)}")
