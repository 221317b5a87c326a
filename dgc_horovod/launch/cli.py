"""The command `dgcrun`: print its settings or exports, look at the cluster, run a job. It works without Horovod too.

Its command line is read by Horovod's own parser, with our flags in it, made from ``envvars.SETTABLE``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import io
import os
import shlex
import shutil
import signal
import sys
import textwrap
import types
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dgc_horovod import __version__, envvars, tools
from dgc_horovod.compression import PRESETS
from dgc_horovod.errors import ConfigError, DGCError, nearest
from dgc_horovod.launch import config_file, settings
from dgc_horovod.launch import job as one_job
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.site import FOLDER
from dgc_horovod.names import replaced
from dgc_horovod.settings import OF_METHOD, Setting, as_text

_EXIT_USAGE = 2
_NEEDS_HOROVOD = (
    f"there is no Horovod for {sys.executable}; dgcrun --build-horovod builds it for the torch and TensorFlow that are "
    "installed there. For torchrun it is not needed: dgcrun --dgc torchrun ... train.py"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (None: of this process); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names and variables go out in the bytes that they came in, whatever PYTHONIOENCODING says
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
    try:
        try:
            return run(words)
        finally:
            sys.stdout.flush()
    except DGCError as error:
        print(f"dgcrun: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python itself would fail at its end
        return 128 + signal.SIGPIPE


def run(words: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code.

    Raises:
        ConfigError: a setting is wrong, or some host is not fit for the job.
    """
    if words[:1] == ["--build-horovod"]:
        return int(tools.load("build_horovod").main(words[1:]))
    has_horovod = importlib.util.find_spec("horovod") is not None
    for_torch = one_job.is_for_torch(words) or (not has_horovod and bool({"--show-config", "--print-env"} & {*words}))
    if not (for_torch or has_horovod):
        raise ConfigError(_NEEDS_HOROVOD)
    args, given = parse_for_torch(words) if for_torch else parse(words)
    _check_flags(args)
    run_job: Callable[[Namespace, Job], int] = one_job.run_for_torch
    if not for_torch:
        from dgc_horovod.launch import launcher

        ssh = launcher.make_safe(args)
        run_job = functools.partial(launcher.run_job, ssh=ssh)
    job = job_of(args, given)
    if args.show_config:
        print(settings.show(_with_report(args, job)))
        return 0
    if args.print_env:
        print(_exports(job))
        return 0
    if for_torch and (args.plan or args.doctor):
        raise ConfigError("--plan and --doctor start no job: leave torchrun out")
    if args.plan:
        return int(tools.load("plan").run(args, job))
    if args.doctor:
        return int(tools.load("doctor").run(args, job, ssh))
    if not args.command:
        raise ConfigError("no command was given, e.g. dgcrun -np 2 --dgc python train.py")
    late = [word for word in args.command if word == "--dgc" or word.startswith("--dgc-")]
    if late:
        print(f"dgcrun: {late[0]} stands after the command, so the script gets it and dgcrun does not", file=sys.stderr)
    return run_job(args, _with_report(args, job))


def _check_flags(args: Namespace) -> None:
    """Raise ConfigError for flags that have no value, or that what is asked for does not read."""
    if args.build_horovod:
        raise ConfigError("--build-horovod must be the first word after dgcrun")
    doing = next((flag for flag in COMMANDS if _given(args, flag)), A_JOB)
    for told, readers in TOLD:
        for flag in told:
            if _given(args, flag) == "":
                raise ConfigError(f"{flag} is empty; leave it out, or give it a value")
            if _given(args, flag) and doing not in readers:
                raise ConfigError(f"{flag} goes with {' and '.join(readers)}; leave it out of {doing}")
    if args.plan and (args.hosts or args.hostfile):
        raise ConfigError("--plan needs no hosts; give the workers of one by --workers-per-node")


def _given(args: Namespace, flag: str) -> Any:
    """What one of `COMMANDS`, or of `TOLD`, has been given."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def _with_report(args: Namespace, job: Job) -> Job:
    """A job with the metrics file of its report, if it is to have one."""
    if args.report and job.switched_off:
        print(f"dgcrun: {envvars.ENABLED.name} is off, so there will be no {REPORT}", file=sys.stderr)
    elif args.report:
        with_file: Job = tools.load("report.command").with_metrics(job, args.report)
        return with_file
    return job


def job_of(args: Namespace, given: dict[str, str]) -> Job:
    """The settings of a job: flags before environment before its config file before the one for everyone.

    Args:
        args: Horovod's parsed arguments.
        given: texts of our flags, by name of the variable.

    Raises:
        ConfigError: one is wrong.
    """
    environment = envvars.from_environment()
    for name, near in envvars.unknown().items():
        print(f"dgcrun: {name} is set and means nothing{near and f'; did you mean {near}?'}", file=sys.stderr)
    return settings.resolve(given, environment, [*args.files, *config_file.for_everyone(environment)])


def _exports(job: Job) -> str:
    """Lines for a shell: a job prolog, or a module file."""
    if job.switched_off:
        return f"export {envvars.ENABLED.name}=0"
    if not job.method:
        raise ConfigError("no compression was asked for, so there is nothing to export; e.g. dgcrun --dgc --print-env")
    texts, now = job.variables(), envvars.from_environment()
    lines = [f"unset {name}" for name, text in texts.items() if not text and name in now]  # it would be used after all
    lines += [f"export {name}={shlex.quote(text)}" for name, text in texts.items() if text]
    return "\n".join([*lines, f'export PYTHONPATH={shlex.quote(FOLDER)}"${{PYTHONPATH:+:$PYTHONPATH}}"'])


# -- its command line

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


def parse(arguments: Sequence[str]) -> tuple[Namespace, dict[str, str]]:
    """Parse a command line.

    Args:
        arguments: command line without the name of the program.

    Raises:
        ConfigError: a value of Horovod's, or its config file, is wrong.

    Returns:
        Horovod's namespace, with its values from the config file and, as ``files``, the path and ours; and name of a
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


def parse_for_torch(arguments: Sequence[str]) -> tuple[Namespace, dict[str, str]]:
    """As `parse`, without Horovod: our flags and ``--config-file``, then the command.

    Raises:
        ConfigError: the config file is wrong.
    """
    parser = _Parser(list(arguments))
    parser.add_argument("--config-file")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.set_defaults(num_proc=None, hosts=None, hostfile=None)
    return _with_ours(parser.parse_args())


def _with_ours(args: Namespace) -> tuple[Namespace, dict[str, str]]:
    given = {row.name: getattr(args, row.name) for row in envvars.SETTABLE}
    return args, {name: text for name, text in given.items() if text is not None}


def _take_config_file(args: Namespace, path: str, for_horovod: bool) -> None:
    """Take Horovod's values from the config file, checked: Horovod takes every section for what it should be."""
    content = config_file.read(path)
    off = envvars.is_off(envvars.from_environment())
    ours = {config_file.SECTION} if off else set()  # then nobody looks at what stands there
    args.files = [
        (path, config_file.section_of(path, {key: value for key, value in content.items() if key not in ours}))
    ]
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
        self.set_defaults(files=[])
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
        instead = ours.add_mutually_exclusive_group()
        for flag in COMMANDS:
            instead.add_argument(flag, action=_Command, nargs=0, default=False)
        for flag, metavar in {REPORT: "PAGE", **PLAN}.items():
            ours.add_argument(flag, metavar=metavar)
        self._ours = len(self._actions)

    def parse_args(self) -> Namespace:  # type: ignore[override]
        """As argparse's, of the words, with the values of the config file, which Horovod is not to read by itself."""
        found = super().parse_args(self._words)
        path, found.config_file = found.config_file, None
        if path:
            _take_config_file(found, path, for_horovod="-np" in self._option_string_actions)
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


if __name__ == "__main__":
    sys.exit(main())
