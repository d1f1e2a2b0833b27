"""Means over the rows of the batch on W ranks: those of one process, or told to be others."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import processes, run
from test_pairs_of_all_ranks import Form, Towers, batch, learnt
from torch import Tensor, nn

import recast
from recast.passes import PIPELINE
from recast.passes.synchronise_means import SynchroniseMeans

PASSES = (*PIPELINE, SynchroniseMeans())


def balanced(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The load of experts: how often each is the first choice, and its mean probability."""
    gates = u.softmax(1)
    chosen = F.one_hot(gates.argmax(1), 6).float().mean(0)
    return (gates * v).sum(1) + 6 * (chosen * gates.mean(dim=0)).sum()


def by_hand(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """A batch norm of means alone."""
    middle = u.mean(0, keepdim=True)
    return ((u - middle) / (((u - middle) ** 2).mean(0) + 1.0).sqrt() * v).sum(1)


def of_places(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    x = torch.stack([u, v], 1)  # (B, 2, 6)
    return (x * x.mean((0, 1))).sum((1, 2))


def of_experts(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Each computes the rows that are sent to it, and the load is balanced."""
    out = torch.zeros_like(u)
    for k in range(2):
        rows = torch.where(ids % 2 == k)[0]
        out.index_add_(0, rows, u[rows] * v[rows, k, None])
    return (out * v).sum(1) + v.softmax(1).mean(0).square().sum()


ROWS: dict[str, Form] = {
    "balanced": balanced,
    "experts": of_experts,
    "by hand": by_hand,
    "of places": of_places,
    "a function": lambda u, v, ids: (u - torch.mean(v, 0)).square().sum(1),
    "by name": lambda u, v, ids: (u - v.mean(axis=-2)).square().sum(1),
    "variance": lambda u, v, ids: ((u - u.mean(0)) / (u.std(0) + v.var(dim=0))).sum(1),
    "variance of all": lambda u, v, ids: u.sum(1) * torch.var(v, unbiased=False),
    "deviation kept": lambda u, v, ids: (
        u / torch.std(torch.stack([u, v, v], 1), (0, 2), correction=0, keepdim=True)[0, 0]
    ).sum(1),
    "one number": lambda u, v, ids: (u / v.square().mean()).sum(1),
    "of a function": lambda u, v, ids: u.sum(1) * F.mse_loss(u, v).log1p(),
    "sums": lambda u, v, ids: u.sum(1) * v.sum(0).square().sum(),
    "one sum": lambda u, v, ids: u.sum(1) / (1 + v.square().sum()),
    "covariance": lambda u, v, ids: u.sum(1) * (u.t() @ v).square().sum(),
    "sums by hand": lambda u, v, ids: ((u - u.sum(0) / u.size(0)) * v).sum(1),
    "covariance by hand": lambda u, v, ids: (u @ (u.t() @ v / (2 * u.size(0)))).sum(1),
    "a number by hand": lambda u, v, ids: u.sum(1) / (v.square().sum() / v.size(0)),
    "sums added": lambda u, v, ids: (
        u.sum(1) * ((u.sum(0) + v.sum(0) / 2) / u.size(0)).square().sum()
    ),
    "products of numbers": lambda u, v, ids: u.sum(1) * (u.sum(1) @ v.sum(1)),
    "one sum of products": lambda u, v, ids: u.sum(1) * torch.einsum("bd,bd->", u, v),
    "by their number too": lambda u, v, ids: (
        lambda s: (u * (s / u.size(0))).sum(1) + (v * (s.square() + 1).log()).sum(1)
    )(u.sum(0)),
    "counts": lambda u, v, ids: u.sum(1) / (ids > 2).sum(),
    "counts of others": lambda u, v, ids: u.sum(1) / torch.count_nonzero(ids),
}


def masked(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    counts = (ids > 1).float()
    return ((u * v).sum(1) * counts).sum() / counts.sum().clamp(min=1)


def padded(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Several classes for each row, as in sequences."""
    logits = (u[:, None] * v[:, :3, None]).reshape(-1, 6)
    return F.cross_entropy(
        logits, (ids[:, None] + torch.arange(3) - 2).clamp(-1).reshape(-1), ignore_index=-1
    )


NUMBERS: dict[str, Form] = {
    "masked": masked,
    "padded": padded,
    "chosen": lambda u, v, ids: (u * v).sum(1)[ids > 1].mean(),
    "selected": lambda u, v, ids: torch.masked_select((u * v).sum(1), ids > 1).mean(),
    "losses of chosen": lambda u, v, ids: F.mse_loss(u[ids > 1], v[ids > 1]),
    "classes of chosen": lambda u, v, ids: F.cross_entropy(u[ids > 1], ids[ids > 1]),
    "mean of pairs of rows": lambda u, v, ids: (
        (u * v).sum(1).repeat(2).view(2, -1).t().reshape(-1, 2).sigmoid().mean().log()
    ),
    "left out": lambda u, v, ids: F.cross_entropy(u, torch.where(ids > 1, ids, -100)),
    "weighed": lambda u, v, ids: F.cross_entropy(u, ids, weight=torch.arange(6).to(u) / 50),
    "the log by hand": lambda u, v, ids: ((u * v).square().sum() / u.size(0)).log(),
    "the root of two": lambda u, v, ids: (
        (u.square().sum() + 0.5 * v.square().sum()) / u.size(0)
    ).sqrt(),
    "shares": lambda u, v, ids: ((u * v).sum(1) * (ids / ids.sum())).sum(),
    "products by weights": lambda u, v, ids: (u * v).sum(1) @ ids.to(u) / ids.sum(),
    "a number of rows too": lambda u, v, ids: (lambda n: (u[ids > 1] + torch.ones(n, 6)).sum() / n)(
        (ids > 1).sum()
    ),
    "chosen beside the root of all": lambda u, v, ids: (
        u[ids > 1].mean() + (u * v).square().mean().sqrt()
    ),
    "by each other": lambda u, v, ids: F.mse_loss(u, v) / F.mse_loss(u, v).detach(),
}


def answers(form: Form, split: tuple[int, ...], how: Any) -> tuple[Any, Any]:
    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    assert any(e.rule == "synchronise-means" for e in fast.report.journal.fired)
    copies = [copy.deepcopy(fast) for _ in split]
    parts = [batch(n, seed) for seed, n in enumerate(split)]
    ours = how(len(split), lambda r: learnt(copies[r], parts[r]))
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    wide = [t.double() if t.is_floating_point() else t for t in whole]
    return ours, learnt(Towers(form).double(), wide)


def check(form: Form, split: tuple[int, ...], how: Any) -> None:
    ours, (wanted, grads) = answers(form, split, how)
    found = torch.cat([out for out, _ in ours]).double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for k, grad in enumerate(grads):
        total = torch.stack([theirs[k] for _, theirs in ours]).sum(0).double()
        torch.testing.assert_close(total, grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("split", [(4, 4), (5, 0, 2), (1, 3)])
@pytest.mark.parametrize("form", ROWS)
def test_means_are_of_the_rows_of_all_ranks(form: str, split: tuple[int, ...]) -> None:
    check(ROWS[form], split, run)


@pytest.mark.parametrize("split", [(4, 4), (5, 0, 2), (1, 3)])
@pytest.mark.parametrize("form", NUMBERS)
def test_a_mean_of_some_rows_is_by_those_of_all_ranks(form: str, split: tuple[int, ...]) -> None:
    ours, (wanted, grads) = answers(NUMBERS[form], split, run)
    for out, _ in ours:
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    for k, grad in enumerate(grads):
        mean = torch.stack([theirs[k] for _, theirs in ours]).mean(0).double()
        torch.testing.assert_close(mean, grad, rtol=1e-4, atol=1e-4)


def test_a_softmax_less_its_greatest_mixes_nothing() -> None:
    def form(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return ((u - u.max().detach()).softmax(1) * v / v.square().mean()).sum(1)

    check(form, (1, 3), run)


def test_over_gloo() -> None:
    check(by_hand, (5, 2), processes)


def written(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    kept = torch.zeros(5, 6)
    kept[ids] = v.detach()
    return (u @ kept.t()).sum(1)


NUMBER, PLACES = "value of the number", "value of the places"
LEFT: dict[str, tuple[Form, set[str]]] = {
    "greatest": (lambda u, v, ids: ((u - u.mean(0)) / u.amax(0)).sum(1), {"mean", "amax"}),
    "a variance by place": (lambda u, v, ids: (u * v.var(0, False)).sum(1), {"var"}),
    "sum": (lambda u, v, ids: (u * v).sum(), {"sum"}),
    "sum of rows": (lambda u, v, ids: (u * v).sum(1).sum(0), {"sum"}),
    "statistics": (lambda u, v, ids: u.sum(1) + torch.cov(u.t()).sum(), {"cov"}),
    "numbers": (lambda u, v, ids: (u * v).nanmean(), {"nanmean"}),
    "first": (lambda u, v, ids: (u - v[0]).sum(1), {"getitem"}),
    "order of chosen": (lambda u, v, ids: u.sum(1) + u[ids > 1].cumsum(0).mean(), {"getitem"}),
    "pairs of chosen": (
        lambda u, v, ids: F.poisson_nll_loss(u[ids > 1][:, :1], v[ids > 1].sum(1)), {"getitem"}
    ),
    "pairs with chosen": (
        lambda u, v, ids: (u[ids > 1, :1] - v[:, 0]).square().mean(), {"getitem"}
    ),
    "written by place": (
        lambda u, v, ids: (lambda x: (x.__setitem__(0, 0.5), (x * v).sum(1))[1])(u.clone()),
        {"setitem"},
    ),
    "some written by place": (
        lambda u, v, ids: (lambda x: (x.__setitem__(slice(2), 0.5), (x * v).sum(1))[1])(u.clone()),
        {"setitem"},
    ),
    "filled by place": (
        lambda u, v, ids: (u.index_fill(0, torch.tensor([0]), 0.5) * v).sum(1), {"index_fill"}
    ),
    "counted into": (
        lambda u, v, ids: u.sum(1) + torch.zeros(5).index_add_(0, ids, v.sum(1)).square().sum(),
        {"index_add_"},
    ),
    "written into": (written, {"setitem"}),
    "shift": (lambda u, v, ids: (u * v.roll(1, 0)).sum(1), {"roll"}),
    "order": (lambda u, v, ids: u.sum(1).sort()[0] + v.topk(1, dim=0)[0].sum(), {"sort", "topk"}),
    "softmax": (lambda u, v, ids: u.sum(1).softmax(0) + v.mean(0).sum(), {"softmax", "mean"}),
    "covariance": (lambda u, v, ids: ((u.t() @ v) / u.amax(0)).sum() * u.sum(1), {"sum", "amax"}),
    "number": (lambda u, v, ids: u.sum(1) + (v.mean(0) * v.size(0)).sum(), {"mean", NUMBER}),
    "number alone": (lambda u, v, ids: (u * v).sum(1) * u.size(0), {NUMBER}),
    "filled with their number": (
        lambda u, v, ids: (u * v * torch.full_like(u, u.size(0))).sum(1), {NUMBER}
    ),
    "einsum with dots": (
        lambda u, v, ids: (u * v).mean() + torch.einsum("b...->...", u.sum(1)), {"einsum"}
    ),
    "places": (
        lambda u, v, ids: u.sum(1) + (v * torch.arange(v.size(0))[:, None]).mean(0).sum(),
        {"mean", PLACES},
    ),
    "places as entries": (
        lambda u, v, ids: (
            (u * v).sum(1)
            * (lambda p: torch.zeros(u.size(0), dtype=p.dtype).index_put((p,), p))(
                torch.arange(u.size(0))
            )
        ),
        {PLACES},
    ),
    "rows of a constant": (
        lambda u, v, ids: (u * v).sum(1) * torch.linspace(0, 1, 64)[torch.arange(u.size(0))],
        {PLACES},
    ),
    "places alone": (lambda u, v, ids: (u * v).sum(1) * torch.arange(u.size(0)), {PLACES}),
    "places of a mask": (
        lambda u, v, ids: (u * v).sum(1) * (ids > 1).nonzero().double().mean(), {PLACES}
    ),
    "the first of a mask": (
        lambda u, v, ids: (u * v).sum(1) * u[(ids > 1).nonzero()[0]].mean(), {"getitem", PLACES}
    ),
    "a tensor of their number": (
        lambda u, v, ids: (u * v).sum(1) * u.new_tensor(u.size(0)), {NUMBER}
    ),
    "as many columns": (lambda u, v, ids: u[:, : u.size(0)].sum(1) * v.sum(1), {NUMBER}),
    "normalised": (
        lambda u, v, ids: F.normalize(u, dim=0).sum(1) + v.mean(0).sum(),
        {"normalize", "mean"},
    ),
    "greatest of all": (lambda u, v, ids: u.sum(1) - u.max(), {"max"}),
    "least and greatest": (lambda u, v, ids: (u - u.aminmax(dim=0)[0]).sum(1), {"aminmax"}),
    "distance": (lambda u, v, ids: torch.dist(u, v), {"dist"}),
    "length": (lambda u, v, ids: torch.linalg.norm(u - v), {"linalg_norm"}),
    "sum of products": (lambda u, v, ids: torch.dot(u.flatten(), v.flatten()), {"sum"}),
    "products of sums": (
        lambda u, v, ids: u.sum(1) * torch.einsum("bd,ce->de", u, v).square().sum(), {"einsum"}
    ),
    "neighbours": (lambda u, v, ids: (u[1:] - u[:-1]).square().mean(), {"getitem"}),
    "triangle": (lambda u, v, ids: (u.tril() * v).sum(1), {"tril"}),
    "diagonal": (lambda u, v, ids: (u * v).sum(1) + u.diagonal().mean(), {"diagonal"}),
    "lengths of columns": (lambda u, v, ids: (u.renorm(2, 1, 1.0) * v).sum(1), {"renorm"}),
    "windows": (lambda u, v, ids: u.sum(1) + v.unfold(0, 2, 1).mean(), {"unfold"}),
    "in place": (lambda u, v, ids: (u.clone().cumsum_(0) * v).sum(1), {"cumsum_"}),
    "shifts of chosen": (
        lambda u, v, ids: u.sum(1) * v[ids > 1].mean(1).cumsum(0).mean(), {"getitem"}
    ),
    "rest of chosen": (lambda u, v, ids: (u.sum(1) * v[ids > 1][1:].mean()), {"getitem"}),
    "operator": (lambda u, v, ids: (torch.ops.aten.cumsum.default(u, 0) * v).sum(1), {"cumsum"}),
    "turned": (lambda u, v, ids: (u.rot90(2) * v).sum(1), {"rot90"}),
    "among others": (lambda u, v, ids: (u * v).sum(1) * torch.isin(ids, ids + 1), {"isin"}),
    "slopes": (lambda u, v, ids: torch.gradient((u * v).sum(1))[0], {"gradient"}),
    "waves": (lambda u, v, ids: (torch.fft.fft(u, dim=0).real * v).sum(1), {"fft_fft"}),
    "inverse": (lambda u, v, ids: (torch.linalg.pinv(u).t() * v).sum(1), {"linalg_pinv"}),
    "first of pairs": (
        lambda u, v, ids: (u.repeat_interleave(2, 0)[: u.size(0)] * v).sum(1), {"getitem"}
    ),
    "half of stacked": (
        lambda u, v, ids: (torch.stack([u, v], 1).flatten(0, 1).chunk(2)[1] * v).sum(1), {"chunk"}
    ),
    "every second of blocks": (
        lambda u, v, ids: (torch.cat([u, v])[::2] * v).sum(1), {"getitem"}
    ),
    "blocks side by side": (
        lambda u, v, ids: torch.cat([u, v]).reshape(-1, 12).softmax(1)[:, 0], {"reshape"}
    ),
    "columns in rows": (lambda u, v, ids: (u.t().reshape(-1, 6) * v).sum(1), {"reshape"}),
    "halves by shape": (
        lambda u, v, ids: F.relu(u.view(2, -1, 6)[0] - v.view(2, -1, 6)[1]).mean(), {"reshape"}
    ),
    "order of groups": (
        lambda u, v, ids: u.view(-1, 2, 6).sum(1).cumsum(0).square().mean(), {"reshape"}
    ),
    "halves": (lambda u, v, ids: (lambda a, b: (a - b).square().mean())(*u.chunk(2)), {"chunk"}),
    "several for each": (
        lambda u, v, ids: (u.reshape(-1).softmax(0).view(-1, 6) * v).sum(1), {"softmax"}
    ),
    "more than a sum": (lambda u, v, ids: (u.square().sum() + 3) / u.size(0), {"sum", NUMBER}),
}  # fmt: skip


@pytest.mark.parametrize("form", LEFT)
def test_others_are_of_each_ranks_own_and_told(form: str) -> None:
    made, kinds = LEFT[form]
    fast = recast.optimize(Towers(made), example=batch(8, 0), passes=PASSES)
    missed = [m for m in fast.report.journal.missed if m.rule == "synchronise-means"]
    assert {re.sub("^an? ", "", m.why) for m in missed} == {
        f"{kind} {'of' if kind in (NUMBER, PLACES) else 'over'} the rows of the batch: on several"
        " ranks, of each rank's own"
        for kind in kinds
    }
    assert all(str(m.where).startswith("test_means_of_all_ranks.py:") for m in missed)
    copies, plain = [copy.deepcopy(fast) for _ in range(2)], Towers(made)
    for r, found in enumerate(run(2, lambda r: copies[r](*batch(4, r)).detach())):
        torch.testing.assert_close(found, plain(*batch(4, r)).detach())


def own_writes(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Into rows that a mask chooses, or each into its own."""
    x, rows = v.clone(), torch.where(ids > 2)[0]
    x[ids > 1] = 0.5
    x[..., 0] = u[:, 1]
    x[torch.arange(u.size(0)), ids] = 0.25
    return (x.index_fill(1, torch.tensor([2]), 0.0).index_add(0, rows, u[rows]) * v).sum(1)


@pytest.mark.parametrize(
    "form",
    [
        lambda u, v, ids: (u * v).mean(),
        lambda u, v, ids: (u * v).sum(1).mean(0),
        lambda u, v, ids: (u * v).sum() / u.size(0),
        lambda u, v, ids: (u * v).sum() / (6 * u.size(0)),
        lambda u, v, ids: (0.5 * u.square().sum() - v.square().sum().neg() / 3) / u.size(0),
        lambda u, v, ids: (1 / u.size(0)) * (u * v).sum(),
        lambda u, v, ids: (torch._assert((ids >= 0).all(), "ids"), u.sum(1))[1],
        lambda u, v, ids: F.mse_loss(u, v) * 0.5 + (u * v).mean().neg(),
        lambda u, v, ids: F.cross_entropy(u, v.softmax(1)),
        lambda u, v, ids: F.cross_entropy(u, torch.zeros(u.size(0), dtype=torch.long)),
        lambda u, v, ids: u.softmax(1).mean(1),
        lambda u, v, ids: u[torch.arange(u.size(0)), ids] * v.sum(1),
        lambda u, v, ids: (
            v
            * v.new_zeros(v.size(0), 6).index_put(
                (
                    torch.arange(v.size(0)).repeat_interleave(2),
                    torch.stack([ids, ids + 1], 1).flatten(),
                ),
                u[:, :2].flatten(),
            )
        ),
        lambda u, v, ids: u[ids > 1],
        lambda u, v, ids: (
            (torch.cat([u, v, u]).tanh().view(3, -1, 6)[2] * torch.cat([u, v])[: u.size(0)]).sum(1)
            + torch.stack([u, v], 1).view(-1, 6)[::2].sum(1)
        ),
        lambda u, v, ids: (
            (lambda b, k: torch.zeros_like(u).index_add(0, b, u[b, k][:, None] * v[b]))(
                *torch.where(u > 0)
            )
            + u.new_tensor(0.5)
        ),
        lambda u, v, ids: F.relu(1 - torch.sub(*(u * v).sum(1).view(-1, 2).unbind(1))),
        lambda u, v, ids: (u.sum(1).view(-1, 2).log_softmax(1) * v.view(-1, 12)[:, :2]).sum(1),
        lambda u, v, ids: (
            torch.stack([u, v], 1).tril().diagonal(0, 1, 2).sum(1) + u.renorm(2, 0, 1.0).sum(1)
        ),
        own_writes,
    ],
)
def test_losses_and_what_is_of_each_row_are_nothing_to_tell(form: Form) -> None:
    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    journal = fast.report.journal
    assert not [e for e in (*journal.fired, *journal.missed) if e.rule == "synchronise-means"]


def test_a_length_that_is_the_number_of_rows_is_not_taken_for_it() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1).sum(1)

    examples = [torch.randn(n, n, 3) for n in (8, 5)]
    fast = recast.optimize(Pooled(), example=examples, passes=PASSES)
    assert "mean_of_all" not in fast.report.graph_text
    (missed,) = [m for m in fast.report.journal.missed if m.rule == "synchronise-means"]
    assert missed.why.startswith("a mean, perhaps, over the rows of the batch")


LAYERS: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]] = {
    "attention": (nn.MultiheadAttention(6, 2), lambda m, x: m(x, x, x)[0]),
    "sequence": (nn.LSTM(6, 4), lambda m, x: m(x)[0]),
    "fused sequence": (nn.GRU(6, 4), lambda m, x: m(x)[0]),
    "normalised": (
        nn.Identity(), lambda m, x: F.layer_norm(x.transpose(0, 1), (x.size(0), 6)).transpose(0, 1)
    ),
    "groups": (nn.Identity(), lambda m, x: F.group_norm(x.transpose(0, 1), 1).transpose(0, 1)),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, form: Any, turned: bool) -> None:
        super().__init__()
        self.layer, self.form, self.turned = layer, form, turned

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.layer, x.transpose(0, 1) if self.turned else x)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", LAYERS)
def test_layers_along_the_batch_are_told(form: str, turned: bool) -> None:
    """``turned``: what they take for the samples are those."""
    layer, made = LAYERS[form]
    fast = recast.optimize(Layer(layer, made, turned), example=torch.randn(8, 4, 6), passes=PASSES)
    missed = [m for m in fast.report.journal.missed if m.rule == "synchronise-means"]
    assert bool(missed) != turned
    assert all("over the rows of the batch: on several ranks" in m.why for m in missed)


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - torch.from_numpy(x.numpy().mean(0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad - grad.mean(0)


@torch.library.custom_op("tests_of_means::flipped", mutates_args=())
def flipped(x: Tensor) -> Tensor:
    return x.flip(0)


flipped.register_fake(torch.empty_like)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_forward_hook(lambda layer, given, made: made - made.mean(0))


@pytest.mark.parametrize("layer", [Hooked(), lambda x: Centred.apply(x), flipped])
def test_what_is_kept_whole_may_mix_rows_and_is_told_of(layer: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer if isinstance(layer, nn.Module) else None

        def forward(self, x: Tensor) -> Tensor:
            made = x if self.layer is None else self.layer(x)
            made = layer(made) if self.layer is None else made
            return (made * x / x.square().mean()).sum(1)

    fast = recast.optimize(Model(), example=torch.randn(8, 6), passes=PASSES)
    journal = fast.report.journal
    (missed,) = [m for m in journal.missed if m.rule == "synchronise-means"]
    assert "kept whole, perhaps, over the rows of the batch: on several ranks" in missed.why
    assert [e for e in journal.fired if e.rule == "synchronise-means"], "the mean is of all ranks"


def test_what_forward_sums_over_ranks_itself_is_summed_once() -> None:
    def form(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        total = v.detach().sum(0)
        dist.all_reduce(total)
        return (u * total).sum(1)

    def one(rank: int) -> tuple[Tensor, Tensor, list[str]]:
        plain = Towers(form)
        fast = recast.optimize(copy.deepcopy(plain), example=batch(8, 0), passes=PASSES)
        found, wanted = (m(*batch(4, rank)).detach() for m in (fast, plain))
        return found, wanted, [m.why for m in fast.report.journal.missed]

    for found, wanted, missed in processes(2, one):
        torch.testing.assert_close(found, wanted)
        assert any(why.startswith("an all_reduce over the rows") for why in missed)
