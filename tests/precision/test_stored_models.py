"""Whole models for serving, with tables below float32."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import models
import pytest
import torch
from seen_ops import SeenOps
from torch import Tensor, nn

import recast
from recast.errors import IdError, UsageError
from recast.rewriter.diff import rounding
from recast.runtime import tolerances
from recast.runtime.embedding import precision as formats
from recast.runtime.embedding.precision_table import StoredTable

ALL = pytest.mark.parametrize("precision", formats.PRECISIONS)
FAMILIES = ("dlrm", "dlrm_stacked", "deepfm", "widedeep", "bags", "two_tower", "attention", "mmoe")


class Small(nn.Module):
    """Two tables of 64 rows, one of them looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(64, 24, mode="mean", padding_idx=3)
        self.item = nn.Embedding(64, 24)
        self.top = nn.Linear(72, 1)

    def forward(self, users: Tensor, item: Tensor, other: Tensor) -> Tensor:
        rows = [self.user(users), self.item(item), self.item(other)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def small() -> nn.Module:
    torch.manual_seed(1)
    return Small().eval()


def batch(rows: int = 9, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, 64, shape, generator=g) for shape in ((rows, 5), (rows,), (rows,))
    )


def rounded(model: nn.Module, precision: str, *paths: str) -> nn.Module:
    """The plain model over tables that are rounded as stored ones are."""
    same = copy.deepcopy(model)
    for path in paths:
        table = same.get_parameter(path)
        packed = formats.pack(table, precision)
        table.data.copy_(formats.unpack(packed, precision, table.shape[1]))
    return same


def close(a: Tensor, b: Tensor) -> None:
    assert tolerances.excess(a, b, b.double()) <= 1


@ALL
@torch.no_grad()
def test_outputs_are_those_of_rounded_tables(precision: Any) -> None:
    model = small()
    fast = recast.optimize(model, example=batch(), precision=precision)
    wanted = rounded(model, precision, "user.weight", "item.weight")
    for rows in (1, 9, 40):
        close(fast(*batch(rows, rows)), wanted(*batch(rows, rows)))
    assert not torch.equal(fast(*batch()), model(*batch()))
    assert "quantised_embedding_bags" in str(fast)
    assert f'"{precision}"' in str(fast)


@ALL
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, precision: Any) -> None:
    """A diff finds nothing but the rounding, and says how much that is."""
    model, batches, _ = models.build(name)
    fast = recast.optimize(model.eval(), example=batches, precision=precision)
    assert fast.report.journal.stored
    found = recast.diff(model, fast, batches[0])
    assert found.ok, str(found)
    assert f"in {precision}" in found.notes[0] and "eval mode" in found.notes[0]
    assert "outputs differ by at most" in found.notes[1]


class Doubles(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(64, 24)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["weight"] = batch["weight"] * 2
        return self.rows(batch["ids"]) + batch["weight"]


def test_what_rounding_does_is_told_of_the_same_batch() -> None:
    given = {"ids": torch.arange(12).view(6, 2), "weight": torch.full((6, 1), 100.0)}
    fast = recast.optimize(Doubles().eval(), example=given, precision="fp16")
    note = next(n for n in fast.report.notes if "outputs differ by at most" in n)
    assert float(note.partition("at most ")[2].split()[0]) < 0.1
    assert bool((given["weight"] == 100).all())


def test_a_diff_still_finds_what_is_wrong() -> None:
    fast = recast.optimize(small(), example=batch(), precision="int8")
    with torch.no_grad():
        fast.get_parameter("item.weight").packed[5] = 7
    assert not recast.diff(small(), fast, batch(64)).ok


@ALL
def test_the_report(precision: Any) -> None:
    model = small()
    report = recast.optimize(model, example=batch(), precision=precision).report
    stored = report.to_dict()["stored"]
    assert [s["table"] for s in stored] == ["user.weight", "item.weight"]
    for entry in stored:
        table = model.get_parameter(entry["table"])
        packed = formats.pack(table, precision)
        most, mean = formats.loss(table, packed, precision)
        assert (entry["most"], entry["mean"]) == (most, mean)
        assert entry["bytes"] == 64 * formats.row_bytes(precision, 24)
        assert entry["bytes_before"] == 64 * 24 * 4
    text = str(report)
    assert f"2 tables in {precision}" in text and "outputs differ by at most" in text
    assert "quantise-tables" in text and "3 lookups of 2 tables" in text


def test_the_user_s_model_is_not_touched() -> None:
    model = small()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    fast = recast.optimize(model, example=batch(), precision="int8")
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])
    assert fast.top.weight is model.top.weight  # everything else is shared
    assert isinstance(fast.item.weight, StoredTable) and isinstance(fast.item.weight, nn.Parameter)
    assert not fast.item.weight.requires_grad
    assert list(model.item._state_dict_hooks) == []


@pytest.mark.parametrize("inplace", [False, True])
def test_memory_is_saved(inplace: bool) -> None:
    """Nothing of the result holds a float32 table."""
    model = small()
    tables = [weakref.ref(model.user.weight), weakref.ref(model.item.weight)]
    fast = recast.optimize(model, example=batch(), precision="int4", inplace=inplace)
    if not inplace:
        assert all(t() is not None for t in tables)
        del model
    gc.collect()
    assert [t() for t in tables] == [None, None]
    with torch.no_grad():
        fast(*batch())
    alive = [t for t in gc.get_objects() if type(t) is Tensor or type(t) is nn.Parameter]
    assert not [t for t in alive if t.shape == (64, 24) and t.dtype == torch.float32]


@ALL
@torch.no_grad()
def test_state_dict(precision: Any) -> None:
    """The plain model's keys, order, shapes and dtypes, with the rows as they are stored."""
    model = small()
    fast = recast.optimize(model, example=batch(), precision=precision)
    ours, plain = fast.state_dict(), model.state_dict()
    assert list(ours) == list(plain)
    for name, value in ours.items():
        assert type(value) is Tensor and value.shape == plain[name].shape
        assert value.dtype == plain[name].dtype
    want = fast(*batch())
    other = small()
    other.load_state_dict(ours)
    close(other(*batch()), want)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    close(other(*batch()), want)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    fast.load_state_dict(other.state_dict())  # stored rows are made anew
    wanted = rounded(other, precision, "user.weight", "item.weight")
    close(fast(*batch()), wanted(*batch()))


@ALL
@torch.no_grad()
def test_copies(precision: Any) -> None:
    fast = recast.optimize(small(), example=batch(), precision=precision)
    want = fast(*batch())
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)),
        torch.load(buffer, weights_only=False),
    ]  # fmt: skip
    for twin in copies:
        assert isinstance(twin.item.weight, StoredTable)
        assert torch.equal(twin(*batch()), want)
        twin.item.weight.copy_(torch.zeros(64, 24))
        assert not torch.equal(twin(*batch()), want)
    assert torch.equal(fast(*batch()), want)
    assert torch.equal(fast.to("cpu").float()(*batch()), want)
    assert isinstance(fast.item.weight, StoredTable)


@torch.no_grad()
@ALL
def test_to_empty_keeps_the_form_of_the_tables(precision: Any) -> None:
    """Memory for a model that is loaded next: on its device, and after a move to meta."""
    fast = recast.optimize(small(), example=batch(), precision=precision)
    state, before = {k: v.clone() for k, v in fast.state_dict().items()}, fast(*batch(7))
    for devices in (["cpu"], ["meta", "cpu"]):
        for device in devices:
            assert fast.to_empty(device=device) is fast
            tables = [fast.get_parameter(f"{name}.weight") for name in ("user", "item")]
            assert all(isinstance(t, StoredTable) and t.device.type == device for t in tables)
        fast.load_state_dict(state)
        assert torch.equal(fast(*batch(7)), before)


def test_shared_between_processes() -> None:
    fast = recast.optimize(small(), example=batch(), precision="int8")
    want = fast(*batch())
    fast.share_memory()  # torch's own way would look for a storage that is not there, and crash
    assert fast.item.weight.is_shared() and fast.item.weight.packed.is_shared()
    assert torch.equal(fast(*batch()), want)


@torch.no_grad()
def test_the_plain_forward_still_runs() -> None:
    """When the graph does not apply, lookups unpack the rows that they need."""
    fast = recast.optimize(small(), example=batch(), precision="int8")
    want = fast(*batch())
    seen: list[Any] = []
    fast.item.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with pytest.warns(recast.RecastWarning, match="a hook was added"):
        close(fast(*batch()), want)
    assert seen


def test_tables_are_tensors() -> None:
    """Any operation can read them; only copy_ can write them."""
    fast = recast.optimize(small(), example=batch(), precision="int8")
    table = fast.item.weight
    whole = table.whole()
    assert table.shape == (64, 24) and table.dtype == torch.float32
    assert torch.equal(table * 2, whole * 2) and torch.equal(table[5:7], whole[5:7])
    assert float(table.sum()) == float(whole.sum())
    assert "int8" in repr(table)
    with pytest.raises(UsageError, match="mul_ writes to a table that is stored in int8"):
        table.mul_(2)
    with pytest.raises(UsageError, match="an assignment to rows writes to a table"):
        table[2] = 0.0
    with pytest.raises(UsageError, match="stored in int8 cannot become float64"):
        fast.double()
    table.data = table.data
    assert torch.equal(table.whole(), whole)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_torchscript_is_refused() -> None:
    """It would trace the model, and crash when that is saved."""
    fast = recast.optimize(small(), example=batch(), precision="int8")
    with pytest.raises(UsageError, match=r"cannot trace Small: its user\.weight"):
        torch.jit.trace(fast, batch())


def test_a_dispatch_mode_sees_the_op() -> None:
    fast = recast.optimize(small(), example=batch(), precision="int8")
    with SeenOps() as seen, torch.no_grad():
        fast(*batch())
    assert seen.names.count("recast.quantised_embedding_bags.default") == 1


def test_train_mode() -> None:
    fast = recast.optimize(small(), example=batch(), precision="int8").train()
    with pytest.raises(UsageError, match="in train mode") as raised:
        fast(*batch())
    assert "model.eval() for inference" in raised.value.tries


class Noisy(nn.Module):
    """As models are regularised: train mode has a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.top = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.rows(ids).sum(1)
        if self.training:
            h = h + 0.01 * torch.randn_like(h)
        return self.top(h)


def test_forwards_that_ask_for_the_mode() -> None:
    ids = torch.randint(50, (6, 3))
    fast = recast.optimize(Noisy().eval(), example=ids, precision="int8")
    assert len(fast.graphs) == 2 and not fast.report.journal.raised
    assert "1 table in int8" in str(fast.report)
    assert "quantised_embedding_bags" in str(fast)
    fast(ids)
    with pytest.raises(UsageError, match="in train mode"):
        fast.train()(ids)


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="there is no precision 'int2'") as raised:
        recast.optimize(small(), precision="int2")  # type: ignore[call-overload]
    assert raised.value.tries == tuple(f"precision={p!r}" for p in formats.PRECISIONS)
    with pytest.raises(UsageError, match="for a model that trains") as raised:
        recast.optimize(small().train(), precision="int8")
    assert "model.eval()" in raised.value.tries[0]
    model = small()
    with pytest.raises(UsageError, match="for a model that trains"):
        recast.optimize(model, torch.optim.SGD(model.parameters(), 0.1), precision="int8")


# ---------------------------------------------------------------- what stays float32


class Tied(nn.Module):
    """The item table is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.user = nn.Embedding(20, 8), nn.Embedding(20, 8)

    def forward(self, item: Tensor, user: Tensor) -> Tensor:
        return nn.functional.linear(self.item(item) * self.user(user), self.item.weight)


def pair(rows: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randint(0, 20, (rows,), generator=g), torch.randint(0, 20, (rows,), generator=g)


@torch.no_grad()
def test_a_table_that_is_read_whole_stays() -> None:
    model = Tied().eval()
    fast = recast.optimize(model, example=pair(), precision="int8")
    assert fast.item.weight is model.item.weight
    assert isinstance(fast.user.weight, StoredTable)
    close(fast(*pair()), rounded(model, "int8", "user.weight")(*pair()))
    (missed,) = [m for m in fast.report.journal.missed if m.rule == "quantise-tables"]
    assert "reads a whole table" in missed.why


@pytest.mark.parametrize(
    ("spoil", "precision", "why"),
    [
        (lambda m: m.user.double(), "int8", "its table is float64, not float32"),
        (lambda m: m.user.bfloat16(), "int8", "its table is bfloat16, not float32"),
        (lambda m: m.user.weight.data[3].fill_(1e6), "fp16", "beyond float16"),
        (lambda m: m.user.weight.data[3].fill_(1e6), "int4", "beyond float16"),
        (lambda m: m.user.weight.data[3].fill_(torch.inf), "int8", "not finite"),
        (lambda m: m.user.weight.data[3, :2].copy_(torch.tensor([-2e38, 2e38])), "int8", "apart"),
    ],
)
def test_misses(spoil: Any, precision: Any, why: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item, self.user = nn.Embedding(20, 8), nn.Embedding(20, 8)

        def forward(self, item: Tensor, user: Tensor) -> Tensor:
            return self.item(item) + self.user(user)

    model = Sum().eval()
    with torch.no_grad():
        spoil(model)
    fast = recast.optimize(model, example=pair(), precision=precision)
    assert fast.user.weight is model.user.weight
    assert isinstance(fast.item.weight, StoredTable)
    assert any(why in m.why for m in fast.report.journal.missed)


@pytest.mark.parametrize(
    ("number", "precision", "why"),
    [(1e6, "int4", "beyond float16"), (1e6, "fp16", "beyond float16"), (2e38, "int8", "apart"),
     (torch.inf, "int8", "not finite")],
)  # fmt: skip
def test_rows_that_cannot_be_stored_are_not_loaded(number: float, precision: Any, why: str) -> None:
    """They would be read as NaN or infinity where the plain model's are not."""
    model, ids = nn.Sequential(nn.Embedding(20, 8)).eval(), torch.arange(20)
    fast = recast.optimize(model, example=ids, precision=precision)
    before = fast(ids)
    rows = model[0].weight.detach().clone()
    rows[3, :2] = torch.tensor([number, -number])
    with pytest.raises(RuntimeError, match=why):
        fast.load_state_dict({"0.weight": rows})
    assert torch.equal(fast(ids), before)


def test_nothing_to_store() -> None:
    model = nn.Linear(3, 2).eval()
    fast = recast.optimize(model, example=torch.randn(4, 3), precision="int8")
    assert "no table is stored in it" in str(fast.report)


def test_errors_name_the_table() -> None:
    fast = recast.optimize(small(), example=batch(), precision="int8")
    users, item, other = batch()
    item[2] = 64
    with pytest.raises(IdError, match=r"id 64 of lookup 1 \(table item\.weight\)") as raised:
        fast(users, item, other)
    assert "test_stored_models.py" in str(raised.value)


def test_the_pass_by_name() -> None:
    from recast.rewriter.api import pipeline_of

    made = pipeline_of("default,quantise-tables{precision=int4}")
    fast = recast.optimize(small(), example=batch(), passes=made)
    assert fast.item.weight.precision == "int4"


class Padded(nn.Module):
    """Padding in bags and in rows, a maximum, offsets with an end."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(50, 16, mode="mean", padding_idx=3)
        self.rows = nn.Embedding(60, 8, padding_idx=0)
        self.most = nn.EmbeddingBag(40, 8, mode="max")
        self.sums = nn.EmbeddingBag(30, 4, mode="sum", include_last_offset=True, padding_idx=-1)
        with torch.no_grad():
            self.rows.weight[0] = 1.5

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        bags = [self.mean(ids), self.rows(ids).sum(1), self.most(ids % 40)]
        return torch.cat([*bags, self.sums(flat, offsets)], 1)


@pytest.mark.parametrize("how", [{"precision": "int8"}, {"passes": "default,quantise-tables"}])
def test_a_model_on_meta_is_stored_with_its_own_rows(how: Any) -> None:
    """Not with those that stand in for them meanwhile; nor is the user's model left with those."""

    def made(**how: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        with torch.device("meta"):
            model = Small().eval()
        return model, recast.optimize(model, example=batch(), **how)

    (model, fast), (_, plain) = made(**how), made()
    assert isinstance(fast.get_parameter("item.weight"), StoredTable)
    with torch.no_grad():
        close(
            fast(*batch(20, 7)), rounded(plain, "int8", "user.weight", "item.weight")(*batch(20, 7))
        )
    assert torch.equal(model.get_parameter("item.weight"), plain.get_parameter("item.weight"))


def test_the_effect_beside_numbers_that_are_none() -> None:
    nan, inf = torch.nan, torch.inf
    both = [[torch.tensor([nan, inf, 1.0])]], [[torch.tensor([nan, inf, 1.5])]]
    assert rounding.Effect.between(*both).most == 0.5
    assert rounding.Effect.between([[torch.ones(2)]], [[torch.tensor([1.0, nan])]]).most == inf


def padded_batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (size,), generator=g)
    ids = torch.randint(50, (size, 4), generator=g)
    ids = torch.where(torch.rand(size, 4, generator=g) > 0.6, 3 * (ids % 2), ids)
    flat = torch.randint(30, (int(lengths.sum()),), generator=g)
    return ids, flat, torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_exported_for_any_batch(precision: Any) -> None:
    """As torch.export traces them, the sizes of what is looked up may not depend on the ids."""
    torch.manual_seed(0)
    served = recast.optimize(
        Padded().eval(), example=[padded_batch(7), padded_batch(9)], precision=precision
    )
    auto = torch.export.Dim.AUTO
    program = torch.export.export(
        served, padded_batch(8), dynamic_shapes=({0: auto}, {0: auto}, {0: auto}), strict=False
    ).module()
    for size in (8, 13):
        torch.testing.assert_close(program(*padded_batch(size)), served(*padded_batch(size)))
