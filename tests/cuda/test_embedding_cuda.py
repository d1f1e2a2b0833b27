"""The host code of ``embedding_bags`` for a GPU, run on the emulator.

Every sample of the op runs there in ``tests/ops``; here is what only a GPU has: classes of lookups,
alignment, long bags; ids that are counted instead of refused in ``test_embedding_bad_ids.py``,
gradients and models in ``test_embedding_training_cuda.py``.
"""

from __future__ import annotations

import itertools
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_bags import (
    BAGS,
    BF16,
    F32,
    F64,
    FORWARD,
    arguments,
    call,
    check,
    generator,
    ids_of,
    mixed,
)
from torch import Tensor

from recast.runtime import device
from recast.runtime.embedding import cuda_classes


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
    classify = cuda_classes.class_of

    def watched(*given: Any) -> cuda_classes.LookupClass:
        found = classify(*given)
        seen.add(found.vec)
        return found

    monkeypatch.setattr(cuda_classes, "class_of", watched)
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
    g, long = generator(5), cuda_classes.LONG
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
