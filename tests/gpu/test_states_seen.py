"""Before a replay, only the identity and the addresses of a model's and an optimizer's objects are
checked: every change of what a recording assumes is noticed all the same.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.runtime import device
from recast.runtime.recorded.gradients.grad_buffers import GradBuffers
from recast.runtime.recorded.gradients.weights_node import WeightsNode, _Leaves
from recast.runtime.recorded.state import settings as global_settings
from recast.runtime.recorded.state.model import ModelState, state_of
from recast.runtime.recorded.state.optimizer import OptimizerState
from recast.runtime.rows.optimizer import attach


@pytest.fixture(autouse=True, params=["extension", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "extension":
        if not hasattr(device.extension(), "same_items"):
            pytest.skip(device.why_missing() or "an extension of before")
        yield
    else:
        with device.use("torch"):
            yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layers[0].weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def parameters_of(modules: list[nn.Module]) -> list[Tensor]:
    return [p for m in modules for p in m._parameters.values() if p is not None]


def put(name: str, value: Any) -> Callable[[Net], None]:
    """Set an attribute, or one of an attribute."""

    def change(net: Net) -> None:
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner) if owner in ("layers", "layers.0") else
                (getattr(net.layers[1], owner) if owner else net), last, value)  # fmt: skip

    return change


def weight(change: Callable[[Tensor], Tensor]) -> Callable[[Net], None]:
    def done(net: Net) -> None:
        net.layers[0].weight.data = change(net.layers[0].weight.data)

    return done


def other_slots(name: str) -> Callable[[Net], None]:
    """Another dict, with another content later."""

    def change(net: Net) -> None:
        held = getattr(net.layers[0], name)
        vars(net.layers[0])[name] = OrderedDict(held)
        getattr(net.layers[0], name)["new"] = (
            nn.ReLU() if name == "_modules" else nn.Parameter(torch.zeros(1))
        )

    return change


CHANGES: dict[str, Callable[[Net], Any]] = {
    "memory": weight(torch.clone),
    "shape": weight(lambda w: w.view(2, 8)),
    "strides": weight(lambda w: w.t()),
    "one row less": weight(lambda w: w[:3]),
    "a gradient wanted": lambda net: net.frozen.requires_grad_(True),
    "no gradient wanted": lambda net: net.layers[0].weight.requires_grad_(False),
    "another parameter": lambda net: setattr(net.tied, "bias", nn.Parameter(torch.zeros(4))),
    "no parameter": lambda net: setattr(net.tied, "bias", None),
    "one more parameter": lambda net: setattr(net.layers[2], "w", nn.Parameter(torch.zeros(1))),
    "a module of its own": lambda net: setattr(net, "tied", copy.deepcopy(net.tied)),
    "a module in a leaf": lambda net: setattr(net.layers[2], "inner", nn.ReLU()),
    "a module less": lambda net: delattr(net, "tied"),
    "a module in another place": lambda net: net.layers.insert(0, net.layers.pop(2)),
    "one in eval": lambda net: net.layers[2].eval(),
    "a buffer": lambda net: setattr(net.layers[1], "running_mean", torch.ones(4)),
    "a buffer's memory": lambda net: setattr(net.layers[1].running_var, "data", torch.ones(4)),
    "parameters": other_slots("_parameters"),
    "buffers": other_slots("_buffers"),
    "modules": other_slots("_modules"),
}
SETTINGS: dict[str, Callable[[Net], Any]] = {
    "deterministic": lambda net: torch.use_deterministic_algorithms(True),
    "products": lambda net: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda net: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "sums in bf16": lambda net: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "sums in fp16": lambda net: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "recurrent layers": lambda net: setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "no cudnn": lambda net: setattr(torch.backends.cudnn, "enabled", False),
    "timed kernels": lambda net: setattr(torch.backends.cudnn, "benchmark", True),
    "deterministic kernels": lambda net: setattr(torch.backends.cudnn, "deterministic", True),
    "no flash attention": lambda net: torch.backends.cuda.enable_flash_sdp(False),
    "no lean attention": lambda net: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "no plain attention": lambda net: torch.backends.cuda.enable_math_sdp(False),
    "no attention of cudnn": lambda net: torch.backends.cuda.enable_cudnn_sdp(False),
    "sums of attention": lambda net: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "what new tensors are of": lambda net: torch.set_default_dtype(torch.float64),
    "autocast": lambda net: torch.set_autocast_enabled("cpu", True),
    "what autocast is to": lambda net: torch.set_autocast_dtype("cpu", torch.float16),
}


CHANGES |= SETTINGS


@pytest.fixture
def settings() -> Iterator[None]:
    """As they were, afterwards."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    kept = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (products, "fp32_precision"), (cudnn.conv, "fp32_precision"),
            (cudnn.rnn, "fp32_precision"), (cudnn, "enabled"), (cudnn, "benchmark"),
            (cudnn, "deterministic"), (products, "allow_bf16_reduced_precision_reduction"),
            (products, "allow_fp16_reduced_precision_reduction"),
        )
    ]  # fmt: skip
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    plain = torch.get_default_dtype()
    yield
    torch.set_default_dtype(plain)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    for owner, name, value in kept:
        setattr(owner, name, value)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)


@pytest.mark.parametrize("name", CHANGES)
def test_of_a_model(name: str, settings: None) -> None:
    net = Net()
    modules = list(net.modules())
    state = ModelState("cpu")
    before = state.of(modules)
    assert before == state_of(modules, parameters_of(modules), "cpu") and state.wants
    with torch.no_grad():
        net.layers[0].weight.zero_()
    assert state.of(modules) is before, "it was asked for all anew"
    CHANGES[name](net)
    now = state.of(modules)
    assert now != before
    assert now == state_of(modules, parameters_of(modules), "cpu")
    assert state.of(modules) is now


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_by_the_names_that_torch_documents(
    name: str, settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a torch that has no shorter way to them."""
    monkeypatch.setattr(global_settings, "_kernels", global_settings._by_name)
    before = global_settings.settings_of("cpu")
    SETTINGS[name](Net())
    assert global_settings.settings_of("cpu") != before


def test_no_parameter_wants_a_gradient() -> None:
    net = Net()
    modules, state = list(net.modules()), ModelState("cpu")
    state.of(modules)
    net.requires_grad_(False)
    state.of(modules)
    assert not state.wants


def test_under_settings_in_turn() -> None:
    modules, state = list(Net().modules()), ModelState("cpu")
    plain = state.of(modules)
    with torch.autocast("cpu"):
        cast = state.of(modules)
        assert cast != plain and state.of(modules) is cast
    assert state.of(modules) is plain
    with torch.inference_mode():
        assert state.of(modules) is plain


# ---------------------------------------------------------------- optimizers


def stepped(kind: Any, **options: Any) -> tuple[list[Tensor], Any]:
    weights: list[Tensor] = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    optimizer = kind(weights, lr=0.1, **options)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    return weights, optimizer


def state(optimizer: Any, k: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = optimizer.state[optimizer.param_groups[0]["params"][k]]
    return found


def moved(held: dict[str, Any], name: str) -> None:
    held[name].data = held[name].data.clone()


OF_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "memory": lambda o: weight_data(o, torch.clone),
    "shape": lambda o: weight_data(o, lambda w: w.view(2, 8)),
    "strides": lambda o: weight_data(o, lambda w: w.t()),
    "a parameter": lambda o: o.param_groups[0]["params"].__setitem__(
        1, nn.Parameter(torch.ones(4, 4))
    ),
    "one more parameter": lambda o: o.param_groups[0]["params"].append(
        nn.Parameter(torch.ones(4, 4))
    ),
    "a group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]}),
    "another dict of a group": lambda o: o.param_groups.__setitem__(0, dict(o.param_groups[0])),
    "a number": lambda o: o.param_groups[0].update(eps=1e-3),
    "one more number": lambda o: o.param_groups[0].update(own=1),
    "a number of another name": lambda o: renamed(o.param_groups[0]),
    "a rate on the device": lambda o: o.param_groups[0].update(
        lr=torch.tensor(0.1, device="meta")
    ),
    "all of the state": lambda o: o.load_state_dict(o.state_dict()),
    "one state": lambda o: o.state.__setitem__(
        o.param_groups[0]["params"][1], dict(state(o))
    ),
    "a tensor of the state": lambda o: state(o).update(sum=state(o)["sum"].clone()),
    "its memory": lambda o: moved(state(o), "sum"),
    "a count": lambda o: state(o).update(step=state(o)["step"].clone()),
    "a state less": lambda o: o.state.pop(o.param_groups[0]["params"][1]),
    "one more entry": lambda o: state(o).update(own=torch.ones(1)),
    "semantics": lambda o: attach(o, lazy=True),
    "deterministic": lambda o: torch.use_deterministic_algorithms(True),
}  # fmt: skip


def renamed(group: dict[str, Any]) -> None:
    """In its place."""
    held = [("own" if name == "eps" else name, value) for name, value in group.items()]
    group.clear()
    group.update(held)


def weight_data(optimizer: Any, change: Callable[[Tensor], Tensor]) -> None:
    w = optimizer.param_groups[0]["params"][1]
    w.data = change(w.data)


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_of_an_optimizer(name: str, settings: None) -> None:
    weights, optimizer = stepped(torch.optim.Adagrad)
    held = OptimizerState(optimizer)
    assert held.is_of(optimizer)
    with torch.no_grad():
        weights[0].add_(1)
        state(optimizer)["sum"].add_(1)
        state(optimizer)["step"].add_(1)
    optimizer.param_groups[0]["lr"] = 0.3  # brought to the device at each replay
    assert held.is_of(optimizer)
    optimizer.param_groups[0]["eps"] = float("1e-10")  # equal, and another object
    for _ in range(2):
        assert held.is_of(optimizer)
    OF_OPTIMIZERS[name](optimizer)
    assert not held.is_of(optimizer)
    assert OptimizerState(optimizer).is_of(optimizer)


def test_a_number_on_the_host_that_is_written_to() -> None:
    _, optimizer = stepped(torch.optim.Adam, capturable=False)
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.5)
    held = OptimizerState(optimizer)
    assert held.is_of(optimizer)
    optimizer.param_groups[0]["weight_decay"].fill_(0.25)
    assert not held.is_of(optimizer)


def test_counts_that_are_numbers_of_python() -> None:
    _, optimizer = stepped(torch.optim.Adagrad)
    state(optimizer)["step"] = 3
    held = OptimizerState(optimizer)
    state(optimizer)["step"] += 1
    assert held.is_of(optimizer), "steps that are counted"
    state(optimizer)["step"] = torch.tensor(4.0)
    assert not held.is_of(optimizer)


def test_state_in_a_mapping_that_is_no_dict() -> None:
    _, optimizer = stepped(torch.optim.Adagrad)
    optimizer.state = UserDict(optimizer.state)
    held = OptimizerState(optimizer)
    assert held.is_of(optimizer)
    state(optimizer)["sum"] = state(optimizer)["sum"].clone()
    assert not held.is_of(optimizer)
    held = OptimizerState(optimizer)
    optimizer.state.popitem()
    assert not held.is_of(optimizer)


# ---------------------------------------------------------------- where a backward ends


def graded(w: Tensor) -> object:
    w.grad = torch.ones_like(w)
    return None


ON_WEIGHTS: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda w: None,
    "a gradient": graded,
    "a hook": lambda w: w.register_hook(lambda g: g),
    "a hook for after": lambda w: w.register_post_accumulate_grad_hook(lambda p: None),
    "its node": lambda w: w.expand_as(w).grad_fn.next_functions[0][0],  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_which_weights_are_given_gradients(name: str) -> None:
    weights: list[Tensor] = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    node = WeightsNode(weights)
    kept = ON_WEIGHTS[name](weights[1])
    found: list[Any] = []
    joint = node.output()
    joint.register_hook(lambda g: found.append(node.settable()))
    joint.backward()
    assert found == [[True, name == "nothing", True]]
    assert (found[0] is node.all) == (name == "nothing")
    del kept
    found.clear()
    torch.autograd.grad(node.output(), weights, allow_unused=True)
    assert found == [None], "a pass that does not end at the leaves"


def told(node: WeightsNode) -> Any:
    """What ``node`` says in a pass to all leaves."""
    found: list[Any] = []
    joint = node.output() * 1
    joint.register_hook(lambda g: found.append(node.settable()))
    joint.backward()
    return found[0]


def references(w: Tensor) -> int:
    """To the node in which its gradients end."""
    product = w.expand_as(w)
    assert product.grad_fn is not None
    return sys.getrefcount(product.grad_fn.next_functions[0][0])


def test_recordings_of_the_same_weights_are_in_nobodys_way() -> None:
    weights: list[Tensor] = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    every = [WeightsNode(weights), WeightsNode(weights), WeightsNode(weights[1:])]
    before = references(weights[1])
    for node in (*every, *every):
        assert told(node) is node.all
    held = weights[1].expand_as(weights[1]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert [told(node) for node in every] == [[True, False, True]] * 2 + [[False, True]]
    del held
    assert all(told(node) is node.all for node in every)
    weights[2].grad = torch.ones(3)
    assert [told(node) for node in every] == [[True, True, False]] * 2 + [[True, False]]
    weights[2].grad = None
    every.pop()
    assert all(told(node) is node.all for node in every)
    assert references(weights[1]) > before
    for node in every:
        node.prepare_for_eager()
    assert references(weights[1]) == before, "passes without a replay count them too"
    assert all(told(node) is node.all for node in every)


def test_weights_of_other_threads_while_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's first backward, of another model, adds its leaves to those that are kept."""
    weights: list[Tensor] = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    every = [WeightsNode(weights), WeightsNode(weights[1:])]
    assert all(told(node) is node.all for node in every)
    others: list[WeightsNode] = []
    nodes = _Leaves.nodes

    def meanwhile(self: _Leaves) -> Any:
        if not others:
            others.append(WeightsNode([nn.Parameter(torch.ones(2))]))
            with torch.enable_grad():
                assert told(others[0]) is others[0].all
        return nodes(self)

    monkeypatch.setattr(_Leaves, "nodes", meanwhile)
    assert told(every[0]) is every[0].all and others


def another_memory(home: Tensor) -> object:
    home.data = home.data.clone()
    return None


ON_HOMES: dict[str, Callable[[Tensor], object]] = {
    "held": lambda home: home,
    "an alias": lambda home: home.detach(),
    "its storage": lambda home: home.untyped_storage(),
    "an attribute": lambda home: setattr(home, "own", 1),
    "a gradient wanted": lambda home: home.requires_grad_(),
    "other memory": another_memory,
    "strides": lambda home: home.t_().dim(),
    "shape": lambda home: home.resize_(2, 2).dim(),
}


@pytest.mark.parametrize("name", ON_HOMES)
def test_which_memory_is_given_out_again(name: str) -> None:
    buffers = GradBuffers({k: torch.ones(2, 3) for k in (0, 4, 7)})
    assert buffers.unused() == [True] * 3 and buffers.in_place()
    kept = ON_HOMES[name](buffers.tensors[1])
    assert buffers.unused() == [True, False, True]
    assert buffers.in_place() == (name not in ("other memory", "strides", "shape"))
    gone = name in ("held", "an alias", "its storage")
    del kept
    assert buffers.unused() == [True, gone, True]
