"""The host code of row gradients for a GPU, run on the emulator: steps.

The tests of ``tests/row_grad`` run there too; here are all actions and dtypes over many steps, the
limits of a sort, loss scaling by numbers on the device, and recordings. Reads of a gradient are in
``test_row_reads_cuda.py``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.gpu import gpu
from recast.runtime.recorded import recording
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows import cuda_sort as row_cuda_sort
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.pieces import Piece
from recast.runtime.rows.update import Action, Update, apply
from recast.runtime.tolerances import excess

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
sys.path.insert(0, str(Path(__file__).parent.parent / "row_grad"))
from emulated_updates import (
    BF16,
    F16,
    F32,
    F64,
    changing,
    generator,
    grad_of,
    in_torch,
    lookups,
    results,
    same,
    skewed,
    states,
    step,
    table,
)
from row_optimizers import FUSED, Pair
from tape import Tape, _Noting

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
    assert more - set(few) <= {"scan_totals"}  # more entries than one block scans
    assert emulated.launched.count("row_update") == emulated.launched.count("row_combine") == 1


def test_rows_that_are_too_far_apart_are_left_to_torch() -> None:
    """Kernels count the bytes between two rows in 32 bits."""
    for stride, plain in ((2**30 - 4, True), (2**30, False)):
        rows = torch.empty_strided((2, 4), (stride, 1), device="meta")
        assert row_cuda._is_plain(rows) == plain


def test_classes_side_by_side_share_a_launch(emulated: emulated_gpu.Emulated) -> None:
    """That of rows of several tiles, if they differ in the lanes of a row alone."""
    for dims, classes, combined in (((8, 16), 2, 1), ((8, 20, 40), 3, 2), ((8, 9), 2, 2)):
        emulated.launched.clear()
        results(dims=dims)
        assert emulated.launched.count("row_update") == classes
        assert emulated.launched.count("row_combine") == combined


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
    assert row_sorts.norms([u.grad for u in updates], 2.0) is None


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
    norms = row_sorts.norms([u.grad for u in updates], 1.0)
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
