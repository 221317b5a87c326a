"""The presets, as the guide's table gives them."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not built for torch here; run scripts/build_horovod")

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from dgc_horovod import DGCConfig, WarmupSchedule
from dgc_horovod.compression import PRESETS, config_of
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.settings import rows_of
from dgc_horovod.torch import Compression, DistributedOptimizer
from dgc_horovod.torch.horovod_carrier import HorovodCollectives
from dgc_horovod.torch.session.strategies import Strategy

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_presets(framework):
    pytest.importorskip(f"horovod.{framework}")
    presets = importlib.import_module(f"dgc_horovod.{framework}").Compression
    for name, fields in PRESETS.items():
        compression = getattr(presets, name)()
        assert {field: getattr(compression.config, field) for field in fields} == fields
        for method, arguments in ((compression.compress, [None]), (compression.decompress, [None, None])):
            with pytest.raises(UnsupportedUse, match=rf"from dgc_horovod\.{framework} import Dist.*or launch.* dgcrun"):
                method(*arguments)
    assert Compression.topk().config == DGCConfig(momentum_correction=False, factor_masking=False)
    assert Compression.dgc().config == DGCConfig() and Compression.dgc().config.density == 0.001


def test_process_sets_that_are_gone_mean_that_another_rank_has_ended():
    """Horovod says of those of nodes what would send one to look at one's own `hvd.init`."""
    process_set = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    collectives = HorovodCollectives(process_set, "test")

    def started(text):
        with mock.patch.object(hvd, "alltoall_async", side_effect=ValueError(text)):
            collectives.alltoall(torch.zeros(2), "shards")

    with pytest.raises(HorovodInternalError, match="another rank has ended"):
        started("Alltoall: Process set provided does not exist, or has not been registered.")
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        started("Horovod has not been initialized; use hvd.init().")


def test_the_guides_table_is_the_presets():
    rows = dict(re.findall(r"^\| `\.(\w+)\(.*?\)` \| (.*?) \|", GUIDE.read_text(), re.M))
    assert rows.keys() == PRESETS.keys()
    for name, cell in rows.items():
        said = dict(re.findall(r"`(\w+)=([\w.]+)`", cell))
        assert said == {k: str(v) for k, v in PRESETS[name].items()}, name


def test_every_strategy_that_a_setting_selects_is_a_file():
    selected = {row.strategy for row in rows_of(DGCConfig) if row.strategy}
    assert selected >= {"auto", "local"}
    for name in ("strategies", *selected):
        assert issubclass(import_module(f"dgc_horovod.torch.session.{name}").STRATEGY, Strategy)


def test_every_preset_takes_every_field():
    schedule = WarmupSchedule(steps=10)
    fields = {"rule": "gaussian", "values": "bf16", "clip_norm": 2.0, "warmup": schedule}
    assert Compression.dgc(0.01, **fields).config == DGCConfig(density=0.01, **fields)
    with pytest.raises(ConfigError, match="did you mean 'clip_norm'"):
        Compression.topk(0.01, clip_nrm=2.0)
    with pytest.raises(ConfigError, match="density must be in"):
        Compression.gaussian(1000)


def test_horovods_own_are_horovods_own():
    assert Compression.none is hvd.Compression.none and Compression.fp16 is hvd.Compression.fp16
    assert config_of(Compression.none) is None
    assert config_of(DGCConfig(density=0.5)).density == 0.5


def test_signature_is_horovods():
    ours, theirs = (inspect.signature(f).parameters for f in (DistributedOptimizer, hvd.DistributedOptimizer))
    shared = list(ours)[: len(theirs)]
    assert shared == list(theirs)
    assert [ours[name].default for name in shared] == [theirs[name].default for name in shared]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])
