"""What the tests of dynamic tables over ranks share: batches in parts, and training on a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from dynamickit import Model, Stream, Twin, example
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.runtime.plan import Plan, Table, explicit
from recast.runtime.ranks import collectives

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Parts = list[tuple[Tensor, ...]]  # the batches of all ranks in one step

HOW = {
    "user": recast.Dynamic(max_rows=160, seed=5),
    "items": recast.Dynamic(max_rows=160, evict="lru", seed=5),
}
ADAGRAD: Make = lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2)  # noqa: E731


def steps_of(world: int, steps: int, seed: int = 1, many: int = 30) -> list[Parts]:
    """Batches of sizes that differ from rank to rank; the last rank has none now and then."""
    stream = Stream(seed, many)
    sizes = [[3 + (k + r) % 4 for r in range(world)] for k in range(steps)]
    for k in range(0, steps, 7):
        sizes[k][-1] = 0 if world > 1 else 1
    return [[stream.batch(n) for n in row] for row in sizes]


def joined(parts: Parts) -> tuple[Tensor, ...]:
    """The batches of all ranks as one."""
    firsts = torch.tensor([0, *(len(p[1]) for p in parts)]).cumsum(0).tolist()
    users, items, offsets, days = (list(column) for column in zip(*parts, strict=True))
    moved = [o + first for o, first in zip(offsets, firsts, strict=False)]
    return torch.cat(users), torch.cat(items), torch.cat(moved), torch.cat(days)


def labels(batch: Sequence[Tensor]) -> Tensor:
    """Labels that depend on the user alone, so that parts and the whole batch have the same."""
    return ((batch[0] * 2654435761) >> 7).remainder(2).double()


def steps(
    model: nn.Module, optimizer: Any, batches: Sequence[Parts], rank: int | None = None,
    ahead: bool = False, device: torch.device | str = "cpu",
) -> list[Tensor]:  # fmt: skip
    """Train on the batches of ``rank``, or of all; the outputs before each step, on the CPU.
    ``ahead``: the rows of each next batch are fetched between the lookup and the update.
    """
    outs = []
    for k, parts in enumerate(batches):
        own = tuple(x.to(device) for x in (joined(parts) if rank is None else parts[rank]))
        ranks = 1 if rank is None else len(parts)
        total = sum(len(p[0]) for p in parts)
        optimizer.zero_grad()
        out = model(*own)
        if ahead and k + 1 < len(batches):
            later = joined(batches[k + 1]) if rank is None else batches[k + 1][rank]
            tables = recast.dynamic.tables(model)
            tables["user"].prefetch(later[0])
            tables["items"].prefetch(later[1])
        losses = F.binary_cross_entropy_with_logits(out, labels(own).to(out.dtype), reduction="sum")
        (losses * (ranks / total)).backward()
        optimizer.step()
        outs.append(out.detach().cpu())
    return outs


def planned(how: Any, ranks: int, dtype: str, rows: int | None = None) -> Plan:
    """Dynamic tables by hash, the plain one on one rank. ``rows``: if only bytes are given."""
    most = {n: how[n].max_rows or rows for n in ("user", "items")}
    tables = [Table(f"{n}.weight", most[n], 8, dtype, True) for n in most]
    return explicit([*tables, Table("day.weight", 7, 8, dtype)], ranks)


def made(
    make: Make = ADAGRAD, how: Any = HOW, dtype: torch.dtype = torch.float64, seed: int = 3,
    sparse: bool = False, apart: bool = False, rows: int | None = None,
    device: torch.device | str = "cpu", **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A model and its optimizer, made alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(sparse=sparse).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) / 2)
    model.to(device)
    tables, rest = split(model)
    opt = make(tables if apart else model.parameters())
    ranks, kind = collectives.ranks(), str(dtype).removeprefix("torch.")
    if ranks > 1:  # by decree, as the planner takes a second
        options = {"plan": planned(how, ranks, kind, rows), **options}
    batches = [tuple(x.to(device) for x in batch) for batch in example(Stream(1))]
    fast, opt = recast.optimize(model, opt, example=batches, tables=how, **options)
    return fast, Both(opt, torch.optim.Adam(rest, lr=0.01)) if apart else opt


class Both:
    """One optimizer for the tables, one for the rest."""

    def __init__(self, tables: torch.optim.Optimizer, rest: torch.optim.Optimizer) -> None:
        self.of = tables, rest

    def zero_grad(self) -> None:
        for one in self.of:
            one.zero_grad()

    def step(self) -> None:
        for one in self.of:
            one.step()


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of tables, and the others."""
    own: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in model.named_parameters():
        own["top" not in name].append(p)
    return own[True], own[False]


def twin(
    make: Make, dtype: torch.dtype = torch.float64, many: int = 30, **options: Any
) -> tuple[Twin, Any]:
    """The plain model over ids that were numbered beforehand, with the rows of :func:`made`."""
    fast, _ = made(make, dtype=dtype, **options)
    plain = copy.deepcopy(fast._root)
    for name in ("user", "items"):
        old = plain.get_submodule(name)
        kind: Any = nn.Embedding if name == "user" else nn.EmbeddingBag
        extra: dict[str, Any] = {} if name == "user" else {"mode": "mean"}
        sparse = old.sparse or bool(options.get("apart"))
        plain.set_submodule(name, kind(40, 8, sparse=sparse, dtype=dtype, **extra))
    plain.day.sparse = plain.user.sparse
    both = Twin(plain, fast, Stream(1, many))
    if not options.get("apart"):
        return both, make(both.parameters())
    tables, rest = split(both)
    return both, Both(torch.optim.SparseAdam(tables, lr=0.05), torch.optim.Adam(rest, lr=0.01))
