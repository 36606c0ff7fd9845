"""Real models in PyTorch, of a few lines each, with random weights and random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Step = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]
"""A model, and a function of it (or of its wrapper) that returns the loss of this rank's batch."""


class Language(nn.Module):
    """A transformer: causal, its head tied to the embedding (GPT-2), or a classifier (BERT)."""

    def __init__(self, causal: bool, words: int = 8192, width: int = 384, layers: int = 4):
        super().__init__()
        self.causal = causal
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(128, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=causal
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, words if causal else 2, bias=not causal)
        if causal:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next words or of the two classes.

        Their shape is (batch, length, words) if the model is causal, else (batch, 2).
        """
        length = x.shape[1]
        y = self.words(x) + self.places(torch.arange(length, device=x.device))
        square = nn.Transformer.generate_square_subsequent_mask
        mask = square(length, device=x.device) if self.causal else None
        y = self.blocks(y, mask, is_causal=self.causal)
        return self.head(y if self.causal else y[:, 0])


class Recurrent(nn.Module):
    """An LSTM language model whose head is tied to the embedding."""

    def __init__(self, words: int = 8192, width: int = 512):
        super().__init__()
        self.words, self.lstm = (
            nn.Embedding(words, width),
            nn.LSTM(width, width, 2, batch_first=True),
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next words, of shape (batch, length, words)."""
        return self.head(self.lstm(self.words(x))[0])


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride),
            nn.ReLU(),
            *convolution(outputs, outputs, 3, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential(*() if same else convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feature maps, smaller by the stride."""
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
    """Return the layers of a convolution with batch normalisation."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Experts(nn.Module):
    """A mixture of experts: each sample goes to one of them, and some get none in a step."""

    def __init__(self, width: int = 256, experts: int = 8, hidden: int = 2048):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return each sample's expert output, weighted; in each call 3 experts get no samples."""
        closed = [(self.steps + k) % len(self.experts) for k in range(3)]
        self.steps += 1
        scores = self.gate(x)
        scores[:, closed] = -torch.inf
        weight, chosen = scores.softmax(1).max(1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


def _words(length: int, count: int) -> torch.Tensor:
    return torch.randint(8192, (count, length + 1))


def gpt2() -> Step:
    """Return a causal language model (10.3 M parameters), and a function of it: a batch's loss."""
    x = _words(64, 4)
    return Language(True), lambda model: _next_word(model, x)


def bert() -> Step:
    """Return a text classifier (10.3 M parameters), and a function of it: a batch's loss."""
    x, labels = _words(64, 4), torch.randint(2, (4,))
    return Language(False), lambda model: nn.functional.cross_entropy(model(x), labels)


def resnet18() -> Step:
    """Return a picture classifier (11.2 M parameters), and a function of it: a batch's loss."""
    widths = [64, 64, 128, 128, 256, 256, 512, 512]
    strides = [1, 1, 2, 1, 2, 1, 2, 1]
    layers = [Residual(a, b, s) for a, b, s in zip([64, *widths], widths, strides)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    model = nn.Sequential(*convolution(3, 64, 3, 1), nn.ReLU(), *layers, *head)
    x, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    return model, lambda model: nn.functional.cross_entropy(model(x), labels)


def lstm() -> Step:
    """Return an LSTM language model (8.4 M parameters), and a function of it: a batch's loss."""
    x = _words(32, 4)
    return Recurrent(), lambda model: _next_word(model, x)


def moe() -> Step:
    """Return a mixture of experts (8.4 M parameters), and a function of it: a batch's loss."""
    x, target = torch.randn(64, 256), torch.randn(64, 256)
    return Experts(), lambda model: nn.functional.mse_loss(model(x), target)


def _next_word(model: Any, x: torch.Tensor) -> torch.Tensor:
    scores = model(x[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten())


MODELS: dict[str, Callable[[], Step]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet18": resnet18,
    "lstm": lstm,
    "moe": moe,
}
"""Models by name; random numbers come from PyTorch's generator."""
