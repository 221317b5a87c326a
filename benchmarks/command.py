"""The form of every command: its arguments, what it measures, the file that keeps it and the table that it prints."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab import NetlabError
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import OtherMachine

Argument = Callable[[argparse.ArgumentParser], object]


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Texts as they are written, and the default of every argument."""


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a command, as `ArgumentParser.add_argument` takes it."""
    return lambda parser: parser.add_argument(*names, **options)


@dataclass(frozen=True)
class Benchmark:
    """The command ``python -m benchmarks.NAME``.

    Args:
        name: of its module.
        help: what it measures; the first paragraph stands above the arguments in ``--help``, the others below.
        measure: function of the options: measures what they ask for, and keeps it in ``options.file``.
        table: function of the options: Markdown of what ``options.file`` holds.
        file: of results, where ``--file`` names no other.
        arguments: of its own.
        quick: whether there is ``--quick``: `measure` then takes seconds, and its results are thrown away.
    """

    name: str
    help: str
    measure: Callable[[argparse.Namespace], None]
    table: Callable[[argparse.Namespace], str]
    file: Path
    arguments: tuple[Argument, ...] = ()
    quick: bool = False

    def parser(self) -> argparse.ArgumentParser:
        """The command line."""
        above, _, below = self.help.partition("\n\n")
        made = argparse.ArgumentParser(f"python -m benchmarks.{self.name}", None, above, below, formatter_class=_Help)
        for add in self.arguments:
            add(made)
        made.add_argument("--file", type=Path, default=self.file, help="of results")
        made.add_argument("--table", action="store_true", help="measure nothing: print the table of what is kept")
        if self.quick:
            made.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works")
        return made

    def main(self) -> None:
        """Do what the command line says."""
        options = self.parser().parse_args()
        exit_on_signals()
        try:
            with tempfile.TemporaryDirectory() as folder:
                if self.quick and options.quick:
                    options.file = Path(folder, "quick.json")
                if not options.table:
                    self.measure(options)
                print(self.table(options) if options.file.exists() else f"{options.file} does not exist yet")
        except (NetlabError, LaunchError, OtherMachine, BrokenProcessPool, ModuleNotFoundError) as error:
            raise SystemExit(f"benchmarks.{self.name}: {error}") from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        if self.quick and options.quick:
            print("\nA few steps: these figures mean nothing, they show that everything works.")
