"""Compares what every rank has with one process, with float64 as the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recast.runtime import tolerances

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)


def compare(results: list[Any], plain: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Compare everything of every rank with its part of one process's results."""
    ranks = len(results)
    assert {k for r in results for k in r[0]} == set(plain), "the same parameters have gradients"
    for key, wanted in plain.items():
        if key.startswith("output"):
            pairs = [(torch.cat([r[0][key] for r in results]), wanted, truth[key])]
        else:
            name = key.removeprefix("grad ").partition(" [")[0]
            pairs = []
            for found, parts, *_ in results:
                cut = parts[name].local if name in parts and wanted.dim() else lambda t: t
                pairs.append((found[key].to_dense(), cut(wanted), cut(truth[key])))
        for rank, (got, own, true) in enumerate(pairs):
            off = tolerances.excess(got, own, true, scale=float(truth[key].abs().max()))
            assert off <= tolerances.CHAIN, f"{key} of rank {rank} of {ranks}: {off:.1f}"
