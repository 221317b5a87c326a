"""Several hosts on one Linux machine, for Horovod's launcher: namespaces behind a bridge, their links shaped."""

from __future__ import annotations

import argparse
import os

from benchmarks.netlab import hosts, tools

EXAMPLE = """\
example:
  python -m benchmarks.netlab up 2 1gbit
  python -m benchmarks.netlab exec 1 ssh nlh2 hostname
  python -m benchmarks.netlab exec 1 horovodrun --gloo -np 2 -H nlh1:1,nlh2:1 python train.py
  python -m benchmarks.netlab down

Hosts are nlh1, nlh2, ... at 10.77.0.1, 10.77.0.2, ... and reach each other by ssh
without a flag. It needs root. /etc/hosts and ~/.ssh stay as they are.
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
    up = commands.add_parser("up", help="bring hosts up; a lab that is up already is taken down first")
    up.add_argument("hosts", type=int, metavar="N", help="how many hosts")
    up.add_argument("rate", metavar="RATE", help="of each link in each direction, such as 1gbit; none: not shaped")
    run = commands.add_parser("exec", help="run a command on a host, in the same folder and environment")
    run.add_argument("number", type=int, metavar="I", help="which host, from 1")
    run.add_argument("program", metavar="CMD", help="what to run")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    commands.add_parser("down", help="remove everything and kill what still runs on the hosts")
    return top


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    try:
        if reason := tools.lacking():
            raise tools.NetlabError(reason)
        if options.command == "up":
            hosts.up(options.hosts, options.rate)
            lab = hosts.Lab(options.hosts)
            ends = [f"{lab.names[end]} at {lab.addresses[end]}" for end in (0, -1)]
            print(f"{' to '.join(ends)}; links: {options.rate}")
        elif options.command == "down":
            hosts.down()
        else:  # the same process, so that signals and the exit status are the command's own
            command = hosts.enter(options.number, [options.program, *options.arguments])
            os.execvp(command[0], command)
    except tools.NetlabError as error:
        raise SystemExit(f"netlab: {error}") from None


if __name__ == "__main__":
    main()
