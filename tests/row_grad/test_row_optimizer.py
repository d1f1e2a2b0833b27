"""Optimizers on row gradients, beside the same optimizer on plain ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from row_lookup import IDS, is_rows, ours, plain, same, twins, weigh
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Optimizer

from recast.errors import IdError, UsageError
from recast.runtime.row_grad import RowGrad, claimed, counters
from recast.runtime.row_optimizer import attach, support

optim = torch.optim
Make = Callable[[list[Parameter]], Optimizer]


def fused() -> int:
    return counters().get("fused-step", 0)


def densified() -> int:
    return sum(times for key, times in counters().items() if key.startswith("dense-"))


class Pair:
    """A table and a dense layer, ours and plain, each with its own optimizer."""

    def __init__(self, make: Make, *, attached: bool = True, width: int = 4) -> None:
        self.a, self.b = twins(width=width)
        self.head_a, self.head_b = twins(width, 1, seed=9)
        self.ours = make([self.a, self.head_a])
        self.plain = make([self.b, self.head_b])
        if attached:
            attach(self.ours)

    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        return self.ours, self.plain

    def sides(self) -> Iterable[tuple[Optimizer, Callable[[torch.Tensor], torch.Tensor]]]:
        yield self.ours, lambda ids: weigh(ours(self.a, ids) @ self.head_a)
        yield self.plain, lambda ids: weigh(plain(self.b, ids) @ self.head_b)

    def train(self, steps: int = 4) -> None:
        for turn in range(steps):
            ids = batch(turn)
            for optimizer, loss in self.sides():
                optimizer.zero_grad()
                loss(ids).backward()
                optimizer.step()
            same(self.a.grad, self.b.grad)

    def check(self) -> None:
        same(self.a, self.b)
        same(self.head_a, self.head_b)
        mine, theirs = self.ours.state_dict(), self.plain.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert mine["state"][index].keys() == state.keys()
            for name, value in state.items():
                assert type(mine["state"][index][name]) is type(value)
                torch.testing.assert_close(mine["state"][index][name], value)


def batch(turn: int) -> torch.Tensor:
    return torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(turn))


FUSED: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-foreach": lambda p: SGD(p, lr=0.1, foreach=True),
    "sgd-loop": lambda p: SGD(p, lr=0.1, foreach=False),
    "sgd-fused": lambda p: SGD(p, lr=0.1, fused=True),
    "sgd-maximize": lambda p: SGD(p, lr=0.1, maximize=True),
    "sgd-tensor-lr": lambda p: SGD(p, lr=torch.tensor(0.1)),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad-foreach": lambda p: Adagrad(p, lr=0.1, foreach=True),
    "adagrad-loop": lambda p: Adagrad(p, lr=0.1, foreach=False),
    "adagrad-fused": lambda p: Adagrad(p, lr=0.1, fused=True),
    "adagrad-decay": lambda p: Adagrad(p, lr=0.1, lr_decay=0.3),
    "adagrad-eps": lambda p: Adagrad(p, lr=0.1, eps=0.5),
    "adagrad-initial": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=2.0),
    "adagrad-maximize": lambda p: Adagrad(p, lr=0.1, maximize=True),
    "adagrad-tensor-lr": lambda p: Adagrad(p, lr=torch.tensor(0.1)),
    "adagrad-groups": lambda p: Adagrad(
        [{"params": p[:1], "lr": 0.3, "eps": 0.1}, {"params": p[1:]}], lr=0.1
    ),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("attached", [True, False])
def test_fused(name: str, attached: bool) -> None:
    pair = Pair(FUSED[name], attached=attached)
    pair.train()
    pair.check()
    assert fused() == 4 and densified() == 0
    assert is_rows(pair.a.grad)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 17, 64, 100])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_widths(name: str, width: int) -> None:
    pair = Pair(FUSED[name], width=width)
    pair.train(2)
    pair.check()


UNFUSED: dict[str, tuple[Make, str]] = {
    "sgd-momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9), "momentum"),
    "sgd-nesterov": (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True), "momentum"),
    "sgd-decay": (lambda p: SGD(p, lr=0.1, weight_decay=0.1), "weight_decay"),
    "adagrad-decay": (lambda p: Adagrad(p, foreach=True, weight_decay=0.1), "weight_decay"),
    "adagrad-fused-decay": (lambda p: Adagrad(p, fused=True, weight_decay=0.1), "weight_decay"),
    "adagrad-eps": (lambda p: Adagrad(p, eps=0.0, initial_accumulator_value=0.1), "eps is 0"),
    "sgd-differentiable": (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable"),
    "adam": (lambda p: optim.Adam(p, lr=0.1), "Adam is not fused"),
    "adam-capturable": (lambda p: optim.Adam(p, lr=0.1, capturable=True), "Adam is not fused"),
    "adamw-fused": (lambda p: optim.AdamW(p, lr=0.1, fused=True), "AdamW is not fused"),
    "adamw-foreach": (lambda p: optim.AdamW(p, lr=0.1, foreach=True), "AdamW is not fused"),
    "rmsprop": (lambda p: optim.RMSprop(p), "RMSprop is not fused"),
    "nadam": (lambda p: optim.NAdam(p), "NAdam is not fused"),
    "muon": (lambda p: optim.Muon(p, lr=0.1), "Muon is not fused"),
}


@pytest.mark.parametrize("name", UNFUSED)
@pytest.mark.parametrize("attached", [True, False])
def test_not_fused_gets_the_plain_numbers(name: str, attached: bool) -> None:
    make, reason = UNFUSED[name]
    pair = Pair(make, attached=attached)
    why = support(pair.ours, pair.ours.param_groups[0])
    assert why is not None and reason in why
    if name in ("adam-capturable", "sgd-differentiable"):
        return  # torch itself refuses these, on a CPU or for a leaf
    pair.train()
    pair.check()
    assert fused() == 0
    assert counters()[f"dense-step:{type(pair.ours).__name__}"] == 4 == densified()


def test_sparse_adam_refuses_what_it_refuses_from_plain_models() -> None:
    for w, find in zip(twins(), (ours, plain), strict=True):
        weigh(find(w)).backward()
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            optim.SparseAdam([w]).step()


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


def test_attach_wants_an_optimizer() -> None:
    with pytest.raises(UsageError, match="object is not a torch"):
        attach(object())  # type: ignore[arg-type]


# --- ways of stepping ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", ["adagrad", "sgd-foreach"])
def test_step_with_a_closure_updates_after_it(name: str, by_name: bool) -> None:
    pair = Pair(FUSED[name])
    for turn in range(4):
        losses = []
        for optimizer, loss in pair.sides():

            def closure(optimizer: Any = optimizer, loss: Any = loss, turn: int = turn) -> Any:
                optimizer.zero_grad()
                value = loss(batch(turn))
                value.backward()
                return value

            given: Any = {"closure": closure} if by_name else {}
            losses.append(optimizer.step(**given) if by_name else optimizer.step(closure))
        torch.testing.assert_close(losses[0], losses[1])
    pair.check()
    assert fused() == 4 and densified() == 0
    assert is_rows(pair.a.grad)


def test_lbfgs_calls_its_closure_many_times() -> None:
    pair = Pair(lambda p: optim.LBFGS(p, lr=0.1, max_iter=3))
    for optimizer, loss in pair.sides():

        def closure(optimizer: Any = optimizer, loss: Any = loss) -> Any:
            optimizer.zero_grad()
            value = loss(IDS)
            value.backward()
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
    torch.testing.assert_close(pair.a, pair.b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adagrad-decay", "adagrad-tensor-lr"])
def test_schedulers(name: str) -> None:
    pair = Pair(FUSED[name])
    schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in pair.optimizers()]
    for _ in range(3):
        pair.train(1)
        for scheduler in schedulers:
            scheduler.step()
    pair.check()
    assert fused() == 3


def test_accumulation_over_backwards() -> None:
    pair = Pair(FUSED["adagrad"])
    for turn in range(6):
        for optimizer, loss in pair.sides():
            (loss(batch(turn)) / 3).backward()
            if turn % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    pair.check()
    assert fused() == 2 and densified() == 0


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_two_steps_on_one_gradient(name: str) -> None:
    pair = Pair(FUSED[name])
    for optimizer, loss in pair.sides():
        loss(IDS).backward()
        optimizer.step()
        optimizer.step()
    pair.check()
    assert fused() == 2


def test_a_gradient_set_to_zero_still_counts_as_a_step() -> None:
    pair = Pair(FUSED["adagrad-decay"])
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


def test_parameters_added_later() -> None:
    (a, b), (c, d) = twins(), twins(seed=3)
    mine, theirs = Adagrad([a], lr=0.1), Adagrad([b], lr=0.1)
    attach(mine)
    mine.add_param_group({"params": [c]})
    theirs.add_param_group({"params": [d]})
    for one, two, find, optimizer in ((a, c, ours, mine), (b, d, plain, theirs)):
        for _ in range(2):
            optimizer.zero_grad()
            (weigh(find(one)) + weigh(find(two))).backward()
            optimizer.step()
    same(a, b)
    same(c, d)
    assert fused() == 4
    assert mine.state[c].keys() == theirs.state[d].keys()


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adagrad-fused"])
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


@pytest.mark.parametrize("inf_at", [None, 2])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [SGD, Adagrad, optim.Adam])
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"fused": True}])
def test_grad_scaler(how: dict[str, bool], kind: Any, unscale: bool, inf_at: int | None) -> None:
    pair = Pair(lambda p: kind(p, lr=0.1, **({"eps": 0.01} if kind is not SGD else {}), **how))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for turn in range(4):
        for (optimizer, loss), scaler in zip(pair.sides(), scalers, strict=True):
            optimizer.zero_grad()
            value = loss(batch(turn))
            scaler.scale(value * float("inf") if turn == inf_at else value).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if turn != inf_at:
            same(pair.a.grad, pair.b.grad)
    pair.check()
    if kind is not optim.Adam:
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

    pair = Pair(lambda p: Named(p, "mine"))
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


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_tables_that_are_not_contiguous(name: str) -> None:
    storage = torch.randn(100, 10)
    for view in (lambda t: t[:, 2:8], lambda t: t[:60].T[:, :50]):
        a, b = Parameter(view(storage.clone())), Parameter(view(storage.clone()))
        mine, theirs = FUSED[name]([a]), FUSED[name]([b])
        for w, find, optimizer in ((a, ours, mine), (b, plain, theirs)):
            for _ in range(2):
                optimizer.zero_grad()
                weigh(find(w)).backward()
                optimizer.step()
        same(a, b)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("kind", [Adagrad, optim.Adam])
def test_a_compiled_step(kind: Any, attached: bool) -> None:
    torch._dynamo.reset()
    pair = Pair(lambda p: kind(p, lr=0.1), attached=attached)
    steps = torch.compile(lambda: pair.ours.step(), backend="aot_eager"), pair.plain.step
    for turn in range(3):
        for (optimizer, loss), step in zip(pair.sides(), steps, strict=True):
            optimizer.zero_grad()
            loss(batch(turn)).backward()
            step()
    torch.testing.assert_close(pair.a, pair.b, rtol=1e-4, atol=1e-5)
    if attached and kind is Adagrad:
        assert fused() == 3 and densified() == 0
