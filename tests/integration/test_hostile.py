"""Hostile values in what `dgcrun` is given: none is ever run. Each would make the file `canary` if a shell took it."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import commands, hosts, inputs
from tests.helpers.jobs import KEY_SEEN, ROOT, run

FAR = "far.invalid"  # no name server knows it, so it is another host
ATTACKS = (
    "$(touch {c})", "`touch {c}`", "x;touch {c};y", "x|touch {c}", "x&touch {c}&", "x\ntouch {c}\n", ">{c}",
    "a$(touch${{IFS}}{c})", "x;touch${{IFS}}{c};y", "x&&touch${{IFS}}{c}", "x||touch {c}", '";touch {c};"',
    "';touch {c};'", "'$(touch {c})'", '"$(touch {c})"', "\\$(touch {c})", "x #\ntouch {c}", "{{touch,{c}}}",
    "-oProxyCommand=touch${{IFS}}{c}",
)  # fmt: skip
# Does what ssh and its server do with their words: options go, the rest is a line for a shell.
SSH = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    -oProxyCommand=*) sh -c "${1#-oProxyCommand=}"; exit 255;;
    --) shift; break;;
    -o|-p|-i) shift 2;;
    -*) shift;;
    *) break;;
  esac
done
shift
while [ $# -gt 0 ]; do
  case $1 in
    -o|-p|-i) shift 2;;
    *) break;;
  esac
done
exec sh -c "$*"
"""


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that no attack may make; a folder to start from, and an ssh that reaches every host."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.pathsep.join([str(ssh.parent), str(Path(sys.executable).parent), os.environ["PATH"]]))
    for name in [name for name in os.environ if name.startswith("DGC_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "an attack was run"


def attacks(canary: Path) -> list[str]:
    return [attack.format(c=canary.name) for attack in ATTACKS]


def refused(words: list[str]) -> str:
    """The words in which `dgcrun` refuses a command line, in this process; nothing is started."""
    with pytest.raises((ConfigError, SystemExit)) as caught:
        commands.run(words)
    assert not isinstance(caught.value, SystemExit) or caught.value.code == 2
    return str(caught.value)


@pytest.mark.parametrize("start", [["-np", "1", "--dgc"], ["--doctor"]], ids=["job", "doctor"])
def test_hosts(canary, start):
    for attack in attacks(canary):
        for hosts_given in (f"{attack}:1", f"localhost:1,{attack}:1", f"localhost:{attack}"):
            refused([*start, f"-H={hosts_given}", "true"])
        Path("hostfile").write_text(f"localhost slots=1\n{attack} slots=1\n")
        refused([*start, "--hostfile", "hostfile", "true"])


def test_names_that_ssh_would_take_for_options(canary):
    for name in ("-F" + str(canary), "-oProxyCommand", "-v", "--", "-"):
        with pytest.raises(ConfigError, match=r"no - in front, got|HOST:SLOTS"):
            inputs.checked_slots(f"{name}:1", "-H")
    assert inputs.checked_slots("a:8, b-1.c_d:2,10.0.0.1:3", "-H") == "a:8,b-1.c_d:2,10.0.0.1:3"


@pytest.mark.parametrize(
    "flag", ["--ssh-identity-file", "--network-interface", "--network-interfaces", "--host-discovery-script"]
)
def test_what_goes_into_horovods_lines(canary, flag):
    for attack in attacks(canary):
        said = refused(["-np", "1", "--dgc", f"-H={FAR}:1" if "discovery" not in flag else "--gloo",
                        f"{flag}={attack}", "true"])  # fmt: skip
        assert flag in said or flag == "--network-interface"


def test_the_line_for_another_host_is_quoted_in_every_part(canary, monkeypatch):
    """Folder, environment, interpreter and arguments, through ssh and the shell behind it."""
    for number, attack in enumerate(attacks(canary)):
        folder = canary.parent / f"{number}{attack.replace('/', '')}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("VALUE", attack)
        script = "import os, sys; print([os.getcwd(), os.environ['VALUE'], *sys.argv[1:]])"
        answer = hosts.run_on(FAR, [sys.executable, "-c", script, attack], inputs.Ssh(22, "id"))
        assert answer.stdout == f"{[str(folder), attack, attack]}\n", answer
        hosts.run_on(FAR, [attack, "-c", ""], inputs.Ssh())
        refused(["-np", "1", "--dgc", "-H", f"{FAR}:1", "true"])
        assert not list(canary.parent.rglob("canary"))


def test_an_interpreter_at_a_hostile_path(canary, monkeypatch):
    for attack in attacks(canary):
        monkeypatch.setattr(sys, "executable", f"/x{attack}/python")
        assert "the path of Python" in refused(["-np", "1", "--dgc", "-H", f"{FAR}:1", "true"])


def test_names_of_variables_do_not_reach_a_shell(canary, monkeypatch, capsys):
    for attack in attacks(canary):
        monkeypatch.setenv(f"DGC_{attack}".replace("=", ""), "1")
        monkeypatch.setenv(attack.replace("=", ""), "1")
    assert commands.run(["-np", "1", "--show-config"]) == 0
    assert not inputs.unsafe_names() and "is not passed on" in capsys.readouterr().err


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_a_job_full_of_hostile_values(canary, tmp_path, controller):
    """Those that a job may well have: they arrive as they are."""
    said = attacks(canary)
    script = (
        KEY_SEEN + "import json, sys; file = open(f'{os.environ[\"FOLDER\"]}/arrived{os.getpid()}', 'w'); "
        "json.dump([seen, os.environ['VALUE'], *sys.argv[1:]], file)"
    )
    value = "".join(said).replace("/", "")
    command = [
        "dgcrun",
        "-np",
        "2",
        controller,
        "--dgc",
        "--allow-inactive",
        f"--output-filename={tmp_path}/{value[:99]}",
    ]
    if controller == "--mpi":
        command += ["--mpi-args=--allow-run-as-root --oversubscribe", "--binding-args=--bind-to none"]
    finished = run(
        [*command, sys.executable, "-c", script, *said], 120,
        {"VALUE": value, "FOLDER": str(tmp_path), "X;touch canary;": "1", "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert finished.code == 0, finished.output
    arrived = [json.loads(file.read_text()) for file in tmp_path.glob("arrived*")]
    assert arrived == 2 * [[[], value, *said]]
    assert not (ROOT / canary.name).exists()


@pytest.mark.parametrize("flag", ["--mpi-args", "--binding-args"])
def test_words_for_mpirun_stay_words(canary, flag):
    for attack in attacks(canary):
        args, _ = commands.flags.parse(["-np", "1", "--mpi", f"{flag}={attack}", "true"])
        try:
            inputs.make_safe(args)
        except ConfigError as error:
            assert flag in str(error)
            continue
        finished = run(["sh", "-c", f"true {args.mpi_args or args.binding_args}"], 20)
        assert finished.code == 0 and not (ROOT / canary.name).exists()
