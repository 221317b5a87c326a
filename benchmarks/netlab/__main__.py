"""Several hosts on one Linux machine, for Horovod's launcher: namespaces behind a bridge, their links shaped."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from benchmarks.netlab import launcher, lifecycle, network, state, status, tools
from benchmarks.netlab.hosts import Lab, enter

EXAMPLE = """\
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring hosts up and measure the link between the first two")
    up.add_argument("--hosts", type=int, metavar="N", required=True, help="how many hosts")
    up.add_argument(
        "--rate",
        default=network.UNSHAPED,
        help="of each link in each direction, such as 100mbit or 1gbit; none, the default: not shaped",
    )
    up.add_argument(
        "--delay", metavar="MS", default="0ms", help="that a packet waits as it leaves a host, such as 40ms"
    )
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
        raise tools.NetlabError("run what? run [--host I] -- CMD ...")
    if not (record := state.read()):
        raise tools.NetlabError("no lab is up: python -m benchmarks.netlab up --hosts N")
    lab = Lab(record.hosts, record.ranks)
    entered = enter(host, launcher.with_hosts(command, lab))
    exports = {"NETLAB_HOSTS": lab.slots, "NETLAB_NP": str(lab.num_proc)}
    os.execvpe(entered[0], entered, {**os.environ, **exports})


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    try:
        if reason := tools.lacking():
            raise tools.NetlabError(reason)
        if options.command == "up":
            record = lifecycle.keep(
                options.hosts, network.Link(options.rate, options.delay, options.loss), options.per_host_ranks
            )
            print(f"{Lab(record.hosts, record.ranks).slots}; links: {status.links(record)}")
        elif options.command == "down":
            with state.reserve():  # never under a study that runs
                lifecycle.down()
        elif options.command == "status":
            whole, text = status.describe()
            print(text)
            raise SystemExit(not whole)
        else:
            run(options.host, options.words)
    except tools.NetlabError as error:
        raise SystemExit(f"netlab: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
