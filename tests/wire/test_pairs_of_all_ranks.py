"""What pairs the rows of the batch, on W ranks: as in one process with the global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import processes, run
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.passes import PIPELINE
from recast.passes.synchronise_means import SynchroniseMeans
from recast.passes.synchronise_pairs import SynchronisePairs

PAIRS = (*PIPELINE, SynchronisePairs())
PASSES = (*PAIRS, SynchroniseMeans())
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def arange(x: Tensor) -> Tensor:
    return torch.arange(x.size(0), device=x.device)


def symmetric(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    logits, own = u @ v.t() / 0.7, arange(u)
    rows = F.cross_entropy(logits, own, reduction="none")
    return rows + F.cross_entropy(logits.t(), own, reduction="none")


def without_hits(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Other rows with the same item are no negatives."""
    hits = (ids[:, None] == ids[None, :]) & ~torch.eye(u.size(0), dtype=torch.bool)
    logits = (u @ v.t()).masked_fill(hits, -1e9)
    return F.cross_entropy(logits, arange(u), reduction="none")


def hits_in_place(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    logits = u @ v.t()
    logits.masked_fill_(ids[:, None] == ids[None], -1e4)
    logits.mul_(0.5)
    return torch.logsumexp(logits, 1)


def diagonal_in_place(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    logits = u @ v.t()
    logits.fill_diagonal_(-1e4)
    return torch.logsumexp(logits, 1)


def triangular(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Each row beside those before it."""
    place = arange(u)
    seen = place[:, None] >= place[None, :]
    return (u @ v.t()).masked_fill(~seen, float("-inf")).logsumexp(1)


def weighed(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    logits = u @ v.t() - torch.log1p(ids.float())
    return logits.log_softmax(1).diag()


def hinge(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    pairs = torch.matmul(u, v.t())
    own = pairs.diagonal()
    return F.relu(0.2 + pairs - own.unsqueeze(1)).sum(1) + F.relu(pairs - own[None]).mean(1)


def last_of_sequences(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Rows found by their place are each sample's own."""
    states = torch.stack([u, v, u + v], 1)
    u = states[arange(u), ids % 3]
    return F.cross_entropy(u @ v.t(), arange(u), reduction="none")


def greatest_first(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """What compares places is after what reads them."""
    logits, own = u @ v.T, arange(u)
    found = logits.argmax(1)
    loss = F.cross_entropy(logits, own, reduction="none")
    return loss + (found == own).float()


def supervised(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Several positives: pairs beside a sum over all of them."""
    others = 1 - torch.eye(u.size(0))
    alike = (ids[:, None] == ids[None]).float() * others
    logits = u @ v.T
    logits = logits - logits.max(1, keepdim=True)[0].detach()
    rows = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return (alike * rows).sum(1) / alike.sum(1).clamp(min=1)


ROWS: dict[str, Form] = {
    "cross entropy": lambda u, v, ids: F.cross_entropy(u @ v.T, arange(u), reduction="none"),
    "a module": lambda u, v, ids: nn.CrossEntropyLoss(reduction="none")(u @ v.T, arange(u)),
    "einsum": lambda u, v, ids: F.cross_entropy(
        torch.einsum("nd,md->nm", u, v), torch.arange(0, u.size(0)), reduction="none"
    ),
    "places cast": lambda u, v, ids: F.cross_entropy(
        u @ v.T, arange(u).int().to(u.device).long(), reduction="none"
    ),
    "nll_loss": lambda u, v, ids: F.nll_loss(
        (u @ v.T).log_softmax(-1), arange(u), reduction="none"
    ),
    "classes of probabilities": lambda u, v, ids: F.cross_entropy(
        u @ v.T, (ids[:, None] == ids[None]).float().softmax(1), reduction="none"
    ),
    "symmetric": symmetric,
    "without hits": without_hits,
    "hits in place": hits_in_place,
    "the diagonal in place": diagonal_in_place,
    "triangular": triangular,
    "weighed by items": weighed,
    "hinge": hinge,
    "last of sequences": last_of_sequences,
    "indexed": lambda u, v, ids: (u @ v.T).log_softmax(1)[arange(u), arange(u)],
    "gathered": lambda u, v, ids: (u @ v.T).log_softmax(1).gather(1, arange(u)[:, None])[:, 0],
    "cosines": lambda u, v, ids: F.cosine_similarity(u[:, None], v[None], dim=-1).exp().sum(1),
    "products by hand": lambda u, v, ids: (u[:, None] * v[None]).sum(-1).logsumexp(1),
    "inner": lambda u, v, ids: F.cross_entropy(
        torch.inner(u, v), torch.arange(0, u.size(0), 1), reduction="none"
    ),
    "distances": lambda u, v, ids: torch.cdist(u, v + 3).neg().logsumexp(1),
    "attention": lambda u, v, ids: (torch.softmax(u @ v.T, -1) @ v).sum(1),
    "over the other rows": lambda u, v, ids: (u @ v.T).logsumexp(0),
    "greatest": lambda u, v, ids: (u @ v.T).max(1)[0] + (u @ v.T).amax(1),
    "greatest first": greatest_first,
    "several positives": supervised,
    "of length 1": lambda u, v, ids: (F.normalize(u) @ F.normalize(v, dim=-1).T).logsumexp(1),
    "of one input": lambda u, v, ids: (v @ v.T).logsumexp(1),
    "of itself": lambda u, v, ids: ((u @ u.T) * (1 - torch.eye(u.size(0)))).logsumexp(1),
    "with ones": lambda u, v, ids: (u @ v.T + torch.ones(u.size(0), u.size(0))).logsumexp(1),
    "many vectors": lambda u, v, ids: torch.einsum(
        "iad,jbd->iajb", u.view(-1, 2, 3), v.view(-1, 2, 3)
    ).amax(3).sum(1).logsumexp(1),
}  # fmt: skip

SCALARS: dict[str, Form] = {
    "mean": lambda u, v, ids: F.cross_entropy(u @ v.T, arange(u)),
    "both means": lambda u, v, ids: (
        F.cross_entropy(u @ v.T, arange(u)) + F.cross_entropy(v @ u.T, arange(u))
    ) / 2,
    "binary": lambda u, v, ids: F.binary_cross_entropy_with_logits(u @ v.T, torch.eye(u.size(0))),
    "of a softmax less its greatest": lambda u, v, ids: F.cross_entropy(
        (u - u.max()).softmax(1) @ v.T, arange(u)
    ),
    "mean of all": lambda u, v, ids: F.softplus(u @ v.T).mean(),
    "divergence": lambda u, v, ids: F.kl_div(
        (u @ v.T).log_softmax(1), (v @ u.T).softmax(1), reduction="batchmean"
    ),
    "the log of a mean": lambda u, v, ids: torch.cdist(u, v).neg().exp().mean().log(),
    "the root of a sum": lambda u, v, ids: (u @ v.T).exp().sum().sqrt(),
    "of a loss": lambda u, v, ids: F.mse_loss(u @ v.T, torch.eye(u.size(0))) ** 2,
    "greatest of personalised ranking": lambda u, v, ids: -torch.log(
        (lambda s: (s.softmax(1) * (s.diag()[:, None] - s).sigmoid()).mean())(u @ v.T)
    ),
    "squares": lambda u, v, ids: F.mse_loss(u @ v.T, (ids[:, None] == ids[None]).to(u.dtype)),
    "a sum and its number": lambda u, v, ids: (
        F.cross_entropy(u @ v.T, arange(u), reduction="sum") / u.size(0)
        + (u @ v.T).logsumexp(1).sum() / u.shape[0]
    ),
    "weighed": lambda u, v, ids: 0.5 * F.softplus(u @ v.T).mean() - (u @ v.T).sigmoid().mean() / 3,
    "accuracy": lambda u, v, ids: (
        F.cross_entropy(u @ v.T, arange(u))
        + ((u @ v.T).argmax(1) == arange(u)).float().mean()
    ),
}  # fmt: skip


class Towers(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Linear(6, 6), nn.Linear(6, 6)
        self.form = form

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        return self.form(self.user(x), self.item(y), ids)


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, 6, generator=g) for _ in range(2))
    return x, y, torch.randint(5, (rows,), generator=g)


def learnt(model: nn.Module, given: Any) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of its sum, in which row k counts k + 1 times."""
    out = model(*given)
    weight = given[0][:, 0].exp() if out.dim() else torch.ones(())
    (out * weight).sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def answers(form: Form, split: tuple[int, ...], how: Any) -> tuple[Any, Any]:
    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    assert fast.report.captured == "whole"
    assert any(e.rule == "synchronise-pairs" for e in fast.report.journal.fired)
    assert not [m for m in fast.report.journal.missed if m.rule == "synchronise-pairs"]
    copies = [copy.deepcopy(fast) for _ in split]
    parts = [batch(n, seed) for seed, n in enumerate(split)]
    ours = how(len(split), lambda r: learnt(copies[r], parts[r]))
    whole = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ours, learnt(Towers(form).double(), tuple(
        t.double() if t.is_floating_point() else t for t in whole
    ))  # fmt: skip


@pytest.mark.parametrize("split", [(4, 4), (5, 0, 2), (1, 3)])
@pytest.mark.parametrize("form", ROWS)
def test_rows_are_paired_with_those_of_all_ranks(form: str, split: tuple[int, ...]) -> None:
    ours, (wanted, grads) = answers(ROWS[form], split, run)
    torch.testing.assert_close(
        torch.cat([out for out, _ in ours]).double(), wanted, rtol=1e-5, atol=1e-5
    )
    for k, grad in enumerate(grads):
        found = torch.stack([theirs[k] for _, theirs in ours]).sum(0)
        torch.testing.assert_close(found.double(), grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", SCALARS)
def test_the_mean_of_the_losses_is_that_of_one_process(form: str) -> None:
    ours, (wanted, grads) = answers(SCALARS[form], (4, 4, 4), run)
    torch.testing.assert_close(
        torch.stack([out for out, _ in ours]).mean().double(), wanted.double(), rtol=1e-5, atol=1e-6
    )
    for k, grad in enumerate(grads):
        found = torch.stack([theirs[k] for _, theirs in ours]).mean(0)
        torch.testing.assert_close(found.double(), grad, rtol=1e-4, atol=1e-5)


def test_over_gloo() -> None:
    ours, (wanted, grads) = answers(ROWS["symmetric"], (5, 2), processes)
    torch.testing.assert_close(
        torch.cat([out for out, _ in ours]).double(), wanted, rtol=1e-5, atol=1e-5
    )
    for k, grad in enumerate(grads):
        found = torch.stack([theirs[k] for _, theirs in ours]).sum(0)
        torch.testing.assert_close(found.double(), grad, rtol=1e-4, atol=1e-4)


def penalised(model: nn.Module, given: Any, by: int = 1) -> list[Tensor]:
    """The gradients of a loss beside the square of its slope."""
    x, *rest = given
    x = x.clone().requires_grad_()
    loss = model(x, *rest)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + by * slope.square().sum()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("form", ["mean", "mean of all"])
def test_gradients_have_gradients(form: str) -> None:
    """The slopes of W ranks are W times that of the mean of their losses: the mean of the squares
    is W times that of one process.
    """
    fast = recast.optimize(Towers(SCALARS[form]), example=batch(8, 0), passes=PASSES)
    copies = [copy.deepcopy(fast) for _ in range(2)]
    parts = [batch(4, seed) for seed in range(2)]
    found = run(2, lambda rank: penalised(copies[rank], parts[rank]))
    x, y, ids = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    wanted = penalised(Towers(SCALARS[form]).double(), (x.double(), y.double(), ids), by=2)
    for k, grad in enumerate(wanted):
        mean = torch.stack([theirs[k] for theirs in found]).mean(0)
        torch.testing.assert_close(mean.double(), grad, rtol=1e-4, atol=1e-5)


LEFT: dict[str, tuple[Form, str]] = {
    "returned": (lambda u, v, ids: u @ v.T, "forward returns pairs"),
    "classes of the batch": (
        lambda u, v, ids: F.cross_entropy(u @ v.T, ids.clamp(max=3)),
        "classes that are not arange(B)",
    ),
    "chosen by a mask": (
        lambda u, v, ids: (u @ v.T)[~torch.eye(u.size(0), dtype=torch.bool)].exp().mean(),
        "getitem of pairs",
    ),
    "a softmax of the other rows": (
        lambda u, v, ids: (u @ v.T).softmax(0).sum(1), "a softmax over the other rows"
    ),
    "of two halves": (
        lambda u, v, ids: (torch.cat([u, v]) @ torch.cat([v, u]).T).logsumexp(1),
        "logsumexp of pairs",
    ),
    "the greatest places": (
        lambda u, v, ids: ids[(u @ v.T).argmax(1)].float(), "the places of the greatest pairs"
    ),
    "of places": (
        lambda u, v, ids: ((u @ v.T) + (arange(u) // 2)[None, :]).logsumexp(1),
        "a value that depends on the places of rows in the batch",
    ),
    "places by a cumsum": (
        lambda u, v, ids: (u @ v.T + torch.ones_like(ids).cumsum(0)[None]).logsumexp(1),
        "a value over the batch",
    ),
    "turned rows": (
        lambda u, v, ids: F.cross_entropy(u @ v.flip(0).T, arange(u)), "a value over the batch"
    ),
    "less their mean": (
        lambda u, v, ids: ((u - u.mean(0)) @ v.T).logsumexp(1), "a value over the batch"
    ),
    "columns of length 1": (
        lambda u, v, ids: (F.normalize(u, dim=0) @ v.T).logsumexp(1), "a value over the batch"
    ),
    "rows by index": (
        lambda u, v, ids: (u @ v[ids.argsort()].T).logsumexp(1), "a value over the batch"
    ),
    "counted items": (
        lambda u, v, ids: (u @ v.T - torch.bincount(ids, minlength=5)[ids][None]).logsumexp(1),
        "a value over the batch",
    ),
    "the number of others": (
        lambda u, v, ids: (u @ v.T).exp().sum(1) / (u.size(0) - 1),
        "a value that depends on the number of rows",
    ),
    "the number of pairs": (
        lambda u, v, ids: (u @ v.T).exp().sum() / u.size(0) ** 2,
        "a value that depends on the number of rows",
    ),
    "the size of pairs": (
        lambda u, v, ids: (lambda pairs: pairs.exp().sum() / pairs.numel())(u @ v.T),
        "a value that depends on the number of rows",
    ),
    "pairs by their number": (
        lambda u, v, ids: (u @ v.T / u.size(0)).logsumexp(1),
        "a value that depends on the number of rows",
    ),
    "the log of a mean by hand": (
        lambda u, v, ids: (torch.cdist(u, v).neg().exp().sum() / u.size(0)).log(),
        "log of a mean over the batch",
    ),
    "a value by name": (
        lambda u, v, ids: (u @ v.T).fill_diagonal_(fill_value=0.0).sum(1),
        "fill_diagonal_ of pairs",
    ),
    "others beside them": (
        lambda u, v, ids: (u @ torch.cat([v, torch.ones(3, 6)]).T).logsumexp(1),
        "matmul pairs rows in a way that is not known",
    ),
    "halves": (
        lambda u, v, ids: (u[::2] @ u[1::2].T).exp().sum(),
        "matmul pairs rows in a way that is not known",
    ),
    "chunks": (
        lambda u, v, ids: F.cross_entropy(*(lambda a, b: (a @ b.T, arange(a)))(*u.chunk(2))),
        "linear_cross_entropy.default pairs rows in a way that is not known",
    ),
    "distances of all": (
        lambda u, v, ids: torch.pdist(u).sum(), "pdist pairs rows in a way that is not known"
    ),
    "fused attention": (
        lambda u, v, ids: F.scaled_dot_product_attention(u, v, v).sum(1),
        "scaled_dot_product_attention pairs rows in a way that is not known",
    ),
    "a triangle": (lambda u, v, ids: (u @ v.T).tril().sum(1), "tril of pairs"),
}  # fmt: skip


@pytest.mark.parametrize("form", LEFT)
def test_other_pairs_are_of_each_ranks_own_rows_and_told(form: str) -> None:
    made, why = LEFT[form]
    fast = recast.optimize(Towers(made), example=batch(8, 0), passes=PAIRS)
    (missed,) = [m for m in fast.report.journal.missed if m.rule == "synchronise-pairs"]
    assert missed.why == f"{why}: each rank pairs the rows of its own batch alone"
    assert missed.where is not None and missed.where.startswith("test_pairs_of_all_ranks.py:")
    copies = [copy.deepcopy(fast) for _ in range(2)]
    plain = Towers(made)
    for r, found in enumerate(run(2, lambda r: copies[r](*batch(4, r)).detach())):
        torch.testing.assert_close(found, plain(*batch(4, r)).detach())


class Biased(Towers):
    def __init__(self, form: Form) -> None:
        super().__init__(form)
        self.bias = nn.Parameter(torch.arange(9.0))

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        return (self.user(x) @ self.item(y).T + self.form(self.bias, x, ids)).logsumexp(1)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (lambda bias, x, ids: bias[: x.size(0)], "a value over the batch"),
        (lambda bias, x, ids: bias[arange(x)], "a value that depends on the places of rows"),
    ],
)
def test_a_parameter_of_places_in_the_batch_is_left(form: Form, why: str) -> None:
    fast = recast.optimize(Biased(form), example=batch(8, 0), passes=PASSES)
    (missed,) = [m for m in fast.report.journal.missed if m.rule == "synchronise-pairs"]
    assert missed.why.startswith(why)


def test_what_is_computed_together_is_left_together() -> None:
    """A sum over all rows beside pairs of one rank would be neither."""

    def form(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        logits = u @ v.T
        rows = logits - logits.exp().sum(1, keepdim=True).log()
        return (rows.tril().sum(1)) + v.sum(1)

    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    whys = [m.why for m in fast.report.journal.missed if m.rule == "synchronise-pairs"]
    assert [why.partition(":")[0] for why in whys] == [
        "tril of pairs", "it is computed with sum of pairs of one rank",
    ]  # fmt: skip
    assert not [e for e in fast.report.journal.fired if e.rule == "synchronise-pairs"]
    plain, copies = Towers(form), [copy.deepcopy(fast) for _ in range(2)]
    for r, found in enumerate(run(2, lambda r: copies[r](*batch(4, r)).detach())):
        torch.testing.assert_close(found, plain(*batch(4, r)).detach())


def by_another_name(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    pairs = u @ v.T
    turned = pairs.t()
    pairs.mul_(2.0)
    return turned.logsumexp(1)


def by_a_cast(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """``float()`` of float32 is the same memory."""
    pairs = u @ v.T
    pairs.float().mul_(2.0)
    return pairs.logsumexp(1)


def made_of(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The mask was made before the write."""
    ids = ids.clone()
    hits = ids[:, None] == ids[None]
    ids.mul_(0)
    return (u @ v.T).masked_fill(hits, -9.0).logsumexp(1) + ids


@pytest.mark.parametrize("form", [by_another_name, by_a_cast, made_of])
def test_writes_that_others_see_are_left(form: Form) -> None:
    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    (missed,) = [m for m in fast.report.journal.missed if m.rule == "synchronise-pairs"]
    assert missed.why.startswith("mul_ writes to pairs")


class Retrieval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = nn.Embedding(40, 8), nn.EmbeddingBag(40, 8)
        self.tower = nn.Linear(8, 8)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, v = self.tower(self.users(user)), self.items(item)
        return F.cross_entropy(u @ v.t() / 0.1, torch.arange(len(u)))


def ids(rank: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(40, (6,), generator=g), torch.randint(40, (6, 3), generator=g)


def test_a_retrieval_model_trains_as_in_one_process() -> None:
    one = Retrieval()
    optimizer = torch.optim.Adagrad(one.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        whole = (torch.cat(t) for t in zip(*(ids(r, step) for r in range(2)), strict=True))
        one(*whole).backward()
        optimizer.step()

    def rank_of(rank: int) -> tuple[dict[str, Tensor], str]:
        model = Retrieval()
        fast, own = recast.optimize(
            model, torch.optim.Adagrad(model.parameters(), lr=0.1), example=ids(0, 0),
            sharding="row_wise",
        )  # fmt: skip
        for step in range(3):
            own.zero_grad()
            fast(*ids(rank, step)).backward()
            own.step()
        with pytest.raises(UsageError, match="pairs of rows") as refused:
            recast.diff(one, fast, ids(rank, 0), training=False, steps=0)
        return fast.full_state_dict(ranks="all"), str(refused.value)

    for state, _ in processes(2, rank_of):
        for name, wanted in one.state_dict().items():
            torch.testing.assert_close(state[name], wanted, rtol=1e-4, atol=1e-5)
