"""The examples with the papers' settings, on tiny files in the format of the papers' data sets."""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch

from tests.helpers.jobs import ROOT, run

SENTENCE = "the quick brown fox jumps over <unk> lazy dog and N more"


@pytest.fixture
def cifar(tmp_path):
    """Two training files of 48 images and a test file of 20, whose class shows in their brightness."""
    rng = np.random.default_rng(0)
    for name, count in (("data_batch_1", 48), ("data_batch_2", 48), ("test_batch", 20)):
        labels = rng.integers(0, 10, count)
        pixels = np.clip(25 * labels[:, None] + rng.integers(0, 20, (count, 3072)), 0, 255).astype(np.uint8)
        (tmp_path / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}))
    return tmp_path


@pytest.fixture
def ptb(tmp_path):
    """One sentence again and again: who has read it knows the next word."""
    for part, count in (("train", 120), ("valid", 30), ("test", 30)):
        (tmp_path / f"ptb.{part}.txt").write_text(f" {SENTENCE} \n" * count)
    return tmp_path


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def result(example: str, *options: str) -> dict:
    ended = run(["horovodrun", "--gloo", "-np", "2", sys.executable, f"examples/{example}.py", *options], 200)
    assert ended.code == 0, ended.output
    found = re.findall(r"RESULT (\{.*\})", ended.output)
    assert len(found) == 1, "rank 0 alone reports"
    return json.loads(found[0])


@pytest.mark.slow
@pytest.mark.parallel
def test_cifar10_resnet(cifar):
    """Six steps of ResNet-8; the warm-up hears of the epochs from the sampler."""
    options = ("--data", str(cifar), "--depth", "8", "--epochs", "2", "--batch-size", "16", "--warmup-epochs", "1")
    found = result("cifar10_resnet", *options)
    assert found["quality"] * 20 == pytest.approx(round(found["quality"] * 20)), "not a share of the 20 test images"
    assert 3 < found["ratio"] < 20  # half of the steps at density 0.25 and less


@pytest.mark.slow
@pytest.mark.parallel
def test_ptb_lstm_learns_a_sentence(ptb):
    options = ("--data", str(ptb), "--width", "64", "--epochs", "8", "--batch-size", "2", "--lr", "5")
    found = result("ptb_lstm", *options, "--density", "0.05", "--clip-norm", "1")
    assert found["quality_name"] == "perplexity"
    assert 1 <= found["quality"] < 0.7 * len(SENTENCE.split()), "no better than guessing"
    assert found["ratio"] > 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "missing"), [("cifar10_resnet", "data_batch_1"), ("ptb_lstm", "ptb.train.txt")])
def test_missing_data_are_named(name, missing, tmp_path):
    ended = run([sys.executable, f"examples/{name}.py", "--data", str(tmp_path)])
    assert ended.code == 1
    assert missing in ended.output.splitlines()[-1]


def test_the_resnets_have_the_papers_sizes(example):
    """He et al., table 6: 0.27 M and 1.7 M parameters."""
    resnet = example("cifar10_resnet").resnet
    assert [sum(p.numel() for p in resnet(depth).parameters()) for depth in (20, 110)] == [269_722, 1_727_962]
    assert resnet(20)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(SystemExit, match="got 21"):
        resnet(21)


def test_the_learning_rate_falls_as_in_the_paper(example):
    rate = example("cifar10_resnet").learning_rate
    deep, shallow = (argparse.Namespace(depth=depth, lr=0.1, epochs=164) for depth in (110, 20))
    found = [rate(shallow, epoch, 10**4) for epoch in (0, 81, 82, 122, 123, 163)]
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert [rate(deep, 0, 399), rate(deep, 1, 400)] == pytest.approx([0.01, 0.1])


def test_training_images_are_moved_and_mirrored(example):
    module = example("cifar10_resnet")
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    plain, moved = module.prepared(images), module.prepared(images, torch.Generator().manual_seed(0))
    still = [any(torch.equal(moved[i], x) for x in (plain[i], plain[i].flip(-1))) for i in range(64)]
    assert 0 <= sum(still) < 8  # one of 81 places is the middle
    black = module.prepared(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))[0, :, 0, 0]
    for one, other in zip(moved, plain, strict=True):
        inside = one[:, 4:-4, 4:-4]  # is there wherever the image has gone
        places = [other.flip(-1) if flipped else other for flipped in (False, True)]
        padded = [torch.nn.functional.pad(x - black[:, None, None], [4] * 4) + black[:, None, None] for x in places]
        crops = (x[:, a + 4 : a + 28, b + 4 : b + 28] for x in padded for a in range(9) for b in range(9))
        assert any(torch.allclose(inside, crop, atol=1e-5) for crop in crops)


def test_the_text_is_read_in_columns_and_windows(example):
    module = example("ptb_lstm")
    sequences = module.columns(torch.arange(205), 2)
    assert sequences[:3].tolist() == [[0, 102], [1, 103], [2, 104]]
    windows = list(module.windows(sequences))
    assert [len(words) for words, _ in windows] == [35, 35, 31]
    assert all(torch.equal(words + 1, following) for words, following in windows)
    assert windows[1][0][0].tolist() == [35, 137]
