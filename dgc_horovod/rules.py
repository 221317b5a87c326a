"""The selection rules: which there are, what each needs, and what it sets itself. A new one is one line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One rule, and what it needs of the pass over the bucket.

    Args:
        file: module in ``core/selection`` with ``select(view, k, context)``, loaded at first use.
        wants_candidates: whether it sends the largest elements of a range, which the pass then collects for it.
        needs_sums: whether it looks at mean and deviation.
        on_device: whether the kernels of a device can make the whole selection.
        sets_density: whether its density is that of the config, which a warm-up changes; else ``max_density``.
        parameters: fields of DGCConfig that it needs, and that have no meaning for any other.
        min_fraction: fraction of k that it sends at least, where so many elements are not zero, in [0, 1].
    """

    file: str
    wants_candidates: bool = True
    needs_sums: bool = False
    on_device: bool = False
    sets_density: bool = True
    parameters: tuple[str, ...] = ()
    min_fraction: float = 1.0

    @cached_property
    def select(self) -> Callable[..., Any]:
        """View of the residual, k, context -> elements."""
        found: Callable[..., Any] = importlib.import_module(f"dgc_horovod.core.selection.{self.file}").select
        return found


RULES: dict[str, Rule] = {
    "exact": Rule("exact", on_device=True),
    "sampled": Rule("sampled", min_fraction=0.8),
    "gaussian": Rule("gaussian", needs_sums=True, min_fraction=0.8),
    "random": Rule("random", wants_candidates=False),
    "threshold": Rule("fixed", sets_density=False, parameters=("threshold",), min_fraction=0.0),
}
