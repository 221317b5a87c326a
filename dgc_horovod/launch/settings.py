"""What a job asks for: flag before environment before config file before default, each value with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dgc_horovod import envvars
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig
from dgc_horovod.envvars import EVERYWHERE, OF_METHOD, EnvironmentVariable
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import layers
from dgc_horovod.launch.layers import Layer
from dgc_horovod.schedule import WarmupSchedule

FROM_FLAG, FROM_DEFAULT = "flag", "default"


class Setting(NamedTuple):
    """One variable's text and where it comes from: "flag ...", "environment ...", a file's path, or "default"."""

    variable: EnvironmentVariable
    text: str
    source: str
    unused: str = ""  # the text and source of a stronger one that does not go with the rest of the job; "" for none

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
        """The environment that carries these settings to the ranks; "" where a variable is not to be set.

        Where nothing is to be replaced, a script may still compress by itself: what acts in it goes there all the same.
        """
        given = {s.variable: s.text if s.given else "" for s in self.settings}
        if not self.active:
            acting = {variable.name: text for variable, text in given.items() if text and variable.acts == EVERYWHERE}
            return {envvars.ENABLED.name: "0", **acting}
        texts = {variable.name: text for variable, text in given.items()}
        return {**texts, envvars.COMPRESSION.name: self.method, envvars.CONFIG_FILE.name: ""}


def resolve(
    flags: Mapping[str, str], environment: Mapping[str, str], files: Sequence[tuple[str, Mapping[str, str]]] = ()
) -> Job:
    """Put the layers over one another; `layers` says what of a weaker one goes with the choices of a stronger one.

    Args:
        flags: texts given on the command line, by name of the variable.
        environment: texts of those of ``envvars.ALL`` that are set, by name.
        files: path and texts by name of each config file, the one that goes first first.

    Raises:
        ConfigError: a value is not allowed, or some do not go together; names value and source.
    """
    given = _layers(flags, environment, files)
    strongest = [_find(variable, given) for variable in envvars.SETTABLE]
    if envvars.is_off(environment):
        return Job("", None, tuple(strongest), switched_off=True)
    _ = [setting.value for setting in strongest]  # what is never used should not be wrong either
    place = next((i for i, layer in enumerate(given) if layer.method), None)
    chosen = _chosen(given, place)
    fitting = layers.with_one_length(given if place is None else layers.of_method(given, place))
    settings = (chosen, *(_find(variable, fitting) for variable in envvars.SETTABLE[1:]))
    settings = tuple(map(_beside, settings, strongest))
    if chosen.text in (*layers.UNCOMPRESSED, ""):
        _refuse_useless_flags(chosen.text, strongest)
        return Job(chosen.text, None, settings)
    config = _config(chosen.text, settings)
    _refuse_useless_nodes(config, settings)
    return Job(chosen.text, config, settings)


def _layers(
    flags: Mapping[str, str], environment: Mapping[str, str], files: Sequence[tuple[str, Mapping[str, str]]]
) -> list[Layer]:
    """All layers, the strongest first."""
    set_here = {name: text for name, text in environment.items() if text}
    return [
        Layer(flags, lambda variable: f"{FROM_FLAG} {variable.flag}"),
        Layer(set_here, lambda variable: f"environment {variable.name}"),
        *(Layer(texts, lambda variable, path=path: path) for path, texts in files),  # type: ignore[misc]
    ]


def _find(variable: EnvironmentVariable, given: Sequence[Layer]) -> Setting:
    """The setting of the strongest layer that has it."""
    for layer in given:
        if variable.name in layer.texts:
            return Setting(variable, layer.texts[variable.name], layer.source(variable))
    return Setting(variable, variable.default, FROM_DEFAULT)


def _chosen(given: Sequence[Layer], place: int | None) -> Setting:
    """The method: that of the layer at `place`; if none names one, dgc where any setting of a method is there."""
    if place is not None:
        namer = given[place].namer
        assert namer is not None
        return Setting(envvars.COMPRESSION, given[place].method, given[place].source(namer))
    is_asked_for = any(variable.name in layer.texts for layer in given for variable in envvars.FIELDS)
    return Setting(envvars.COMPRESSION, "dgc" if is_asked_for else "", FROM_DEFAULT)


def _beside(setting: Setting, strongest: Setting) -> Setting:
    """A setting, with the stronger one that does not go with the rest of the job."""
    if not strongest.given or setting[:3] == strongest[:3]:
        return setting
    return setting._replace(unused=f"{strongest.text} of {strongest.source}")


def _refuse_useless_flags(method: str, strongest: Sequence[Setting]) -> None:
    for setting in strongest:
        if setting.variable.field and setting.source.startswith(FROM_FLAG):
            raise ConfigError(
                f"{setting.variable.flag} has no meaning with compression {method}, which is Horovod's own; drop it "
                "or choose --compression dgc"
            )


def _refuse_useless_nodes(config: DGCConfig, settings: Sequence[Setting]) -> None:
    size, exchange = (next(s for s in settings if s.variable.field == name) for name in ("node_size", "exchange"))
    if size.source.startswith(FROM_FLAG) and config.node_size is not None and not config.may_use_nodes:
        raise ConfigError(
            f"{size.variable.flag} {size.text} has no meaning with exchange {config.exchange} ({exchange.source}), "
            f"which makes no nodes; drop it, or choose {exchange.variable.flag} hierarchical or auto"
        )


def _config(method: str, settings: Sequence[Setting]) -> DGCConfig:
    """`method`'s preset with what was given over it."""
    fields = [setting for setting in settings if setting.given and setting.variable.field]
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
        headline = (
            "no compression was asked for: stock Horovod (--dgc turns it on), but for a Compression of the script's own"
        )
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
        unused = f" ({setting.unused} is not used)" if setting.unused else ""
        found.append((setting.variable.key, text or "-", setting.source + unused))
    return found


def _as_text(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)
