"""Several hosts on one Linux machine, for Horovod's launcher: namespaces behind a bridge, their links shaped.

example:
  python -m benchmarks.netlab up --hosts 4 --rate 1gbit --per-host-ranks 2
  python -m benchmarks.netlab run -- dgcrun --gloo --dgc python train.py
  python -m benchmarks.netlab run --host 3 -- ssh host2 hostname
  python -m benchmarks.netlab down
  python -m benchmarks.netlab up --hosts 2 --rate 50mbit --delay 40ms --loss 0.1%

Hosts are host1, host2, ... at 10.77.0.1, 10.77.0.2, ... and reach each other by ssh
without a flag. It needs root. /etc/hosts and ~/.ssh stay as they are.
run gives the launcher -np and -H where it has neither, and exports both as
NETLAB_NP and NETLAB_HOSTS.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.netlab import hosts as state
from benchmarks.netlab import lifecycle, network
from benchmarks.netlab.hosts import Lab, enter
from benchmarks.netlab.network import NetlabError

LAUNCHERS = ("horovodrun", "dgcrun")
_DAMAGED = "damaged"
PLACES = ("-np", "--num-proc", "-H", "--hosts", "-hostfile", "--hostfile", "--host-discovery-script")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    above, _, below = (__doc__ or "").partition("\n\n")
    how = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m benchmarks.netlab", None, above, below, formatter_class=how)
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring hosts up and measure the link between the first two")
    up.add_argument("--hosts", type=int, metavar="N", required=True, help="how many hosts")
    rates = "of each link in each direction, such as 100mbit or 1gbit; none, the default: not shaped"
    up.add_argument("--rate", default=network.UNSHAPED, help=rates)
    waits = "that a packet waits as it leaves a host, such as 40ms"
    up.add_argument("--delay", metavar="MS", default="0ms", help=waits)
    up.add_argument("--loss", metavar="PART", default="0%", help="part of these packets that is lost, such as 0.1%%")
    up.add_argument("--per-host-ranks", type=int, metavar="N", default=1, help="ranks on each host [1]")
    run = commands.add_parser("run", help="run a command on a host, in the same folder and environment")
    run.add_argument("--host", type=int, metavar="I", default=1, help="which host [1]")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="program and arguments")
    commands.add_parser("status", help="what is up; exit status 1 if nothing is, or something is damaged")
    commands.add_parser("down", help="remove everything and kill what still runs on the hosts")
    return top


def run(host: int, words: Sequence[str]) -> NoReturn:
    """Become a command on a host, so that its signals and its exit status are the command's own."""
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise NetlabError("run what? run [--host I] -- CMD ...")
    if not (record := state.read()):
        raise NetlabError("no lab is up: python -m benchmarks.netlab up --hosts N")
    entered = enter(host, with_hosts(command, record))
    exports = {"NETLAB_HOSTS": record.slots, "NETLAB_NP": str(record.num_proc)}
    os.execvpe(entered[0], entered, {**os.environ, **exports})


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


def links(record: Lab) -> str:
    """Nominal and measured rate of a lab's links."""
    link = record.link
    nominal = "not shaped" if link.rate == network.UNSHAPED else f"{link.rate} in each direction"
    if link.is_relayed:
        nominal += f", {link.delay} of delay and {link.loss} of loss from host to host"
    if not record.measured:
        return f"{nominal}, not measured"
    there, back = record.measured
    return f"{nominal}; measured {there:.0f} Mbit/s from host1 to host2, {back:.0f} Mbit/s back"


def describe() -> tuple[bool, str]:
    """Whether a lab is up and all of it is there, and what there is to say about it."""
    found = network.names()
    if not (record := state.read()):
        remains = found or state.STATE.exists() or any(network.OVERLAYS.glob(f"{network.PREFIX}*"))
        return False, "no lab is up" + ("; something of one is there, which down removes" if remains else "")
    lines = [f"{record.hosts} hosts, -np {record.num_proc} -H {record.slots}", f"links: {links(record)}"]
    if network.SWITCH not in found:
        lines.append(f"{_DAMAGED}: the switch between the hosts is gone")
    for number, (name, address) in enumerate(zip(record.names, record.addresses, strict=True), 1):
        lines.append(f"{name} at {address}: {_host(number, found)}")
    return not any(_DAMAGED in line for line in lines), "\n".join(lines)


def _host(number: int, found: list[str]) -> str:
    if network.namespace(number) not in found:
        return f"{_DAMAGED}: its network namespace is gone"
    server = state.server(number)
    others = len([pid for pid in network.processes(network.namespace(number)) if pid != server])
    return f"{'ssh server alive' if server else f'{_DAMAGED}: its ssh server has ended'}; other processes: {others}"


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    try:
        if reason := network.lacking():
            raise NetlabError(reason)
        if options.command == "up":
            link = network.Link(options.rate, options.delay, options.loss)
            record = lifecycle.keep(options.hosts, link, options.per_host_ranks)
            print(f"{record.slots}; links: {links(record)}")
        elif options.command == "down":
            with state.reserve():  # never under a study that runs
                lifecycle.down()
        elif options.command == "status":
            whole, text = describe()
            print(text)
            raise SystemExit(not whole)
        else:
            run(options.host, options.words)
    except NetlabError as error:
        raise SystemExit(f"netlab: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
