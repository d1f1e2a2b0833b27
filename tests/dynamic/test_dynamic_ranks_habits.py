"""Dynamic tables over ranks: plan, graph, what is refused, what all ranks agree on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamickit import Model, Stream, example
from dynamicranks import ADAGRAD, HOW, joined, labels, made, steps, steps_of
from harness import run
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import NotBuiltError, UsageError
from recast.rewriter.cli.main import main
from recast.runtime.plan import Plan, Table, explicit
from recast.runtime.ranks.hashed import part_of


def test_the_hash_is_even_and_stays_what_it_is() -> None:
    ids = torch.tensor([0, 1, 2, -1, 2**62, -(2**63), 2**63 - 1])
    assert part_of(ids, 4).tolist() == PARTS
    assert part_of(ids.int()[:4], 4).tolist() == PARTS[:4]
    for spread in (
        torch.arange(60_000),
        torch.arange(60_000) << 40,
        torch.randint(2**62, (60_000,)),
    ):
        counts = part_of(spread, 6).bincount(minlength=6)
        assert counts.sum() == 60_000 and (counts - 10_000).abs().max() < 500  # 5 deviations
    assert part_of(torch.empty(0, dtype=torch.int64), 3).shape == (0,)


PARTS = [0, 2, 3, 2, 1, 2, 3]


def planned(world: int = 4, **options: Any) -> Any:
    fast, _ = made(world_size=world, dtype=torch.float32, **options)
    return fast


def test_the_plan_and_the_graph() -> None:
    fast = planned()
    placed = {p.table: p for p in fast.plan.placements}
    for name in HOW:
        assert placed[f"{name}.weight"].sharding_type == "row_wise"
        assert [s.size for s in placed[f"{name}.weight"].shards] == [(40, 8)] * 4
        assert placed[f"{name}.weight"].state_bytes == 8 * 4 + 64, "Adagrad's sum, and the id"
    again = Plan.from_json(fast.plan.to_json())
    assert again == fast.plan and again.tables[0].dynamic
    told = json.loads(fast.plan.to_json())["tables"]
    assert [t.get("dynamic") for t in told if t["name"] in ("user.weight", "day.weight")] == [
        True, None
    ]  # fmt: skip
    names = [n.name.removesuffix("_1") for n in fast.graph.nodes]
    order = ["send_ids", "wait_ids", "find_rows", "embedding_bags", "send_rows", "wait_rows"]
    assert [names.index(n) for n in order] == sorted(names.index(n) for n in order)
    assert names.count("find_rows") == 1, "none is left before the exchange"
    assert "find_own_rows" in str(fast)
    with pytest.raises(UsageError, match="made for 4 ranks"):
        fast(*Stream(1).batch(3))


def test_recast_plan_knows_dynamic_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.user, self.day = nn.Embedding(40, 8), nn.Embedding(7, 8)\n"
        "    def forward(self, user, day): return (self.user(user) * self.day(day)).sum(1)\n"
        "def model(): return Model(), (torch.arange(6), torch.arange(6))\n"
    )
    spec = [str(tmp_path / "spec.py") + ":model", "--world-size", "4"]
    assert main(["plan", *spec, "--dynamic", "user=1000", "--explain", "user.weight"]) == 0
    said = capsys.readouterr().out
    assert "dynamic, at most 1,000 x 8 float32, row_wise" in said
    assert "rank    3  ids of its hash, at most 250 rows" in said
    assert main(["plan", *spec, "--dynamic", "user=1MiB", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert {t["name"]: t["rows"] for t in tables if t.get("dynamic")} == {
        "user.weight": 2**20 // (8 * 4 * 2 + 64)
    }
    assert main(["plan", *spec, "--dynamic", "user=many"]) == 2
    (tmp_path / "tables.json").write_text(
        '{"tables": [{"name": "u", "rows": 100, "dim": 8, "dynamic": true}], "world_size": 4}'
    )
    capsys.readouterr()
    assert main(["plan", "--tables", str(tmp_path / "tables.json"), "--explain", "u"]) == 0
    assert "at most 25 rows" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_a_dynamic_table() -> None:
    table = Table("user.weight", 10, 8, dynamic=True)
    explicit([table], 4).check()
    with pytest.raises(UsageError, match="dynamic, but not row_wise over all 4 ranks"):
        explicit([table], 4, {"user.weight": "table_wise"}).check()
    with pytest.raises(UsageError, match="dynamic, but not row_wise"):
        explicit([Table("user.weight", 3, 8, dynamic=True)], 4).check()
    with pytest.raises(UsageError, match="10 x 8 float32, dynamic in the model"):
        explicit([Table("user.weight", 10, 8)], 4).check([table])
    with pytest.raises(UsageError, match=r"user\.weight cannot be table_wise"):
        planned(sharding={"user": "table_wise"})


@pytest.mark.parametrize("change", ["max", "hook"])
def test_lookups_that_cannot_be_spread(change: str) -> None:
    model = Model()
    if change == "max":
        model.items = nn.EmbeddingBag(40, 8, mode="max")
    else:
        model.items.register_forward_hook(lambda *_: None)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"items\.weight cannot be dynamic on several ranks"):
        recast.optimize(model, example=example(Stream(1)), tables=HOW, world_size=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def full(rank: int) -> Any:
    how = {**HOW, "items": recast.Dynamic(max_rows=4, seed=5)}
    fast, opt = made(how=how)
    with pytest.raises(UsageError) as caught:
        steps(fast, opt, steps_of(2, 3), rank)
    return str(caught.value)


def test_a_full_part_is_an_error_on_all_ranks() -> None:
    said = run(2, full)
    assert any("all 2 rows are taken" in text and "of 2 of the ids" in text for text in said)
    other = [text for text in said if "rows are taken" not in text]
    assert all("could not look up what it was sent" in text for text in other)


def unlike(rank: int) -> None:
    how = {**HOW, "items": recast.Dynamic(max_rows=40 + rank)}
    with pytest.raises(UsageError, match=r"differ.* in: .*tables"):
        made(how=how)


def test_fewer_rows_than_ranks() -> None:
    with pytest.raises(UsageError, match=r"its budget is 2 rows, and there are 3 ranks"):
        made(how={name: recast.Dynamic(max_rows=2) for name in HOW}, world_size=3)


def test_other_settings_on_one_rank() -> None:
    run(2, unlike)


def habits(rank: int, world: int) -> Any:
    """Evaluation, clipping, two backwards a step, counters, a copy."""
    fast, opt = made(how=MANY)
    batches = steps_of(2, 6)
    if world == 1:
        batches = [[joined(parts)] for parts in batches]
    norms = []
    for parts in batches:
        opt.zero_grad()
        for _ in range(2):
            own, total = parts[rank], sum(len(p[0]) for p in parts)
            out = fast(*own)
            losses = F.binary_cross_entropy_with_logits(out, labels(own), reduction="sum")
            (losses * (world / total)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(fast.parameters(), 0.05))
        opt.step()
    fast.eval()
    before = [len(t) for t in recast.dynamic.tables(fast).values()]
    new = Stream(77).batch(4)
    out = fast(*new)
    assert before == [len(t) for t in recast.dynamic.tables(fast).values()], "nothing is stored"
    counters = [t.counters() for t in recast.dynamic.tables(fast).values()]
    told = str(fast.report)
    copied = copy.deepcopy(fast)
    assert torch.equal(copied(*new), out)
    return norms, out, counters, told


MANY = {  # ids wait, are forgotten; nothing is evicted
    "user": recast.Dynamic(max_rows=160, admit=recast.MinCount(3), seed=5),
    "items": recast.Dynamic(max_rows=160, evict="lfu", ttl=2, seed=5),
}


def test_habits_admission_and_time_to_live() -> None:
    """Counted and forgotten as on one process; a norm is of all ranks' rows."""
    norms, out, counters, _ = habits(0, 1)
    results = run(2, habits, 2)
    for rank, (mine, answer, _, told) in enumerate(results):
        assert f"items (part {rank + 1} of 2): " in told
        torch.testing.assert_close(torch.stack(mine), torch.stack(norms), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(answer, out, rtol=1e-9, atol=1e-10)
    for k, wanted in enumerate(counters):
        assert {n: sum(r[2][k][n] for r in results) for n in wanted} == wanted


def wired(rank: int) -> Tensor:
    fast, opt = made(wire="fp16", dtype=torch.float32)
    return torch.cat(steps(fast, opt, steps_of(2, 4), rank))


def test_rows_on_the_wire() -> None:
    plain = made(dtype=torch.float32)
    wanted = torch.cat(steps(*plain, steps_of(2, 4)))
    got = run(2, wired)
    sizes = [[len(p[0]) for p in parts] for parts in steps_of(2, 4)]
    cut = [list(g.split([row[r] for row in sizes])) for r, g in enumerate(got)]
    whole = torch.cat([torch.cat(pair) for pair in zip(*cut, strict=True)])
    torch.testing.assert_close(whole, wanted, rtol=2e-2, atol=2e-2)  # halves
    assert not torch.equal(whole, wanted)


def test_a_table_with_rows_is_not_spread() -> None:
    fast, opt = made()
    steps(fast, opt, [[joined(parts)] for parts in steps_of(2, 2)], 0)

    def one_rank(rank: int) -> None:
        with pytest.raises(UsageError, match=r"user holds .* rows: a table is spread"):
            recast.optimize(copy.deepcopy(fast._root), example=example(Stream(1)), world_size=2)

    run(2, one_rank)
    with pytest.raises((UsageError, NotBuiltError)):
        made(mode="graph", world_size=2)
    assert ADAGRAD
