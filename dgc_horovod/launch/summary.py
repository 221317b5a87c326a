"""What came of compression: one line at the end of a job, and the exit code."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from dgc_horovod import envvars, leaving, recording
from dgc_horovod.config import AUTO
from dgc_horovod.launch.reports import Reports
from dgc_horovod.launch.settings import UNCOMPRESSED, Job
from dgc_horovod.launch.status_server import StatusBoard
from dgc_horovod.notices import make_visible
from dgc_horovod.planning.trial import COMPRESSED
from dgc_horovod.recording import Recording, rank_figures
from dgc_horovod.stats import PROCESS, ExchangeStats, total

_log = logging.getLogger("dgc_horovod")
EXIT_INACTIVE = 3
WRAPPED, END = "wrapped", "end"  # what rank 0 reports to dgcrun
GIVEN_UP = "given-up."  # and any rank, with its process, that ends because another one did not come
RUN = "run"  # what dgcrun tells it: see `job_report.describe`
NOTHING_WRAPPED = (
    "the script has made no DistributedOptimizer or DistributedGradientTape of Horovod's; one that exchanges gradients "
    "itself (hvd.allreduce) cannot be compressed"
)
NOTHING_EXCHANGED = (
    "its DistributedOptimizer or DistributedGradientTape has exchanged nothing: the script has made no step with what "
    "that has returned (is the model compiled with it?)"
)


class Outcome:
    """What this rank knows of the job.

    Args:
        job: resolved settings of the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank: int | None = None  # None until hvd.init()
        self.wrapped = 0  # optimizers, tapes and loaded models
        self._exchanges_later = False  # whether one makes its exchange at its first step, as those of TensorFlow do
        self.asked: set[str] = set()  # what the script itself wanted to send: "none", "fp16"
        self._told: set[str] = set()
        self._recording: Recording | None = None
        self._reports: Reports | None = None
        self._process = os.getpid()
        address = envvars.desk_address()
        self._desk = StatusBoard([address]) if address else None

    def begin(self, rank: int, workers: int) -> None:
        """``hvd.init()`` is done, again where the ranks have changed. Raises ConfigError: no metrics can be written."""
        self.rank = rank
        if self._desk is not None and self._reports is None:
            self._reports = Reports(envvars.desk_address())
        if self._reports is not None:
            self._reports.go_on_as(rank, workers)
        path = self.job.get(envvars.METRICS_FILE)
        if rank == 0 and path and not PROCESS.is_recorded:
            ranks_of = None if self._reports is None else self._reports.of_all
            self._recording = recording.begin(path, self.job.method, self._run(), ranks_of)

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

    def dismiss(self) -> None:
        """There is nothing to sum up any more."""
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        code = self.end()
        if code:  # an exit handler cannot change the exit code in any other way
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def has_wrapped(self, made: Any) -> None:
        """An optimizer, a tape or a model is ours now: `made`."""
        self.wrapped += 1
        exchange = getattr(getattr(made, "optimizer", made), "_dgc", None)
        self._exchanges_later |= getattr(exchange, "takes_part", False)
        if self.wrapped == 1:
            self._report(WRAPPED, True)

    def _report(self, key: str, entry: Any) -> bool:
        """Tell dgcrun, from rank 0; returns whether it has heard."""
        if self._desk is None or self.rank != 0:
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
            make_visible()
            _log.warning("dgc_horovod: %s", text)

    def stats(self) -> dict[str, float]:
        """The counts of everything that this rank has exchanged."""
        return total(list(PROCESS.exchanges))

    def why_inactive(self) -> str:
        """Why this job was not compressed although it should have been; "" if it was."""
        if self.job.method == "none":
            return ""
        if not self.wrapped and not PROCESS.exchanges:
            return NOTHING_WRAPPED
        if self.job.method in UNCOMPRESSED:
            return ""
        if not PROCESS.exchanges:  # else rank 0 is in no process set, or stock Horovod's exchange was taken at wrapping
            return NOTHING_EXCHANGED if self._exchanges_later else ""
        stats = self.stats()
        if not stats["steps"]:
            if pending := leaving.pending():
                return f"its optimizer has made {pending} local steps, fewer than come before an exchange (local_steps)"
            return "its optimizer has made no step"
        if not stats["elements"] and self.job.method != AUTO:
            assert self.job.config is not None
            return f"every tensor is 1-D or has fewer than min_numel={self.job.config.min_numel} elements"
        return ""

    def line(self) -> str:
        """The summary, for people."""
        leaving.pending()
        reason = self.why_inactive()
        if reason:
            return not_active(self.job, reason)
        stats = self.stats()
        if not stats["bytes_sent"]:
            return f"{self.job.method}: the dense exchange is Horovod's own, which is not counted"
        if self.job.method == AUTO and not any(counts.mode == COMPRESSED for counts in PROCESS.exchanges):
            return f"auto: stock Horovod's dense exchange was taken; {_steps(stats, 0)}"
        alone = sum(counts.steps_alone for counts in PROCESS.exchanges)
        text = _line(self.job.method, alone, _at_end(PROCESS.exchanges), stats, "fp16" in self.asked)
        ranks = self._reports.of_all() if self._reports is not None else [rank_figures(self.rank or 0)]
        return "; ".join([text, *leaving.warnings(ranks)])

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
        leaving.pending()  # which the record that ends the file counts, too
        if self._recording is not None:
            self._recording.end()
        # an error of its own ended the script, or is why it has ended
        failed = getattr(sys, "last_value", None) is not None or leaving.has_given_up.is_set()
        inactive = self.why_inactive()
        if not (failed and inactive):
            print(f"dgc_horovod: {self.line()}{' (ended by an error)' * failed}", file=sys.stderr, flush=True)
        heard = self._report(END, {"inactive": inactive})
        allowed = self.job.get(envvars.ALLOW_INACTIVE)
        return EXIT_INACTIVE if inactive and not (failed or allowed or heard) else 0


def not_active(job: Job, reason: str) -> str:
    """What a user is told of a job that was not compressed."""
    hint = "" if job.get(envvars.ALLOW_INACTIVE) else ". --allow-inactive makes this no error"
    return f"NOT ACTIVE: compression {job.method} was asked for, but {reason}{hint}"


def _at_end(exchanges: Sequence[ExchangeStats]) -> tuple[float, float]:
    """The density that the warm-up comes down to, and that of the last step, where the warm-up was not over."""
    counts = min(exchanges, key=lambda counts: counts.density)
    return counts.density, max(counts.density, counts.density_now)


def _line(method: str, alone: int, at_end: tuple[float, float], stats: dict[str, Any], asked_fp16: bool) -> str:
    sent, received, dense = stats["bytes_sent"], stats["bytes_received"], stats["bytes_dense"]
    parts = [
        _steps(stats, alone),
        f"a rank sent {_bytes(sent)}, {dense / sent:.3g}x less than fp32 ({_bytes(dense)})",
    ]
    if asked_fp16:
        parts[-1] += f", {dense / 2 / sent:.3g}x less than the fp16 that the script asked for"
    if received:
        parts.append(f"received {_bytes(received)}, {stats['bytes_dense_received'] / received:.3g}x less")
    if stats["elements"]:
        compressing = stats["compress_seconds"] + stats["decode_seconds"]
        parts.append(f"{compressing:.1f} s compressing, {stats['exchange_seconds']:.1f} s waiting for other ranks")
    return f"{method}{_density(*at_end, stats)}: {'; '.join(parts)}"


def _steps(stats: dict[str, Any], alone: int) -> str:
    steps = (
        f"{stats['steps']:,} exchanges in {stats['steps'] + alone:,} steps" if alone else f"{stats['steps']:,} steps"
    )
    return ", ".join(filter(None, (steps, leaving.skipped(stats))))


def _density(final: float, last: float, stats: dict[str, Any]) -> str:
    """What was sent on average, and what it came down to where that is not the same."""
    if not stats["elements"]:
        return ""
    mean = stats["selected"] / stats["elements"]
    if last > final:
        return f", density {mean:.3g} on average ({last:g} in the end: the warm-up to {final:g} was not over)"
    return f", density {mean:.3g}" + (
        "" if 0.75 * final < mean < 1.25 * final else f" on average ({final:g} in the end)"
    )


def _bytes(count: float) -> str:
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while count >= 1000 and unit != "GB":
        count, unit = count / 1000, next(units)
    return f"{count:.3g} {unit}"
