"""What torch_digits.py and ddp_digits.py share and a reader may skip: the images, the net, and how good it is."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

TEST_IMAGES = 597


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The images for training and those for testing: the same split in every run."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2018))
    images, labels = images[order] - images.mean(), torch.tensor(data.target)[order]
    return (
        TensorDataset(images[TEST_IMAGES:], labels[TEST_IMAGES:]),
        TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


def make_model() -> nn.Module:
    """Two convolutions and two linear layers: 155,530 parameters, 99% of them in three matrices."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Fraction of the test images that the model gets right; any rank will do."""
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
