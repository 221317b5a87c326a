"""Compression for torch jobs that nobody has edited: of DDP, from the second step of each optimizer on.

`site/sitecustomize.py` calls `begin` after torch's ``init_process_group``: before that there is no rank, and no DDP.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dgc_horovod import __version__, envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import activate, config_file
from dgc_horovod.launch.activation_check import SECONDS
from dgc_horovod.launch.settings import Job, resolve
from dgc_horovod.launch.summary import OF_DDP, Outcome
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
    given = envvars.from_environment()
    try:
        job = resolve({}, given, config_file.for_everyone(given))
    except ConfigError as error:
        return replace(resolve({}, {}), method=given.get(envvars.COMPRESSION.name, "dgc")), str(error)
    if job.active:
        envvars.put_into_environment(job.variables())  # what stands in a file is read from the environment elsewhere
    return job, ""


class DDPJob:
    """One process of such a job.

    Args:
        job: resolved settings of the job.
        problem: what is wrong with them; "" for nothing.
    """

    def __init__(self, job: Job, problem: str) -> None:
        self.job, self._problem = job, problem
        self.outcome = Outcome(job, OF_DDP)
        self.outcome.watch_exit()
        self._unedited: Unedited | None = None

    def meet(self) -> None:
        """All ranks are here: let them agree whether to compress. It is the same answer on each."""
        from dgc_horovod.torch.ddp import unedited

        problem = self._problem
        try:
            self.outcome.begin(*unedited.place())
        except ConfigError as error:
            problem = problem or str(error)
        reason = unedited.agree(problem, self._compared(), min(SECONDS, self.job.get(envvars.TIMEOUT)))
        if reason:
            self.refuse(reason)
            self.outcome.report_inactive(reason)
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
        self.outcome.found = True

    def parting(self) -> None:
        """See `unedited.Listener`."""
        self.outcome.part()

    def has_wrapped(self, optimizer: Any) -> None:
        """See `unedited.Listener`."""
        self.outcome.found = False  # what is wrapped exchanges, unless `auto` leaves it to DDP
        self.outcome.has_wrapped(optimizer)

    def refuse(self, reason: str) -> None:
        """See `unedited.Listener`; told on every rank, once."""
        if reason not in self.outcome.refused:
            self.outcome.refused.append(reason)
            make_visible()
            _log.warning("dgc_horovod: %s", self.outcome.not_active(reason))
