"""The command `dgcrun`, as far as it works without Horovod."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

from dgc_horovod import tools
from dgc_horovod.errors import DGCError

_EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (None: of this process); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names and variables go out in the bytes that they came in, whatever PYTHONIOENCODING says
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
    if words[:1] == ["--build-horovod"]:
        code: int = tools.load("build_horovod").main(words[1:])
        return code
    from dgc_horovod.launch import commands

    try:
        try:
            return commands.run(words)
        finally:
            sys.stdout.flush()
    except DGCError as error:
        print(f"dgcrun: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python itself would fail at its end
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
