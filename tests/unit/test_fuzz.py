"""Changed packets and config files: an error, or what could have been meant; nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import config_file
from dgc_horovod.launch.settings import resolve
from dgc_horovod.wire.packet import NumpyCoder
from tests.helpers import fuzz
from tests.helpers.packets import NATIVE

LIKELY = ("sealed CorruptPacket", "sealed RankMismatch", "sealed valid", "unsealed CorruptPacket")


@pytest.mark.parametrize("packets", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_native_decoder_survives_changed_packets(packets):
    outcomes = fuzz.run(NATIVE, packets, seed=0)
    assert sum(outcomes.values()) == packets
    assert all(outcomes.get(likely, 0) > packets // 100 for likely in LIKELY), f"they reach too little: {outcomes}"


def test_both_decoders_end_alike():
    fuzz.run(NATIVE, 3_000, seed=1, against=NumpyCoder())


CONFIG = """\
params:
  fusion_threshold_mb: 64
  cycle_time_ms: 1.5
compression:
  method: dgc
  density: 0.001
  warmup_epochs: 4
  warmup_steps_per_epoch: 100
  clip_norm: 0.25
  values: 4bit
  factor_masking: on
  min_numel: 1024
  timeout: 60
"""


def test_a_thousand_changed_config_files_end_in_an_error_that_names_the_file_or_in_a_valid_config(tmp_path):
    rng, outcomes = np.random.default_rng(0), Counter[str]()
    path = tmp_path / "job.yaml"
    for _ in range(1_000):
        path.write_bytes(_changed(CONFIG.encode(), rng))
        try:
            job = resolve({}, {}, [(str(path), config_file.load(str(path)))])
            if job.config is not None:
                DGCConfig(**vars(job.config))
            outcomes["valid"] += 1
        except ConfigError as error:
            assert len(str(error)) > 20, "it does not say what is wrong"
            outcomes["refused"] += 1
    assert outcomes["refused"] > 300 and outcomes["valid"] > 80, f"the changes reach too little: {outcomes}"


def _changed(text: bytes, rng: np.random.Generator) -> bytes:
    """One to three changes: bytes, whole lines, values, pieces of YAML."""
    pieces = b"{|}|: |- |!!python/object:os.system |&a |*a|\x00|\xff|nan|-1|1e400".split(b"|")
    for _ in range(int(rng.integers(1, 4))):
        lines, kind = text.split(b"\n"), rng.integers(5)
        i = int(rng.integers(len(lines)))
        if kind == 0 and text:
            at = int(rng.integers(len(text)))
            text = text[:at] + bytes([int(rng.integers(256))]) + text[at + 1 :]
            continue
        if kind == 1:
            lines[i] = lines[int(rng.integers(len(lines)))]
        elif kind == 2:
            lines[i] = lines[i].split(b":")[0] + b": " + pieces[int(rng.integers(len(pieces)))]
        elif kind == 3:
            del lines[i]
        else:
            at = int(rng.integers(len(lines[i]) + 1))
            lines[i] = lines[i][:at] + pieces[int(rng.integers(len(pieces)))] + lines[i][at:]
        text = b"\n".join(lines)
    return text
