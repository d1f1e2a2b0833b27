"""One call of the CPU kernels with a fault that a sanitizer must report, or without any.

    python planted_faults.py overrun

The faults are in what the kernels are told: the kernels themselves are those of every call.
"""

from __future__ import annotations

import sys

import torch

from recast.runtime import device

_LEFT_OUT = 64  # bytes: as many as belong to nobody behind a block


def overrun() -> None:
    """The result has less memory than its shape says."""
    out = torch.empty(3, 300)
    out.untyped_storage().resize_(out.nbytes - _LEFT_OUT)
    params = [torch.randn(300, 40), torch.randn(300)]
    device.extension().small_mlp(torch.randn(3, 40), params, "l", out, 1)


def overread() -> None:
    """A table has less memory than its shape says, and the last row is looked up."""
    table = torch.randn(50, 32)
    table.untyped_storage().resize_(table.nbytes - _LEFT_OUT)
    ids = torch.tensor([1, 49])
    cut = [False]
    torch.ops.recast.embedding_bags(
        [table], [ids], [None], [None], [0], ["none"], [None], cut, cut
    )  # fmt: skip


def overflow() -> None:
    """The steps of all sequences together, a negative number, do not fit into 64 bits."""
    out, none, layout = torch.empty(1, 1), None, (None, None, 8, -(2**62), True, True)
    device.extension().gru_forward(
        layout, none, none, none, none, True, 0.0, out, none, out, out, 1
    )  # fmt: skip


def race() -> None:
    """Every row has the same place, which several threads write."""
    ids, rows, slab = torch.arange(4000), torch.zeros(4000, dtype=torch.int64), torch.empty(1, 40)
    device.extension().initial_rows(ids, rows, slab, 1, 2, True, 0.0, 1.0, 2)


def clean() -> None:
    """The same calls as they should be."""
    out = torch.empty(3, 300)
    params = [torch.randn(300, 40), torch.randn(300)]
    assert device.extension().small_mlp(torch.randn(3, 40), params, "l", out, 1)
    ids = torch.arange(4000)
    slab = torch.empty(4000, 40)
    device.extension().initial_rows(ids, ids, slab, 1, 2, True, 0.0, 1.0, 2)


FAULTS = {f.__name__: f for f in (overrun, overread, overflow, race, clean)}


if __name__ == "__main__":
    if device.extension() is None:
        sys.exit(f"no kernels: {device.why_missing()}")
    FAULTS[sys.argv[1]]()
    print("came to its end")
