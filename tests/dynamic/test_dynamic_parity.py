"""A table that evicts nothing is the plain one over ids numbered beforehand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from dynamickit import Model, Stream, Twin, example, train
from torch import Tensor

import recast

STEPS = 50
Optimizers = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Optimizers, dict[str, Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.3), {}),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.2),
        {},
    ),
    "row-wise-adagrad": (lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1), {}),
}


def pair(make: Optimizers, dtype: torch.dtype, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(3)
    stream = Stream(1)
    model = Model().to(dtype)
    plain = copy.deepcopy(model)
    opt = make(model.parameters())
    tables = {
        "user": recast.Dynamic(max_rows=64, seed=5),
        "items": recast.Dynamic(max_rows=64, evict="lru", seed=5),
    }
    fast, opt = recast.optimize(model, opt, example=example(stream), tables=tables, **options)
    twin = Twin(plain, fast, stream)
    return stream, fast, opt, twin, make(twin.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_of(name: str) -> None:
    make, options = OPTIMIZERS[name]
    stream, fast, opt, twin, twin_opt = pair(make, torch.float64, **options)
    assert all(len(t) == 0 for t in recast.dynamic.tables(fast).values())  # no id of the example
    batches = [stream.batch(11 if k % 3 else 1) for k in range(STEPS)]
    got, want = train(fast, opt, batches), train(twin, twin_opt, batches)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    for module, table in recast.dynamic.tables(fast).items():
        ids = table.ids()
        assert len(ids) == len(table) > 20
        rows = fast.get_submodule(module).state_dict()["weight"]
        torch.testing.assert_close(rows, twin.rows(module, ids), rtol=1e-9, atol=1e-10)
    fast.eval(), twin.eval()
    for batch in (stream.batch(8), stream.batch(1)):
        torch.testing.assert_close(fast(*batch), twin(*batch), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("lazy", [False, True], ids=["sparse-adam", "lazy-adam"])
def test_fifty_steps_of_the_adams(lazy: bool) -> None:
    """``sparse_semantics="lazy"`` of Adam has the numbers of SparseAdam."""
    torch.manual_seed(3)
    stream = Stream(1)
    model = Model(sparse=not lazy).double()
    plain = copy.deepcopy(model)
    plain.user.sparse = plain.items.sparse = plain.day.sparse = True

    def parts(m: torch.nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        own: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, p in m.named_parameters():
            own["top" not in name].append(p)
        return own[True], own[False]

    kind: Any = torch.optim.Adam if lazy else torch.optim.SparseAdam
    opt, dense = kind(parts(model)[0], lr=0.05), torch.optim.Adam(parts(model)[1], lr=0.01)
    how = recast.Dynamic(max_rows=64, seed=5)
    options: Any = {"sparse_semantics": "lazy"} if lazy else {}
    fast, opt = recast.optimize(
        model, opt, example=example(stream), tables={"user": how, "items": how}, **options
    )
    twin = Twin(plain, fast, stream)
    rows, rest = parts(twin)
    twin_opt, twin_dense = torch.optim.SparseAdam(rows, lr=0.05), torch.optim.Adam(rest, lr=0.01)
    batches = [stream.batch(11 if k % 3 else 1) for k in range(STEPS)]
    got = train(fast, Both(opt, dense), batches)
    want = train(twin, Both(twin_opt, twin_dense), batches)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    for module, table in recast.dynamic.tables(fast).items():
        rows = fast.get_submodule(module).state_dict()["weight"]
        torch.testing.assert_close(rows, twin.rows(module, table.ids()), rtol=1e-9, atol=1e-10)


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


@pytest.mark.parametrize("passes", ["default", "normalize"], ids=["graph", "plain lookups"])
def test_float32_accumulation_and_both_ways_to_run(passes: str) -> None:
    """Two backwards a step; and lookups that the graph leaves to the modules themselves."""
    stream, fast, opt, twin, twin_opt = pair(OPTIMIZERS["adagrad"][0], torch.float32, passes=passes)
    assert ("find_rows" in str(fast)) == (passes == "default")
    for k in range(8):
        opt.zero_grad(), twin_opt.zero_grad()
        for batch in (stream.batch(7), stream.batch(3)):
            up = torch.randn(len(batch[0]), generator=torch.Generator().manual_seed(k))
            (fast(*batch) * up).sum().backward()
            (twin(*batch) * up).sum().backward()
        opt.step(), twin_opt.step()
    batch = stream.batch(9)
    torch.testing.assert_close(fast(*batch), twin(*batch), rtol=1e-4, atol=1e-5)
