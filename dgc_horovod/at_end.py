"""The last line of a job: the savings of compression, or why nothing was compressed, and warnings about the run.

`watch` prints it for a script that compresses by itself, `launch.summary` for an activated one, with the exit code.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dgc_horovod import leaving
from dgc_horovod.compression import method_of
from dgc_horovod.config import AUTO, DGCConfig
from dgc_horovod.planning.trial import COMPRESSED
from dgc_horovod.stats import PROCESS, size, total

NO_STEP = "its optimizer has made no step"


def pending() -> int:
    """Number of local steps that no exchange has followed, when the job ends; of several optimizers the most."""
    for counts in PROCESS.exchanges:
        counts.close()
    return max((counts.pending for counts in PROCESS.exchanges), default=0)


def warnings(ranks: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Return warnings about the run; none if it was sound.

    Args:
        ranks: figures of each rank, see `recording.rank_figures`.
    """
    left, differed, found = pending(), PROCESS.replica_mismatches, []
    if differed:
        found.append(f"the ranks' weights differed at {differed:,} of {PROCESS.replica_checks:,} comparisons")
    found += [
        f"rank {each['rank']} skipped {each['left_out']:,} of its local steps, whose gradient was not finite"
        for each in ranks
        if each.get("left_out")
    ]
    if left:
        found.append(
            f"local steps at the end that were not exchanged: {left}. The ranks' weights differ: call "
            "optimizer.exchange() before evaluating or saving"
        )
    return found


def why_nothing(config: DGCConfig, no_step: str = NO_STEP) -> str:
    """Return the reason why nothing was compressed; "" if something was.

    Args:
        config: compression settings of the job.
        no_step: reason if no step was made.
    """
    left, stats = pending(), total(list(PROCESS.exchanges))
    if not stats["steps"] and left:
        return f"its optimizer has made {left} local steps, fewer than local_steps, after which ranks exchange"
    if not stats["steps"]:
        return no_step
    if not stats["elements"] and not config.automatic:
        return f"every tensor is 1-D or has fewer than min_numel={config.min_numel} elements"
    return ""


def line(method: str, ranks: Sequence[Mapping[str, Any]] = (), fp16: bool = False) -> str:
    """Return a text on the bytes that all exchanges of this process have sent, and on their savings.

    Args:
        method: name of the compression method.
        ranks: see `warnings`.
        fp16: whether the script itself asked for half precision.
    """
    stats = total(list(PROCESS.exchanges))
    sent, received, dense = stats["bytes_sent"], stats["bytes_received"], stats["bytes_dense"]
    if not sent:
        return f"{method}: the uncompressed exchange is not counted"
    if method == AUTO and not any(counts.mode == COMPRESSED for counts in PROCESS.exchanges):
        return f"auto: the uncompressed exchange was taken; {_steps(stats, 0)}"
    alone = sum(counts.steps_alone for counts in PROCESS.exchanges)
    parts = [_steps(stats, alone), f"a rank sent {size(sent)}, {dense / sent:.3g}x less than fp32 ({size(dense)})"]
    if fp16:
        parts[-1] += f", {dense / 2 / sent:.3g}x less than the fp16 that the script asked for"
    if received:
        parts.append(f"received {size(received)}, {stats['bytes_dense_received'] / received:.3g}x less")
    if stats["elements"]:
        compressing = stats["compress_seconds"] + stats["decode_seconds"]
        parts.append(f"{compressing:.1f} s compressing, {stats['exchange_seconds']:.1f} s waiting for other ranks")
    return "; ".join([f"{method}{_density(stats)}: {'; '.join(parts)}", *warnings(ranks)])


def not_active(method: str, reason: str) -> str:
    """Return the last line of a job that was not compressed."""
    return f"NOT ACTIVE: compression {method} was asked for, but {reason}"


def failed() -> bool:
    """Whether the script ends by an error."""
    return getattr(sys, "last_value", None) is not None or leaving.has_given_up.is_set()


def say(text: str, inactive: str) -> None:
    """Print the last line; nothing if an error ended the job before anything was compressed.

    Args:
        text: the line.
        inactive: reason why nothing was compressed; "" if something was.
    """
    if not (failed() and inactive):
        print(f"dgc_horovod: {text}{' (ended by an error)' * failed()}", file=sys.stderr, flush=True)


def watch(rank: int, config: DGCConfig) -> None:
    """Print the last line on rank 0 when this process ends; once for all optimizers.

    Args:
        rank: index of this rank.
        config: compression settings of the optimizer.
    """
    if rank == 0 and not PROCESS.tells_at_end:
        PROCESS.tells_at_end = True
        atexit.register(_at_exit, os.getpid(), config)


def _at_exit(process: int, config: DGCConfig) -> None:
    if os.getpid() != process or not PROCESS.exchanges:  # forked, or nothing was taken over
        return
    method, inactive = method_of(config), why_nothing(config)
    text = not_active(method, inactive) if inactive else line(method)
    say(text, inactive)


def _steps(stats: Mapping[str, Any], alone: int) -> str:
    steps, skipped = stats["steps"], stats["skipped"]
    made = f"{steps:,} exchanges in {steps + alone:,} steps" if alone else f"{steps:,} steps"
    return made + f", skipped {skipped:,} of {steps:,} (applied on no rank)" * bool(skipped)


def _density(stats: Mapping[str, Any]) -> str:
    """Return a text on the mean density, and on that in the end if it is different."""
    if not stats["elements"]:
        return ""
    mean = stats["selected"] / stats["elements"]
    counts = min(PROCESS.exchanges, key=lambda counts: counts.density)
    final = counts.density
    if counts.density_now > final:
        end = f" on average ({counts.density_now:g} in the end: the warm-up to {final:g} was not over)"
    else:
        end = "" if 0.75 * final < mean < 1.25 * final else f" on average ({final:g} in the end)"
    return f", density {mean:.3g}{end}"
