"""The host code of row gradients for a GPU, run on the emulator.

The tests of ``tests/row_grad`` run there too; here are all actions and dtypes over many steps, the
limits of a sort, loss scaling by numbers on the device, norms without waiting, and recordings.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.errors import IdError
from recast.runtime import checked, device, gpu, recording
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import cuda_sort as row_cuda_sort
from recast.runtime.rows.grad import RowGrad, row_grad
from recast.runtime.rows.pieces import Piece, merge
from recast.runtime.rows.update import Action, Update, apply
from recast.runtime.tolerances import excess

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
sys.path.insert(0, str(Path(__file__).parent.parent / "row_grad"))
from row_optimizers import FUSED, Pair
from tape import Tape, _Noting

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
CPU = torch.device("cpu")
STATES = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 1, "adam": 2}


@pytest.fixture
def emulated() -> Iterator[emulated_gpu.Emulated]:
    with emulated_gpu.serve() as served:
        yield served


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def skewed(g: torch.Generator, rows: int, n: int) -> Tensor:
    """Ids of which few are hot."""
    return (torch.rand(n, generator=g) ** 4 * rows).long()


def lookups(g: torch.Generator, rows: int, dim: int, grad: torch.dtype, table: torch.dtype) -> Any:
    """Pieces of every form: one-hot, fixed, ragged, weights, mean, padding, factors, int32."""

    def upstream(bags: int) -> Tensor:
        return torch.randn(bags, dim + 8, generator=g).to(grad)[:, 8:]

    def weights(n: int) -> Tensor:
        return torch.randn(n, generator=g).to(table)

    starts = torch.tensor([0, 0, 3, 4, 90])
    ends = torch.tensor([0, 7, 7, 60], dtype=torch.int32)
    return [
        Piece(skewed(g, rows, 300), upstream(300), None, 1, None, False, None, None),
        Piece(skewed(g, rows, 60).int(), upstream(20), None, 3, weights(60), False, 1, None),
        Piece(skewed(g, rows, 120), upstream(5), starts, 0, None, True, 0, 0.5),
        Piece(skewed(g, rows, 60), upstream(3), ends, 0, weights(60), True, None, -1.5),
    ]


def table(g: torch.Generator, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A slice of columns, aligned as the whole is."""
    return torch.randn(rows, dim + 8, generator=g).to(dtype)[:, :dim]


def states(action: str, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shape = weight.shape[:1] if action == "row_wise_adagrad" else weight.shape
    return tuple(torch.full(shape, 0.1, dtype=dtype) for _ in range(STATES[action]))


def grad_of(weight: Tensor, pieces: list[Piece]) -> RowGrad:
    return row_grad(weight.shape, weight.dtype, CPU, pieces)


def in_torch(
    action: str, weight: Tensor, held: Sequence[Tensor], pieces: list[Piece], u: Update,
    compute: torch.dtype,
) -> None:  # fmt: skip
    """The formulas of the updates, by plain torch in ``compute``, on touched rows."""
    with device.use("torch"):
        ids, g = merge(pieces, weight.shape, compute, CPU)
    g = g * u.factor
    w, s = weight[ids].to(compute), [state[ids].to(compute) for state in held]
    if action == "sgd":
        w = w - u.lr * g
    elif action == "adam":
        g = g + u.l2 * w
        w = w - u.decay * w
        s[0] = s[0] + (g - s[0]) * (1 - u.betas[0])
        s[1] = s[1] + (g * g - s[1]) * (1 - u.betas[1])
        w = w - u.lr * s[0] / (s[1].sqrt() + u.eps)
    else:
        s[0] = s[0] + (g * g if action == "adagrad" else (g * g).mean(1))
        root = s[0].sqrt() + u.eps
        w = w - u.lr * g / (root if action == "adagrad" else root.unsqueeze(1))
    weight[ids] = w.to(weight.dtype)
    for state, new in zip(held, s, strict=True):
        state[ids] = new.to(state.dtype)


def changing(u: Update, turn: int) -> Update:
    """Other numbers in each step, as schedules give."""
    return u._replace(lr=0.05 * (1 + turn % 3), factor=(1.0, -0.5)[turn % 2])


CASES: dict[str, tuple[Action, torch.dtype, torch.dtype, torch.dtype, tuple[int, ...]]] = {
    # action, table, gradient, states, columns of the tables
    "sgd": ("sgd", F32, F32, F32, (8, 20, 8, 3)),
    "adagrad": ("adagrad", F32, F32, F32, (8, 3, 20, 8)),
    "row-wise": ("row_wise_adagrad", F32, F32, F32, (20, 8)),
    "adam": ("adam", F32, F32, F32, (8, 20)),
    "sgd fp16": ("sgd", F16, F16, F32, (8,)),
    "adagrad bf16 gradient": ("adagrad", F32, BF16, F32, (8, 16)),
    "adagrad bf16": ("adagrad", BF16, BF16, BF16, (16,)),
    "row-wise fp16": ("row_wise_adagrad", F16, F32, F32, (12,)),
    "adam bf16": ("adam", BF16, BF16, F32, (16,)),
    "adam fp16": ("adam", F16, F16, F16, (5,)),
    "wide rows": ("adagrad", F32, F32, F32, (640,)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("adagrad", "adam fp16")))
        for name in CASES
    ],
)
def test_many_steps(name: str, emulated: emulated_gpu.Emulated) -> None:
    action, dtype, grad, state, dims = CASES[name]
    g = generator(3)
    rows = (40, 7, 300, 1)
    tables = [table(g, rows[k], dim, dtype) for k, dim in enumerate(dims)]
    given = [Update(action, w, None, states(action, w, state), 0.1, 1e-2, (0.9, 0.99), 0.01, 0.05)
             for w in tables]  # type: ignore[arg-type]  # fmt: skip
    sides = {
        kind: [(u.weight.to(kind or dtype).clone(), [s.to(kind or state).clone() for s in u.states])
               for u in given]
        for kind in (None, F64)
    }  # fmt: skip
    largest = [float(w.abs().max()) for w in tables]
    for turn in range(20):
        pieces = [lookups(g, *w.shape, grad, dtype) for w in tables]
        updates = [changing(u, turn) for u in given]
        row_steps = [
            u._replace(grad=grad_of(u.weight, found))
            for u, found in zip(updates, pieces, strict=True)
        ]
        emulated.launched.clear()
        apply(row_steps)
        assert emulated.launched.count("linearise") == 1
        assert emulated.launched.count("row_update") == len(set(dims))
        for kind, side in sides.items():
            for (w, held), found, u in zip(side, pieces, updates, strict=True):
                in_torch(action, w, held, found, u, kind or F32)
        largest = [
            max(m, float(w.abs().max())) for m, (w, _) in zip(largest, sides[F64], strict=True)
        ]
    for u, (plain, held), (truth, true), scale in zip(
        given, sides[None], sides[F64], largest, strict=True
    ):
        assert excess(u.weight, plain, truth, scale=scale) <= 1
        for ours, theirs, right in zip(u.states, held, true, strict=True):
            assert excess(ours, theirs, right) <= 1


@pytest.mark.parametrize("name", FUSED)
def test_optimizers(name: str, emulated: emulated_gpu.Emulated) -> None:
    """Every optimizer that steps touched rows, beside plain torch."""
    pair = Pair(FUSED[name])
    pair.train()
    pair.check()
    assert emulated.launched.count("row_update") >= 4
    assert isinstance(pair.a.grad, RowGrad) and pair.a.grad.lazy


# --- one step ------------------------------------------------------------------------------------


def step(
    *, seed: int = 5, dims: Sequence[int] = (8, 20), pieces: Any = None, **more: Any
) -> tuple[list[Tensor], list[Update]]:
    """Adagrad on some tables: what is written to, and the updates."""
    g = generator(seed)
    updates = []
    for k, dim in enumerate(dims):
        weight = table(g, (40, 300, 7)[k % 3], dim, F32)
        found = lookups(g, *weight.shape, F32, F32)
        held = states("adagrad", weight, F32)
        one = Update("adagrad", weight, grad_of(weight, found), held, 0.1, 1e-2)
        updates.append(one._replace(**more))
    return [t for u in updates for t in (u.weight, *u.states)], updates


def results(**how: Any) -> list[Tensor]:
    """What is written to, after a step that kernels took."""
    written, updates = step(**how)
    assert row_cuda.update(updates) == []
    return written


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("emulated")
def test_results_do_not_depend_on_the_device() -> None:
    """Neither on how many blocks run at once nor on their order."""
    found = results()
    for multiprocessors, workers, seed in ((1, 1, 1), (7, 2, 2)):
        with emulated_gpu.serve(workers=workers, seed=seed) as served:
            served.multiprocessors = multiprocessors
            assert same(found, results())


def test_the_same_launches_for_any_number_of_tables(emulated: emulated_gpu.Emulated) -> None:
    results(dims=(8,) * 6)  # as many passes of the sort as below
    few = list(emulated.launched)
    emulated.launched.clear()
    results(dims=(8,) * 26)
    more = set(emulated.launched)
    assert more - set(few) <= {"scan_totals", "run_totals"}  # more entries than one block scans
    assert emulated.launched.count("row_update") == emulated.launched.count("row_combine") == 1


@pytest.mark.usefixtures("emulated")
def test_found_inf_leaves_all_bits_and_grad_scale_divides() -> None:
    before = step()[0]
    assert same(before, results(found_inf=torch.tensor([1.0])))
    plain = results(factor=0.25)
    assert not same(before, plain)
    scaled = results(found_inf=torch.tensor([0.0]), grad_scale=torch.tensor(4.0))
    assert same(plain, scaled)


@pytest.mark.usefixtures("emulated")
def test_a_scale_on_the_device() -> None:
    """Gradients multiplied by tensors are read where they are: the host never sees the number."""
    written, updates = step()
    once = torch.tensor(0.5, dtype=F64)
    for u in updates:
        u.grad.mul_(once)
        u.grad.div_(torch.tensor(2.0))
    once.fill_(99.0)  # the gradient has it as it was
    assert isinstance(updates[0].grad.cell.scale, Tensor)
    apply(updates)
    assert same(written, results(factor=0.25))


@pytest.mark.usefixtures("emulated")
def test_what_kernels_do_not_take_is_left() -> None:
    _, (one, *_) = step()
    weight = one.weight
    double = weight.double()
    for other in (
        one._replace(weight=double, grad=grad_of(double, [])),
        one._replace(weight=weight.t().contiguous().t()),
        one._replace(states=(one.states[0].double(),)),
        one._replace(found_inf=torch.zeros(1, dtype=F64)),
    ):
        assert row_cuda.update([other]) == [other]
    assert row_cuda.update([one]) == []


def test_without_a_gpu_all_is_left() -> None:
    _, updates = step()
    assert row_cuda.update(updates) == updates
    assert row_cuda.norms([u.grad for u in updates], 2.0) is None


@pytest.mark.usefixtures("emulated")
def test_a_graph_that_saved_the_table_refuses() -> None:
    written, updates = step()
    versions = [t._version for t in written]
    row_cuda.update(updates)
    assert all(t._version > v for t, v in zip(written, versions, strict=True))


@pytest.mark.usefixtures("emulated")
def test_no_gradient_at_all() -> None:
    g = generator(2)
    none = torch.empty(0, dtype=torch.int64)
    padded = Piece(torch.tensor([3, 3]), torch.randn(2, 8), None, 1, None, True, 3, None)
    empty = Piece(none, torch.randn(2, 8), torch.tensor([0, 0]), 1, None, False, None, None)
    for pieces in ([], [padded], [empty], [empty, padded]):
        weight = table(g, 5, 8, F32)
        before = weight.clone()
        update = Update("sgd", weight, grad_of(weight, pieces), (), 1.0)
        assert row_cuda.update([update]) == []
        assert torch.equal(weight, before)


@pytest.mark.usefixtures("emulated")
def test_adam_moves_a_row_whose_gradient_sums_to_zero() -> None:
    rows = torch.tensor([[1.0] * 4, [-1.0] * 4])
    pieces = [Piece(torch.tensor([2, 2]), rows, None, 1, None, False, None, None)]
    weight = torch.zeros(5, 4)
    mean, square = torch.full((5, 4), 0.5), torch.full((5, 4), 0.25)
    apply([Update("adam", weight, grad_of(weight, pieces), (mean, square), 1.0, 0.0, (0.5, 1.0))])
    assert torch.equal(weight[2], torch.full((4,), -0.5)) and not weight[[0, 1, 3, 4]].any()
    assert mean[:, 0].tolist() == [0.5, 0.5, 0.25, 0.5, 0.5]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("action", ["sgd", "adam"])
def test_rounding_at_random(action: Action) -> None:
    """One seed gives one result, and the mean of many roundings is what was to be rounded."""
    unit, share = 2.0**-8, 0.25  # between 1 and the bf16 number below

    def rounded(seed: int | None) -> Tensor:
        weight = torch.ones(64, 64, dtype=BF16)
        piece = Piece(torch.arange(64), torch.ones(64, 64), None, 1, None, False, None, None)
        held = states(action, weight, F32)
        one = Update(action, weight, grad_of(weight, [piece]), held, share * unit, seed=seed)
        if action == "adam":  # its mean and root are then 1
            one = one._replace(betas=(0.0, 0.0))
        apply([one])
        return weight

    first = rounded(7)
    assert torch.equal(first, rounded(7)) and not torch.equal(first, rounded(-8))
    down = float((first != 1).double().mean())
    assert ((first == 1) | (first == 1 - unit)).all()
    assert abs(down - share) < 5 * math.sqrt(share * (1 - share) / first.numel())
    assert (rounded(None) == 1).all()


# --- the limits of a sort ------------------------------------------------------------------------


def whole_numbers() -> tuple[list[Tensor], list[Update]]:
    """Sums that are exact in any order."""
    written, updates = step(dims=(8, 20, 8))
    for u in updates:
        u.grad.cell.pieces = [
            replace(p, rows=(p.rows * 4).round(), mean=False, scale=None,
                    weights=None if p.weights is None else (p.weights * 2).round())
            for p in u.grad.cell.pieces
        ]  # fmt: skip
    return written, updates


@pytest.mark.parametrize(
    ("limit", "most", "sorts"),
    [("MOST_ENTRIES", 1100, 2), ("MOST_SOURCES", 4 * 512, 3), ("MOST_ROWS", 345, 2)],
)
def test_tables_are_split_where_a_sort_is_full(
    limit: str, most: int, sorts: int, emulated: emulated_gpu.Emulated,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    expected, updates = whole_numbers()
    row_cuda.update(updates)
    monkeypatch.setattr(row_cuda_sort, limit, most)
    found, updates = whole_numbers()
    emulated.launched.clear()
    assert row_cuda.update(updates) == []
    assert emulated.launched.count("linearise") == sorts
    assert same(found, expected)
    norms = row_cuda.norms([u.grad for u in updates], 1.0)
    assert norms is not None and all(n > 0 for n in norms)


@pytest.mark.usefixtures("emulated")
def test_a_table_that_no_sort_can_take_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _, updates = step()
    monkeypatch.setattr(row_cuda_sort, "MOST_ENTRIES", 539)  # one less than each has
    assert row_cuda.update(updates) == updates


def test_wide_keys(monkeypatch: pytest.MonkeyPatch, emulated: emulated_gpu.Emulated) -> None:
    expected, updates = whole_numbers()
    row_cuda.update(updates)
    monkeypatch.setattr(row_cuda_sort, "MOST_ROWS", 39)  # 40, 300 and 7 rows
    found, updates = whole_numbers()
    emulated.launched.clear()
    row_cuda.update(updates)
    assert emulated.launched.count("linearise") == 3
    assert same(found, expected)


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [2**31, 2**32 - 2, 2**32, 2**40])
def test_rows_behind_all_that_32_bits_number(rows: int) -> None:
    ids = torch.tensor([rows - 1, 0, rows - 1, 5, rows // 2])
    grad = torch.arange(20.0).reshape(5, 4)
    found = merge([Piece(ids, grad, None, 1, None, False, 5, None)], (rows, 4), F32, CPU)
    assert found[0].tolist() == [0, rows // 2, rows - 1]
    assert torch.equal(found[1], torch.stack([grad[1], grad[4], grad[0] + grad[2]]))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_merging(dtype: torch.dtype) -> None:
    g = generator(9)
    pieces = lookups(g, 50, 20, dtype, dtype)
    ids, rows = merge(pieces, (50, 20), dtype, CPU)
    with device.use("torch"):
        plain_ids, plain = merge(pieces, (50, 20), dtype, CPU)
        _, truth = merge(pieces, (50, 20), F64, CPU)
    assert torch.equal(ids, plain_ids) and rows.dtype is dtype
    assert excess(rows, plain, truth, scale=float(truth.abs().max())) <= 1


@pytest.mark.usefixtures("emulated")
def test_the_dense_gradient_does_not_wait() -> None:
    _, updates = step()
    with Tape(()):
        dense = [u.grad.dense() for u in updates]
    for u, full in zip(updates, dense, strict=True):
        ids, rows = u.grad.merged()
        assert torch.equal(full, torch.zeros_like(full).index_copy(0, ids, rows))
        total = torch.ones_like(full)
        u.grad.add_to(total, -2.0)
        assert torch.allclose(total, 1 - 2 * full)


@pytest.mark.usefixtures("emulated")
def test_ids_outside_their_table() -> None:
    """Left out, as the lookup left them out and counted them; an error when checked or merged."""
    bad = torch.tensor([1, 7, 2, -1])
    pieces = [Piece(bad, torch.ones(4, 8), None, 1, None, False, None, None)]
    weight = torch.zeros(5, 8)
    row_cuda.update([Update("sgd", weight, grad_of(weight, pieces), (), -1.0)])
    assert weight[:, 0].tolist() == [0, 1, 1, 0, 0]
    with checked.checked(), pytest.raises(IdError, match="row 7 of a table of 5 rows"):
        row_cuda.update([Update("sgd", weight, grad_of(weight, pieces), (), -1.0)])
    with pytest.raises(IdError, match="row 7 of a table of 5 rows"):
        grad_of(weight, pieces).merged()
    ragged = replace(pieces[0], ids=torch.arange(4), offsets=torch.tensor([1, 2, 2, 2]))
    with pytest.raises(ValueError, match="offsets"):
        grad_of(weight, [ragged]).merged()


# --- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_norms(order: float, dtype: torch.dtype, emulated: emulated_gpu.Emulated) -> None:
    g = generator(4)
    weights = [table(g, 30, 16, dtype), table(g, 4, 16, dtype), table(g, 3, 16, dtype)]
    grads = [grad_of(w, lookups(g, *w.shape, F32, dtype)) for w in weights]
    grads[2].zero_()
    grads[1].mul_(-3.0)
    found = torch._foreach_norm(grads, order)
    with device.use("torch"):
        dense = [grad.dense() for grad in grads]
    for norm, full in zip(found, dense, strict=True):
        plain = torch.linalg.vector_norm(full, order)
        truth = torch.linalg.vector_norm(full.double(), order)
        assert norm.dtype is dtype
        # The sums are fp32 here, and rounded to the table's dtype: as the dense gradient's are.
        assert excess(norm, plain, truth, scale=float(truth)) <= 1
    assert emulated.launched.count("linearise") == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("times", [1, 200])  # in a row of one run, and of many
def test_what_is_not_finite_shows_in_the_norm(order: float, bad: float, times: int) -> None:
    rows = torch.ones(times + 9, 8)
    rows[times // 2, 5] = bad
    ids = torch.cat([torch.full((times,), 2), torch.arange(3, 12)])
    weight = torch.zeros(20, 8)
    grad = grad_of(weight, [Piece(ids, rows, None, 1, None, False, None, None)])
    norm = torch.linalg.vector_norm(grad, order)
    assert norm.isnan() if math.isnan(bad) else norm == math.inf
    scale = torch.tensor(0.5)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, scale)
    assert found == 1 and grad.lazy


def test_a_sum_that_overflows_the_table_is_found() -> None:
    with emulated_gpu.serve():
        weight = torch.zeros(5, 8, dtype=F16)
        rows = torch.full((4, 8), 40000.0, dtype=F16)
        for ids, bad in ((torch.arange(4), 0.0), (torch.zeros(4, dtype=torch.int64), 1.0)):
            grad = grad_of(weight, [Piece(ids, rows, None, 1, None, False, None, None)])
            found = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.ones(()))
            assert found == bad


def test_unscaling_clipping_and_updating_share_one_sort(emulated: emulated_gpu.Emulated) -> None:
    """And none of them waits for the device."""
    written, updates = step(dims=(8, 20, 8))
    expected, plain = step(dims=(8, 20, 8))
    parameters = []
    for u in updates:
        parameter = torch.nn.Parameter(u.weight)
        parameter.grad = u.grad
        parameters.append(parameter)
    found, inverse = torch.zeros(()), torch.tensor(0.25)
    with Tape(()), torch.no_grad():
        torch._amp_foreach_non_finite_check_and_unscale_([u.grad for u in updates], found, inverse)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        apply(updates)
    assert emulated.launched.count("linearise") == 1
    assert all(u.grad.lazy for u in updates) and found == 0
    full = torch.cat([u.grad.dense().flatten() for u in plain]) * 0.25
    assert torch.allclose(norm, torch.linalg.vector_norm(full))
    apply([u._replace(factor=0.25 * 0.5 / (float(norm) + 1e-6)) for u in plain])
    for a, b in zip(written, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_sort_is_made_again_when_a_gradient_changed(emulated: emulated_gpu.Emulated) -> None:
    g = generator(6)
    first, second = (
        grad_of(torch.empty(1000, 8), [Piece(ids, rows, None, 1, None, False, None, None)])
        for ids, rows in ((torch.arange(k), torch.randn(k, 8, generator=g)) for k in (5, 6))
    )
    before = torch._foreach_norm([first, second])
    norm = torch.linalg.vector_norm(second)
    assert emulated.launched.count("linearise") == 1
    first.add_(first.clone())
    assert torch.linalg.vector_norm(first) == 2 * before[0]
    assert emulated.launched.count("linearise") == 2 and not first.cell.merged
    assert torch.equal(norm, before[1])
    norm.zero_()  # nobody else's
    assert torch.linalg.vector_norm(second) == before[1]
    # The rows of another may be gone: what is left is sorted alone.
    first.zero_()
    assert torch.linalg.vector_norm(first, 1) == 0
    assert torch.linalg.vector_norm(second) == before[1]


# --- recordings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 3])
def test_a_recorded_step_takes_new_numbers(
    seed: int | None, emulated: emulated_gpu.Emulated
) -> None:
    """Replays on new gradients in the same memory, with other learning rates and seeds."""
    action: Action = "adam"
    g = generator(8)
    dtype = F32 if seed is None else BF16
    rows = [torch.randn(40, 8, generator=g) for _ in range(4)]
    ids = [skewed(g, 30, 40) for _ in range(4)]
    inputs = torch.empty(40, dtype=torch.int64), torch.empty(40, 8)

    def updates(weight: Tensor, held: Any, grad: RowGrad, turn: int) -> list[Update]:
        drawn = None if seed is None else seed + turn
        betas = 0.9, 0.99
        return [Update(action, weight, grad, held, 0.1 / (turn + 1), 1e-3, betas, seed=drawn)]

    def fresh() -> tuple[Tensor, tuple[Tensor, ...]]:
        weight = table(generator(1), 30, 8, dtype)
        return weight, states(action, weight, F32)

    def load(turn: int) -> Piece:
        inputs[0].copy_(ids[turn])
        inputs[1].copy_(rows[turn])
        return Piece(inputs[0], inputs[1], None, 1, None, False, None, None)

    expected, held = fresh()
    for turn in range(4):
        apply(updates(expected, held, grad_of(expected, [load(turn)]), turn))

    weight, held = fresh()
    tape = Tape(())
    piece = load(0)
    with recording.recording() as recorded, gpu.emulate(_Noting(emulated, lambda: tape)), tape:
        grad = grad_of(weight, [piece])
        norm = torch.linalg.vector_norm(grad)
        apply(updates(weight, held, grad, 0))
    for turn in range(1, 4):
        load(turn)
        row_cuda.renew(recorded, updates(weight, held, grad, turn))
        tape.replay()
        full = torch.zeros(30, 8).index_add(0, ids[turn], rows[turn])
        assert torch.allclose(norm, full.to(dtype).float().norm().to(dtype))
        assert torch.allclose(torch.linalg.vector_norm(grad), norm)
        torch.testing.assert_close(grad.dense(), full.to(dtype))
    assert torch.equal(weight, expected)
