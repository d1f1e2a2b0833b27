"""What lookups store, what they return, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import UsageError


def one(how: recast.Dynamic, dim: int = 4, **options: Any) -> tuple[Any, Any, Any]:
    """A model that is one embedding, its optimizer and its table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, dim, **options))
    opt = torch.optim.Adagrad(model.parameters(), lr=0.5)
    fast, opt = recast.optimize(
        model, opt, example=[torch.tensor([1, 2]), torch.tensor([1, 2, 3])], tables={"0": how}
    )
    return fast, opt, recast.dynamic.tables(fast)["0"]


def step(fast: Any, opt: Any, ids: Tensor) -> Tensor:
    opt.zero_grad()
    out: Tensor = fast(ids)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    out.backward(up)
    opt.step()
    return out.detach()


def test_the_graph_shows_the_rows_being_found() -> None:
    fast, _, _ = one(recast.Dynamic(max_rows=9))
    text = str(fast)
    assert text.index("find_rows") < text.index("embedding_bags")
    assert "0 is dynamic: at most 9 rows" in str(fast.report)
    assert "of dense gradient" not in str(fast.report)  # of no size: there never was one


def test_eval_answers_new_ids_by_their_initial_value_and_stores_nothing() -> None:
    fast, opt, table = one(recast.Dynamic(max_rows=9, seed=3))
    seen, new = torch.tensor([2**40, -5]), torch.tensor([77, -(2**63), 2**63 - 1])
    step(fast, opt, seen)
    both = torch.cat([new, seen, new])
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            out = fast.eval()(both)
        torch.testing.assert_close(out[:3], table.initial_rows(new), rtol=0, atol=0)
        torch.testing.assert_close(out[5:], out[:3], rtol=0, atol=0)
        assert not torch.equal(out[3:5], table.initial_rows(seen))  # they were trained
    assert sorted(table.ids().tolist()) == sorted(seen.tolist())
    fast.train()
    with torch.no_grad():
        fast(new)
    assert len(table) == 2


def test_stored_rows_learn_in_eval_mode_too() -> None:
    """As the rows of a plain table do; new ids are not stored for that."""
    fast, opt, table = one(recast.Dynamic(max_rows=9))
    ids = torch.tensor([10**15, 4])
    step(fast, opt, ids)
    before = fast.eval()(ids).detach()
    step(fast, opt, torch.cat([ids, torch.tensor([8])]))
    assert len(table) == 2
    assert (fast(ids) != before).any(1).all()


def test_initial_values_depend_on_seed_name_and_id_only() -> None:
    ids = torch.tensor([5, -9, 2**50])
    first = one(recast.Dynamic(max_rows=9))[2].initial_rows(ids)
    fast, opt, _ = one(recast.Dynamic(max_rows=3))
    got = step(fast, opt, ids.flip(0)).flip(0)
    torch.testing.assert_close(got, first, rtol=0, atol=0)
    assert not torch.equal(one(recast.Dynamic(max_rows=9, seed=1))[2].initial_rows(ids), first)
    assert first.unique().numel() == first.numel()


@pytest.mark.parametrize(
    ("fill", "kind"),
    [
        (lambda w: w.uniform_(-0.01, 0.01), "uniform"),
        (lambda w: w.normal_(1, 0.1), "normal"),
        (lambda w: w.zero_(), "normal"),
    ],
)
def test_new_rows_are_like_those_of_the_model(fill: Any, kind: str) -> None:
    model = nn.Sequential(nn.Embedding(500, 8))
    fill(model[0].weight.data)
    old = model[0].weight.detach().clone()
    fast = recast.optimize(model, example=torch.arange(4), tables={"0": recast.Dynamic(max_rows=9)})
    table = recast.dynamic.tables(fast)["0"]
    new = table.initial_rows(torch.arange(10**6, 10**6 + 4000))
    assert table.initial.kind == kind
    assert abs(float(new.mean() - old.mean())) < 0.05 * float(old.std()) + 1e-12
    assert abs(float(new.std() - old.std())) < 0.05 * float(old.std()) + 1e-12


def test_a_full_table_raises_and_loses_nothing() -> None:
    fast, opt, table = one(recast.Dynamic(max_rows=3))
    step(fast, opt, torch.tensor([1, 2]))
    rows = fast.state_dict()
    with pytest.raises(UsageError, match="0: id 4 is new, and all 3 rows are taken"):
        fast(torch.tensor([3, 2, 4]))
    assert sorted(table.ids().tolist()) == [1, 2]
    for name, value in fast.state_dict().items():
        assert name.endswith(("stamps", "clock")) or torch.equal(value, rows[name]), name
    step(fast, opt, torch.tensor([3, 3, 1]))
    assert table.erase(torch.tensor([2, 99])) == 1
    step(fast, opt, torch.tensor([4]))
    assert sorted(table.ids().tolist()) == [1, 3, 4]


def test_an_evicted_row_starts_anew() -> None:
    """Its weights and its optimizer state are those of a new row, not those of the old one."""
    fast, opt, table = one(recast.Dynamic(max_rows=2, evict="lru"))
    fresh, fresh_opt, _ = one(recast.Dynamic(max_rows=2))
    for _ in range(3):
        step(fast, opt, torch.tensor([1, 2]))
    out = step(fast, opt, torch.tensor([3]))
    torch.testing.assert_close(out, step(fresh, fresh_opt, torch.tensor([3])), rtol=0, atol=0)
    torch.testing.assert_close(
        fast.eval()(torch.tensor([3])), fresh.eval()(torch.tensor([3])), rtol=0, atol=0
    )
    assert sorted(table.ids().tolist()) == [2, 3]
    assert table.counters()["evicted"] == 1


def test_rows_with_a_gradient_are_not_evicted() -> None:
    """Ids beyond the table get their initial value for this step, and are refused."""
    fast, opt, table = one(recast.Dynamic(max_rows=3, evict="lru"))
    ids = torch.tensor([1, 2, 3, 4, 5, 4])
    torch.testing.assert_close(step(fast, opt, ids), table.initial_rows(ids), rtol=0, atol=0)
    assert sorted(table.ids().tolist()) == [1, 2, 3]
    assert table.counters()["refused"] == 2
    step(fast, opt, torch.tensor([4]))
    assert sorted(table.ids().tolist()) == [2, 3, 4]


def test_admission_counts_lookups() -> None:
    fast, opt, table = one(recast.Dynamic(max_rows=9, admit=recast.MinCount(3)))
    a, b = torch.tensor([7]), torch.tensor([8, 8, 8])
    first = step(fast, opt, a)
    assert torch.equal(step(fast, opt, a), first)  # its gradient was dropped
    assert len(table) == 0
    step(fast, opt, b)
    assert table.ids().tolist() == [8]
    step(fast, opt, a)
    assert sorted(table.ids().tolist()) == [7, 8]
    assert not torch.equal(step(fast, opt, a), first)


def test_ids_are_forgotten_after_their_time() -> None:
    fast, opt, table = one(recast.Dynamic(max_rows=9, ttl=2))
    ids = torch.tensor([1, 2])
    first = step(fast, opt, ids)
    step(fast, opt, ids[1:])
    assert sorted(table.ids().tolist()) == [1, 2]
    step(fast, opt, ids[1:])
    assert table.ids().tolist() == [2]
    assert torch.equal(fast.eval()(ids[:1]), first[:1])
    assert torch.equal(step(fast.train(), opt, ids[:1]), first[:1])
    assert table.counters()["expired"] == 1


def test_scores_of_the_users_own() -> None:
    fast, opt, table = one(recast.Dynamic(max_rows=2, evict=lambda ids: -ids))
    step(fast, opt, torch.tensor([5, 9]))
    out = step(fast, opt, torch.tensor([20, 3]))
    assert sorted(table.ids().tolist()) == [3, 5]  # 9 made room for 3; 20 is worse than both
    assert torch.equal(out[:1], table.initial_rows(torch.tensor([20])))
    fast, _, _ = one(recast.Dynamic(max_rows=2, evict=lambda ids: ids.float()))
    with pytest.raises(UsageError, match=r"evict gave a float32 tensor of shape \(2,\) for 2 ids"):
        fast(torch.tensor([1, 2]))


def test_padding() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode="mean", padding_idx=3))
    plain = copy.deepcopy(model)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    example = [torch.randint(9, (2, 3)), torch.randint(9, (3, 3))]
    fast, opt = recast.optimize(
        model, opt, example=example, tables={"0": recast.Dynamic(max_rows=20)}
    )
    table = recast.dynamic.tables(fast)["0"]
    plain[0].weight.data = table.initial_rows(torch.arange(9))
    plain[0].weight.data[3] = 0.0
    plain_opt = torch.optim.SGD(plain.parameters(), lr=1.0)
    for k in range(4):
        ids = torch.randint(9, (5, 3), generator=torch.Generator().manual_seed(k))
        ids[2], ids[:, 1] = 3, 3
        torch.testing.assert_close(step(fast, opt, ids), step(plain, plain_opt, ids))
    assert 3 not in table.ids().tolist()
    fast.eval(), plain.eval()
    torch.testing.assert_close(fast(ids), plain(ids))
    far = torch.tensor([[3, 3, 10**9]])
    torch.testing.assert_close(fast(far), table.initial_rows(far[0, 2:]))


def test_a_gradient_of_an_earlier_step() -> None:
    fast, opt, _ = one(recast.Dynamic(max_rows=9, evict="lru"))
    step(fast, opt, torch.tensor([1]))
    fast(torch.tensor([2])).sum().backward()
    with pytest.raises(UsageError, match="holds that of a step that was done"):
        opt.step()


def test_modules_that_share_a_table() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, mode="sum")
            self.b.weight = self.a.weight

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.a(x) + self.b(y)
            return out

    example = [(torch.arange(n), torch.arange(2 * n).view(n, 2)) for n in (2, 3)]
    model = Shared()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    fast, opt = recast.optimize(
        model, opt, example=example, tables={"b": recast.Dynamic(max_rows=20)}
    )
    table = recast.dynamic.tables(fast)["a"]
    x, y = torch.tensor([10**9, 4]), torch.tensor([[4, 4], [5, 10**9]])
    w = table.initial_rows(torch.tensor([4, 5, 10**9]))
    want = torch.stack([w[2] + 2 * w[0], w[0] + w[1] + w[2]])
    torch.testing.assert_close(fast(x, y).detach(), want)
    fast(x, y).sum().backward()
    opt.step()
    got = dict(zip(table.ids().tolist(), fast.state_dict()["a.weight"], strict=True))
    counts = {4: 3, 5: 1, 10**9: 2}
    for id_, row in zip([4, 5, 10**9], w, strict=True):
        torch.testing.assert_close(got[id_], row - counts[id_])


class Tied(torch.nn.Module):
    """Reads the weight of its embedding beside calling it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.how = torch.nn.Embedding(9, 4), how

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.emb(ids)
        if self.how == "lookup":
            return rows + torch.nn.functional.embedding(ids, self.emb.weight)
        return rows + self.emb.weight.square().sum()


@pytest.mark.parametrize("how", ["lookup", "matrix"])
def test_a_weight_that_is_read_as_a_matrix_is_refused(how: str) -> None:
    model, ids = Tied(how), torch.arange(6)
    before = model.emb.weight.detach().clone()
    with pytest.raises(recast.UsageError, match="is read as a matrix") as caught:
        recast.optimize(model, example=[ids, ids[:4]], tables={"emb": recast.Dynamic(max_rows=9)})
    assert "test_dynamic_lookups.py" in str(caught.value.where)
    assert type(model.emb) is torch.nn.Embedding and torch.equal(model.emb.weight, before)
