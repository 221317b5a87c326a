"""What Horovod's build is told of the environment it is for."""

from __future__ import annotations

import subprocess

import pytest

from dgc_horovod.tools import build_horovod


@pytest.mark.parametrize(
    ("line", "standard"),
    [
        ("#error C++20 or later compatible compiler is required to use PyTorch.", 20),
        ("#error C++17 or later compatible compiler is required to use PyTorch.", 17),
        ("#error C++14 or later compatible compiler is required to use PyTorch.", 17),
        ("nothing of the kind", 17),
        (None, 17),
    ],
)
def test_the_standard_is_the_one_that_torchs_headers_ask_for(tmp_path, monkeypatch, line, standard):
    monkeypatch.setattr(build_horovod.sysconfig, "get_path", lambda name: str(tmp_path))
    if line is not None:
        header = tmp_path / build_horovod.TORCH_HEADER
        header.parent.mkdir(parents=True)
        header.write_text(f"#if __cplusplus < 0\n{line}\n#endif\n")
    assert build_horovod.torch_standard() == standard
    for joined in (True, False):
        text = build_horovod.after_project(joined)
        assert ("cxx_std_20" in text) == (standard == 20) and text.endswith("endfunction()\n")
        assert ("UNITY_BUILD ON" in text) == joined


def test_a_build_that_fails_is_tried_with_less(monkeypatch, tmp_path, capsys):
    """First file by file, which any compiler can, then without CUDA, then without MPI."""
    tried = []

    def build_wheel(build, target):
        tried.append((build.joined, build.cuda, build.mpi))
        target.mkdir(parents=True)
        if build.mpi or build.joined:
            raise build_horovod.BuildFailed("no")
        wheel = target / "horovod-0.whl"
        wheel.touch()
        return wheel

    monkeypatch.setattr(build_horovod, "build_wheel", build_wheel)
    mpi = "/none/mpicxx"
    wanted = build_horovod.Build({"torch": "2.0"}, mpi=mpi, cuda=True)
    found = build_horovod.build_with_fallback(wanted, tmp_path)
    assert tried == [(True, True, mpi), (False, True, mpi), (False, False, mpi), (False, False, None)]
    said = capsys.readouterr().err
    assert all(build_horovod.HOW_TO_GO_ON[why] in said for why in ("joined", "cuda", "mpi"))
    tried.clear()
    assert build_horovod.build_with_fallback(wanted, tmp_path) == found and not tried  # what fails is known


def test_of_a_log_what_the_compiler_refuses_is_shown(tmp_path):
    """Sixteen compilers at work end with the warnings of others."""
    log = tmp_path / "build.log"
    wrong = ["  FAILED: [code=1] group_table.cc.o", "  group_table.h:35:47: error: 'string' is not a member of 'std'"]
    warnings = ["  controller.cc:811:27: warning: 'reduce_op' may be used uninitialized"] * 60
    pips = ["  error: subprocess-exited-with-error", "  error: it is pip that says so"]
    log.write_text("\n".join(["[1/2] error.cc.o", *wrong, *warnings, *pips]))
    assert build_horovod.tail(log).splitlines() == wrong
    log.write_text("\n".join(["a line", *warnings, "Traceback (most recent call last)", "  of pip"]))
    assert build_horovod.tail(log).splitlines() == warnings[-build_horovod.LOG_TAIL_LINES :]


def test_without_a_home_folder_only_the_cache_is_missing(tmp_path, monkeypatch, capsys):
    """Not even --help had worked."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build_horovod.os.path, "expanduser", lambda path: path)
    with pytest.raises(SystemExit) as ended:
        build_horovod.main(["--help"])
    assert ended.value.code == 0 and "~/.cache/dgc_horovod/wheels" in capsys.readouterr().out
    assert build_horovod.parse(["--cache", str(tmp_path)]).cache == tmp_path
    assert build_horovod.main([]) == 1 and "name a folder with --cache" in capsys.readouterr().err


def test_cmake_is_run_from_folders_with_spaces_and_without_what_it_does_not_know(tmp_path, monkeypatch):
    """The path of Python in a first line had ended at its first space."""
    folder = tmp_path / "sp ace'd"
    folder.mkdir()
    cmake = folder / "cmake"
    cmake.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(build_horovod.shutil, "which", lambda name: str(cmake))
    build = build_horovod.Build({"torch": "2.0"}, mpi=None, cuda=False)
    (tmp_path / "work").mkdir()
    wrapper = build_horovod.build_environment(tmp_path / "work", build)["HOROVOD_CMAKE"]
    assert wrapper != str(cmake)
    words = ["--build", "a b", "VERBOSE=1", "-j8", "-j", "2", "$x", ""]
    said = subprocess.run([wrapper, *words], capture_output=True, text=True, check=True).stdout
    assert said == "--build|a b|-j|2|$x||"
