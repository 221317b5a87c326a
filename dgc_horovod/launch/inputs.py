"""What Horovod's launcher pastes, as it stands, into lines for a shell: refused or quoted before it gets there.

Horovod 0.28.1 starts ranks with ``sh -c`` and ssh. It quotes the command and the values of the environment; not quoted
are hosts, the identity file, interfaces, its own Python, the folder, names of variables, and what is for mpirun.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.runner import launch
from horovod.runner.common.util import hosts as horovod_hosts
from horovod.runner.util import network
from horovod.runner.util.lsf import LSFUtils

from dgc_horovod import envvars, files
from dgc_horovod.errors import ConfigError
from dgc_horovod.settings import CARRIED, can_carry

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_MOST_SLOTS = 2**16  # Horovod counts them one by one
_PLAIN = re.compile(
    r"[\w@%+=:,./~][\w@%+=:,./~-]*"
)  # what every shell takes as it stands, and no program for an option
_ALLOWED = "letters, digits and any of @ % + = : , . / ~ - _, with no - in front"


@dataclass(frozen=True)
class Ssh:
    """How Horovod's launcher reaches other hosts.

    Args:
        port: port of ssh, 1 to 65535; None: ssh's own.
        identity_file: path of the private key; None: ssh's own.

    Raises:
        ConfigError: one of them is not fit for a command line.
    """

    port: int | None = None
    identity_file: str | None = None

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 2**16:
            raise ConfigError(f"--ssh-port must be 1 to 65535, got {self.port}")
        if self.identity_file is not None:
            _must_be_plain("--ssh-identity-file", self.identity_file)


def make_safe(args: Namespace) -> Ssh:
    """Check what a shell, ssh or mpirun would see of Horovod's parsed arguments, and put it into `args` as checked.

    Args:
        args: Horovod's parsed arguments; changed are hosts, the discovery script and what is for mpirun.

    Raises:
        ConfigError: something in there could be taken for a command or an option, or there is no rank to start;
            nothing was started.
    """
    for name, value in vars(args).items():
        for text in [value] if isinstance(value, str) else value if isinstance(value, (list, tuple, set)) else ():
            if isinstance(text, str) and not can_carry(text):
                flag = "the command" if name == "command" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be {CARRIED}, got {text!r}: no process can be given it")
    if args.num_proc is not None and args.num_proc < 1:
        raise ConfigError(f"-np must be at least 1, got {args.num_proc}")
    for name in unsafe_names():
        print(f"dgcrun: the variable {name!r} is not passed on: no shell can carry such a name", file=sys.stderr)
        envvars.put_into_environment({name: ""})
    for nic in sorted(args.nics or ()):
        _must_be_plain("--network-interfaces", nic)
    args.hosts = _hosts(args)
    if args.host_discovery_script is not None:
        args.host_discovery_script = _words("--host-discovery-script", args.host_discovery_script, a_program=True)
    for flag in ("mpi_args", "binding_args"):
        if getattr(args, flag):
            setattr(args, flag, _words(f"--{flag.replace('_', '-')}", getattr(args, flag)))
    if args.output_filename:
        _must_be_no_option("--output-filename", args.output_filename)
        quoted = shlex.quote(args.output_filename)
        if quoted != args.output_filename and not _over_gloo(args):
            args.output_filename = quoted
    check_place([name for name, _ in _pairs(args.hosts or "")])
    return Ssh(args.ssh_port, args.ssh_identity_file)


def _over_gloo(args: Namespace) -> bool:
    """Whether Horovod will start the ranks itself, and not mpirun or jsrun; may take seconds to find out."""
    return bool(launch.is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun) or launch._is_elastic(args))


def unsafe_names() -> list[str]:
    """Variables of the environment whose names a shell would take for something else."""
    names = [name for name in envvars.environment() if not _PLAIN.fullmatch(name)]
    return [name for name in names if not name.startswith("BASH_FUNC_")]  # a shell's own, which Horovod leaves out


def checked_slots(slots: str, source: str) -> str:
    """``a:8,b:8``, read by Horovod's own parser and written again.

    Raises:
        ConfigError: it is no such list, or a name in it is none that a host can have; names `source`.
    """
    try:
        horovod_hosts.parse_hosts_and_slots(slots)
        pairs = _pairs(slots)
    except ValueError:
        raise ConfigError(f"{source} must be HOST:SLOTS,HOST:SLOTS, e.g. a:8,b:8, got {slots!r}") from None
    for name, count in pairs:
        if not _HOST.fullmatch(name):
            raise ConfigError(
                f"{source}: a host's name has letters, digits, dots, _ and -, with no - in front, got {name!r}; give "
                "another kind of name in ~/.ssh/config"
            )
        if count > _MOST_SLOTS:
            raise ConfigError(f"{source}: {name} must have at most {_MOST_SLOTS} slots, got {count}")
    return ",".join(f"{name}:{count}" for name, count in pairs)


def _pairs(slots: str) -> list[tuple[str, int]]:
    return [(host.hostname, host.slots) for host in horovod_hosts.parse_hosts(slots)] if slots else []


def _hosts(args: Namespace) -> str | None:
    """The hosts as checked; None where Horovod chooses, which is this host, or a discovery script tells."""
    if args.hosts:
        return checked_slots(args.hosts, "-H")
    if args.hostfile:
        return checked_slots(_from_file(args.hostfile), f"--hostfile {args.hostfile}")
    if LSFUtils.using_lsf() and not (args.host_discovery_script or args.show_config or args.print_env):
        allocation = envvars.environment().get("CSM_ALLOCATION_ID", "")
        _must_be_plain("CSM_ALLOCATION_ID", allocation, "; or name the hosts with -H")
        slots = ",".join(f"{host}:{LSFUtils.get_num_gpus()}" for host in LSFUtils.get_compute_hosts())
        return checked_slots(slots, "LSF")
    return None


def _from_file(path: str) -> str:
    try:
        files.read(path, 0)  # Horovod would wait for what is in a pipe
        return horovod_hosts.parse_host_files(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from None
    except IndexError:
        raise ConfigError(
            f"the hostfile {path} must have a line HOST slots=SLOTS for each host, and no other"
        ) from None


def _words(flag: str, text: str, a_program: bool = False) -> str:
    """`text` as the words that a shell would make of it, each quoted: nothing is expanded, nothing else is run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}, got {text!r}") from None
    if a_program:
        words[:1] = map(os.path.expanduser, words[:1])
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"{flag} must be a program that can be run, perhaps with arguments, got {text!r}; it is run without a "
                "shell, so put a pipe or $NAME into a script"
            )
    return shlex.join(words)


def _must_be_plain(what: str, text: str, advice: str = "") -> None:
    if not _PLAIN.fullmatch(text):
        raise ConfigError(f"{what} must have only {_ALLOWED}: Horovod gives it to a shell, got {text!r}{advice}")


def _must_be_no_option(flag: str, text: str) -> None:
    if text.startswith("-"):
        raise ConfigError(f"{flag} must not begin with -, got {text!r}; write ./{text} for a file of that name")


def check_place(hosts: Sequence[str]) -> None:
    """The folder and our Python go into lines for ssh, if any of `hosts` is another than this. Raises ConfigError."""
    if hosts and network.filter_local_addresses(hosts):
        _must_be_plain("with other hosts, the current folder", os.getcwd(), "; start from another")
        _must_be_plain("with other hosts, the path of Python", sys.executable, "; use one at another path")
