"""Dense optimizer steps in one launch, on the emulator: against torch.optim, with float64 as the
judge, and bit for bit against what torch's foreach steps compute on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_gpu import Emulated
from seen_ops import SeenOps
from torch import Tensor, nn

from recast.runtime import device
from recast.runtime.recorded import recording
from recast.runtime.recorded.optimizer import dense_cuda, dense_step
from recast.runtime.recorded.optimizer.dense_cuda import CHUNK, Target
from recast.runtime.recorded.optimizer.dense_step import DenseStep
from recast.runtime.recorded.recording import Unrecordable
from recast.runtime.tolerances import excess

SGD, ADAGRAD, ADAM, ADAMW = (
    torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
)  # fmt: skip
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd decay maximize": lambda p: SGD(p, lr=0.1, weight_decay=0.02, maximize=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.8, nesterov=True, maximize=True),
    "adagrad": lambda p: ADAGRAD(p, lr=0.05),
    "adagrad decays": lambda p: ADAGRAD(p, lr=0.05, lr_decay=0.1, weight_decay=0.1, maximize=True),
    "adam": lambda p: ADAM(p, lr=0.01),
    "adam decay": lambda p: ADAM(p, lr=0.01, betas=(0.3, 0.9), weight_decay=0.1, maximize=True),
    "adamw": lambda p: ADAMW(p, lr=0.01, weight_decay=0.1, eps=1e-3),
    "amsgrad": lambda p: ADAM(p, lr=0.01, amsgrad=True),
}
SIZES = [(1,), (7,), (33, 5), (CHUNK,), (2, CHUNK + 3), (0, 4), (3, 4, 5)]


@pytest.fixture
def gpu() -> Iterator[Emulated]:
    with emulated_gpu.serve() as emulated:
        yield emulated


def rand(shape: Any, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters() -> list[nn.Parameter]:
    """Parameters of odd sizes; one with another memory layout, one not aligned to 16 bytes."""
    found = [nn.Parameter(rand(shape, k)) for k, shape in enumerate(SIZES)]
    found.append(nn.Parameter(rand((6, 50), 8).t()))
    found.append(nn.Parameter(rand((301,), 9)[1:]))
    return found


def twins(make: Make, params: list[nn.Parameter]) -> tuple[Any, Any, Any]:
    """Optimizers of equal parameters: ours, torch's, torch's in float64; the first step is done."""
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    wide = [nn.Parameter(p.detach().double()) for p in params]
    made = [make(each) for each in (params, theirs, wide)]
    for each in made:
        gradients(each, 0)
        each.step()
    return made[0], made[1], made[2]


def gradients(optimizer: torch.optim.Optimizer, at: int) -> None:
    """Set random gradients, those of step ``at``."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for k, p in enumerate(every):
        p.grad = torch.empty_like(p.detach())
        p.grad.copy_(rand(p.shape, 100 * at + k))


def stepped(optimizer: torch.optim.Optimizer) -> DenseStep:
    dense = DenseStep(optimizer, optimizer.param_groups[0]["params"][0].device)
    dense.run(optimizer.param_groups)
    return dense


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and states."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p.detach() for p in every]
    for p in every:
        found += [v for _, v in sorted(optimizer.state[p].items()) if isinstance(v, Tensor)]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_of_torch(gpu: Emulated, name: str) -> None:
    ours, theirs, wide = twins(OPTIMIZERS[name], parameters())
    for k in range(1, 5):
        for each in (ours, theirs, wide):
            gradients(each, k)
            for group in each.param_groups:
                group["lr"] *= 0.7
        stepped(ours)
        theirs.step()
        wide.step()
    assert gpu.launched == ["dense_update"] * 4
    for a, b, c in zip(tensors(ours), tensors(theirs), tensors(wide), strict=True):
        if a.numel() == 1 and a.dim() == 0:
            assert float(a) == float(b) == 5  # steps
        else:
            assert excess(a, b, c) <= 1


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [ADAM, ADAMW])
def test_steps_counted_on_the_device(gpu: Emulated, kind: Any, amsgrad: bool) -> None:
    """``capturable=True``, which torch itself refuses to do on a CPU."""

    def make(p: Any) -> torch.optim.Optimizer:
        return kind(p, lr=0.01, weight_decay=0.1, amsgrad=amsgrad)

    ours, theirs, wide = twins(make, parameters())
    ours.param_groups[0]["capturable"] = True
    for k in range(1, 5):
        for each in (ours, theirs, wide):
            gradients(each, k)
        stepped(ours)
        theirs.step()
        wide.step()
    for a, b, c in zip(tensors(ours), tensors(theirs), tensors(wide), strict=True):
        assert float(a) == float(b) == 5 if a.dim() == 0 else excess(a, b, c) <= 1


# ---------------------------------------------------------------- to the bit


def f32(x: Tensor) -> Tensor:
    """Rounded to float32, in float64."""
    return x.float().double()


def fma(a: Any, b: Any, c: Any) -> Tensor:
    """With one rounding: a product of two float32 is exact in float64."""
    return f32(torch.as_tensor(a) * b + c)


def on_a_gpu(name: str, group: Any, p: Tensor, g: Tensor, state: dict[str, Tensor]) -> None:
    """torch's foreach step as its kernels do it: alpha and addcmul are fused multiply-adds, each
    other operation is rounded (ATen/native/cuda: ForeachFunctors.cuh, DeviceAddCmulCdiv.cuh).

    All tensors are float64 that hold float32; numbers are rounded as torch passes them.
    """
    number = {k: f32(torch.tensor(v, dtype=torch.float64)) for k, v in name_numbers(group).items()}
    g = -g if group["maximize"] else g
    decoupled = group.get("decoupled_weight_decay", False)
    if group["weight_decay"] and not decoupled:
        g = fma(number["weight_decay"], p, g)
    if name == "sgd":
        if group["momentum"]:
            b = state["momentum_buffer"]
            b.copy_(fma(number["1 - dampening"], g, f32(b * number["momentum"])))
            g = fma(number["momentum"], b, g) if group["nesterov"] else b
        p.copy_(fma(-number["lr"], g, p))
        return
    if name == "adagrad":
        state["sum"].copy_(fma(g, g, state["sum"]))
        root = f32(f32(state["sum"].sqrt()) + number["eps"])
        p.copy_(f32(p + f32(f32(g * -number["lr"]) / root)))
        return
    m, v, t = state["exp_avg"], state["exp_avg_sq"], float(state["step"]) + 1
    if group["weight_decay"] and decoupled:
        p.copy_(f32(p * number["1 - lr decay"]))
    m.copy_(fma(number["1 - beta1"], f32(g - m), m))
    v.copy_(fma(number["1 - beta2"], f32(g * g), f32(v * number["beta2"])))
    lr, (beta1, beta2) = group["lr"], group["betas"]
    root = f32(torch.tensor((1 - beta2**t) ** 0.5, dtype=torch.float64))
    size = f32(torch.tensor(-(lr / (1 - beta1**t)), dtype=torch.float64))
    p.copy_(fma(size, f32(m / f32(f32(f32(v.sqrt()) / root) + number["eps"])), p))


def name_numbers(group: Any) -> dict[str, float]:
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    return {
        "lr": group["lr"], "eps": group.get("eps", 0.0), "weight_decay": group["weight_decay"],
        "momentum": group.get("momentum", 0.0), "1 - dampening": 1 - group.get("dampening", 0.0),
        "1 - beta1": 1 - beta1, "beta2": beta2, "1 - beta2": 1 - beta2,
        "1 - lr decay": 1 - group["lr"] * group["weight_decay"],
    }  # fmt: skip


EXACT: dict[str, tuple[str, Make]] = {
    "sgd": ("sgd", OPTIMIZERS["sgd decay maximize"]),
    "momentum": ("sgd", OPTIMIZERS["momentum"]),
    "nesterov": ("sgd", OPTIMIZERS["nesterov"]),
    "adagrad": ("adagrad", lambda p: ADAGRAD(p, lr=0.05, weight_decay=0.1)),
    "adam": ("adam", OPTIMIZERS["adam"]),
    "adamw": ("adam", OPTIMIZERS["adamw"]),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_bits_of_torch_on_a_gpu(gpu: Emulated, name: str) -> None:
    rule, make = EXACT[name]
    ours = twins(make, [nn.Parameter(rand((2500,), 1))])[0]
    ((p,),) = [group["params"] for group in ours.param_groups]
    gradients(ours, 1)
    wanted = p.detach().double()
    state = {k: v.double() for k, v in ours.state[p].items() if isinstance(v, Tensor)}
    on_a_gpu(rule, ours.param_groups[0], wanted, p.grad.double(), state)
    stepped(ours)
    assert torch.equal(p.detach().double(), wanted)
    for key, value in ours.state[p].items():
        if isinstance(value, Tensor) and key != "step":
            assert torch.equal(value.double(), state[key])


# ---------------------------------------------------------------- many tensors, groups, schedules


@pytest.mark.parametrize("name", [*OPTIMIZERS, "adam capturable"])
def test_the_device_decides_whether_to_step(gpu: Emulated, name: str) -> None:
    """Where loss scaling found an infinite gradient: nothing changes, no step is counted there."""
    capturable = name.endswith("capturable")
    ours = twins(OPTIMIZERS[name.removesuffix(" capturable")], parameters())[0]
    ours.param_groups[0]["capturable"] = capturable
    gradients(ours, 1)
    before = copy.deepcopy(tensors(ours))
    host = {id(s["step"]) for s in ours.state.values() if "step" in s and not capturable}
    for found in (1.0, 0.0):
        ours.found_inf = torch.tensor([found])  # type: ignore[attr-defined]
        dense = stepped(ours)
        params = ours.param_groups[0]["params"]
        assert dense.leaves_out(ours.param_groups) == set(params)
        changed = [
            not torch.equal(a, b)
            for a, b in zip(tensors(ours), before, strict=True)
            if id(a) not in host and a.numel()
        ]
        assert all(changed) if not found else not any(changed)


def test_steps_are_counted_without_asking_the_device(gpu: Emulated) -> None:
    """A foreach sum with one number on the device reads it, unless alpha is given too."""
    ours = twins(OPTIMIZERS["adam"], parameters())[0]
    ours.param_groups[0]["capturable"] = True
    gradients(ours, 1)
    ours.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    with SeenOps() as seen:
        stepped(ours)
    assert "aten._foreach_add_.Tensor" in seen.names
    assert "aten._local_scalar_dense.default" not in seen.names


def test_a_launch_for_each_group(gpu: Emulated) -> None:
    def make(p: Any) -> torch.optim.Optimizer:
        return ADAGRAD([{"params": p[::2], "lr": 0.1}, {"params": p[1::2], "weight_decay": 0.1}])

    many = [nn.Parameter(rand((k % 5, 3), k)) for k in range(150)]
    ours, theirs, wide = twins(make, many)
    for each in (ours, theirs, wide):
        gradients(each, 1)
    stepped(ours)
    theirs.step()
    wide.step()
    assert gpu.launched == ["dense_update"] * 2
    for a, b, c in zip(tensors(ours), tensors(theirs), tensors(wide), strict=True):
        assert excess(a, b, c) <= 1


def test_what_torch_has_to_do_it_does(gpu: Emulated) -> None:
    """Other dtypes, strides that differ, and gradients of none: in one group with the others."""
    plain = [nn.Parameter(rand((5, 6), k)) for k in range(3)]
    plain[1].data = plain[1].data.double()
    twin = copy.deepcopy(plain)
    ours, theirs = SGD(plain, lr=0.1, momentum=0.9), SGD(twin, lr=0.1, momentum=0.9)
    for k in range(3):
        for params in (plain, twin):
            params[0].grad, params[1].grad = rand((5, 6), 10 + k), rand((5, 6), 20 + k).double()
            params[2].grad = rand((6, 5), 30 + k).t()
        if k:
            stepped(ours)
        else:
            ours.step()
        theirs.step()
    assert gpu.launched == ["dense_update"] * 2
    for a, b in zip(plain, twin, strict=True):
        torch.testing.assert_close(a, b)
    plain[0].grad = plain[1].grad = plain[2].grad = None
    stepped(ours)
    assert len(gpu.launched) == 2


def test_held_to_torch_s_operations(gpu: Emulated) -> None:
    ours, theirs, _ = twins(OPTIMIZERS["adagrad"], parameters())
    gradients(ours, 1)
    gradients(theirs, 1)
    with device.use("torch"):
        stepped(ours)
    theirs.step()
    assert gpu.launched == []
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        torch.testing.assert_close(a, b)


def test_nan_and_infinity_go_where_torch_s_go(gpu: Emulated) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1e-45])
    for name, make in OPTIMIZERS.items():
        ours, theirs, _ = twins(make, [nn.Parameter(torch.ones(len(values)))])
        for grad in (values, torch.ones_like(values)):
            for each in (ours, theirs):
                each.param_groups[0]["params"][0].grad = grad.clone()
            stepped(ours)
            theirs.step()
        for a, b in zip(tensors(ours), tensors(theirs), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, msg=name)


def test_the_order_of_blocks_changes_nothing() -> None:
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            ours = twins(OPTIMIZERS["adam"], parameters())[0]
            gradients(ours, 1)
            stepped(ours)
            runs.append(tensors(ours))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_nothing_beside_a_parameter_is_written(gpu: Emulated) -> None:
    room = torch.full((700,), 7.0)
    p = nn.Parameter(room[3:604])
    optimizer = SGD([p], lr=0.1)
    p.grad = torch.ones(601)
    stepped(optimizer)
    assert torch.equal(room[:3], torch.full((3,), 7.0)) and bool((room[604:] == 7.0).all())
    torch.testing.assert_close(room[3:604], torch.full((601,), 6.9))


def test_a_recording_keeps_what_it_reads(gpu: Emulated) -> None:
    p, g, rate = nn.Parameter(rand((9,), 0)), rand((9,), 1), torch.tensor(0.1)
    kept: list[object] = []
    with recording.recording() as made:
        made.keep = lambda *objects: kept.extend(objects)  # type: ignore[method-assign]
        dense_cuda.step(gpu, dense_cuda.sgd(SGD([p], lr=0.1).param_groups[0]),
                        [Target(p, g, [])], rate)  # fmt: skip
    assert any(each is rate for each in kept)


def test_kernels_are_loaded_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that run as always are torch's: no other use would come before a capture."""
    asked: list[Any] = []
    monkeypatch.setattr(dense_cuda, "warm", lambda *given: asked.append(given))
    for make in OPTIMIZERS.values():
        DenseStep(make([nn.Parameter(torch.ones(2))]), torch.device("cpu"))
    DenseStep(SGD([nn.Parameter(torch.ones(2).double())], lr=0.1), torch.device("cpu"))
    assert [rule.code for rule, _ in asked] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]
    monkeypatch.undo()
    with emulated_gpu.serve(loads=True) as emulated:
        dense_cuda.warm(asked[2][0], torch.device("cpu"))
        with device.use("torch"):
            dense_cuda.warm(asked[4][0], torch.device("cpu"))
    [kernel] = emulated.loaded or {}
    assert dict(kernel.program.defines)["RECAST_RULE"] == "1"


def test_different_numbers_of_steps_are_refused(gpu: Emulated) -> None:
    """The host counts them, and one rate is read by all."""
    params = [nn.Parameter(rand((4,), k)) for k in range(2)]
    optimizer = ADAM(params, lr=0.1)
    for k in range(3):
        params[0].grad = rand((4,), k)
        params[1].grad = rand((4,), k) if k else None
        optimizer.step()
    with pytest.raises(Unrecordable, match="different numbers of steps"):
        stepped(optimizer)
    optimizer.state[params[1]]["step"] += 1
    stepped(optimizer)
    assert gpu.launched == ["dense_update"]


@pytest.mark.parametrize("what", ["sparse", "no momentum", "tensor beta"])
def test_what_cannot_be_recorded_is_said(gpu: Emulated, what: str) -> None:
    p = nn.Parameter(rand((4, 3), 0))
    p.grad = rand((4, 3), 1)
    optimizer: torch.optim.Optimizer = SGD([p], lr=0.1, momentum=0.9)
    if what == "sparse":
        optimizer = SGD([p], lr=0.1)
        p.grad = p.grad.to_sparse()
    elif what == "tensor beta":
        optimizer = ADAM([p], lr=0.1, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
    why = {"sparse": "sparse", "no momentum": "no momentum yet", "tensor beta": "capturable"}[what]
    with pytest.raises(Unrecordable, match=why):
        stepped(optimizer)
    assert gpu.launched == []


def test_why_not_names_what_torch_cannot_repeat() -> None:
    p = [nn.Parameter(rand((4,), 0))]
    assert "capturable=True" in str(dense_step.why_not(ADAM(p)))
    assert dense_step.why_not(ADAGRAD(p)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("name", [*OPTIMIZERS, "adam capturable", "adamw capturable"])
def test_on_a_gpu(name: str) -> None:
    """The bits of torch's foreach steps; of bias corrections on the device, their numbers.

    Before its header of fused multiply-adds torch left those of the Adagrads to the compiler.
    """
    capturable = name.endswith("capturable")
    header = Path(torch.__file__).parent / "include/ATen/native/cuda/DeviceAddCmulCdiv.cuh"
    to_the_bit = isinstance(OPTIMIZERS[name.split(" capt")[0]]([torch.ones(1)]), SGD) or (
        header.exists() and not capturable
    )
    make = OPTIMIZERS[name.removesuffix(" capturable")]
    params = [nn.Parameter(p.detach().cuda()) for p in parameters()]
    params.append(nn.Parameter(rand((301,), 9).cuda()[1:]))  # at no multiple of 16 bytes
    twin, wide = (
        [nn.Parameter(p.detach().to(dtype, copy=True)) for p in params]
        for dtype in (torch.float32, torch.float64)
    )
    every = [make(each) for each in (params, twin, wide)]
    for each in every if capturable else ():
        each.param_groups[0]["capturable"] = True
    for k in range(4):
        for each in every:
            gradients(each, k)
        stepped(every[0]) if k else every[0].step()
        every[1].step()
        every[2].step()
    for a, b, c in zip(*map(tensors, every), strict=True):
        assert torch.equal(a, b) if to_the_bit else excess(a, b, c) <= 1
