"""Looked-up rows that are read side by side are one tensor on the way, where nobody can tell."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast

ROWS, FIELDS, DIM = 11, 5, 4
Form = Callable[..., Tensor]  # (rows of the tables, rows of narrow tables, dense) -> what is read


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(ROWS, (rows, FIELDS), generator=g), torch.randn(rows, 3, generator=g)


class Model(nn.Module):
    """Tables of two widths, ``form`` of their rows, and a layer."""

    def __init__(self, form: Form, keep: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form, self.keep = form, keep
        self.wide = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS))
        self.narrow = nn.ModuleList(nn.Embedding(ROWS, 1) for _ in range(FIELDS))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        columns = ids.split(1, 1) if self.keep else ids.unbind(1)
        wide = [t(c) for t, c in zip(self.wide, columns, strict=True)]
        narrow = [t(c) for t, c in zip(self.narrow, columns, strict=True)]
        out = self.form(wide, narrow, dense)
        shape = out.shape[1:]
        return torch.tanh(out * torch.arange(1, shape.numel() + 1).view(shape) / 7)


def agree(model: Any, stacks: int, batches: Any = None) -> Any:
    """Compare outputs and gradients with the plain model's; ``stacks``: how many its code has."""
    batches = batches or [batch(6, 0), batch(1, 1), batch(0, 2)]
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=batches[0], strict=True)
    assert len(set(re.findall(r"embedding_bags_stack\w*", fast.code))) == stacks
    for one in batches:
        want, got = plain(*one), fast(*one)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        up = torch.randn(want.shape, generator=torch.Generator().manual_seed(5))
        for m, out in ((plain, want), (fast, got)):
            m.zero_grad()
            out.backward(up)
        for (name, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad + 0.0, p.grad.to_dense(), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(fast(*one), want, rtol=1e-6, atol=1e-6)
    return fast


def _fm(wide: list[Tensor]) -> Tensor:
    x = torch.stack(wide, 1)
    return 0.5 * (x.sum(1) ** 2 - (x**2).sum(1)).sum(1, keepdim=True)


def _twice(rows: list[Tensor]) -> Tensor:
    return torch.cat(rows[:3], 1).flatten(1).sum(1, True) * torch.cat(rows, 1).flatten(1)


def _dots(wide: list[Tensor]) -> Tensor:
    x = torch.stack(wide, 1)
    li, lj = torch.tril_indices(FIELDS, FIELDS, -1)
    return torch.bmm(x, x.transpose(1, 2))[:, li, lj]


def _pairs(x: Tensor) -> Tensor:
    li, lj = torch.triu_indices(FIELDS, FIELDS, 1)
    return torch.cat([x[:, i] * x[:, j] for i, j in zip(li.tolist(), lj.tolist(), strict=True)], 1)


FORMS: dict[str, tuple[int, Form]] = {
    "cat": (1, lambda w, n, d: torch.cat(w, 1)),
    "cat of a tuple": (1, lambda w, n, d: torch.cat(tuple(w), 1)),
    "cat, last dimension": (1, lambda w, n, d: torch.cat(w, dim=-1)),
    "cat beside others": (1, lambda w, n, d: torch.cat([d, *w, d * 2], 1)),
    "cat in another order": (1, lambda w, n, d: torch.cat(w[::-1], 1)),
    "stack": (1, lambda w, n, d: torch.stack(w, 1)),
    "stack with others": (1, lambda w, n, d: torch.stack([w[0].tanh(), *w[1:]], -2)),
    "stack and cat": (1, lambda w, n, d: torch.stack(w, 1).sum(1) * torch.cat(w, 1)[:, :DIM]),
    "two widths": (2, lambda w, n, d: torch.cat(w, 1) * torch.cat(n, 1).sum(1, keepdim=True)),
    "two widths in one": (2, lambda w, n, d: torch.cat([*n, *w], 1)),
    "towers": (2, lambda w, n, d: torch.cat(w[:2], 1).sum(1, True) * torch.cat(w[2:], 1)),
    "a machine and layers": (1, lambda w, n, d: torch.cat([_fm(w), *w], 1)),
    "made rows": (1, lambda w, n, d: torch.cat([v.unsqueeze(1) for v in w], 1)),
    "made rows, in one": (1, lambda w, n, d: torch.cat([v.unsqueeze(1) for v in w], dim=2)),
    "made rows, in two": (2, lambda w, n, d: _twice([v.unsqueeze(1) for v in w])),
    "products": (1, lambda w, n, d: _dots(w)),
    "products in another order": (1, lambda w, n, d: _dots(w[::-1])),
    "products and layers": (1, lambda w, n, d: torch.cat([_dots(w), *w], 1)),
    "products of pairs": (1, lambda w, n, d: _pairs(torch.stack(w, 1)) + torch.cat(w, 1)[:, :1]),
    "products of pairs of rows": (1, lambda w, n, d: _pairs(torch.cat([v[:, None] for v in w], 1))),
    "one read elsewhere": (1, lambda w, n, d: torch.cat(w[1:], 1) * w[0].sum(1, True)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_rows_side_by_side_are_one_tensor(form: str) -> None:
    stacks, read = FORMS[form]
    agree(Model(read), stacks)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_rows_of_one_column_each(dim: int) -> None:
    agree(Model(lambda w, n, d: torch.cat(w, dim), keep=True), 1)


def test_a_stack_of_rows_of_one_column_each() -> None:
    agree(Model(lambda w, n, d: torch.stack(w, dim=1).squeeze(2).flatten(1), keep=True), 1)


def _written(wide: list[Tensor]) -> Tensor:
    out = torch.cat(wide, 1)
    return out.mul_(2.0)


def _row_written(wide: list[Tensor]) -> Tensor:
    wide[0].mul_(2.0)
    return torch.cat(wide, 1)


APART: dict[str, Form] = {
    "written to": lambda w, n, d: _written(w),
    "a row written to": lambda w, n, d: _row_written(w),
    "among others": lambda w, n, d: torch.cat([w[0], d, w[1], d, w[2]], 1),
    "in two orders": lambda w, n, d: torch.cat(w, 1) * torch.cat(w[::-1], 1),
    "twice in one": lambda w, n, d: torch.cat([*w, *w], 1),
    "along samples": lambda w, n, d: torch.cat(w, 0).view(len(d), -1),
    "stacked first": lambda w, n, d: torch.stack(w, 0).sum(0),
    "stacked last": lambda w, n, d: torch.stack(w, 2).flatten(1),
    "read one by one": lambda w, n, d: w[0] * w[1] + w[2] * w[3].relu(),
}


@pytest.mark.parametrize("form", APART)
def test_others_stay_apart(form: str) -> None:
    batches = [batch(6, 0), batch(3, 1)]
    agree(Model(APART[form]), 0, batches)


class Returned(Model):
    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return self.form([t(c) for t, c in zip(self.wide, ids.unbind(1), strict=True)])


@pytest.mark.parametrize("view", [False, True])
def test_what_is_returned_is_a_tensor_of_its_own(view: bool) -> None:
    form = (lambda w: torch.stack(w, 1).flatten(1)) if view else (lambda w: torch.cat(w, 1))
    agree(Returned(form), 0)


class Bags(nn.Module):
    """Bags under weights, of fixed length, by offsets, and of one id, some frozen or in bf16."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        kinds = ("sum", "mean", "sum", "sum")
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode=kind) for kind in kinds)
        self.one = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.bags[1].weight.requires_grad_(False)
        self.one.to(dtype)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        offsets = torch.arange(len(ids)) * 2
        rows = [self.bags[0](ids, per_sample_weights=torch.cat([dense, dense[:, :2]], 1).sigmoid())]
        rows += [self.bags[1](ids[:, :3]), self.bags[2](ids[:, :2].reshape(-1), offsets)]
        rows += [self.bags[3](ids[:, 4:]), self.one(ids[:, 0])]
        return torch.tanh(torch.cat(rows, 1).sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookups_of_every_kind(dtype: torch.dtype) -> None:
    agree(Bags(dtype), 1, [batch(6, 0), batch(1, 1)])


def test_double_backward() -> None:
    model = Model(FORMS["two widths"][1])
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=batch(6, 0))
    found = []
    for m in (plain, fast):
        weights = list(m.parameters())
        first = torch.autograd.grad(m(*batch(6, 0)).square().sum(), weights, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(3).sum() for g in first), weights)
        found.append([*first, *second])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got + 0.0, want, rtol=1e-4, atol=1e-6)


def test_batches_that_do_not_fit_raise_as_in_the_model() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.relu(torch.cat([self.a(a), self.b(b)], 1))

    ids = torch.arange(6)
    model = Apart()
    fast = recast.optimize(model, example=(ids, ids))
    assert "bags_stack" in fast.code
    for one in (model, fast):
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            one(ids, ids[:4])
    torch.testing.assert_close(fast(ids, ids.flip(0)), model(ids, ids.flip(0)))


def test_wrong_ids_are_named() -> None:
    fast = recast.optimize(Model(FORMS["cat"][1]), example=batch(6, 0))
    ids, dense = batch(600, 3)
    ids[400, 2], ids[7, 3] = ROWS, -1
    with pytest.raises(recast.IdError, match=f"id {ROWS} of lookup 2"):
        fast(ids, dense)


def test_compilers_get_plain_calls() -> None:
    fast = recast.optimize(Model(FORMS["stack and cat"][1]).eval(), example=batch(6, 0))
    with torch.no_grad():
        exported = torch.export.export(fast, batch(6, 0))
        torch.testing.assert_close(exported.module()(*batch(6, 0)), fast(*batch(6, 0)))
        compiled = torch.compile(fast, backend="aot_eager")
        torch.testing.assert_close(compiled(*batch(6, 1)), fast(*batch(6, 1)))
