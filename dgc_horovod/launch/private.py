"""The key of the status server stands on no command line, where ``ps`` would show it to every user of every host.

Over Gloo, Horovod writes the environment into the lines that start ranks: ``ssh HOST 'env NAME=VALUE ... python'``. The
key is left out of them. A rank on this host inherits it; for another host it goes to ssh's standard input, where a
shell of that host reads it. mpirun is told names only, and sends the values itself.
"""

from __future__ import annotations

import contextlib
import shlex
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from horovod.runner import gloo_run
from horovod.runner.common.util import env as horovod_env

from dgc_horovod import envvars

_KEY = envvars.STATUS_KEY.name


@contextlib.contextmanager
def key_on_no_command_line() -> Iterator[None]:
    """While Horovod starts ranks, in a process whose environment has the key."""
    if horovod_env.is_kubeflow_mpi():  # kubectl exec hands no input on; a pod has no other users
        yield
        return
    with (
        mock.patch.object(gloo_run, "env_util", types.SimpleNamespace(**{**vars(horovod_env), "is_exportable": _goes})),
        mock.patch.object(gloo_run, "get_remote_command", _with_key_as_input(gloo_run.get_remote_command)),
    ):
        yield


def _goes(name: str) -> bool:
    return name != _KEY and horovod_env.is_exportable(name)


def _with_key_as_input(stock: Any) -> Any:
    def get_remote_command(local_command: str, *args: Any, **kwargs: Any) -> str:
        """Horovod's line for a shell of this host, which puts the key where only ssh reads it."""
        (line,) = shlex.split(local_command)
        reading = shlex.join(["exec", "sh", "-c", f"IFS= read -r {_KEY}; export {_KEY}; {line}"])
        return f"{stock(shlex.quote(reading), *args, **kwargs)} <<DGC_END\n${_KEY}\nDGC_END\n"

    return get_remote_command
