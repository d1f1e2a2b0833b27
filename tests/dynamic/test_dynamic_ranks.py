"""Dynamic tables over ranks give the numbers of one process, and of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dynamicranks import ADAGRAD, HOW, Make, made, steps, steps_of, twin
from every import Every, batch, step
from harness import processes, run
from torch import Tensor

import recast

STEPS = 50
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": ADAGRAD,
    "row-wise-adagrad": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
}


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def one_rank(
    rank: int, world: int, make: Make, options: dict[str, Any], ahead: bool = False
) -> Any:
    fast, opt = made(make, **options)
    outs = steps(fast, opt, steps_of(world, STEPS), rank, ahead)
    rows = {name: recast.dynamic.export(fast.get_submodule(name)) for name in HOW}
    dense = {n: p.detach() for n, p in fast.named_parameters() if n.startswith("top")}
    return outs, rows, dense, str(fast)


def compare(results: list[Any], plain: Any, wanted: list[Tensor]) -> None:
    for k, want in enumerate(wanted):
        close(torch.cat([r[0][k] for r in results]), want)
    for name in HOW:
        ids = torch.cat([r[1][name].ids for r in results])
        assert len(ids.unique()) == len(ids) > 20, "every id is at one rank"
        for _, rows, _, _ in results:
            assert 0 < len(rows[name].ids) < len(ids) or len(results) == 1
            close(rows[name].rows, plain.rows(name, rows[name].ids))
    held = dict(plain.model.named_parameters())
    for _, _, dense, _ in results:
        for name, value in dense.items():
            close(value, held[name].detach())


@pytest.mark.parametrize(
    ("name", "world", "ahead"),
    [pytest.param(n, w, a, marks=[pytest.mark.long] * ((n, w, a) != ("adagrad", 2, False)))
     for n in OPTIMIZERS for w in (1, 2, 4) for a in (False, True)],
)  # fmt: skip
def test_fifty_steps_of(name: str, world: int, ahead: bool) -> None:
    """``ahead``: with no tier there is nothing to fetch, which is no error."""
    plain, opt = twin(OPTIMIZERS[name])
    wanted = steps(plain, opt, steps_of(world, STEPS))
    results = run(world, one_rank, world, OPTIMIZERS[name], {}, ahead)
    compare(results, plain, wanted)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("lazy", [True, False])
def test_fifty_steps_of_the_adams(lazy: bool, world: int, ahead: bool) -> None:
    """SparseAdam, and Adam with ``sparse_semantics="lazy"``, which has its numbers."""
    kind: Any = torch.optim.Adam if lazy else torch.optim.SparseAdam
    options: dict[str, Any] = {"apart": True, "sparse": not lazy}
    options |= {"sparse_semantics": "lazy"} if lazy else {}
    make: Make = lambda p: kind(p, lr=0.05)  # noqa: E731
    plain, opt = twin(make, **options)
    wanted = steps(plain, opt, steps_of(world, STEPS))
    compare(run(world, one_rank, world, make, options, ahead), plain, wanted)


@pytest.mark.long
def test_processes_over_gloo() -> None:
    plain, opt = twin(ADAGRAD)
    wanted = steps(plain, opt, steps_of(2, STEPS))
    compare(processes(2, one_rank, 2, ADAGRAD, {}), plain, wanted)


def every_form(rank: int | None, model: Every, sizes: list[int]) -> list[Tensor]:
    """Fixed, ragged and single bags, sequences, padding, weights; a table that is read twice."""
    model = copy.deepcopy(model)
    opt = ADAGRAD(model.parameters())
    names = ("fixed", "ragged", "single", "weighted")
    tables = {n: recast.Dynamic(max_rows=80, seed=2) for n in names}
    (dense, *ids), _ = batch([5, 4], 0)
    fast, opt = recast.optimize(model, opt, example=(dense.double(), *ids), tables=tables)
    assert sum(n.name.startswith("find_rows") for n in fast.graph.nodes) == 1
    found = []
    for k in range(6):
        opt.zero_grad()
        (dense, *ids), label = batch(sizes, rank, seed=k)
        ranks = 1 if rank is None else len(sizes)
        found.append(step(fast, ((dense.double(), *ids), label), sum(sizes), ranks))
        opt.step()
    found.append(opt.state[fast.importance.weight]["sum"])
    return found


def test_every_form_of_lookup() -> None:
    sizes = [3, 0, 4]
    torch.manual_seed(1)
    model = Every().double()
    wanted = every_form(None, model, sizes)
    results = run(3, every_form, model, sizes)
    for k, want in enumerate(wanted[:-1]):
        close(torch.cat([r[k] for r in results]), want)
    for found in results:
        close(found[-1], wanted[-1])
