"""Sizes behind layers and random draws are asked without calling these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guarded import Net, both, check, ids
from torch import Tensor, nn

from recast.rewriter.capture.layer_shapes import stand_in_for

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "GRU": (nn.GRU(4, 6, batch_first=True), (5, 3, 4)),
    "GRU, steps first": (nn.GRU(4, 6, num_layers=2), (5, 3, 4)),
    "GRU of one sequence": (nn.GRU(4, 6), (5, 4)),
    "RNN both ways": (nn.RNN(4, 6, bidirectional=True), (5, 3, 4)),
    "LSTM": (nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), (5, 3, 4)),
    "LSTM, projected": (nn.LSTM(4, 6, proj_size=2), (5, 3, 4)),
    "Conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (5, 4, 9)),
    "Conv1d of one": (nn.Conv1d(4, 6, 3), (4, 9)),
    "Conv1d, same": (nn.Conv1d(4, 6, 4, padding="same", dilation=3), (5, 4, 9)),
    "Conv1d, valid": (nn.Conv1d(4, 6, 4, padding="valid"), (5, 4, 9)),
    "Conv1d, circular": (nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"), (5, 4, 9)),
    "Conv2d": (nn.Conv2d(4, 6, (3, 1), stride=(1, 2), padding=(0, 2)), (5, 4, 9, 8)),
    "Conv3d": (nn.Conv3d(4, 6, 2), (5, 4, 3, 2, 4)),
    "Linear": (nn.Linear(4, 6), (5, 3, 4)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8), (5, 3, 4)),
}


def shapes(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else tuple(map(shapes, value))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_what_stands_for_a_layer(name: str) -> None:
    layer, shape = LAYERS[name]
    given, known = torch.randn(shape), stand_in_for(layer)
    assert known is not None
    function, numbers = known
    assert shapes(function(given, *numbers)) == shapes(layer(given))


def test_nothing_stands_for_a_layer_with_a_hook() -> None:
    layer = nn.GRU(4, 6)
    layer.register_forward_hook(lambda *_: None)
    assert stand_in_for(layer) is None


class Behind(Net):
    """Compares the shape of what a draw and ``way`` gave, and branches on it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.drop = nn.Dropout(0.2)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True, dropout=0.2)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.filter = nn.Parameter(torch.randn(1, 2, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        given = self.table(x)
        h = WAYS[self.way](self, self.drop(input=given))
        assert h.shape == given.shape
        if h.shape[0] == 1:
            return h.sum(1) * 0
        return self.a(h + given).sum(1)


def fourier(m: Behind, h: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(h, dim=1, norm="ortho") * torch.view_as_complex(m.filter)
    return torch.fft.irfft(spectrum, n=h.shape[1], dim=1, norm="ortho")


WAYS: dict[str, Callable[[Behind, Tensor], Tensor]] = {
    "gru": lambda m, h: m.gru(h)[0],
    "gru with a state": lambda m, h: m.gru(h, torch.zeros(1, h.shape[0], 4))[0],
    "lstm that drops": lambda m, h: m.lstm(h)[0],
    "a state": lambda m, h: h + m.gru(h)[1][0].unsqueeze(1),
    "conv": lambda m, h: m.conv(h.mT).mT,
    "F.conv1d": lambda m, h: F.conv1d(h.mT, m.conv.weight, m.conv.bias, padding=1).mT,
    "fft": fourier,
    "encoder": lambda m, h: m.layer(h),
    "sdpa": lambda m, h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.2),
    "randn_like": lambda m, h: h + torch.randn_like(h),
    "rand": lambda m, h: h + torch.rand(h.shape[0], 1, 4),
    "randn": lambda m, h: h + torch.randn(h.shape),
    "randint": lambda m, h: h + torch.randint(0, 5, (h.shape[0], 1, 4)),
    "normal_": lambda m, h: h + torch.empty_like(h).normal_(),
    "bernoulli": lambda m, h: torch.bernoulli(h.sigmoid()),
    "gumbel": lambda m, h: F.gumbel_softmax(h),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_shape_behind_a_draw(way: str) -> None:
    plain, fast, it = both(Behind(way), ids(8))
    assert it.kind == "whole", it.why
    for case in it.traced.values():
        assert case.asks is not None
        assert not [n for n in case.asks.nodes if n.op == "call_module"]
    for training in (True, False):
        plain.train(training), fast.train(training)
        for rows in (8, 5):
            check(plain, fast, ids(rows))
    check(plain, fast, ids(1), warns="goes another way")
