"""What a config file may hold, and what is said of one that holds something else."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import cli, config_file
from dgc_horovod.launch.settings import resolve
from tests.unit.test_settings import write


def test_a_file_with_horovods_sections_and_ours(tmp_path):
    path = write(
        tmp_path,
        "controller: gloo\nparams:\n  cycle_time_ms: 2\ncompression:\n  method: gaussian\n  density: 1e-3\n"
        "  compress_1d: true\n  clip_norm: null\n  warmup_steps: 100\n",
    )
    assert config_file.load(path) == {
        "DGC_COMPRESSION": "gaussian",
        "DGC_DENSITY": "1e-3",
        "DGC_COMPRESS_1D": "on",
        "DGC_WARMUP_STEPS": "100",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("compression: {densty: 0.1}", "unknown key 'densty' in compression; did you mean 'density'"),
        ("compresion: {density: 0.1}", "unknown key 'compresion'; did you mean 'compression'"),
        ("params: {cycle_time: 1}", "unknown key 'cycle_time' in params; did you mean 'cycle_time_ms'"),
        ("compression: dgc", "compression must be a mapping"),
        ("compression: {density: [1, 2]}", "compression.density must be a single value"),
        ("- a\n- b", "must be a mapping"),
        ("params: 5\ncompression: {}", "params must be a mapping"),
        ("compression: 0", "compression must be a mapping .* or compression: off"),
        ("compression: {density: 0.1, density: 0.2}", "the key 'density' stands twice"),
        ("compression: {density: 0.1}\ncompression: {}", "the key 'compression' stands twice"),
        ("compression: {metrics_file: yes}", "compression.metrics_file must be a text .* YAML reads on, yes and true"),
        (
            "compression: {check_every: off}",
            "check_every must be .* got False, .* off, no and false; put a text in quotes",
        ),
        ("compression: {method: on}", "compression.method must be a text or a number, got True"),
        ("", "is empty"),
        ("compression: {", "not valid YAML"),
        ("compression: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("params: !!python/name:os.system", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("compression: {seed: " + "1" * 5000 + "}", "not valid YAML"),
        ("compression: {seed: 0x" + "1" * 5000 + "}", "seed must be a single value"),
        ("\x80\udcff\x00", "cannot be read: .* codec"),
        (f"compression: &a [{'x,' * 9}]\n".replace("[", "[*a,"), "compression must be a mapping"),
        (
            "compression: [&a0 [x]" + "".join(f", &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 30)) + "]",
            "compression must be a mapping",
        ),
        ("compression: &a [x]\nparams: [" + "*a," * 9 + "]", "params must be a mapping"),
        ("params: {fusion_threshold_mb: '$(true)'}", "params.fusion_threshold_mb must be a finite number"),
        ("stall_check: {enabled: never}", "stall_check.enabled must be on or off"),
        ("logging: {level: $(true)}", "logging.level must be one of TRACE"),
        ("controller: [gloo]", "controller must be gloo or mpi"),
        ('controller: "\\0"', "controller must be gloo or mpi"),
        ("params: {cycle_time_ms: .nan}", "params.cycle_time_ms must be a finite number"),
        ("params: {cache_capacity: " + "9" * 400 + "}", "params.cache_capacity must be a finite number"),
        ('timeline: {filename: "a\\0b"}', "timeline.filename must be a text without NUL"),
        ('timeline: {filename: "\\ud800"}', "timeline.filename must be a text without NUL and without lone"),
        ("compression: {1: 2}", "unknown key 1 in compression"),
        ("compression: {[a]: 2}", "not valid YAML"),
        ("compression:\n  ? 0x" + "1" * 5000 + "\n  : 2", "unknown key a int that cannot be shown in compression"),
        ("? " + "a" * 5000 + "\n: 2", r"unknown key 'a{12}\.{3}a{13}'; allowed"),
        ("compression: {metrics_file: 2020-01-01}", "metrics_file must be a single value"),
        ("compression: &a {density: *a}", "density must be a single value"),
        ("compression:\n\tdensity: 1", "not valid YAML"),
        ("compression: {<<: [1]}", "not valid YAML"),
        ("compression: 2020-99-99", "not valid YAML"),
        ("compression: {min_numel: !!int _}", "not valid YAML"),
        ("---\na: 1\n---\nb: 2", "not valid YAML"),
        ("a: " + "{a: " * 3000, "not valid YAML"),
        ("#" * (2**20 + 1), "is longer than"),
    ],
    ids=lambda value: value[:30],
)
def test_errors_in_a_file_name_the_file_and_the_key(tmp_path, text, said):
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for read in (config_file.load, lambda path: cli.parse(["-np", "1", "--config-file", path, "true"])):
        with pytest.raises(ConfigError, match=said) as caught:
            read(str(path))
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=ascii)
@pytest.mark.parametrize("variable", envvars.SETTABLE, ids=lambda variable: variable.key)
def test_no_variable_has_what_no_process_can_be_given(tmp_path, variable, text):
    """From a file it had ended in a traceback, or in a script for a shell with a NUL in it."""
    path = write(tmp_path, json.dumps({"compression": {"method": "dgc", variable.key: text}}))
    files = [(str(path), config_file.load(str(path)))]
    for given in (({}, {}, files), ({variable.name: text}, {}, ()), ({}, {variable.name: text}, ())):
        with pytest.raises(ConfigError, match=f"{variable.key}|method") as caught:
            resolve(*given)
        assert not given[2] or str(path) in str(caught.value)


def test_other_bytes_of_the_system_come_out_as_they_came_in(tmp_path):
    """Names of files may be any bytes but NUL; to print them had ended in a traceback."""
    name = b"\xff\xc3\xa9\xe9\x9b\xaa.jsonl"
    for words, encoding in itertools.product((["--show-config"], ["--dgc", "--print-env"]), (b"utf-8", b"latin-1")):
        environment = {**os.environb, b"DGC_METRICS_FILE": name, b"PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "dgc_horovod.launch.cli", "-np", "1", *words, "true"]
        found = subprocess.run(command, env=environment, capture_output=True, timeout=100, check=False)
        assert found.returncode == 0 and name in found.stdout, found
