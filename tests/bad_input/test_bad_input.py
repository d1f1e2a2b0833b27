"""What a user gets wrong, and the sentence that answers it: what, where, why, what to try."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, VOCAB, build, dense_and_bags, field_ids
from torch import Tensor, nn

import recast
from recast.errors import DtypeError, IdError, InputError, RecastError, UsageError

Batch = tuple[Tensor, list[Tensor], list[Tensor]]
ROWS = 10


@pytest.fixture(scope="module")
def fast() -> nn.Module:
    model, batches, _ = build("dlrm")
    return recast.optimize(model, example=batches)


@pytest.fixture(scope="module")
def fast_ids() -> nn.Module:
    model, batches, _ = build("pnn")
    return recast.optimize(model, example=batches)


def broken(change: Callable[[Tensor, list[Tensor], list[Tensor]], None]) -> Batch:
    """A batch of bags with one thing wrong."""
    x, offsets, ids = dense_and_bags(ROWS, 0)
    change(x, offsets, ids)
    return x, offsets, ids


def put(k: int, at: int, value: int, *, offsets: bool = False) -> Callable[..., None]:
    def change(x: Tensor, o: list[Tensor], i: list[Tensor]) -> None:
        (o if offsets else i)[k][at] = value

    return change


def swap(k: int, fn: Callable[[Tensor], Tensor], *, offsets: bool = False) -> Callable[..., None]:
    def change(x: Tensor, o: list[Tensor], i: list[Tensor]) -> None:
        held = o if offsets else i
        held[k] = fn(held[k])

    return change


def four_lines(error: RecastError) -> None:
    """What, at, why (and try, when there is something to try), in this order."""
    lines = str(error).splitlines()
    assert lines[1].startswith("  at   published.py:"), lines
    assert lines[2].startswith("  why  "), lines


# ---------------------------------------------------------------- as in plain torch


@pytest.mark.parametrize("bad", ["float ids", "bool ids", "no float ids", "past the end", "below"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_error_is_also_that_of_torch(kind: type[nn.Module], bad: str) -> None:
    plain = nn.Sequential(kind(50, 4), nn.Linear(4, 1))
    ids = torch.randint(0, 50, (8, 3))
    fast = recast.optimize(plain, example=ids)
    wrong = {
        "float ids": ids.float(), "bool ids": ids > 25, "no float ids": torch.zeros(0, 3),
        "past the end": ids + 50, "below": ids - 50,
    }[bad]  # fmt: skip
    with pytest.raises((RuntimeError, IndexError)) as usual:
        plain(wrong)
    expected = IndexError if isinstance(usual.value, IndexError) else RuntimeError
    with pytest.raises(expected) as ours:
        fast(wrong)
    assert isinstance(ours.value, InputError)


# ---------------------------------------------------------------- batches of bags

BAGS: dict[str, tuple[Callable[..., None], type[RecastError], str]] = {
    "an id past the end": (put(1, 3, 99), IdError, "id 99 of lookup 1 .* outside its 7 rows"),
    "the first id past the end": (put(1, 3, 7), IdError, "id 7 of lookup 1 .* outside its 7 rows"),
    "a negative id": (put(2, 0, -1), IdError, "id -1 of lookup 2 .* outside its 13 rows"),
    "float ids with fractions": (
        swap(2, lambda i: i.float() + 0.5), DtypeError, "ids of lookup 2 .* are float32",
    ),
    "float ids": (swap(2, lambda i: i.float()), DtypeError, "ids of lookup 2 .* are float32"),
    "offsets that decrease": (
        swap(0, lambda o: o.flip(0), offsets=True), IdError, "offsets of lookup 0",
    ),
    "offsets that start late": (
        swap(0, lambda o: o + 1, offsets=True), IdError, "of lookup 0 .* start at 1, not at 0",
    ),
    "offsets that overrun": (
        put(3, -1, 1000, offsets=True), IdError, r"offsets\[9\] = 1000 of lookup 3 .* runs past",
    ),
    "fewer bags than rows": (
        swap(1, lambda o: o[:-1], offsets=True), InputError, r"shape \(9, 4\), feature 0 \(10, 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAGS)
def test_a_bad_batch(fast: nn.Module, name: str) -> None:
    change, kind, sentence = BAGS[name]
    with pytest.raises(kind, match=sentence) as caught:
        fast(*broken(change))
    four_lines(caught.value)
    # the plain model refuses it too, in fewer words
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        build("dlrm")[0](*broken(change))


@pytest.mark.parametrize("name", BAGS)
def test_the_next_batch_is_fine(fast: nn.Module, name: str) -> None:
    """A refused batch leaves nothing behind."""
    change, kind, _ = BAGS[name]
    with pytest.raises(kind):
        fast(*broken(change))
    plain = build("dlrm")[0]
    good = dense_and_bags(ROWS, 0)
    torch.testing.assert_close(fast(*good), plain(*good))


def test_mismatched_batch_sizes(fast: nn.Module) -> None:
    x, offsets, ids = dense_and_bags(ROWS, 0)
    with pytest.raises(InputError, match=r"shape \(10, 4, 4\), feature 0 \(5, 4\)") as caught:
        fast(x[:5], offsets, ids)
    assert str(caught.value.where).startswith("published.py:") and "()" not in str(caught.value)


# ---------------------------------------------------------------- batches of ids


def test_ids_without_values(fast: nn.Module) -> None:
    with pytest.raises(InputError, match=r"ids of lookup 2 .* are on the meta device") as caught:
        fast(*broken(swap(2, lambda i: i.to("meta"))))
    four_lines(caught.value)


@pytest.mark.parametrize(("value", "rows"), [(VOCAB[1], VOCAB[1]), (-1, VOCAB[1])])
def test_an_id_outside_its_table(fast_ids: nn.Module, value: int, rows: int) -> None:
    ids = field_ids(6, 0)[0]
    ids[2, 1] = value
    with pytest.raises(IdError, match=f"id {value} of lookup 1 .* outside its {rows} rows") as e:
        fast_ids(ids)
    assert "it stands at ids[2]; valid ids are 0..6" in str(e.value)
    four_lines(e.value)


def test_an_id_error_is_an_index_error(fast_ids: nn.Module) -> None:
    """``except IndexError`` of a loop around the plain model keeps working."""
    with pytest.raises(IndexError):
        fast_ids(field_ids(6, 0)[0] + 100)


def test_float_ids_with_fractions(fast_ids: nn.Module) -> None:
    with pytest.raises(DtypeError, match=r"ids of lookup 0 .* are float32") as caught:
        fast_ids(field_ids(6, 0)[0].float() + 0.5)
    assert "ids.long()" in str(caught.value)
    four_lines(caught.value)


def test_fractions_that_the_model_truncates_itself() -> None:
    """``X[:, k].long()`` is the user's own: the same numbers as the plain model, no error."""
    model, batches, _ = build("packed")
    fast = recast.optimize(model, example=batches).eval()
    rows = CASES["packed"].batch(6, 0)[0]
    rows[1, 2] += 0.5
    torch.testing.assert_close(fast(rows), copy.deepcopy(model).eval()(rows))


@pytest.mark.parametrize("name", ["deepfm", "pnn", "dcn", "flags", "widedeep"])
def test_an_empty_batch(name: str) -> None:
    """No rows in, no rows out, and zero gradients, as with the plain model."""
    model, batches, _ = build(name)
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=batches)
    plain.eval(), fast.eval()  # batch norm in train mode refuses it: see below
    empty = torch.utils._pytree.tree_map(lambda t: t[:0], batches[0])
    a, b = fast(*empty), plain(*empty)
    assert a.shape == b.shape and a.dtype == b.dtype and a.shape[0] == 0
    a.sum().backward()
    b.sum().backward()
    for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert not torch.any(p.grad.to_dense() if p.grad.is_sparse else p.grad.clone())


def test_an_empty_batch_of_bags(fast: nn.Module) -> None:
    """The plain model cannot reshape it; ours can."""
    x, offsets, ids = dense_and_bags(ROWS, 0)
    assert fast(x[:0], [o[:0] for o in offsets], [i[:0] for i in ids]).shape == (0, 1)


def test_one_row_under_batch_norm() -> None:
    """The plain model refuses it in train mode, and so does ours, in the same words."""
    model, batches, _ = build("deepfm")
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=batches)
    errors = []
    for m in (plain, fast):
        with pytest.raises(ValueError) as caught:
            m(batches[0][0][:1])
        errors.append(str(caught.value).splitlines()[0])
    assert errors[0] == errors[1]


# ---------------------------------------------------------------- models


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        if x.max() > 2:
            h = h * 2
        return self.head(h)


def test_a_model_that_cannot_be_traced() -> None:
    """Not an error: the parts that can be traced are rewritten; the report says where and why."""
    model = Branches()
    ids = torch.arange(16) % 5
    fast = recast.optimize(model, example=[ids, ids[:2]])
    report = fast.report.to_dict()
    assert report["captured"] in ("partial", "none")
    source = Path(__file__).read_text().splitlines()
    line = 1 + next(k for k, text in enumerate(source) if text.strip() == "if x.max() > 2:")
    assert report["where"] == f"test_bad_input.py:{line}"
    text = str(fast.report)
    assert f"at   test_bad_input.py:{line}" in text
    assert "why  " in text and "torch.where" in text
    torch.testing.assert_close(fast(ids), model(ids))


def test_no_example_says_how_to_give_one() -> None:
    fast = recast.optimize(Branches())
    report = fast.report.to_dict()
    assert report["captured"] != "whole" and "example=" in str(fast.report)


def test_an_example_that_does_not_fit() -> None:
    with pytest.raises(
        UsageError, match=r"example: forward\(\) takes 2 positional arguments but 4"
    ):
        recast.optimize(build("pnn")[0], example=(1, 2, 3))


def test_no_model() -> None:
    with pytest.raises(RecastError, match=r"nn\.Module"):
        recast.optimize("a model")  # type: ignore[call-overload]


# ---------------------------------------------------------------- arguments


def test_an_optimizer_over_foreign_parameters() -> None:
    model, batches, _ = build("dlrm")
    other = torch.optim.SGD(build("pnn")[0].parameters(), lr=0.1)
    with pytest.raises(UsageError, match="none of the optimizer's 8 parameters belong") as caught:
        recast.optimize(model, other, example=batches)
    assert "SGD(model.parameters(), ...)" in str(caught.value)


def test_an_optimizer_over_a_copy() -> None:
    model, batches, _ = build("dlrm")
    other = torch.optim.Adagrad(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="or over a copy of this one"):
        recast.optimize(model, other, example=batches)


def test_an_unknown_pass() -> None:
    model, batches, _ = build("dlrm")
    with pytest.raises(UsageError, match="there is no pass 'fuse-mpl'") as caught:
        recast.optimize(model, example=batches, passes="default,fuse-mpl")
    assert caught.value.tries == ("fuse-mlp",)


def test_a_pass_that_is_taken_out() -> None:
    model, batches, _ = build("dlrm")
    fast = recast.optimize(model, example=batches, passes="default,-fuse-mlp")
    fired = {entry.rule for entry in fast.report.journal.fired}
    assert "fuse-mlp" not in fired and "group-embeddings" in fired
    with pytest.raises(UsageError, match="no pass 'fuse-mpl' to take out") as caught:
        recast.optimize(model, example=batches, passes="default,-fuse-mpl")
    assert caught.value.tries[0] == "fuse-mlp"


def test_an_unknown_option_of_a_pass() -> None:
    model, batches, _ = build("dlrm")
    with pytest.raises(UsageError, match="normalize has no option 'depth'"):
        recast.optimize(model, example=batches, passes="normalize{depth=3}")


def test_a_world_larger_than_the_process_group() -> None:
    """It can be read, dumped and saved; the report and forward say how to launch it."""
    model, batches, _ = build("dlrm")
    fast = recast.optimize(model, example=batches, world_size=8)
    assert "embedding_bags" in str(fast) and fast.report.to_dict()["captured"] == "whole"
    assert any("torchrun --nproc-per-node 8 train.py" in note for note in fast.report.notes)
    torch.save(fast, io.BytesIO())
    with pytest.raises(UsageError, match="made for 8 ranks") as caught:
        fast(*batches[0])
    assert "torchrun --nproc-per-node 8" in str(caught.value)


def test_a_state_dict_of_another_model(fast: nn.Module) -> None:
    before = {k: v.clone() for k, v in fast.state_dict().items()}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "emb_l\.0\.weight"'):
        fast.load_state_dict(build("pnn")[0].state_dict())
    assert all(torch.equal(v, before[k]) for k, v in fast.state_dict().items())


def test_a_state_dict_of_other_sizes(fast: nn.Module) -> None:
    cut = {k: v[:2] for k, v in fast.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for emb_l\.0\.weight"):
        fast.load_state_dict(cut)


@pytest.mark.parametrize(
    ("name", "given"),
    [("plan", "p.json"), ("topology", "dgx"), ("sharding", "by_row"), ("sharding", 3),
     ("sharding", {"row_slice_threshold": -1}), ("wire", "int9"), ("wire", {"back": "int8"})],
)  # fmt: skip
def test_a_wrong_argument_for_many_devices(name: str, given: Any) -> None:
    """Refused even on one device, where it would have no effect."""
    with pytest.raises(UsageError, match=name if "threshold" not in str(given) else "threshold"):
        recast.optimize(build("dlrm")[0], **{name: given})


def test_a_model_on_the_meta_device_with_values_nobody_knows() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(10**9, 64)
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.table(ids)
            return rows * self.scale

    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(UsageError, match=r"scale of the model .* has no first value"):
        recast.optimize(model, example=torch.randint(9, (4, 3)))
    assert model.table.weight.is_meta and model.scale.is_meta
    assert recast.optimize(model).report.captured == "whole"
