"""The shapes that layers of torch give, told without their work.

Guards on sizes run before each call. What stands for a layer there takes the layer's input, or what
stands for that, and a few numbers of the layer; it gives zeros that take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from recast.rewriter.order import foreign

# layers that give the shape that they get
SAME_SHAPE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
    nn.Identity, nn.Softmax, nn.LogSoftmax, nn.SELU, nn.CELU, nn.Mish, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd,
)  # fmt: skip
_CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Layer = tuple[Callable[..., Any], tuple[Any, ...]]


def stand_in_for(module: nn.Module) -> Layer | None:
    """The function that stands for ``module``, and what it takes after the input; None if the shape
    is known from a call alone.
    """
    if foreign(module):
        return None
    if isinstance(module, nn.Embedding):
        return looked_up, (module.embedding_dim,)
    if isinstance(module, nn.Linear):
        return widened, (module.out_features,)
    if isinstance(module, nn.RNNBase):
        ways = 1 + module.bidirectional
        widths = (module.proj_size or module.hidden_size, module.hidden_size)
        lstm = isinstance(module, nn.LSTM)
        return recurred, (ways, module.num_layers, *widths, module.batch_first, lstm)
    if isinstance(module, _CONVOLVES):
        window = (module.kernel_size, module.stride, module.padding, module.dilation)
        return convolved, (module.out_channels, *window)
    return (same, ()) if isinstance(module, (*SAME_SHAPE, nn.TransformerEncoderLayer)) else None


def zeros(shape: Sequence[int], device: torch.device | None, dtype: Any = None) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def same(given: torch.Tensor) -> torch.Tensor:
    return given


def looked_up(ids: torch.Tensor, width: int) -> torch.Tensor:
    return zeros((*ids.shape, width), ids.device)


def widened(given: torch.Tensor, width: int) -> torch.Tensor:
    return zeros((*given.shape[:-1], width), given.device)


def recurred(
    given: torch.Tensor, ways: int, layers: int, width: int, inner: int, batch_first: bool,
    lstm: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """All steps and the state after the last; of an LSTM also that of its cells, ``inner`` wide."""
    rows = (given.shape[0 if batch_first else 1],) if given.dim() == 3 else ()
    steps = zeros((*given.shape[:-1], ways * width), given.device)
    state = zeros((ways * layers, *rows, width), given.device)
    cells = zeros((ways * layers, *rows, inner), given.device)
    return steps, (state, cells) if lstm else state


def convolved(
    given: torch.Tensor, channels: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int] | str, dilation: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    dims = len(kernel)
    sizes = given.shape[-dims:]
    if padding != "same":
        added = [0] * dims if isinstance(padding, str) else padding
        sizes = torch.Size(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(sizes, added, dilation, kernel, stride, strict=True)
        )
    return zeros((*given.shape[: -dims - 1], channels, *sizes), given.device)
