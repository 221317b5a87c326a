"""The tasks: images of digits, the next character of Python's own sources by an LSTM and a Transformer, its next byte
by a GPT of 5.1 M parameters, and, on a GPU, the next token of Python packages' sources by one of 124 M.

Small enough for hundreds of runs on two cores, hard enough that a wrong compression shows. Learning rates are near the
top of what dense training bears, where what DGC does to momentum matters most. Settings are the same for every
variant; what is compared is always a dense run of the same seed.
"""

from __future__ import annotations

import functools
import hashlib
import lzma
import sysconfig
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.quality import tokens

WORKERS = 4  # for whose number the batch is given; more ranks have smaller shards of the same whole batch
TRAIN_DIGITS, TRAIN_COPIES, TEST_COPIES = 1297, 16, 8
# The first 1.5 MB of the standard library of Python 3.11 (licence: PSF-2.0), as numbers of 97 symbols: newline, the
# printable ASCII characters, and one for all others. A fixture, because the text decides what can be learnt from it.
TEXT = Path(__file__).with_name("text.xz")
SYMBOLS, TEST_WINDOWS = 97, 600
GPT_WIDTH, GPT_BLOCKS = 320, 4
_PART = 1 << 14  # bytes of the sources; one part of every twenty is for the test


class RecurrentModel(nn.Module):
    """Embedding, one LSTM layer, linear output: scores of every next symbol."""

    def __init__(self, symbols: int, width: int = 128, embedding: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.output = nn.Linear(width, symbols)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        """(samples, time) -> (samples, time, symbols)."""
        return self.output(self.lstm(self.embedding(symbols))[0])


class TransformerModel(nn.Module):
    """Pre-norm blocks of causal attention: scores of every next symbol."""

    def __init__(
        self, symbols: int, window: int, width: int = 64, blocks: int = 2, heads: int = 4, spread: float = 0.05
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.zeros(window, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, symbols)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, spread)

    def forward(self, symbols: Tensor) -> Tensor:
        """(samples, time) -> (samples, time, symbols)."""
        return self.output(self.norm(self.blocks(self.embedding(symbols) + self.places[: symbols.shape[1]])))


def tied_transformer(symbols: int, window: int, width: int, blocks: int, compiles: bool) -> TransformerModel:
    """A `TransformerModel` in GPT-2's form: input and output share their weights, and heads are 64 wide.

    Args:
        symbols, window, width, blocks: of the model.
        compiles: whether the blocks are compiled; they share their code.
    """
    model = TransformerModel(symbols, window, width, blocks, width // 64, spread=0.02)
    model.output = nn.Linear(width, symbols, bias=False)
    model.output.weight = model.embedding.weight
    for block in model.blocks if compiles else ():
        block.compile()
    return model


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, time, width = x.shape
        split = self.query_key_value(self.before_attention(x)).view(samples, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, time, width))
        return x + self.layers(self.before_layers(x))


@dataclass(frozen=True)
class Settings:
    """How a task is trained, by SGD with momentum 0.9 and a cosine from `lr` to 0.

    Args:
        batch: samples per rank and step, at four ranks.
        steps: length of a run of length 1.
        lr: highest learning rate.
        clip_norm: L2 norm at which the averaged gradient is clipped, or None.
        density: of the compressed variants.
        stage: steps of each density of the warm-up; it stands for an epoch of the paper.
        adamw_lr: highest learning rate of AdamW, where a variant uses it.
        ramp: first steps, in which the learning rate rises to the highest.
    """

    batch: int
    steps: int
    lr: float
    clip_norm: float | None
    density: float
    stage: int
    adamw_lr: float = 0.003
    ramp: int = 0


@dataclass(frozen=True)
class Quality:
    """Of a model on data that it is not trained on: mean cross entropy (nats), and the share that it gets right."""

    loss: float
    accuracy: float


class Task(ABC):
    """A model with random weights, and its data.

    Args:
        seed: of the weights.
    """

    settings: ClassVar[Settings]
    title: ClassVar[str]
    classes: ClassVar[int]
    points: ClassVar[int] = 20  # of a curve

    def __init__(self, seed: int) -> None:
        torch.manual_seed(1000 + seed)
        self.model = self.make_model()

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model."""

    @abstractmethod
    def loss(self, samples: int, draw: Generator) -> Tensor:
        """Mean cross entropy of a random batch, with its graph."""

    @abstractmethod
    def test_data(self) -> tuple[Tensor, Tensor]:
        """Inputs and the right answers."""

    @torch.no_grad()
    def quality(self) -> Quality:
        """How good the model is by now."""
        inputs, right = self.test_data()
        scores = self.model(inputs).flatten(0, -2)
        loss = functional.cross_entropy(scores, right.flatten()).item()
        return Quality(loss, (scores.argmax(-1) == right.flatten()).double().mean().item())


class Images(Task):
    """Scikit-learn's digits, each in several turned, scaled, moved and noisy copies."""

    settings = Settings(batch=16, steps=1500, lr=0.15, clip_norm=None, density=0.001, stage=50)
    title, classes = "images, MLP", 10

    def make_model(self) -> nn.Module:
        """Three linear layers, 85,002 parameters."""
        layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        return nn.Sequential(nn.Flatten(), *layers)

    def loss(self, samples: int, draw: Generator) -> Tensor:
        """Mean cross entropy of random images."""
        images, labels = digits()[:2]
        chosen = torch.randint(0, len(labels), (samples,), generator=draw)
        return functional.cross_entropy(self.model(images[chosen]), labels[chosen])

    def test_data(self) -> tuple[Tensor, Tensor]:
        """Images of 500 other digits."""
        return digits()[2:]


class Text(Task):
    """The next symbol, in windows from random places of a text."""

    window: ClassVar[int]
    classes = SYMBOLS

    def corpus(self) -> tuple[Tensor, Tensor]:
        """The text to train on, and that to test on, as numbers of symbols."""
        return text()

    def loss(self, samples: int, draw: Generator) -> Tensor:
        """Mean cross entropy of every next symbol."""
        train = self.corpus()[0]
        starts = torch.randint(0, len(train) - self.window - 1, (samples, 1), generator=draw)
        return self.entropy(train[starts + torch.arange(self.window + 1)].long())

    def entropy(self, windows: Tensor) -> Tensor:
        """Mean cross entropy of every symbol of these windows but the first ones."""
        return functional.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def test_data(self) -> tuple[Tensor, Tensor]:
        """Windows of what is not trained on."""
        held_out = self.corpus()[1].long()
        count = min(TEST_WINDOWS, len(held_out) // (self.window + 1))
        windows = held_out[: count * (self.window + 1)].view(count, -1)
        return windows[:, :-1], windows[:, 1:]


class Recurrent(Text):
    """A character LSTM that needs clipping."""

    settings = Settings(batch=4, steps=500, lr=10.0, clip_norm=0.1, density=0.005, stage=20)
    title, window = "text, LSTM", 32

    def make_model(self) -> nn.Module:
        """One layer of 128, 108,305 parameters."""
        return RecurrentModel(SYMBOLS)


class Transformer(Text):
    """A character Transformer."""

    settings = Settings(batch=4, steps=400, lr=0.15, clip_norm=1.0, density=0.01, stage=20)
    title, window = "text, Transformer", 48

    def make_model(self) -> nn.Module:
        """Two blocks of width 64, 115,681 parameters."""
        return TransformerModel(SYMBOLS, self.window)


class Bytes(Text):
    """The next byte of Python's standard library."""

    settings = Settings(batch=2, steps=1200, lr=0.1, clip_norm=1.0, density=0.01, stage=60, adamw_lr=0.001, ramp=60)
    title, window, classes = "bytes, GPT of 5.1 M", 128, 256
    points = 4  # to look at all of the test text takes as long as forty steps

    def corpus(self) -> tuple[Tensor, Tensor]:
        """Bytes to train on and to test on."""
        return sources()

    def make_model(self) -> nn.Module:
        """Four blocks of width 320."""
        return TransformerModel(self.classes, self.window, GPT_WIDTH, GPT_BLOCKS)


class Tokens(Text):
    """The next token of Python packages' sources, on a GPU where there is one."""

    settings = Settings(batch=8, steps=600, lr=0.1, clip_norm=1.0, density=0.01, stage=30, adamw_lr=6e-4, ramp=100)
    title, window, classes = "tokens, GPT of 124 M", 512, tokens.SYMBOLS
    points, width, blocks, tested = 15, 768, 12, 256

    def make_model(self) -> nn.Module:
        """GPT-2's smallest shape."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = tied_transformer(self.classes, self.window, self.width, self.blocks, self._device.type == "cuda")
        return model.to(self._device)

    def corpus(self) -> tuple[Tensor, Tensor]:
        """Tokens to train on and to test on."""
        return tokens.corpus()

    def entropy(self, windows: Tensor) -> Tensor:
        """The same in mixed precision on a GPU."""
        windows = windows.to(self._device, torch.long)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            scores = self.model(windows[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(scores.float(), windows[:, 1:].flatten())

    @torch.no_grad()
    def quality(self) -> Quality:
        """The loss alone: on evenly spaced windows of what is not trained on."""
        held_out = self.corpus()[1]
        starts = torch.linspace(0, len(held_out) - self.window - 1, self.tested).long()[:, None]
        windows = held_out[starts + torch.arange(self.window + 1)]
        parts = windows.split(self.settings.batch)
        losses = [self.entropy(part).double() * len(part) for part in parts]
        return Quality(torch.stack(losses).sum().item() / self.tested, 0.0)


TASKS: dict[str, type[Task]] = {"images": Images, "lstm": Recurrent, "transformer": Transformer}
ALL_TASKS: dict[str, type[Task]] = {**TASKS, "gpt": Bytes, "gpt-124m": Tokens}


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the same for every seed."""
    from sklearn.datasets import load_digits

    found = load_digits()
    fixed = Generator().manual_seed(1234)
    order = torch.randperm(len(found.target), generator=fixed)
    images = torch.tensor(found.data, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    labels = torch.tensor(found.target)[order]
    train = _disturbed(images[:TRAIN_DIGITS], TRAIN_COPIES, fixed)
    test = _disturbed(images[TRAIN_DIGITS:], TEST_COPIES, fixed)
    return train, labels[:TRAIN_DIGITS].repeat(TRAIN_COPIES), test, labels[TRAIN_DIGITS:].repeat(TEST_COPIES)


def _disturbed(images: Tensor, copies: int, draw: Generator) -> Tensor:
    """`copies` of every image, each turned, scaled, moved and sheared at random, with noise."""
    count = len(images) * copies

    def uniform(most: float, *shape: int) -> Tensor:
        return (torch.rand(shape or (count,), generator=draw) * 2 - 1) * most

    angle, scale, move, shear = uniform(0.45), 1 + uniform(0.2), uniform(0.3, count, 2), uniform(0.2)
    rows = [scale * angle.cos(), shear - scale * angle.sin(), scale * angle.sin(), scale * angle.cos()]
    affine = torch.cat([torch.stack(rows, 1).view(-1, 2, 2), move[:, :, None]], 2)
    grid = functional.affine_grid(affine, [count, 1, 8, 8], align_corners=False)
    clean = functional.grid_sample(images.repeat(copies, 1, 1, 1), grid, align_corners=False)
    return (clean + 0.15 * torch.randn(clean.shape, generator=draw) - 0.3) / 0.37


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """The text as numbers of symbols: to train on, and the last 5%."""
    numbers = torch.frombuffer(bytearray(lzma.decompress(TEXT.read_bytes())), dtype=torch.uint8).long()
    split = int(len(numbers) * 0.95)
    return numbers[:split], numbers[split:]


@functools.cache
def sources() -> tuple[Tensor, Tensor]:
    """Python's own modules (licence: PSF-2.0), without their tests, as bytes; test parts lie all over the text.

    Every machine has them; `digest` tells whether they are the same.
    """
    whole = torch.frombuffer(bytearray(_read()), dtype=torch.uint8)
    parts = whole.split(_PART)
    return torch.cat([p for i, p in enumerate(parts) if i % 20]), torch.cat(parts[::20])


def digest() -> str:
    """A hash of the sources, which tells two texts apart."""
    return hashlib.sha256(_read()).hexdigest()[:12]


@functools.cache
def _read() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return b"\n".join((root / file).read_bytes() for file in sorted(files) if not left_out & set(file.parts))
