"""``recast.diff`` of a model that is spread over ranks.

Every rank runs the whole plain model on its own batch, and averages its gradients with those of the
others: this equals one process whose loss is the mean of the ranks' losses. It compares its own
part of the tables, and everything else; the report holds the worst of all ranks and is the same on
all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recast import passes as library
from recast.errors import UsageError
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.diff import model_runs, rounding
from recast.rewriter.diff.equivalence import DiffReport, batches_of, count_of
from recast.rewriter.diff.judge import Limit, Limits, Row, compare
from recast.rewriter.diff.model_runs import Loss, MakeOptimizer
from recast.rewriter.diff.trials import Compared, Trials, worst_of_each
from recast.runtime.embedding import precision_table
from recast.runtime.ranks import collectives, faults, faults_agree, shards
from recast.runtime.ranks.batch_of_all import batch_of_all
from recast.runtime.ranks.draws_global import draw_global_, multinomial_global
from recast.runtime.ranks.means_of_all import own_means
from recast.runtime.ranks.shards import ShardedTable

from . import check as spread_check

# calls by which a graph computes on the batches of all ranks, in eval mode too
_OF_ALL = {draw_global_, multinomial_global, batch_of_all}
_UNSOUGHT = (
    "no node is looked for on several ranks; recast.diff(plain, recast.optimize(plain,"
    " example=batch), batch) on one process names it"
)


def is_spread(model: nn.Module) -> bool:
    """Whether ``model`` is a result of ``optimize`` on several ranks."""
    return isinstance(model, Compiled) and model._dense is not None


def diff(
    plain: nn.Module,
    fast: Compiled,
    example: Any,
    *,
    steps: int,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    seed: int,
    training: bool,
    limits: Limits,
    command: str | None,
) -> DiffReport:
    """:func:`recast.diff` on every rank, each with a batch of its own. A collective.

    ``plain`` is a whole model, or the one whose tables ``optimize`` sharded: then it is made whole
    again on every rank while this runs. With a ``wire`` below fp32 the two differ by its rounding.
    Means and sums over the batch are compared as those of each rank's rows, on both sides. Where
    ``fast`` has tables below float32, see :func:`recast.diff`.

    Raises:
        UsageError: what depends on the batches of all ranks is to be compared in train mode, tables
            are dynamic, or the ranks ask for different things.
        RankError: another rank failed.
    """
    count_of(steps)
    stored = precision_table.stored(fast)
    if stored:
        steps, training = 0, False
    _check(plain, fast, bool(training or steps))
    batches = batches_of(example, plain)
    asked = f"steps={steps} seed={seed} training={training} batches={len(batches)}"
    faults_agree.agree({"diff": asked}, tries="the same arguments of recast.diff on every rank")
    saved = _whole_state(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    make = model_runs.maker(optimizer, plain, fast, saved=saved)
    report = DiffReport(type(plain).__name__, seed=seed, steps=steps, unsought=_UNSOUGHT)
    report.command = command or f"recast.diff(plain, fast, example, steps={steps}, seed={seed})"
    modes = (False, True) if training else (False,)
    whole = _whole(plain, fast, stored)
    with own_means(), model_runs.undisturbed(whole, fast) as restore:
        each = _OnRanks(
            whole, fast, batches, steps, seed, loss, make, limits, report, modes, own=None
        )
        each.run(restore)
    found = _of_all((report.rows, report.notes, report.judge))
    rows = [
        replace(row, when=f"{row.when}, rank {rank}")
        for rank, (theirs, _, _) in enumerate(found)
        for row in theirs
    ]
    report.rows = worst_of_each(rows)
    report.notes = list(dict.fromkeys(note for _, notes, _ in found for note in notes))
    report.judge = next((judge for _, _, judge in found if judge != "float64"), "float64")
    if stored:
        report.notes[:0] = _of_stored(plain, fast, stored, batches)
    return report


@dataclass
class _OnRanks(Trials):
    """What one rank compares: its part of what the plain model computes."""

    learnt_whole: dict[str, Tensor] = field(default_factory=dict)  # ``learnt`` has parts

    def same_start(self) -> None:
        ours = {**dict(self.fast.named_parameters()), **dict(self.fast.named_buffers())}
        for name, t in [*self.plain.named_parameters(), *self.plain.named_buffers()]:
            held, mine = ours.get(name), self._cut(name, model_runs.dense(t))
            if held is None or held.shape != mine.shape:
                raise UsageError(
                    f"diff: the second model has no {name} of shape {tuple(t.shape)}",
                    why="a diff compares two forms of one model, under the same names",
                )
            if not torch.equal(model_runs.dense(held).cpu(), mine.cpu()):
                self.report.notes.append(f"the two models start from different values of {name}")

    def once(self, model: nn.Module, batch: tuple[Any, ...], how: Any) -> model_runs.Pass:
        made = super().once(model, batch, how)
        if model is self.fast:
            reduce: Any = self.fast._dense
            reduce.finish()  # a further form may reach less than the example's
            held = {n: p.grad for n, p in model.named_parameters() if n in made.grads}
            made.grads |= {n: model_runs.dense(g) for n, g in held.items() if g is not None}
        else:
            known = dict(model.named_parameters())
            of_all = _averaged({n: g for n, g in made.grads.items() if n in known}, known)
            inputs = {n: g for n, g in made.grads.items() if n not in known}
            made.grads = {n: self._cut(n, g) for n, g in of_all.items()} | inputs
        return made

    def trained(self, model: nn.Module, batches: list[tuple[Any, ...]]) -> model_runs.Steps:
        how: Any = {"steps": self.steps, "seed": self.seed, "loss": self.loss}
        make = self.make(model)
        if model is self.fast:
            return model_runs.train(model, batches, **how, make=make)
        known = dict(model.named_parameters())

        def average() -> None:
            held = {n: p.grad for n, p in known.items() if p.grad is not None}
            for name, grad in _averaged(held, known).items():
                known[name].grad = grad

        made = model_runs.train(model, batches, **how, make=make, before_step=average)
        if model is self.plain:
            self.learnt_whole = made.parameters | made.buffers
        made.parameters = {n: self._cut(n, t) for n, t in made.parameters.items()}
        made.state = {k: self._cut(k.rpartition(" [")[0], t) for k, t in made.state.items()}
        return made

    def judged(self, what: Compared, limit: Limit, reruns: Any, get: Any) -> Row:
        """Without the further runs that settle a doubt: each rank decides on its own, but cannot
        run the models on its own.
        """
        return compare(*what, self.limits, limit)

    def take_learnt(self, model: nn.Module) -> None:
        """The second model takes its parts of tables, the others take whole ones."""
        cut = self.learnt
        self.learnt = cut if model is self.fast else self.learnt_whole
        super().take_learnt(model)
        self.learnt = cut

    def _cut(self, name: str, t: Tensor) -> Tensor:
        """This rank's part of ``t``, which is shaped like the parameter ``name`` or its rows."""
        own = _parts(self.fast).get(name)
        return own.local(t) if own and tuple(t.shape) in (own.shape, own.shape[:1]) else t


# ---------------------------------------------------------------- their parts


def _check(plain: nn.Module, fast: Compiled, trains: bool) -> None:
    if is_spread(plain):
        raise UsageError(
            "diff: the first model is spread over ranks",
            why="it is the reference, which is run whole on every rank",
            tries=("recast.diff(model, fast, batch), with the model that optimize was given",),
        )
    dynamic = [name for name, own in _parts(fast).items() if own.hashed]
    if dynamic:
        raise UsageError(
            f"diff: {', '.join(dynamic)} of the second model is dynamic, and spread over ranks",
            why="the plain model has a row for each id, and no rank here knows all rows",
            tries=("recast.diff on one process",),
        )
    of_all = [path for path, module in plain.named_modules() if library.batchwise(module)]
    written = "_global" in fast.report.graph_text
    shown = (fast._graphs.get(mode) for mode in ("both", "eval"))
    draws = any(n.target in _OF_ALL for graph in shown if graph for n in graph.nodes)
    if draws or (trains and (of_all or written)):
        raise UsageError(
            f"diff: {', '.join(of_all[:3]) or 'the model'} computes on the batches of all ranks",
            why="on several ranks the plain model is run on each rank's own batch, of which the"
            " statistics, random numbers and pairs of rows are others",
            tries=(
                *(() if draws else ("training=False, steps=0, for eval mode",)),
                "recast.diff on one process, for train mode",
            ),
        )


def _parts(fast: nn.Module) -> dict[str, ShardedTable]:
    held = ((name, shards.of(p)) for name, p in fast.named_parameters())
    return {name: own for name, own in held if own is not None}


def _whole(
    plain: nn.Module, fast: Compiled, stored: Mapping[str, precision_table.StoredTable]
) -> nn.Module:
    """``plain``; or a copy with whole tables if ``optimize`` sharded them. Those that ``fast`` has
    ``stored`` in fewer bits are rounded in the same way, and frozen.
    """
    taken = {n: p for n, p in plain.named_parameters() if shards.of(p) is not None}
    if any(_of_all(list(taken))):
        held = fast.full_state_dict(ranks="all")
        memo: dict[int, Any] = {
            id(p): nn.Parameter(held[name].clone(), p.requires_grad and name not in stored)
            for name, p in taken.items()
        }
        plain = copy.deepcopy(plain, memo)
        spread_check.open_again(plain)
    left = {name: table for name, table in stored.items() if name not in taken}
    return precision_table.rounded(plain, left) if left else plain


def _of_stored(
    plain: nn.Module,
    fast: Compiled,
    stored: Mapping[str, precision_table.StoredTable],
    batches: list[tuple[Any, ...]],
) -> list[str]:
    """What a report says of tables below float32; the same on every rank."""
    names = ", ".join(sorted({t.precision for t in stored.values()}))
    notes = [precision_table.ROUNDED.format(names, len(stored))]
    if any(_of_all([n for n, p in plain.named_parameters() if shards.of(p) is not None])):
        return notes  # its tables are those of ``fast``, rounded
    calls: list[rounding.Call] = [(batch, {}) for batch in batches]
    wanted, got = rounding.outputs(plain, calls), rounding.outputs(fast, calls)
    found = collectives.of_all(rounding.Effect.between(wanted, got), "the effect of rounding")
    return [*notes, f"of this rounding: {rounding.Effect.of_all(found).told()}"]


def _whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its ``state_dict`` with whole tensors, which whole and sharded models can both load."""
    from recast.runtime.ranks import shards_state  # it imports DTensor, two seconds

    return shards_state.full_optimizer(optimizer)


def _averaged(grads: dict[str, Tensor], known: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The mean over ranks of everything that any of them has; what a rank lacks counts as zeros."""
    there = {name for names in _of_all(list(grads)) for name in names}
    return {name: _mean(grads.get(name), p) for name, p in known.items() if name in there}


def _mean(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """Dense, or sparse if it is sparse on any rank, since an optimizer may step only its rows."""
    dense = torch.zeros_like(parameter) if grad is None else grad.detach().to_dense().clone()
    with faults.collective("gradients of the plain model"):
        dist.all_reduce(dense)
    dense /= dist.get_world_size()
    sparse = grad is not None and grad.layout == torch.sparse_coo
    rows = grad.detach().coalesce().indices()[0].tolist() if grad is not None and sparse else None
    found = [r for r in _of_all(rows) if r is not None]
    if not found:
        return dense
    index = torch.tensor(sorted({i for r in found for i in r}), device=dense.device).long()
    return torch.sparse_coo_tensor(
        index[None], dense[index], dense.shape, is_coalesced=True, check_invariants=False
    )


def _of_all(mine: Any) -> list[Any]:
    """The values of all ranks, in their order."""
    return collectives.of_all(mine, "what a diff found")
