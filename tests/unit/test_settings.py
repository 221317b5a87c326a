"""Flag before environment before file before default; what a file may hold; what the messages say."""

from __future__ import annotations

import dataclasses

import pytest

from dgc_horovod import envvars
from dgc_horovod.compression import PRESETS, Presets
from dgc_horovod.config import DGCConfig, WarmupSchedule
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import cli, config_file
from dgc_horovod.launch.settings import resolve, show
from dgc_horovod.launch.site import sitecustomize


def source_of(job, name):
    return next(given.source for row, given in job.settings.items() if row.name == name)


def test_every_field_has_one_variable_and_a_default_that_reads_as_it_is():
    fields = {row.field for row in envvars.FIELDS}
    ours = {f.name for f in dataclasses.fields(DGCConfig)} - {"warmup", "automatic"}  # which a method says
    assert fields == ours | {f"warmup.{f.name}" for f in dataclasses.fields(WarmupSchedule)}
    for row in envvars.ALL:
        if not row.by_method and row.default is not None:
            assert row.parse(row.default_text) == row.default
    assert resolve({"DGC_COMPRESSION": "dgc"}, {}).config == DGCConfig()


@pytest.mark.parametrize("name", PRESETS)
def test_a_default_is_the_same_by_code_and_by_flag(name):
    assert getattr(Presets, name)().config == resolve({"DGC_COMPRESSION": name}, {}).config


def test_names_are_unique_and_flags_follow_from_them():
    for names in ([v.name for v in envvars.ALL], [v.flag for v in envvars.SETTABLE], [v.key for v in envvars.SETTABLE]):
        assert len(names) == len(set(names)) and all(names)


@pytest.mark.parametrize(
    ("flags", "environment", "file", "admin", "density", "source"),
    [
        ({"DGC_DENSITY": "0.1"}, {"DGC_DENSITY": "0.2"}, "0.3", "0.4", 0.1, "flag --density"),
        ({}, {"DGC_DENSITY": "0.2"}, "0.3", "0.4", 0.2, "environment DGC_DENSITY"),
        ({}, {}, "0.3", "0.4", 0.3, "job.yaml"),
        ({}, {}, None, "0.4", 0.4, "admin.yaml"),
        ({}, {"DGC_DENSITY": ""}, None, "0.4", 0.4, "admin.yaml"),  # an empty variable is not set
        ({"DGC_COMPRESSION": "dgc"}, {}, None, None, 0.001, "default"),
    ],
)
def test_precedence(flags, environment, file, admin, density, source):
    files = [(path, {"DGC_DENSITY": text}) for path, text in (("job.yaml", file), ("admin.yaml", admin)) if text]
    job = resolve(flags, environment, files)
    assert job.method == "dgc" and job.config is not None and job.config.density == density
    assert source_of(job, "DGC_DENSITY") == source
    said = shown(job, "density")
    assert said.endswith(source) and str(density) in said


def test_nothing_asked_for_is_stock_horovod():
    job = resolve({}, {"DGC_ALLOW_INACTIVE": "on"})
    assert not job.active and job.config is None and job.variables() == {"DGC_ENABLED": "0"}


def test_what_acts_everywhere_goes_to_a_script_that_compresses_by_itself():
    """It had been dropped where dgcrun was to replace nothing."""
    flags, file = {"DGC_METRICS_FILE": "m.jsonl", "DGC_TIMEOUT": "60"}, {"DGC_BACKEND": "reference"}
    carried = {"DGC_ENABLED": "0", **flags, **file}
    assert resolve(flags, {}, [("job.yaml", file)]).variables() == carried
    assert resolve(flags, {"DGC_ENABLED": "0"}, [("job.yaml", file)]).variables() == carried


@pytest.mark.parametrize("text", ["0", "off", "False", "no"])
def test_enabled_off_beats_everything(text):
    job = resolve({"DGC_COMPRESSION": "dgc", "DGC_DENSITY": "0.1"}, {"DGC_ENABLED": text})
    assert job.switched_off and not job.active and "DGC_ENABLED is off" in show(job)


def test_a_preset_and_what_is_set_over_it():
    job = resolve({"DGC_COMPRESSION": "gaussian"}, {"DGC_VALUES": "4bit", "DGC_WARMUP_EPOCHS": "4"})
    assert job.config == DGCConfig(
        rule="gaussian", momentum_correction=False, factor_masking=False, values="4bit", warmup=WarmupSchedule(epochs=4)
    )
    assert resolve({"DGC_FACTOR_MASKING": "off"}, {}).config == DGCConfig(factor_masking=False)
    assert resolve({"DGC_CLIP_NORM": "none"}, {}).config == DGCConfig()


def test_the_ranks_read_the_same_settings_from_their_environment():
    job = resolve(
        {"DGC_COMPRESSION": "topk", "DGC_DENSITY": "0.02"},
        {"DGC_CONFIG_FILE": "admin.yaml"},
        [("admin.yaml", {"DGC_WARMUP_STEPS": "10", "DGC_BACKEND": "reference"})],
    )
    carried = {name: text for name, text in job.variables().items() if text}
    assert "DGC_CONFIG_FILE" not in carried and job.variables()["DGC_CONFIG_FILE"] == ""
    again = resolve({}, carried)
    assert (again.method, again.config) == (job.method, job.config)
    assert again.get(envvars.BACKEND) == "reference"


@pytest.mark.parametrize("method", ["none", "fp16"])
def test_fields_have_no_meaning_for_horovods_own(method):
    with pytest.raises(ConfigError, match=f"--density has no meaning with compression {method}"):
        resolve({"DGC_COMPRESSION": method, "DGC_DENSITY": "0.1"}, {})
    job = resolve({"DGC_COMPRESSION": method}, {"DGC_DENSITY": "0.1"})  # a cluster's default does no harm
    assert job.active and job.config is None and "not used" in show(job)


@pytest.mark.parametrize("source", ["flag", "environment"])
def test_a_warmup_in_steps_takes_the_place_of_the_files_epochs(source):
    own, file = {"DGC_WARMUP_STEPS": "10"}, {"DGC_WARMUP_EPOCHS": "4", "DGC_WARMUP_FACTOR": "0.5"}
    job = resolve(own if source == "flag" else {}, own if source == "environment" else {}, [("all.yaml", file)])
    assert job.config.warmup == WarmupSchedule(steps=10, factor=0.5)
    assert job.variables()["DGC_WARMUP_EPOCHS"] == "" and job.variables()["DGC_WARMUP_STEPS"] == "10"
    assert shown(job, "warmup_epochs") == "- default (4 of all.yaml is not used)"


def test_a_variable_that_means_nothing_is_noticed(monkeypatch):
    monkeypatch.setenv("DGC_DENSTY", "0.1")
    assert envvars.unknown() == {"DGC_DENSTY": "DGC_DENSITY"}


# A cluster's file, as docs/clusters.md has it, and one with all that may go wrong beside another method
EVERYONES = {"DGC_COMPRESSION": "dgc", "DGC_DENSITY": "0.001", "DGC_WARMUP_STEPS": "2000", "DGC_ALLOW_INACTIVE": "on"}
FULL = {
    "DGC_COMPRESSION": "dgc", "DGC_DENSITY": "0.001", "DGC_WARMUP_EPOCHS": "4", "DGC_WARMUP_STEPS_PER_EPOCH": "390",
    "DGC_WARMUP_FIRST_DENSITY": "1", "DGC_CLIP_NORM": "1",
    "DGC_EXCHANGE": "auto", "DGC_CHECK_EVERY": "10",
}  # fmt: skip


@pytest.mark.parametrize("file", [EVERYONES, FULL], ids=["as recommended", "full"])
@pytest.mark.parametrize(
    "own",
    [
        *({"DGC_COMPRESSION": name} for name in PRESETS if name != "dgc"),
        {"DGC_COMPRESSION": "auto", "DGC_TOTAL_STEPS": "4000"},
        {"DGC_LOCAL_STEPS": "20"},
    ],
    ids=lambda own: " ".join(own.values()),
)
def test_what_a_file_has_chosen_for_its_method_is_not_for_another(own, file):
    """The cluster's density and warm-up had stopped other methods with an error, or distorted them."""
    flagged, asked = resolve(own, {}, [("all.yaml", file)]), resolve({}, own, [("all.yaml", file)])
    alone = resolve(own, {})
    of_cluster = {"check_every": 10} if file is FULL else {}
    if file is FULL and alone.method != "local":  # which has no nodes
        of_cluster["exchange"] = "auto"
    for job in (flagged, asked):
        assert (job.method, job.config) == (alone.method, alone.config.replace(**of_cluster))
    assert shown(flagged, "density").endswith("(0.001 of all.yaml is not used)")
    assert shown(flagged, "method").startswith(f"{alone.method} flag --")
    again = resolve({}, {name: text for name, text in flagged.variables().items() if text})
    assert (again.method, again.config) == (flagged.method, flagged.config)


def test_of_several_files_the_one_for_the_same_method_is_used():
    """A stronger one for another method had hidden it."""
    chosen = {"job.yaml": ("dgc", "0.1"), "all.yaml": ("topk", "0.02")}
    files = [(path, {"DGC_COMPRESSION": method, "DGC_DENSITY": text}) for path, (method, text) in chosen.items()]
    job = resolve({"DGC_COMPRESSION": "topk"}, {}, files)
    assert job.config.density == 0.02 and shown(job, "density") == "0.02 all.yaml (0.1 of job.yaml is not used)"


@pytest.mark.parametrize(
    ("own", "warmup"),
    [
        ({"DGC_WARMUP_STEPS": "100"}, WarmupSchedule(steps=100, first_density=0.5)),
        ({"DGC_WARMUP_EPOCHS": "2"}, WarmupSchedule(epochs=2, steps_per_epoch=390, first_density=0.5)),
        ({"DGC_WARMUP_EPOCHS": "none"}, None),
        ({"DGC_WARMUP_STEPS": "none"}, None),
    ],
    ids=str,
)
def test_a_length_goes_before_all_of_a_weaker_warmup_that_it_does_not_go_with(own, warmup):
    file = {"DGC_COMPRESSION": "dgc", "DGC_WARMUP_EPOCHS": "4", "DGC_WARMUP_STEPS_PER_EPOCH": "390"}
    job = resolve(own, {}, [("all.yaml", {**file, "DGC_WARMUP_FIRST_DENSITY": "0.5"})])
    assert job.config == DGCConfig(warmup=warmup)


def shown(job, key):
    """What is shown of a setting, a space between its parts."""
    (found,) = [line.split() for line in show(job).splitlines() if line.split()[0] == key]
    return " ".join(found[1:])


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        ({"DGC_DENSITY": "10"}, {}, r"flag --density: density must be in \(0, 1\], got 10.0; .* density=0.1"),
        ({}, {"DGC_DENSITY": "much"}, "environment DGC_DENSITY: density must be a number, got 'much'"),
        ({}, {"DGC_COMPRESSION": "dcg"}, "environment DGC_COMPRESSION: method.*did you mean 'dgc'"),
        ({}, {"DGC_MIN_NUMEL": "1.5"}, "min_numel must be a whole number"),
        ({}, {"DGC_COMPRESS_1D": "maybe"}, "compress_1d must be on or off"),
        ({"DGC_WARMUP_FACTOR": "0.5"}, {}, "warmup_steps or warmup_epochs"),
        ({"DGC_WARMUP_STEPS": "0"}, {}, "dgcrun: --dgc-warmup-steps none"),
        ({"DGC_WARMUP_STEPS": "5", "DGC_WARMUP_EPOCHS": "5"}, {}, "either steps or epochs"),
        ({"DGC_COMPRESSION": "dgc"}, {"DGC_BACKEND": "cuda"}, "environment DGC_BACKEND"),
        ({"DGC_COMPRESSION": "dgc"}, {"DGC_ENABLED": "perhaps"}, "enabled must be on or off"),
        ({"DGC_COMPRESSION": ""}, {}, "flag --compression: method is empty"),
        ({"DGC_DENSITY": ""}, {}, "flag --density: density is empty"),
        ({"DGC_DENSITY": "nan"}, {}, "must be a number"),
        ({"DGC_RULE": "of the method"}, {}, "rule must be one of"),
        ({"DGC_TIMEOUT": "-5"}, {}, "timeout must be a positive number of seconds"),
        ({"DGC_TIMEOUT": "inf"}, {}, "timeout must be a number, got 'inf'"),
        ({"DGC_TIMEOUT": "1e10"}, {}, "timeout must be a positive number of seconds, at most 1e9, got 10000000000.0"),
        ({"DGC_SEED": "1_0"}, {}, "seed must be a whole number below 2.63, got '1_0'"),
        ({"DGC_SEED": str(2**63)}, {}, "seed must be a whole number below 2.63"),
        ({"DGC_SEED": "1e999999999"}, {}, "seed must be a whole number"),
        ({"DGC_DENSITY": "٠.١"}, {}, "density must be a number"),
        ({"DGC_MAX_BYTES_PER_STEP": "9e18K"}, {}, "max_bytes_per_step must be a whole number of bytes below 2.63"),
        *(({"DGC_MAX_BYTES_PER_STEP": text}, {}, "max_bytes_per_step") for text in ("0", "-1MB", "2TB", "much", "0.5")),
        ({"DGC_NODE_SIZE": "4"}, {}, r"--dgc-node-size 4 has no meaning with exchange flat \(default\)"),
        ({"DGC_NODE_SIZE": "4", "DGC_EXCHANGE": "sharded"}, {}, r"exchange sharded \(flag --dgc-exchange\)"),
    ],
)
def test_what_is_wrong_is_named_with_its_source(flags, environment, said):
    with pytest.raises(ConfigError, match=said):
        resolve(flags, environment)


def test_a_nodes_size_for_everyone_does_no_harm_to_a_flat_job():
    assert resolve({"DGC_EXCHANGE": "flat"}, {"DGC_NODE_SIZE": "4"}).config.node_size == 4
    assert resolve({"DGC_NODE_SIZE": "4"}, {"DGC_EXCHANGE": "auto"}).config.node_size == 4
    assert resolve({"DGC_COMPRESSION": "dgc", "DGC_NODE_SIZE": "none"}, {}).config.node_size is None


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("8.0", 8), ("8e0", 8), (" 8", 8), ("+8", 8), ("", 0), ("none", 0)]
)
def test_the_ranks_read_a_nodes_size_as_dgcrun_does(monkeypatch, text, size):
    """8.0 had been 8 for dgcrun and none for a rank."""
    monkeypatch.setenv("DGC_NODE_SIZE", text)
    assert (envvars.value(envvars.NODE_SIZE) or 0) == size


@pytest.mark.parametrize("text", ["8_0", "٨", "²", "-8", "0", "8.5", "1" * 5000, str(2**63)])
def test_a_nodes_size_that_is_none(monkeypatch, text):
    """A ² had been a bare ValueError."""
    monkeypatch.setenv("DGC_NODE_SIZE", text)
    with pytest.raises(ConfigError, match=r"DGC_NODE_SIZE.* must be a whole number"):
        envvars.value(envvars.NODE_SIZE)


def test_what_a_launcher_says_in_other_digits_is_no_number(monkeypatch):
    for text in ("²", "1" * 5000, "-1"):
        for name in ("HOROVOD_SIZE", "LOCAL_RANK", "RANK"):
            monkeypatch.setenv(name, text)
        assert envvars.launched_workers() == 0 and envvars.torchrun_place() == (0, 1, 0)


def test_whole_numbers_are_exact():
    assert envvars.NODE_SIZE.parse(str(2**63 - 1)) == 2**63 - 1
    assert envvars.NODE_SIZE.parse(str(2**53 + 1)) == 2**53 + 1


# -- the file


def write(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return str(path)


def test_whole_numbers_may_be_written_as_floats(tmp_path):
    path = write(tmp_path, "compression: {min_numel: 1e3, bucket_bytes: 1000.0}")
    config = resolve({}, {}, [(path, config_file.load(path))]).config
    assert (config.min_numel, config.bucket_bytes) == (1000, 1000)


@pytest.mark.parametrize("word", ["off", "no", "false"])
def test_a_file_that_switches_compression_off(tmp_path, word):
    """It had been taken for a file without the section, and a weaker layer's compression stayed on."""
    path = write(tmp_path, f"compression: {word}")
    job = resolve({}, {}, [(path, config_file.load(path)), ("all.yaml", EVERYONES)])
    assert job.method == "none" and job.config is None and shown(job, "method") == f"none {path}"
    assert config_file.load(write(tmp_path, "compression:")) == {}
    # it had been called no single value
    assert config_file.load(write(tmp_path, f"compression: {{method: {word}}}")) == {"DGC_COMPRESSION": "none"}


def test_enabled_off_is_decided_before_any_file_of_ours_is_read(tmp_path, monkeypatch):
    path = write(tmp_path, "compression: {densty: 1}\nparams: {cycle_time_ms: 3}")
    words = ["-np", "1", "--config-file", path, "true"]
    for name, text in {"DGC_ENABLED": "0", "DGC_CONFIG_FILE": "/nowhere.yaml"}.items():
        monkeypatch.setenv(name, text)
    args, given = cli.parse(words)
    assert cli.job_of(args, given).switched_off and args.cycle_time_ms == 3
    monkeypatch.setenv("DGC_ENABLED", "1")
    with pytest.raises(ConfigError, match="unknown key 'densty'"):
        cli.parse(words)


def test_the_file_for_everyone_goes_last_and_has_our_section_only(tmp_path, monkeypatch):
    everyones, own = tmp_path / "all.yaml", tmp_path / "own.yaml"
    everyones.write_text("compression: {density: 0.5, values: 4bit}")
    own.write_text("compression: {density: 0.25}\nparams: {cycle_time_ms: 3}")
    monkeypatch.setenv("DGC_CONFIG_FILE", str(everyones))
    args, given = cli.parse(["-np", "1", "--config-file", str(own), "true"])
    job = cli.job_of(args, given)
    assert (job.config.density, job.config.values, args.cycle_time_ms) == (0.25, "4bit", 3)
    everyones.write_text("compression: {density: 0.5}\nparams: {cycle_time_ms: 3}")
    with pytest.raises(ConfigError, match=r"params is Horovod's.*--config-file only"):
        cli.job_of(args, given)


def test_the_words_for_off_are_the_same_before_and_after_the_package_is_imported():
    words = [word for word in ("0", "off", "false", "no", "1", "on", "true", "yes") if not envvars.ENABLED.parse(word)]
    assert tuple(words) == sitecustomize._OFF


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match="cannot be read"):
        config_file.load("/nowhere/job.yaml")
