"""What `dgcrun` can be asked to do: print its settings or exports, look at the cluster, run a job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import config_file, flags, hosts, settings
from dgc_horovod.launch.job import run_job
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.site import FOLDER


def run(words: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code.

    Raises:
        ConfigError: a setting is wrong, or some host is not fit for the job.
    """
    args, given = flags.parse(words)
    job = _job(args, given)
    ssh = hosts.Ssh(args.ssh_port, args.ssh_identity_file)
    if args.show_config:
        print(settings.show(job))
        return 0
    if args.print_env:
        print(_exports(job))
        return 0
    if args.doctor:
        from dgc_horovod.launch import doctor  # with it comes the engine, which a job needs in its ranks only

        envvars.put_into_environment({envvars.BACKEND.name: job.get(envvars.BACKEND)})
        interpreter = hosts.interpreter_of(args.command) or sys.executable
        return doctor.diagnose(hosts.host_slots(args), interpreter, ssh, job, _plan(args))
    if not args.command:
        raise ConfigError("no command was given, e.g. dgcrun -np 2 --dgc python train.py")
    return run_job(args, job, ssh)


def _job(args: Any, given: dict[str, str]) -> Job:
    """Flags before environment before the job's config file before the one for everyone."""
    environment = envvars.from_environment()
    paths = [args.config_file, environment.get(envvars.CONFIG_FILE.name)]
    files = [(path, config_file.load(path)) for path in dict.fromkeys(paths) if path]
    return settings.resolve(given, environment, files)


def _exports(job: Job) -> str:
    """Lines for a shell: a job prolog, or a module file."""
    if not job.active:
        return f"export {envvars.ENABLED.name}=0"
    lines = [f"export {name}={shlex.quote(text)}" for name, text in job.variables().items() if text]
    return "\n".join([*lines, f'export PYTHONPATH={shlex.quote(FOLDER)}"${{PYTHONPATH:+:$PYTHONPATH}}"'])


def _plan(args: Any) -> Any:
    from dgc_horovod.launch import plan

    if not (args.model_size or args.step_ms or args.link_gbps):
        return None
    if not (args.model_size and args.step_ms and args.num_proc):
        raise ConfigError(
            "--model-size, --step-ms and -np go together, e.g. dgcrun --doctor --model-size 25.6M --step-ms 180 -np 16"
        )
    link = _number("--link-gbps", args.link_gbps) * 1e9 if args.link_gbps else None
    return plan.Plan(plan.parse_size(args.model_size), _number("--step-ms", args.step_ms) / 1000, args.num_proc, link)


def _number(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"{flag} must be a positive number, got {text!r}")
    return value
