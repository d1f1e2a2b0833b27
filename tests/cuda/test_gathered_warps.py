"""Rows that a warp looks up for its samples, on the emulator: bit for bit the results of separate
lookups that are multiplied afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime import checked
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.interactions import dot_cuda, dot_warps, gathered_cuda
from recast.runtime.interactions.gathered_dots import gathered_dots, parts_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BATCH = 21


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The sources of the kernels that are launched; each warp has several samples."""
    found: list[str] = []
    monkeypatch.setattr(dot_warps, "_BLOCKS", 1)
    with emulated_gpu.serve(workers=2, seed=5) as gpu:
        launch = gpu.launch

        def noted(kernel: Kernel, *rest: Any) -> None:
            found.append(Path(kernel.program.source).name)
            launch(kernel, *rest)

        monkeypatch.setattr(gpu, "launch", noted)
        yield found


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(dtype: torch.dtype, given: torch.dtype, dim: int, mode: str = "sum") -> list[Any]:
    """Bags cut by offsets, of one id and of none to three; lookups without bags; a given row."""
    g = torch.Generator().manual_seed(5)
    weights = [rand(20, dim, seed=1).to(dtype), rand(9, dim, seed=2).to(dtype)]
    counts = torch.randint(0, 4, (BATCH,), generator=g)
    cuts = [torch.arange(BATCH), (counts.cumsum(0) - counts).int(), None, None]
    ids = [torch.randint(20, (BATCH,), generator=g), torch.randint(9, (int(counts.sum()),)).int(),
           torch.randint(20, (BATCH,), generator=g), torch.randint(9, (BATCH, 1))]  # fmt: skip
    x = rand(BATCH, dim, seed=3).to(given)
    li, lj = torch.tril_indices(5, 5, -1)
    lookups = [weights, ids, cuts, [0, 1, 0, 1], [mode, mode, "none", "sum"],
               [3, None, None, 4], [False] * 4, True]  # fmt: skip
    return [*lookups, [x], [2, -1, 0, 1, 3], x, li, lj, 0]


def both(args: list[Any], cast: torch.dtype | None) -> list[list[Tensor]]:
    """Results and gradients of the rows, looked up inside and apart."""
    wanted, found = [t.requires_grad_() for t in (*args[0], *args[8])], []
    with torch.autocast("cpu", cast or BF16, enabled=cast is not None):
        for gathered in (True, False):
            if gathered:
                out = gathered_dots.target(*args)
            else:
                parts = parts_of(*args)
                rows = torch.ops.recast.embedding_bags(*parts.lookup)
                out = torch.ops.recast.dot_interaction(*parts.interact(rows))
            upstream = torch.zeros(BATCH, 64, dtype=out.dtype)[:, : out.shape[1]]
            upstream.copy_(rand(*out.shape, seed=9))
            grads = torch.autograd.grad(out, wanted, upstream)
            found.append([out, *(g + 0 for g in grads)])
    return found


@pytest.mark.parametrize(
    ("dtype", "dim", "cast"), [(F32, 16, BF16), (BF16, 16, None), (F32, 48, F16), (F32, 32, None)]
)
def test_the_bits_of_lookups_apart(
    sources: list[str], dtype: torch.dtype, dim: int, cast: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """float32 as TF32, where nothing is cast."""
    for module in (dot_cuda, gathered_cuda):
        monkeypatch.setattr(module, "allows_tf32", lambda: True)
    args = arguments(dtype, cast or dtype, dim, "mean" if dim == 48 else "sum")
    ours, apart = both(args, cast)
    assert sources[:2] == ["dot_warps_gathered.cu"] * 2
    for a, b in zip(ours, apart, strict=True):
        assert torch.equal(a, b)


def test_what_is_wrong_is_left_out_and_told(sources: list[str]) -> None:
    args, before = arguments(F32, BF16, 16), checked.bad_ids()
    args[1][0][7] = 20  # of the last samples of their warps too
    args[1][2][20] = -1
    args[1][1][2] = 2**31 - 1
    args[2][1][9] = 1000
    for a, b in zip(*both(args, BF16), strict=True):
        assert torch.equal(a, b)
    assert checked.bad_ids() - before == 2 * (3 + 2)  # one bag ends there, and one begins
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        both(args, BF16)
    ours, apart = (str(w.message).partition(" of 4 lookups left out ")[2] for w in heard)
    assert ours == apart
    assert ours.startswith("3 ids outside the table, first at place 7 of lookup 0 (table 0)")
