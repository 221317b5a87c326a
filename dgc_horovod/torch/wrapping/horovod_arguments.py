"""Horovod's own arguments of ``DistributedOptimizer``: checked, compared between ranks, made bucket boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list

from dgc_horovod import envvars
from dgc_horovod.config import check_predivide
from dgc_horovod.config_check import check_agreement, refused_alike
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kinds import check_whole
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.transport import HorovodCollectives
from dgc_horovod.torch.wrapping.arguments import agreed_fields, choice_fields


def check_arguments(op: int, predivide: float, passes: int) -> None:
    """Raise ConfigError or UnsupportedUse for what compression cannot do."""
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedUse(
            "compression works with op=hvd.Average or hvd.Sum; for Adasum and the others use "
            "compression=Compression.none, under dgcrun --compression none"
        )
    check_predivide(predivide, op == hvd.Average)
    check_whole("backward_passes_per_step", passes, 1)


def check_same_choice(compression: Any, process_set: hvd.ProcessSet, refused: str = "nothing") -> None:
    """Stop every rank if some compress and others do not, or refuse to: their collectives would never meet.

    Not under Elastic, where a newcomer makes its optimizer while the others wait for its state.
    """
    if process_set.included() and not envvars.horovod_elastic():
        check_agreement(HorovodCollectives(process_set, "choice"), choice_fields(compression, refused))


def alike(process_set: hvd.ProcessSet) -> AbstractContextManager[None]:
    """`refused_alike`, between the ranks of a process set that compress."""
    return refused_alike(lambda refused: check_same_choice("dgc", process_set, refused))


def agreed_arguments(session: Session, op: int) -> dict[str, str]:
    """`agreed_fields`, and Horovod's arguments."""
    settings, places = session.carrier.settings, session.boundaries
    return {
        **agreed_fields(session),
        "op": str(op),
        "backward_passes_per_step": str(session.passes.per_step),
        "gradient_predivide_factor": str(float(settings.gradient_predivide_factor)),
        "sparse_as_dense": str(settings.sparse_as_dense),
        "bucket boundaries": "\n".join(f"{name} {places[p]}" for name, p in session.parameters.items()),
    }


def boundaries(groups: Any, parameters: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, int]:
    """A number per parameter; those of one of Horovod's `groups` and one device share it."""
    if isinstance(groups, int):
        groups = split_list(list(parameters.values()), groups)
    group_of = {p: i for i, group in enumerate(groups or []) for p in group}
    keys: dict[Any, int] = {}
    return {p: keys.setdefault((group_of.get(p, -1), p.device), len(keys)) for p in parameters.values()}
