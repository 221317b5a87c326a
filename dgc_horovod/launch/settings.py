"""What a job asks for: flag before environment before config file before default, each value with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dgc_horovod import envvars
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import FLAT, SHARDED, DGCConfig, WarmupSchedule
from dgc_horovod.envvars import COMPRESSION, FIELDS, LOCAL_STEPS, SETTABLE
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import config_file
from dgc_horovod.settings import EVERYWHERE, OF_METHODS, Setting, as_text

FROM_FLAG, FROM_DEFAULT = "flag", "default"
UNCOMPRESSED = ("none", "fp16")  # methods that leave the exchange as it is
_LOCAL = "local"
_ROWS = {row.field: row for row in FIELDS}
_STEPS, _EPOCHS, _STEPS_PER_EPOCH = (_ROWS[f"warmup.{field}"] for field in ("steps", "epochs", "steps_per_epoch"))


class Given(NamedTuple):
    """A setting's text and where it comes from: "flag ...", "environment ...", a file's path, or "default"."""

    row: Setting
    text: str
    source: str
    unused: str = ""  # the text and source of a stronger one that does not go with the rest of the job; "" for none

    @property
    def is_set(self) -> bool:
        """Whether somebody has set it."""
        return self.source != FROM_DEFAULT

    @property
    def value(self) -> Any:
        """The text as a value of its kind, None for none. Raises ConfigError, naming the source."""
        if not self.is_set:
            return self.row.default
        if not self.text:
            raise ConfigError(f"{self.source}: {self.row.key} is empty; leave it out, or give it a value")
        return self.row.parse(self.text, self.source)


@dataclass(frozen=True)
class Job:
    """The resolved settings of one job.

    Args:
        method: "none", "fp16" or one of the presets; "" if no compression was asked for.
        config: compression settings; None for the methods that have none.
        settings: all settings with their sources, by row, in the order of ``envvars.SETTABLE``.
        switched_off: whether ``DGC_ENABLED`` is off, whatever else was asked for.
    """

    method: str
    config: DGCConfig | None
    settings: Mapping[Setting, Given]
    switched_off: bool = False

    @property
    def active(self) -> bool:
        """Whether the script is to be compressed."""
        return bool(self.method) and not self.switched_off

    def get(self, row: Setting) -> Any:
        """The value of one setting."""
        return self.settings[row].value

    def with_setting(self, row: Setting, text: str, source: str) -> Job:
        """The same with another text of one setting that is no field of `config`."""
        return replace(self, settings={**self.settings, row: Given(row, text, source)})

    def variables(self) -> dict[str, str]:
        """The environment that carries these settings to the ranks; "" where a variable is not to be set.

        Where nothing is to be replaced, a script may still compress by itself: what acts in it goes there all the same.
        """
        if not self.active:
            acting = {
                row.name: each.text for row, each in self.settings.items() if each.is_set and row.acts == EVERYWHERE
            }
            return {envvars.ENABLED.name: "0", **acting}
        texts = {row.name: each.text if each.is_set else "" for row, each in self.settings.items()}
        return {**texts, COMPRESSION.name: self.method, envvars.CONFIG_FILE.name: ""}


# The settings of one place: the command line, the environment, a file
Layer = Mapping[Setting, Given]


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
    given_there = {name: text for name, text in environment.items() if text}
    layers = [
        _layer(flags, lambda row: f"{FROM_FLAG} {row.flag}"),
        _layer(given_there, lambda row: f"environment {row.name}"),
        *(_layer(texts, lambda row, path=path: path) for path, texts in files),  # type: ignore[misc]
    ]
    strongest = {row: _find(row, layers) for row in SETTABLE}
    if envvars.is_off(environment):
        return Job("", None, strongest, switched_off=True)
    _ = [given.value for given in strongest.values()]  # what is never used should not be wrong either
    place = next((i for i, layer in enumerate(layers) if _method(layer).text), None)
    if place is None:  # dgc where any setting of a method is there
        is_asked_for = any(row in layer for layer in layers for row in FIELDS)
        chosen, fitting = Given(COMPRESSION, "dgc" if is_asked_for else "", FROM_DEFAULT), layers
    else:
        chosen, fitting = _method(layers[place]), _of_method(layers, place)
    fitting = _with_one_length(fitting)
    used = {row: _find(row, fitting, chosen.text) for row in SETTABLE} | {COMPRESSION: chosen}
    settings = {row: _beside(used[row], strongest[row]) for row in SETTABLE}
    if chosen.text in (*UNCOMPRESSED, ""):
        _refuse_useless_flags(chosen.text, strongest.values())
        return Job(chosen.text, None, settings)
    job = Job(chosen.text, _config(chosen.text, settings.values()), settings)
    _refuse_useless_nodes(job)
    return job


def of_this_process() -> Job:
    """The settings of a rank, from its environment and the file for every job; its environment has all of them then.

    Raises:
        ConfigError: see `resolve`.
    """
    given = envvars.from_environment()
    job = resolve({}, given, config_file.for_everyone(given))
    if job.active:
        envvars.put_into_environment(job.variables())  # what stands in a file is read from the environment elsewhere
    return job


def _find(row: Setting, layers: Sequence[Layer], method: str = "") -> Given:
    """The setting of the strongest layer that has it, or its default with that method."""
    preset = PRESETS.get(method, {})
    default = as_text(preset[row.field]) if row.field in preset else row.default_text
    return next((layer[row] for layer in layers if row in layer), Given(row, default, FROM_DEFAULT))


def _layer(texts: Mapping[str, str], source: Callable[[Setting], str]) -> Layer:
    """A layer of these texts, which are by name of the variable; `source`: where a setting of it stands."""
    return {row: Given(row, texts[row.name], source(row)) for row in SETTABLE if row.name in texts}


def _method(layer: Layer) -> Given:
    """The method that a layer names, "" for none. Local steps name the method local."""
    steps = layer.get(LOCAL_STEPS)
    by_steps = Given(COMPRESSION, _LOCAL, steps.source) if steps and _is_set(steps) else None
    return layer.get(COMPRESSION) or by_steps or Given(COMPRESSION, "", FROM_DEFAULT)


def _of_method(layers: Sequence[Layer], place: int) -> list[Layer]:
    """What goes with the method that the layer at `place` names.

    What is sent, and when (the first two groups of the settings, clipping and warm-up among them), was chosen for the
    method that its own layer names: beside another method of a stronger layer it is not used. How it travels and how
    the job runs (exchange, nodes, number formats, timeout, checks, metrics) is a matter of the cluster, and stays; but
    for an exchange among nodes, which local steps do not have. A layer that names no method is for any.

    Args:
        layers: all layers, the strongest first.
        place: index of the strongest one that names a method.
    """
    method, kept = _method(layers[place]).text, []
    for i, layer in enumerate(layers):
        dropped: set[Setting] = set()
        if method in UNCOMPRESSED:
            dropped = set(FIELDS)
        elif i > place:
            is_of_another, exchange = _method(layer).text not in ("", method), layer.get(_ROWS["exchange"])
            dropped = {row for row in FIELDS if is_of_another and row.group in OF_METHODS}
            if is_of_another and method == _LOCAL and exchange and exchange.text not in (FLAT, SHARDED):
                dropped.add(exchange.row)
        kept.append(_without(layer, dropped))
    return kept


def _with_one_length(layers: Sequence[Layer]) -> list[Layer]:
    """What goes with the strongest length of a warm-up: no other length; if it is none, nothing of a warm-up.

    A length in epochs goes with the steps of an epoch that a weaker layer gives.
    """
    place = next((i for i, layer in enumerate(layers) if {_STEPS, _EPOCHS} & layer.keys()), len(layers))
    strongest = layers[place] if place < len(layers) else {}
    lengths = {row for row in (_STEPS, _EPOCHS) if row in strongest and _is_set(strongest[row])}
    dropped = {_STEPS, _EPOCHS, *(() if _EPOCHS in lengths else (_STEPS_PER_EPOCH,))}
    if not lengths:
        dropped = {row for row in FIELDS if row.field.startswith("warmup.")}
    return [layer if i <= place else _without(layer, dropped) for i, layer in enumerate(layers)]


def _without(layer: Layer, rows: set[Setting]) -> Layer:
    return {row: given for row, given in layer.items() if row not in rows}


def _is_set(given: Given) -> bool:
    return given.text.lower() != "none"


def _beside(used: Given, strongest: Given) -> Given:
    """A setting, with the stronger one that does not go with the rest of the job."""
    if not strongest.is_set or used[:3] == strongest[:3]:
        return used
    return used._replace(unused=f"{strongest.text} of {strongest.source}")


def _refuse_useless_flags(method: str, strongest: Iterable[Given]) -> None:
    for given in strongest:
        if given.row.field and given.source.startswith(FROM_FLAG):
            raise ConfigError(
                f"{given.row.flag} has no meaning with compression {method}, which sends every element; drop it "
                "or choose --compression dgc"
            )


def _refuse_useless_nodes(job: Job) -> None:
    size, exchange = job.settings[envvars.NODE_SIZE], job.settings[_ROWS["exchange"]]
    if size.source.startswith(FROM_FLAG) and size.value is not None and not (job.config and job.config.may_use_nodes):
        raise ConfigError(
            f"{size.row.flag} {size.text} has no meaning with exchange {exchange.text} ({exchange.source}), "
            f"which makes no nodes; drop it, or choose {exchange.row.flag} hierarchical or auto"
        )


def _config(method: str, settings: Iterable[Given]) -> DGCConfig:
    """`method`'s preset with what was given over it."""
    fields = [each for each in settings if each.is_set and each.row.field]
    given = {each.row.field: each.value for each in fields if each.value is not None}
    warm = {name.removeprefix("warmup."): value for name, value in given.items() if name.startswith("warmup.")}
    plain = {name: value for name, value in given.items() if not name.startswith("warmup.")}
    try:
        if warm and not {"steps", "epochs"} & warm.keys():
            raise ConfigError("a density warm-up needs a length: give warmup_steps or warmup_epochs")
        return DGCConfig(**{**PRESETS[method], **plain, "warmup": WarmupSchedule(**warm) if warm else None})
    except ConfigError as error:
        sources = ", ".join(f"{each.row.key}={each.text} ({each.source})" for each in fields)
        raise ConfigError(f"{error}. Given: method {method}{', ' if sources else ''}{sources}") from None


def show(job: Job, stock: str = "stock Horovod") -> str:
    """A table of every setting, its value and its source; `stock`: name of what trains where nothing is compressed."""
    if job.switched_off:
        headline = f"{envvars.ENABLED.name} is off: {stock}, whatever else is set"
    elif not job.method:
        headline = (
            f"no compression was asked for: {stock} (--dgc turns it on), but for a Compression of the script's own"
        )
    else:
        headline = f"compression {job.method}"
    found = rows(job)
    width = max(len(key) for key, _, _ in found)
    return "\n".join([headline, *(f"  {key:{width}}  {text:14}  {source}" for key, text, source in found)])


def rows(job: Job) -> list[tuple[str, str, str]]:
    """Every setting: its key, its value, and where that comes from."""
    return [
        (row.key, each.text or "-", each.source + (f" ({each.unused} is not used)" if each.unused else ""))
        for row, each in job.settings.items()
    ]
