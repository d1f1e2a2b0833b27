"""Optimizers on row gradients, against the same optimizer on plain ones."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
from typing import Any

import pytest
import torch
from row_lookup import IDS, is_rows, ours, piece, plain, same, twins, weigh
from row_optimizers import (
    FUSED,
    ONE_EACH,
    WHOLE,
    Kind,
    Make,
    Pair,
    adam,
    adamw,
    batch,
    densified,
    fused,
    same_state,
)
from torch.nn import Parameter
from torch.optim import SGD, Adagrad

from recast.errors import RecastWarning, UsageError
from recast.optim import RowWiseAdagrad, stochastic_rounding
from recast.runtime.rows.grad import claimed, counters, row_grad
from recast.runtime.rows.optimizer import (
    attach,
    is_lazy,
    rounds_at_random,
    support,
    why_dense,
)
from recast.runtime.rows.rules import rule_of

optim = torch.optim


WAYS = [(name, True) for name in FUSED]
WAYS += [(name, False) for name, kind in FUSED.items() if not kind.lazy]  # lazy is asked for


@pytest.mark.parametrize(("name", "attached"), WAYS)
def test_fused(name: str, attached: bool) -> None:
    pair = Pair(FUSED[name], attached=attached)
    pair.train()
    pair.check()
    assert fused() == 4 and densified() == 0
    assert is_rows(pair.a.grad)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 17, 64, 100])
@pytest.mark.parametrize("name", ONE_EACH)
def test_widths(name: str, width: int) -> None:
    pair = Pair(FUSED[name], width=width)
    pair.train(2)
    pair.check()


UNFUSED: dict[str, tuple[Make, str]] = {
    "sgd-nesterov": (
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        "nesterov with foreach=True",
    ),
    "adagrad-eps": (lambda p: Adagrad(p, eps=0.0, initial_accumulator_value=0.1), "eps is 0"),
    "sgd-differentiable": (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable"),
    "row-wise-eps": (
        lambda p: RowWiseAdagrad(p, eps=0.0, initial_accumulator_value=0.1),
        "eps is 0",
    ),
    "adam-amsgrad": (lambda p: optim.Adam(p, lr=0.1, amsgrad=True), "amsgrad keeps a maximum"),
    "adam-capturable": (lambda p: optim.Adam(p, capturable=True), "capturable=True"),
    "rmsprop": (lambda p: optim.RMSprop(p, centered=True), "centered=True"),
    "nadam": (lambda p: optim.NAdam(p), "NAdam is not fused"),
    "muon": (lambda p: optim.Muon(p, lr=0.1), "Muon is not fused"),
}


@pytest.mark.parametrize("name", UNFUSED)
@pytest.mark.parametrize("attached", [True, False])
def test_not_fused_gets_the_plain_numbers(name: str, attached: bool) -> None:
    make, reason = UNFUSED[name]
    pair = Pair(Kind(make), attached=attached)
    why = why_dense(pair.ours, pair.ours.param_groups[0], pair.a)
    assert why is not None and reason in why
    if name in ("adam-capturable", "sgd-differentiable"):
        return  # torch itself refuses these, on a CPU or for a leaf
    pair.train()
    pair.check()
    assert fused() == 0
    assert counters()[f"dense-step:{type(pair.ours).__name__}"] == 4 == densified()


# What lazy Adam leaves to torch: the plain dense numbers.
NOT_LAZY: dict[str, tuple[Make, str]] = {
    "amsgrad": (lambda p: optim.Adam(p, lr=0.1, amsgrad=True), "amsgrad keeps a maximum"),
    "differentiable": (lambda p: optim.AdamW(p, differentiable=True), "differentiable=True"),
    "nesterov": (
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        "momentum moves every row",
    ),
    "rmsprop": (lambda p: optim.RMSprop(p, centered=True), "RMSprop is not fused"),
}


@pytest.mark.parametrize("name", NOT_LAZY)
def test_not_lazy_gets_the_plain_numbers(name: str) -> None:
    make, reason = NOT_LAZY[name]
    pair = Pair(Kind(make))
    attach(pair.ours, lazy=True)
    why = support(pair.ours, pair.ours.param_groups[0])
    assert why is not None and reason in why
    if name == "differentiable":
        return  # torch itself refuses it for a leaf
    pair.train()
    pair.check()
    assert fused() == 0 and densified() == 4


@pytest.mark.parametrize("attached", [True, False])
def test_sparse_adam_refuses_what_it_refuses_from_plain_models(attached: bool) -> None:
    for w, find in zip(twins(), (ours, plain), strict=True):
        good = Parameter(torch.randn(9, 4))
        optimizer = optim.SparseAdam([good, w])
        if attached:
            attach(optimizer)
        (weigh(find(w)) + weigh(find(good, IDS, True))).backward()
        before = good.detach().clone()
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            optimizer.step()
        assert torch.equal(good, before)  # torch too finds out before it writes


def test_sparse_adam_on_a_gradient_that_is_partly_dense() -> None:
    """A sum of sparse and dense gradients is dense, here and in torch."""
    for w, find in zip(twins(), (ours, plain), strict=True):
        (weigh(find(w, IDS, True)) + weigh(find(w))).backward()
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            optim.SparseAdam([w]).step()


def test_lazy_leaves_rows_that_are_not_looked_up() -> None:
    kind = adamw(weight_decay=0.3)
    pair = Pair(kind)
    before = pair.a.detach().clone()
    pair.train()
    touched = torch.cat([batch(turn) for turn in range(4)]).unique()
    untouched = torch.ones(len(before), dtype=torch.bool).index_fill(0, touched, False)
    assert torch.equal(pair.a[untouched], before[untouched])
    assert (pair.a[touched] != before[touched]).any(1).all()
    attach(pair.ours)  # and back again: all rows move
    pair.ours.zero_grad()
    weigh(ours(pair.a)).backward()
    pair.ours.step()
    assert (pair.a[untouched] != before[untouched]).any(1).all()


@pytest.mark.parametrize("name", [*ONE_EACH, *WHOLE])
def test_defaults_and_later_groups_are_torchs_own(name: str) -> None:
    pair = Pair({**FUSED, **WHOLE}[name])
    if not all(support(pair.ours, group) for group in pair.ours.param_groups):
        stochastic_rounding(pair.ours)
    assert pair.ours.defaults == pair.plain.defaults
    if type(pair.ours) is not optim.AdamW:  # which refuses one of its own defaults
        type(pair.ours)([Parameter(torch.ones(2, 2))], **pair.ours.defaults)
    for optimizer in pair.optimizers():
        optimizer.add_param_group({"params": [Parameter(torch.ones(2, 2))]})
    same_state(pair.ours, pair.plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("asked", [False, True])
def test_copies_keep_what_was_asked_for(asked: bool, copied: Any) -> None:
    optimizer = optim.Adam([Parameter(torch.ones(2, 2))])
    attach(optimizer, lazy=asked)
    stochastic_rounding(optimizer, asked)
    again = copied(copied(optimizer))
    assert is_lazy(again) is rounds_at_random(again) is asked
    attach(again, lazy=not asked)
    assert is_lazy(optimizer) is asked, "the settings are not shared"


def test_lazy_survives_copies_checkpoints_and_new_groups() -> None:
    kind = adam()
    pair = Pair(kind)
    pair.train(1)
    pair.ours.load_state_dict(pair.plain.state_dict())
    w, mine = copy.deepcopy((pair.a, pair.ours))
    assert mine.state_dict()["param_groups"] == pair.plain.state_dict()["param_groups"]
    extra, twin = twins(seed=3)
    mine.add_param_group({"params": [extra]})
    pair.plain.add_param_group({"params": [twin]})
    for optimizer, table, other, find in (
        (mine, w, extra, ours),
        (pair.plain, pair.b, twin, plain),
    ):
        optimizer.zero_grad()
        (weigh(find(table, IDS, True)) + weigh(find(other, IDS, True))).backward()
        optimizer.step()
    same(w, pair.b)
    same(extra, twin)
    same_state(mine, pair.plain)
    assert fused() == 3 and densified() == 0


def test_a_subclass_with_its_own_step_is_not_fused() -> None:
    class Mine(Adagrad):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Renamed(Adagrad):
        pass

    w, _ = twins()
    mine, renamed = Mine([w]), Renamed([w])
    assert "Mine is not fused" in (support(mine, mine.param_groups[0]) or "")
    assert support(renamed, renamed.param_groups[0]) is None


def test_a_step_that_torch_wrapped_once_more_is_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch wraps the step of the first optimizer's class: AdamW's, if made before any Adam's."""

    class Later(torch.optim.Adam):
        pass

    class Mine(torch.optim.Adam):
        @functools.wraps(torch.optim.Adam.step)
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    w, _ = twins()
    first = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", getattr(first, "__wrapped__", first))
    later = Later([w])
    assert Later.step is not torch.optim.Adam.step, "torch wraps it no longer: step_of can go"
    assert rule_of(later, lazy=True) is not None
    assert rule_of(Mine([w]), lazy=True) is None


TWICE = {name: kind for name, kind in {**FUSED, **WHOLE}.items() if not kind.lazy}


@pytest.mark.parametrize("name", TWICE)
def test_a_table_that_a_group_lists_twice_is_stepped_twice(name: str) -> None:
    """Torch warns of it, once: when the group is made."""
    pair = Pair(TWICE[name])
    for optimizer in (pair.ours, pair.plain):
        params = optimizer.param_groups[0]["params"]
        params.append(params[0])
    pair.train(3)
    pair.check()


def test_attach_wants_an_optimizer() -> None:
    for function in (attach, stochastic_rounding):
        with pytest.raises(UsageError, match="object is not a torch"):
            function(object())  # type: ignore[operator]


@pytest.mark.parametrize("how", ["clip", "lr"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise"])
def test_nan_reaches_every_row(name: str, how: str) -> None:
    """Rows without gradient too, as in torch: a zero times NaN or infinity is NaN."""
    pair = Pair(FUSED[name])
    pair.train(1)
    for optimizer, loss in pair.sides():
        optimizer.zero_grad()
        (loss(batch(5)) * (math.nan if how == "clip" else 1.0)).backward()
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        else:
            optimizer.param_groups[0]["lr"] = math.inf
        optimizer.step()
    same(pair.a, pair.b)
    assert bool(pair.a.isnan().all(1).sum() > 80)  # of 100 rows; a batch has 16 ids


# --- claims --------------------------------------------------------------------------------------


def test_claims_live_as_long_as_a_fused_optimizer() -> None:
    (a, b), (c, _) = twins(), twins(seed=3)
    optimizer = Adagrad([{"params": [a]}, {"params": [c], "weight_decay": 0.1}])
    attach(optimizer)
    attach(optim.Adam([b]))
    assert claimed(a) and not claimed(b) and not claimed(c)
    assert not claimed(copy.deepcopy(a))
    del optimizer
    gc.collect()
    assert not claimed(a)


# --- other tables --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_other_dtypes(kind: Any, dtype: torch.dtype) -> None:
    a, b = (Parameter(t.detach().to(dtype)) for t in twins())
    mine, theirs = kind([a], lr=0.1), kind([b], lr=0.1)
    for w, find, optimizer in ((a, ours, mine), (b, plain, theirs)):
        for turn in range(3):
            optimizer.zero_grad()
            upstream = torch.randn(6, 4, generator=torch.Generator().manual_seed(turn))
            find(w, torch.arange(6)).backward(upstream.to(dtype))  # no sums: they round apart
            optimizer.step()
    torch.testing.assert_close(a, b)
    assert fused() == 3


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise"])
def test_stochastic_rounding_keeps_small_steps(name: str, half: torch.dtype) -> None:
    """Steps far below the spacing of numbers: lost when rounding to nearest, kept in the mean."""
    torch.manual_seed(0)
    start = torch.full((64, 256), 100.0, dtype=half)
    step = float(torch.finfo(half).eps) * 100 / 40
    found = {}
    for on in (False, True):
        w = Parameter(start.clone())
        optimizer = FUSED[name].make([w])
        attach(optimizer)
        stochastic_rounding(optimizer, on)
        if name != "sgd":  # the root of the sum is 1
            state = optimizer.state[w]
            shape = (64,) if name == "row-wise" else (64, 256)
            state.update(step=torch.tensor(0.0), sum=torch.ones(shape))
        for _ in range(10):
            w.grad = row_grad(
                w.shape, half, w.device, [piece(torch.arange(64), torch.full((64, 256), step * 10))]
            )
            optimizer.step()  # the learning rate is 0.1
        found[on] = w.detach().double()
        assert optimizer.state_dict()["param_groups"][0].keys() == (
            FUSED[name].make([w]).state_dict()["param_groups"][0].keys()
        )
    assert torch.equal(found[False], start.double())
    moved = (100 - found[True]).mean().item()
    grown = [0.0 if name == "sgd" else (10 * step) ** 2 * (turn + 1) for turn in range(10)]
    expected = sum(step / (1 + more) ** 0.5 for more in grown)
    assert moved == pytest.approx(expected, rel=0.07)  # five standard deviations
    assert fused() == 20


def test_stochastic_rounding_follows_the_seed_and_takes_no_number_of_it() -> None:
    found = []
    for seed in (1, 1, 2):
        w = Parameter(torch.ones(9, 5, dtype=torch.bfloat16))
        optimizer = SGD([w], lr=0.001)
        stochastic_rounding(optimizer)
        torch.manual_seed(seed)
        first = torch.get_rng_state()
        for _ in range(3):
            w.grad = row_grad(
                w.shape, w.dtype, w.device, [piece(torch.arange(9), torch.ones(9, 5))]
            )
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), first)
        found.append(w.detach().clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["lbfgs", "adam", "rmsprop", "sgd-momentum"])
def test_stochastic_rounding_of_what_cannot_be_is_refused(name: str) -> None:
    adam = optim.Adam, "Adam moves every row at every step"
    momentum = UNFUSED["sgd-nesterov"][0], "momentum moves every row at every step"
    lbfgs = optim.LBFGS, "LBFGS is not fused"
    rmsprop = optim.RMSprop, "RMSprop is not fused"
    others = {"lbfgs": lbfgs, "adam": adam, "sgd-momentum": momentum, "rmsprop": rmsprop}
    make, reason = {**UNFUSED, **others}[name]
    optimizer = make([Parameter(torch.zeros(9, 4))])
    with pytest.raises(UsageError, match="rounds its tables to nearest") as raised:
        stochastic_rounding(optimizer)
    assert reason in raised.value.why
    stochastic_rounding(optimizer, False)


def test_stochastic_rounding_that_a_scheduler_ends_is_told_once() -> None:
    w = Parameter(torch.ones(9, 4, dtype=torch.bfloat16))
    optimizer = SGD([w], lr=0.001)
    stochastic_rounding(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9  # as OneCycleLR does
    w.grad = row_grad(w.shape, w.dtype, w.device, [piece(torch.arange(9), torch.ones(9, 4))])
    with pytest.warns(RecastWarning, match="momentum moves every row"):
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_tables_that_are_not_contiguous(name: str) -> None:
    storage = torch.randn(100, 10)
    for view in (lambda t: t[:, 2:8], lambda t: t[:60].T[:, :50]):
        a, b = Parameter(view(storage.clone())), Parameter(view(storage.clone()))
        mine, theirs = FUSED[name].make([a]), FUSED[name].make([b])
        for w, find, optimizer in ((a, ours, mine), (b, plain, theirs)):
            for _ in range(2):
                optimizer.zero_grad()
                weigh(find(w)).backward()
                optimizer.step()
        same(a, b)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("kind", [Adagrad, optim.Adam])
def test_a_compiled_step(kind: Any, attached: bool) -> None:
    torch._dynamo.reset()
    pair = Pair(Kind(lambda p: kind(p, lr=0.1)), attached=attached)
    steps = torch.compile(lambda: pair.ours.step(), backend="aot_eager"), pair.plain.step
    for turn in range(3):
        for (optimizer, loss), step in zip(pair.sides(), steps, strict=True):
            optimizer.zero_grad()
            loss(batch(turn)).backward()
            step()
    torch.testing.assert_close(pair.a, pair.b, rtol=1e-4, atol=1e-5)
    if attached and kind is Adagrad:
        assert fused() == 3 and densified() == 0
