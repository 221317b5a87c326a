"""Horovod's launchers get the lab's hosts where their command line names none."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.netlab.hosts import Lab

LAUNCHERS = ("horovodrun", "dgcrun")
PLACES = ("-np", "--num-proc", "-H", "--hosts", "-hostfile", "--hostfile", "--host-discovery-script")


def with_hosts(command: Sequence[str], lab: Lab) -> list[str]:
    """`command`, with all hosts of a lab if it is a launcher's and says neither where nor how many.

    Args:
        command: program and arguments.
        lab: whose hosts they are.
    """
    program, *words = command
    if Path(program).name not in LAUNCHERS or any(word.split("=")[0] in PLACES for word in _own(words)):
        return [program, *words]
    return [program, "-np", str(lab.num_proc), "-H", lab.slots, *words]


def _own(words: Sequence[str]) -> Iterable[str]:
    """The launcher's own words: up to the job's command, which is the first one that can be run.

    Which flags take a value is not asked, so one whose value is a program's name ends them too early; a launcher
    then finds its own flag after ours, and the last one wins.
    """
    return itertools.takewhile(lambda word: word.startswith("-") or not shutil.which(word), words)
