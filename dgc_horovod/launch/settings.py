"""What a job asks for: flag before environment before config file before default, each value with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dgc_horovod import envvars
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig
from dgc_horovod.envvars import OF_METHOD, EnvironmentVariable
from dgc_horovod.errors import ConfigError
from dgc_horovod.schedule import WarmupSchedule

UNCOMPRESSED = ("none", "fp16")  # methods of Horovod's own
_OF_THRESHOLD = ("threshold", "max_density")
_LENGTHS = ("warmup.steps", "warmup.epochs")
FROM_FLAG, FROM_DEFAULT = "flag", "default"


class Setting(NamedTuple):
    """One variable's text and where it comes from: "flag ...", "environment ...", a file's path, or "default"."""

    variable: EnvironmentVariable
    text: str
    source: str
    layer: int = 0  # of the source: the lower goes before the higher

    @property
    def given(self) -> bool:
        """Whether somebody has set it."""
        return self.source != FROM_DEFAULT

    @property
    def value(self) -> Any:
        """The text as a value of its kind, None for none. Raises ConfigError, naming the source."""
        if not self.given and self.text in ("", OF_METHOD):
            return None
        if not self.text:
            raise ConfigError(f"{self.source}: {self.variable.key} is empty; leave it out, or give it a value")
        return self.variable.parse(self.text, self.source)


@dataclass(frozen=True)
class Job:
    """The resolved settings of one job.

    Args:
        method: "none", "fp16" or one of the presets; "" if no compression was asked for.
        config: compression settings; None for the methods that have none.
        settings: settings of all variables with their sources, in the order of ``envvars.SETTABLE``.
        switched_off: whether ``DGC_ENABLED`` is off, whatever else was asked for.
    """

    method: str
    config: DGCConfig | None
    settings: tuple[Setting, ...]
    switched_off: bool = False

    @property
    def active(self) -> bool:
        """Whether Horovod's optimizers are to be replaced."""
        return bool(self.method) and not self.switched_off

    def get(self, variable: EnvironmentVariable) -> Any:
        """The value of one setting."""
        return next(setting.value for setting in self.settings if setting.variable is variable)

    def with_setting(self, variable: EnvironmentVariable, text: str, source: str) -> Job:
        """The same with another text of one setting that is no field of `config`."""
        changed = (Setting(variable, text, source) if s.variable is variable else s for s in self.settings)
        return replace(self, settings=tuple(changed))

    def variables(self) -> dict[str, str]:
        """The environment that carries these settings to the ranks; "" where a variable is not to be set."""
        if not self.active:
            return {envvars.ENABLED.name: "0"}
        given = {s.variable.name: s.text if s.given and _is_used(s, self) else "" for s in self.settings}
        return {**given, envvars.COMPRESSION.name: self.method, envvars.CONFIG_FILE.name: ""}


def resolve(
    flags: Mapping[str, str], environment: Mapping[str, str], files: Sequence[tuple[str, Mapping[str, str]]] = ()
) -> Job:
    """Put the layers over one another.

    Args:
        flags: texts given on the command line, by name of the variable.
        environment: texts of those of ``envvars.ALL`` that are set, by name.
        files: path and texts by name of each config file, the one that goes first first.

    Raises:
        ConfigError: a value is not allowed, or some do not go together; names value and source.
    """
    settings = tuple(_find(variable, flags, environment, files) for variable in envvars.SETTABLE)
    enabled = environment.get(envvars.ENABLED.name, "")
    off = bool(enabled) and not envvars.ENABLED.parse(enabled)
    if off:
        return Job("", None, settings, switched_off=True)
    method, fields = _method(settings)
    _ = [setting.value for setting in settings]  # what is never used should not be wrong either
    if method in (*UNCOMPRESSED, ""):
        _refuse_useless_flags(method, fields)
        return Job(method, None, settings)
    return Job(method, _config(method, fields), settings)


def _find(
    variable: EnvironmentVariable,
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    files: Sequence[tuple[str, Mapping[str, str]]],
) -> Setting:
    name = variable.name
    if name in flags:
        return Setting(variable, flags[name], f"{FROM_FLAG} {variable.flag}")
    if environment.get(name):
        return Setting(variable, environment[name], f"environment {name}", 1)
    for layer, (path, values) in enumerate(files, 2):
        if name in values:
            return Setting(variable, values[name], path, layer)
    return Setting(variable, variable.default, FROM_DEFAULT, len(files) + 2)


def _method(settings: Sequence[Setting]) -> tuple[str, list[Setting]]:
    """The method, and the settings of DGCConfig that somebody has given."""
    fields = [setting for setting in settings if setting.given and setting.variable.field]
    chosen = next(setting for setting in settings if setting.variable is envvars.COMPRESSION)
    is_local = any(setting.variable.field == "local_steps" for setting in fields)
    method = chosen.value if chosen.given else "local" if is_local else "dgc" if fields else ""
    return method, [setting for setting in fields if not _is_beaten(setting, fields, chosen, method)]


def _is_beaten(setting: Setting, fields: Sequence[Setting], chosen: Setting, method: str) -> bool:
    """Whether a setting does not go with another one that goes before it: a cluster's default is for its own choice."""
    field = setting.variable.field
    if field in _OF_THRESHOLD:
        return method != "threshold" and chosen.layer < setting.layer
    if field in _LENGTHS:
        return any(other.variable.field in _LENGTHS and other.layer < setting.layer for other in fields)
    return False


def _refuse_useless_flags(method: str, fields: Sequence[Setting]) -> None:
    for setting in fields:
        if setting.source.startswith(FROM_FLAG):
            raise ConfigError(
                f"{setting.variable.flag} has no meaning with compression {method}, which is Horovod's own; drop it "
                "or choose --compression dgc"
            )


def _config(method: str, fields: Sequence[Setting]) -> DGCConfig:
    """`method`'s preset with what was given over it."""
    given = {setting.variable.field: setting.value for setting in fields if setting.value is not None}
    warm = {name.removeprefix("warmup."): value for name, value in given.items() if name.startswith("warmup.")}
    plain = {name: value for name, value in given.items() if not name.startswith("warmup.")}
    try:
        if warm and not {"steps", "epochs"} & warm.keys():
            raise ConfigError("a density warm-up needs a length: give warmup_steps or warmup_epochs")
        warmup = WarmupSchedule(**{name: _whole_if_it_is(value) for name, value in warm.items()}) if warm else None
        return DGCConfig(**{**PRESETS[method], **plain, "warmup": warmup})
    except ConfigError as error:
        sources = ", ".join(f"{s.variable.key}={s.text} ({s.source})" for s in fields)
        raise ConfigError(f"{error}. Given: method {method}{', ' if sources else ''}{sources}") from None


def _whole_if_it_is(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def show(job: Job) -> str:
    """A table of every setting, its value and its source."""
    if job.switched_off:
        headline = f"{envvars.ENABLED.name} is off: stock Horovod, whatever else is set"
    elif not job.method:
        headline = "no compression was asked for: stock Horovod (--dgc turns it on)"
    else:
        headline = f"compression {job.method}"
    found = rows(job)
    width = max(len(key) for key, _, _ in found)
    return "\n".join([headline, *(f"  {key:{width}}  {text:14}  {source}" for key, text, source in found)])


def rows(job: Job) -> list[tuple[str, str, str]]:
    """Every setting: its key, its value, and where that comes from."""
    found = []
    for setting in job.settings:
        text = setting.text
        if setting.variable is envvars.COMPRESSION:
            text = job.method
        elif job.config is not None and not setting.given and setting.variable.field in PRESETS[job.method]:
            text = _as_text(getattr(job.config, setting.variable.field))
        unused = setting.given and not _is_used(setting, job)
        found.append((setting.variable.key, text or "-", setting.source + (" (not used)" if unused else "")))
    return found


def _is_used(setting: Setting, job: Job) -> bool:
    """Whether a setting has come into the config, where it is one of those."""
    field = setting.variable.field
    if job.config is None or not field:
        return not field
    if field in _LENGTHS:
        return getattr(job.config.warmup, field.removeprefix("warmup."), None) == setting.value
    return field not in _OF_THRESHOLD or getattr(job.config, field) == setting.value


def _as_text(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)
