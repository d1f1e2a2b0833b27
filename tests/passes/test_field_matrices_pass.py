"""fuse-field-matrices: a matrix for each pair of fields, in loops and einsums; what is none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, optimized, same
from torch import Tensor, nn

FIELDS, DIM = 5, 3
PAIRS = list(combinations(range(FIELDS), 2))
LI, LJ = [i for i, _ in PAIRS], [j for _, j in PAIRS]


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, FIELDS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(4, 0), batch(7, 1)]


class Model(nn.Module):
    """``forward(x) = machine(self, x * scale)``, with all parameters that it may want."""

    def __init__(self, machine: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.machine = machine
        self.scale = nn.Parameter(torch.ones(DIM))
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM)) for _ in PAIRS)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in PAIRS)
        self.biased = nn.ModuleList(nn.Linear(DIM, DIM) for _ in PAIRS)
        self.stacked = nn.Parameter(torch.randn(len(PAIRS), DIM, DIM))
        self.square = nn.Parameter(torch.randn(FIELDS, FIELDS, DIM, DIM))
        self.turned = nn.Parameter(torch.randn(FIELDS, DIM, FIELDS, DIM))
        self.register_buffer("li", torch.tensor(LI))
        self.register_buffer("lj", torch.tensor(LJ))
        self.register_buffer("mask", torch.ones(FIELDS, FIELDS).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.machine(self, x * self.scale)


def _loop(weigh: Callable[[Any, Tensor, int, int, int], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """``r + (weigh(v_i) * v_j).sum(1) + ..``."""

    def machine(m: Any, x: Tensor) -> Tensor:
        out = x[:, 0, 0]
        for k, (i, j) in enumerate(PAIRS):
            out = out + (weigh(m, x[:, i], k, i, j) * x[:, j]).sum(1)
        return out

    return machine


def _vectors(m: Any, x: Tensor) -> Tensor:
    """Of separate vectors, as one lookup a field gives them, the sums in a list."""
    v = [x[:, k] * (k + 1) for k in range(FIELDS)]
    found = [
        torch.sum(torch.mm(v[i], m.listed[k]) * v[j], dim=1, keepdim=True)
        for k, (i, j) in enumerate(PAIRS)
    ]
    return torch.cat(found, 1).sum(1)


FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a list of parameters": _loop(lambda m, v, k, i, j: v @ m.listed[k]),
    "one parameter": _loop(lambda m, v, k, i, j: torch.matmul(v, m.stacked[k])),
    "one of four dimensions": _loop(lambda m, v, k, i, j: v @ m.square[i, j]),
    "one of four, step by step": _loop(lambda m, v, k, i, j: v @ m.square[i][j]),
    "layers": _loop(lambda m, v, k, i, j: m.layers[k](v)),
    "separate vectors": _vectors,
    "the other side": lambda m, x: sum(
        (x[:, i] * (x[:, j] @ m.stacked[-1 - k])).sum(-1, keepdim=True)
        for k, (i, j) in enumerate(PAIRS)
    ),
    "einsum of pairs": lambda m, x: torch.einsum("bpd,pde,bpe->b", x[:, LI], m.stacked, x[:, LJ]),
    "einsum of pairs, the weight first": lambda m, x: torch.einsum(
        "ped,bpd,bpe->b", m.stacked, x[:, LI], x[:, LJ]
    ),
    "einsum, then a sum": lambda m, x: torch.einsum(
        "bpd,pde,bpe->bp", x[:, m.li], m.stacked, x[:, m.lj]
    ).sum(1),
    "einsum, then products": lambda m, x: (
        torch.einsum("bpd,pde->bpe", x[:, LI], m.stacked) * x[:, LJ]
    ).sum((1, 2)),
    "matmul, then products": lambda m, x: (
        torch.matmul(x[:, m.li].unsqueeze(2), m.stacked).squeeze(2) * x[:, m.lj]
    ).sum(-1).sum(1, keepdim=True),
    "einsum of all": lambda m, x: torch.einsum("bid,ijde,bje->b", x, m.square, x),
    "einsum of all, masked": lambda m, x: (
        torch.einsum("bid,idje,bje->bij", x, m.turned, x) * m.mask
    ).sum((1, 2)),
    "einsum of all, turned": lambda m, x: (
        m.mask * torch.einsum("bid,ijde,bje->bji", x, m.square, x)
    ).sum(dim=(-1, -2)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_it(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["fuse-field-matrices"] == 1, journal(fast).missed
    assert not calls(fast, "pair_products")
    assert not [n for n in fast.graph.nodes if n.target is torch.einsum]


def test_indices_that_are_read_at_each_call_may_change() -> None:
    model = Model(FORMS["einsum, then a sum"])
    fast = same(model, BATCHES, steps=False)
    for held in (model, fast):
        held.load_state_dict(
            {**held.state_dict(), "li": torch.tensor(LJ), "lj": torch.zeros_like(model.li)}
        )
    torch.testing.assert_close(fast(*BATCHES[0]), model(*BATCHES[0]))


@pytest.mark.parametrize("form", ["one parameter", "einsum of pairs", "einsum of all, masked"])
def test_an_infinite_vector_is_seen_in_its_sample_alone(form: str) -> None:
    model = Model(FORMS[form]).double()
    fast = optimized(model, BATCHES)
    x = BATCHES[1][0].clone()
    x[2, 3, 1] = float("inf")
    expected, got = model(x), fast(x)
    seen = got.isfinite().view(len(x), -1).all(1)
    assert seen.tolist() == [k != 2 for k in range(len(x))]
    torch.testing.assert_close(got[seen], expected[seen])


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "with biases": _loop(lambda m, v, k, i, j: m.biased[k](v)),
    "one layer for all": _loop(lambda m, v, k, i, j: m.layers[0](v)),
    "not summed": lambda m, x: torch.cat(
        [(x[:, i] @ m.stacked[k]) * x[:, j] for k, (i, j) in enumerate(PAIRS)], 1
    ),
    "sums of their own": lambda m, x: torch.einsum(
        "bpd,pde,bpe->bp", x[:, LI], m.stacked, x[:, LJ]
    ),
    "two tensors": lambda m, x: torch.einsum("bid,ijde,bje->b", x, m.square, x.flip(1)),
    "few of many": lambda m, x: torch.einsum(
        "bpd,pde,bpe->b", x[:, [0, 1, 2]], m.stacked[:3], x[:, [1, 2, 3]]
    ),
    "a vector in no pair, which may be infinite": lambda m, x: torch.einsum(
        "bpd,pde,bpe->b", x[:, [*LI[4:], 4]], m.stacked[3:], x[:, [*LJ[4:], 1]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_such_machine(form: str) -> None:
    fast = same(Model(OTHERS[form]), BATCHES, steps=False)
    assert not fired(fast)["fuse-field-matrices"], journal(fast).fired


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_the_result_has_the_dtype_of_the_plain_one(form: str, narrow: bool) -> None:
    machine, batches = FORMS[form], [(x.float(),) for (x,) in BATCHES]
    # A product before it makes its vectors narrow, too.
    model = Model(lambda m, x: machine(m, x @ m.listed[0] if narrow else x))
    fast = optimized(model, batches)
    assert fired(fast)["fuse-field-matrices"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(*batches[0]), fast(*batches[0])
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.5)
