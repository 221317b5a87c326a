"""Parameter shapes of models, without the models, and gradients of these shapes.

Names, order and shapes are those of torchvision's ResNet-50, VGG-16 and AlexNet, of an ``nn.LSTM`` language model with
the sizes of the large network of Zaremba et al. (arXiv 1409.2329), and of transformers' BertModel and GPT-2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

Shapes = list[tuple[str, tuple[int, ...]]]

_DRAWN = 1 << 22  # elements after which scales repeat, and of which noise begins somewhere
_CLASSES = 1_000  # of ImageNet
_RESNET50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, inner channels
_VGG16_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions, channels
_ALEXNET_CONVOLUTIONS = ((0, 64, 3, 11), (3, 192, 64, 5), (6, 384, 192, 3), (8, 256, 384, 3), (10, 256, 256, 3))


def numel(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Parameters of all tensors together."""
    return sum(math.prod(shape) for _, shape in shapes)


def _layer(name: str, *weight: int, bias: bool = True) -> Shapes:
    """A layer's weight, and a bias of its outputs: a linear layer, a convolution, or a normalisation."""
    return [(f"{name}.weight", weight), *([(f"{name}.bias", weight[:1])] if bias else [])]


def resnet50() -> Shapes:
    """ResNet-50 for ImageNet: 161 tensors, 25,557,032 parameters."""

    def normalised(name: str, norm: str, outgoing: int, incoming: int, size: int) -> Shapes:
        return _layer(name, outgoing, incoming, size, size, bias=False) + _layer(norm, outgoing)

    shapes, incoming = normalised("conv1", "bn1", 64, 3, 7), 64
    for stage, (blocks, inner) in enumerate(_RESNET50_STAGES, start=1):
        for block in range(blocks):
            name, outer = f"layer{stage}.{block}", 4 * inner
            shapes += normalised(f"{name}.conv1", f"{name}.bn1", inner, incoming, 1)
            shapes += normalised(f"{name}.conv2", f"{name}.bn2", inner, inner, 3)
            shapes += normalised(f"{name}.conv3", f"{name}.bn3", outer, inner, 1)
            if block == 0:
                shapes += normalised(f"{name}.downsample.0", f"{name}.downsample.1", outer, incoming, 1)
            incoming = outer
    return shapes + _layer("fc", _CLASSES, incoming)


def vgg16() -> Shapes:
    """VGG-16 without batch normalisation, for ImageNet: 32 tensors, 138,357,544 parameters."""
    shapes: Shapes = []
    position, incoming = 0, 3  # torchvision numbers every module of the sequence, those without parameters too
    for convolutions, channels in _VGG16_STAGES:
        for _ in range(convolutions):
            shapes += _layer(f"features.{position}", channels, incoming, 3, 3)
            position, incoming = position + 2, channels  # the convolution and its ReLU
        position += 1  # the pooling
    shapes += _layer("classifier.0", 4096, incoming * 7 * 7) + _layer("classifier.3", 4096, 4096)
    return shapes + _layer("classifier.6", _CLASSES, 4096)


def alexnet() -> Shapes:
    """AlexNet (one tower) for ImageNet: 16 tensors, 61,100,840 parameters."""
    shapes: Shapes = []
    for position, outgoing, incoming, size in _ALEXNET_CONVOLUTIONS:
        shapes += _layer(f"features.{position}", outgoing, incoming, size, size)
    shapes += _layer("classifier.1", 4096, 256 * 6 * 6) + _layer("classifier.4", 4096, 4096)
    return shapes + _layer("classifier.6", _CLASSES, 4096)


def bert(hidden: int, layers: int) -> Shapes:
    """The encoder with its pooler, uncased. Base (768, 12): 199 tensors, 109,482,240 parameters."""
    sizes = {"word": 30_522, "position": 512, "token_type": 2}
    shapes: Shapes = [(f"embeddings.{name}_embeddings.weight", (size, hidden)) for name, size in sizes.items()]
    shapes += _layer("embeddings.LayerNorm", hidden)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes += _layer(f"{name}.attention.{part}", hidden, hidden)
        shapes += _layer(f"{name}.attention.output.LayerNorm", hidden)
        shapes += _layer(f"{name}.intermediate.dense", 4 * hidden, hidden)
        shapes += _layer(f"{name}.output.dense", hidden, 4 * hidden)
        shapes += _layer(f"{name}.output.LayerNorm", hidden)
    return shapes + _layer("pooler.dense", hidden, hidden)


def gpt_1_3b() -> Shapes:
    """The 1.3 B model of the GPT-3 paper (arXiv 2005.14165) as GPT-2: 292 tensors, 1,315,723,264 parameters."""
    hidden = 2_048
    shapes: Shapes = [("wte.weight", (50_257, hidden)), ("wpe.weight", (2_048, hidden))]
    for name in (f"h.{layer}" for layer in range(24)):
        shapes += _layer(f"{name}.ln_1", hidden) + _layer(f"{name}.attn.c_attn", 3 * hidden, hidden)
        shapes += _layer(f"{name}.attn.c_proj", hidden, hidden) + _layer(f"{name}.ln_2", hidden)
        shapes += _layer(f"{name}.mlp.c_fc", 4 * hidden, hidden) + _layer(f"{name}.mlp.c_proj", hidden, 4 * hidden)
    return shapes + _layer("ln_f", hidden)


def lstm_ptb() -> Shapes:
    """The large LSTM for the Penn Treebank, its decoder not tied: 11 tensors, 66,034,000 parameters."""
    vocabulary, hidden = 10_000, 1_500
    shapes: Shapes = [("encoder.weight", (vocabulary, hidden))]
    for layer in range(2):
        shapes += [(f"lstm.weight_{part}_l{layer}", (4 * hidden, hidden)) for part in ("ih", "hh")]
        shapes += [(f"lstm.bias_{part}_l{layer}", (4 * hidden,)) for part in ("ih", "hh")]
    return shapes + _layer("decoder", vocabulary, hidden)


bert_large = partial(bert, 1_024, 24)  # 391 tensors, 335,141,888 parameters
SHAPES: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "alexnet": alexnet,
    "lstm-ptb": lstm_ptb,
    "bert-base": partial(bert, 768, 12),
}


class Gradients:
    """The gradients of any rank at any step: every coordinate has its own scale, every step of a rank new noise.

    Scales are log-normal over coordinates and over tensors, so what accumulates is far from iid.

    Args:
        shapes: of the tensors.
        device: where they are made.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.shapes, self._device = shapes, device
        self._noise = torch.randn(2 * _DRAWN, generator=draw, device=device)
        self._scale = torch.randn(_DRAWN, generator=draw, device=device).exp_()
        self._of_tensor = torch.randn(len(shapes), generator=draw, device=device).exp_() * 1e-3

    def of(self, rank: int, step: int) -> list[torch.Tensor]:
        """Those of a rank at a step, in memory of their own as a backward pass leaves them."""
        return [self.one(i, rank, step) for i in range(len(self.shapes))]

    def one(self, i: int, rank: int, step: int) -> torch.Tensor:
        """Tensor `i` alone."""
        gradient = torch.empty(self.shapes[i], device=self._device)
        self.put(i, gradient.view(-1), rank, step)
        return gradient

    def put(self, i: int, target: torch.Tensor, rank: int, step: int) -> None:
        """Write tensor `i`, flat, to `target`."""
        for number, part in enumerate(target.split(_DRAWN)):
            offset = (7919 * step + 15_485_863 * rank + 104_729 * i + 1_299_709 * number) % _DRAWN
            torch.mul(self._noise[offset:][: part.numel()], self._scale[: part.numel()], out=part)
        target *= self._of_tensor[i]
