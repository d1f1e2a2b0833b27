"""Dense parameters on a CPU: stepped by torch's fused kernels, in the numbers of its loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.runtime.rows import optimizer as row_optimizer

SHAPES = ((3, 5), (7,), (), (0, 4), (33, 2), (1, 1))
STEPS = 4

Make = Callable[..., torch.optim.Optimizer]
KERNELS = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")
CASES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1, "maximize": True, "initial_accumulator_value": 0.3}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.3, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
)
IDS = [f"{kind.__name__}-{'-'.join(options)}" for kind, options in CASES]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the fused kernels that ran."""
    names: list[str] = []

    def watch(name: str) -> None:
        kernel = getattr(torch, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(torch, name, run)

    for name in KERNELS:
        watch(name)
    yield names


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, grads: list[list[Tensor | None]]) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for of_step in grads:
        for parameter, grad in zip(held, of_step, strict=True):
            parameter.grad = None if grad is None else grad.to(parameter.dtype).clone()
        optimizer.step()


def twins(
    kind: Make, options: dict[str, Any], held: list[nn.Parameter]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, list[nn.Parameter], list[nn.Parameter]]:
    """Torch's loop in float64, and ours."""
    own = copy.deepcopy(held)
    wide = [nn.Parameter(p.detach().double()) for p in held]
    ours = kind(own, **options)
    row_optimizer.attach(ours)
    return kind(wide, **options), ours, wide, own


def agree(wide: list[nn.Parameter], own: list[nn.Parameter]) -> None:
    for expected, found in zip(wide, own, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_numbers_states_and_versions(
    kind: Make, options: dict[str, Any], launched: list[str]
) -> None:
    held = parameters()
    grads = [[torch.randn(p.shape, dtype=torch.float64) for p in held] for _ in range(STEPS)]
    judge, ours, wide, own = twins(kind, options, held)
    train(judge, grads)
    assert not launched
    before = [p._version for p in own]
    train(ours, grads)
    assert len(launched) == STEPS
    agree(wide, own)
    assert all(p._version > was for p, was in zip(own, before, strict=True))
    plain = kind(copy.deepcopy(held), **options)
    train(plain, grads)
    ours_state, its_state = ours.state_dict(), plain.state_dict()
    assert ours_state["param_groups"] == its_state["param_groups"]
    for key, state in its_state["state"].items():
        assert list(ours_state["state"][key]) == list(state)
        for name, value in state.items():
            found = ours_state["state"][key][name]
            if isinstance(value, Tensor):
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
                torch.testing.assert_close(found, value, rtol=2e-6, atol=2e-6)
            else:
                assert found == value


@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_a_checkpoint_of_one_goes_on_in_the_other(kind: Make, options: dict[str, Any]) -> None:
    held = parameters()
    grads = [[torch.randn(p.shape, dtype=torch.float64) for p in held] for _ in range(STEPS)]
    judge, ours, wide, own = twins(kind, options, held)
    train(judge, grads + grads)
    train(ours, grads)
    then = kind(own, **options)  # torch's loop
    then.load_state_dict(ours.state_dict())
    train(then, grads[:2])
    again = kind(own, **options)
    row_optimizer.attach(again)
    again.load_state_dict(then.state_dict())
    train(again, grads[2:])
    agree(wide, own)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_gradients_that_come_later(kind: Make, options: dict[str, Any]) -> None:
    held = parameters()
    grads: list[list[Tensor | None]] = [
        [torch.randn(p.shape, dtype=torch.float64) for p in held] for _ in range(STEPS)
    ]
    grads[0][0] = grads[0][1] = grads[1][1] = grads[2][4] = None
    judge, ours, wide, own = twins(kind, options, held)
    train(judge, grads)
    train(ours, grads)
    agree(wide, own)


@pytest.mark.parametrize("where", ["parameter", "gradient", "state"])
def test_what_is_not_contiguous_is_left_to_the_loop(where: str, launched: list[str]) -> None:
    held = [nn.Parameter(torch.randn(6, 4))]
    judge, ours, wide, own = twins(torch.optim.Adam, {"lr": 0.1}, held)
    grads = [torch.randn(6, 4, dtype=torch.float64) for _ in range(STEPS)]
    if where == "parameter":
        own[0].data = own[0].data.t().contiguous().t()
    for k, grad in enumerate(grads):
        wide[0].grad = grad
        own[0].grad = grad.float().t().contiguous().t() if where == "gradient" else grad.float()
        if where == "state" and k == 1:
            state = ours.state[own[0]]
            state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        judge.step()
        ours.step()
    assert len(launched) == (1 if where == "state" else 0)
    agree(wide, own)


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": False}, {"lr": torch.tensor(0.1)}],
    ids=["foreach-False", "foreach-True", "fused-False", "lr-tensor"],
)
def test_a_choice_of_the_user_stands(options: dict[str, Any], launched: list[str]) -> None:
    held = parameters(((2, 3),))
    optimizer = torch.optim.Adam(held, **options)
    row_optimizer.attach(optimizer)
    held[0].grad = torch.randn(2, 3)
    optimizer.step()
    assert not launched


def test_optimizers_of_others_are_left_alone(launched: list[str]) -> None:
    class Mine(torch.optim.Adam):
        pass

    held = parameters()
    for kind, attached in ((torch.optim.Adam, False), (Mine, True)):
        optimizer = kind(held)
        if attached:
            row_optimizer.attach(optimizer)
        train(optimizer, [[torch.randn(p.shape) for p in held]])
    assert not launched


def test_a_step_with_a_closure_is_fused_too(launched: list[str]) -> None:
    held = parameters()
    plain, ours = (torch.optim.Adam(copy.deepcopy(held)) for _ in range(2))
    row_optimizer.attach(ours)
    for _ in range(STEPS):
        grads = [torch.randn(p.shape) for p in held]
        for optimizer in (plain, ours):
            group = optimizer.param_groups[0]

            def closure(params: list[nn.Parameter] = group["params"], grads: Any = grads) -> float:
                for parameter, grad in zip(params, grads, strict=True):
                    parameter.grad = grad.clone()
                return 0.5

            assert optimizer.step(closure) == 0.5
    assert launched == ["_fused_adam_"] * STEPS
    wanted, found = plain.state_dict(), ours.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(found["state"], wanted["state"])


def test_copies_and_later_groups_are_fused_too(launched: list[str]) -> None:
    held, more = parameters(), parameters(((4, 4),))
    optimizer = torch.optim.Adam(held)
    row_optimizer.attach(optimizer)
    optimizer.add_param_group({"params": more})
    train(optimizer, [[torch.randn(p.shape) for p in held + more]])
    assert launched == ["_fused_adam_"] * 2
    other = copy.deepcopy(optimizer)
    train(other, [[torch.randn(p.shape) for p in held + more]])
    assert launched == ["_fused_adam_"] * 4
    train(pickle.loads(pickle.dumps(other)), [[torch.randn(p.shape) for p in held + more]])
    assert launched == ["_fused_adam_"] * 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_the_loop(dtype: torch.dtype, launched: list[str]) -> None:
    own = [nn.Parameter(torch.randn(4, 4, dtype=dtype))]
    optimizer = torch.optim.Adam(own)
    row_optimizer.attach(optimizer)
    train(optimizer, [[torch.randn(4, 4)]])
    assert not launched


def test_a_parameter_listed_twice_is_stepped_twice(launched: list[str]) -> None:
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        plain, ours = torch.optim.Adam([one, one]), torch.optim.Adam([other, other])
    row_optimizer.attach(ours)
    grads: list[list[Tensor | None]] = [[torch.randn(3)] * 2 for _ in range(STEPS)]
    train(plain, grads)
    train(ours, grads)
    assert torch.equal(one, other)
    assert not launched
