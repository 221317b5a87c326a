"""Horovod's launcher, run as it is but for three names of it that are replaced meanwhile.

- The key of the status server stands on no command line, where ``ps`` would show it to every user of every host. Over
  Gloo, Horovod writes the environment into the lines that start ranks: ``ssh HOST 'env NAME=VALUE ... python'``. It is
  left out of them. A rank on this host inherits it; for another host it goes to ssh's standard input, where a shell
  of that host reads it. mpirun is told names only, and sends the values itself.
- The names that a discovery script prints go to ssh as those of ``-H`` do, and are checked like them.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator

import horovod
from horovod.common import util
from horovod.runner import gloo_run, launch
from horovod.runner.common.util import config_parser
from horovod.runner.common.util import env as horovod_env
from horovod.runner.elastic.discovery import HostDiscoveryScript

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch.inputs import check_place, checked_slots
from dgc_horovod.names import replaced

_KEY = envvars.STATUS_KEY.name
_NEEDED = (
    (launch, ("parse_args", "_run", "argparse", "discovery", "is_gloo_used", "_is_elastic")),
    (gloo_run, ("get_remote_command", "env_util")),
    (config_parser, ("set_args_from_config",)),
)


def check_horovod() -> None:
    """Raise ConfigError if Horovod's launcher is not laid out as we know it."""
    missing = [name for module, names in _NEEDED for name in names if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"Horovod {horovod.__version__} is not laid out as 0.28.1 is (its launcher lacks {', '.join(missing)}); "
            "install 0.28.1, or use horovodrun with what dgcrun --print-env prints"
        )


def run(args: Namespace) -> int:
    """What ``horovodrun`` does after it has parsed its command line; returns the exit code.

    Args:
        args: Horovod's parsed arguments, as `inputs.make_safe` left them.
    """
    util.EXTENSIONS.sort(reverse=True)  # the first one is asked what Horovod can do; TensorFlow loads slowly
    discovery = types.SimpleNamespace(**{**vars(launch.discovery), "HostDiscoveryScript": CheckedDiscovery})
    try:
        if args.log_level:
            logging.addLevelName(logging.NOTSET, "TRACE")
            logging.basicConfig(level=logging.getLevelName(args.log_level))
        with replaced(launch, discovery=discovery), _key_on_no_command_line():
            launch._run(args)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"dgcrun: {error}", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _key_on_no_command_line() -> Iterator[None]:
    """While Horovod starts ranks, in a process whose environment may have the key."""
    if not envvars.value(envvars.STATUS_KEY) or horovod_env.is_kubeflow_mpi():
        yield  # kubectl exec hands no input on; a pod has no other users
        return
    exported = types.SimpleNamespace(**{**vars(horovod_env), "is_exportable": _is_exported})
    with_input = _with_key_as_input(gloo_run.get_remote_command)
    with replaced(gloo_run, env_util=exported, get_remote_command=with_input):
        yield


def _is_exported(name: str) -> bool:
    return name != _KEY and bool(horovod_env.is_exportable(name))


def _with_key_as_input(stock: Callable[..., str]) -> Callable[..., str]:
    def get_remote_command(local_command: str, *args: object, **kwargs: object) -> str:
        """Horovod's line for a shell of this host, which puts the key where only ssh reads it."""
        (line,) = shlex.split(local_command)
        reading = shlex.join(["exec", "sh", "-c", f"IFS= read -r {_KEY}; export {_KEY}; {line}"])
        return f"{stock(shlex.quote(reading), *args, **kwargs)} <<DGC_END\n${_KEY}\nDGC_END\n"

    return get_remote_command


class CheckedDiscovery(HostDiscoveryScript):  # type: ignore[misc]  # Horovod has no types
    """Horovod's discovery by a script, with the names checked that it prints."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """As Horovod's. Raises ConfigError for what is no host's name; Horovod ends the job, or keeps those it has."""
        try:
            found: dict[str, int] = super().find_available_hosts_and_slots()
            for name in found:
                checked_slots(f"{name}:1", "what the discovery script prints")
            check_place(list(found))
        except ValueError as error:  # Horovod itself says it in a thread that ends with the job
            print(f"dgcrun: {error}", file=sys.stderr, flush=True)
            raise
        return found
