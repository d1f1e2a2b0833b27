"""Terms that cancel: telling rounding from a fault in a model that magnifies both."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.diff import model_runs, rounding_noise


class TwoRows(nn.Module):
    """A batch norm of two rows: its gradient is what is left of terms that cancel."""

    def __init__(self, error: float = 0.0, only: torch.dtype | None = None) -> None:
        super().__init__()
        self.only = only
        for rows, name in enumerate("abc", start=7):
            setattr(self, name, nn.Embedding(rows, 2))
        self.norm = nn.BatchNorm1d(14)
        self.head = nn.Linear(14, 2)
        self.error = error

    def forward(self, ids: Tensor) -> Tensor:
        z = torch.stack([self.a(ids[:, 0]), self.a(ids[:, 1]), self.c(ids[:, 2])], dim=1)
        li, lj = torch.tril_indices(3, 3)
        products = torch.bmm(z, z.transpose(1, 2))[:, li, lj]
        h = torch.cat([z[:, 0], products, z.flatten(1)], dim=1)
        if self.training and self.only in (None, h.dtype):
            h = h + self.error * (h - h.detach())
        out: Tensor = torch.sigmoid(self.head(self.norm(h)))
        return out


def _pair(
    seed: int, error: float = 0.0, only: torch.dtype | None = None
) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(seed)
    plain, other = TwoRows(), TwoRows(error, only)
    other.load_state_dict(plain.state_dict())
    return plain, other, torch.randint(7, (2, 3))


@pytest.mark.parametrize("seed", (13, 24, 26, 56, 83, 131, 140))
def test_rounding_is_no_difference(seed: int) -> None:
    plain, _, ids = _pair(seed)
    recast.diff(plain, recast.optimize(plain, example=ids), ids, steps=0).check()


def _parted(report: recast.DiffReport) -> set[str]:
    return {row.tensor for row in report.rows if not row.ok}


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_gradient_still_is(seed: int) -> None:
    plain, other, ids = _pair(seed, error=0.1)
    wrong = _parted(recast.diff(plain, other, ids, steps=0))
    assert wrong and wrong <= {"a.weight", "c.weight"}


@pytest.mark.parametrize("error", (1e-2, 1e-4))
def test_a_fault_below_the_rounding_does_not_go_away_in_float64(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, ids = _pair(1, error)
    with torch.no_grad():
        for p in (*plain.parameters(), *other.parameters()):
            p.mul_(30 if p.dim() == 2 and p.shape[1] == 2 else 1)  # all that comes back is rounding
    report = recast.diff(plain, other, ids, steps=0)
    assert _parted(report) and any("differs in float64 too" in note for note in report.notes)
    monkeypatch.setattr(rounding_noise.Reruns, "vanishes", lambda *_: True)
    assert not _parted(recast.diff(plain, other, ids, steps=0)), "rounding alone would hide it"


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_errs_in_float32_alone_is_found_by_its_size(seed: int) -> None:
    plain, other, ids = _pair(seed, error=0.1, only=torch.float32)
    wrong = _parted(recast.diff(plain, other, ids, steps=0))
    assert wrong and wrong <= {"a.weight", "c.weight"}


class Signs(nn.Module):
    """The gradient of the bias before the norm is only rounding, which ``other`` changes."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 1)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.other:
            h = self.first.bias + x.flip(1) @ self.first.weight.flip(1).t()
        out: Tensor = self.head(torch.tanh(self.norm(h)))
        return out


def test_an_optimizer_that_steps_by_signs_steps_by_the_sign_of_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2)
    plain, other = Signs(False), Signs(True)
    other.load_state_dict(plain.state_dict())
    batch = torch.randn(9, 6)
    how = {"steps": 1, "optimizer": lambda p: torch.optim.Rprop(p, lr=0.01)}
    recast.diff(plain, other, batch, **how).check()
    monkeypatch.setattr(rounding_noise.Reruns, "wide_draws", [])
    assert _parted(recast.diff(plain, other, batch, **how)) == {"first.bias"}


class _Kinds(nn.Module):
    """Values that must not be perturbed: ids given as floats, counts, masks, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 3), nn.BatchNorm1d(3)
        self.seen: list[Tensor] = []

    def forward(self, packed: Tensor) -> Tensor:
        ids = packed.long()
        lengths = (ids != 0).float().sum(1).long()
        rows = self.table(ids).sum(1) / lengths.clamp(min=1).unsqueeze(1)
        dropped = torch.dropout(rows, 0.5, True)
        self.seen = [ids, lengths, dropped == 0]
        out: Tensor = self.norm(dropped)
        return out


def test_a_draw_moves_the_last_digits_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = _Kinds()
    batch = (torch.randint(9, (40, 3)).float(),)
    how = {"training": True, "seed": 5, "loss": None}
    with model_runs.undisturbed(model) as restore:
        want, seen = model_runs.once(model, batch, **how), model.seen
        restore()
        reruns = rounding_noise.Reruns(
            model, model, lambda m, _: model_runs.once(m, batch, **how), restore
        )
        draws = reruns.draws
        assert all(torch.equal(a, b) for a, b in zip(model.seen, seen, strict=True))
    assert len({float(d.grads["table.weight"].sum()) for d in draws}) == rounding_noise.TIMES
    pairs = [
        (got, wanted[name])
        for d in draws
        for now, wanted in (
            (d.outputs, want.outputs),
            (d.grads, want.grads),
            (d.buffers, want.buffers),
        )
        for name, got in now.items()
    ]
    for got, wanted in pairs:
        far = (got - wanted).abs().max()
        assert far <= 1e-5 * wanted.abs().max().clamp(min=1e-3)


class ReadsDtype(nn.Module):
    """Its graph is not run in float64, where the default dtype is another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (2.0 if torch.get_default_dtype() == torch.float32 else 3.0)
        return out


def test_a_plain_forward_in_float64_tells_nothing_of_the_optimised_model() -> None:
    """Nor is the user warned of it."""
    plain = ReadsDtype()
    batch = (torch.randn(4, 3),)
    fast = recast.optimize(plain, example=batch)
    wide = (batch[0].double(),)

    def run(model: nn.Module, double: bool) -> model_runs.Pass:
        return model_runs.once(model, wide if double else batch, training=True, seed=0, loss=None)

    with model_runs.undisturbed(fast) as restore, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert rounding_noise.Reruns(plain, fast, run, restore).wide is None
    assert [w for w in seen if issubclass(w.category, recast.RecastWarning)] == []
