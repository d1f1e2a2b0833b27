"""Makes every allocation of every kernel fail, one after the other, and prints what became of it.

Runs with ``failing_new.cpp`` loaded before Python. For each call: how many times it ran, and
whether an allocation within a parallel loop failed. Each failure must be a MemoryError, and the
call right as soon as nothing fails.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from threaded_calls import CALLS, Call
from torch import Tensor

from recast.runtime import device
from recast.runtime.mlp import mlp
from recast.runtime.rows.grad import row_grad
from recast.runtime.rows.pieces import Piece
from recast.runtime.rows.update import Update, apply

MOST = 60  # allocations of one call
ALIKE = ("step sgd", "step adagrad", "step adam", "step of halves")  # they allocate as the others


def starve(hook: Any, make: Callable[[], Call]) -> tuple[int, bool]:
    """Run a call until no allocation is left to fail."""
    path = str(device.extension().__file__).encode()
    in_parallel = False
    for count in range(MOST):
        call = make()
        hook.fail_after(path, count)
        try:
            results = call()
            raised = False
        except MemoryError:
            raised = True
        failed, parallel = hook.stop_failing(0), hook.stop_failing(1)
        in_parallel = in_parallel or parallel > 0
        assert raised == (failed > 0)
        if not raised:
            right = make()()
            for a, b in zip(results, right, strict=True):
                assert torch.equal(a, b)
            return count + 1, in_parallel
    raise AssertionError(f"a call that still fails after {MOST} allocations")


def step_is_whole_or_not_at_all(hook: Any) -> int:
    """How many allocations failed during a step, none of which may have changed a row."""
    path, failures = str(device.extension().__file__).encode(), 0
    for count in range(MOST):
        tables = [torch.ones(200, 300) for _ in range(2)]
        updates = [_update(table) for table in tables]
        hook.fail_after(path, count)
        try:
            apply(updates)
        except MemoryError:
            failures += 1
            hook.stop_failing(0)
            for update, table in zip(updates, tables, strict=True):
                assert (table == 1).all() and (update.states[0] == 1).all()
            continue
        hook.stop_failing(0)
        assert all((table != 1).any() for table in tables)
        return failures
    raise AssertionError(f"a step that still fails after {MOST} allocations")


def _update(weight: Tensor) -> Update:
    piece = Piece(torch.arange(200), torch.ones(200, 300), None, 1, None, False, None, None)
    grad = row_grad(weight.shape, weight.dtype, weight.device, [piece])
    return Update("row_wise_adagrad", weight, grad, (torch.ones(200),), lr=0.1)


def a_table_knows_its_rows(hook: Any) -> int:
    """How many allocations failed while ids got rows; each row that was given counts."""
    path, failures = str(device.extension().__file__).encode(), 0
    ids, rows = torch.arange(1, 5001), torch.empty(5000, dtype=torch.int64)
    for count in range(MOST):
        table = device.extension().IdTable(9000, 1, "lru", 1, 0)
        hook.fail_after(path, count)
        try:
            table.find_or_insert(ids, None, rows, 1)
        except MemoryError:
            failures += 1
            hook.stop_failing(0)
            table.find(ids, rows, 1)
            assert len(table) == int((rows >= 0).sum())
            continue
        hook.stop_failing(0)
        assert len(table) == 5000
        return failures
    raise AssertionError(f"a table that still fails after {MOST} allocations")


def main() -> None:
    torch.set_num_threads(2)
    mlp.FUSED_FROM = 0.0
    hook = ctypes.CDLL(sys.argv[1])
    found: dict[str, Any] = {}
    with device.use(device.extension().isa()):  # no call is left to torch because it is small
        for name, make in CALLS.items():
            if name not in ALIKE:
                found[name] = starve(hook, make)
    found["whole step"] = step_is_whole_or_not_at_all(hook)
    found["ids"] = a_table_knows_its_rows(hook)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
