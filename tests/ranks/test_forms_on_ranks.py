"""``optimize(forms=)`` on several ranks: trained with labels, evaluated without, as one process."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from harness import processes, run
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import UsageError
from recast.runtime.ranks import shards

USERS, ITEMS = 50, 70
TYPES = ("row_wise", "column_wise", "table_wise", "data_parallel")


class Ranked(nn.Module):
    """Trained on an item and another that was not seen; evaluated without the latter."""

    def __init__(self, between: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        norm = [nn.BatchNorm1d(12)] if between else []
        self.top = nn.Sequential(nn.Linear(16, 12), *norm, nn.ReLU(), nn.Linear(12, 1))
        self.head = nn.Linear(1, 1)
        g = torch.Generator().manual_seed(0)  # ranks that are threads share the other one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=g) - 0.5)

    def score(self, user: Tensor, item: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)
        return out

    def forward(self, user: Tensor, item: Tensor, other: Tensor | None = None) -> Any:
        if other is None:
            return self.score(user, item).sigmoid()
        return F.softplus(self.score(user, other) - self.score(user, item)).mean()


class Headed(Ranked):
    """Its evaluation reaches a layer that training does not."""

    def forward(self, user: Tensor, item: Tensor, other: Tensor | None = None) -> Any:
        found = super().forward(user, item, other)
        return self.head(found[:, None]) if other is None else found


class Whole(Ranked):
    """Its evaluation reads all items."""

    def forward(self, user: Tensor, item: Tensor, other: Tensor | None = None) -> Any:
        if other is None:
            return self.user(user) @ self.item.weight.t()
        return super().forward(user, item, other)


def batch(rank: int, step: int, rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 * rank + step)
    user, item, other = (torch.randint(n, (rows,), generator=g) for n in (USERS, ITEMS, ITEMS))
    return user, item, other


def spread(model: nn.Module, **options: Any) -> Any:
    example = batch(0, 0)
    return recast.optimize(model, example=example, forms=[example[:2]], **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def trained(model: Any, optimizer: Any, batches: Any, steps: int = 3) -> list[Tensor]:
    """The scores after each step."""
    found = []
    for step in range(steps):
        train, evaluate = batches(step), batches(step + 50)[:2]
        model.train()
        optimizer.zero_grad()
        model(*train).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(model(*evaluate))
    return found


def of_all(world: int, step: int) -> tuple[Tensor, ...]:
    parts = zip(*(batch(rank, step) for rank in range(world)), strict=True)
    return tuple(torch.cat(part) for part in parts)


@pytest.mark.parametrize("sharding", TYPES)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_the_numbers_of_one_process(sharding: str, norm: bool) -> None:
    world, kind = 3, nn.BatchNorm1d if norm else None
    one = Ranked(kind)
    wanted = trained(one, sgd(one), lambda step: of_all(world, step))

    def rank_of(rank: int) -> list[Tensor]:
        model = Ranked(kind)
        fast, opt = spread(model, optimizer=sgd(model), sharding=sharding)
        assert len(fast.forms) == 1
        return trained(fast, opt, lambda step: batch(rank, step))

    for step, parts in enumerate(zip(*run(world, rank_of), strict=True)):
        torch.testing.assert_close(torch.cat(parts), wanted[step], rtol=1e-5, atol=1e-6)


def test_in_processes() -> None:
    one = Ranked(nn.BatchNorm1d)
    wanted = trained(one, sgd(one), lambda step: of_all(2, step))

    def rank_of(rank: int) -> list[Tensor]:
        model = Ranked(nn.BatchNorm1d)
        fast, opt = spread(model, optimizer=sgd(model), sharding="row_wise")
        return trained(fast, opt, lambda step: batch(rank, step))

    for step, parts in enumerate(zip(*processes(2, rank_of), strict=True)):
        torch.testing.assert_close(torch.cat(parts), wanted[step], rtol=1e-5, atol=1e-6)


def test_both_in_a_step() -> None:
    def losses(model: Any, train: Any) -> Tensor:
        loss: Tensor = model(*train) + model(*train[:2]).square().mean()
        return loss

    def steps(model: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        for step in range(3):
            opt.zero_grad()
            losses(model, batches(step)).backward()
            opt.step()
        return {n: p.detach() for n, p in model.named_parameters()}

    one = Ranked()
    one.head.requires_grad_(False)
    wanted = steps(one, sgd(one), lambda step: of_all(2, step))

    def rank_of(rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = Ranked()
        model.head.requires_grad_(False)
        fast, opt = spread(model, optimizer=sgd(model), sharding="row_wise")
        held = steps(fast, opt, lambda step: batch(rank, step))
        return held, {n: shards.of(p) for n, p in fast.named_parameters()}

    for found, parts in run(2, rank_of):
        for name, value in wanted.items():
            own = value if parts[name] is None else parts[name].local(value)
            torch.testing.assert_close(found[name], own, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("sharding", "norm"), [("row_wise", False), ("table_wise", True), ("data_parallel", True)]
)
def test_ranks_that_call_different_forms_are_told(sharding: str, norm: bool) -> None:

    def rank_of(rank: int) -> str:
        fast = spread(Ranked(nn.BatchNorm1d if norm else None), sharding=sharding)
        told = ""
        for step in range(3):
            evaluates = rank == 1 and step == 1
            try:
                fast(*batch(rank, step)[: 2 if evaluates else 3]).sum().backward()
            except UsageError as error:
                told += f"{step}: {error.what}"
        return told

    what = "1: rank 1 of 3 calls the model with arguments of another form than rank 0"
    assert run(3, rank_of) == [what] * 3


def test_a_form_that_reaches_more_is_for_evaluation() -> None:
    def rank_of(rank: int) -> None:
        model = Headed()
        fast, opt = spread(model, optimizer=sgd(model), sharding="row_wise")
        fast(*batch(rank, 0)).backward()
        opt.step()
        with torch.no_grad():
            assert fast(*batch(rank, 1)[:2]).shape == (6, 1)
        told = r"the gradient of head\.weight and 1 more would be this rank's own"
        with pytest.raises(UsageError, match=told):
            fast(*batch(rank, 1)[:2]).sum().backward()
        fast(*batch(rank, 2)).backward()
        opt.step()
        for p in model.head.parameters():
            p.requires_grad_(False)
        fast(*batch(rank, 1)[:2]).sum().backward()

    run(2, rank_of)


def test_a_table_that_a_form_reads_as_a_whole_stays_whole() -> None:
    def rank_of(rank: int) -> None:
        model = Whole()
        plain = copy.deepcopy(model)
        fast = spread(model, sharding={"user": "row_wise"})
        assert "item.weight is on every rank: " in fast.report.text()
        torch.testing.assert_close(fast(*batch(rank, 0)[:2]), plain(*batch(rank, 0)[:2]))
        with pytest.raises(UsageError, match=r"cannot be row_wise|failed on rank 0"):
            spread(copy.deepcopy(plain), sharding={"item": "row_wise"})

    run(2, rank_of)


class Pooled(nn.Module):
    """Trained on sums, evaluated on maxima: by another form, or by another mode."""

    def __init__(self, by_mode: bool) -> None:
        super().__init__()
        self.by_mode = by_mode
        self.weight = nn.Parameter(torch.arange(120.0).reshape(30, 4).cos())

    def forward(self, ids: Tensor, most: bool = False) -> Tensor:
        if most or (self.by_mode and not self.training):
            return F.embedding_bag(ids, self.weight, mode="max")
        return F.embedding_bag(ids, self.weight, mode="sum")


@pytest.mark.parametrize("by_mode", [False, True])
def test_a_table_that_is_pooled_by_max_elsewhere(by_mode: bool) -> None:
    """Its rows are not divided: the most of each part is not the sum of the parts."""
    ids = torch.randint(30, (5, 3), generator=torch.Generator().manual_seed(0))
    forms = [] if by_mode else [(ids, True)]
    pinned = {"weight": "row_wise"}

    def rank_of(rank: int) -> None:
        plain = Pooled(by_mode).eval()
        with pytest.raises(UsageError, match=r"cannot be row_wise|failed on rank 0"):
            recast.optimize(Pooled(by_mode), example=(ids,), forms=forms, sharding=pinned)
        fast = recast.optimize(Pooled(by_mode), example=(ids,), forms=forms)
        torch.testing.assert_close(fast.eval()(ids, not by_mode), plain(ids, not by_mode))

    run(2, rank_of)


def test_a_form_that_is_not_captured_is_refused() -> None:
    class Timed(Ranked):
        def forward(self, user: Tensor, item: Tensor, other: Tensor | None = None) -> Any:
            if other is None and time.time() < 0:
                return None
            return super().forward(user, item, other)

    def rank_of(rank: int) -> None:
        with pytest.raises(UsageError, match=r"forms\[0\] \(other is None\) is not captured whole"):
            spread(Timed(), sharding="row_wise")

    run(2, rank_of)


def test_a_call_of_no_form_says_what_to_do() -> None:
    def rank_of(rank: int) -> None:
        example = batch(0, 0)
        fast = recast.optimize(Ranked(), example=example, sharding="row_wise")
        with pytest.raises(UsageError, match=r"optimize\(\.\.\., forms=\[batch\]\) takes calls of"):
            fast(*batch(rank, 0)[:2])

    run(2, rank_of)


def test_a_model_on_meta() -> None:
    def rank_of(rank: int) -> Tensor:
        with torch.device("meta"):
            model = Ranked()
        fast = spread(model, sharding="row_wise")
        whole = Ranked()
        whole.load_state_dict(fast.full_state_dict(ranks="all"))
        with torch.no_grad():
            torch.testing.assert_close(fast(*batch(rank, 0)), whole(*batch(rank, 0)))
            torch.testing.assert_close(fast(*batch(rank, 0)[:2]), whole(*batch(rank, 0)[:2]))
        return whole.item.weight

    first, second = run(2, rank_of)
    assert torch.equal(first, second)


def test_a_dynamic_table() -> None:
    def rank_of(rank: int) -> None:
        model = Ranked()
        tables = {"item": recast.dynamic.Dynamic(max_rows=64)}
        fast, opt = spread(model, optimizer=sgd(model), sharding="row_wise", tables=tables)
        user, item, other = batch(rank, 0)
        fast(user, item * 10**12, other * 10**12).backward()
        opt.step()
        with torch.no_grad():
            found = fast(user, item * 10**12)
            again = fast(user, item * 10**12)
        assert torch.equal(found, again)

    run(2, rank_of)


def test_the_diff_on_ranks() -> None:
    def rank_of(rank: int) -> bool:
        model = Ranked()
        plain = copy.deepcopy(model)
        fast = spread(model, sharding="row_wise")
        forms = [batch(rank, 0), batch(rank, 0)[:2]]
        return all(recast.diff(plain, fast, one).check().ok for one in forms)

    assert processes(2, rank_of) == [True, True]


def test_the_diff_of_a_form_that_reaches_less() -> None:
    """Its backward pass leaves a layer out; and the next one of the example's form is as always."""

    def rank_of(rank: int) -> bool:
        model = Headed()
        plain = copy.deepcopy(model)
        trained, evaluated = batch(rank, 0)[:2], batch(rank, 0)
        fast, opt = recast.optimize(
            model, sgd(model), example=trained, forms=[evaluated], sharding="row_wise"
        )
        report = recast.diff(plain, fast, [evaluated, trained], steps=0).check()
        recast.diff(plain, fast, evaluated, steps=0).check()
        opt.step()
        fast(*trained).sum().backward()
        opt.step()
        return report.ok

    assert processes(2, rank_of) == [True, True]


def test_printed_before_there_are_ranks() -> None:
    fast = spread(Ranked(), world_size=4, sharding="row_wise")
    assert fast.report.graph_text.count("recast.send_ids") == 2
    with pytest.raises(UsageError, match="torchrun"):
        fast(*batch(0, 0)[:2])
