"""normalize: every spelling ends in one form with the same value; what writes in place stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import journal, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=g, dtype=torch.float64)
    return x, torch.randn(rows, 3, 4, generator=g, dtype=torch.float64)


BATCHES = [batch(5, 0), batch(8, 1)]
Function = Callable[[Tensor, Tensor], Any]
ADD, MUL, SUB, DIV = "add", "mul", "sub", "truediv"
SPELLINGS: dict[str, tuple[str, list[Function]]] = {
    "relu": ("relu", [
        lambda x, t: x.relu(), lambda x, t: F.relu(x), lambda x, t: nn.ReLU()(x),
        lambda x, t: F.relu(x, inplace=False),
    ]),
    "sigmoid": ("sigmoid", [
        lambda x, t: x.sigmoid(), lambda x, t: torch.special.expit(x), lambda x, t: F.sigmoid(x),
    ]),
    "tanh": ("tanh", [lambda x, t: x.tanh(), lambda x, t: F.tanh(x)]),
    "cat": ("cat", [
        lambda x, t: torch.concat((x, x), 1), lambda x, t: torch.concatenate([x, x], axis=1),
        lambda x, t: torch.hstack([x, x]), lambda x, t: torch.cat(tensors=[x, x], dim=1),
    ]),
    "bmm": ("bmm", [
        lambda x, t: t @ t.transpose(1, 2), lambda x, t: t.matmul(t.transpose(1, 2)),
        lambda x, t: torch.matmul(t, other=t.transpose(1, 2)), lambda x, t: t.bmm(t.mT),
    ]),
    "transpose": ("transpose", [
        lambda x, t: t.transpose(-1, -2), lambda x, t: t.permute(0, 2, 1), lambda x, t: t.mT,
        lambda x, t: torch.swapaxes(t, 2, 1), lambda x, t: torch.permute(t, (0, -1, 1)),
        lambda x, t: x.t(), lambda x, t: x.T,
    ]),
    "reshape": ("reshape", [
        lambda x, t: t.view(-1, 12), lambda x, t: t.reshape(t.shape[0], 12),
        lambda x, t: t.view((t.size(0), -1)),
    ]),
    "flatten": ("flatten", [
        lambda x, t: t.flatten(1), lambda x, t: torch.flatten(t, start_dim=1),
        lambda x, t: nn.Flatten()(t), lambda x, t: t.flatten(1, 2), lambda x, t: t.flatten(1, -1),
    ]),
    "unsqueeze": ("unsqueeze", [
        lambda x, t: x.unsqueeze(1), lambda x, t: x[:, None], lambda x, t: x[:, None, :],
        lambda x, t: x.view(-1, 1, 4), lambda x, t: t[..., None], lambda x, t: t[:, ..., None],
        lambda x, t: t[..., None, :], lambda x, t: x[None, ...], lambda x, t: x[:, None, ..., :],
    ]),
    "where": ("where", [
        lambda x, t: x.where(x > 0, 0.0), lambda x, t: t.where(condition=t > 0, other=-t),
    ]),
    "squeeze": ("squeeze", [lambda x, t: t[:, :1].squeeze(1)]),
    "add": (ADD, [lambda x, t: x.add(x), lambda x, t: torch.add(x, 2.0), lambda x, t: x + x]),
    "sub": (SUB, [lambda x, t: x.sub(2.0), lambda x, t: torch.sub(x, x)]),
    "mul": (MUL, [lambda x, t: x.mul(x), lambda x, t: torch.mul(x, 2.0), lambda x, t: x * x]),
    "div": (DIV, [lambda x, t: x.div(2.0), lambda x, t: torch.div(x, 3.0)]),
    "long": ("long", [
        lambda x, t: (x * 9).to(torch.int64), lambda x, t: (x * 9).to(dtype=torch.long),
        lambda x, t: (x * 9).type(torch.int64), lambda x, t: (x * 9).long(),
    ]),
    "dropout": ("dropout", [
        lambda x, t: F.dropout(x, 0.5, False), lambda x, t: torch.dropout(x, 0.5, False),
    ]),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, t: Tensor) -> Any:
        return self.function(x * self.weight, t * self.weight)


def name(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target))


@pytest.mark.parametrize(
    ("spelling", "k"), [(s, k) for s, (_, forms) in SPELLINGS.items() for k in range(len(forms))]
)
def test_every_spelling_ends_in_one(spelling: str, k: int) -> None:
    want, forms = SPELLINGS[spelling]
    fast = same(Model(forms[k]), BATCHES, "normalize", steps=False)
    assert want in [name(n) for n in fast.graph.nodes], [name(n) for n in fast.graph.nodes]


STAYS: dict[str, Function] = {
    "relu_": lambda x, t: (x * 2).relu_(),
    "inplace": lambda x, t: F.relu(x * 2, inplace=True),
    "alpha": lambda x, t: torch.add(x, x, alpha=2),
    "rounding": lambda x, t: torch.div(x, 0.3, rounding_mode="floor"),
    "flatten of all": lambda x, t: t.flatten(0, 1),
    "permute": lambda x, t: t.permute(2, 0, 1),
    "ellipsis and a number": lambda x, t: t[..., None, 0],
    "two none": lambda x, t: x[None, :, None],
    "cast to float": lambda x, t: x.to(torch.float16),
    "view as another dtype": lambda x, t: x.detach().view(torch.int64) * 1,
    "out of a vector": lambda x, t: torch.hstack([x[:, 0], x[:, 1]]),
}


@pytest.mark.parametrize("form", STAYS)
def test_what_has_no_other_form_keeps_its_value(form: str) -> None:
    same(Model(STAYS[form]), BATCHES, "normalize", steps=False)


def test_rows_of_another_width_stay_rows() -> None:
    plain = Model(lambda x, t: t.flatten(1) * 2.0)
    fast = optimized(plain, BATCHES)
    x, t = BATCHES[0]
    for fields in (1, 2, 6):  # three in the example: six are not twice as many rows
        wide = torch.randn(len(t), fields, 4, dtype=t.dtype)
        assert torch.equal(fast(x, wide), plain(x, wide))


def test_one_entry_of_the_journal_for_all_nodes_of_a_spelling() -> None:
    fast = optimized(Model(lambda x, t: x.relu() + (x + 1).relu() * F.relu(x)).double(), BATCHES)
    entries = [e.what for e in journal(fast).fired if e.rule == "normalize"]
    assert "Tensor.relu => relu, 2 nodes" in entries and "relu => relu, 1 node" in entries


def test_identity_goes_and_a_hooked_one_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Identity(), nn.Identity()
            self.two.register_forward_hook(lambda m, i, o: o * 3)
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.two(self.one(x * self.weight))

    fast = same(Two(), BATCHES, steps=False)
    modules = [n.target for n in fast.graph.nodes if n.op == "call_module"]
    assert modules == ["two"]
