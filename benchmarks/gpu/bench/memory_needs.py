"""How much GPU memory a case needs, from its specification, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from gpu.bench.synthetic_models import Config
from gpu.harness.items import Skip

Needs = Mapping[str, float]  # bytes: of tables, state and batches, then of each way beyond those

SHARED = "tables", "state", "batches"
KEPT_BACK = 1.5e9  # bytes of the context, of libraries, and lost between blocks


def of_synthetic(config: Config, size: int, batches: int, width: int) -> dict[str, float]:
    """Of Tiny or Small with Adagrad; ``width``: bytes of a number of the lookups' results."""
    tables = 4.0 * config.numbers()
    ids = size * 8.0 * sum(t.many * sum(t.ids) for t in config.tables)
    outputs = size * sum(t.many * t.dim * len(t.ids) for t in config.tables)
    each = size * 4.0 * sum(t.many * t.dim * sum(t.ids) for t in config.tables)
    largest = max(4.0 * t.rows * t.dim for t in config.tables)
    return {
        "tables": tables,
        "state": tables,
        "batches": batches * ids,
        # Results and their gradient, both also in the recording's own memory; ids copied there, and
        # sorted with their places, there and back.
        "recast": 4.0 * outputs * width + 6 * ids,
        # A row of gradient for each id, sorted, summed.
        "eager sparse": 4.0 * outputs * 4 + 3 * each,
        "compiled, sparse": 4.0 * outputs * 4 + 3 * each,
        # A gradient as large as its table; of one table at a time, what the optimizer makes.
        "torch.compile": 4.0 * outputs * 4 + tables + 2 * largest,
    }


def of_model(model: nn.Module, states: int, ids: int) -> dict[str, float]:
    """Of any model with ``states`` numbers of the optimizer a weight and so many ``ids``."""
    sizes = [4.0 * p.numel() for p in model.parameters()]
    return {
        "tables": sum(sizes),
        "state": states * sum(sizes),
        "batches": 80.0 * ids,
        "torch.compile": sum(sizes) + 2 * max(sizes),
    }


def room(
    needs: Needs, device: torch.device, total: float | None = None
) -> Callable[[str], str | None]:
    """Of a variant's name: why it does not fit, or None. ``total``: bytes of the device."""
    if total is None:
        total = (
            float(torch.cuda.get_device_properties(device).total_memory)
            if device.type == "cuda"
            else float("inf")
        )
    most = total - KEPT_BACK

    def why(name: str) -> str | None:
        own = next((v for k, v in needs.items() if name.startswith(k)), 0.0)
        wanted = sum(needs[k] for k in SHARED) + own
        if wanted <= most:
            return None
        return f"does not fit: it needs {wanted / 1e9:.1f} GB, of {total / 1e9:.1f}"

    return why


def refuse(why: str | None) -> None:
    """Raises Skip with ``why``."""
    if why is not None:
        raise Skip(why)
