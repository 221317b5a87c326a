"""`LocalMethods` where Horovod carries what is exchanged."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.torch.local.elastic import RoundHandler
from dgc_horovod.torch.local.methods import LocalMethods
from dgc_horovod.torch.optimizer_mixin import CompressedMethods


class HorovodLocalMethods(LocalMethods):
    """In the class made by ``optimizer._adopt``, over `CompressedMethods`; never instantiated itself."""

    _dgc_below, _dgc_handler = CompressedMethods, RoundHandler

    def _dgc_share_loaded(self: Any, root: int) -> None:
        ours = {"root_rank": root, "process_set": self.process_set}
        if not hvd.broadcast_object(bool(self._dgc_rounds.momentum), name="dgc.outer", **ours):
            self._dgc_rounds.momentum.clear()
        else:
            for p, name in self._dgc.names.items():
                momentum = self._dgc_rounds.momentum.setdefault(p, self._dgc_rounds.held(torch.zeros_like(p)))
                hvd.broadcast_(momentum, name=f"dgc.outer.{name}", **ours)
