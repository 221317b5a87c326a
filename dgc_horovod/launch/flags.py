"""The command line of `dgcrun`: Horovod's own parser, and our flags in it, made from ``envvars.SETTABLE``."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import shutil
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from dgc_horovod import __version__, envvars
from dgc_horovod.compression import PRESETS
from dgc_horovod.errors import ConfigError, nearest
from dgc_horovod.launch import config_file
from dgc_horovod.names import replaced
from dgc_horovod.settings import OF_METHOD, Setting, as_text

# Flags that do something else than start a job; with one of them -np is not needed.
COMMANDS = {
    "--show-config": "print every setting and where it comes from",
    "--print-env": "print exports that make plain horovodrun and mpirun jobs compressed",
    "--doctor": "check this installation, the hosts (-H) and their links; say what to do",
    "--plan": "which exchange to take, from how many workers on (docs/planning.md)",
    "--build-horovod": "build Horovod for this environment; what follows goes to the build",
}
REPORT = "--report"
_REPORT = "a page (HTML) of what the job did, made of the metrics file"
# Arguments of the plan
PLAN = {
    "--model-size": "SIZE", "--step-ms": "MS", "--link-gbps": "GBPS",
    "--latency-ms": "MS", "--workers-per-node": "G",
}  # fmt: skip
A_JOB = "a job"
# What reads them
TOLD = (((REPORT,), (A_JOB, "--show-config")), (PLAN, ("--plan",)))
_DESCRIPTION = "Everything that horovodrun does, with the gradients compressed on the way. Scripts stay as they are."
_USAGE = """dgcrun -np N [-H HOST:SLOTS,...] [--dgc | --compression METHOD] [options] COMMAND
       dgcrun [--dgc | --compression METHOD] [options] torchrun ..."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line.

    Args:
        arguments: command line without the name of the program.

    Raises:
        ConfigError: a value of Horovod's, or its config file, is wrong.

    Returns:
        Horovod's namespace, with its values from the config file and, as ``compression_section``, ours; and name of a
        variable -> text for our flags.
    """
    from horovod.runner import launch

    from dgc_horovod.launch.launcher import check_horovod

    check_horovod()
    parser = functools.partial(_Parser, list(arguments))
    try:
        # Horovod makes its parser in this function, and hands it to nobody
        with replaced(launch, argparse=types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": parser})):
            args = launch.parse_args()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return _with_ours(args)


def parse_for_torch(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """As `parse`, without Horovod: our flags and ``--config-file``, then the command.

    Raises:
        ConfigError: the config file is wrong.
    """
    parser = _Parser(list(arguments))
    parser.add_argument("--config-file")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.set_defaults(num_proc=None, hosts=None, hostfile=None)
    return _with_ours(parser.parse_args())


def _with_ours(args: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, str]]:
    args.config_file = args.own_config_file
    given = {row.name: getattr(args, row.name) for row in envvars.SETTABLE}
    return args, {name: text for name, text in given.items() if text is not None}


def _take_config_file(args: argparse.Namespace, for_horovod: bool) -> None:
    """Take Horovod's values from the config file, checked: Horovod takes every section for what it should be."""
    content = config_file.read(args.config_file)
    off = envvars.is_off(envvars.from_environment())
    ours = {config_file.SECTION} if off else set()  # then nobody looks at what stands there
    args.compression_section = config_file.section_of(
        args.config_file, {key: value for key, value in content.items() if key not in ours}
    )
    if not for_horovod:
        return
    from horovod.runner.common.util import config_parser

    on_command_line = {name for name, value in vars(args).items() if value is not None}
    config_parser.set_args_from_config(args, content, on_command_line)


class _Command(argparse.Action):
    """A flag of `COMMANDS`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)
        if "-np" in parser._option_string_actions:
            parser._option_string_actions["-np"].required = False


class _Parser(argparse.ArgumentParser):
    """A parser of our flags; Horovod adds its own to it afterwards.

    Args:
        words: command line that it parses.
        more: arguments of argparse's.
    """

    def __init__(self, words: Sequence[str], **more: Any) -> None:
        super().__init__(**{**more, "prog": "dgcrun", "usage": _USAGE})
        self._words = words
        self.set_defaults(compression_section={})
        ours = self.add_argument_group("compression")
        one_of = ours.add_mutually_exclusive_group()
        one_of.add_argument("--dgc", dest=envvars.COMPRESSION.name, action="store_const", const="dgc")
        for variable in envvars.SETTABLE:
            names = [variable.flag, "--dgc-density"] if variable.flag == "--density" else [variable.flag]
            group = one_of if variable is envvars.COMPRESSION else ours
            how: dict[str, Any] = {"metavar": variable.metavar}
            if variable is envvars.ALLOW_INACTIVE:
                how = {"action": "store_const", "const": "on"}
            group.add_argument(*names, dest=variable.name, **how)
        for flag in COMMANDS:
            ours.add_argument(flag, action=_Command, nargs=0, default=False)
        for flag, metavar in {REPORT: "PAGE", **PLAN}.items():
            ours.add_argument(flag, metavar=metavar)
        self._ours = len(self._actions)

    def parse_args(self) -> argparse.Namespace:  # type: ignore[override]
        """As argparse's, of the words, with the values of the config file, which Horovod is not to read by itself."""
        found = super().parse_args(self._words)
        if found.config_file:
            _take_config_file(found, for_horovod="-np" in self._option_string_actions)
        found.own_config_file, found.config_file = found.config_file, None
        return found

    def add_argument(self, *flags: Any, **more: Any) -> Any:
        """As argparse's; Horovod's version beside ours."""
        if more.get("action") == "version":
            more["version"] = f"dgc_horovod {__version__}, Horovod {importlib.metadata.version('horovod')}"
        return super().add_argument(*flags, **more)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """As argparse's: what a word may abbreviate. Nothing, where that is several flags.

        Up to Python 3.11 argparse asks for every word, the script's own arguments too, and several are an error there.
        """
        found: list[Any] = super()._get_option_tuples(option_string)  # type: ignore[misc]
        return found if len(found) == 1 else []

    def format_help(self) -> str:
        """Our flags on one screen, and the names of Horovod's."""
        theirs = [action.option_strings[-1] for action in self._actions[self._ours :] if action.option_strings]
        return help_text([flag for flag in theirs if flag != "--config-file"])

    def error(self, message: str) -> NoReturn:
        """As argparse's, with the nearest flag for one that does not exist."""
        words = message.split() if "unrecognized" in message else self._words[:1]  # a wrong one hides what follows it
        unknown = [word.split("=")[0] for word in words if word.startswith("--")]
        unknown = [word for word in unknown if word not in self._option_string_actions]
        if unknown and "unrecognized" not in message:
            message = f"unrecognized arguments: {unknown[0]}"
        if unknown:
            near = nearest(unknown[0], self._option_string_actions)
            message += f"; did you mean {near}?" if near else "; dgcrun --help lists them"
        elif "-np" in message:
            message += "; for PyTorch DDP it is not needed: dgcrun --dgc torchrun --nproc-per-node 2 train.py"
        print(f"usage: {_USAGE}\ndgcrun: error: {message}", file=sys.stderr)
        sys.exit(2)


def help_text(horovods: Sequence[str]) -> str:
    """What ``dgcrun --help`` prints: a line for each of our flags, and the names of `horovods`."""
    lines = [f"usage: {_USAGE}", "", _DESCRIPTION, "", envvars.SETTABLE[0].group]
    lines += _row("--dgc", "Deep Gradient Compression: the same as --compression dgc")
    group = envvars.SETTABLE[0].group
    for variable in envvars.SETTABLE:
        if variable.group != group:
            group = variable.group
            lines += ["", group]
        value = "" if variable is envvars.ALLOW_INACTIVE else variable.metavar
        lines += _row(f"{variable.flag} {value}", variable.explained, _defaults(variable))
    lines += _row(f"{REPORT} PAGE", _REPORT)
    lines += _row("--config-file PATH", "Horovod's YAML file, which may have a section `compression:`")
    lines += ["", "instead of a job"]
    for flag, meaning in COMMANDS.items():
        lines += _row(flag, meaning)
    lines += _row("with --plan", " ".join(f"{flag} {metavar}" for flag, metavar in PLAN.items()))
    lines += ["", "Horovod's own (horovodrun --help explains them)"]
    lines += textwrap.wrap(
        " ".join(horovods), _width(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _defaults(variable: Setting) -> str:
    """Its default, and what it is for methods that have another."""
    if variable.default_text in ("", OF_METHOD):
        return variable.default_text
    texts = {name: as_text(preset[variable.field]) for name, preset in PRESETS.items() if variable.field in preset}
    return "; ".join([variable.default_text, *(f"{name}: {text}" for name, text in texts.items() if text != name)])


def _width() -> int:
    return max(80, min(120, shutil.get_terminal_size((110, 24)).columns))


def _row(flag: str, meaning: str, default: str = "") -> list[str]:
    text = f"{meaning} [{default}]" if default else meaning
    return textwrap.wrap(
        text, _width(), initial_indent=f"  {flag:30} ", subsequent_indent=" " * 33, break_on_hyphens=False
    )
