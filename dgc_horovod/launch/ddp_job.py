"""Compression for torch jobs that nobody has edited: of DDP, from the second step of each optimizer on.

`site/sitecustomize.py` calls `begin` after torch's ``init_process_group``: before that there is no rank, and no DDP.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dgc_horovod import __version__, envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import activate
from dgc_horovod.launch.activation_check import SECONDS
from dgc_horovod.launch.settings import Job, of_this_process, resolve
from dgc_horovod.launch.summary import END, OF_DDP, Outcome
from dgc_horovod.notices import make_visible

if TYPE_CHECKING:
    from dgc_horovod.torch.ddp.unedited import Unedited

_log = logging.getLogger("dgc_horovod")


def begin(before: DDPJob | None) -> DDPJob | None:
    """A process group has been made: compress what DDP exchanges in this process, as ``DGC_*`` says.

    Args:
        before: what an earlier call in this process has returned.

    Returns:
        The job; None if none asks for compression, or it is one of Horovod's.
    """
    if before is None:
        if activate.replaces_horovod():
            return None
        activate.clean_path()
        job, problem = _settings()
        if not job.active:
            return None
        before = DDPJob(job, problem)
    before.meet()
    return before


def _settings() -> tuple[Job, str]:
    """The settings of this job, and what is wrong with them; "" for nothing."""
    try:
        return of_this_process(), ""
    except ConfigError as error:
        method = envvars.from_environment().get(envvars.COMPRESSION.name, "dgc")
        return replace(resolve({}, {}), method=method), str(error)


class DDPJob(Outcome):
    """One process of such a job; a `unedited.Listener`.

    Args:
        job: resolved settings of the job.
        problem: what is wrong with them; "" for nothing.
    """

    def __init__(self, job: Job, problem: str) -> None:
        super().__init__(job, OF_DDP)
        self._problem = problem
        self._unedited: Unedited | None = None
        self.watch_exit()

    def meet(self) -> None:
        """All ranks are here: let them agree whether to compress. It is the same answer on each."""
        from dgc_horovod.torch.ddp import unedited

        problem = self._problem
        try:
            self.begin(*unedited.place())
        except ConfigError as error:
            problem = problem or str(error)
        reason = unedited.agree(problem, self._compared(), min(SECONDS, self.job.get(envvars.TIMEOUT)))
        if reason:
            self.refuse(reason)
            self._report(END, {"inactive": reason}, by=self.rank)  # rank 0 may be the one that is not active
        elif self._unedited is None and self.job.method != "none":
            self._unedited = unedited.Unedited(self._compression(), self)
        if self._unedited is not None:
            self._unedited.active = not reason

    def _compared(self) -> dict[str, str]:
        """What must be the same on every rank."""
        settings = {each.row.name: each.text for each in self.job.settings if each.row.field}
        return {"dgc_horovod": __version__, envvars.COMPRESSION.name: self.job.method, **settings}

    def _compression(self) -> Any:
        from dgc_horovod.torch.ddp import Compression

        return self.job.config if self.job.config is not None else getattr(Compression, self.job.method)

    def found(self) -> None:
        """See `unedited.Listener`."""
        self.is_there = True

    def has_wrapped(self, optimizer: Any) -> None:
        """See `unedited.Listener`."""
        self.is_there = False  # what is wrapped exchanges, unless `auto` leaves it to DDP
        super().has_wrapped(optimizer)

    def refuse(self, reason: str) -> None:
        """See `unedited.Listener`; told on every rank, once."""
        if reason not in self.refused:
            self.refused.append(reason)
            make_visible()
            _log.warning("dgc_horovod: %s", self.not_active(reason))
