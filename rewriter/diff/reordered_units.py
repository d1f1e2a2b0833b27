"""The same model with its hidden units in another order: a control for the effect of rounding.

    W2 a(W1 x + b1)  =  (W2 P') a(P W1 x + P b1)        a permutation P, a(.) element by element

Reordering the rows of a batch changes only the sums over the batch, those of gradients. Sums over
the inputs of a layer stay the same, and so do the units that a ReLU cuts off. But another kernel,
or another batch size, adds those in another order too, and so does this.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Generator, nn

# torch's own layers that treat all elements alike
_BY_ELEMENT = (
    nn.Dropout, nn.ELU, nn.GELU, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.SELU,
    nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Tanh,
)  # fmt: skip


@torch.no_grad()
def reordered_units(model: nn.Module, generator: Generator) -> nn.Module:
    """A copy of ``model`` that computes the same, except for the order of sums.

    Two ``nn.Linear`` of one ``nn.Sequential`` with nothing but activations between them have the
    units between them drawn into another order by ``generator``; all else is as it was. Such a
    ``nn.Sequential`` must be called as a whole.
    """
    model = copy.deepcopy(model)
    for first, second in list(_pairs(model)):
        units = torch.randperm(first.out_features, generator=generator)
        units = units.to(first.weight.device)
        first.weight.copy_(first.weight[units])
        if first.bias is not None:
            first.bias.copy_(first.bias[units])
        second.weight.copy_(second.weight[:, units])
    return model


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    modules = [m for m in model.modules() if isinstance(m, nn.Sequential)]
    calls = Counter(id(layer) for module in modules for layer in module)
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for module in modules:
        before: nn.Linear | None = None
        for layer in module:
            if type(layer) is nn.Linear:
                own = layer if _alone(layer, calls, held) else None
                if before is not None and own is not None:
                    yield before, own
                before = own
            elif type(layer) not in _BY_ELEMENT:
                before = None


def _alone(layer: nn.Linear, calls: Counter[int], held: Counter[int]) -> bool:
    """Whether no other module shares its parameters, and it is not called twice."""
    return calls[id(layer)] == 1 and all(held[id(p)] == 1 for p in layer.parameters())
