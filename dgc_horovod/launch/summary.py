"""What came of compression: one line at the end of a job, and the exit code."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from typing import Any

from dgc_horovod import at_end, envvars, leaving
from dgc_horovod.launch.reports import Reports
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.status_server import StatusBoard
from dgc_horovod.recording import Recording, rank_figures
from dgc_horovod.stats import PROCESS

_log = logging.getLogger("dgc_horovod")
EXIT_INACTIVE = 3
WRAPPED, END = "wrapped", "end"  # what rank 0 reports to dgcrun
GIVEN_UP = "given-up."  # and any rank, with its process, that ends because another one did not come
RUN = "run"  # what dgcrun tells it, see `job.describe`


class Outcome:
    """What this rank knows of the job.

    Args:
        job: resolved settings of the job.

    Attributes:
        not_wrapped, not_exchanged, no_step: what is said of a script in which nothing was there to compress, something
            was and has exchanged nothing, and no step was made.
        refused: why some optimizers, or all, are not compressed.
        is_there: whether there is something to compress, though it has exchanged nothing yet.
    """

    not_wrapped = (
        "the script has made no DistributedOptimizer or DistributedGradientTape of Horovod's; one that exchanges "
        "gradients itself (hvd.allreduce) cannot be compressed"
    )
    not_exchanged = (
        "its DistributedOptimizer or DistributedGradientTape has exchanged nothing: the script has made no step with "
        "what that has returned (is the model compiled with it?)"
    )
    no_step = at_end.NO_STEP

    def __init__(self, job: Job) -> None:
        self.job = job
        self.refused: list[str] = []
        self.is_there = False
        self.rank: int | None = None  # None until hvd.init()
        self.wrapped = 0  # optimizers, tapes and loaded models
        self.wants_fp16 = False  # whether the script itself asked for half precision
        self._told: set[str] = set()
        self._recording: Recording | None = None
        self._process, self._said = os.getpid(), ""  # the last summary that was printed
        address = envvars.desk_address()
        self._desk = StatusBoard([address]) if address else None
        self._reports = Reports(address) if address else None

    def begin(self, rank: int, workers: int) -> None:
        """``hvd.init()`` is done, again where the ranks have changed. Raises ConfigError: no metrics can be written."""
        self.rank = rank
        if self._reports is not None:
            self._reports.go_on_as(rank, workers)
        path = self.job.get(envvars.METRICS_FILE)
        if rank == 0 and path and not PROCESS.is_recorded:
            ranks_of = None if self._reports is None else self._reports.of_all
            self._recording = Recording(path, self.job.method, self._run(), ranks_of)

    def _run(self) -> dict[str, Any]:
        """What dgcrun says of the job."""
        try:
            found = self._desk.get(RUN) if self._desk is not None else None
        except OSError:  # the activation check has told of it
            return {}
        return found if isinstance(found, dict) else {}

    def watch_exit(self) -> None:
        """Print the summary when this process ends; call it before Horovod registers its own handler, to run last."""
        atexit.register(self._exit)
        PROCESS.tells_at_end = True  # the line at the end of the job does

    def _exit(self) -> None:
        code = self.end()
        if code:  # an exit handler cannot change the exit code in any other way
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def has_wrapped(self, made: Any) -> None:
        """An optimizer, a tape or a model is ours now: `made`."""
        self.wrapped += 1
        session = getattr(getattr(made, "optimizer", made), "_dgc", None)
        self.is_there |= getattr(getattr(session, "distribution", None), "takes_part", False)
        if self.wrapped == 1:
            self._report(WRAPPED, True)

    def _report(self, key: str, entry: Any, by: int | None = 0) -> bool:
        """Tell dgcrun, from rank `by`; returns whether it has heard."""
        if self._desk is None or self.rank != by:
            return False
        try:
            self._desk.put(key, entry)
        except OSError as error:
            self.tell_once(f"dgcrun cannot be reached at {self._desk.names} ({error})")
            return False
        return True

    def tell_once(self, text: str) -> None:
        """Log `text` on rank 0, the first time."""
        if text not in self._told and not self.rank:
            self._told.add(text)
            _log.warning("dgc_horovod: %s", text)

    def why_inactive(self) -> str:
        """Why this job was not compressed although it should have been; "" if it was."""
        if self.job.method == "none":
            return ""
        if not self.wrapped and not PROCESS.exchanges:
            return self._refusals() or (self.not_exchanged if self.is_there else self.not_wrapped)
        if self.job.config is None:
            return ""
        if not PROCESS.exchanges:  # else rank 0 is in no process set, or stock Horovod's exchange was taken at wrapping
            return self.not_exchanged if self.is_there else ""
        return at_end.why_nothing(self.job.config, self.no_step)

    def parting(self) -> None:
        """Print the summary on rank 0: the ranks part, and Ray kills the process then, with no exit handler."""
        if os.getpid() == self._process and self.rank == 0 and not self.why_inactive():
            self._said = self.line()
            at_end.say(self._said, "")

    def line(self) -> str:
        """The summary, for people."""
        reason = self.why_inactive()
        if reason:
            return not_active(self.job, reason, self.may_fail)
        ranks = self._reports.of_all() if self._reports is not None else [rank_figures(self.rank or 0)]
        text = at_end.line(self.job.method, ranks, self.wants_fp16)
        return "; ".join(filter(None, (text, self._refusals())))

    def _refusals(self) -> str:
        """The first reason why something is not compressed, and how many others there are."""
        others = len(self.refused) - 1
        return "".join(self.refused[:1]) + f" (and {others} more)" * (others > 0)

    @property
    def may_fail(self) -> bool:
        """Whether the job fails if nothing was compressed: not where torchrun alone would start it again and again."""
        return self._desk is not None or not envvars.elastic_agent()

    def end(self) -> int:
        """Print the summary on rank 0; returns the exit code that it asks for, 0 where dgcrun sees to it."""
        if os.getpid() != self._process:
            return 0
        if leaving.has_given_up.is_set() and self._desk is not None:
            with contextlib.suppress(OSError):
                self._desk.put(f"{GIVEN_UP}{self.rank}", self._process)
        if self._reports is not None:
            self._reports.end()
        if self.rank != 0:
            return 0
        at_end.pending()  # which the record that ends the file counts, too
        if self._recording is not None:
            self._recording.end()
        inactive, text = self.why_inactive(), self.line()
        if at_end.failed() or text != self._said:
            at_end.say(text, inactive)
        heard = self._report(END, {"inactive": inactive})
        allowed = self.job.get(envvars.ALLOW_INACTIVE) or not self.may_fail
        return EXIT_INACTIVE if inactive and not (at_end.failed() or allowed or heard) else 0


def not_active(job: Job, reason: str, may_fail: bool = True) -> str:
    """What a user is told of a job that was not compressed.

    Args:
        job: resolved settings of the job.
        reason: why.
        may_fail: whether it is an error.
    """
    is_error = may_fail and not job.get(envvars.ALLOW_INACTIVE)
    return at_end.not_active(job.method, reason) + ". --allow-inactive makes this no error" * is_error
