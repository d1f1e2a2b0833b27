"""Whole graphs on W ranks: batch norm and dropout as in one process with the global batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generators import current, own_generator
from harness import processes, run
from torch import Tensor, nn

import recast
from recast import UsageError
from recast.passes import PIPELINE
from recast.passes.synchronise import SynchroniseBatchNorm
from recast.passes.synchronise_draws import SynchroniseDraws
from recast.passes.synchronise_dropout import SynchroniseDropout
from recast.runtime import tolerances

PASSES = (*PIPELINE, SynchroniseBatchNorm(), SynchroniseDraws(), SynchroniseDropout())
SPLITS = [(4, 4), (5, 0, 3), (1, 2, 3, 4), (2, 2, 2, 2, 2, 2, 2, 2)]


class Tower(nn.Module):
    """Chains with a batch norm and a dropout inside, in every order."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Dropout(0.3)
        self.chain = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(8, 8), nn.Dropout(0.2, inplace=True), nn.ReLU(),
            nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.front(x))


class Loose(nn.Module):
    """Neither is in a chain; several rows per sample; a mask that does not grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fields = nn.BatchNorm1d(3, affine=False)
        self.table = nn.Parameter(torch.randn(4, 6))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x.view(-1, 3, 2).transpose(1, 2), 0.4, self.training)  # (B, 2, 3)
        wide = torch.cat([h, h.exp()], 1)  # (B, 4, 3)
        rows = F.dropout(self.norm(wide).reshape(-1, 3), 0.25, self.training)  # (4 B, 3)
        weight = F.dropout(self.table, 0.5, self.training)
        pooled = self.fields(rows).relu().reshape(-1, 4, 3).sum(2)
        return self.out(F.dropout(pooled @ weight, p=0.3, training=self.training))


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 6))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = F.batch_norm(F.linear(x, self.w), self.mean, self.var, training=self.training)
        h = F.dropout(F.relu(h), 0.5, self.training)
        return torch.ops.recast.relu_dropout.default(h, 0.25, self.training)  # as a GPU has it


class Dice(nn.Module):
    """A batch norm that is the gate of another operation, over rows and over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 12)
        self.flat, self.turned = (nn.BatchNorm1d(n, eps=1e-3, affine=False) for n in (12, 4))
        self.alpha = nn.Parameter(torch.randn(12))
        self.beta = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        p = torch.sigmoid(self.flat(x))
        x = (p * x + (1 - p) * self.alpha * x).view(-1, 3, 4)
        p = torch.sigmoid(self.turned(x.transpose(1, 2)).transpose(1, 2))
        return (x * p + (1 - p) * self.beta * x).flatten(1)


class Attention(nn.Module):
    """Attentions that drop weights: by hand with a mask, and torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.qkv = nn.Linear(6, 12), nn.Linear(4, 12)
        self.own = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x).view(-1, 3, 4)
        q, k, v = (t.view(-1, 3, 2, 2).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        s = (q @ k.transpose(-1, -2) / 2**0.5).masked_fill(torch.eye(3).bool(), -1e9)
        a = F.dropout(s.softmax(-1), 0.4, self.training)
        h = h + (a @ v).transpose(1, 2).reshape(-1, 3, 4)
        return self.own(h, h, h, need_weights=False)[0].flatten(1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 12)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.front(x).view(-1, 3, 4)).flatten(1)


MODELS = [Tower, Loose, Function, Dice, Attention, Encoder]


def _fast(model: nn.Module) -> Any:
    return recast.optimize(model, example=torch.randn(8, 6), passes=PASSES)


def _steps(model: Any, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Outputs and gradients of the inputs, then of the parameters, buffers, an eval output."""
    found: list[Tensor] = []
    for x, grad in batches:
        x = x.clone().requires_grad_()
        out = model(x)
        out.backward(grad)
        assert x.grad is not None
        found += [out.detach(), x.grad]
    found += [p.grad for p in model.parameters()]
    found += list(model.buffers())
    model.eval()
    return [*found, model(batches[0][0]).detach()]


def _batches(split: tuple[int, ...], out: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(sum(split), n, generator=g) for n in (6, out))
    return list(zip(x.split(split), grad.split(split), strict=True))


def _compare(kind: type[nn.Module], split: tuple[int, ...], how: Any) -> None:
    torch.manual_seed(3)
    plain = kind()
    width = plain(torch.randn(4, 6)).shape[1]
    fast = _fast(plain)
    steps = [_batches(split, width, seed) for seed in (5, 6)]
    copies = [copy.deepcopy(fast) for _ in split]

    def rank(r: int) -> list[Tensor]:
        if how is run:
            # Masks that do not grow with the batch are torch's own draws, which threads share.
            own_generator(7)
        else:
            torch.manual_seed(7)
        return _steps(copies[r], [step[r] for step in steps])

    answers = how(len(split), rank)
    whole = [tuple(torch.cat(t) for t in zip(*step, strict=True)) for step in steps]
    torch.manual_seed(7)
    single = _steps(copy.deepcopy(plain), whole)  # type: ignore[arg-type]
    torch.manual_seed(7)
    wide = [tuple(t.double() for t in step) for step in whole]
    truth = _steps(copy.deepcopy(plain).double(), wide)  # type: ignore[arg-type]
    held = len(list(plain.parameters()))
    for k, (one, right) in enumerate(zip(single, truth, strict=True)):
        parts = [answer[k] for answer in answers]
        if k < 4 or k == len(single) - 1:
            ours = torch.cat(parts)
        elif k < 4 + held:
            ours = torch.stack(parts).sum(0)
        else:
            ours = parts[0]
            assert all(torch.equal(part, ours) for part in parts)
        assert tolerances.excess(ours, one, right, scale=8.0) <= 1, k


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [Tower, Function, Dice, Attention, Encoder])
def test_masks_and_statistics_of_one_process(kind: type[nn.Module], split: tuple[int, ...]) -> None:
    _compare(kind, split, run)


@pytest.mark.parametrize("kind", MODELS)
def test_over_gloo(kind: type[nn.Module]) -> None:
    _compare(kind, (5, 2), processes)


def test_the_graph_says_so() -> None:
    fast = _fast(Tower())
    text = str(fast.graphs["both"])
    assert text.count("recast.global_rows") == 1
    assert text.count("recast.dropout_global") == 3
    assert text.count("recast.batch_norm_global") == 2
    fired = {entry.rule for entry in fast.report.journal.fired}
    assert {"synchronise-batch-norm", "synchronise-dropout"} <= fired


def test_unlike_seeds_are_refused_on_every_rank() -> None:
    fast = [_fast(Tower()) for _ in range(3)]

    def rank(r: int) -> str:
        own_generator(r)
        with pytest.raises(UsageError, match="different states") as caught:
            fast[r](torch.randn(4, 6))
        fast[r].eval()
        assert fast[r](torch.randn(4, 6)).shape == (4, 3)  # nothing is drawn
        return str(caught.value)

    assert all("manual_seed" in text for text in run(3, rank))


class Draws(nn.Module):
    """Draws of its own: ``kind`` of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.odd = {"rrelu": nn.RReLU(), "alpha": nn.AlphaDropout(0.3)}.get(kind, nn.Identity())
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(x)
        if self.kind == "randperm":
            x = x[torch.randperm(len(x))]
        elif self.kind == "poisson":
            x = x + torch.poisson(x.abs())
        elif self.kind == "dropout1d":
            x = F.dropout1d(x.unsqueeze(1), 0.5, self.training).squeeze(1)
        elif self.kind == "in place":
            y = x * 2
            x = F.dropout(y, 0.5, self.training, inplace=True) + y
        return self.out(x)


@pytest.mark.parametrize(
    ("kind", "in_eval"),
    [
        ("randperm", True),
        ("poisson", True),
        ("rrelu", False),
        ("alpha", False),
        ("dropout1d", False),
        ("in place", False),
    ],
)
def test_other_draws_are_refused_where_they_would_be_made(kind: str, in_eval: bool) -> None:
    fast = [_fast(Draws(kind)) for _ in range(2)]
    assert fast[0](torch.randn(8, 6)).shape == (8, 2)  # on one rank they are nobody's business

    def rank(r: int) -> None:
        with pytest.raises(UsageError, match="draws random numbers in forward"):
            fast[r](torch.randn(8, 6))
        fast[r].eval()
        if in_eval:
            with pytest.raises(UsageError, match="draws random numbers in forward"):
                fast[r](torch.randn(8, 6))
        else:
            assert fast[r](torch.randn(8, 6)).shape == (8, 2)

    run(2, rank)


class Turned(nn.Module):
    """Several rows per sample, ordered by field instead of by sample."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, x + 1.0], 0)
        return F.dropout(rows, 0.4, self.training).view(2, -1, 6).sum(0)


def _masks(fast: list[Any]) -> Tensor:
    """(W, 500, 6) outputs of ones, whose ranks had generators in one state before and after."""

    def rank(r: int) -> tuple[Tensor, Tensor]:
        own_generator(1)
        out = torch.stack([fast[r](torch.ones(500, 6)) for _ in range(2)])
        assert not torch.equal(out[0], out[1])
        return out, torch.rand(3, generator=current())

    found = run(len(fast), rank)
    assert all(torch.equal(after, found[0][1]) for _, after in found)
    return torch.stack([out[0] for out, _ in found])


def test_masks_of_their_own_are_independent() -> None:
    fast = _fast(Turned())
    assert any("draw masks of their own" in m.why for m in fast.report.journal.missed)
    out = _masks([copy.deepcopy(fast) for _ in range(3)])
    assert len({tuple(o.flatten().tolist()) for o in out}) == 3
    torch.testing.assert_close(out.mean(), torch.tensor(3.0), rtol=0.03, atol=0)


def test_exact_masks_are_a_choice() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    passes = (*PIPELINE, SynchroniseDropout(exact=False))
    fast = recast.optimize(model, example=torch.randn(8, 6), passes=passes)
    assert not any("draw masks" in m.why for m in fast.report.journal.missed)
    out = _masks([copy.deepcopy(fast) for _ in range(4)])
    kept = (out != 0).flatten(1).float()
    assert (kept.mean(1) - 0.6).abs().max() < 0.04  # 4 sigma are 0.036
    assert (torch.corrcoef(kept) - torch.eye(4)).abs().max() < 0.08  # 4 sigma are 0.073
