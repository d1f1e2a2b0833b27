"""fuse-compressed-interaction: every way to write a layer of a CIN; each named Miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

FIELDS, HIDDEN, DIM = 3, 4, 5


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shape = (rows, FIELDS, DIM)
    return (torch.randn(*shape, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """Two layers of a network, of which ``products`` writes the products."""

    def __init__(
        self,
        products: Callable[[Tensor, Tensor], Tensor],
        activation: Callable[[Tensor], Tensor] = F.relu,
        **conv: Any,
    ) -> None:
        super().__init__()
        options = {"kernel_size": 1} | conv
        self.products, self.activation = products, activation
        self.scale = nn.Parameter(torch.ones(DIM))
        self.convs = nn.ModuleList(
            nn.Conv1d(FIELDS * n, HIDDEN, **options) for n in (FIELDS, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = x * self.scale
        found = []
        for conv in self.convs:
            hidden = self.activation(conv(self.products(first, hidden)))
            found.append(hidden)
        return torch.cat(found, 1).sum(-1)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    z = x.unsqueeze(2) * y.unsqueeze(1)
    return z.view(z.shape[0], z.shape[1] * z.shape[2], z.shape[3])


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unsqueeze": _outer,
    "unsqueeze, the other way": lambda x, y: (y.unsqueeze(1) * x.unsqueeze(2)).reshape(
        -1, x.shape[1] * y.shape[1], DIM
    ),
    "none index": lambda x, y: (x[:, :, None] * y[:, None]).view(
        x.size(0), x.size(1) * y.size(1), DIM
    ),
    "expanded": lambda x, y: (
        x.unsqueeze(2).expand(-1, -1, y.shape[1], -1) * y.unsqueeze(1).expand(-1, FIELDS, -1, -1)
    ).reshape(x.shape[0], x.shape[1] * y.shape[1], DIM),
    "einsum over a size of 1": lambda x, y: torch.einsum(
        "bhce,bcde->bhde", y.unsqueeze(-2), x.unsqueeze(1)
    ).view(x.shape[0], x.shape[1] * y.shape[1], DIM),
    "einsum": lambda x, y: torch.einsum("bhd,bmd->bhmd", y, x).reshape(
        y.shape[0], x.shape[1] * y.shape[1], DIM
    ),
    "einsum, turned": lambda x, y: torch.einsum("bhd,bmd->bmhd", y, x).reshape(
        y.shape[0], x.shape[1] * y.shape[1], DIM
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_the_products(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast) == {"fuse-compressed-interaction": 2}, journal(fast).missed
    assert all(call.args[4] for call in calls(fast, "compressed_interaction"))
    assert not [n for n in fast.graph.nodes if n.target in (torch.relu, torch.einsum)]


class Mixing(nn.Module):
    """Two layers, of which ``mix(self, k, x, y)`` is each."""

    def __init__(self, mix: Callable[[Any, int, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(5)
        sizes = [(HIDDEN, n, FIELDS) for n in (FIELDS, HIDDEN)]
        self.mix = mix
        self.scale = nn.Parameter(torch.ones(DIM))
        self.cubes = nn.ParameterList(nn.Parameter(torch.randn(*s, generator=g)) for s in sizes)
        self.turned = nn.ParameterList(
            nn.Parameter(torch.randn(s[1], s[2], s[0], generator=g)) for s in sizes
        )
        self.flat = nn.ParameterList(
            nn.Parameter(torch.randn(s[0], s[1] * s[2], generator=g)) for s in sizes
        )
        self.layers = nn.ModuleList(nn.Linear(s[1] * s[2], s[0]) for s in sizes)

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = x * self.scale
        found = []
        for k in range(2):
            hidden = self.mix(self, k, hidden, first)
            found.append(hidden)
        return torch.cat(found, 1).sum(-1)


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bhd,bmd->bhmd", x, y)


MIXTURES: dict[str, Callable[[Any, int, Tensor, Tensor], Tensor]] = {
    "one einsum": lambda m, k, x, y: F.relu(torch.einsum("bhd,bmd,ohm->bod", x, y, m.cubes[k])),
    "one einsum, the weight first": lambda m, k, x, y: F.relu(
        torch.einsum("hmo,bhd,bmd->bod", m.turned[k], x, y)
    ),
    "two einsums": lambda m, k, x, y: F.relu(
        torch.einsum("bhmd,hmo->bod", _pairs(x, y), m.turned[k])
    ),
    "a matrix": lambda m, k, x, y: F.relu(m.flat[k] @ _pairs(x, y).flatten(1, 2)),
    "a layer": lambda m, k, x, y: F.relu(
        m.layers[k](_pairs(x, y).flatten(1, 2).transpose(1, 2)).transpose(1, 2)
    ),
    "a layer, relu within": lambda m, k, x, y: torch.relu(
        m.layers[k]((x.unsqueeze(2) * y.unsqueeze(1)).flatten(1, 2).permute(0, 2, 1))
    ).permute(0, 2, 1),
    "a function": lambda m, k, x, y: F.relu(
        F.linear(_pairs(x, y).flatten(1, 2).mT, m.flat[k], m.layers[k].bias).mT
    ),
}


@pytest.mark.parametrize("form", MIXTURES)
def test_every_way_to_mix_them(form: str) -> None:
    fast = same(Mixing(MIXTURES[form]), BATCHES)
    assert fired(fast) == {"fuse-compressed-interaction": 2}, journal(fast).missed
    assert all(call.args[4] for call in calls(fast, "compressed_interaction"))


OTHERS: dict[str, Callable[[Any, int, Tensor, Tensor], Tensor]] = {
    "summed columns": lambda m, k, x, y: torch.einsum(
        "bhd,bmd,ohm->bo", x, y, m.cubes[k]
    ).unsqueeze(2).expand(-1, -1, DIM),
    "columns of two": lambda m, k, x, y: torch.einsum(
        "bhd,bme,ohm->bod", x, y, m.cubes[k]
    ),
    "a mean over the batch": lambda m, k, x, y: F.relu(
        m.flat[k] @ _pairs(x.mean(0, keepdim=True), y).flatten(1, 2)
    ),
    "a mean over the dimension": lambda m, k, x, y: F.relu(
        m.flat[k] @ _pairs(x, y.mean(2, keepdim=True)).flatten(1, 2)
    ),
    "no layer of columns": lambda m, k, x, y: _pairs(x, y).sum(2) @ torch.ones(DIM, DIM).to(x),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_what_mixes_otherwise_is_left_alone(form: str) -> None:
    fast = same(Mixing(OTHERS[form]), BATCHES, steps=False)
    assert not calls(fast, "compressed_interaction")


def test_without_bias_and_with_another_activation() -> None:
    fast = same(Model(_outer, torch.sigmoid, bias=False), BATCHES)
    found = calls(fast, "compressed_interaction")
    assert [(call.args[3], call.args[4]) for call in found] == [(None, False)] * 2
    assert sum(n.target is torch.sigmoid for n in fast.graph.nodes) == 2


def test_a_value_before_the_relu_that_is_used_stays() -> None:
    fast = same(Model(_outer, lambda x: x + F.relu(x)), BATCHES)
    assert not any(call.args[4] for call in calls(fast, "compressed_interaction"))


def _hooked() -> Model:
    model = Model(_outer)
    for conv in model.convs:
        conv.register_forward_hook(lambda m, args, out: None)
    return model


MISSES: dict[str, tuple[Callable[[], Model], str]] = {
    "a wider kernel": (lambda: Model(_outer, kernel_size=3, padding=1), "kernel size 3"),
    "groups": (lambda: Model(_outer, groups=1, dilation=2), "convolution has"),
    "hooks": (_hooked, "it has hooks"),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    build, why = MISSES[form]
    fast = same(build(), BATCHES, steps=False)
    assert not calls(fast, "compressed_interaction")
    found = misses(fast, "fuse-compressed-interaction")
    assert any(why in text for text in found), journal(fast).missed


def test_columns_mixed_with_features_are_left_alone() -> None:
    def products(x: Tensor, y: Tensor) -> Tensor:
        z = (x.unsqueeze(2) * y.unsqueeze(1)).transpose(2, 3)
        return z.reshape(-1, x.shape[1] * y.shape[1], DIM)

    fast = same(Model(products), BATCHES, steps=False)
    assert not calls(fast, "compressed_interaction")
