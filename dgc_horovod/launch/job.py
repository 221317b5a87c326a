"""One job of `dgcrun`: the hosts are checked, Horovod's launcher runs it, and its end is looked at."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Any

from horovod.runner import launch
from horovod.runner.util import network

from dgc_horovod import envvars
from dgc_horovod.launch import hosts, settings
from dgc_horovod.launch.desk import ACTIVE, DeskServer
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.summary import EXIT_INACTIVE

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_job(args: Any, job: Job, ssh: hosts.Ssh) -> int:
    """Run a job to its end; returns its exit code.

    Args:
        args: Horovod's parsed arguments.
        job: the settings of the compression.
        ssh: how to reach the hosts.

    Raises:
        ConfigError: some host is not fit for it; nothing was started.
    """
    slots = hosts.host_slots(args)
    envvars.put_into_environment({**job.variables(), envvars.HOSTS.name: slots})
    if not job.active:
        print(f"dgcrun: {settings.show(job).splitlines()[0]}", file=sys.stderr)
        return _horovods_launcher(args)
    _put_on_path(hosts.check(slots, args.command, ssh))
    launcher = _Launcher(args)
    desk = DeskServer()  # after the fork: its thread would not survive one
    launcher.go(desk.address(_own_addresses(slots)))
    code = launcher.wait()
    alive = desk.has(ACTIVE)
    desk.close()
    if code == 0 and not alive:
        return _never_alive(job)
    return code


def _put_on_path(folders: list[str]) -> None:
    path = [*folders, *envvars.environment().get("PYTHONPATH", "").split(os.pathsep)]
    envvars.put_into_environment({"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path)))})


def _own_addresses(slots: str) -> list[str]:
    names = [part.split(":")[0] for part in slots.split(",") if part]
    if not names:  # only a discovery script knows the hosts
        return sorted(network.get_local_host_addresses())
    return list(dict.fromkeys(filter(None, map(hosts.own_address_towards, names))))


def _never_alive(job: Job) -> int:
    allowed = job.get(envvars.ALLOW_INACTIVE)
    print(
        f"dgc_horovod: NOT ACTIVE: compression {job.method} was asked for, but no rank has called hvd.init() of "
        "horovod.torch or horovod.tensorflow in a Python that ran dgc_horovod's sitecustomize"
        + ("" if allowed else "; --allow-inactive makes this no error"),
        file=sys.stderr,
    )
    return 0 if allowed else EXIT_INACTIVE


class _Launcher:
    """Horovod's launcher in a child of its own: over MPI it turns into mpirun, and we have to outlive it.

    Args:
        args: Horovod's parsed arguments.
    """

    def __init__(self, args: Any) -> None:
        reading, self._writing = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._writing)
            os.setsid()  # over MPI it is a shell that starts mpirun: a signal has to reach both
            sys.exit(_child(args, reading))
        os.close(reading)

    def go(self, desk: str) -> None:
        """Let the child begin. `desk`: where its ranks report to."""
        with os.fdopen(self._writing, "w") as pipe:
            pipe.write(desk)

    def wait(self) -> int:
        """Wait for its end; returns the exit code. Signals are passed on to all that belongs to it."""
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            status = os.waitpid(self._child, 0)[1]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, number)


def _child(args: Any, reading: int) -> int:
    """Run Horovod's launcher once the parent says where its desk is; not at all if the parent has died."""
    with os.fdopen(reading) as pipe:
        desk = pipe.read()
    if not desk:
        return 1
    envvars.put_into_environment({envvars.DESK.name: desk})
    return _horovods_launcher(args)


def _horovods_launcher(args: Any) -> int:
    """What ``horovodrun`` does after it has parsed its command line; returns the exit code."""
    if args.log_level:
        logging.addLevelName(logging.NOTSET, "TRACE")
        logging.basicConfig(level=logging.getLevelName(args.log_level))
    try:
        launch._run(args)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        print(f"dgcrun: {error}", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
