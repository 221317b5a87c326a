"""Hostile values in everything that `dgcrun` and its doctor are given: none is ever run.

Each would make the file `canary` if a shell took it, or ssh took it for an option.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import cli, config_file, hosts, launcher
from tests.helpers.jobs import KEY_SEEN, ROOT, run

FAR = "far.invalid"  # no name server knows it, so it is another host
ATTACKS = (
    "$(touch canary)", "`touch canary`", "x;touch canary;y", "x|touch canary", "x&touch canary&", "x\ntouch canary\n",
    ">canary", "a$(touch${IFS}canary)", "x;touch${IFS}canary;y", "x&&touch${IFS}canary", "x||touch canary",
    '";touch canary;"', "';touch canary;'", "'$(touch canary)'", '"$(touch canary)"', "\\$(touch canary)",
    "x #\ntouch canary", "{touch,canary}", "-oProxyCommand=touch${IFS}canary",
)  # fmt: skip
# Does what ssh and its server do with their words: options go, the rest is a line for a shell.
SSH = """#!/bin/sh
host=
while [ $# -gt 0 ]; do
  case $1 in
    -oProxyCommand=*) sh -c "${1#-oProxyCommand=}"; exit 255;;
    --) shift; host=$1; shift; break;;
    -o|-p|-i) shift 2;;
    -*) shift;;
    *) [ -z "$host" ] || break; host=$1; shift;;
  esac
done
exec sh -c "$*"
"""
Way = Callable[[str, pytest.MonkeyPatch], list[str]]  # the words of a command line with an attack in it
JOB, DOCTOR = ["-np", "1", "--dgc"], ["--doctor"]
PLAN = ["--plan", "--step-ms", "180", "--link-gbps", "1"]


def of_flag(flag: str, *start: str) -> Way:
    return lambda attack, monkeypatch: [*start, f"{flag}={attack}", "true"]


def of_hosts(form: str, *start: str) -> Way:
    return lambda attack, monkeypatch: [*start, f"-H={form.format(attack)}", "true"]


def of_hostfile(form: str, *start: str) -> Way:
    def words(attack: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        Path("hostfile").write_text(f"localhost slots=1\n{form.format(attack)}\n")
        return [*start, "--hostfile", "hostfile", "true"]

    return words


def of_variable(name: str, *start: str) -> Way:
    def words(attack: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        monkeypatch.setenv(name, attack)
        return [*start, "true"]

    return words


def of_config(section: str, key: str) -> Way:
    def words(attack: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        Path("job.yaml").write_text(yaml.dump({section: {key: attack} if key else attack}))
        return ["-np", "1", "--show-config", "--config-file", "job.yaml", "true"]

    return words


def of_path(attack: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "executable", f"/x{attack}/python")
    return [*JOB, "-H", f"{FAR}:1", "true"]


def of_folder(attack: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder = Path(attack.strip()).absolute()
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return [*JOB, "-H", f"{FAR}:1", "true"]


def of_allocation(attack: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("LSB_JOBID", "1")
    return of_variable("CSM_ALLOCATION_ID", *JOB)(attack, monkeypatch)


FAR_JOB = [*JOB, "-H", f"{FAR}:1"]
# Nothing of these is ever right: they are refused.
REFUSED: dict[str, Way] = {
    **{f"hosts {form} {start[0]}": of_hosts(form, *start) for form in ("{}:1", "a:1,{}:1", "a:{}", "a:1{}")
       for start in (JOB, DOCTOR)},
    **{f"hostfile {form} {start[0]}": of_hostfile(form, *start) for form in ("{} slots=1", "a slots={}", "{}")
       for start in (JOB, DOCTOR)},
    **{f"{flag} {start[0]}": of_flag(flag, *start)
       for flag in ("--ssh-port", "--ssh-identity-file", "--network-interface", "--network-interfaces", "--log-level",
                    "--config-file", "--host-discovery-script", "-np")
       for start in (FAR_JOB[2:], [*DOCTOR, *FAR_JOB[3:]])},
    **{flag: of_flag(flag, *DOCTOR) for flag in cli.PLAN},
    **{f"--plan {flag}": of_flag(flag, *PLAN, "--model-size", "25.6M") for flag in cli.PLAN},
    **{flag: of_flag(flag, "-np", "1")
       for flag in ("--fusion-threshold-mb", "--cycle-time-ms", "--start-timeout", "--min-np", "--slots-per-host")},
    "path of Python": of_path, "folder": of_folder, "LSF": of_allocation,
    "DGC_CONFIG_FILE": of_variable("DGC_CONFIG_FILE", *JOB),
}  # fmt: skip
# These may be paths, or texts that are never read: they are refused, or shown as they are.
SHOWN: dict[str, Way] = {
    **{v.flag: of_flag(v.flag, "-np", "1", "--show-config") for v in envvars.SETTABLE if v.flag != "--allow-inactive"},
    **{v.name: of_variable(v.name, "-np", "1", "--show-config") for v in envvars.ALL if v.name != "DGC_CONFIG_FILE"},
    **{f"compression.{v.key}": of_config("compression", v.key) for v in envvars.SETTABLE},
    **{f"{section}.{key}": of_config(section, key) for section, keys in config_file.HOROVOD_KEYS.items()
       for key in ["", *keys]},
    "controller": of_config("controller", ""),
    **{flag: of_flag(flag, "-np", "1", "--gloo", "--show-config")
       for flag in ("--timeline-filename", "--autotune-log-file", "--output-filename", "--mpi-args", "--binding-args")},
}  # fmt: skip


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that no attack may make; a folder to start from, and an ssh that reaches every host."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(ssh.parent), str(Path(sys.executable).parent), os.environ["PATH"]]))
    for name in [name for name in os.environ if name.startswith("DGC_")]:
        monkeypatch.delenv(name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield "canary"
    assert not [*tmp_path.rglob("canary"), *ROOT.glob("canary")], "an attack was run"


def test_there_are_many():
    assert len(ATTACKS) * (len(REFUSED) + len(SHOWN)) > 2000


@pytest.mark.parametrize("way", REFUSED)
def test_what_is_refused(canary, monkeypatch, way):
    """In this process, by the command line's own function; nothing is started."""
    for attack in ATTACKS:
        with monkeypatch.context() as patched, pytest.raises((ConfigError, SystemExit)) as caught:
            cli.run(REFUSED[way](attack, patched))
        assert not isinstance(caught.value, SystemExit) or caught.value.code == 2
        assert "not every host can compress" not in str(caught.value), "a host has been asked"


@pytest.mark.parametrize("way", SHOWN)
def test_what_is_refused_or_shown(canary, monkeypatch, way):
    for attack in ATTACKS:
        with monkeypatch.context() as patched:
            try:
                assert cli.run(SHOWN[way](attack, patched)) == 0
            except (ConfigError, SystemExit) as error:
                assert not isinstance(error, SystemExit) or error.code == 2


@pytest.mark.parametrize("words", [[*JOB, "-H"], [*DOCTOR, "-H"], [*JOB, "--hostfile"]], ids=" ".join)
def test_the_command_itself(canary, words):
    """As somebody types it."""
    Path("hostfile").write_text("x;touch${IFS}canary;y slots=1\n")
    given = str(Path("hostfile").absolute()) if words[-1] == "--hostfile" else "$(touch${IFS}canary):1,b:1"
    finished = run(["dgcrun", *words, given, "python", "-c", "1"], 60, {"PATH": os.environ["PATH"]})
    assert finished.code == 2 and "must be HOST:SLOTS" in finished.output, finished.output


def test_what_no_process_can_be_given(canary):
    """As words of a command line they cannot come; a program that calls ours may have them, and a file."""
    for text in ("a\0b", "\ud800"):
        for words in ([*JOB, "-H", f"{text}:1"], [*JOB, "--hostfile", text], [*JOB, "true", text],
                      [*JOB, "--output-filename", text], [*JOB, "--timeline-filename", text]):  # fmt: skip
            with pytest.raises(ConfigError, match=r"HOST:SLOTS|without NUL and without lone surrogates"):
                cli.run([*words, "true"])
    for text in ("a\\0b", "\\ud800"):
        for line in (
            f'{{compression: {{method: dgc, metrics_file: "{text}"}}}}',
            f'{{timeline: {{filename: "{text}"}}}}',
        ):
            Path("job.yaml").write_text(line)
            for more in ("--show-config", "--print-env", "--gloo"):
                with pytest.raises(ConfigError, match=r"job\.yaml: .*(metrics_file|timeline\.filename) must be"):
                    cli.run(["-np", "1", "--config-file", "job.yaml", more, "true"])


def test_names_that_ssh_would_take_for_options(canary):
    for name in ("-Fcanary", "-oProxyCommand", "-v", "--", "-"):
        with pytest.raises(ConfigError, match="no - in front"):
            launcher.checked_slots(f"{name}:1", "-H")
    assert launcher.checked_slots("a:8, b-1.c_d:2,10.0.0.1:3", "-H") == "a:8,b-1.c_d:2,10.0.0.1:3"
    with pytest.raises(ConfigError, match="at most 65536 slots"):
        launcher.checked_slots("a:999999999999", "-H")


def test_what_a_discovery_script_prints(canary):
    for attack in (*ATTACKS, "-Fcanary", "a\n-oProxyCommand", "a b:1", "a:1:2"):
        found = launcher.CheckedDiscovery("none", 1)
        found._execute_discovery_script = lambda printed=attack: printed
        with pytest.raises(ValueError, match=r"what the discovery script prints|unpack|invalid literal"):
            found.find_available_hosts_and_slots()
    found._execute_discovery_script = lambda: "localhost:2\n127.0.0.1\n"
    assert found.find_available_hosts_and_slots() == {"localhost": 2, "127.0.0.1": 1}


def test_the_line_for_another_host_is_quoted_in_every_part(canary, tmp_path, monkeypatch):
    """Folder, environment, interpreter and arguments, through ssh and the shell behind it."""
    script = "import os, sys; print([os.getcwd(), os.environ['VALUE'], *sys.argv[1:], sys.stdin.read()])"
    for number, attack in enumerate(ATTACKS):
        folder = tmp_path / f"{number}{attack}"
        folder.mkdir()
        with monkeypatch.context() as patched:
            patched.chdir(folder)
            patched.setenv("VALUE", attack)
            answer = hosts.run_on(FAR, [sys.executable, "-c", script, attack], hosts.Ssh(22, "id"), secret="token")
            assert answer.stdout == f"{[str(folder), attack, attack, 'token']}\n", answer
            hosts.run_on(FAR, [attack, "-c", ""], hosts.Ssh())


def test_nothing_of_the_environment_is_on_the_line_for_another_host(canary, tmp_path, monkeypatch):
    """Every user of both hosts could have read it in ps; what no shell takes is left out."""
    odd = {"UID": "77", "DGC_NEWLINE": "x", "ODD.NAME": "of mine"}
    values = {"SECRET": "of mine", "LINES": "a\n'b'\n\n$c\n", "BYTES": "\udcff\udc80", "PATH": os.environ["PATH"]}
    for name, text in {**odd, **values}.items():
        monkeypatch.setenv(name, text)
    script = (
        "import json, os, sys; line = open('/proc/self/cmdline').read(); "
        "print(json.dumps([dict(os.environ), line, sys.stdin.read()]))"
    )
    # a host where nothing is set
    monkeypatch.setattr(hosts, "get_remote_command", lambda line, *place: f"env -i sh -c {line}")
    answer = hosts.run_on(FAR, [sys.executable, "-c", script], hosts.Ssh(), secret="token\nmore")
    found, line, read = json.loads(answer.stdout)
    assert read == "token\nmore" and "of mine" not in line and "of mine" not in " ".join(answer.args)
    assert {name: found.get(name) for name in values} == values


def test_names_of_variables_do_not_reach_a_shell(canary, monkeypatch, capsys):
    names = [name.replace("=", "") for attack in ATTACKS for name in (attack, f"DGC_{attack}")]
    for name in names:
        monkeypatch.setenv(name, "1")
    assert cli.run(["-np", "1", "--show-config"]) == 0
    said = capsys.readouterr().err
    assert not launcher.unsafe_names() and said.count("is not passed on") == len(set(names))


def test_exports_that_a_shell_reads(canary, monkeypatch, capsys):
    for attack in ATTACKS:
        monkeypatch.setattr(cli, "FOLDER", f"/x{attack}")
        assert cli.run(["--print-env", "--dgc", f"--dgc-metrics-file={attack}"]) == 0
        lines = capsys.readouterr().out
        for shell in filter(None, map(shutil.which, ("sh", "bash"))):
            script = f'PYTHONPATH=\n{lines}\nprintf "%s|%s" "$DGC_METRICS_FILE" "$PYTHONPATH"'
            found = subprocess.run([shell, "-c", script], capture_output=True, text=True, timeout=20)
            assert found.stdout == f"{attack}|/x{attack}", found


@pytest.mark.parametrize("way", ["gloo", "mpi", "ssh"])
def test_a_job_full_of_hostile_values(canary, tmp_path, way):
    """Those that a job may well have arrive as they are, through Horovod's own lines; the server's key is in none."""
    script = (
        KEY_SEEN + "import json, sys; file = open(f'{os.environ[\"FOLDER\"]}/arrived{os.getpid()}', 'w'); "
        "json.dump([seen, os.environ['VALUE'], *sys.argv[1:]], file)"
    )
    value = "".join(ATTACKS).replace("/", "")
    options = {
        "gloo": ["--gloo", f"--output-filename={tmp_path}/{value[:99]}"],
        "mpi": ["--mpi", f"--output-filename={tmp_path}/{value[:99]}", "--binding-args=--bind-to none",
                "--mpi-args=--allow-run-as-root --oversubscribe"],
        "ssh": ["--gloo", "-H", f"{FAR}:2", "--network-interfaces", "lo", "--disable-cache"],
    }  # fmt: skip
    finished = run(
        ["dgcrun", "-np", "2", *options[way], "--dgc", "--allow-inactive", sys.executable, "-c", script, *ATTACKS], 150,
        {"VALUE": value, "FOLDER": str(tmp_path), "X;touch canary;": "1", "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert finished.code == 0, finished.output
    arrived = [json.loads(file.read_text()) for file in tmp_path.glob("arrived*")]
    assert arrived == 2 * [[[], value, *ATTACKS]], finished.output


@pytest.mark.parametrize("flag", ["--mpi-args", "--binding-args"])
def test_words_for_mpirun_stay_words(canary, flag):
    for attack in ATTACKS:
        args, _ = cli.parse(["-np", "1", "--mpi", f"{flag}={attack}", "true"])
        try:
            launcher.make_safe(args)
        except ConfigError as error:
            assert flag in str(error)
            continue
        words = args.mpi_args or args.binding_args
        found = subprocess.run(["sh", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, timeout=20)
        assert found.stdout == "".join(f"{word}\n" for word in shlex.split(attack))
