"""The host code of ``embedding_bags`` for a GPU, run on the emulator.

Every sample of the op runs there in ``tests/ops``; here is what only a GPU has: classes of lookups,
alignment, long bags, ids that are counted instead of refused, outputs under autocast.
"""

from __future__ import annotations

import copy
import itertools
import runpy
import warnings
from collections.abc import Iterator
from typing import Any

import emulated_gpu
import pytest
import torch
from models import CASES, build
from torch import Tensor

import recast
from recast.errors import IdError, RecastWarning
from recast.runtime import OPS, checked, cuda_launch, device, embedding_cuda, gpu, recording
from recast.runtime.op import Sample
from recast.runtime.rows.grad import RowGrad
from recast.runtime.tolerances import excess

BAGS = OPS["embedding_bags"]
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
WHY_NOT = cuda_launch.why_not()
FORWARD, WEIGHT_GRAD = "embedding_forward", "embedding_weight_grad"


@pytest.fixture
def emulated() -> Iterator[emulated_gpu.Emulated]:
    with emulated_gpu.serve() as gpu:
        yield gpu


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def arguments(lookups: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The arguments of the op for lookups of a table each."""
    full = [
        {"offsets": None, "weights": None, "mode": "sum", "padding": None, "last": False} | x
        for x in lookups
    ]
    columns = [[x[key] for x in full] for key in ("table", "ids", "offsets", "weights")]
    rest = [[x[key] for x in full] for key in ("mode", "padding", "last")]
    return (*columns, [*range(len(full))], *rest, [False] * len(full))


def call(lookups: list[dict[str, Any]], *more: Any) -> list[Tensor]:
    found: list[Tensor] = BAGS.target(*arguments(lookups), *more)
    return found


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(lookups: list[dict[str, Any]], outs: list[Tensor]) -> None:
    plain = BAGS.reference(*arguments(lookups))
    truth = BAGS.reference(
        *arguments([{key: widened(value) for key, value in x.items()} for x in lookups])
    )
    for x, a, b, c in zip(lookups, outs, plain, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert excess(a, b, c, scale=float(x["table"].detach().abs().max())) <= 1


def ids_of(rows: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, rows, shape, generator=generator(seed), dtype=dtype)


# ---------------------------------------------------------------- classes


def mixed() -> list[dict[str, Any]]:
    """Dtypes, widths, modes and forms of ids that fall into many classes, in no order."""
    g = generator(3)
    starts = torch.tensor([0, 2, 2, 7])

    def table(rows: int, dim: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(rows, dim, generator=g).to(dtype)

    return [
        {"table": table(11, 16), "ids": ids_of(11, 5, 3)},
        {"table": table(7, 24, BF16), "ids": ids_of(7, 9, dtype=torch.int32), "offsets": starts},
        {"table": table(11, 16), "ids": ids_of(11, 4, 2), "mode": "max"},
        {"table": table(5, 7), "ids": ids_of(5, 2, 3), "mode": "none"},
        {"table": table(11, 16), "ids": ids_of(11, 6, 2, dtype=torch.int32), "mode": "mean"},
        {"table": table(7, 24, BF16), "ids": ids_of(7, 9), "offsets": starts, "padding": 3},
        {"table": table(9, 10, F16), "ids": ids_of(9, 3, 2), "mode": "max"},
        {"table": table(3, 300), "ids": ids_of(3, 3, 2)},
        {"table": table(4, 1), "ids": ids_of(4, 8), "mode": "none"},
    ]


def test_one_launch_a_class_and_one_upload(
    emulated: emulated_gpu.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[int] = []
    upload = emulated.upload
    monkeypatch.setattr(
        emulated, "upload", lambda words: uploads.append(len(words)) or upload(words)
    )
    lookups = mixed()
    outs = call(lookups)
    assert emulated.launched == [FORWARD] * 7  # the first and fifth share one, second and sixth
    assert len(uploads) == 1
    check(lookups, outs)


def test_a_lookup_does_not_depend_on_its_neighbours(emulated: emulated_gpu.Emulated) -> None:
    lookups = mixed()
    together = call(lookups)
    for x, out in zip(lookups, together, strict=True):
        assert torch.equal(call([x])[0], out)


def test_other_sizes_of_one_form(emulated: emulated_gpu.Emulated) -> None:
    """What was worked out for one batch serves the next: other sizes, none, and the first again."""
    table, other = torch.randn(9, 8, generator=generator(1)), torch.randn(6, 8)
    for seed, bags in enumerate((5, 300, 0, 1, 5)):
        starts = torch.arange(0, 2 * bags, 2)
        lookups = [
            {"table": table, "ids": ids_of(9, 2 * bags, seed=seed), "offsets": starts},
            {"table": other, "ids": ids_of(6, bags, 3, seed=seed)},
        ]
        check(lookups, call(lookups))


def test_a_table_that_moves_or_changes_its_strides_is_seen(emulated: emulated_gpu.Emulated) -> None:
    parameter = torch.nn.Parameter(torch.randn(12, 12, generator=generator(1)))
    ids = ids_of(12, 4, 2)
    for form in (
        lambda t: t.clone(),
        lambda t: t.t(),
        lambda t: t.t()[:, :6],
        lambda t: t.double(),
    ):
        parameter.data = form(parameter.data)
        lookups = [{"table": parameter, "ids": ids % len(parameter)}]
        check(lookups, call(lookups))


@pytest.mark.parametrize(
    ("dtype", "vectors"), [(F32, {4, 2, 1}), (BF16, {8, 4, 2, 1})], ids=["fp32", "bf16"]
)
def test_alignment_of_start_stride_and_width(
    dtype: torch.dtype, vectors: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    classify = embedding_cuda._class

    def watched(*given: Any) -> embedding_cuda.Class:
        found = classify(*given)
        seen.add(found.vec)
        return found

    monkeypatch.setattr(embedding_cuda, "_class", watched)
    whole = torch.randn(5 * 40, generator=generator(4)).to(dtype)
    with emulated_gpu.serve():
        for first, stride, dim in itertools.product((0, 1, 2, 4), (24, 26, 33), (8, 12, 6, 5)):
            table = whole.as_strided((5, dim), (stride, 1), first)
            lookups = [
                {"table": table, "ids": ids_of(5, 3, 2, seed=first)},
                {"table": table, "ids": ids_of(5, 6, seed=dim), "mode": "none"},
            ]
            check(lookups, call(lookups))
    assert seen == vectors


def test_inputs_with_gaps(emulated: emulated_gpu.Emulated) -> None:
    table, weights = torch.randn(9, 8, generator=generator(1)), torch.randn(12, 2)
    lookups = [
        {"table": table, "ids": ids_of(9, 3, 4).t()},
        {"table": table, "ids": ids_of(9, 12, 2)[:, 1], "offsets": torch.tensor([0, 9, 4, 9])[::2],
         "weights": weights[:, 0]},
        {"table": table, "ids": ids_of(9, 1).expand(5), "mode": "none",
         "offsets": torch.tensor([0, 3])},  # which a gather does not look at
    ]  # fmt: skip
    check(lookups, call(lookups))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_long_bags(emulated: emulated_gpu.Emulated, dtype: torch.dtype) -> None:
    """Summed by their block, beside short ones, whether sizes or offsets tell."""
    g, long = generator(5), embedding_cuda.LONG
    table = torch.randn(50, 20, generator=g).to(dtype)
    starts = torch.tensor([0, 3, 3, long + 3, 2 * long + 2, 2 * long + 9])
    ids = ids_of(50, 4 * long)
    lookups = [
        {"table": table, "ids": ids, "offsets": starts, "mode": "mean", "padding": 7},
        {"table": table, "ids": ids, "offsets": starts,
         "weights": torch.randn(len(ids), generator=g).to(dtype)},
        {"table": table, "ids": ids.reshape(2, -1), "mode": "mean"},
        {"table": table, "ids": ids.reshape(2, -1), "mode": "max"},
    ]  # fmt: skip
    check(lookups, call(lookups))


@pytest.mark.parametrize(
    "table",
    [torch.randn(9, 8, dtype=F64), torch.randn(8, 9).t(), torch.randn(9, 8).to(torch.complex64)],
    ids=["float64", "transposed", "complex"],
)
def test_what_the_kernels_do_not_take_runs_on_torch(
    emulated: emulated_gpu.Emulated, table: Tensor
) -> None:
    ids = ids_of(9, 4)
    lookups = [
        {"table": table, "ids": ids, "mode": "none"},
        {"table": torch.randn(9, 4), "ids": ids, "mode": "none"},
    ]
    outs = call(lookups)
    assert not emulated.launched
    assert all(torch.equal(o, x["table"][ids]) for o, x in zip(outs, lookups, strict=True))


def test_kernels_can_be_switched_off(emulated: emulated_gpu.Emulated) -> None:
    weights = torch.randn(4, 3, requires_grad=True)
    lookups = [{"table": torch.randn(9, 8), "ids": ids_of(9, 4, 3), "weights": weights}]
    with device.use("torch"):
        outs = call(lookups)
        torch.autograd.grad(outs, weights, outs)
    assert not emulated.launched
    check(lookups, outs)


def test_outputs_share_an_allocation_and_nothing_else(emulated: emulated_gpu.Emulated) -> None:
    lookups = [{"table": torch.randn(9, 8), "ids": ids_of(9, n, 2)} for n in (3, 4)]
    first, second = call(lookups)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    before = second.clone()
    first.fill_(7)
    assert second._version == 0 and torch.equal(second, before)
    first, second = BAGS.forward(*arguments(lookups))  # type: ignore[misc]
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


# ---------------------------------------------------------------- ids outside their tables


def spoilt(bad: int) -> list[dict[str, Any]]:
    ids = ids_of(9, 4, 3)
    ids[1, 2] = ids[3, 0] = bad
    table = torch.randn(9, 8, generator=generator(abs(bad)))
    return [
        {"table": table, "ids": ids_of(9, 4, 3), "mode": "max"},
        {"table": table, "ids": ids, "mode": "mean"},
    ]


@pytest.mark.parametrize("bad", [9, -1, 2**40])
def test_bad_ids_are_left_out_and_the_next_call_warns_once(bad: int) -> None:
    lookups, before = spoilt(bad), checked.bad_ids()
    with emulated_gpu.serve():
        out = call(lookups)[1]
        good = [[i for i in row if i != bad] for row in lookups[1]["ids"].tolist()]
        kept = torch.stack([lookups[1]["table"][row].mean(0) for row in good])
        torch.testing.assert_close(out, kept)
        assert checked.bad_ids() == before + 2
        with pytest.warns(RecastWarning) as warned:
            call(lookups)
        assert str(warned[0].message) == (
            "embedding_bags of 2 lookups left out 2 ids outside the table, first at place 5 of"
            " lookup 1 (table 1); recast.checked() or RECAST_CHECKED=1 raises where it happens"
        )
        call(lookups)  # warnings are errors here
    assert checked.bad_ids() == before + 6
    assert checked.since(before)[0].startswith("6 ids and offsets outside their tables")
    assert not checked.since(before + 6)


def test_wrong_offsets_are_cut_and_the_next_call_warns(emulated: emulated_gpu.Emulated) -> None:
    table, ids = torch.randn(9, 8), ids_of(9, 10)
    lookups = [{"table": table, "ids": ids, "offsets": torch.tensor([0, 4, 99])}]
    (out,) = call(lookups)
    torch.testing.assert_close(out, torch.stack([table[ids[:4]].sum(0), table[ids[4:]].sum(0),
                                                 torch.zeros(8)]))  # fmt: skip
    with pytest.warns(RecastWarning, match="2 bags of wrong offsets, first at place 1 of lookup 0"):
        call(lookups)


def test_gradients_leave_bad_ids_out_too(emulated: emulated_gpu.Emulated) -> None:
    g = generator(6)
    ids = ids_of(9, 4, 3)
    ids[1, 2] = 9
    weights = torch.randn(4, 3, generator=g, requires_grad=True)
    table = torch.randn(9, 8, generator=g, requires_grad=True)
    lookups = [
        {"table": table, "ids": ids, "weights": weights},
        {"table": table, "ids": ids, "mode": "max"},
    ]
    outs = call(lookups)
    upstream = [torch.randn(o.shape, generator=g) for o in outs]
    graphed = torch.autograd.grad(outs, (table, weights), upstream, create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        plain = torch.autograd.grad(call(lookups), weights, upstream)[0]
    # The same with a table that has a row of nothing where the ids point to.
    padded = torch.cat([table, torch.full((1, 8), -1e9)]).detach().requires_grad_()
    safe = torch.nn.functional.embedding(ids, padded)
    zero = safe.masked_fill((ids == 9).unsqueeze(2), 0)
    total = (zero * weights.unsqueeze(2)).sum(1), safe.amax(1)
    expected = torch.autograd.grad(total, (padded, weights), upstream)
    torch.testing.assert_close(graphed[0], expected[0][:9])
    torch.testing.assert_close(graphed[1], expected[1])
    torch.testing.assert_close(plain, expected[1])


def test_checked_mode_writes_nothing_and_counts_nothing(emulated: emulated_gpu.Emulated) -> None:
    lookups, before = spoilt(11), checked.bad_ids()
    with checked.checked():
        with pytest.raises(IdError, match=r"id 11 of lookup 1 \(table 1\) is outside its 9 rows"):
            call(lookups)
        with checked.checked(False):
            assert not checked.is_checked()
    assert not checked.is_checked()
    call([lookups[0]])
    assert checked.bad_ids() == before


def test_before_each_replay_what_was_counted_is_told(emulated: emulated_gpu.Emulated) -> None:
    with recording.recording() as recorded:
        call([*spoilt(10), *spoilt(10)])
    with pytest.warns(RecastWarning, match="left out 4 ids outside the table, first at place 5"):
        recorded.prepare()


@pytest.mark.gpu
@pytest.mark.skipif(WHY_NOT is not None, reason=f"GPU: {WHY_NOT}")
def test_a_gpu_counts_in_memory_of_the_host() -> None:
    lookups, before = spoilt(-7), checked.bad_ids()
    on = [{key: x.cuda() if isinstance(x, Tensor) else x for key, x in y.items()} for y in lookups]
    with emulated_gpu.serve():
        wanted = call(lookups)
    got = call(on)
    torch.cuda.synchronize()
    assert checked.bad_ids() == before + 4
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b)
    with pytest.warns(RecastWarning, match="2 ids outside the table, first at place 5 of lookup 1"):
        call(on)
    with checked.checked(), pytest.raises(IdError, match=r"id -7 of lookup 1 \(table 1\)"):
        call(on)


def test_counts_outlive_their_site() -> None:
    before = checked.bad_ids()
    counts = checked.Counts(torch.tensor([3, ~(1 << 40 | 7), 2, ~9]), "a site", (4, 5))
    assert checked.bad_ids() == before + 5
    assert counts.sentence().startswith(
        "a site left out 3 ids outside the table, first at place 7 of lookup 1 (table 5) and 2 bags"
        " of wrong offsets, first at place 9 of lookup 0 (table 4);"
    )
    del counts
    assert checked.bad_ids() == before + 5


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False)])
def test_checked_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("RECAST_CHECKED", value)
    assert runpy.run_path(checked.__file__)["is_checked"]() is on


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_narrow_outputs_are_rounded_once_and_their_gradients_taken(
    emulated: emulated_gpu.Emulated, dtype: torch.dtype
) -> None:
    g = generator(7)
    tables = [torch.randn(9, 16, generator=g), torch.randn(9, 8, generator=g).bfloat16()]
    tables = [t.requires_grad_() for t in tables]
    weights = torch.randn(5, 4, generator=g, requires_grad=True)
    lookups = [
        {"table": tables[0], "ids": ids_of(9, 5, 4), "weights": weights},
        {"table": tables[0], "ids": ids_of(9, 5, 4, seed=2), "mode": "max"},
        {"table": tables[1], "ids": ids_of(9, 5, 4), "mode": "mean"},
    ]
    with torch.autocast("cpu", dtype):
        wide, narrow = call(lookups), call(lookups, True)
    assert [o.dtype for o in wide] == [F32, F32, BF16]
    assert [o.dtype for o in narrow] == [dtype, dtype, BF16]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(wide, narrow, strict=True))
    upstream = [torch.randn(o.shape, generator=g).to(o.dtype) for o in narrow]
    leaves = (*tables, weights)
    got = torch.autograd.grad(narrow, leaves, upstream)
    cast = [o.to(n.dtype) for o, n in zip(wide, narrow, strict=True)]
    wanted = torch.autograd.grad(cast, leaves, upstream)
    for a, b, leaf in zip(got, wanted, leaves, strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a + 0, b + 0)
    assert isinstance(got[0], RowGrad) and got[0].cell.full is None


def test_narrow_changes_nothing_without_autocast_and_on_a_cpu(
    emulated: emulated_gpu.Emulated,
) -> None:
    lookups = [{"table": torch.randn(9, 16), "ids": ids_of(9, 5, 4)}]
    assert call(lookups, True)[0].dtype is F32
    with torch.autocast("cpu", BF16), gpu.emulate(None):  # type: ignore[arg-type]
        assert call(lookups, True)[0].dtype is F32


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [1, 20, 70])
def test_gradient_of_sample_weights(
    emulated: emulated_gpu.Emulated, dim: int, dtype: torch.dtype
) -> None:
    """One launch a lookup; ids behind the last end and padding get none."""
    g = generator(8)
    table = torch.randn(9, dim, generator=g).to(dtype)
    weights = [torch.randn(14, generator=g).to(dtype).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 0, 5, 12], dtype=torch.int32)
    lookups = [
        {"table": table, "ids": ids_of(9, 14), "offsets": ends, "weights": weights[0],
         "padding": 2, "last": True},
        {"table": table, "ids": ids_of(9, 14, dtype=torch.int32), "weights": weights[1],
         "offsets": ends},
        {"table": table, "ids": ids_of(9, 7, 2), "weights": weights[2].reshape(7, 2)},
    ]  # fmt: skip
    outs = call(lookups)
    upstream = [torch.randn(o.shape, generator=g).to(dtype) for o in outs]
    emulated.launched.clear()
    got = torch.autograd.grad(outs, weights, upstream)
    assert emulated.launched == [WEIGHT_GRAD] * 3
    for x, up, a in zip(lookups, upstream, got, strict=True):
        ids, offsets = x["ids"].reshape(-1), x.get("offsets")
        bag = torch.arange(14) // 2
        if offsets is not None:
            bag = torch.searchsorted(offsets.long(), torch.arange(14), right=True) - 1
        dead = (bag >= len(up)) | (ids == x.get("padding", -1))
        rows, grads = x["table"][ids.long()], up[bag.clamp(max=len(up) - 1)]
        plain = (rows * grads).sum(1).masked_fill(dead, 0)
        truth = (rows.double() * grads.double()).sum(1).masked_fill(dead, 0)
        assert excess(a, plain, truth, scale=float((rows * grads).abs().max())) <= 1


def test_maxima_give_gradients_to_winners_only(emulated: emulated_gpu.Emulated) -> None:
    """No row is touched that won nothing; of an id that stands twice in a bag, one place counts."""
    table = torch.randn(20, 6, generator=generator(9), requires_grad=True)
    ids = torch.tensor([[3, 3, 5], [7, 7, 7], [19, 0, 4]])
    (out,) = call([{"table": table, "ids": ids, "mode": "max"}])
    upstream = torch.randn(out.shape, generator=generator(1))
    (grad,) = torch.autograd.grad(out, table, upstream)
    winners = table.detach()[ids].argmax(1)  # (bags, dim)
    assert isinstance(grad, RowGrad)
    assert set(grad.merged()[0].tolist()) == set(ids.gather(1, winners).reshape(-1).tolist())
    expected = torch.zeros(20, 6)
    for b, c in itertools.product(range(3), range(6)):
        expected[ids[b, winners[b, c]], c] += upstream[b, c]
    assert torch.equal(grad + 0, expected)


def test_gradients_are_added_up_over_passes(emulated: emulated_gpu.Emulated) -> None:
    g = generator(10)
    table = torch.randn(9, 8, generator=g, requires_grad=True)
    total = torch.zeros(9, 8)
    for seed in range(3):
        lookups = [
            {"table": table, "ids": ids_of(9, 4, 2, seed=seed), "mode": mode}
            for mode in ("sum", "max", "mean")
        ]
        outs = call(lookups)
        upstream = [torch.randn(o.shape, generator=g) for o in outs]
        torch.autograd.backward(outs, upstream)
        plain = BAGS.reference(*arguments(lookups))
        total += torch.autograd.grad(plain, table, upstream, allow_unused=True)[0]
    assert isinstance(table.grad, RowGrad) and table.grad.cell.full is None
    torch.testing.assert_close(table.grad + 0, total)


@pytest.mark.parametrize("sample", BAGS.samples(), ids=lambda sample: sample.label)
def test_forms_of_the_gradient(emulated: emulated_gpu.Emulated, sample: Sample) -> None:
    """Rows, differentiable dense and sparse matrices are one gradient; padding stays out of all."""
    *tensors, table, mode, padding, last, _ = copy.deepcopy(sample.args)
    leaves = [t.requires_grad_() for t in (*tensors[0], *tensors[3]) if t is not None]
    layouts = [
        [*tensors, table, mode, padding, last, [sparse and kind != "max" for kind in mode]]
        for sparse in (False, True)
    ]
    outs = BAGS.target(*layouts[0])
    upstream = [torch.randn(o.shape, generator=generator(2)) for o in outs]
    given: Any = {"allow_unused": True}
    rows = torch.autograd.grad(outs, leaves, upstream, **given)
    graphed = torch.autograd.grad(
        BAGS.target(*layouts[0]), leaves, upstream, create_graph=True, **given
    )
    sparse = torch.autograd.grad(BAGS.target(*layouts[1]), leaves, upstream, **given)
    for a, b, c in zip(rows, graphed, sparse, strict=True):
        c = c.to_dense() if c.is_sparse else c
        torch.testing.assert_close(b, a + 0)
        torch.testing.assert_close(c + 0, a + 0)


def test_the_batch_is_the_users_again_after_backward(emulated: emulated_gpu.Emulated) -> None:
    """Ids, offsets and weights are copied, all at once, those that lookups share once."""
    g = generator(12)
    tables = [torch.randn(9, dim, generator=g, requires_grad=True) for dim in (8, 4)]
    ids, starts = ids_of(9, 12, dtype=torch.int32), torch.tensor([0, 2, 2, 9])
    weights = torch.randn(12, generator=g)
    lookups = [
        {"table": tables[0], "ids": ids, "offsets": starts, "weights": weights},
        {"table": tables[1], "ids": ids, "offsets": starts, "mode": "mean"},
    ]
    outs = call(lookups)
    upstream = [torch.randn(o.shape, generator=g) for o in outs]
    wanted = torch.autograd.grad(BAGS.reference(*arguments(lookups)), tables, upstream)
    got = torch.autograd.grad(outs, tables, upstream)
    for tensor in (ids, starts, weights):
        tensor.zero_()
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a + 0, b)


WAITS = {
    f"aten::{name}"
    for name in (
        "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select",
        "_unique2", "unique_consecutive",
    )
}  # fmt: skip


@pytest.mark.parametrize("graphed", [False, True], ids=["rows", "create_graph"])
def test_nothing_waits_for_the_device(emulated: emulated_gpu.Emulated, graphed: bool) -> None:
    """None of torch's calls that read a value or a count is made, forward or backward."""
    g = generator(11)
    lookups = [x for x in mixed() if x["table"].dtype is F32]
    weights = torch.randn(9, generator=g, requires_grad=True)
    starts = torch.tensor([0, 2, 2, 7])
    lookups.append({"table": torch.randn(11, 16), "ids": ids_of(11, 9), "weights": weights,
                    "offsets": starts, "padding": 1})  # fmt: skip
    tables = [x["table"].requires_grad_() for x in lookups]
    leaves = [*{id(t): t for t in tables}.values(), weights]
    upstream = [torch.randn(o.shape, generator=g) for o in call(lookups)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as seen:
        torch.autograd.grad(call(lookups), leaves, upstream, create_graph=graphed)
    names = {event.name for event in seen.events()}
    assert any(name.startswith("EmbeddingBagsBackward") for name in names)
    assert not names & WAITS


# ---------------------------------------------------------------- models


class Asked(torch.nn.Linear):
    """Notes whether ids are checked while it runs."""

    seen: list[bool]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(checked.is_checked())
        return super().forward(x)


def test_a_diff_checks_ids() -> None:
    model = Asked(3, 2)
    model.seen = []
    assert recast.diff(model, model, torch.randn(4, 3), steps=1).ok
    assert model.seen and all(model.seen)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("bags", "dlrm", "packed")))
        for name in CASES
    ],
)
def test_models_train_to_the_same_numbers(emulated: emulated_gpu.Emulated, name: str) -> None:
    """Outputs, gradients, and parameters after three steps; dropout off, whose masks are a GPU's
    own.
    """
    model, batches, loss = build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "p") and isinstance(module.p, float):
            module.p = 0.0
    fast = recast.optimize(model, example=batches)
    report = recast.diff(model, fast, batches, loss=loss)
    assert report.ok, report
    assert FORWARD in emulated.launched


def trained(model: torch.nn.Module, optimizer: Any, batches: list[Any], loss: Any) -> list[Tensor]:
    """The parameters after four steps."""
    for step in range(4):
        optimizer.zero_grad()
        loss(model(*batches[step % len(batches)])).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["dlrm", "bags"])
def test_training_with_a_fused_optimizer(
    emulated: emulated_gpu.Emulated, name: str, maker: str
) -> None:
    model, batches, loss = build(name)
    wide = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)
    fast, optimizer = recast.optimize(model, MAKERS[maker](model.parameters()), example=batches)
    ours = trained(fast, optimizer, batches, loss)
    theirs = trained(plain, MAKERS[maker](plain.parameters()), batches, loss)
    doubled = [torch.utils._pytree.tree_map(widened, batch) for batch in batches]
    truth = trained(wide, MAKERS[maker](wide.parameters()), doubled, loss)
    assert {FORWARD, "row_update"} <= set(emulated.launched)
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert excess(a, b, c, scale=1.0) <= 1
