"""What Horovod's build is told of the environment it is for."""

from __future__ import annotations

import pytest

from dgc_horovod.launch import build_horovod


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
    text = build_horovod.after_project()
    assert ("cxx_std_20" in text) == (standard == 20) and text.endswith("endfunction()\n")


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
