"""``precision=`` on several ranks: each stores its parts of tables; the numbers of one rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every import COLUMNS, MIXED, TABLES, Every, batch, planned
from harness import processes, run
from judged import adagrad
from torch import Tensor, nn

import recast
from recast.errors import PlanError, UsageError
from recast.runtime import tolerances, topology
from recast.runtime.embedding import precision as formats
from recast.runtime.embedding.precision_table import StoredTable

EXAMPLE = batch([5, 4], 0)[0]
SIZES = [4, 3, 5, 2]


def every(seed: int = 0) -> Every:
    torch.manual_seed(seed)
    return Every().eval()


def spread(model: nn.Module, world: int, precision: Any, kinds: Any = MIXED, **words: Any) -> Any:
    words |= {"plan": planned(model, world, kinds), "world_size": world}
    return recast.optimize(model, example=EXAMPLE, precision=precision, **words)


@torch.no_grad()
def outputs(fast: nn.Module, rank: int | None, world: int) -> list[Tensor]:
    return [fast(*batch(SIZES[:world], rank, seed=k)[0]) for k in range(3)]


def close(got: Tensor, wanted: Tensor) -> None:
    assert tolerances.excess(got, wanted, wanted.double()) <= 1


# MIXED has tables by table, by row, and on every rank; COLUMNS also by column.
CASES = [(MIXED, "int8"), (COLUMNS, "bf16")]


def same_numbers(world: int, cases: list[tuple[Any, str]]) -> None:
    def rank_of(rank: int) -> list[Any]:
        found = []
        for kinds, precision in cases:
            whole, model = every(), every(seed=rank)  # the numbers of rank 0 count
            fast = spread(model, world, precision, kinds)
            notes = diffed(whole, model, fast, precision) if world == 2 else []
            report = str(fast.report).partition("optimize took")[0]
            held = [n for n, p in fast.named_parameters() if isinstance(p, StoredTable)]
            state = fast.full_state_dict(ranks="all")
            found.append((outputs(fast, rank, world), state, report, held, notes))
        return found

    results = processes(world, rank_of)
    for k, (_, precision) in enumerate(cases):
        model = every()
        one = recast.optimize(model, example=EXAMPLE, precision=precision)  # type: ignore[call-overload]
        for step, wanted in enumerate(outputs(one, None, world)):
            close(torch.cat([r[k][0][step] for r in results]), wanted)
        for _, state, report, held, notes in (r[k] for r in results):
            assert {n: torch.equal(v, state[n]) for n, v in one.state_dict().items()} == (
                dict.fromkeys(state, True)
            ), "the very same rows"
            assert sorted(held) == sorted(TABLES)
            assert report == results[0][k][2] and notes == results[0][k][4]
            effect = next(n for n in one.report.notes if "outputs differ by" in n)
            assert effect.split(" (")[0] in report
            stored = next(n for n in one.report.journal.notes if f"in {precision}" in n)
            assert stored in " ".join(report.split()), "of whole tables, not of one rank's parts"


def diffed(whole: nn.Module, taken: nn.Module, fast: Any, precision: str) -> list[str]:
    """What a diff notes; with another copy of the model, and with that whose tables were taken."""
    diff, again = recast.diff(whole, fast, EXAMPLE), recast.diff(taken, fast, EXAMPLE)
    assert diff.ok and again.ok, f"{diff}\n{again}"
    assert f"tables are in {precision}" in again.notes[0]
    assert "outputs differ by at most" in diff.notes[1]
    return diff.notes


def test_every_plan_has_the_numbers_of_one_rank() -> None:
    same_numbers(2, CASES)


@pytest.mark.long
def test_four_ranks() -> None:
    same_numbers(4, [("row_wise", "int4")])


def test_the_graph() -> None:
    fast = spread(every(), 2, "int8")  # no process group: it can be read, and not be run
    calls = [line for line in str(fast).splitlines() if "recast.quantised_" in line]
    (line,) = [line for line in calls if "@owners" in line]
    assert "ids=wait_ids[0]" in line and '"int8"' in line and ".packed" in line
    assert "in int8" in str(fast.report)
    with pytest.raises(UsageError, match="made for 2 ranks"):
        fast(*EXAMPLE)


def test_what_cannot_be_stored_on_one_rank_is_on_none() -> None:
    """One call then has tables of both kinds, in the order of its lookups."""

    spoilt = every()
    spoilt.ragged.weight.data[-1] = torch.inf  # of the last rank
    spoilt.single.weight.data[0] = 1e30

    def rank_of(rank: int) -> Any:
        fast = spread(copy.deepcopy(spoilt), 2, "fp16", "row_wise")  # threads draw from one
        return outputs(fast, rank, 2), [m.why for m in fast.report.journal.missed], str(fast)

    results = run(2, rank_of)
    one = recast.optimize(copy.deepcopy(spoilt), example=EXAMPLE, precision="fp16")
    for step, wanted in enumerate(outputs(one, None, 2)):
        torch.testing.assert_close(torch.cat([r[0][step] for r in results]), wanted, equal_nan=True)
    assert results[0][2] == results[1][2]
    for _, missed, text in results:
        assert "its table has numbers that are not finite" in missed
        assert "its table has numbers beyond float16, which fp16 is made of" in missed
        assert "recast.embedding_bags([ragged.weight, single.weight]" in text


def test_state_and_checkpoints(tmp_path: Path) -> None:
    """Saved on two ranks, loaded on three and on one; copies; the state of a plain model."""
    first, other = every(), every(seed=9)

    def two(rank: int) -> list[Tensor]:
        fast = spread(copy.deepcopy(first), 2, "int8")
        recast.checkpoint.save(tmp_path / "two", fast)
        twin = copy.deepcopy(fast)
        assert all(map(torch.equal, outputs(twin, rank, 2), outputs(fast, rank, 2)))
        fast.load_state_dict(other.state_dict())  # packed anew
        fast.load_state_dict(fast.state_dict())
        return outputs(fast, rank, 2)

    loaded = run(2, two)
    wanted = outputs(recast.optimize(other, example=EXAMPLE, precision="int8"), None, 2)
    for step, want in enumerate(wanted):
        close(torch.cat([r[step] for r in loaded]), want)

    def three(rank: int) -> list[Tensor]:
        fast = spread(every(seed=5), 3, "int8", "row_wise")
        recast.checkpoint.load(tmp_path / "two", fast)
        return outputs(fast, rank, 3)

    again = run(3, three)
    plain = every(seed=6)
    recast.checkpoint.load(tmp_path / "two", plain)
    stored = recast.optimize(every(), example=EXAMPLE, precision="int8").state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, stored[name]), name
    for step, want in enumerate(outputs(plain, None, 3)):
        close(torch.cat([r[step] for r in again]), want)


def test_the_last_batch_in_train_mode_is_refused_on_all_ranks() -> None:
    def rank_of(rank: int) -> str:
        fast = spread(every(), 2, "int8")
        with pytest.raises(UsageError, match="in train mode") as raised:
            fast.train()(*EXAMPLE)
        outputs(fast.eval(), rank, 2)
        return str(raised.value)

    assert all("model.eval() for inference" in text for text in run(2, rank_of))


def test_columns_of_one_scale_stay_together() -> None:
    for precision in ("int8", "int4"):
        with pytest.raises(UsageError, match=r"fixed\.weight cannot be") as raised:
            spread(every(), 2, precision, COLUMNS | {"raw": "row_wise"})
        assert raised.value.why == f"in {precision} all columns of a row have one scale"
    model = every()
    fast = recast.optimize(model, example=EXAMPLE, precision="int8", world_size=2)
    assert not any("column" in p.sharding_type for p in fast.plan.placements)


def test_ranks_ask_for_one_precision() -> None:
    def rank_of(rank: int) -> None:
        with pytest.raises(UsageError, match=r"differs? from the others in: options"):
            spread(every(), 2, ("int8", "bf16")[rank])

    run(2, rank_of)


def test_a_plan_counts_the_bytes_that_are_stored() -> None:
    """Tables that fit only in fewer bits fit; the plan that says so can be saved and loaded."""
    model = nn.Sequential(nn.EmbeddingBag(60_000, 64), nn.Linear(64, 1)).eval()
    ids = torch.randint(60_000, (8, 2))
    machines = replace(topology.detect(2), device_memory=12 * 2**20, host_memory=0)
    with pytest.raises(PlanError):
        recast.optimize(model, example=ids, world_size=2, topology=machines, sharding="table_wise")
    fast = recast.optimize(
        model, example=ids, world_size=2, topology=machines, sharding="table_wise",
        precision="int8",
    )  # fmt: skip
    (placement,) = fast.plan.placements
    assert placement.stored_row == formats.row_bytes("int8", 64)
    assert recast.Plan.from_json(fast.plan.to_json()) == fast.plan
    assert max(load.device_bytes for load in fast.plan.loads) < 12 * 2**20
    trained, _ = recast.optimize(model.train(), adagrad(model.parameters()), example=ids)
    assert "stored_row" not in trained.plan.to_json(), "plans of other models are as they were"
    with pytest.raises(UsageError, match="is too full"):  # in float32, which the plan was not for
        recast.optimize(model, example=ids, world_size=2, plan=fast.plan)


def test_a_pass_that_would_store_whole_tables() -> None:
    with pytest.raises(UsageError, match="quantise-tables on many ranks") as raised:
        recast.optimize(every(), example=EXAMPLE, world_size=2, passes="default,quantise-tables")
    assert "precision='int8'" in raised.value.tries[0]


def test_a_model_on_meta() -> None:
    """Whole tables have no memory, packed or not; ranks store the rows that they initialise."""
    ids = torch.arange(12).view(6, 2)

    def rank_of(precision: Any) -> Any:
        with torch.device("meta"):
            model = nn.Sequential(nn.EmbeddingBag(40, 8), nn.Linear(8, 1)).eval()
        return recast.optimize(
            model, example=ids, precision=precision, world_size=2, sharding="row_wise"
        )

    def of_table(rank: int) -> list[Tensor]:
        plain, stored = (rank_of(precision) for precision in (None, "int8"))
        assert isinstance(stored.get_parameter("0.weight"), StoredTable)
        return [fast.full_state_dict(ranks="all")["0.weight"] for fast in (plain, stored)]

    for plain, stored in run(2, of_table):
        packed = formats.pack(plain, "int8")
        assert torch.equal(stored, formats.unpack(packed, "int8", 8))
    planned_only = rank_of("int8")
    assert planned_only.get_parameter("0.weight").is_meta
    assert "tables on meta are stored when the ranks run" in str(planned_only.report)


class Ranker(nn.Module):
    """Scores a pair, or, without an item, all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 8), nn.Embedding(70, 8)
        g = torch.Generator().manual_seed(0)  # ranks that are threads share the other one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=g) - 0.5)

    def forward(self, user: Tensor, item: Tensor | None = None, two: bool = False) -> Tensor:
        if item is None:
            return self.user(user) @ self.item.weight.t()
        found = (self.user(user) * self.item(item)).sum(1)
        return found * 2 if two else found


def test_several_forms() -> None:
    """Those that look tables up have them stored; one that a form reads whole is not."""
    ids = torch.arange(8), torch.arange(8, 16)

    def rank_of(rank: int) -> Any:
        found = []
        for forms in ([(*ids, True)], [ids[:1]]):
            model = Ranker().eval()
            fast = recast.optimize(
                model, example=ids, forms=forms, precision="int8", sharding={"user": "row_wise"}
            )
            own = [t[rank * 4 : rank * 4 + 4] for t in ids]
            with torch.no_grad():
                outs = [fast(*own), fast(*own, True) if len(forms[0]) > 1 else fast(own[0])]
            held = [n for n, p in fast.named_parameters() if isinstance(p, StoredTable)]
            found.append((outs, held))
        return found

    results = run(2, rank_of)
    for k, forms in enumerate(([(*ids, True)], [ids[:1]])):
        one = recast.optimize(Ranker().eval(), example=ids, forms=forms, precision="int8")
        with torch.no_grad():
            wanted = [one(*ids), one(*forms[0])]
        names = ["user.weight", "item.weight"][: 2 - k]
        for r in results:
            assert r[k][1] == names
        for at in range(2):
            close(torch.cat([r[k][0][at] for r in results]), wanted[at])
