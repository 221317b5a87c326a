"""The examples with the papers' settings, on tiny files in the format of the papers' data sets."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys

import numpy as np
import pytest

from tests.helpers.jobs import run

LETTERS = "the quick brown fox jumps over <unk> lazy dog and N more".split()


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
    """A few hundred words."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 120), ("valid", 30), ("test", 30)):
        lines = [" ".join(rng.choice(LETTERS, 9)) for _ in range(count)]
        (tmp_path / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in [" ".join(LETTERS), *lines]))
    return tmp_path


def result(example: str, *options: str) -> tuple[dict, str]:
    ended = run(["horovodrun", "--gloo", "-np", "2", sys.executable, f"examples/{example}.py", *options], 200)
    assert ended.code == 0, ended.output
    found = re.findall(r"RESULT (\{.*\})", ended.output)
    assert len(found) == 1, "rank 0 alone reports"
    return json.loads(found[0]), ended.output


@pytest.mark.parallel
def test_cifar10_resnet(cifar):
    """Six steps of ResNet-8; the warm-up hears of the epochs from the sampler."""
    options = ("--data", str(cifar), "--depth", "8", "--epochs", "2", "--batch-size", "16", "--warmup-epochs", "1")
    found, _ = result("cifar10_resnet", *options)
    assert 0 <= found["quality"] <= 1
    assert 3 < found["ratio"] < 20  # half of the steps at density 0.25 and less
    assert found["epochs"] == 2


@pytest.mark.parallel
def test_ptb_lstm(ptb):
    """Vanilla SGD, clipped; as many words as there are letters are as hard to guess as that."""
    options = ("--data", str(ptb), "--width", "32", "--epochs", "2", "--batch-size", "2", "--lr", "1")
    found, _ = result("ptb_lstm", *options)
    assert found["quality_name"] == "perplexity"
    assert 2 < found["quality"] < 3 * len(LETTERS)
    assert found["ratio"] > 2
    assert math.isfinite(found["quality"])


@pytest.mark.parametrize(("example", "missing"), [("cifar10_resnet", "data_batch_1"), ("ptb_lstm", "ptb.train.txt")])
def test_missing_data_are_named(example, missing, tmp_path):
    ended = run([sys.executable, f"examples/{example}.py", "--data", str(tmp_path)])
    assert ended.code == 1
    assert missing in ended.output.splitlines()[-1]
