"""DGCConfig, WarmupSchedule and the presets: what is accepted, what is refused, in which words."""

from __future__ import annotations

import pytest

from dgc_horovod import DGCConfig, WarmupSchedule
from dgc_horovod.config import density_at
from dgc_horovod.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
        ({"density": -1}, r"density must be in \(0, 1\], got -1"),
        ({"density": 1000}, r"got 1000; for 1000x compression pass density=0.001"),
        ({"density": float("nan")}, r"density must be in \(0, 1\], got nan"),
        ({"density": "0.1"}, r"density must be in \(0, 1\], got '0.1'"),
        ({"rule": "exakt"}, r"rule must be one of exact, sampled, .*, got 'exakt'; did you mean 'exact'\?"),
        ({"values": "int8"}, "values must be one of fp32, fp16, bf16"),
        ({"clip_norm": 0}, "clip_norm must be a positive finite number or None, got 0"),
        ({"clip_norm": float("inf")}, "clip_norm must be a positive finite number"),
        ({"min_numel": 0}, "min_numel must be a whole number >= 1, got 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be a whole number >= 1, got 1.5"),
        ({"momentum_correction": "yes"}, "momentum_correction must be True or False"),
        ({"offload": True}, "offload goes with Compression.local"),
        ({"automatic": True, "local_steps": 4}, "local_steps=4 does not go with auto"),
        ({"total_steps": 100}, "Compression.auto"),
        ({"warmup": 4}, r"warmup must be a WarmupSchedule"),
        ({"automatic": True, "density": 0.01, "warmup": WarmupSchedule(steps=10)}, "drop one of them"),  # begins dense
    ],
)
def test_bad_fields(fields, words):
    with pytest.raises(ConfigError, match=words):
        DGCConfig(**fields)


def test_unknown_field_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown setting 'densty'; did you mean 'density'\?"):
        DGCConfig().replace(densty=0.1)


def test_config_is_frozen_and_comparable():
    assert DGCConfig(density=0.01) == DGCConfig().replace(density=0.01) != DGCConfig()
    with pytest.raises(AttributeError):
        DGCConfig().density = 0.5


def test_numpy_numbers_are_numbers():
    np = pytest.importorskip("numpy")
    config = DGCConfig(density=np.float32(0.25), min_numel=np.int64(7), clip_norm=1)
    assert repr(config) == repr(DGCConfig(density=0.25, min_numel=7, clip_norm=1.0)), "ranks would seem to disagree"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "either steps or epochs"),
        ({"steps": 5, "epochs": 1}, "either steps or epochs"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"epochs": -1}, "epochs must be a number"),
        ({"steps": 5, "steps_per_epoch": 2}, "steps_per_epoch goes with epochs"),
        ({"steps": 5, "first_density": 0}, "first_density must be in"),
        ({"steps": 5, "factor": 1}, "factor must be in"),
        ({"steps": 5, "first_density": "a"}, "first_density must be in"),
        ({"steps": 1.5}, "steps must be a whole number >= 1 or None, got 1.5"),
        ({"steps": True}, "steps must be a whole number >= 1 or None, got True"),
        ({"epochs": "4"}, "epochs must be a number above 0 or None, got '4'"),
    ],
)
def test_bad_schedules(arguments, words):
    with pytest.raises(ConfigError, match=words):
        WarmupSchedule(**arguments)


PAPER = [0.25, 0.0625, 0.015625, 0.00390625, 0.001]  # sparsity 75, 93.75, 98.4375, 99.6, then 99.9 per cent


@pytest.mark.parametrize(
    ("final", "schedule", "steps", "expected"),
    [
        (0.3, None, [0], [0.3]),
        (0.001, WarmupSchedule(epochs=4, steps_per_epoch=10), range(0, 60, 10), [*PAPER, 0.001]),  # one an epoch
        (0.001, WarmupSchedule(epochs=4, steps_per_epoch=10), [9, 10], PAPER[:2]),
        (0.001, WarmupSchedule(epochs=1, steps_per_epoch=8), range(0, 10, 2), PAPER),  # not the first alone
        (0.01, WarmupSchedule(steps=12), range(0, 13, 4), [0.25, 0.0625, 0.015625, 0.01]),
        (0.25, WarmupSchedule(steps=12), range(0, 13, 4), [0.25] * 4),
        (0.5, WarmupSchedule(steps=12), range(0, 13, 4), [0.5] * 4),
        (0.2, WarmupSchedule(steps=12), range(0, 13, 4), [0.25, 0.25, 0.25, 0.2]),
    ],
)
def test_densities_of_a_warmup(final, schedule, steps, expected):
    assert [density_at(final, schedule, step) for step in steps] == expected


def test_warmup_by_observed_epoch():
    schedule = WarmupSchedule(epochs=2)
    assert schedule.needs_epoch and not WarmupSchedule(steps=3).needs_epoch
    assert [density_at(0.01, schedule, 999, epoch) for epoch in (0, 1, 2)] == [0.25, 0.0625, 0.01]
    with pytest.raises(ConfigError, match="the epoch is not known"):
        density_at(0.01, schedule, 0, None)


def test_a_stage_begins_where_it_is_due():
    """1/49 of 49 stages is a little less than one: the density was that of the stage before."""
    schedule = WarmupSchedule(epochs=49, first_density=1.0, factor=0.87)
    assert [density_at(0.00111, schedule, 0, epoch) for epoch in (0, 1, 2, 49)] == [1.0, 0.87, 0.87**2, 0.00111]
    for length in (7, 49, 103):
        schedule = WarmupSchedule(steps=length * schedule.stages(0.00111), first_density=1.0, factor=0.87)
        found = [density_at(0.00111, schedule, step) for step in range(0, schedule.steps + 1, length)]
        assert found == [0.87**stage for stage in range(len(found) - 1)] + [0.00111]
        assert density_at(0.00111, schedule, length - 1) == 1.0
