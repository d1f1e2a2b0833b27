"""The lookups of one matrix done sample by sample: bit for bit the results of separate lookups, and
how many of them a launch and a block take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_bags import BF16, F16, F32, generator, ids_of
from torch import Tensor

from recast.errors import RecastWarning
from recast.runtime import OPS, checked
from recast.runtime.embedding import by_samples
from recast.runtime.embedding.call import call_of
from recast.runtime.embedding.columns import columns_of

SAMPLES, ONE_BY_ONE = "embedding_samples", "embedding_forward"
CAT = OPS["embedding_cat"]

Lookup = dict[str, Any]


def lookups(rows: int, dtype: torch.dtype, dims: Sequence[int]) -> list[Lookup]:
    """Of one id and of several, pooled and gathered, of 64 and 32 bits, with padding."""
    g = generator(rows)
    tables = [torch.randn(9 + d, d, generator=g).to(dtype) for d in dims]
    kinds: list[tuple[str, int, torch.dtype, int | None]] = [
        ("sum", 1, torch.int64, None), ("mean", 5, torch.int32, 3), ("none", 0, torch.int32, None),
        ("sum", 9, torch.int64, None), ("mean", 1, torch.int64, 2), ("sum", 2, torch.int32, 0),
    ]  # fmt: skip
    found = []
    for k, (mode, fixed, ints, padding) in enumerate(kinds):
        table = tables[k % len(tables)]
        shape = (rows + k % 2, fixed) if fixed else (rows + k % 2,)
        ids = ids_of(len(table), *shape, seed=k, dtype=ints)[k % 2 :]  # also at odd addresses
        found.append({"table": table, "ids": ids, "mode": mode, "padding": padding})
    return found


def arguments(given: Sequence[Lookup], others: Sequence[Tensor], order: list[int]) -> list[Any]:
    n = len(given)
    columns = [[x.get(key) for x in given] for key in ("table", "ids", "offsets", "weights")]
    rest = [[*range(n)], [x["mode"] for x in given], [x.get("padding") for x in given]]
    return [*columns, *rest, [False] * n, [False] * n, list(others), order]


def rows_of(lookup: Lookup) -> Tensor:
    """The result of one lookup in float32, rows added one by one."""
    table, ids = lookup["table"], lookup["ids"].reshape(len(lookup["ids"]), -1)
    counts = (ids != lookup["padding"]) if lookup["padding"] is not None else ids >= 0
    total = torch.zeros(len(ids), table.shape[1])
    for k in range(ids.shape[1]):
        total += table[ids[:, k]].float() * counts[:, k : k + 1]
    divisor = counts.sum(1, keepdim=True).clamp(min=1)
    return total / divisor if lookup["mode"] == "mean" else total


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [(F32, (8, 16)), (F32, (6, 2)), (F32, (3, 1)), (F16, (4, 12)), (BF16, (8, 16)), (BF16, (6, 2))],
    ids=str,
)
def test_rows_are_added_one_by_one(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Beyond the end of the last block, with other tensors before and after, to fp32 and bf16."""
    for rows in (1, 203):
        given = lookups(rows, dtype, dims)
        others = [torch.randn(rows, 4), torch.randn(rows, 3)]
        args = arguments(given, others, [-1, 5, 0, 1, 2, -2, 3, 4])
        found = [rows_of(x) for x in given]
        wanted = torch.cat([others[0], found[5], *found[:3], others[1], *found[3:5]], 1)
        for cast in (False, True):
            with (
                emulated_gpu.serve(workers=2, seed=rows) as machine,
                torch.autocast("cpu", BF16, enabled=cast),
            ):
                (out,) = CAT.target(*args, True, True)
            assert {*machine.launched} == {SAMPLES}
            assert out.dtype == (BF16 if cast else F32) and torch.equal(out, wanted.to(out.dtype))


def test_what_is_taken(emulated: emulated_gpu.Emulated) -> None:
    """Not maxima, bags of given starts or with weights, and nothing that is alone or apart."""
    given = lookups(40, F32, (8,))
    given[0]["mode"] = "max"
    given[2] |= {"ids": ids_of(17, 90), "mode": "sum", "offsets": torch.arange(0, 80, 2)}
    given[3]["weights"] = torch.randn(40, 9)
    args = arguments(given, [], [0, 1, 2, 3, 4, 5])
    (out,) = CAT.target(*args)
    assert emulated.launched.count(SAMPLES) == 1 and emulated.launched.count(ONE_BY_ONE) == 3
    torch.testing.assert_close(out, CAT.reference(*args)[0])
    emulated.launched.clear()
    args = arguments(given, [], [4, 2])
    for a, b in zip(CAT.target(*args), CAT.reference(*args), strict=True):
        torch.testing.assert_close(a, b)
    assert SAMPLES not in emulated.launched


@pytest.mark.parametrize(
    ("bad", "ints"),
    [(-1, torch.int32), (2**31 - 1, torch.int32), (9, torch.int64), (-(2**63), torch.int64),
     (2**32 + 1, torch.int64)],
    ids=str,
)  # fmt: skip
def test_ids_outside_the_tables(
    emulated: emulated_gpu.Emulated, bad: int, ints: torch.dtype
) -> None:
    """Left out, and each counted once: not again for every piece of its row."""
    table, before = torch.randn(9, 8, generator=generator(2)), checked.bad_ids()
    ids = [ids_of(9, *shape, dtype=ints) for shape in ((60, 1), (60, 3), (60,))]
    good = [torch.cat([table, torch.zeros(1, 8)])[i] for i in ids]
    ids[1][59, 2] = ids[1][7, 1] = ids[2][33] = bad
    good[1][59, 2] = good[1][7, 1] = good[2][33] = 0
    counts = torch.full((60, 1), 3.0)
    counts[59] = counts[7] = 2
    modes = ["sum", "mean", "none"]
    given = [{"table": table, "ids": i, "mode": m} for i, m in zip(ids, modes, strict=True)]
    args = arguments(given, [], [0, 1, 2])
    (out,) = CAT.target(*args)
    assert emulated.launched == [SAMPLES]
    wanted = torch.cat([good[0].sum(1), good[1].sum(1) / counts, good[2]], 1)
    torch.testing.assert_close(out, wanted)
    assert checked.bad_ids() == before + 3
    with pytest.warns(RecastWarning, match="left out 3 ids .*, first at place 22 of lookup 1 "):
        CAT.target(*args)


def groups(many: int, dim: int, ids: int, fixed: int = 1) -> list[by_samples.Group]:
    """Those of ``many`` lookups of one id, and of ``ids`` of ``fixed`` ids."""
    n = many + ids
    tables = [torch.empty(5, dim)] * n
    given = [ids_of(5, 3, 1)] * many + [ids_of(5, 3, fixed)] * ids
    none, off = [None] * n, [False] * n
    call = call_of(tables, given, none, none, [*range(n)], ["sum"] * n, none, off, off)
    call.columns = columns_of(tables, [], [*range(n)], None, False)
    return by_samples.groups(call, [by_samples.Kind(0, 0, 4)] * n)


def test_as_many_lookups_as_a_launch_has_room_for() -> None:
    """All of them are in some launch; a block uses no more shared memory than the default."""
    cases = (55, 16, 0, 1), (55, 16, 3, 10), (700, 128, 90, 30), (5, 8, 1, 128), (20, 8192, 0, 1)
    for given in cases:
        found = groups(*given)
        assert sorted(k for group in found for k in group.lookups) == [*range(given[0] + given[2])]
        for group in found:
            sizes = [1 if k < given[0] else given[3] for k in group.lookups]
            assert sizes == sorted(sizes, reverse=True)
            assert group.ids == sum(sizes) and group.pieces == len(sizes) * given[1] // 4
            assert group.pooled == sum(n > 1 for n in sizes) * given[1] // 4
            assert group.before[-1] >> 32 == group.pieces - given[1] // 4
            assert group.before[-1] & 0xFFFFFFFF == group.ids - sizes[-1]
            for samples in (0, 1, 100, 10**4, 10**6):
                bits = group.bits(samples, 132)
                assert 2 <= bits <= 6 and group.shared(bits) < 48 << 10
    assert len(groups(700, 128, 90, 30)) > 1 and not groups(1, 16, 0)


def test_samples_of_a_block() -> None:
    """Fewer if a sample has much to read, or if there would be too few blocks."""
    few, many = groups(26, 16, 0)[0], groups(70, 16, 9, 30)[0]
    assert few.bits(1 << 20, 132) == 6 and many.bits(1 << 20, 132) == 3
    assert few.bits(4 * 132 << 4, 132) == 4 and few.bits(100, 132) == 2
