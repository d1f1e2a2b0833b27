"""open-transformers: encoders and single layers, masks, norms first or last, each named Miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn

WIDTH, LENGTH = 8, 5


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, LENGTH, WIDTH, generator=g, dtype=torch.float64),)


BATCHES = [batch(4, 0), batch(7, 1)]


class Net(nn.Module):
    """An encoder of two layers, or a layer alone, behind a Linear."""

    def __init__(self, form: str, **options: Any) -> None:
        super().__init__()
        settings = {"dim_feedforward": 12, "dropout": 0.1, "batch_first": True} | options
        layer = nn.TransformerEncoderLayer(WIDTH, 2, **settings)
        norm = nn.LayerNorm(WIDTH) if "norm" in form else None
        alone = form == "layer"
        self.encoder = (
            layer if alone else nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        )
        self.first = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if "padding" in self.form:
            padding = (x[:, :, 0] > 0.5) & (torch.arange(LENGTH) > 0)
            return self.encoder(x, src_key_padding_mask=padding)[:, -1]
        if "causal" in self.form:
            mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype).triu(1)
            return self.encoder(x, mask)
        return self.encoder(x)


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("encoder", {}),
    "one layer, gelu": ("layer", {"activation": "gelu"}),
    "norms first, one at the end": ("norm", {"norm_first": True}),
    "sequence first, no bias": ("encoder", {"batch_first": False, "bias": False}),
    "padding": ("padding", {"activation": nn.LeakyReLU()}),
    "causal mask, a module": ("causal", {"activation": nn.ReLU()}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_layer_is_opened_and_its_chain_fused(form: str) -> None:
    kind, options = FORMS[form]
    torch.manual_seed(2)
    fast = same(Net(kind, **options), BATCHES, steps=form == "padding")
    assert fired(fast)["open-transformers"] == 1
    assert len(calls(fast, "mlp")) >= (1 if kind == "layer" else 2)
    assert not any(str(n.target) == "encoder" for n in fast.graph.nodes)


class Own(nn.TransformerEncoderLayer):
    """A layer with a block of its own."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return 2 * super()._ff_block(x)


def _own() -> Net:
    net = Net("layer")
    net.encoder = Own(WIDTH, 2, 12, batch_first=True)
    return net


REFUSED = {
    "own function": (lambda: Net("layer", activation=torch.tanh), "function of yours"),
    "own block": (_own, "overrides a block"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    make, why = REFUSED[form]
    torch.manual_seed(3)
    fast = same(make(), BATCHES, steps=False)
    assert any(why in text for text in misses(fast, "open-transformers"))
    assert not fired(fast)["open-transformers"]
