"""Hooks of the user's model run in what ``optimize`` returns, as long as they exist."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import recast

IDS = torch.randint(9, (6, 2), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.EmbeddingBag(9, 4), nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.times = 3.0

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids))

    def scaled(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.times


def doubled(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def more(module: nn.Module, inputs: Any, words: Any, output: Tensor) -> Tensor:
    return output + 1.0


def twice(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in inputs)


def grads(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS).square().sum().backward()
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {k: g.to_dense().clone() for k, g in found.items()}


@pytest.mark.parametrize("where", ["out.0", "out", ""])
def test_a_hook_that_is_removed_is_gone(where: str) -> None:
    plain = Net()
    module = plain.get_submodule(where)
    handles = [
        module.register_forward_hook(plain.scaled),
        module.register_forward_hook(more, with_kwargs=True),
    ]
    if where:  # of the whole no input takes part in backward
        handles.append(module.register_forward_pre_hook(doubled))
        handles.append(module.register_full_backward_hook(twice))
    fast = recast.optimize(plain, example=IDS)
    other = copy.deepcopy(fast)
    want = plain(IDS)
    for _ in range(len(handles) + 1):
        torch.testing.assert_close(fast(IDS), plain(IDS))
        torch.testing.assert_close(grads(fast), grads(plain))
        if handles:
            handles.pop().remove()
    assert not torch.allclose(fast(IDS), want)
    torch.testing.assert_close(other(IDS), want)  # a copy has hooks of its own


def test_a_hook_lives_on_without_its_model() -> None:
    plain = Net()
    plain.out[0].register_forward_hook(more, with_kwargs=True)
    fast, want = recast.optimize(plain, example=IDS), plain(IDS)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    del plain
    torch.testing.assert_close(fast(IDS), want)
    torch.testing.assert_close(torch.load(file, weights_only=False)(IDS), want)


def test_pruning_is_taken_off_the_copy_too() -> None:
    plain = Net()
    prune.l1_unstructured(plain.out[0], "weight", 0.5)
    fast = recast.optimize(plain, example=IDS)
    want = plain(IDS)
    torch.testing.assert_close(fast(IDS), want)
    prune.remove(fast.out[0], "weight")
    torch.testing.assert_close(fast(IDS), want)
