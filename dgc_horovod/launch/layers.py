"""The places that settings come from, and what of a weaker one goes with what a stronger one has chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dgc_horovod import envvars
from dgc_horovod.config import FLAT, SHARDED
from dgc_horovod.envvars import EnvironmentVariable

UNCOMPRESSED = ("none", "fp16")  # methods of Horovod's own
_LOCAL, _THRESHOLD = "local", "threshold"
_NAMES = {variable.field: variable.name for variable in envvars.FIELDS}
_WARMUP = {name for field, name in _NAMES.items() if field.startswith("warmup.")}
_STEPS, _EPOCHS, _STEPS_PER_EPOCH = (_NAMES[f"warmup.{field}"] for field in ("steps", "epochs", "steps_per_epoch"))
_OF_THRESHOLD = {_NAMES["threshold"], _NAMES["max_density"]}


class Layer(NamedTuple):
    """One place: the command line, the environment, a file.

    Args:
        texts: texts by name of the variable; an empty one of the environment counts as not set, and is not in it.
        source: function that says where a variable of it stands: "flag ...", "environment ...", a file's path.
    """

    texts: Mapping[str, str]
    source: Callable[[EnvironmentVariable], str]

    @property
    def namer(self) -> EnvironmentVariable | None:
        """The variable by which it names a method; None where it names none. Local steps name the method local."""
        if envvars.COMPRESSION.name in self.texts:
            return envvars.COMPRESSION
        return envvars.LOCAL_STEPS if _is_set(self.texts.get(envvars.LOCAL_STEPS.name)) else None

    @property
    def method(self) -> str:
        """The method that it names, "" for none."""
        if self.namer is envvars.LOCAL_STEPS:
            return _LOCAL
        return self.texts.get(envvars.COMPRESSION.name, "")

    def without(self, names: set[str]) -> Layer:
        """The same without some variables."""
        return self._replace(texts={name: text for name, text in self.texts.items() if name not in names})


def of_method(layers: Sequence[Layer], place: int) -> list[Layer]:
    """What goes with the method that the layer at `place` names.

    What is sent, and when (the first two groups of the settings, clipping and warm-up among them), was chosen for the
    method that its own layer names: beside another method of a stronger layer it is not used. How it travels and how
    the job runs (exchange, nodes, number formats, timeout, checks, metrics) is a matter of the cluster, and stays; but
    for an exchange among nodes, which local steps do not have. A layer that names no method is for any, but for a
    threshold, which is for one only.

    Args:
        layers: all layers, the strongest first.
        place: index of the strongest one that names a method.
    """
    method = layers[place].method
    kept = []
    for i, layer in enumerate(layers):
        dropped: set[str] = set()
        if i > place:
            dropped |= _OF_THRESHOLD if method != _THRESHOLD else set()
            dropped |= _of_another(layer, method) if layer.method not in ("", method) else set()
        if method in UNCOMPRESSED:
            dropped |= set(_NAMES.values())
        kept.append(layer.without(dropped))
    return kept


def _of_another(layer: Layer, method: str) -> set[str]:
    """What a layer that names another method has chosen for that one."""
    found = {variable.name for variable in envvars.FIELDS if variable.group in envvars.OF_METHODS}
    exchange = _NAMES["exchange"]
    if method == _LOCAL and layer.texts.get(exchange, FLAT) not in (FLAT, SHARDED):
        found.add(exchange)
    return found


def with_one_length(layers: Sequence[Layer]) -> list[Layer]:
    """What goes with the strongest length of a warm-up: no other length; if it is none, nothing of a warm-up.

    A length in epochs goes with the steps of an epoch that a weaker layer gives.

    Args:
        layers: all layers, the strongest first.
    """
    place = next((i for i, layer in enumerate(layers) if {_STEPS, _EPOCHS} & layer.texts.keys()), len(layers))
    if place == len(layers):
        return list(layers)
    lengths = {name for name in (_STEPS, _EPOCHS) if _is_set(layers[place].texts.get(name))}
    dropped = {_STEPS, _EPOCHS, *(() if _EPOCHS in lengths else (_STEPS_PER_EPOCH,))} if lengths else _WARMUP
    return [layer if i <= place else layer.without(dropped) for i, layer in enumerate(layers)]


def _is_set(text: str | None) -> bool:
    return text is not None and text.lower() != "none"
