"""The command `dgcrun`: print its settings or exports, look at the cluster, run a job. It works without Horovod too."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from dgc_horovod import envvars, tools
from dgc_horovod.errors import ConfigError, DGCError
from dgc_horovod.launch import config_file, flags, settings
from dgc_horovod.launch import job as one_job
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.site import FOLDER

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
    args, given = flags.parse_for_torch(words) if for_torch else flags.parse(words)
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
    asked = [flag for flag in flags.COMMANDS if _given(args, flag)]
    if len(asked) > 1:
        raise ConfigError(f"{', '.join(asked)} do different things; give one of them")
    doing = asked[0] if asked else flags.A_JOB
    for told, readers in flags.TOLD:
        for flag in told:
            if _given(args, flag) == "":
                raise ConfigError(f"{flag} is empty; leave it out, or give it a value")
            if _given(args, flag) and doing not in readers:
                raise ConfigError(f"{flag} goes with {' and '.join(readers)}; leave it out of {doing}")
    if args.plan and (args.hosts or args.hostfile):
        raise ConfigError("--plan needs no hosts; give the workers of one by --workers-per-node")


def _given(args: Namespace, flag: str) -> Any:
    """What one of `flags.COMMANDS`, or of `flags.TOLD`, has been given."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def _with_report(args: Namespace, job: Job) -> Job:
    """A job with the metrics file of its report, if it is to have one."""
    if args.report and job.switched_off:
        print(f"dgcrun: {envvars.ENABLED.name} is off, so there will be no {flags.REPORT}", file=sys.stderr)
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
    for name, nearest in envvars.unknown().items():
        print(f"dgcrun: {name} is set and means nothing{nearest and f'; did you mean {nearest}?'}", file=sys.stderr)
    files = [(args.config_file, args.compression_section)] if args.config_file else []
    return settings.resolve(given, environment, [*files, *config_file.for_everyone(environment)])


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


if __name__ == "__main__":
    sys.exit(main())
