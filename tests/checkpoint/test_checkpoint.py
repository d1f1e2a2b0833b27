"""Saved on W ranks and loaded on W': weights, buffers, optimizer state, all else, bit for bit."""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from placed import NAMES, Model, model, place, plan, trained
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recast.checkpoint
from recast.errors import CheckpointError, UsageError
from recast.optim import RowWiseAdagrad
from recast.runtime.checkpoint import files
from recast.runtime.plan import Plan
from recast.runtime.ranks import shards, shards_state

_OPTIMIZERS: list[tuple[Any, dict[str, float]]] = [
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.1}),
]
_ROWS = {NAMES[0]: "row_wise", NAMES[1]: "table_wise", NAMES[2]: "data_parallel"}


def chosen(world: int, kind: Any) -> Plan:
    """Every kind of cut; none by columns if the optimizer keeps one value per row."""
    return plan(world, _ROWS if kind is RowWiseAdagrad else None)


def same_state(found: Any, expected: Any, cut: Any = lambda value: value) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(cut(value))), key


def save(path: Path, made: nn.Module, optimizer: Any, world: int, **options: Any) -> None:
    """By ``world`` ranks; one is a plain model without a process group."""
    if world == 1:
        recast.checkpoint.save(path, made, optimizer, **options)
        return
    pairs = [copy.deepcopy((made, optimizer)) for _ in range(world)]

    def rank(r: int) -> None:
        place(*pairs[r], r, chosen(world, type(optimizer)))
        recast.checkpoint.save(path, *pairs[r], **options)

    run(world, rank)


def check_load(path: Path, expected: nn.Module, state: Any, world: int, blank: Any) -> list[Any]:
    """Check that ``world`` ranks hold what was saved; returns what ``load`` returned to each."""
    whole, kept = expected.state_dict(), state.state_dict()
    if world == 1:
        told = recast.checkpoint.load(path, *blank)
        same_state(blank[0].state_dict(), whole)
        assert blank[1].state_dict()["param_groups"] == kept["param_groups"]
        for number, there in kept["state"].items():
            same_state(blank[1].state_dict()["state"][number], there)
        return [told]
    pairs = [copy.deepcopy(blank) for _ in range(world)]

    def rank(r: int) -> Any:
        own, optimizer = pairs[r]
        place(own, optimizer, r, chosen(world, type(optimizer)))
        told = recast.checkpoint.load(path, own, optimizer)
        same_state(shards_state.hook(own).full(own.state_dict(), ranks="all"), whole)
        assert optimizer.state_dict()["param_groups"] == kept["param_groups"]
        for number, parameter in enumerate(own.parameters()):
            part = shards.of(parameter)
            same_state(
                optimizer.state[parameter],
                kept["state"][number],
                lambda v, part=part: v if part is None or not v.dim() else part.local(v),
            )
        return told

    return run(world, rank)


@pytest.mark.parametrize("kind,options", [*_OPTIMIZERS, (RowWiseAdagrad, {"lr": 0.1})])
@pytest.mark.parametrize("before,after", [(1, 1), (1, 3), (3, 1), (2, 8), (8, 3)])
def test_any_number_of_ranks_to_any_other(
    before: int, after: int, kind: Any, options: dict[str, float], tmp_path: Path
) -> None:
    made, optimizer = trained(0, kind, **options)
    optimizer.param_groups[0]["lr"] = 0.025
    extra = {"epoch": 3, "rng": torch.get_rng_state(), "names": ["a", None, 0.1]}
    save(tmp_path / "c", made, optimizer, before, step=7, extra=extra)
    fresh = model(9)
    told = check_load(
        tmp_path / "c", made, optimizer, after, (fresh, kind(fresh.parameters(), lr=1.0))
    )
    for one in told:
        assert (one.step, one.world_size, one.path) == (7, before, tmp_path / "c")
        assert one.extra["epoch"] == 3 and one.extra["names"] == ["a", None, 0.1]
        assert torch.equal(one.extra["rng"], extra["rng"])


def test_state_that_is_there_is_written_in_place(tmp_path: Path) -> None:
    made, optimizer = trained(0, torch.optim.Adagrad, lr=0.1)
    other, state = trained(1, torch.optim.Adagrad, lr=0.1)
    recast.checkpoint.save(tmp_path / "c", made, optimizer)
    where = {p: state.state[p]["sum"].data_ptr() for p in other.parameters()}
    recast.checkpoint.load(tmp_path / "c", other, state)
    assert where == {p: state.state[p]["sum"].data_ptr() for p in other.parameters()}


class Seen(TorchDispatchMode):
    """The most bytes that any one operation allocated."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta)
        self.most = max(self.most, *(t.untyped_storage().nbytes() for t in tensors), 0)
        return out


@pytest.mark.parametrize("before,after", [("row_wise", "column_wise"), ("table_wise", "row_wise")])
def test_no_rank_holds_rows_of_others_but_one_block(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, dim, block, world = 3000, 15, 6000, 3
    whole = nn.Sequential(nn.EmbeddingBag(rows, dim))
    monkeypatch.setattr(shards_state, "BLOCK", block)
    blank = [nn.Sequential(nn.EmbeddingBag(rows, dim)) for _ in range(world)]
    filled = [copy.deepcopy(whole) for _ in range(world)]
    tables = [recast.runtime.plan.Table("0.weight", rows, dim)]
    part = rows * dim * 4 // world

    def rank(r: int, made: Any, kind: str, act: Any) -> int:
        place(made[r], None, r, recast.runtime.plan.explicit(tables, world, kind))
        with Seen() as seen:
            act(tmp_path / "c", made[r])
        return seen.most

    # The storage of a view is that of the whole part, which the rank owns.
    most = run(world, rank, filled, before, recast.checkpoint.save)
    assert max(most) <= (part if before == "row_wise" else rows * dim * 4)
    most = run(world, rank, blank, after, recast.checkpoint.load)
    assert max(most) <= part
    recast.checkpoint.load(tmp_path / "c", fresh := nn.Sequential(nn.EmbeddingBag(rows, dim)))
    assert torch.equal(fresh[0].weight, whole[0].weight)
    with Seen() as seen:  # what the test would see
        torch.zeros(rows, dim)
    assert seen.most == rows * dim * 4


def test_tied_tables_are_written_once_and_read_into_both(tmp_path: Path) -> None:
    def made(tied: bool) -> nn.Sequential:
        one = nn.Sequential(nn.Embedding(5, 4), nn.Embedding(5, 4))
        if tied:
            one[1].weight = one[0].weight
        return one

    tied = made(True)
    recast.checkpoint.save(tmp_path / "c", tied)
    for blank in (made(True), made(False)):
        recast.checkpoint.load(tmp_path / "c", blank)
        assert torch.equal(blank[0].weight, tied[0].weight)
        assert torch.equal(blank[1].weight, tied[0].weight)
    assert (blank[0].weight is blank[1].weight) is False


def test_what_modules_say_themselves(tmp_path: Path) -> None:
    """Extra state, and tensors that a module computes for its state_dict."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = [0]

        def get_extra_state(self) -> Any:
            return {"known": self.known}

        def set_extra_state(self, state: Any) -> None:
            self.known = state["known"]

    class Grown(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = torch.randn(rows, 2)

        def _save_to_state_dict(self, to: Any, prefix: str, keep_vars: bool) -> None:
            to[prefix + "rows"] = self.rows.clone()

        def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
            self.rows = state.get(prefix + "rows", self.rows)

    one, two = nn.Sequential(Own(), Grown(5)), nn.Sequential(Own(), Grown(1))
    one[0].known = [3, 4]
    recast.checkpoint.save(tmp_path / "c", one)
    recast.checkpoint.load(tmp_path / "c", two)
    assert two[0].known == [3, 4] and torch.equal(two[1].rows, one[1].rows)


def test_the_last_ones_stay(tmp_path: Path) -> None:
    made = model()
    for step in (5, 10, 11):
        with torch.no_grad():
            made.top.bias.fill_(step)
        recast.checkpoint.save(tmp_path / "c", made, step=step, keep=2)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "step-0000000010",
        "step-0000000011",
    ]
    assert recast.checkpoint.load(tmp_path / "c", made).step == 11
    assert recast.checkpoint.load(tmp_path / "c" / "step-0000000010", made).step == 10
    assert made.top.bias == 10
    with pytest.raises(CheckpointError, match="several steps"):
        recast.checkpoint.save(tmp_path / "c", made)
    with pytest.raises(UsageError, match="keep=2 with step=None"):
        recast.checkpoint.save(tmp_path / "c", made, keep=2)


def test_a_spread_model_whose_process_group_is_gone(tmp_path: Path) -> None:
    """One rank by itself would write its parts as if they were all: a checkpoint that loads."""
    whole, own = model(), model()
    recast.checkpoint.save(tmp_path / "c", whole)
    place(own, None, 0, plan(2, {NAMES[0]: "row_wise"}))
    for wrong in (recast.checkpoint.save, recast.checkpoint.load):
        with pytest.raises(UsageError, match=r"0\.weight is spread over 2 ranks, .* no process"):
            wrong(tmp_path / "c", own)
    blank = Model()
    recast.checkpoint.load(tmp_path / "c", blank)
    same_state(blank.state_dict(), whole.state_dict())


def test_other_models_and_optimizers_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    made, optimizer = trained(0, torch.optim.Adagrad, lr=0.1)
    recast.checkpoint.save(tmp_path / "c", made, optimizer)
    recast.checkpoint.save(tmp_path / "plain", made)
    load = recast.checkpoint.load

    class More(Model):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    less = Model()
    del less.tables[3]
    wide = Model()
    wide.tables[1] = nn.Embedding(8, 6)
    for other, why in [
        (More(), r"it has no more\.bias, more\.weight"),
        (less, r"the model has no tables\.3\.weight"),
        (wide, r"tables\.1\.weight is \(7, 6\) there and \(8, 6\) here"),
    ]:
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointError, match=why):
            load(tmp_path / "c", other)
        same_state(other.state_dict(), before)
    blank = Model()
    with pytest.raises(CheckpointError, match="state of Adagrad, not of AdamW"):
        load(tmp_path / "c", blank, torch.optim.AdamW(blank.parameters()))
    with pytest.raises(CheckpointError, match="grouped otherwise"):
        load(tmp_path / "c", blank, torch.optim.Adagrad(blank.top.parameters()))
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load(tmp_path / "plain", blank, torch.optim.Adagrad(blank.parameters()))
    with pytest.raises(UsageError, match="not of the model"):
        recast.checkpoint.save(tmp_path / "x", blank, optimizer)
    with pytest.raises(UsageError, match=r"optimizer is a list, not a torch\.optim\.Optimizer"):
        recast.checkpoint.save(tmp_path / "x", made, [optimizer])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizer is a list"):
        load(tmp_path / "c", made, [optimizer])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="plain value"):
        recast.checkpoint.save(tmp_path / "x", blank, extra={"scheduler": Model})
    with pytest.raises(CheckpointError, match=r"tables\.0\.weight is on meta"):
        recast.checkpoint.save(tmp_path / "x", Model().to("meta"))
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*"))


def test_what_one_rank_finds_all_ranks_raise(tmp_path: Path) -> None:
    made = [model() for _ in range(3)]
    recast.checkpoint.save(tmp_path / "c", model())
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("x")

    def rank(r: int) -> None:
        wrong = Model()
        if r == 1:
            wrong.tables[0] = nn.Embedding(3, 3)
        with pytest.raises(CheckpointError, match="another model"):
            recast.checkpoint.load(tmp_path / "c", wrong)
        with pytest.raises(CheckpointError, match="is no checkpoint: it is not overwritten"):
            recast.checkpoint.save(tmp_path / "foreign", made[r])

    run(3, rank)
    assert [p.name for p in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]


def test_ranks_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        made: Any = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        here = tmp_path / "c"
        for given, said in (
            (lambda: recast.checkpoint.save(tmp_path / f"c{r}", made), "rank 1 has path .*c1"),
            (lambda: recast.checkpoint.save(here, made, step=r), "rank 1 has step 1, rank 0 0"),
            (lambda: recast.checkpoint.save(here, made, [None, optimizer][r]), "optimizer SGD"),
            (lambda: recast.checkpoint.load(tmp_path / f"c{r}", made), "load: rank 1 has path"),
        ):
            with pytest.raises(UsageError, match=said):
                given()

    run(2, rank)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch only says that it is at an unexpected position in the file."""

    def short(*_: Any, **__: Any) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", short)
    monkeypatch.setattr("recast.runtime.checkpoint.content.serialise", lambda value: b"")
    with pytest.raises(CheckpointError, match="unexpected pos") as raised:
        recast.checkpoint.save(tmp_path / "c", model())
    assert "its disk is full" not in str(raised.value)
    usage = type(shutil.disk_usage(tmp_path))(1 << 30, 1 << 30, 4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"its disk is full: 4,096 bytes are free"):
        recast.checkpoint.save(tmp_path / "c", model())
    assert not [*tmp_path.iterdir()]


def test_leftovers_are_those_of_the_very_name(tmp_path: Path) -> None:
    """A crash left them behind; a name that looks like a pattern matches no other name."""
    for name in ("run[1]", "run1"):
        (tmp_path / f".{name}.saving-0").mkdir()
        os.utime(tmp_path / f".{name}.saving-0", (0, 0))
    recast.checkpoint.save(tmp_path / "run[1]", model())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run1.saving-0", "run[1]"]


def test_what_others_are_writing_stays(tmp_path: Path) -> None:
    """Two runs share a folder: neither takes the unfinished save of the other for a leftover."""
    place = tmp_path / "step-0000000001"
    own, _ = files.begin(place)
    elsewhere = place.with_name(f".{place.name}.saving-0abc-1-2")
    elsewhere.mkdir()
    (elsewhere / "__0_0.distcp").touch()
    os.utime(elsewhere, (0, 0))
    files.begin(tmp_path / "step-0000000002")
    assert own.exists() and elsewhere.exists()
    os.utime(elsewhere / "__0_0.distcp", (0, 0))
    files.begin(tmp_path / "step-0000000003")
    assert own.exists() and not elsewhere.exists()


def test_what_a_dead_process_began_goes(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=files.begin, args=(tmp_path / "c",))
    child.start()
    child.join(60)
    assert [".c.saving" in p.name for p in tmp_path.iterdir()] == [True]
    recast.checkpoint.save(tmp_path / "c", model())
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_manifest_that_is_lost_is_no_checkpoint_of_torch(tmp_path: Path) -> None:
    recast.checkpoint.save(tmp_path / "c", model())
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing(.|\n)*is damaged"):
        recast.checkpoint.load(tmp_path / "c", model())
