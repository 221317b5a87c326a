"""dgcrun's command line: Horovod's parser with our flags, and a help that fits a screen."""

from __future__ import annotations

import horovod
import pytest

from dgc_horovod import __version__, envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import cli, job


def test_our_flags_and_horovods_go_together():
    args, given = cli.parse(
        ["-np", "2", "-H", "a:1,b:1", "--density", "0.01", "--cycle", "2", "--dgc-clip-norm=5", "--gloo",
         "python", "train.py", "--density", "7"]
    )  # fmt: skip
    assert (args.num_proc, args.hosts, args.cycle_time_ms, args.use_gloo) == (2, "a:1,b:1", 2.0, True)
    assert given == {"DGC_DENSITY": "0.01", "DGC_CLIP_NORM": "5"}
    assert args.command == ["python", "train.py", "--density", "7"]


@pytest.mark.parametrize("own", ["--mode", "--mode=train", "--p", "--r", "--d", "--dgc-", "--num"])
def test_arguments_of_the_script_may_look_like_a_part_of_a_flag(own):
    """`--mode` was "ambiguous: could match --model-size, --model"."""
    assert cli.parse(["-np", "2", "python", "train.py", own])[0].command == ["python", "train.py", own]


@pytest.mark.parametrize("variable", envvars.SETTABLE, ids=lambda v: v.name)
def test_every_setting_has_a_flag(variable):
    value = [] if variable is envvars.ALLOW_INACTIVE else ["some"]
    _, given = cli.parse(["-np", "2", variable.flag, *value, "python", "train.py"])
    assert given == {variable.name: value[0] if value else "on"}


def test_dgc_is_compression_dgc():
    assert cli.parse(["-np", "1", "--dgc", "true"])[1] == {"DGC_COMPRESSION": "dgc"}
    assert cli.parse(["-np", "1", "--compression", "topk", "true"])[1] == {"DGC_COMPRESSION": "topk"}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_np_is_not_needed_where_no_job_is_started(command):
    args, _ = cli.parse([command])
    assert getattr(args, command.removeprefix("--").replace("-", "_"))


DENSTY = ["--dgc-densty", "0.1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-np", "1", "--dgc", "--compression", "gaussian", "true"], ["not allowed with"]),
        (["--show-config", "--plan"], ["--plan: not allowed with argument --show-config"]),
        (["--dgc", "python", "train.py"], ["-np"]),
        (["-np", "2", *DENSTY, "python", "train.py"], ["--dgc-densty", "did you mean --dgc-density"]),
        ([*DENSTY, "-np", "2", "python", "train.py"], ["--dgc-densty", "did you mean --dgc-density"]),
    ],
)
def test_what_is_wrong_with_flags(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and all(text in told for text in said)


def test_version_is_ours_and_horovods(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["--version"])
    assert capsys.readouterr().out.strip() == f"dgc_horovod {__version__}, Horovod {horovod.__version__}"


def test_help_fits_a_screen_and_names_everything(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse(["--help"])
    text = capsys.readouterr().out
    ours, theirs = text.split("Horovod's own")
    assert ended.value.code == 0 and len(ours.splitlines()) <= 65 and max(map(len, text.splitlines())) <= 120
    for variable in envvars.SETTABLE:
        (line,) = [line for line in ours.splitlines() if line.startswith(f"  {variable.flag} ")]
        assert variable.meaning.split(",")[0][:20] in line
        assert not variable.default_text or f"[{variable.default_text}" in " ".join(ours.split())
    assert "[0.001; auto: 0.01; local: 0.015]" in ours and "[off; local: on]" in ours
    for flag in ("--hosts", "--gloo", "--cycle-time-ms", "--host-discovery-script", "--config-file"):
        assert flag in text
    assert "--dgc" not in theirs


def test_no_rank_is_no_job():
    for number in ("0", "-3"):
        for words in (["true"], ["--show-config"]):
            with pytest.raises(ConfigError, match=f"-np must be at least 1, got {number}"):
                cli.run(["-np", number, *words])


def test_the_metrics_file_of_a_report_is_shown(tmp_path, capsys):
    assert cli.run(["--show-config", "--dgc", "--report", str(tmp_path / "x.html")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "metrics_file" in line]
    assert line.split() == ["metrics_file", str(tmp_path / "x.jsonl"), "flag", "--report"]
    with pytest.raises(ConfigError, match="none was asked for"):
        cli.run(["-np", "1", "--report", str(tmp_path / "x.html"), "true"])


def test_exports_take_away_what_is_not_used(monkeypatch, capsys):
    """Beside the exported method they would have been used: a profile's density of dgc for topk."""
    for name, text in {"COMPRESSION": "dgc", "DENSITY": "0.5", "WARMUP_STEPS": "500", "VALUES": "fp16"}.items():
        monkeypatch.setenv(f"DGC_{name}", text)
    assert cli.run(["--compression", "topk", "--dgc-values", "fp32", "--print-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"unset DGC_DENSITY", "unset DGC_WARMUP_STEPS"} == {line for line in lines if line.startswith("unset")}
    assert "export DGC_COMPRESSION=topk" in lines and "export DGC_VALUES=fp32" in lines


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--dgc torchrun --nproc-per-node 2 train.py", True),
        ("--dgc /opt/bin/torchrun train.py -np 2", True),
        ("--dgc python -m torch.distributed.run train.py", True),
        ("--dgc accelerate launch train.py", True),
        ("-np 2 --dgc python train.py torchrun", False),
        ("-np=2 torchrun train.py", False),
        ("--dgc python train.py", False),
        ("torchrun train.py", True),
    ],
)
def test_who_starts_the_ranks(words, asked):
    assert job.is_for_torch(words.split()) == asked


def test_flags_before_torchrun_are_ours_and_those_behind_it_its_own(capsys):
    args, given = cli.parse_for_torch(["--dgc", "--density", "0.1", "torchrun", "--nproc-per-node", "2", "--density"])
    assert given == {"DGC_COMPRESSION": "dgc", "DGC_DENSITY": "0.1"}
    assert args.command == ["torchrun", "--nproc-per-node", "2", "--density"]
    with pytest.raises(SystemExit):
        cli.parse_for_torch(["--dgc-densty", "0.1", "torchrun", "train.py"])
    assert "did you mean --dgc-density?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="torchrun starts the ranks itself: leave -np out"):
        cli.run(["-np", "2", "--dgc", "torchrun", "train.py"])
    with pytest.raises(ConfigError, match="no_such_launcher/torchrun is not on PATH"):
        cli.run(["--dgc", "no_such_launcher/torchrun", "train.py"])


def test_without_horovod_settings_are_shown_and_the_rest_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.run(["--dgc", "--print-env"]) == 0
    assert "export DGC_COMPRESSION=dgc" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no Horovod for .*--build-horovod"):
        cli.run(["-np", "2", "--dgc", "python", "train.py"])
