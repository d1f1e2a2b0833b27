"""One update of each formula: all dtypes of table, state and gradient, any width, rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.rows.grad import row_grad
from recast.runtime.rows.pieces import Piece
from recast.runtime.rows.update import Action, Update, apply
from recast.runtime.tolerances import excess

ISAS = [isa for isa in device.ISAS if device.why_not(isa)() is None]

# The others always step all rows: see test_row_ages.
ACTIONS: tuple[Action, ...] = "sgd", "adagrad", "row_wise_adagrad", "adam"
HALVES = [torch.float16, torch.bfloat16]
ROWS = 40


def update(
    action: Action,
    width: int,
    *,
    table: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    seed: int | None = None,
    weights: bool = False,
) -> Update:
    """An update of 40 rows by 23 ids, some of them equal."""
    made = torch.Generator().manual_seed(width)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    ids = torch.randint(0, ROWS - 9, (23,), generator=made)
    rows = random(23, width).to(grad)
    factors = random(23).to(table) if weights else None
    piece = Piece(ids, rows, None, 1, factors, False, None, None)
    shape = (ROWS,) if action == "row_wise_adagrad" else (ROWS, width)
    count = {"sgd": 0, "adam": 2}.get(action, 1)
    weight = random(ROWS, width).to(table)
    return Update(
        action,
        weight,
        row_grad(weight.shape, table, weight.device, [piece]),
        tuple(random(*shape).abs().to(state) for _ in range(count)),
        lr=0.1,
        eps=1e-3,
        betas=(0.9, 0.99) if action == "adam" else (0.0, 0.0),
        decay=0.01 if action == "adam" else 0.0,
        l2=0.2 if action == "adam" else 0.0,
        factor=-0.7,
        seed=seed,
    )


def truth(one: Update) -> list[Tensor]:
    """The definition, in float64, row by row."""
    weight = one.weight.double()
    states = [state.double() for state in one.states]
    (piece,) = one.grad.cell.pieces
    for row in piece.ids.unique().tolist():
        own = (piece.ids == row).nonzero().flatten()
        factors = torch.ones(len(own)) if piece.weights is None else piece.weights[own]
        g = (piece.rows[own].double() * factors.double().unsqueeze(1)).sum(0) * one.factor
        g = g + one.l2 * weight[row]
        kept = weight[row] * (1 - one.decay)
        match one.action:
            case "sgd":
                by = g
            case "adagrad":
                states[0][row] += g * g
                by = g / (states[0][row].sqrt() + one.eps)
            case "row_wise_adagrad":
                states[0][row] += (g * g).mean()
                by = g / (states[0][row].sqrt() + one.eps)
            case "adam":
                for state, new, beta in zip(states, (g, g * g), one.betas, strict=True):
                    state[row] += (new - state[row]) * (1 - beta)
                by = states[0][row] / (states[1][row].sqrt() + one.eps)
        weight[row] = kept - one.lr * by
    return [weight, *states]


def written(one: Update) -> list[Tensor]:
    apply([one])
    return [one.weight, *one.states]


def by_torch(one: Update) -> list[Tensor]:
    with device.use("torch"):
        return written(one)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 17, 31, 64, 83, 200])
@pytest.mark.parametrize("action", ACTIONS)
def test_widths(action: Action, width: int) -> None:
    right = truth(update(action, width))
    usual = by_torch(update(action, width))
    for a, b, c in zip(written(update(action, width)), usual, right, strict=True):
        assert excess(a, b, c) <= 1


FORMS = {
    "all-half": lambda half: {"table": half, "state": half, "grad": half},
    "state-fp32": lambda half: {"table": half, "grad": half},
    "grad-fp32": lambda half: {"table": half, "state": half},
    "table-only": lambda half: {"table": half},
    "grad-only": lambda half: {"grad": half},
    "weighted": lambda half: {"table": half, "grad": half, "weights": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("width", [7, 64])
@pytest.mark.parametrize("action", ACTIONS)
def test_halves(action: Action, width: int, half: torch.dtype, form: str) -> None:
    how = FORMS[form](half)
    right = truth(update(action, width, **how))
    usual = by_torch(update(action, width, **how))
    for a, b, c in zip(written(update(action, width, **how)), usual, right, strict=True):
        assert a.dtype == b.dtype
        assert excess(a, b, c) <= 1


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("action", ACTIONS)
def test_instruction_sets_give_the_same_bits(
    action: Action, half: torch.dtype, seed: int | None
) -> None:
    found = []
    for isa in ISAS:
        with device.use(isa):
            found.append(written(update(action, 83, table=half, state=half, grad=half, seed=seed)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_number_of_16_bits_survives(half: torch.dtype) -> None:
    """A gradient of zero leaves all numbers as they are: subnormal, infinite and NaN too."""
    all_bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half).view(-1, 16)
    ids = torch.arange(len(all_bits))
    for width in (16, 11):
        weight = all_bits[:, :width].clone()
        piece = Piece(ids, torch.zeros_like(weight), None, 1, None, False, None, None)
        grad = row_grad(weight.shape, half, weight.device, [piece])
        apply([Update("sgd", weight, grad, (), 0.5)])
        torch.testing.assert_close(weight, all_bits[:, :width], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_rounding_to_the_nearest_is_torchs_own(half: torch.dtype) -> None:
    for width, scale in ((32, 1.0), (5, 1e-6), (1, 6e4), (9, 1e-8)):
        x = torch.randn(500, width, generator=torch.Generator().manual_seed(width)) * scale
        weight = torch.zeros(500, width, dtype=half)
        piece = Piece(torch.arange(500), x, None, 1, None, False, None, None)
        grad = row_grad(weight.shape, half, weight.device, [piece])
        apply([Update("sgd", weight, grad, (), -1.0)])
        assert torch.equal(weight, x.to(half))


# --- rounding at random --------------------------------------------------------------------------


def rounded(x: Tensor, half: torch.dtype, seed: int) -> Tensor:
    """``x`` written to a table of zeros."""
    weight = torch.zeros(x.shape, dtype=half)
    piece = Piece(torch.arange(len(x)), x, None, 1, None, False, None, None)
    grad = row_grad(weight.shape, half, weight.device, [piece])
    apply([Update("sgd", weight, grad, (), -1.0, seed=seed)])
    return weight


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_random_rounding_has_no_bias(half: torch.dtype) -> None:
    """Up or down to a neighbour, with probabilities that make the mean right."""
    x = torch.tensor([[1.0 + 2**-13, -3.3, 1e-5, 1e-7, 1000.3, 0.0, 0.25]]).repeat(20_000, 1)
    found = rounded(x, half, 11).double()
    truth, n = x[0].double(), len(x)
    for column, right in enumerate(truth.tolist()):
        values = found[:, column].unique()
        assert len(values) <= 2
        if len(values) == 1:
            assert values.item() == right
            continue
        low, high = values.tolist()
        assert low < right < high
        nearest = torch.tensor(right).to(half).item()
        assert nearest in (low, high)
        share = (right - low) / (high - low)
        spread = (high - low) * math.sqrt(share * (1 - share) / n)
        assert abs(found[:, column].mean().item() - right) < 5 * spread


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_random_rounding_depends_on_the_seed_alone(half: torch.dtype) -> None:
    x = torch.randn(300, 13)
    first, again, other = (rounded(x, half, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    # Rows and columns are rounded independently.
    up = (first.double() > x.double()).double()
    up -= up.mean()
    for a, b in ((up[1:], up[:-1]), (up[:, 4:], up[:, :-4]), (up[:, 1:], up[:, :-1])):
        assert abs((a * b).mean().item()) < 5 * 0.25 / math.sqrt(a.numel())


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_random_rounding_of_what_is_not_between_two_numbers(half: torch.dtype) -> None:
    largest = torch.finfo(half).max
    x = torch.tensor([[float("inf"), -float("inf"), largest, -largest, 0.5, float("nan")]])
    got = rounded(x, half, 1)
    assert torch.equal(got[:, :5].float(), x[:, :5]) and got[:, 5].isnan().all()
