"""Closures, accumulation, clipping, loss scaling, checkpoints, and the hooks of others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from row_lookup import IDS, is_rows, ours, plain, same, twins, weigh
from row_optimizers import (
    FUSED,
    ONE_EACH,
    WHOLE,
    Kind,
    Pair,
    adam,
    adamw,
    batch,
    clip_plain,
    densified,
    fused,
    same_state,
)
from torch.optim import SGD, Adagrad, Optimizer

from recast.errors import IdError
from recast.optim import RowWiseAdagrad
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.optimizer import attach

optim = torch.optim


# --- ways of stepping ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", ["sgd-foreach", *ONE_EACH])
def test_step_with_a_closure_updates_after_it(name: str, by_name: bool) -> None:
    pair = Pair(FUSED[name])
    pair.train_by_closure(by_name=by_name)
    pair.check()
    assert fused() == 4 and densified() == 0
    assert is_rows(pair.a.grad)


@pytest.mark.parametrize("name", WHOLE)
def test_closures_of_those_that_step_all_rows(name: str, kernel: str) -> None:
    pair = Pair(WHOLE[name])
    pair.train_by_closure()
    pair.check()
    assert (fused(), densified()) == ((4, 0) if kernel == "kernel" else (0, 4))


class Counting(optim.Adamax):
    """A step of the user's own, which sets an attribute."""

    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        Counting,
        lambda p: optim.NAdam(p, lr=0.1),
        lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: optim.RMSprop(p, lr=0.1, eps=0.1, centered=True),
    ],
    ids=["of the user's own", "nadam", "amsgrad", "centered"],
)
def test_closures_of_those_that_torch_steps(make: Any) -> None:
    pair = Pair(Kind(make))
    pair.train_by_closure()
    pair.check()
    assert (fused(), densified()) == (0, 4)
    assert getattr(pair.ours, "done", 4) == 4


def test_lbfgs_calls_its_closure_many_times() -> None:
    pair = Pair(Kind(lambda p: optim.LBFGS(p, lr=0.1, max_iter=3)))
    for optimizer, loss in pair.sides():

        def closure(optimizer: Any = optimizer, loss: Any = loss) -> Any:
            optimizer.zero_grad()
            value = loss(IDS)
            value.backward()
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
    torch.testing.assert_close(pair.a, pair.b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adagrad-decay", "adagrad-tensor-lr", *ONE_EACH])
def test_schedulers(name: str) -> None:
    pair = Pair(FUSED[name])
    schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in pair.optimizers()]
    for _ in range(3):
        pair.train(1)
        for scheduler in schedulers:
            scheduler.step()
    pair.check()
    assert fused() == 3


@pytest.mark.parametrize("name", ONE_EACH)
def test_accumulation_over_backwards(name: str) -> None:
    pair = Pair(FUSED[name])
    for turn in range(6):
        for optimizer, loss in pair.sides():
            (loss(batch(turn)) / 3).backward()
            if turn % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    pair.check()
    assert fused() == 2 and densified() == 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_clipping_by_norm(name: str) -> None:
    pair = Pair(FUSED[name])
    for turn in range(3):
        for optimizer, loss in pair.sides():
            optimizer.zero_grad()
            loss(batch(turn)).backward()
        torch.nn.utils.clip_grad_norm_([pair.a, pair.head_a], 0.05)
        clip_plain([pair.b, pair.head_b], 0.05)
        for optimizer in pair.optimizers():
            optimizer.step()
        same(pair.a.grad, pair.b.grad)
    pair.check()
    assert fused() == 3 and densified() == 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_two_steps_on_one_gradient(name: str) -> None:
    pair = Pair(FUSED[name])
    for optimizer, loss in pair.sides():
        loss(IDS).backward()
        optimizer.step()
        optimizer.step()
    pair.check()
    assert fused() == 2


@pytest.mark.parametrize("name", ["adagrad-decay", *ONE_EACH])
def test_a_gradient_set_to_zero_still_counts_as_a_step(name: str) -> None:
    pair = Pair(FUSED[name])
    for optimizer, loss in pair.sides():
        loss(IDS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    pair.check()
    assert fused() == 2


def test_only_tables_and_no_other_parameter() -> None:
    a, b = twins()
    mine, theirs = Adagrad([a], foreach=True), Adagrad([b], foreach=True)
    attach(mine)
    for w, find, optimizer in ((a, ours, mine), (b, plain, theirs)):
        for _ in range(2):
            optimizer.zero_grad()
            weigh(find(w)).backward()
            optimizer.step()
    same(a, b)
    assert mine.state[a]["step"] == theirs.state[b]["step"] == 2


def test_a_table_without_gradient_is_left_alone() -> None:
    pair = Pair(FUSED["adagrad"])
    pair.train(1)
    for optimizer, _ in pair.sides():
        optimizer.zero_grad()
        optimizer.step()
    pair.check()
    assert pair.a.grad is None


def test_a_gradient_made_dense_by_the_user() -> None:
    pair = Pair(FUSED["adagrad"])
    for _, loss in pair.sides():
        loss(IDS).backward()
    torch.nn.utils.clip_grad_value_([pair.a], 0.05)
    torch.nn.utils.clip_grad_value_([pair.b], 0.05)
    for optimizer in pair.optimizers():
        optimizer.step()
    pair.check()
    assert fused() == 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_groups_with_their_own_numbers_some_added_later(name: str) -> None:
    kind = FUSED[name]
    (a, b), (c, d) = twins(), twins(seed=3)
    # Torch 2.11's own Adagrad has no state for a group that is added later.
    groups: Any = [{"params": [b]}, {"params": [d], "lr": 0.3, "maximize": True}]
    mine, theirs = kind.make([a]), (kind.reference or kind.make)(groups)
    attach(mine, lazy=kind.lazy)
    mine.add_param_group({"params": [c], "lr": 0.3, "maximize": True})
    sparse = kind.sparse or kind.lazy
    for one, two, find, optimizer in ((a, c, ours, mine), (b, d, plain, theirs)):
        for _ in range(2):
            optimizer.zero_grad()
            (weigh(find(one, IDS, sparse)) + weigh(find(two, IDS, sparse))).backward()
            optimizer.step()
    same(a, b)
    same(c, d)
    assert fused() == 4
    same_state(mine, theirs)


def test_several_optimizers_over_one_model() -> None:
    """Each steps its own tables only, and a shared gradient is not used up by the first."""
    kinds = [FUSED[name] for name in ONE_EACH]
    tables = [twins(seed=k) for k in range(len(kinds))]
    mine = [kind.make([a]) for kind, (a, _) in zip(kinds, tables, strict=True)]
    theirs = [
        (kind.reference or kind.make)([b]) for kind, (_, b) in zip(kinds, tables, strict=True)
    ]
    for kind, optimizer in zip(kinds, mine, strict=True):
        attach(optimizer, lazy=kind.lazy)
    for turn in range(3):
        for side, (optimizers, find) in enumerate(((mine, ours), (theirs, plain))):
            found = [
                find(pair[side], batch(turn), kind.sparse or kind.lazy)
                for kind, pair in zip(kinds, tables, strict=True)
            ]
            weigh(torch.cat(found, 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (a, b), ours_, plain_ in zip(tables, mine, theirs, strict=True):
        same(a, b)
        same_state(ours_, plain_)
    assert fused() == 3 * len(kinds) and densified() == 0


@pytest.mark.parametrize("name", ["adagrad-fused", "lazy-adamw-fused", *ONE_EACH])
def test_checkpoints_are_torchs_own_and_resume(name: str) -> None:
    pair = Pair(FUSED[name])
    pair.train(2)
    again = Pair(FUSED[name])
    again.ours.load_state_dict(pair.plain.state_dict())
    again.plain.load_state_dict(pair.ours.state_dict())
    with torch.no_grad():
        for to, of in zip((again.a, again.b), (pair.b, pair.a), strict=True):
            to.copy_(of)
        for to, of in zip((again.head_a, again.head_b), (pair.head_b, pair.head_a), strict=True):
            to.copy_(of)
    again.train(2)
    again.check()


# --- loss scaling --------------------------------------------------------------------------------


def _scaled(kind: Any, **how: Any) -> Kind:
    eps = {} if kind is SGD else {"eps": 0.01}
    return Kind(lambda p: kind(p, lr=0.1, **eps, **how))


SCALED = {
    **{
        f"{kind.__name__}-{how}": _scaled(kind, **flags)
        for kind in (SGD, Adagrad)
        for how, flags in {
            "default": {},
            "loop": {"foreach": False},
            "fused": {"fused": True},
        }.items()
    },
    "Adam-dense": _scaled(optim.Adam),
    "Adam-fused-dense": _scaled(optim.Adam, fused=True),
    "RowWiseAdagrad": _scaled(RowWiseAdagrad),
    "SparseAdam": Kind(lambda p: optim.SparseAdam(p, lr=0.1, eps=0.01), sparse=True),
    "lazy-adam": adam(eps=0.01, weight_decay=0.1),
    "lazy-adamw-fused": adamw(eps=0.01, weight_decay=0.1, fused=True),
}


@pytest.mark.parametrize("inf_at", [None, 2])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_grad_scaler(name: str, unscale: bool, inf_at: int | None) -> None:
    pair = Pair(SCALED[name])
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for turn in range(4):
        for (optimizer, loss), scaler in zip(pair.sides(), scalers, strict=True):
            optimizer.zero_grad()
            value = loss(batch(turn))
            scaler.scale(value * float("inf") if turn == inf_at else value).backward()
            if unscale:
                scaler.unscale_(optimizer)
                clip = torch.nn.utils.clip_grad_norm_ if optimizer is pair.ours else clip_plain
                clip(optimizer.param_groups[0]["params"], 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if turn != inf_at:
            same(pair.a.grad, pair.b.grad)
    pair.check()
    if "dense" not in name:
        assert fused() == (4 if inf_at is None else 3) and densified() == 0


# --- hooks of others -----------------------------------------------------------------------------


def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    weights = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(weights, 0.05)


def test_a_users_pre_hook_added_later_runs_before_the_update() -> None:
    pair = Pair(FUSED["adagrad-eps"])
    pair.train(1)
    for optimizer in pair.optimizers():
        optimizer.register_step_pre_hook(clip)
    pair.train(3)
    pair.check()
    assert fused() == 4 and densified() == 0


def test_a_users_post_hook_sees_the_gradient() -> None:
    pair = Pair(FUSED["adagrad"])
    seen = []
    pair.ours.register_step_post_hook(lambda o, *_: seen.append((o, type(pair.a.grad))))
    pair.train(1)
    assert seen == [(pair.ours, RowGrad)]


def test_a_pre_hook_that_raises_loses_nothing() -> None:
    pair = Pair(FUSED["adagrad"])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handles = [optimizer.register_step_pre_hook(fail) for optimizer in pair.optimizers()]
    for (optimizer, loss), handle in zip(pair.sides(), handles, strict=True):
        loss(IDS).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        handle.remove()
        optimizer.step()
    pair.check()
    assert fused() == 1 and is_rows(pair.a.grad)


def test_a_post_hook_that_raises_loses_nothing() -> None:
    pair = Pair(FUSED["adagrad"])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for optimizer, loss in pair.sides():
        optimizer.register_step_post_hook(fail)
        loss(IDS).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    pair.check()
    assert is_rows(pair.a.grad)


def test_an_update_that_fails_changes_nothing() -> None:
    (a, _), (c, _) = twins(), twins(seed=3)
    optimizer = Adagrad([a, c], lr=0.1)
    weigh(ours(a)).backward()
    weigh(ours(c)).backward()
    c.grad.cell.pieces[0].ids[0] = 1000
    before = a.detach().clone(), c.detach().clone()
    with pytest.raises(IdError, match="row 1000 of a table of 100 rows"):
        optimizer.step()
    assert torch.equal(c, before[1]) and is_rows(a.grad) and is_rows(c.grad)
    assert optimizer.state[c]["step"] == 0


def test_copies_of_an_optimizer() -> None:
    pair = Pair(FUSED["adagrad"])
    pair.train(1)
    mine = copy.deepcopy((pair.a, pair.ours))
    theirs = copy.deepcopy((pair.b, pair.plain))
    for (w, optimizer), find in ((mine, ours), (theirs, plain)):
        optimizer.zero_grad()
        weigh(find(w)).backward()
        optimizer.step()
    same(mine[0], theirs[0])
    same(pair.a, pair.b)
    assert fused() == 2 and densified() == 0


def test_a_step_that_raises_loses_nothing() -> None:
    (a, _), (c, _) = twins(), twins(seed=3)
    groups = [{"params": [a]}, {"params": [c], "weight_decay": 0.1}]
    optimizer = Adagrad(groups, lr=0.1, foreach=False)
    weigh(ours(a)).backward()
    c.grad = torch.randn(100, 4).to_sparse()
    with pytest.raises(RuntimeError, match="not compatible with sparse gradients"):
        optimizer.step()
    assert is_rows(a.grad) and fused() == 1


def test_subclasses_keep_their_own_attributes() -> None:
    class Named(Adagrad):
        def __init__(self, params: Any, name: str) -> None:
            super().__init__(params, lr=0.1)
            self.name = name

        def _init_group(self, *args: Any) -> Any:
            assert self.name == "mine"
            return super()._init_group(*args)

    pair = Pair(Kind(lambda p: Named(p, "mine")))
    pair.train()
    pair.check()
    assert fused() == 4


def test_stepping_twice_places_one_hook() -> None:
    pair = Pair(FUSED["adagrad"])
    attach(pair.ours)
    pair.train(3)
    assert len(pair.ours._optimizer_step_pre_hooks) == 1
    assert fused() == 3


def test_an_update_is_a_write_that_autograd_sees() -> None:
    w, _ = twins()
    optimizer = SGD([w], lr=0.1)
    later = weigh(w * w)
    weigh(ours(w)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()
