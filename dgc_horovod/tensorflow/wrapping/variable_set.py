"""Variables that are exchanged together, and the agreement of the ranks on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import tensorflow as tf

from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.tensorflow.gradients.exchange import GradientExchange
from dgc_horovod.tensorflow.gradients.host_calls import HeldCalls
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.wrapping.variables import Gradient, Source, zeros_for


class VariableSet:
    """Variables that are given to ``apply`` or ``gradient`` together, and the agreement of the ranks on them.

    Args:
        sources: variables, as the caller gives them.
        kinds: kind of each gradient, over all ranks: "none", "sparse" or "dense".
        local: whether each gradient is not exchanged.
        make: function that makes the exchange of variables that have a gradient on some rank and are not local.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        kinds: Sequence[str],
        local: Sequence[bool],
        make: Callable[[Sequence[Source], HeldCalls], GradientExchange],
    ) -> None:
        self.sources, self.kinds, self.local = list(sources), list(kinds), list(local)
        self.given = [i for i, kind in enumerate(kinds) if kind != "none"]
        self.active = [i for i in self.given if not local[i]]
        self._calls = HeldCalls()
        self.exchange = make([sources[i] for i in self.active], self._calls) if self.active else None
        compressed = self.exchange.compressed if self.exchange is not None else ()
        self.compressed = {self.sources[self.active[j]].key for j in compressed}

    def completed(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return `gradients` with zeros where this rank has none and another may have one."""
        result = []
        for source, kind, gradient in zip(self.sources, self.kinds, gradients, strict=True):
            if kind == "none" and gradient is not None:
                raise UnsupportedUse(
                    f"{source.name!r} had a gradient on no rank at the first step, and has one now; the set of "
                    "exchanged variables is fixed. Give every variable a gradient at the first step, or make a new "
                    "DistributedOptimizer when one is unfrozen"
                )
            if kind != "none" and gradient is None:
                gradient = zeros_for(source, kind)
            if kind == "dense" and isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            result.append(gradient)
        return result


def refuse_what_cannot_be_sent(source: Source) -> None:
    """Raise UnsupportedUse or ConfigError for a variable that no exchange takes."""
    if source.dtype.startswith("complex"):
        raise UnsupportedUse(f"{source.name!r} is complex, which neither Horovod nor the compression can exchange")
    if None in source.shape:
        raise ConfigError(f"{source.name!r} has the shape {source.shape}; every dimension must be known")


def common_kinds(collectives: Collectives, kinds: list[str]) -> list[str]:
    """Return for each source "none" if no rank has a gradient, "sparse" if all gradients are sparse, else "dense"."""
    theirs = [json.loads(data) for data in collectives.gather_bytes(json.dumps(kinds).encode(), "kinds")]
    common = []
    for each in zip(*theirs, strict=True):
        found = {kind for kind in each if kind != "none"}
        common.append("none" if not found else "sparse" if found == {"sparse"} else "dense")
    return common
