"""``optimize(forms=)``: graphs for calls of other forms, over the same parameters."""

from __future__ import annotations

import copy
import io
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import RecastWarning, UsageError
from recast.rewriter.report import output

USERS, ITEMS = 50, 70


class Labelled(nn.Module):
    """Takes labels to train, and none to be evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.top = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, user: Tensor, item: Tensor, label: Tensor | None = None) -> Any:
        self.calls += 1
        if self.differs(label):
            return None
        out = self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)
        if label is None:
            return out.sigmoid()
        self.seen += len(label)
        return F.binary_cross_entropy_with_logits(out, label), out

    def differs(self, label: Tensor | None) -> bool:
        return False

    def rank(self, user: Tensor, item: Tensor) -> Tensor:
        order: Tensor = self(user, item).argsort()
        return order


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = (torch.randint(n, (rows,), generator=g) for n in (USERS, ITEMS))
    return *ids, torch.rand(rows, generator=g).round()


def made(**options: Any) -> tuple[Labelled, Any]:
    torch.manual_seed(0)
    model = Labelled()
    return copy.deepcopy(model), recast.optimize(
        model, example=batch(16), forms=[batch(16)[:2]], **options
    )


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("known_calls")
def test_each_form_runs_its_own_graph() -> None:
    plain, fast = made()
    (without,) = fast.forms
    for k, rows in enumerate((16, 9, 1)):
        with_label, users = batch(rows, k), batch(rows, k)[:2]
        assert fast._running_form(with_label, {}) is fast
        assert fast._running_form(users, {}) is without
        assert fast._running_form((), dict(zip(("user", "item"), users, strict=True))) is without
        for one in (plain, fast):
            one.train(rows > 1)
        same(fast(*with_label), plain(*with_label))
        same(fast(*users), plain(*users))
        same(fast(item=users[1], user=users[0]), plain(*users))
    assert without._runner.known_call(batch(16, 5)[:2], {}) is not None
    assert fast.calls == plain.calls == 9
    assert fast.seen == plain.seen == 26
    same(fast.top[1].running_var, plain.top[1].running_var)


def test_the_diff_takes_batches_of_all_forms() -> None:
    plain, fast = made()
    recast.diff(plain, fast, [batch(16), batch(16)[:2]]).check()
    recast.diff(plain, fast, batch(16)[:2]).check()


def test_the_diff_names_the_node_of_a_form() -> None:
    plain, fast = made()
    for graph in fast.forms[0].graphs.values():
        (node,) = (n for n in graph.nodes if n.name.startswith("sigmoid"))
        node.target = torch.tanh
    fast.forms[0]._runner.build()
    for wrong in (fast, copy.deepcopy(fast)):
        found = recast.diff(plain, wrong, [batch(16), batch(16)[:2]], steps=0)
        assert not found.ok
        assert found.first is not None
        assert found.first.node == "sigmoid"


def test_training_with_both_in_a_step() -> None:
    plain, fast = made()
    for one in (plain, fast):
        opt = torch.optim.SGD(one.parameters(), lr=0.1)
        for k in range(3):
            opt.zero_grad()
            loss, _ = one(*batch(16, k))
            (loss + one(*batch(8, k)[:2]).square().mean()).backward()
            opt.step()
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)


def test_the_report_names_it() -> None:
    _, fast = made()
    told = "forms[0] (label is None): captured whole"
    assert f"  form  {told}" in fast.report.text()
    assert fast.report.to_dict()["forms"][0]["model"] == "forms[0] (label is None)"
    assert fast.report.to_dict()["forms"][0]["lookups"] == {"found": 2, "fused": 2}
    assert "sigmoid" in fast.forms[0].report.graph_text
    assert "graph Labelled.forms.0" in fast.report.graph_text


def test_files_of_a_form(tmp_path: Path) -> None:
    _, fast = made()
    names = [p.name for p in output.write(fast, tmp_path, {"text": "graph.txt"})]
    assert names == ["graph.txt", "graph.forms.0.txt"]
    assert "label" not in (tmp_path / names[1]).read_text().splitlines()[0]


def test_a_form_that_is_covered_has_no_graph() -> None:
    fast = recast.optimize(
        Labelled(), example=batch(16), forms=[batch(16)[:2], batch(7), batch(5)[:2]]
    )
    assert len(fast.forms) == 1
    told = [form["notes"] for form in fast.report.to_dict()["forms"]]
    assert [("run such calls, too" in " ".join(notes)) for notes in told] == [False, True, True]


class Steps(nn.Module):
    """Its graph holds for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 4)
        self.cell = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros(len(ids), 4)
        for k in range(ids.shape[1]):
            state = torch.tanh(self.cell(state) + self.emb(ids[:, k]))
        return state


def test_another_length_is_another_form() -> None:
    model = Steps()
    two = [torch.randint(30, (rows, 2)) for rows in (8, 3)]
    fast = recast.optimize(model, example=torch.randint(30, (8, 5)), forms=[two])
    assert "forms[0] (other sizes or values): captured whole" in fast.report.text()
    for length in (5, 2, 5):
        ids = torch.randint(30, (6, length))
        same(fast(ids), model(ids))
    with pytest.warns(RecastWarning, match="runs its plain forward: ids had 5 in dimension 1"):
        fast(torch.randint(30, (6, 3)))


class Judged(Steps):
    def forward(self, ids: Tensor, label: Tensor | None = None) -> Tensor:
        state = super().forward(ids).sum(1)
        return state if label is None else F.mse_loss(state, label)


def test_what_is_different_is_told_of_the_nearest_form() -> None:
    ids = torch.randint(30, (8, 5))
    model = Judged()
    fast = recast.optimize(model, example=(ids, torch.rand(8)), forms=[(ids,)])
    with pytest.warns(RecastWarning, match="runs its plain forward: ids had 5 in dimension 1"):
        same(fast(ids[:, :3]), model(ids[:, :3]))
    with (
        pytest.warns(RecastWarning, match="label is a float, not a Tensor"),
        pytest.raises(AttributeError),
    ):
        fast(ids, 1.0)


class Picked(nn.Module):
    """Its rows are picked by a mask, or by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.top = nn.Embedding(30, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, which: Tensor) -> Tensor:
        out: Tensor = self.top(self.emb(ids))[which]
        return out


def test_a_mask_and_an_index_are_two_forms() -> None:
    model = Picked()
    ids = torch.randint(30, (6,))
    mask, index = torch.arange(6) % 2 == 0, torch.tensor([0, 2, 1, 1, 5, 3])
    for first, second in ((mask, index), (index, mask)):
        fast = recast.optimize(model, example=(ids, first), forms=[(ids, second)])
        assert len(fast.forms) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", RecastWarning)
            for which in (mask, index, mask):
                same(fast(ids, which), model(ids, which))


class Cold(nn.Module):
    """In one mode, a value decides what it computes."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.emb, self.top = nn.Embedding(30, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, warm: Tensor) -> Tensor:
        out: Tensor = self.top(self.emb(ids))
        if self.training != self.asks or warm > 0.5:
            return out
        return out.sigmoid()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_form_that_one_mode_alone_tells_apart(training: bool, asks: bool) -> None:
    model = Cold(asks).train(training)
    ids = torch.randint(30, (6,))
    fast = recast.optimize(
        model, example=(ids, torch.tensor(1.0)), forms=[(ids, torch.tensor(0.0))]
    )
    assert len(fast.forms) == 1
    for mode in (False, True):
        fast.train(mode)
        model.train(mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RecastWarning)
            for value in (0.9, 0.1, 0.8):
                same(fast(ids, torch.tensor(value)), model(ids, torch.tensor(value)))


class Timed(Labelled):
    """Without labels it reads the clock, or with them."""

    def __init__(self, evaluated: bool) -> None:
        super().__init__()
        self.evaluated = evaluated

    def differs(self, label: Tensor | None) -> bool:
        return (label is None) == self.evaluated and time.time() < 0


def test_a_form_that_is_not_captured() -> None:
    model = Timed(evaluated=True)
    fast = recast.optimize(model, example=batch(16), forms=[batch(16)[:2]])
    assert fast.forms == ()
    assert fast.report.captured == "whole"
    assert fast.report.forms[0].captured in ("none", "partial")
    with pytest.warns(RecastWarning, match=r"label is None.*forms=\[batch\]"):
        fast(*batch(8)[:2])


def test_an_example_that_is_not_captured() -> None:
    model = Timed(evaluated=False)
    fast = recast.optimize(model, example=batch(16), forms=[batch(16)[:2]])
    assert fast.forms == ()
    assert "the example itself is not captured whole" in fast.report.text()
    same(fast(*batch(8)[:2]), copy.deepcopy(model)(*batch(8)[:2]))


def test_copies_have_it() -> None:
    plain, fast = made()
    saved = io.BytesIO()
    torch.save(fast, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(fast), torch.load(saved, weights_only=False)):
        assert twin.forms[0]._root is twin._root
        with torch.no_grad():
            twin.user.weight.zero_()
            twin.eval()
            got = twin(*batch(8)[:2])
        assert not torch.equal(got, fast.eval()(*batch(8)[:2]))
        other = copy.deepcopy(plain).eval()
        with torch.no_grad():
            other.user.weight.zero_()
            same(got, other(*batch(8)[:2]))


def test_in_place_and_by_methods() -> None:
    torch.manual_seed(0)
    model = Labelled()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=batch(16), forms=[batch(16)[:2]], inplace=True)
    for one in (plain, model):
        one.eval()
    same(model(*batch(8)), plain(*batch(8)))
    same(model(*batch(8)[:2]), plain(*batch(8)[:2]))
    assert torch.equal(fast.rank(*batch(8)[:2]), plain.rank(*batch(8)[:2]))
    model.top[2].register_forward_hook(lambda *_: None)
    with pytest.warns(RecastWarning, match="runs its plain forward: a hook was added"):
        same(model(*batch(8)[:2]), plain(*batch(8)[:2]))


def test_methods_of_the_result_reach_it() -> None:
    plain, fast = made()
    for one in (plain, fast):
        one.eval()
    assert torch.equal(fast.rank(*batch(8)[:2]), plain.rank(*batch(8)[:2]))


class Weighted(nn.Module):
    """With a tensor that is neither a parameter nor a buffer, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(30, 4)
        self.scale = torch.rand(4)

    def forward(self, ids: Tensor, twice: bool = False) -> Tensor:
        out: Tensor = self.emb(ids) * self.scale
        return out * torch.tensor([1.0, 2.0, 3.0, 4.0]) if twice else out


def test_a_cast_reaches_what_its_graph_reads() -> None:
    model = Weighted()
    ids = torch.randint(30, (6, 3))
    fast = recast.optimize(model, example=(ids,), forms=[(ids, True)])
    assert len(fast.forms) == 1
    fast.double()
    plain = copy.deepcopy(model)
    plain.scale = plain.scale.double()
    for twice in (False, True):
        assert fast(ids, twice).dtype == torch.float64
        torch.testing.assert_close(fast(ids, twice), plain.double()(ids, twice), rtol=1e-6, atol=0)


def test_a_change_of_the_model_is_seen_by_both() -> None:
    plain, fast = made()
    for one in (plain, fast):
        one.eval()
        one.top[2] = nn.Tanh()
    with pytest.warns(RecastWarning, match="'top.2'"):
        same(fast(*batch(8)[:2]), plain(*batch(8)[:2]))
    assert fast.why_stale() is not None


@pytest.mark.parametrize("copied", [False, True])
def test_torch_compile_runs_both(copied: bool) -> None:
    """Also if its first call is that of a copy, which is not built yet."""
    plain, fast = made()
    for one in (plain, fast):
        one.eval()
    compiled = torch.compile(copy.deepcopy(fast) if copied else fast, backend="eager")
    for _ in range(2):
        same(compiled(*batch(8)), plain(*batch(8)))
        same(compiled(*batch(8)[:2]), plain(*batch(8)[:2]))


def test_dynamic_tables() -> None:
    model = Labelled()
    tables = {"item": recast.dynamic.Dynamic(max_rows=64)}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    fast, opt = recast.optimize(model, opt, example=batch(16), forms=[batch(16)[:2]], tables=tables)
    users, items, labels = batch(16)
    fast(users, items * 10**12, labels)[0].backward()
    opt.step()
    fast.eval()
    with torch.no_grad():
        same(fast(users, items * 10**12, labels)[1].sigmoid(), fast(users, items * 10**12))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"forms": batch(4)[:2]}, "forms is a tuple, not a list"),
        ({"forms": {"user": batch(4)[0]}}, "forms is a dict, not a list"),
        ({"forms": [batch(4)[:2]], "example": None}, "forms are given, and no example"),
        ({"forms": [batch(4)[:1]]}, r"forms\[0\]: forward\(\) missing"),
        ({"forms": [batch(4)[:2], (batch(4)[0], batch(5)[1])]}, r"forms\[1\]: the plain model"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        recast.optimize(Labelled(), **{"example": batch(4), **options})
