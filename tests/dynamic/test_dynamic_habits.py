"""Training loops of all kinds around dynamic tables."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dynamickit import Model, Stream, Twin, example, train
from torch import Tensor, nn

import recast
from recast.errors import CheckpointError, UsageError
from recast.runtime.dynamic import generation

TABLES = {name: recast.Dynamic(max_rows=64, seed=5) for name in ("user", "items")}


def pair(**options: Any) -> tuple[Any, Model, Twin, Stream]:
    """The fast model, the user's own, and the plain one of the same numbers."""
    torch.manual_seed(3)
    stream, model = Stream(1), Model().double()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=example(stream), tables=TABLES, **options)
    return fast, model, Twin(plain, fast, stream), stream


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-9, atol=1e-10)


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def test_an_optimizer_that_is_made_afterwards() -> None:
    """As ``recast.optimize(model)`` without one: plain gradients of rows, the plain optimizer."""
    fast, _, twin, stream = pair()
    batches = [stream.batch(5) for _ in range(4)]
    opt = adagrad(fast)
    recast.runtime.rows.optimizer.attach(opt)
    for a, b in zip(train(fast, opt, batches), train(twin, adagrad(twin), batches), strict=True):
        close(a, b)


def test_no_memory_for_more_rows() -> None:
    """The batch is refused by the name of the table, and the next one goes on from before it."""
    fast, _, twin, stream = pair()
    first, second = stream.batch(5), stream.batch(6)
    table = recast.dynamic.tables(fast)["user"]
    opt = adagrad(fast)
    train(fast, opt, [first])
    real, count = table.index, len(table)

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def __len__(self) -> int:
            return len(real)

        def find_or_insert(self, *_: Any) -> None:
            raise MemoryError("std::bad_alloc")

    table.index = Full()
    with pytest.raises(MemoryError, match=f"user: no memory for more ids; it has {count} of 64"):
        fast(*second)
    table.index = real
    got = train(fast, opt, [second])
    close(got[0], train(twin, adagrad(twin), [first, second])[1])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_one_that_moves_every_row_is_refused_when_it_steps(kind: Any) -> None:
    fast, _, _, stream = pair()
    opt = kind(fast.parameters())
    fast(*stream.batch(5)).sum().backward()
    with pytest.raises(UsageError, match=f"{kind.__name__} cannot step a dynamic table"):
        opt.step()


def test_state_for_an_optimizer_that_is_made_afterwards(tmp_path: Path) -> None:
    """A checkpoint brings it; what was loaded before anybody knew of the rows is refused."""
    fast, _, _, stream = pair()
    opt = adagrad(fast)
    train(fast, opt, [stream.batch(5) for _ in range(3)])
    recast.checkpoint.save(tmp_path / "c", fast, opt)
    batches = [stream.batch(5) for _ in range(2)]
    other = pair()[0]
    new = adagrad(other)
    recast.checkpoint.load(tmp_path / "c", other, new)
    weights, state = copy.deepcopy(fast.state_dict()), copy.deepcopy(opt.state_dict())
    for a, b in zip(train(other, new, batches), train(fast, opt, batches), strict=True):
        close(a, b)
    third = pair()[0]
    late = adagrad(third)
    third.load_state_dict(weights)
    late.load_state_dict(state)
    with pytest.raises(CheckpointError, match="was loaded into Adagrad before"):
        train(third, late, batches)


def pickled(both: Any) -> Any:
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_a_copy_saves_and_loads_its_state_by_row(copies: Any) -> None:
    """Before it has done a step, too."""
    fast, _, _, stream = pair()
    opt = adagrad(fast)
    batches = [stream.batch(5) for _ in range(3)]
    train(fast, opt, batches)
    twin, twins = copies((fast, opt))
    saved, wanted = twins.state_dict()["state"], opt.state_dict()["state"]
    torch.testing.assert_close(saved, wanted)
    held = copy.deepcopy((twin.state_dict(), twins.state_dict()))
    more = [stream.batch(5) for _ in range(2)]
    first = train(twin, twins, more)
    third, thirds = copies((fast, opt))
    third.load_state_dict(held[0])
    thirds.load_state_dict(held[1])
    for a, b in zip(train(third, thirds, more), first, strict=True):
        close(a, b)


def test_the_users_own_model_shares_the_table() -> None:
    fast, model, twin, stream = pair()
    batch = stream.batch(5)
    opt = adagrad(fast)
    recast.runtime.rows.optimizer.attach(opt)
    train(fast, opt, [batch]), train(twin, adagrad(twin), [batch])
    close(model(*batch), twin(*batch))
    assert model.user.table is recast.dynamic.tables(fast)["user"]


def test_a_table_of_two_modules_is_told_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(4, 3), nn.Embedding(4, 3)
            self.two.weight = self.one.weight

        def forward(self, ids: Any) -> Any:
            return self.one(ids) + self.two(ids + 1)

    ids = torch.tensor([2**40, -3])
    fast = recast.optimize(Tied(), example=ids, tables={"one": recast.Dynamic(max_rows=9)})
    fast(ids)
    (told,) = fast.report.running()
    assert told.startswith("one: 4 of 9 rows")


def ema(fast: Any) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(
        fast, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    return averaged, lambda: averaged.update_parameters(fast)


def by_data(fast: Any) -> Any:
    copied = copy.deepcopy(fast)

    def update() -> None:
        for a, b in zip(copied.parameters(), fast.parameters(), strict=True):
            a.data.mul_(0.999).add_(b.data, alpha=0.001)

    return copied, update


def shadow(fast: Any) -> Any:
    kept = [p.detach().clone() for p in fast.parameters()]

    def update() -> None:
        for a, b in zip(kept, fast.parameters(), strict=True):
            a.lerp_(b.detach(), 0.01)
            b.data.copy_(a)

    return fast, update


@pytest.mark.parametrize("average", [ema, by_data, shadow])
def test_an_average_of_rows_that_are_of_other_ids_is_refused(average: Any) -> None:
    """It is right as long as no id has come since."""
    fast, _, _, stream = pair()
    fast.float()
    batches = [stream.batch(5) for _ in range(3)]
    sgd = torch.optim.SGD(fast.parameters(), lr=0.1)
    train(fast, sgd, batches[:1])
    averaged, update = average(fast)
    train(fast, sgd, batches[:1])
    update()
    before = {path: table.ids() for path, table in recast.dynamic.tables(fast).items()}
    averaged.eval()(*batches[0])
    if average is not shadow:
        update()
    train(fast.train(), sgd, batches[1:])
    assert any(len(t) > len(before[p]) for p, t in recast.dynamic.tables(fast).items())
    update()
    with pytest.raises(UsageError, match="its weight was written to as a whole"):
        averaged.eval()(*batches[0])


def test_writes_to_all_rows_alike_are_none_of_another_time() -> None:
    fast, _, twin, stream = pair()
    batches = [stream.batch(5) for _ in range(3)]
    kept = fast.user.weight.detach().clone()
    with torch.no_grad():
        for model in (fast, twin):
            for p in model.parameters():
                p.mul_(0.5).clamp_(-0.4, 0.4)
        fast.user.weight.data.copy_(kept)  # put back, as it was
        fast.user.weight.mul_(0.5).clamp_(-0.4, 0.4)
    recast.dynamic.export(fast.user), fast.state_dict(), copy.deepcopy(fast)(*batches[0])
    fast(*batches[0])


def test_a_table_that_has_become_nan_is_looked_up_as_any() -> None:
    fast, _, _, stream = pair()
    batch = stream.batch(5)
    fast(*batch)
    with torch.no_grad():
        fast.user.weight.mul_(float("nan"))
    assert bool(fast.eval()(*batch).isnan().any())


def by_hand(weight: Any) -> None:
    weight.grad = weight.grad + 1e-3 * weight.detach()  # a penalty, for an optimizer by each number


def as_the_rest(change: Any) -> Any:
    def now(weight: Any) -> None:
        with torch.no_grad():
            weight.copy_(change(weight))

    return now


@pytest.mark.parametrize(
    "before, after",
    [
        (by_hand, None),
        (None, as_the_rest(lambda w: torch.nn.functional.normalize(w, dim=1))),
        (None, as_the_rest(lambda w: w.clamp(-1e-4, 1e-4))),
        (None, as_the_rest(lambda w: torch.where(w.abs() < 0.01, 0, w))),
        (None, as_the_rest(lambda w: (w * 64).round() / 64)),
    ],
    ids=["penalty", "normalize", "clamp", "prune", "quantise"],
)
def test_what_is_computed_of_each_row_alone(before: Any, after: Any) -> None:
    fast, _, twin, stream = pair()
    batches = [stream.batch(5) for _ in range(3)]
    for model in (fast, twin):
        opt, inner = adagrad(model), model if model is fast else twin.model
        for batch in batches:
            opt.zero_grad()
            model(*batch).sum().backward()
            if before is not None:
                before(inner.user.weight)
            opt.step()
        if after is not None:
            after(inner.user.weight)
    fast.eval()(*batches[0])
    rows = recast.dynamic.export(fast.user)
    if before is None:  # a penalty is one of rows that no id has had, too
        close(rows.rows, twin.rows("user", rows.ids))


def test_a_thread_that_reads_while_ids_come(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _, _, stream = pair()
    opt, table = adagrad(fast), recast.dynamic.tables(fast)["user"]
    train(fast, opt, [stream.batch(5)])
    write = generation.write_mark

    def and_read(slab: Tensor) -> float:
        ratio = write(slab)
        table.check_generation(fast.user.weight)  # as a thread may, at this moment
        return ratio

    monkeypatch.setattr(generation, "write_mark", and_read)
    seen = len(table)
    train(fast, opt, [stream.batch(20)])
    assert len(table) > seen


def test_inplace() -> None:
    fast, model, twin, stream = pair(inplace=True)
    batch = stream.batch(5)
    close(model(*batch), twin(*batch))
    assert "find_rows" in str(fast) and len(recast.dynamic.tables(model)["user"]) > 0


def test_a_table_that_is_dynamic_already_is_optimised_again() -> None:
    _, model, twin, stream = pair()
    opt = adagrad(model)
    again, opt = recast.optimize(model, opt, example=example(stream))
    assert len(recast.dynamic.tables(again)["user"]) == 0
    batches = [stream.batch(5) for _ in range(4)]
    for a, b in zip(train(again, opt, batches), train(twin, adagrad(twin), batches), strict=True):
        close(a, b)


def test_clipping_closures_and_steps_without_a_lookup() -> None:
    fast, _, twin, stream = pair()
    opts = adagrad(fast), adagrad(twin)
    recast.runtime.rows.optimizer.attach(opts[0])
    for k in range(4):
        batch = stream.batch(6)
        norms: list[Tensor] = []
        for model, opt in zip((fast, twin), opts, strict=True):

            def closure(
                model: Any = model, opt: Any = opt, batch: Any = batch, norms: Any = norms
            ) -> Tensor:
                opt.zero_grad()
                loss = model(*batch).square().sum()
                loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                return loss.detach()

            if k == 2:
                opt.zero_grad()
                opt.step()
            norms.append(opt.step(closure))
        close(torch.stack(norms[:2]), torch.stack(norms[2:]))
    batch = stream.batch(6)
    close(fast(*batch), twin(*batch))


def test_a_gradient_of_nan_reaches_no_row_that_was_not_looked_up() -> None:
    """Those of a plain table become NaN as torch's do; here most rows have no memory yet."""
    fast, _, _, stream = pair()
    opt, table = adagrad(fast), recast.dynamic.tables(fast)["user"]
    train(fast, opt, [stream.batch(5)])
    opt.zero_grad()
    (fast(*stream.batch(3)).sum() * float("nan")).backward()
    torch.nn.utils.clip_grad_norm_(fast.parameters(), 1.0)
    opt.step()
    kept = table.take("weight", fast.user.weight.detach(), table.stored()[1]).isnan().any(1)
    assert bool(kept.any()) and not bool(kept.all())
    assert not bool(fast.user.weight[-100:].isnan().any())


def test_an_empty_batch() -> None:
    fast, _, twin, _ = pair()
    none = torch.empty(0, dtype=torch.int64)
    assert fast(none, none, none, none).shape == twin(none, none, none, none).shape == (0,)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lin = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(self.emb(x))
        return out


class Odd(torch.nn.Module):
    """Its own forward cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.inner = torch.nn.Embedding(9, 4), Inner()

    def forward(self, x: Tensor) -> Tensor:
        factor = float((x.numpy() % 5).mean())
        out: Tensor = self.emb(x).sum(1) * factor + self.inner(x).sum(1)
        return out


def test_a_model_that_is_captured_in_part() -> None:
    """One lookup is the module's own, the other a part's; both find rows."""
    torch.manual_seed(0)
    model = Odd()
    how = recast.Dynamic(max_rows=30)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    batches = [torch.tensor([2**40, 5]), torch.tensor([2**40, 7, 9])]
    fast, opt = recast.optimize(model, opt, example=batches, tables={"emb": how, "inner.emb": how})
    assert list(fast.parts) == ["inner"]
    tables = recast.dynamic.tables(fast)
    seen = set()
    for k in range(4):
        ids = torch.tensor([k, 2**41 + k, 5])
        before = fast(ids)
        opt.zero_grad()
        before.square().sum().backward()
        opt.step()
        assert (fast(ids) != before).any()
        seen |= set(ids.tolist())
    assert {*tables["emb"].ids().tolist()} == {*tables["inner.emb"].ids().tolist()} == seen
    new = torch.tensor([10**12])
    fast.eval()
    for path, table in tables.items():
        assert torch.equal(fast.get_submodule(path)(new), table.initial_rows(new))


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_may_not_average_rows_of_other_ids(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the forward of a DistributedDataParallel of the user's."""
    fast, _, _, stream = pair()
    group = SimpleNamespace(size=lambda: ranks)
    around = SimpleNamespace(process_group=group, module=fast)
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", around)
    refused = pytest.raises(UsageError, match="a dynamic table inside DistributedDataParallel")
    with refused if ranks > 1 else nullcontext():
        fast(*stream.batch(5))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("first", [adagrad, sgd])
def test_rows_are_new_to_all_optimizers(first: Any) -> None:
    """The row of an id that is gone has its state in the optimizer that does not step, too."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, mode="sum"))
    tables = {"0": recast.Dynamic(max_rows=2, evict="lru", seed=5)}
    fast = recast.optimize(model, example=torch.tensor([[1], [2]]), tables=tables)
    opts = first(fast), adagrad(fast)

    def step(id_: int, opt: torch.optim.Optimizer, scale: float = 1.0) -> None:
        for one in opts:
            one.zero_grad()
        (fast(torch.tensor([[id_]])) * scale).sum().backward()
        opt.step()

    step(1, opts[1], 100.0)
    step(2, opts[0]), step(3, opts[0])  # which gets the row of 1
    before = fast.eval()(torch.tensor([[3]])).detach()
    step(3, opts[1])
    torch.testing.assert_close(fast(torch.tensor([[3]])), before - 0.1)


def test_a_gradient_in_eval_mode_is_of_rows_with_padding_too() -> None:
    """The row for padding, beside those of ids that are not stored, has no gradient."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, mode="sum", padding_idx=0))
    ids = torch.tensor([[1, 2], [3, 0]])
    tables = {"0": recast.Dynamic(max_rows=50, seed=5)}
    fast = recast.optimize(model, example=ids, tables=tables)
    fast(ids).sum().backward()
    adagrad(fast).step()
    fast[0].weight.grad = None
    fast.eval()(torch.tensor([[1, 0], [1, 77]])).sum().backward()
    assert "2 rows" in repr(fast[0].weight.grad) and "dense" not in repr(fast[0].weight.grad)
