"""State of another size than its parameter is refused, as in torch: no kernel reads or writes
beyond it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recast

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam, decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "row-wise": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
}
IDS = torch.arange(48).view(16, 3) % 40


def made(rows: int, out: int, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(rows, 8, mode="sum"), nn.Linear(8, out))
    return model, OPTIMIZERS[name](model.parameters())


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(IDS).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rows, out", [(3000, 1), (45, 1), (50, 400)])
def test_state_of_a_smaller_model(name: str, rows: int, out: int) -> None:
    """``load_state_dict`` compares no shapes; plain torch raises in the step."""
    first, opt = made(50, 1, name)
    train(first, opt)
    model, new = made(rows, out, name)
    fast, new = recast.optimize(model, new, example=IDS)
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    with pytest.raises(RuntimeError, match=r"size|shape|state for a table of"):
        train(fast, new)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rows", [400, 1500, 50_000])
def test_a_table_that_was_replaced(name: str, rows: int) -> None:
    model, opt = made(1000, 1, name)
    table: Any = model[0]  # type: ignore[index]
    fast, opt = recast.optimize(model, opt, example=IDS)
    train(fast, opt)
    table.weight.grad = None
    table.weight.data, table.num_embeddings = torch.ones(rows, 8), rows
    with pytest.raises(RuntimeError, match=r"size|shape|state for a table of"):
        train(fast, opt)
    opt.state.pop(table.weight)  # which begins anew
    train(fast, opt)
