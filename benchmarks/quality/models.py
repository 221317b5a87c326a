"""The three small models that are trained: 85,002, 108,305 and 115,681 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def image_model() -> nn.Module:
    """Three linear layers for images of 8 x 8 pixels and ten classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


class RecurrentModel(nn.Module):
    """Embedding, one LSTM layer, linear output: scores of every next symbol."""

    def __init__(self, symbols: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 48)
        self.lstm = nn.LSTM(48, width, batch_first=True)
        self.output = nn.Linear(width, symbols)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        """(samples, time) -> (samples, time, symbols)."""
        return self.output(self.lstm(self.embedding(symbols))[0])


class TransformerModel(nn.Module):
    """Two pre-norm blocks of causal attention: scores of every next symbol."""

    def __init__(self, symbols: int, window: int, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.zeros(window, width))
        self.blocks = nn.Sequential(*(_Block(width, heads=4) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, symbols)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.05)

    def forward(self, symbols: Tensor) -> Tensor:
        """(samples, time) -> (samples, time, symbols)."""
        return self.output(self.norm(self.blocks(self.embedding(symbols) + self.places[: symbols.shape[1]])))


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
