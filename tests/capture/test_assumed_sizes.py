"""Batches whose histories, fields or widths are not as long as in the example: what a rewrite made
of these sizes is never silent, and what does not depend on them runs on the graph.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.rewriter import assumed_sizes

Sizes = tuple[int, ...]
Form = Callable[..., Tensor]


class Net(nn.Module):
    """A form, and the layers that forms use."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.padded, self.table = nn.Embedding(10, 4, padding_idx=0), nn.Embedding(10, 4)
        self.gate, self.alpha = nn.Linear(4, 1), nn.Parameter(torch.randn(4, 1))
        self.norm = nn.BatchNorm1d(4)
        self.joint, self.wide = nn.Linear(64, 5), nn.Linear(72, 5)

    def forward(self, *args: Tensor) -> Tensor:
        return self.form(self, *args)


def _dice(m: Net, x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    p = torch.sigmoid(m.norm(x))
    return (m.alpha * (1 - p) * x + p * x).transpose(1, 2)


def _layer_norm(m: Net, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


def _pairs(m: Net, x: Tensor) -> Tensor:
    return torch.stack([x[:, 0] * x[:, -1], x[:, 1] * x[:, -1], x[:, 0] * x[:, -2]], 1)


def _mask(ids: Tensor) -> Tensor:
    return (ids != 0).unsqueeze(-1)


# a form, the sizes of its inputs in the example, and those of another batch
FREE: dict[str, tuple[Form, Sequence[Sizes], Sequence[Sizes]]] = {
    "mean": (lambda m, i: m.padded(i).mean(1), [(6, 10)], [(6, 4)]),
    "mean of a part": (lambda m, i: m.padded(i[:, 1:]).mean(1), [(6, 10)], [(5, 12)]),
    "masked": (lambda m, i: (m.table(i) * _mask(i)).mean(1), [(6, 10)], [(6, 14)]),
    "filled": (lambda m, i: m.table(i).masked_fill(~_mask(i), 0.0).mean(1), [(6, 5)], [(6, 2)]),
    "sum": (lambda m, i: (m.table(i) * _mask(i)).sum(1), [(6, 10)], [(6, 1)]),
    "of fields": (lambda m, i: m.padded(i).mean(2).sum(1), [(6, 3, 10)], [(6, 3, 4)]),
    "a layer": (lambda m, x: torch.relu(m.gate(x)), [(6, 5, 4)], [(6, 9, 4)]),
}
ASSUMED: dict[str, tuple[Form, Sequence[Sizes], Sequence[Sizes]]] = {
    "fields": (lambda m, i: m.table(i).mean(2).sum(1), [(6, 3, 10)], [(6, 6, 10)]),
    "no rows": (lambda m, i: m.table(i).mean(1), [(6, 10)], [(6, 0)]),
    "dice": (_dice, [(6, 5, 4)], [(4, 10, 4)]),
    "dice, summed": (lambda m, x: _dice(m, x).sum(1), [(6, 5, 4)], [(4, 3, 4)]),
    "from the end": (_pairs, [(6, 5, 4)], [(6, 7, 4)]),
    "columns": (lambda m, x: x[:, [-1, -2, 0]] + 0, [(6, 4)], [(6, 7)]),
    "one vector": (lambda m, a, b, c: torch.cat([a * b, a * c, b * c], 1),
                   [(6, 1, 8)] * 3, [(6, 2, 8)] * 3),
    "a query a row": (lambda m, q, k: m.joint(torch.cat([q.expand_as(k), k, q - k, q * k], -1)),
                      [(6, 1, 16), (6, 8, 16)], [(6, 8, 16)] * 2),
    "shared rows": (lambda m, u, k: m.wide(torch.cat([u.expand(-1, k.size(1), -1), k], -1)),
                    [(6, 1, 64), (6, 4, 8)], [(6, 4, 64), (6, 4, 8)]),
    "causal": (lambda m, x, y: F.scaled_dot_product_attention(x, y, y, is_causal=True),
               [(6, 5, 8), (6, 1, 8)], [(6, 5, 8)] * 2),
    "scaled": (lambda m, x: F.scaled_dot_product_attention(x, x, x), [(6, 5, 8)], [(6, 5, 4)]),
    "attention": (lambda m, x: (torch.softmax(m.gate(x), 1) * x).sum(1), [(6, 5, 4)], [(6, 8, 4)]),
    "layer norm": (_layer_norm, [(6, 8)], [(6, 4)]),
    "one weight": (lambda m, x, w: (x * w.unsqueeze(-1)).sum(1), [(6, 5, 4), (6, 5)],
                   [(6, 5, 4), (6, 1)]),
    "contraction": (lambda m, a, b: (a.unsqueeze(2) * b).sum(-1), [(6, 9, 16), (6, 1, 9, 16)],
                    [(6, 9, 16), (6, 9, 9, 16)]),
    "fm": (lambda m, a, b, c: (a + b + c) ** 2 - (a**2 + b**2 + c**2), [(6, 8)] * 3,
           [(6, 8), (6, 1), (6, 8)]),
}  # fmt: skip


def batch(m: Net, name: str, sizes: Sequence[Sizes]) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    ids = {"mean", "mean of a part", "masked", "filled", "sum", "of fields", "fields", "no rows"}
    if name in ids:
        return tuple(torch.randint(0, 10, size, generator=g) for size in sizes)
    return tuple(torch.randn(size, generator=g, dtype=torch.float64) for size in sizes)


def _results(m: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    """The result, and the gradients of parameters and inputs."""
    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    out = m(*leaves)
    given = [*m.parameters(), *(a for a in leaves if a.requires_grad)]
    if not out.requires_grad:
        return [out]
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    grads = torch.autograd.grad(out, given, up, allow_unused=True)
    dense = [g.to_dense() if g.layout != torch.strided else g + 0 for g in grads if g is not None]
    return [out.detach(), *dense]


@pytest.mark.parametrize("name", [*FREE, *ASSUMED])
@pytest.mark.parametrize("training", [False, True])
def test_other_sizes_are_right_and_never_silent(name: str, training: bool) -> None:
    form, sizes, others = FREE.get(name) or ASSUMED[name]
    plain = Net(form).double().train(training)
    fast = recast.optimize(copy.deepcopy(plain), example=batch(plain, name, sizes), strict=True)
    fast.train(training)
    assert fast.report.to_dict()["captured"] == "whole"
    for size in (sizes, others, sizes):
        args = batch(plain, name, size)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", recast.RecastWarning)
            ours = _results(fast, args)
        torch.testing.assert_close(ours, _results(plain, args), equal_nan=True)
        said = [str(w.message) for w in told if issubclass(w.category, recast.RecastWarning)]
        assert bool(said) is (size is others and name in ASSUMED), said
        assert all("in the example" in text for text in said)


@pytest.mark.parametrize("name", ["mean", "dice", "attention", "contraction"])
def test_on_a_gpu_nothing_is_computed_to_find_them(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An index out of its table, in a history that is too long, would end all work there."""
    form, sizes, others = FREE.get(name) or ASSUMED[name]
    plain = Net(form).double()
    monkeypatch.setattr(assumed_sizes, "_on_gpu", lambda inputs: True)
    monkeypatch.setattr(assumed_sizes, "restored_tensors", None)  # is not called
    fast = recast.optimize(copy.deepcopy(plain), example=batch(plain, name, sizes), strict=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", recast.RecastWarning)
        ours = _results(fast, batch(plain, name, others))
    torch.testing.assert_close(ours, _results(plain, batch(plain, name, others)))
    assert bool(told) is (name in ASSUMED)
    assert not capfd.readouterr().err


def test_a_graph_that_takes_no_batch_as_small_as_those_that_are_tried() -> None:
    """It reads the hundredth row: what it assumes is found on the example all the same."""

    def form(m: Net, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + x[99, 0, 0]

    plain = Net(form).double()
    x = torch.randn(1000, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fast = recast.optimize(copy.deepcopy(plain), example=x, strict=True)
    narrower = x[:200, :, :4]
    with pytest.warns(recast.RecastWarning, match="in the example"):
        torch.testing.assert_close(fast(narrower), plain(narrower))


def test_two_examples_cover_any_length() -> None:
    plain = Net(ASSUMED["attention"][0]).double()
    one, two = (batch(plain, "attention", [(rows, length, 4)]) for rows, length in ((6, 5), (4, 7)))
    fast = recast.optimize(copy.deepcopy(plain), example=[one, two], strict=True)
    args = batch(plain, "attention", [(9, 11, 4)])
    torch.testing.assert_close(_results(fast, args), _results(plain, args))


def test_histories_and_candidates_that_are_as_many_by_chance() -> None:
    """Either may have another number; the scaled sum of one takes as many as there are."""

    def form(m: Net, history: Tensor, mask: Tensor, candidates: Tensor) -> Tensor:
        user = (m.table(history) * mask.unsqueeze(-1)).sum(1)
        weights = torch.softmax(m.gate(m.table(candidates)), 1)
        return user + (weights * m.table(candidates)).sum(1)

    def of(history: int, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(7)
        ids = [torch.randint(0, 10, (6, n), generator=g) for n in (history, candidates)]
        return ids[0], torch.rand(6, history, generator=g, dtype=torch.float64), ids[1]

    plain = Net(form).double()
    fast = recast.optimize(copy.deepcopy(plain), example=of(5, 5), strict=True)
    for sizes, warns in (((5, 5), False), ((8, 5), False), ((5, 8), True), ((3, 5), False)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", recast.RecastWarning)
            ours = _results(fast, of(*sizes))
        torch.testing.assert_close(ours, _results(plain, of(*sizes)))
        assert bool(told) is warns, sizes


KINDS: dict[str, tuple[Form, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "a mask as index": (
        lambda m, x: m.alpha[x], (torch.tensor([0, 1, 1, 0, 3]),),
        (torch.tensor([True, False, True, True]),),
    ),
    "fractions of ids": (
        lambda m, i: (m.table(i.long()) * _mask(i)).sum(1), (torch.ones(6, 3, dtype=torch.int64),),
        (torch.full((6, 3), 0.3),),
    ),
    "an added mask": (
        lambda m, x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        (torch.rand(6, 3, 4), torch.ones(6, 3, 3, dtype=torch.bool)),
        (torch.rand(6, 3, 4), torch.rand(6, 3, 3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_of_input_runs_the_plain_forward(name: str) -> None:
    form, example, other = KINDS[name]
    plain = Net(form)
    fast = recast.optimize(copy.deepcopy(plain), example=example)
    torch.testing.assert_close(fast(*example), plain(*example))
    with pytest.warns(recast.RecastWarning, match="in the example"):
        ours = fast(*other)
    torch.testing.assert_close(ours, plain(*other))


class Squared(nn.Module):
    """A loss, which torch warns of where its two inputs differ in a size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        return F.mse_loss(self.table(ids).sum(1), label)


def test_nothing_is_told_of_sizes_that_only_the_trial_has() -> None:
    ids, label = torch.randint(10, (8, 3)), torch.randn(8, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fast = recast.optimize(Squared(), example=(ids, label))
        fast(ids[:, :2], label)
    assert not told, [str(w.message) for w in told]
