"""The ssh server of one host: ``python -m benchmarks.netlab.server AUTHORIZED_KEYS``, in the host's namespaces.

Whoever has the lab's key may run commands as the user that started the lab, each in the environment of a fresh
login: nothing of what the lab was started with reaches them. There are no terminals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import sys

import asyncssh

SHELL = "/bin/sh"  # not the user's own: some read the user's files even for one command
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CHUNK = 1 << 16
Process = asyncssh.SSHServerProcess[bytes]


def login_environment(user: pwd.struct_passwd) -> dict[str, str]:
    """All that a command finds in its environment."""
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": SHELL, "PATH": PATH}


async def serve(process: Process) -> None:
    """Run what one client asks for; if the client goes away, what it started is killed."""
    user = pwd.getpwuid(os.getuid())
    words, pipe = ["-l"] if process.command is None else ["-c", process.command], asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        SHELL, *words, stdin=pipe, stdout=pipe, stderr=pipe, env=login_environment(user), cwd=user.pw_dir,
        start_new_session=True,
    )  # fmt: skip
    await process.redirect(stdout=child.stdout, stderr=child.stderr)
    feeding = asyncio.create_task(_feed(process, child))
    work = asyncio.create_task(_status(process, child))
    gone = asyncio.create_task(process.wait_closed())
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    feeding.cancel()
    if gone.done() or work.exception():
        work.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        _exit(process, work.result())


async def _feed(process: Process, child: asyncio.subprocess.Process) -> None:
    """Pass the input on; asyncssh itself would give up the client where a command does not read all of it."""
    assert child.stdin
    with contextlib.suppress(OSError, asyncssh.Error):  # either end may close before the other
        while data := await process.stdin.read(CHUNK):
            child.stdin.write(data)
            await child.stdin.drain()
    child.stdin.close()


async def _status(process: Process, child: asyncio.subprocess.Process) -> int:
    """Exit status of `child`, once all its output is on its way."""
    await process.stdout.drain()
    await process.stderr.drain()
    return await child.wait()


def _exit(process: Process, status: int) -> None:
    if status < 0:
        process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
    else:
        process.exit(status)


async def main(authorized_keys: str) -> None:
    """Say "ready" once clients can connect; serve them until killed."""
    async with await asyncssh.listen(
        port=22,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=authorized_keys,
        process_factory=serve,
        encoding=None,
        allow_pty=False,
    ) as server:
        print("ready", flush=True)
        await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
