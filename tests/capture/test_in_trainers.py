"""A training module that a trainer holds and drives, optimised in place before its first step."""

from __future__ import annotations

import copy
import gc
import tracemalloc
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import recast
from recast.rewriter.capture import capture_model
from recast.rewriter.compiled.runner import Runner

FIELDS, ROWS, WIDTH = 3, 50, 4


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))
        self.deep = nn.Sequential(nn.Linear(FIELDS * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        pairs = 0.5 * (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(1, keepdim=True)
        made: Tensor = self.deep(rows.flatten(1)) + pairs
        return made.squeeze(1)


class Module(nn.Module):
    """Reads nothing of its trainer in forward, which changes under it at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DeepFM()
        self._trainer: Trainer | None = None
        self._current_fx_name: str | None = None
        self.logged: list[float] = []

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("not attached to a Trainer")
        return self._trainer

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.net(ids)
        return made

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        self._current_fx_name = f"training_step {index}"
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])
        self.logged.append(loss.item())
        return loss


class Trainer:
    """What Lightning's does to a module, in a few lines: the optimizer steps through a closure."""

    def __init__(self) -> None:
        self.steps = 0
        self.module: Module | None = None

    def fit(self, module: Module, batches: list[Any], fast: bool, epochs: int = 2) -> None:
        self.module, module._trainer = module, self
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if fast:
            recast.optimize(module, optimizer, example=batches[0][:1], inplace=True)
        for _ in range(epochs):
            module.train()
            for index, batch in enumerate(batches):
                optimizer.step(lambda i=index, b=batch: self.closure(module, optimizer, b, i))
                self.steps += 1
            module.eval()
            with torch.no_grad():
                module(batches[-1][0])

    def closure(self, module: Module, optimizer: Any, batch: Any, index: int) -> Tensor:
        optimizer.zero_grad()
        loss = module.training_step(batch, index)
        loss.backward()
        return loss


def batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for size in sizes:
        ids = torch.randint(ROWS, (size, FIELDS), generator=draw)
        made.append((ids, torch.rand(size, generator=draw).round()))
    return made


class Counted:
    """How often a function of a module was called."""

    def __init__(self, monkeypatch: Any, owner: Any, name: str) -> None:
        self.calls = 0
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


def test_a_whole_module_runs_its_graph_at_each_step_of_a_trainer(monkeypatch):
    torch.manual_seed(0)
    plain = Module()
    fast = copy.deepcopy(plain)
    data = batches((16, 16, 5))
    Trainer().fit(plain, data, fast=False)
    captures = Counted(monkeypatch, capture_model, "capture_part")
    runs = Counted(monkeypatch, Runner, "_run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", recast.RecastWarning)
        Trainer().fit(fast, data, fast=True)
    # The graph runs at each of three steps and in eval mode, twice; nothing is captured anew.
    assert (captures.calls, runs.calls) == (1, 8)
    torch.testing.assert_close(fast.logged, plain.logged)
    assert list(fast.state_dict()) == list(plain.state_dict())


def test_thousands_of_steps_keep_memory_and_capture_once(monkeypatch):
    torch.manual_seed(0)
    captures = Counted(monkeypatch, capture_model, "capture_part")
    net = DeepFM()
    runs = Counted(monkeypatch, Runner, "_run")
    data = batches((16,) * 9 + (5,))
    fast, optimizer = recast.optimize(
        net, torch.optim.Adam(net.parameters(), lr=0.01), example=data[0][0]
    )

    def epochs(count: int) -> int:
        for _ in range(count):
            for ids, label in data:
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(fast(ids), label).backward()
                optimizer.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", recast.RecastWarning)
            warm = epochs(50)  # Python's own pools grow for some hundred steps
            grown = epochs(50) - warm
    finally:
        tracemalloc.stop()
    # A hundred bytes kept by each of the last 500 steps would be 50 kB.
    assert grown < 30_000
    assert (captures.calls, runs.calls) == (1, 1000)
