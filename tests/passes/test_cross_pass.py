"""fuse-cross: every way to write a cross network; each named Miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

D, RANK, LAYERS, EXPERTS = 6, 3, 2, 3


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, D, generator=g, dtype=torch.float64),)


BATCHES = [batch(7, 0), batch(9, 1)]

Network = Callable[["Cross", Tensor], Tensor]


class Cross(nn.Module):
    """``forward(x) = network(self, scaled x)``, with all parameters that a network may want."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)

        def many(*shape: int) -> nn.ParameterList:
            each = (torch.randn(shape, generator=g) / D for _ in range(LAYERS))
            return nn.ParameterList(nn.Parameter(t) for t in each)

        self.network = network
        self.scale = nn.Parameter(torch.ones(D))
        self.vector, self.bias, self.matrix = many(D), many(D), many(D, D)
        self.column, self.column_bias = many(D, 1), many(D, 1)
        self.experts_v, self.experts_u = many(EXPERTS, D, RANK), many(EXPERTS, D, RANK)
        self.experts_c = many(EXPERTS, RANK, RANK)
        self.kernels = nn.Parameter(torch.randn(LAYERS, D, D, generator=g) / D)
        torch.manual_seed(4)
        self.to_one = nn.ModuleList(nn.Linear(D, 1, bias=False) for _ in range(LAYERS))
        self.to_one_biased = nn.ModuleList(nn.Linear(D, 1) for _ in range(LAYERS))
        self.full = nn.ModuleList(nn.Linear(D, D) for _ in range(LAYERS))
        self.gate = nn.ModuleList(nn.Linear(D, D) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(D, RANK, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(RANK, D) for _ in range(LAYERS))
        self.gating = nn.ModuleList(nn.Linear(D, 1, bias=False) for _ in range(EXPERTS))
        self.gates = nn.Linear(D, EXPERTS)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(self, x * self.scale)


def layered(layer: Callable[[Cross, int, Tensor, Tensor], Tensor]) -> Network:
    """``x = layer(m, l, x0, x)`` for every layer."""

    def network(m: Cross, x: Tensor) -> Tensor:
        x0 = x
        for k in range(LAYERS):
            x = layer(m, k, x0, x)
        return x

    return network


def columns(layer: Callable[[Cross, int, Tensor, Tensor], Tensor]) -> Network:
    """The same on (B, d, 1)."""
    return lambda m, x: layered(layer)(m, x.unsqueeze(2)).squeeze(2)


def _transposed(m: Cross, k: int, x0: Tensor, x: Tensor) -> Tensor:
    s = torch.tensordot(x, m.vector[k], dims=([1], [0]))
    return (x0.transpose(0, 1) * s).transpose(0, 1) + m.bias[k] + x


VECTORS: dict[str, Network] = {
    "linear": layered(lambda m, k, x0, x: x0 * m.to_one[k](x) + m.bias[k] + x),
    "linear, other order": layered(lambda m, k, x0, x: x + (m.to_one[k](x) * x0 + m.bias[k])),
    "linear with bias": layered(lambda m, k, x0, x: x0 * m.to_one_biased[k](x) + x),
    "matmul": layered(lambda m, k, x0, x: x0 * (x @ m.column[k]) + m.bias[k] + x),
    "matmul of a vector": layered(
        lambda m, k, x0, x: x0 * torch.matmul(x, m.vector[k]).unsqueeze(1) + m.bias[k] + x
    ),
    "sum": layered(lambda m, k, x0, x: x0 * (x * m.vector[k]).sum(1, keepdim=True) + x),
    "einsum": layered(
        lambda m, k, x0, x: x0 * torch.einsum("bd,d->b", x, m.vector[k]).view(-1, 1) + x
    ),
    "transposed": layered(_transposed),
    "columns": columns(
        lambda m, k, x0, x: (
            x0 @ torch.tensordot(x, m.column[k], dims=([1], [0])) + m.column_bias[k] + x
        )
    ),
    "a matrix a sample": layered(
        lambda m, k, x0, x: (x0.unsqueeze(2) @ x.unsqueeze(1)) @ m.vector[k] + m.bias[k] + x
    ),
    "a matrix a sample, written out": layered(
        lambda m, k, x0, x: x + torch.matmul(x.unsqueeze(1) * x0.unsqueeze(-1), m.vector[k])
    ),
    "a matrix a sample, of columns": columns(
        lambda m, k, x0, x: torch.bmm(x0, x.transpose(1, 2)) @ m.column[k] + m.column_bias[k] + x
    ),
}
MATRICES: dict[str, Network] = {
    "linear": layered(lambda m, k, x0, x: x0 * m.full[k](x) + x),
    "bias outside": layered(lambda m, k, x0, x: x0 * m.up[k](m.down[k](x)) + m.bias[k] + x),
    "bias inside": layered(lambda m, k, x0, x: x0 * (x @ m.matrix[k] + m.bias[k]) + x),
    "low rank": layered(lambda m, k, x0, x: x + x0 * m.up[k](m.down[k](x))),
    "addcmul": layered(lambda m, k, x0, x: torch.addcmul(x, x0, m.full[k](x))),
    "columns": columns(lambda m, k, x0, x: x0 * (m.kernels[k] @ x + m.column_bias[k]) + x),
    "low rank columns": columns(
        lambda m, k, x0, x: (
            x0 * (m.up[k].weight @ torch.matmul(m.down[k].weight, x) + m.column_bias[k]) + x
        )
    ),
    "gated": layered(lambda m, k, x0, x: x0 * m.full[k](x) * torch.sigmoid(m.gate[k](x)) + x),
    "gated einsum": layered(
        lambda m, k, x0, x: (
            x0
            * (torch.einsum("bi,ij->bj", x, m.matrix[k]) + m.bias[k])
            * torch.sigmoid(torch.einsum("bi,ij->bj", x, m.kernels[k]))
            + x
        )
    ),
    "mixed ranks": lambda m, x: layered(
        lambda m, k, x0, x: x0 * (m.up[k](m.down[k](x)) if k else m.full[k](x)) + x
    )(m, x),
}


@pytest.mark.parametrize("form", VECTORS)
def test_networks_of_vectors(form: str) -> None:
    fast = same(Cross(VECTORS[form]), BATCHES, steps=False)
    assert fired(fast) == {"fuse-cross": 1}, journal(fast).missed
    (call,) = calls(fast, "cross_vector")
    assert call.args[0] is call.args[1] and len(call.args[2]) == LAYERS


@pytest.mark.parametrize("form", MATRICES)
def test_networks_of_matrices(form: str) -> None:
    fast = same(Cross(MATRICES[form]), BATCHES, steps=form == "linear")
    assert fired(fast) == {"fuse-cross": 1}, journal(fast).missed
    (call,) = calls(fast, "cross_matrix")
    assert call.args[0] is call.args[1] and len(call.args[6]) == LAYERS
    assert (call.args[4] != [None] * 2 * LAYERS) == ("gated" in form)
    assert (2 in call.args[6]) == (form in ("bias outside", "mixed ranks") or "low" in form)


def _loop(m: Cross, x: Tensor) -> Tensor:
    x0 = xl = x.unsqueeze(2)
    for k in range(LAYERS):
        outputs, scores = [], []
        for e in range(EXPERTS):
            scores.append(m.gating[e](xl.squeeze(2)))
            h = torch.tanh(torch.matmul(m.experts_v[k][e].t(), xl))
            h = nn.Tanh()(m.experts_c[k][e] @ h)
            outputs.append((x0 * (m.experts_u[k][e] @ h + m.column_bias[k])).squeeze(2))
        mixed = torch.matmul(torch.stack(outputs, 2), torch.stack(scores, 1).softmax(1))
        xl = mixed + xl
    return xl.squeeze(2)


def _einsums(m: Cross, k: int, x0: Tensor, x: Tensor) -> Tensor:
    h = torch.relu(torch.einsum("edr,bd->ber", m.experts_v[k], x))
    h = torch.relu(torch.einsum("eij,bej->bei", m.experts_c[k], h))
    each = m.drop(torch.einsum("edr,ber->bed", m.experts_u[k], h))
    mixed = torch.sum(each * torch.softmax(m.gates(x), dim=1).unsqueeze(2), dim=1)
    return x0 * mixed + m.bias[k] + x


def _one_expert(m: Cross, k: int, x0: Tensor, x: Tensor) -> Tensor:
    return x0 * m.up[k](torch.relu(m.down[k](x))) + x


def _rows(along: int) -> Network:
    """Experts in rows, stacked along 1 or 2, times the gates, summed."""

    def layer(m: Cross, k: int, x0: Tensor, x: Tensor) -> Tensor:
        outputs = []
        for e in range(EXPERTS):
            h = torch.tanh(x @ m.experts_v[k][e])
            h = torch.tanh(h @ m.experts_c[k][e].t())
            outputs.append(x0 * (h @ m.experts_u[k][e].t() + m.bias[k]))
        gate = torch.softmax(m.gates(x), -1).unsqueeze(3 - along)
        return x + (torch.stack(outputs, along) * gate).sum(along)

    return layered(layer)


def _all_einsums(m: Cross, k: int, x0: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(torch.einsum("bd,edr->ber", x, m.experts_v[k]))
    each = x0.unsqueeze(1) * (torch.einsum("ber,edr->bed", h, m.experts_u[k]) + m.bias[k])
    return torch.einsum("be,bed->bd", torch.softmax(m.gates(x), 1), each) + x


MIXTURES = {
    "loop": _loop, "einsums": layered(_einsums), "one expert": layered(_one_expert),
    "rows": _rows(1), "rows side by side": _rows(2), "all by einsums": layered(_all_einsums),
}  # fmt: skip


@pytest.mark.parametrize("form", MIXTURES)
def test_mixtures(form: str) -> None:
    fast = same(Cross(MIXTURES[form]), BATCHES)
    assert fired(fast) == {"fuse-cross-mixture": LAYERS}, journal(fast).missed
    assert len(calls(fast, "cross_mixture")) == LAYERS
    assert not {"bmm", "softmax", "einsum", "relu", "tanh"} & {n.name for n in fast.graph.nodes}


@pytest.mark.parametrize("form", MIXTURES)
def test_a_mixture_of_bfloat16_under_autocast_has_the_dtype_of_its_products(form: str) -> None:
    model = Cross(lambda m, x: MIXTURES[form](m, m.full[0](x))).float()
    batches = [tuple(t.float() for t in given) for given in BATCHES]
    fast = optimized(model, batches)
    with torch.autocast("cpu", torch.bfloat16):  # in which a Linear gives bfloat16
        expected, got = model(*batches[0]), fast(*batches[0])
    assert len(calls(fast, "cross_mixture")) == LAYERS
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "network",
    [
        VECTORS["sum"], VECTORS["linear with bias"],
        *(MATRICES[k] for k in ("linear", "bias inside", "columns", "low rank columns")),
        MATRICES["gated"], MATRICES["gated einsum"],
    ],
)  # fmt: skip
def test_a_network_of_bfloat16_under_autocast_has_the_dtype_of_its_sums(network: Network) -> None:
    model = Cross(lambda m, x: network(m, m.full[0](x))).float()
    batches = [tuple(t.float() for t in given) for given in BATCHES]
    fast = optimized(model, batches)
    with torch.autocast("cpu", torch.bfloat16):  # in which a Linear gives bfloat16
        expected, got = model(*batches[0]), fast(*batches[0])
    assert calls(fast, "cross_vector") or calls(fast, "cross_matrix")
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_dropout_of_a_mixture_is_read_at_each_call() -> None:
    fast = same(Cross(layered(_einsums)), BATCHES, steps=False)
    call = calls(fast, "cross_mixture")[0]
    assert [arg.target for arg in call.args[10:]] == ["drop.p", "drop.training"]


def test_gates_of_the_features_are_no_gates_of_the_experts() -> None:
    def network(m: Cross, x: Tensor) -> Tensor:
        each = [torch.tanh(x @ m.kernels[0]) @ m.matrix[0] for _ in range(D)]  # as many as features
        gate = torch.softmax(m.full[0](x), 1).unsqueeze(1)
        return x * (torch.stack(each, 1) * gate).sum(1) + x

    assert not calls(same(Cross(network), BATCHES, steps=False), "cross_mixture")


def test_a_matrix_a_sample_times_a_matrix_is_no_layer() -> None:
    def network(m: Cross, x: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(2), x.unsqueeze(1)) @ m.matrix[0] + x.unsqueeze(2)

    assert not calls(same(Cross(network), BATCHES, steps=False), "cross_vector")


def test_a_layer_used_elsewhere_cuts_the_network() -> None:
    def network(m: Cross, x: Tensor) -> Tensor:
        first = x * m.full[0](x) + x
        second = x * m.full[1](first) + first
        return torch.cat([first, x * m.gate[1](second) + second], 1)

    fast = same(Cross(network), BATCHES, steps=False)
    found = calls(fast, "cross_matrix")
    assert [len(call.args[6]) for call in found] == [1, 2]
    assert found[1].args[0] is not found[1].args[1] is found[0]


def test_layers_of_two_kinds_are_two_networks() -> None:
    def network(m: Cross, x: Tensor) -> Tensor:
        first = x * m.to_one[0](x) + x
        return x * m.full[1](first) + first

    fast = same(Cross(network), BATCHES, steps=False)
    assert len(calls(fast, "cross_vector")) == len(calls(fast, "cross_matrix")) == 1


def test_a_column_that_goes_on() -> None:
    network = columns(lambda m, k, x0, x: x0 * (m.kernels[k] @ x) + x)
    fast = same(Cross(lambda m, x: network(m, x).unsqueeze(2) * 2), BATCHES, steps=False)
    assert len(calls(fast, "cross_matrix")) == 1


def _hooked(m: Cross, x: Tensor) -> Tensor:
    return x * m.full[0](x) + x


MISSES: dict[str, tuple[Network, str]] = {
    "another residual": (
        lambda m, x: x * m.full[0](torch.relu(x)) + x, "is added back",
    ),
    "a product used twice": (
        lambda m, x: (lambda p: torch.cat([x * p + x, p], 1))(m.full[0](x)), "",
    ),
    "no residual": (lambda m, x: x * m.full[0](x), ""),
    "wider": (lambda m, x: x * m.full[0](x) + x.unsqueeze(1), ""),
    "first features of the batch": (lambda m, x: x.mean(0, keepdim=True) * m.full[0](x) + x, ""),
    "the same, by addcmul": (
        lambda m, x: torch.addcmul(x, x.mean(0, keepdim=True), m.full[0](x)), "",
    ),
    "the same, of vectors": (lambda m, x: x[:1] * m.to_one[0](x) + x, ""),
    "the same, of an expert": (lambda m, x: _one_expert(m, 0, x[:1], x), ""),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_what_is_no_cross_network(form: str) -> None:
    network, why = MISSES[form]
    fast = same(Cross(network), BATCHES, steps=False)
    assert not {"cross_matrix", "cross_vector", "cross_mixture"} & {
        n.name for n in fast.graph.nodes
    }
    assert not why or any(why in text for text in misses(fast, "fuse-cross")), journal(fast).missed


def test_hooks_are_named() -> None:
    model = Cross(_hooked)
    model.full[0].register_forward_hook(lambda m, args, out: None)
    fast = same(model, BATCHES, steps=False)
    assert not calls(fast, "cross_matrix")
    assert any("hooks" in text for text in misses(fast, "fuse-cross")), journal(fast).missed


def test_an_inner_value_that_escapes() -> None:
    def network(m: Cross, x: Tensor) -> Any:
        crossed = x * m.full[0](x)
        return torch.cat([crossed + m.bias[0] + x, crossed], 1)

    fast = same(Cross(network), BATCHES, steps=False)
    assert not calls(fast, "cross_matrix")
