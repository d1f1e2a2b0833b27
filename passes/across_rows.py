"""Layers that work along the dimension of the batch, as attention without ``batch_first=True``.

Each has its samples in some dimensions, and works along the others::

    nn.LSTM(6, 4)(x)        samples in dimension 1; of x: f32[B,L,6] it makes one sequence of B rows
    conv1d(x.T[None])       samples in dimension 0
    layer_norm(x, (B, 6))   samples in none
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from recast.rewriter.ir import Node

from .leaf import argument, module_of, spec_of
from .row_counts import name_of, rows_of

_SEQUENCES = nn.RNNBase, nn.MultiheadAttention
_FIRST = _ConvNd, _MaxPoolNd, _AvgPoolNd, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm
_FUNCTIONS = {
    "conv1d", "conv2d", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "group_norm",
    "lp_pool1d", "lp_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "local_response_norm", "interpolate",
    "instance_norm", "gru.default", "lstm.default",
}  # fmt: skip


def across_rows(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` calls a layer that works along a dimension that counts rows of the batch."""
    module = module_of(node, root)
    spec = spec_of(argument(node, 0, "query" if _attends(module) else "input"))
    if spec is None or not rows_of(spec):
        return False
    samples = _samples(node, module, len(spec.shape))
    return samples is not None and not rows_of(spec) <= samples


def _attends(module: Any) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _samples(node: Node, module: Any, rank: int) -> set[int] | None:
    """The dimensions in which a layer has its samples; None: it is another node."""
    if isinstance(module, _SEQUENCES):
        return set() if rank < 3 else {0 if module.batch_first else 1}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {*range(rank - len(module.normalized_shape))}
    if node.op == "call_function" and name_of(node) in ("layer_norm", "rms_norm"):
        shape: Any = argument(node, 1, "normalized_shape")
        return {*range(rank - len(shape))} if isinstance(shape, (tuple, list)) else None
    known = isinstance(module, _FIRST) and not isinstance(module, _NormBase)
    known = known or isinstance(module, nn.modules.instancenorm._InstanceNorm)
    return {0} if known or name_of(node) in _FUNCTIONS else None
