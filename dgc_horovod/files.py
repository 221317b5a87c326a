"""Files whose paths a user gives: opened without blocking, whatever kind of file it is.

A process that opens a pipe which nobody reads, or writes to, would wait for ever.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import IO

AnyPath = str | os.PathLike[str]
_OWN = re.compile(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/self/fd/\d+")  # opened by the parent process


def read(path: AnyPath, most: int = -1) -> bytes:
    """Read a file, `most` bytes at most. Raises OSError, also if it is no regular file."""
    with _opened(path, os.O_RDONLY, "rb") as file:
        return file.read(most)


def write(path: AnyPath, data: bytes) -> None:
    """Replace the content of a file by `data`; also the null device and a terminal. Raises OSError."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file:
        file.write(data)


def append(path: AnyPath, data: bytes) -> None:
    """Add `data` to a file, in one piece: another job may write to the same one. Raises OSError.

    Also to a pipe that somebody reads, if it has room: this does not wait for the reader.
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as file:
        number = file.fileno()
        if os.write(number, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def problem_with(path: AnyPath) -> str:
    """Return the reason why `write` would fail; "" if none is known. Nothing is opened, made or changed."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        return "" if os.access(folder, os.W_OK) else "there is no such folder, or no permission to write in it"
    except (OSError, ValueError) as error:
        return _words(error)
    if _is_refused(path, found.st_mode, os.O_WRONLY):
        return f"it is {_kind(found.st_mode)}"
    return "" if os.access(path, os.W_OK) else "permission denied"


def _opened(path: AnyPath, flags: int, mode: str) -> IO[bytes]:
    try:
        number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a zero byte, or another character that no file name can have
        raise OSError(errno.EINVAL, _words(error)) from None
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a socket, or a pipe that nobody reads") from None
        raise
    try:
        kind = os.fstat(number).st_mode
        if _is_refused(path, kind, flags):
            raise OSError(errno.EINVAL, f"it is {_kind(kind)}")
        if not flags & os.O_APPEND:
            os.set_blocking(number, True)
        return os.fdopen(number, mode)
    except BaseException:
        os.close(number)
        raise


def _is_refused(path: AnyPath, kind: int, flags: int) -> bool:
    if stat.S_ISREG(kind):
        return False
    if stat.S_ISDIR(kind) or stat.S_ISBLK(kind) or stat.S_ISSOCK(kind):
        return True
    if _OWN.fullmatch(os.fspath(path)) or flags & os.O_APPEND:
        return False
    return not (flags & os.O_WRONLY and stat.S_ISCHR(kind))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
