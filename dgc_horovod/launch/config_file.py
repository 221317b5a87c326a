"""``--config-file job.yaml``: Horovod's own schema, and a ``compression:`` section that is checked key by key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError, nearest

SECTION = "compression"
# Horovod reads these (horovod/runner/common/util/config_parser.py) and ignores every other key without a word.
HOROVOD_KEYS: dict[str, tuple[str, ...]] = {
    "controller": (),
    "params": (
        "fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "hierarchical_allreduce", "hierarchical_allgather",
        "torus_allreduce",
    ),
    "autotune": (
        "enabled", "log_file", "warmup_samples", "steps_per_sample", "bayes_opt_max_samples", "gaussian_process_noise",
    ),
    "timeline": ("filename", "mark_cycles"),
    "stall_check": ("enabled", "warning_time_seconds", "shutdown_time_seconds"),
    "library_options": ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds"),
    "logging": ("level", "with_timestamp"),
}  # fmt: skip
_VARIABLES = {variable.key: variable for variable in envvars.SETTABLE}


def load(path: str, for_everyone: bool = False) -> dict[str, str]:
    """The ``compression:`` section of a config file.

    Args:
        path: of a YAML file; the other sections are Horovod's and are checked for unknown keys only.
        for_everyone: it is the one that ``DGC_CONFIG_FILE`` names, which Horovod does not read.

    Returns:
        Name of the environment variable -> text.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has an unknown key; names file, key and nearest key.
    """
    content = _read(path)
    _check_keys(path, "", content, [*HOROVOD_KEYS, SECTION])
    for section, keys in HOROVOD_KEYS.items():
        if for_everyone and section in content:
            raise ConfigError(
                f"{path}: {section} is Horovod's, which reads its sections from --config-file only; only {SECTION} may "
                f"stand in the file that {envvars.CONFIG_FILE.name} names"
            )
        if keys and content.get(section) is not None:
            _check_keys(path, section, _mapping(path, section, content[section]), keys)
    given = _mapping(path, SECTION, content.get(SECTION) or {})
    _check_keys(path, SECTION, given, _VARIABLES)
    texts = {key: _text(path, key, value) for key, value in given.items() if value is not None}
    return {_VARIABLES[key].name: text for key, text in texts.items()}


class _NoDoubles(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: str) -> Mapping[str, Any]:
    try:
        content = yaml.load(Path(path).read_text(), _NoDoubles)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if content is None:
        raise ConfigError(f"config file {path} is empty; give it a section, e.g. {SECTION}: {{density: 0.001}}")
    return _mapping(path, "the file", content)


def _mapping(path: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        hint = "; e.g. compression: {method: dgc}" if name == SECTION else ""
        raise ConfigError(f"{path}: {name} must be a mapping of keys to values, got {value!r}{hint}")
    return value


def _check_keys(path: str, section: str, given: Mapping[str, Any], allowed: Collection[str]) -> None:
    for key in given:
        if key not in allowed:
            near = nearest(key, allowed)
            hint = f"did you mean {near!r}? " if near else ""
            where = f" in {section}" if section else ""
            raise ConfigError(f"{path}: unknown key {key!r}{where}; {hint}allowed: {', '.join(allowed)}")


def _text(path: str, key: str, value: Any) -> str:
    if isinstance(value, bool) and _VARIABLES[key].kind == "switch":
        return "on" if value else "off"
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{path}: {SECTION}.{key} must be a single value, got {value!r}")
