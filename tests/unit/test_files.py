"""Whatever a path that a user gives leads to: done, or an error that says what is wrong; never a wait."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from dgc_horovod import files, recording
from dgc_horovod.errors import CheckpointError, ConfigError
from dgc_horovod.launch import config_file, launcher
from dgc_horovod.recording import JsonLines
from dgc_horovod.state import checkpoint
from dgc_horovod.tools.report import command, figures
from tests.helpers.saved import Alone

SECONDS = 20  # in which each must have ended


def odd_paths(folder: Path) -> dict[str, str]:
    """Paths by what is there."""
    pipe, to_pipe, loop, gone = (folder / name for name in ("pipe", "to a pipe", "loop", "gone"))
    os.mkfifo(pipe)
    to_pipe.symlink_to(pipe)
    loop.symlink_to(loop)
    gone.symlink_to(folder / "no such folder" / "x")
    (folder / "folder").mkdir()
    (folder / "file").write_text("x")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    names = ["pipe", "to a pipe", "loop", "gone", "folder", "folder/", "file/", "file/x", "socket", "binary", "empty"]
    odd = ["no such folder/x", "x" * 300, "y/" * 3000, "a\0b", "\udcff", "\n", " ", ".", "..", "pipe/x", "loop/x"]
    places = {f"{name[:20]!a}": str(folder / name) for name in [*names, *odd]}
    devices = "/dev/null /dev/full /dev/zero /dev/urandom /dev /proc/self/mem /proc/self/cmdline /".split()
    return {**places, **{name: name for name in devices}, "nothing": "", "relative pipe": os.path.relpath(pipe)}


def save(path):
    if not Path(path.replace("\0", "")).is_dir() or Path.cwd() in Path(path).resolve().parents:  # "/" could be written
        checkpoint.save(path, Alone(), lambda: checkpoint.Content("holds", b"model", None, None))


USES = {
    "metrics": lambda path: recording.Recording(path, "dgc", {}, list).end(),
    "lines": lambda path: JsonLines(path).write({"steps": 1}),
    "report of": figures.read,
    "page": lambda path: (command.check(path, ""), files.write(path, b"x" * 200_000)),
    "page unchecked": lambda path: files.write(path, b"x"),
    "config file": config_file.read,
    "hostfile": lambda path: launcher._hosts(Namespace(hosts=None, hostfile=path)),
    "checkpoint to save": save,
    "checkpoint to load": lambda path: checkpoint.load(path, Alone(), None, True),
    "manifest": lambda path: checkpoint._check_own(_with_manifest(path), "holds"),
    "manifest to load": lambda path: checkpoint.load(_with_manifest(path), Alone(), None, True),
}


def _with_manifest(path: str) -> Path:
    """A folder whose manifest is what is there."""
    folder = Path("checkpoint")
    folder.mkdir(exist_ok=True)
    manifest = folder / checkpoint.MANIFEST
    manifest.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError):  # no link can lead there
        manifest.symlink_to(path)
    return folder


@pytest.mark.parametrize("use", USES)
def test_odd_files(use, tmp_path, monkeypatch):
    """The metrics file had been a pipe: every rank hung in hvd.init(), without a word."""
    monkeypatch.chdir(tmp_path)
    for what, path in odd_paths(tmp_path).items():
        ended: list[BaseException | None] = []

        def one(path: str = path, ended: list[BaseException | None] = ended) -> None:
            try:
                USES[use](path)
                ended.append(None)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=one, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert ended, f"{use}: {what} is waited for"
        expected = (OSError,) if use in ("lines", "page unchecked") else (ConfigError, CheckpointError, OSError)
        assert ended[0] is None or isinstance(ended[0], expected), (what, ended[0])


def test_where_metrics_can_go(tmp_path):
    """A pipe with a reader, the null device, the pipe or file behind /dev/stdout; a full pipe is an error at once."""
    record = {"steps": 1, "text": "x" * 1000}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe.*cannot be written.*nobody reads"):
        recording.Recording(str(pipe), "dgc", {}, list)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        JsonLines(str(pipe)).write(record)
        assert b'"steps": 1' in os.read(reader, 10_000)
        with pytest.raises(OSError, match=r"temporarily|No space"):
            for _ in range(1000):
                JsonLines(str(pipe)).write(record)
    finally:
        os.close(reader)
    JsonLines("/dev/null").write(record)
    code = "from dgc_horovod import files; from dgc_horovod.recording import JsonLines; J = JsonLines('/dev/stdout')\n"
    code += "J.write({'a': 1}); files.write('/dev/stdout', b'x' * 200_000)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert said.startswith(b'{"time"') and said.endswith(b"x" * 200_000)


@pytest.mark.parametrize("find", [files.problem_with, lambda path: files.write(path, b"x")], ids=["before", "at"])
def test_what_is_wrong_is_said(find, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, words in ((tmp_path / "pipe", "pipe"), (tmp_path, "folder|directory"), (tmp_path / "loop", "symbolic")):
        try:
            said = find(path)
        except OSError as error:
            said = str(error)
        assert re.search(words, said)
