"""Three models with their data, whose steps compute what they exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.quality.large import BLOCKS, WIDTH, Bytes
from benchmarks.quality.models import TransformerModel

_CLASSES = 100


class _Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """The blocks of ResNet-50, 23.7 M parameters, for images of 32 x 32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for i, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, 64 << i, 2 if block == 0 else 1))
            inputs = 4 * (64 << i)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES))


def perceptron() -> nn.Module:
    """Three layers, 0.4 M parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, _CLASSES)
    )


def _images(shape: tuple[int, ...], samples: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, *shape, generator=generator)
        return x, torch.randint(_CLASSES, (samples,), generator=generator)

    return draw


def transformer() -> nn.Module:
    """The GPT of the quality study, 5.1 M parameters."""
    return TransformerModel(Bytes.classes, Bytes.window, WIDTH, BLOCKS)


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(Bytes.classes, (2, Bytes.window + 1), generator=generator)
    return x[:, :-1], x[:, 1:].reshape(-1)


@dataclass(frozen=True)
class Model:
    """A model, and a function that draws a batch for it."""

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Cross entropy of a batch."""
        x, y = self.draw(generator)
        scores = model(x)
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), y)


MODELS = {
    "ResNet-50, 23.7 M": Model(resnet, _images((3, 32, 32), 8)),
    "MLP, 0.4 M": Model(perceptron, _images((1, 28, 28), 64)),
    "Transformer, 5.1 M": Model(transformer, _text),
}
