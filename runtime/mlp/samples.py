"""Chains on which the op ``mlp`` is tested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.runtime.op import Sample


def samples() -> list[Sample]:
    """Every step, and the orders found in public models; odd sizes, empty batch, 3-d, eval."""
    g = torch.Generator().manual_seed(17)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def make(label: str, x: Tensor, *layers: Any, train: bool = True) -> Sample:
        """``layers``: widths stand for linears, strings for the others."""
        params: list[Tensor | None] = []
        stats: list[Tensor | None] = []
        numbers: list[float | None] = []
        steps, flags, width = [], [], x.shape[-1]
        for layer in layers:
            name, *options = layer if isinstance(layer, tuple) else (layer,)
            if isinstance(name, int):
                steps.append("linear")
                params += [rand(name, width) / width**0.5, None if options else rand(name)]
                width = name
                continue
            steps.append(name)
            if name == "batch_norm":
                given = dict(zip(("plain", "momentum", "tracks"), options, strict=False))
                plain, tracks = given.get("plain", False), given.get("tracks", True)
                momentum = given.get("momentum", 0.1)
                params += [None, None] if plain else [rand(width), rand(width)]
                count = torch.tensor(3)
                stats += [rand(width), rand(width).abs() + 0.5, count] if tracks else [None] * 3
                numbers += [momentum, 1e-5]
                flags.append(train)
            elif name == "dropout":
                numbers.append(*options)
                flags.append(train)
            elif name == "prelu":
                params.append(rand(width if options else 1).abs())
            elif name in ("leaky_relu", "elu"):
                numbers.append(*options)
        return Sample(label, (x, params, stats, steps, numbers, flags))

    x, drop = rand(6, 5), ("dropout", 0.4)
    return [
        make("linear", x, 7),
        make("linear no bias", x, (7, False)),
        make("dlrm bottom", x, 9, "relu", 4, "relu", 3, "relu"),
        make("dlrm top", x, 9, "relu", 4, "relu", 1, "sigmoid"),
        make("norm relu drop", x, 9, "batch_norm", "relu", drop, 4, "batch_norm", "relu", drop, 1),
        make("norm relu drop eval", x, 9, "batch_norm", "relu", drop, 4, "relu", drop, train=False),
        make("relu norm drop", x, 9, "relu", "batch_norm", drop, 4, "relu", drop, "batch_norm"),
        make("drop first", x, drop, 4, drop, "relu", 3, "sigmoid", drop),
        make("tanh twice", x, 4, "tanh", "tanh", "relu", "relu", 3),
        make("relu first", x, "relu", 4, "relu", "sigmoid"),
        make("activation alone", x, "relu", drop),
        make("dropout in eval alone", x, drop, train=False),
        make("dropout of all", x, 4, "relu", ("dropout", 1.0), 3),
        make("smooth", x, 8, "gelu", 7, "silu", 6, ("elu", 0.7), 5, ("leaky_relu", 0.2), 3, "tanh"),
        make("negative slopes", x, 8, ("elu", -0.5), 5, ("leaky_relu", -0.2), ("leaky_relu", 0.0)),
        make("prelu", x, 8, "prelu", 5, ("prelu", True), 3),
        make("norm without stats", x, 8, ("batch_norm", True, 0.1, False), "relu", train=False),
        make("norm cumulative", x, 8, ("batch_norm", False, None), "relu", 2),
        make("norm first", x, "batch_norm", 8, "relu"),
        make("norm of places", rand(3, 8, 5), 8, "batch_norm", "relu", 2),
        make("norm of turned places", rand(3, 5, 5).transpose(1, 2), "batch_norm", "tanh"),
        make("3-d", rand(2, 3, 5), 8, "relu", drop, (2, False), "prelu"),
        make("one row", x[:1], 8, "relu", 2),
        make("empty batch", x[:0], 8, "relu", drop, 2),
        make("empty batch norm", x[:0], 8, "batch_norm", "relu", 2),
        make("transposed", rand(5, 6).t(), 8, "relu", 2),
    ]  # fmt: skip
