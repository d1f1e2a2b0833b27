"""Copies, checkpoints, exports: training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from dynamickit import Model, Stream, example, train
from torch import Tensor, nn

import recast
from recast.errors import CheckpointError, NotBuiltError, UsageError
from recast.optim import RowWiseAdagrad

HOW = {
    "user": recast.Dynamic(max_rows=12, evict="lfu", seed=5),
    "items": recast.Dynamic(max_rows=20, evict="lru", admit=recast.MinCount(2), ttl=6),
}


def made(kind: Any = torch.optim.Adagrad, seed: int = 3) -> tuple[Any, Any, Stream]:
    torch.manual_seed(seed)
    model, stream = Model(), Stream(1)
    fast, opt = recast.optimize(
        model, kind(model.parameters(), lr=0.1), example=example(stream), tables=HOW
    )
    return fast, opt, stream


def same_from_here(
    one: tuple[Any, Any], other: tuple[Any, Any], batches: list[tuple[Tensor, ...]]
) -> None:
    for a, b in zip(train(*one, batches), train(*other, batches), strict=True):
        assert torch.equal(a, b)
    mine, theirs = one[0].state_dict(), other[0].state_dict()
    assert list(mine) == list(theirs)
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, RowWiseAdagrad, torch.optim.SGD])
def test_a_checkpoint(kind: Any) -> None:
    fast, opt, stream = made(kind)
    train(fast, opt, [stream.batch(7) for _ in range(12)])
    model, state = saved(fast.state_dict()), saved(opt.state_dict())
    assert model["user.weight"].shape == (len(model["user.ids"]), 8)
    for value in state["state"].values():
        assert all(v.numel() < 10**4 for v in value.values() if isinstance(v, Tensor))
    again, opt_again, _ = made(kind, seed=4)
    train(again, opt_again, [Stream(2).batch(9) for _ in range(3)])  # what it had is gone
    again.load_state_dict(model)
    opt_again.load_state_dict(state)
    same_from_here((fast, opt), (again, opt_again), [stream.batch(9) for _ in range(12)])


@pytest.mark.parametrize("evict", ["lru", "lfu", "epoch_lfu"])
def test_of_equal_rows_a_loaded_table_evicts_the_same(evict: Any) -> None:
    """Though its ids have other rows: those that expired or were erased leave no gaps in it."""
    how = {"items": recast.Dynamic(max_rows=20, evict=evict, ttl=2)}
    for seed in range(4):
        pairs: list[tuple[Any, Any]] = []
        for _ in range(2):
            torch.manual_seed(seed)
            model, stream = Model(rows=30), Stream(seed, many=60)
            opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
            given = _numbered(example(stream))
            pairs.append(recast.optimize(model, opt, example=given, tables=how))
        one, other = pairs
        train(*one, _numbered([stream.batch(6) for _ in range(12)]))
        recast.dynamic.tables(one[0])["items"].erase(stream.things[::3])
        other[0].load_state_dict(saved(one[0].state_dict()))
        other[1].load_state_dict(saved(one[1].state_dict()))
        copied = copy.deepcopy(one)
        for batch in _numbered([stream.batch(6) for _ in range(12)]):
            outs = [train(*pair, [batch])[0] for pair in (one, other, copied)]
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
            mine, *theirs = (recast.dynamic.export(pair[0].items) for pair in (one, other, copied))
            assert all(torch.equal(mine.ids, each.ids) for each in theirs)


def _numbered(batches: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """``batches`` whose users are rows of a plain table."""
    return [(batch[0].remainder(30), *batch[1:]) for batch in batches]


def test_weights_and_state_of_a_row_lie_side_by_side() -> None:
    """In one record, where the state is like the weights; the row-wise sum is one number a row."""
    fast, opt, _ = made()
    weight, total = fast.user.weight, opt.state[fast.user.weight]["sum"]
    assert weight.stride() == total.stride() == (16, 1)
    assert total.data_ptr() == weight.data_ptr() + 8 * 4
    fast, opt, _ = made(RowWiseAdagrad)
    assert fast.user.weight.stride() == (8, 1) and opt.state[fast.user.weight]["sum"].dim() == 1


def test_a_copy_and_a_pickle() -> None:
    fast, opt, stream = made()
    train(fast, opt, [stream.batch(7) for _ in range(6)])
    copied = copy.deepcopy((fast, opt))
    batches = [stream.batch(9) for _ in range(6)]
    file = io.BytesIO()
    torch.save((fast, opt), file)
    assert file.tell() < 2**18  # the rows, and not the memory that is reserved for more
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model, other in (copied, loaded):  # a record is one, as it was
        weight, total = model.user.weight, other.state[model.user.weight]["sum"]
        assert weight.stride() == total.stride() == (16, 1)
        assert total.data_ptr() == weight.data_ptr() + 8 * 4
    before = copy.deepcopy((fast, opt))
    same_from_here((fast, opt), copied, batches)
    same_from_here(before, loaded, batches)


def test_a_copy_of_a_copy_between_lookup_and_step() -> None:
    """Row-wise Adagrad's state is apart; what has other memory by now is copied as any tensor."""
    fast, opt, stream = made(RowWiseAdagrad)
    train(fast, opt, [stream.batch(7) for _ in range(6)])
    pickled = pickle.dumps((fast, opt))
    assert len(pickled) < 2**18
    copied = copy.deepcopy(pickle.loads(pickled))
    fast(*stream.batch(5))
    again = copy.deepcopy((fast, opt))
    for _ in range(2):
        for one in (fast, again[0]):
            one.zero_grad()
        assert opt.state[fast.user.weight]["sum"].dim() == 1
    same_from_here((fast, opt), again, [stream.batch(9) for _ in range(3)])
    train(*copied, [stream.batch(9) for _ in range(3)])
    with torch.no_grad():
        fast.user.weight.data = torch.ones(3, 8)
    assert torch.equal(copy.deepcopy(fast.user.weight), torch.ones(3, 8))
    assert torch.equal(pickle.loads(pickle.dumps(fast.user.weight)), torch.ones(3, 8))


def test_a_copy_of_the_model_alone_with_an_optimizer_of_its_own() -> None:
    fast, opt, stream = made()
    train(fast, opt, [stream.batch(7) for _ in range(6)])
    copied = copy.deepcopy(fast)
    mine = torch.optim.Adagrad(copied.parameters(), lr=0.1)
    train(copied, mine, [stream.batch(9) for _ in range(6)])
    assert len(fast.state_dict()["user.ids"]) <= 12
    table = recast.dynamic.tables(copied)["user"]
    assert table is not recast.dynamic.tables(fast)["user"]


def test_a_checkpoint_that_does_not_fit() -> None:
    fast, opt, stream = made()
    train(fast, opt, [stream.batch(7) for _ in range(12)])
    model, state = fast.state_dict(), opt.state_dict()
    again, opt_again, _ = made()
    with pytest.raises(CheckpointError, match="rows, and 0 are stored") as caught:
        opt_again.load_state_dict(state)
    assert "load_state_dict of the model before" in str(caught.value)
    torn = {**model, "user.ids": model["user.ids"][:1].expand(len(model["user.ids"]))}
    with pytest.raises(RuntimeError, match="an id is there twice"):
        again.load_state_dict(torn)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "user\.ids"'):
        again.load_state_dict({k: v for k, v in model.items() if k != "user.ids"})
    many = {k: torch.zeros(99, *v.shape[1:], dtype=v.dtype) if k.startswith("user.") else v
            for k, v in model.items()}  # fmt: skip
    many["user.ids"] = torch.arange(99)
    with pytest.raises(RuntimeError, match="99 ids for a table of 12 rows"):
        again.load_state_dict({**many, "user.seen": model["user.seen"]})


def test_export_to_a_plain_table_and_import() -> None:
    fast, opt, stream = made()
    train(fast, opt, [stream.batch(7) for _ in range(12)])
    out = recast.dynamic.export(fast.user)
    plain = nn.Embedding.from_pretrained(out.rows)
    raw = out.ids[torch.randint(len(out.ids), (20,))]
    number = torch.searchsorted(out.ids, raw)
    assert torch.equal(plain(number), fast.eval().user(raw))
    other, other_opt, _ = made()
    recast.dynamic.import_(other.user, out.ids, out.rows)
    back = recast.dynamic.export(other.user)
    assert torch.equal(back.ids, out.ids) and torch.equal(back.rows, out.rows)
    train(other, other_opt, [stream.batch(7)])
    with pytest.raises(UsageError, match="one id for each row of 8 numbers"):
        recast.dynamic.import_(other.user, out.ids, out.rows[:, :3])
    with pytest.raises(UsageError, match="Linear is no dynamic embedding"):
        recast.dynamic.export(nn.Linear(1, 1))


def test_what_changed_keeps_a_copy_up_to_date() -> None:
    fast, opt, stream = made()
    copies: dict[str, dict[int, Tensor]] = {"user": {}, "items": {}}
    with pytest.raises(UsageError, match="nothing is known of step 1"):
        recast.dynamic.changed(fast.user, 1)
    since = {name: recast.dynamic.mark(fast.get_submodule(name)) for name in copies}
    told = 0
    for _ in range(10):
        train(fast, opt, [stream.batch(3)])
        for name, held in copies.items():
            module = fast.get_submodule(name)
            news = recast.dynamic.changed(module, since[name])
            since[name] = recast.dynamic.mark(module)
            for gone in news.gone.tolist():
                held.pop(gone, None)
            held.update(zip(news.rows.ids.tolist(), news.rows.rows, strict=True))
            told += len(news.rows.ids)
            all_of_it = recast.dynamic.export(module)
            assert sorted(held) == all_of_it.ids.tolist()
            for id_, row in zip(all_of_it.ids.tolist(), all_of_it.rows, strict=True):
                assert torch.equal(held[id_], row)
    assert told < 10 * (12 + 20)  # not all of it each time


def test_the_report_says_how_the_table_does() -> None:
    fast, opt, stream = made()
    train(fast, opt, [stream.batch(7) for _ in range(8)])
    counters = recast.dynamic.tables(fast)["user"].counters()
    assert counters["evicted"] > 0 and counters["hits"] + counters["misses"] == 56
    text = str(fast.report)
    assert f"user: 12 of 12 rows, {100 * counters['hits'] / 56:.1f} % of 56 lookups hit" in text
    assert f"{counters['inserted']} inserted, {counters['evicted']} evicted" in text


# ---------------------------------------------------------------- what is refused


def refused(match: str, kind: type[Exception] = UsageError, **options: Any) -> None:
    torch.manual_seed(0)
    model = options.pop("model", None) or Model()
    opt = options.pop("optimizer", lambda m: None)(model)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    types = [type(m) for m in model.modules()]
    arguments = (model,) if opt is None else (model, opt)
    with pytest.raises(kind, match=match):
        recast.optimize(*arguments, **options)
    assert [type(m) for m in model.modules()] == types  # the model is as it was
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


USER = {"user": recast.Dynamic(max_rows=9)}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda m: torch.optim.Adam(m.parameters()), "Adam cannot step a dynamic table"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1, momentum=0.9), "momentum moves every"),
        (lambda m: torch.optim.Adagrad(m.parameters(), weight_decay=0.1), "weight_decay changes"),
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop is not fused"),
        (lambda m: torch.optim.SparseAdam(m.user.parameters()), "wants sparse=True"),
    ],
)
def test_optimizers_that_move_untouched_rows(make: Any, why: str) -> None:
    refused(why, optimizer=make, tables=USER)


def starting(*distribution: Any) -> dict[str, recast.Dynamic]:
    initial = recast.dynamic.Initial(*distribution)
    return {"user": recast.Dynamic(max_rows=9, initial=initial)}


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"users": recast.Dynamic(max_rows=9)}, "no module 'users'"),
        ({"top.0": recast.Dynamic(max_rows=9)}, "it is a Linear"),
        ({}, "tables names modules"),
        ("user", "tables names modules"),
        ({"user": 9}, "9 is no recast.Dynamic"),
        ({"user": recast.Dynamic()}, "a budget is one of max_rows, max_bytes and tiers"),
        ({"user": recast.Dynamic(max_rows=9, max_bytes=9)}, "a budget is one of"),
        ({"user": recast.Dynamic(max_bytes=9)}, "less than one row"),
        ({"user": recast.Dynamic(max_bytes="9 B")}, "max_bytes=9 is less than one row"),
        ({"user": recast.Dynamic(max_bytes="much")}, "'much' is no number of bytes"),
        ({"user": recast.Dynamic(max_rows=0)}, "max_rows=0 is not a positive number"),
        ({"user": recast.Dynamic(max_rows=9, ttl=-1)}, "ttl=-1 is not a positive number"),
        ({"user": recast.Dynamic(max_rows=9, evict="old")}, "evict='old' is none of lru"),  # type: ignore[arg-type]
        ({"user": recast.Dynamic(max_rows=9, admit=3)}, "admit=3"),  # type: ignore[arg-type]
        ({"user": recast.Dynamic(max_rows=2**32)}, "numbered by 32 bits"),
        ({**USER, "items": recast.Dynamic()}, "items: a budget is one of"),
        (starting("normal ", 0, 1), "kinds are normal and uniform"),
        (starting("normal", 0, -1), "a standard deviation is not negative"),
        (starting("normal", float("nan"), 1), "nan is no finite number"),
        (starting("uniform", 0, "1"), "'1' is no finite number"),
    ],
)
def test_wrong_settings(tables: Any, why: str) -> None:
    refused(why, tables=tables)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tables": {"user": recast.Dynamic(max_rows=9, tiers=["disk"])}}, "tiers="),
        ({"tables": USER, "mode": "graph"}, "graph"),
        ({"tables": {"user": recast.Dynamic(max_rows=9, tiers=[recast.Host("9MiB")])}}, "tiers="),
    ],
)
def test_what_is_not_built(options: Any, why: str) -> None:
    refused(why, (NotBuiltError, UsageError), **options)  # type: ignore[arg-type]


def test_a_weight_that_others_read() -> None:
    model = Model(dim=8, rows=16)
    model.top[0] = nn.Linear(8, 16, bias=False)
    model.top[0].weight = model.user.weight
    refused("top.0 holds its weight too", model=model, tables=USER)


def test_max_bytes_counts_optimizer_state() -> None:
    rows = []
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        model = Model()
        fast, _ = recast.optimize(
            model, kind(model.parameters(), lr=0.1), example=example(Stream(1)),
            tables={"user": recast.Dynamic(max_bytes=10**6, evict="lru"), "items": HOW["items"]},
        )  # fmt: skip
        rows.append(recast.dynamic.tables(fast)["user"].capacity)
    assert rows == [10**6 // (32 + 64), 10**6 // (64 + 64)]


def test_explain_leaves_the_model_as_it_is() -> None:
    model, stream = Model(), Stream(1)
    plain = type(model.user), model.user.weight.shape
    batches = [tuple(t % 5 for t in stream.batch(n)[:1]) for n in (4, 6)]
    report = recast.explain(nn.Sequential(model.user), example=batches, tables={"0": USER["user"]})
    assert "0 is dynamic" in str(report)
    assert (type(model.user), model.user.weight.shape) == plain
