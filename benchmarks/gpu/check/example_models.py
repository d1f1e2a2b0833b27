"""The models of ``examples``, loaded by name and put on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpu import ROOT
from recast.rewriter.cli import spec

EXAMPLES = ("deepfm", "xdeepfm", "dcn", "dcn_v2", "pnn", "mmoe", "mlperf_dlrm")


def to(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)


def without_dropout(model: nn.Module) -> nn.Module:
    """Our masks are drawn in another way than torch's, so they are proven op by op (``masks``)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def load_example(name: str, batch: int) -> spec.Subject:
    if name == "dlrm":
        return spec.load(f"{ROOT}/examples/dlrm.py:model", [f"batch={batch}"])
    return spec.load(f"{ROOT}/examples/models/{name}.py:model", [f"batch={batch}"])
