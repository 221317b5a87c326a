"""Parameter shapes of five models, without the models: what a benchmark needs to make gradients of a real layout.

Names, order and shapes are those of torchvision's ResNet-50, VGG-16 and AlexNet, of an ``nn.LSTM`` language model with
the sizes of the large network of Zaremba et al. (arXiv 1409.2329), and of transformers' BertModel, base and uncased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

Shapes = list[tuple[str, tuple[int, ...]]]

_RESNET50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, inner channels
_RESNET_EXPANSION = 4  # a bottleneck's outer channels over its inner ones
_VGG16_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions, channels
_IMAGENET_CLASSES = 1_000
_ALEXNET_CONVOLUTIONS = ((0, 64, 3, 11), (3, 192, 64, 5), (6, 384, 192, 3), (8, 256, 384, 3), (10, 256, 256, 3))
_BERT_VOCABULARY, _BERT_POSITIONS, _BERT_TYPES = 30_522, 512, 2
_BERT_HIDDEN, _BERT_LAYERS = 768, 12
_BERT_LARGE_HIDDEN, _BERT_LARGE_LAYERS = 1_024, 24
_GPT_VOCABULARY, _GPT_POSITIONS, _GPT_HIDDEN, _GPT_LAYERS = 50_257, 2_048, 2_048, 24
_PTB_VOCABULARY = 10_000
_PTB_HIDDEN = 1_500
_PTB_LAYERS = 2


def numel(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Parameters of all tensors together."""
    return sum(math.prod(shape) for _, shape in shapes)


def resnet50() -> Shapes:
    """ResNet-50 for ImageNet: 161 tensors, 25,557,032 parameters."""
    shapes = [*_convolution("conv1", 64, 3, 7), *_normalisation("bn1", 64)]
    incoming = 64
    for stage, (blocks, inner) in enumerate(_RESNET50_STAGES, start=1):
        for block in range(blocks):
            shapes += _bottleneck(f"layer{stage}.{block}", incoming, inner, shortcut=block == 0)
            incoming = inner * _RESNET_EXPANSION
    return [*shapes, *_linear("fc", _IMAGENET_CLASSES, incoming)]


def vgg16() -> Shapes:
    """VGG-16 without batch normalisation, for ImageNet: 32 tensors, 138,357,544 parameters."""
    shapes: Shapes = []
    position, incoming = 0, 3  # torchvision numbers every module of the sequence, those without parameters too
    for convolutions, channels in _VGG16_STAGES:
        for _ in range(convolutions):
            name = f"features.{position}"
            shapes += [*_convolution(name, channels, incoming, 3), (f"{name}.bias", (channels,))]
            position, incoming = position + 2, channels  # the convolution and its ReLU
        position += 1  # the pooling
    shapes += _linear("classifier.0", 4096, incoming * 7 * 7)
    shapes += _linear("classifier.3", 4096, 4096)
    return [*shapes, *_linear("classifier.6", _IMAGENET_CLASSES, 4096)]


def alexnet() -> Shapes:
    """AlexNet (one tower) for ImageNet: 16 tensors, 61,100,840 parameters."""
    shapes: Shapes = []
    for position, outgoing, incoming, size in _ALEXNET_CONVOLUTIONS:
        name = f"features.{position}"
        shapes += [*_convolution(name, outgoing, incoming, size), (f"{name}.bias", (outgoing,))]
    shapes += _linear("classifier.1", 4096, 256 * 6 * 6)
    shapes += _linear("classifier.4", 4096, 4096)
    return [*shapes, *_linear("classifier.6", _IMAGENET_CLASSES, 4096)]


def bert_base() -> Shapes:
    """BERT-base, the encoder with its pooler: 199 tensors, 109,482,240 parameters."""
    return _bert(_BERT_HIDDEN, _BERT_LAYERS)


def bert_large() -> Shapes:
    """BERT-large, the same with 24 layers of 1,024: 391 tensors, 335,141,888 parameters."""
    return _bert(_BERT_LARGE_HIDDEN, _BERT_LARGE_LAYERS)


def _bert(hidden: int, layers: int) -> Shapes:
    sizes = {"word": _BERT_VOCABULARY, "position": _BERT_POSITIONS, "token_type": _BERT_TYPES}
    shapes: Shapes = [(f"embeddings.{name}_embeddings.weight", (size, hidden)) for name, size in sizes.items()]
    shapes += _normalisation("embeddings.LayerNorm", hidden)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes += _linear(f"{name}.attention.{part}", hidden, hidden)
        shapes += _normalisation(f"{name}.attention.output.LayerNorm", hidden)
        shapes += _linear(f"{name}.intermediate.dense", 4 * hidden, hidden)
        shapes += _linear(f"{name}.output.dense", hidden, 4 * hidden)
        shapes += _normalisation(f"{name}.output.LayerNorm", hidden)
    return [*shapes, *_linear("pooler.dense", hidden, hidden)]


def gpt_1_3b() -> Shapes:
    """The 1.3 B model of the GPT-3 paper (arXiv 2005.14165) as GPT-2: 292 tensors, 1,315,723,264 parameters."""
    shapes: Shapes = [("wte.weight", (_GPT_VOCABULARY, _GPT_HIDDEN)), ("wpe.weight", (_GPT_POSITIONS, _GPT_HIDDEN))]
    for layer in range(_GPT_LAYERS):
        name = f"h.{layer}"
        shapes += _normalisation(f"{name}.ln_1", _GPT_HIDDEN)
        shapes += _linear(f"{name}.attn.c_attn", 3 * _GPT_HIDDEN, _GPT_HIDDEN)
        shapes += _linear(f"{name}.attn.c_proj", _GPT_HIDDEN, _GPT_HIDDEN)
        shapes += _normalisation(f"{name}.ln_2", _GPT_HIDDEN)
        shapes += _linear(f"{name}.mlp.c_fc", 4 * _GPT_HIDDEN, _GPT_HIDDEN)
        shapes += _linear(f"{name}.mlp.c_proj", _GPT_HIDDEN, 4 * _GPT_HIDDEN)
    return [*shapes, *_normalisation("ln_f", _GPT_HIDDEN)]


def lstm_ptb() -> Shapes:
    """The large LSTM for the Penn Treebank, its decoder not tied: 11 tensors, 66,034,000 parameters."""
    shapes: Shapes = [("encoder.weight", (_PTB_VOCABULARY, _PTB_HIDDEN))]
    gates = 4 * _PTB_HIDDEN
    for layer in range(_PTB_LAYERS):
        shapes += [
            (f"lstm.weight_ih_l{layer}", (gates, _PTB_HIDDEN)),
            (f"lstm.weight_hh_l{layer}", (gates, _PTB_HIDDEN)),
            (f"lstm.bias_ih_l{layer}", (gates,)),
            (f"lstm.bias_hh_l{layer}", (gates,)),
        ]
    return [*shapes, *_linear("decoder", _PTB_VOCABULARY, _PTB_HIDDEN)]


def _bottleneck(name: str, incoming: int, inner: int, shortcut: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    outer = inner * _RESNET_EXPANSION
    yield from _convolution(f"{name}.conv1", inner, incoming, 1)
    yield from _normalisation(f"{name}.bn1", inner)
    yield from _convolution(f"{name}.conv2", inner, inner, 3)
    yield from _normalisation(f"{name}.bn2", inner)
    yield from _convolution(f"{name}.conv3", outer, inner, 1)
    yield from _normalisation(f"{name}.bn3", outer)
    if shortcut:
        yield from _convolution(f"{name}.downsample.0", outer, incoming, 1)
        yield from _normalisation(f"{name}.downsample.1", outer)


def _convolution(name: str, outgoing: int, incoming: int, size: int) -> Shapes:
    return [(f"{name}.weight", (outgoing, incoming, size, size))]


def _normalisation(name: str, channels: int) -> Shapes:
    return [(f"{name}.weight", (channels,)), (f"{name}.bias", (channels,))]


def _linear(name: str, outgoing: int, incoming: int) -> Shapes:
    return [(f"{name}.weight", (outgoing, incoming)), (f"{name}.bias", (outgoing,))]


SHAPES: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "alexnet": alexnet,
    "lstm-ptb": lstm_ptb,
    "bert-base": bert_base,
}
