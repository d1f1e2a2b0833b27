"""The diff says yes to the same function and no, with the right words, to anything else."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, DLRM, MLP, build, field_ids
from torch import Tensor, nn

import recast
from recast.errors import DiffError, UsageError
from recast.rewriter.diff import double, model_runs
from recast.rewriter.diff.equivalence import DiffReport, diff
from recast.rewriter.diff.side_by_side import off
from recast.runtime import tolerances
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.rows import settings


def compare(plain: nn.Module, fast: nn.Module, example: Any, **options: Any) -> DiffReport:
    return diff(plain, fast, example, limits=tolerances, **options)


def twins(name: str = "dlrm") -> tuple[nn.Module, nn.Module, list]:
    model, batches, _ = build(name)
    return model, copy.deepcopy(model), batches


# ---------------------------------------------------------------- yes


@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_equal(name: str) -> None:
    plain, fast, batches = twins(name)
    report = compare(plain, fast, batches).check()
    assert report.judge == "float64"
    assert {r.group for r in report.rows} >= {"outputs", "gradients", "after k steps"}


class Halves(nn.Module):
    """The same Linear, summed in two halves: other rounding, same numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        k = x.shape[1] // 2
        return x[:, k:] @ self.weight[:, k:].T + (x[:, :k] @ self.weight[:, :k].T + self.bias)


@pytest.mark.parametrize("name", ["dlrm_dropout_norm", "deepfm", "mmoe", "packed"])
def test_another_order_of_sums_is_equal(name: str) -> None:
    """The bias before a BatchNorm has a true gradient of zero: noise in both models."""
    plain, fast, batches = twins(name)
    changed = 0
    for path, m in list(fast.named_modules()):
        if isinstance(m, nn.Linear) and m.bias is not None:
            fast.set_submodule(path, Halves(m))
            changed += 1
    assert changed
    report = compare(plain, fast, batches).check()
    assert max(r.max_abs for r in report.rows) > 0


def test_sparse_and_dense_gradients_are_the_same_numbers() -> None:
    plain, batches = DLRM(sparse=False), CASES["dlrm"].batch(8, 0)
    fast = DLRM(sparse=True)
    fast.load_state_dict(plain.state_dict())
    compare(plain, fast, batches).check()


def test_a_missing_gradient_equals_zero() -> None:
    plain, fast, batches = twins("two_tower")
    original = fast.forward

    def forward(x: dict[str, Tensor]) -> Tensor:
        return original(x) + 0 * fast.unused.weight.sum()

    fast.forward = forward  # type: ignore[method-assign]
    compare(plain, fast, batches, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).check()


def test_nothing_is_disturbed() -> None:
    plain, fast, batches = twins("dlrm_dropout_norm")
    fast.train(False)
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    kept = [p.grad for p in plain.parameters()]
    state = copy.deepcopy(plain.state_dict())
    random = torch.get_rng_state()
    compare(plain, fast, batches)
    for model in (plain, fast):
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(plain.parameters(), kept, strict=True))
    assert all(p.grad is None for p in fast.parameters())
    assert plain.training and not any(m.training for m in fast.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_shared_parameters_are_fine() -> None:
    plain, _, batches = twins("dlrm")
    fast = copy.copy(plain)
    compare(plain, fast, batches).check()


class Casts(nn.Module):
    """Casts to float32 inside: the judge must run all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = torch.ones(3)  # a plain attribute

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        extra = torch.zeros(x.shape[0], 3, dtype=torch.float32)
        return self.linear(mask * x.to(torch.float32)) * self.scale + extra


def test_the_judge_runs_where_the_model_casts() -> None:
    model = Casts()
    report = compare(model, copy.deepcopy(model), torch.randn(5, 4)).check()
    assert report.judge == "float64"


def test_the_default_dtype_that_two_threads_change_is_restored() -> None:
    inside, left = threading.Event(), threading.Event()
    seen: list[torch.dtype] = []

    def second() -> None:
        with double.in_double():
            inside.set()
            assert left.wait(60)
            seen.append(torch.get_default_dtype())

    thread = threading.Thread(target=second)
    with double.in_double():
        thread.start()
        assert inside.wait(60)
    left.set()
    thread.join()
    assert seen == [torch.float64] and torch.get_default_dtype() == torch.float32


def test_random_numbers_that_a_judge_can_repeat() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + torch.randn(x.shape[0], 4)) * torch.rand(3)

    model = Noisy()
    report = compare(model, copy.deepcopy(model), torch.randn(20, 4)).check()
    assert report.judge == "float64" and not report.notes


def test_random_numbers_that_a_judge_cannot_repeat() -> None:
    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.normal(x[:, :3], 1.0)

    model = Normal()
    report = compare(model, copy.deepcopy(model), torch.randn(20, 4)).check()
    assert any("no float64 judge" in n for n in report.notes)


def test_fresh_optimizers_step_as_the_one_that_they_are_like() -> None:
    """By the same kernels, in the numbers of the plain one."""
    model = nn.Linear(3, 2)
    like = torch.optim.Adam(model.parameters())
    row_optimizer.attach(like, lazy=True)
    fresh = model_runs.maker(like, model)(model)(model.parameters())
    assert settings.of(fresh).fused and not row_optimizer.is_lazy(fresh)
    assert fresh.defaults == like.defaults


def test_an_optimizer_and_a_loss() -> None:
    model, batches, loss = build("deepfm")
    fast = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    report = compare(model, fast, batches, optimizer=adam, loss=loss, steps=2).check()
    assert any(r.tensor == "bias [exp_avg]" for r in report.rows)
    assert "after 2 steps: " in str(report)


def test_low_precision_is_compared_in_low_precision() -> None:
    model, batches, _ = build("pnn")
    compare(model, copy.deepcopy(model), batches, dtype=torch.bfloat16).check()
    assert next(model.parameters()).dtype == torch.float32


# ---------------------------------------------------------------- no


def nudge(path: str, by: float) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(path).add_(by)

    return apply


def double_gradient(path: str) -> Callable[[nn.Module], None]:
    return lambda model: model.get_parameter(path).register_hook(lambda g: g * 2) and None


def output_hook(path: str, fn: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_hook(lambda m, i, o: fn(o))

    return apply


MISTAKES = {
    "a weight off by 1e-3": (nudge("emb_l.1.weight", 1e-3), "outputs", "emb_l.1"),
    "a bias off by 1e-4": (nudge("bot_l.2.bias", 1e-4), "outputs", "bot_l.2"),
    "a gradient twice as large": (double_gradient("top_l.0.weight"), "gradients", "top_l.0"),
    "a detached branch": (output_hook("bot_l.2", torch.detach), "gradients", "bot_l.2"),
    "a value off": (output_hook("bot_l.0", lambda o: o * 1.001), "outputs", "bot_l.0"),
    "a NaN": (output_hook("emb_l.2", lambda o: o.log()), "outputs", "emb_l.2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_placed(mistake: str) -> None:
    plain, fast, batches = twins("dlrm")
    apply, group, node = MISTAKES[mistake]
    apply(fast)
    report = compare(plain, fast, batches)
    bad = [r for r in report.rows if not r.ok]
    assert bad and bad[0].group == group
    assert report.first is not None and report.first.node == node
    with pytest.raises(DiffError, match=f"first to part is {node}"):
        report.check()
    with pytest.raises(AssertionError, match="to repeat: "):
        report.check()


def test_a_mistake_in_what_is_imaginary() -> None:
    plain = torch.complex(torch.ones(3), torch.tensor([1.0, 0.0, 2.0]))
    assert off(plain.clone(), plain, 1e-6) is None
    assert off(plain + torch.tensor([0, 0.5j, 0]), plain, 1e-6) == "off by 0.5 at [1]"


def test_a_mistake_in_train_mode_only() -> None:
    plain, fast, batches = twins("dlrm_dropout_norm")
    fast.get_submodule("top_l.3").p = 0.4  # type: ignore[assignment]
    report = compare(plain, fast, batches)
    bad = [r for r in report.rows if not r.ok]
    assert bad[0].tensor == "train output" and report.first is not None
    assert report.first.node == "top_l.3" and report.first.mode == "train mode"


def test_a_buffer_that_is_not_updated() -> None:
    plain, fast, batches = twins("deepfm")
    fast.get_submodule("mlp.mlp.1").momentum = 0.11  # type: ignore[assignment]
    report = compare(plain, fast, batches)
    bad = [r for r in report.rows if not r.ok]
    assert {r.group for r in bad} == {"buffers"}
    assert {r.tensor for r in bad} == {"mlp.mlp.1.running_mean", "mlp.mlp.1.running_var"}
    assert report.first is not None and report.first.node == "mlp.mlp.1"
    with pytest.raises(DiffError, match=r"leaves another value in mlp\.mlp\.1\.running_mean"):
        report.check()


def test_a_stale_copy_of_a_parameter() -> None:
    plain, fast, batches = twins("pnn")
    held = fast.get_parameter("mlp.mlp.0.weight").detach().clone()

    def use_stale(m: nn.Module, args: tuple[Tensor]) -> None:
        m.weight.data = held.clone()  # type: ignore[union-attr]

    fast.get_submodule("mlp.mlp.0").register_forward_pre_hook(use_stale)
    report = compare(plain, fast, batches)
    bad = [r for r in report.rows if not r.ok]
    assert {r.group for r in bad} == {"after k steps"}
    assert "eval mode without gradients, new parameters" in {r.when for r in bad}
    assert report.first is not None and "mlp.mlp.0" in report.first.node


def test_lost_duplicates_are_a_gradient_mistake() -> None:
    class Lossy(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            rows = super().forward(ids)
            later = (ids.unsqueeze(1) == ids.unsqueeze(0)).tril(-1).any(1)
            return torch.where(later.unsqueeze(1), rows.detach(), rows)

    plain, fast, batches = twins("pnn")
    lossy = Lossy(11, 4)
    lossy.load_state_dict(fast.get_submodule("embs.0").state_dict())
    fast.set_submodule("embs.0", lossy)
    report = compare(plain, fast, batches)
    bad = [r for r in report.rows if not r.ok]
    assert bad[0].group == "gradients" and bad[0].tensor == "embs.0.weight"
    assert report.first is not None and report.first.node == "embs.0"


def test_what_the_second_raises_is_a_row() -> None:
    plain, fast, batches = twins("dlrm")

    def fail(m: nn.Module, i: Any, o: Any) -> None:
        raise RuntimeError("no such luck")

    fast.get_submodule("bot_l").register_forward_hook(fail)
    report = compare(plain, fast, batches)
    assert "raises RuntimeError: no such luck" in str(report)


def test_shape_dtype_and_structure_are_compared() -> None:
    class Shaped(nn.Module):
        def __init__(self, how: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.mlp, self.how = MLP([3, 4, 2]), how

        def forward(self, x: Tensor) -> Any:
            return self.how(self.mlp(x))

    plain = Shaped(lambda y: {"a": y, "n": 3})
    wrong: dict[str, Callable[[Tensor], Any]] = {
        "shape (5, 1) instead of (5, 2)": lambda y: {"a": y[:, :1], "n": 3},
        "dtype float64 instead of float32": lambda y: {"a": y.double(), "n": 3},
        "outputs ": lambda y: {"b": y, "n": 3},
        "4 instead of 3": lambda y: {"a": y, "n": 4},
    }
    for sentence, how in wrong.items():
        fast = Shaped(how)
        fast.load_state_dict(plain.state_dict())
        assert sentence in str(compare(plain, fast, torch.randn(5, 3)))


def test_another_model_is_a_bad_question() -> None:
    with pytest.raises(UsageError, match="the second model has no"):
        compare(build("pnn")[0], build("deepfm")[0], field_ids(4, 0))


# ---------------------------------------------------------------- the report


def test_the_report_reads_and_travels() -> None:
    plain, fast, batches = twins("dlrm")
    nudge("emb_l.1.weight", 1e-2)(fast)
    report = compare(plain, fast, batches, seed=5, command="recast diff x.py:m --seed 5")
    text = str(report)
    assert "tensor" in text and "max abs" in text and "limit" in text
    assert text.splitlines()[-1] == "to repeat: recast diff x.py:m --seed 5"
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is False and data["seed"] == 5 and data["first"]["node"] == "emb_l.1"
    assert len(data["rows"]) == len(report.rows)
    good = compare(plain, copy.deepcopy(plain), batches)
    assert "equal within limits" in str(good) and good.to_dict()["ok"] is True


def test_the_same_seed_gives_the_same_report() -> None:
    plain, fast, batches = twins("deepfm")
    nudge("linear.embedding.weight", 1e-2)(fast)
    assert str(compare(plain, fast, batches)) == str(compare(plain, fast, batches))


def test_a_batch_a_tensor_a_dict_or_several() -> None:
    model, _, _ = build("dcn")
    features = CASES["dcn"].batch(5, 0)[0]
    for example in (features, (features,), [features, features], [(features,), (features,)]):
        compare(model, copy.deepcopy(model), example, steps=1).check()


class Propagated(nn.Module):
    """Users and items of a graph, whose adjacency is a sparse buffer (as of LightGCN)."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(6, 4), nn.Embedding(9, 4)
        edges = (torch.rand(15, 15, generator=torch.Generator().manual_seed(0)) < 0.3).float()
        self.register_buffer("graph", edges.to_sparse())

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([self.user.weight, self.item.weight])
        users, items = torch.split(rows + torch.sparse.mm(self.graph, rows), [6, 9])
        out: Tensor = (users[user] * items[item]).sum(1) + self.user(user).pow(2).sum()
        return out


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer() -> None:
    plain = Propagated()
    batch = (torch.randint(6, (5,)), torch.randint(9, (5,)))
    twin = copy.deepcopy(plain)
    compare(plain, twin, batch).check()
    twin.graph = twin.graph * 1.01
    assert not compare(plain, twin, batch).ok


class NoNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids).sum(1) * float("nan")
        return out


def test_gradients_that_are_no_numbers_are_the_same_each_time() -> None:
    model, ids = NoNumbers(), torch.randint(10, (8, 3))
    report = recast.diff(model, recast.optimize(model, example=ids), ids)
    assert report.ok
    assert any("are 0 or NaN" in note for note in report.notes)
