"""Every form of forward is captured whole, and the graph is the model at any batch size."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from forms import FORMS
from torch import Tensor, nn

from recast.rewriter.capture.capture_model import Captured, capture
from recast.rewriter.capture.constants import constants
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.compiled.trees import flatten
from recast.rewriter.ir import KEY, Note, note

ROWS = 12
HERE = ("forms_inside.py:", "forms_around.py:")


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    flatten(value, found, [])
    return found


def run(model: nn.Module, args: tuple[Any, ...], seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return tensors(model(*copy.deepcopy(args)))


def upstream(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(t.shape, generator=generator) for t in outputs]


def captured(name: str) -> tuple[nn.Module, Captured]:
    make, batch = FORMS[name]
    model = make()
    return model, capture(model, batch(ROWS))


@pytest.mark.parametrize("name", FORMS)
def test_whole_and_equal_at_other_sizes(name: str) -> None:
    model, it = captured(name)
    assert it.kind == "whole", (it.why, it.where, it.misses)
    plain, fast = copy.deepcopy(model), Compiled(it)
    for training in (False, True):
        plain.train(training)
        fast.train(training)
        for rows in (ROWS, 5, 31):
            args = FORMS[name][1](rows)
            for a, b in zip(run(plain, args), run(fast, args), strict=True):
                torch.testing.assert_close(b, a)
    for (key, a), (_, b) in zip(plain.named_buffers(), fast.named_buffers(), strict=True):
        torch.testing.assert_close(b, a, msg=key)


@pytest.mark.parametrize("name", FORMS)
def test_equal_gradients_in_train_mode(name: str) -> None:
    model, it = captured(name)
    plain, fast = copy.deepcopy(model).train(), Compiled(it).train()
    args = FORMS[name][1](9)
    for one in (plain, fast):
        outputs = [t for t in run(one, args) if t.requires_grad]
        assert outputs
        torch.autograd.backward(outputs, upstream(outputs))
    theirs = {id(p): n for n, p in _all_parameters(model)}
    for (key, a), (_, b) in zip(_all_parameters(plain), _all_parameters(model), strict=True):
        assert theirs[id(b)] == key
        if a.grad is None:
            assert b.grad is None or not b.grad.any()
        else:
            torch.testing.assert_close(b.grad, a.grad, msg=key)


def _all_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    listed = [(f"gates.{k}", p) for k, p in enumerate(getattr(model, "gates", []))]
    return [*model.named_parameters(), *listed]


@pytest.mark.parametrize("name", FORMS)
def test_names_order_and_objects_are_the_users(name: str) -> None:
    model, it = captured(name)
    before = list(model.state_dict())
    fast = Compiled(it)
    assert list(fast.state_dict()) == before == list(model.state_dict())
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]
    for (a, p), (b, q) in zip(model.named_parameters(), fast.named_parameters(), strict=True):
        assert a == b
        assert p is q


@pytest.mark.parametrize("name", FORMS)
def test_every_node_has_a_note_and_a_line(name: str) -> None:
    _, it = captured(name)
    for graph in it.graphs.values():
        for node in graph.nodes:
            assert set(node.meta) == {KEY}
            assert isinstance(note(node), Note)
            if node.op not in ("placeholder", "output"):
                assert (note(node).where or "").startswith(HERE), node


@pytest.mark.parametrize("name", FORMS)
def test_the_batch_size_is_nowhere_in_the_graph(name: str) -> None:
    _, it = captured(name)
    assert it.sizes is not None
    for graph in it.graphs.values():
        for node in graph.nodes:
            numbers = [v for v in torch.utils._pytree.tree_leaves((node.args, node.kwargs))]
            assert not any(type(v) is int and v in it.sizes for v in numbers), node


@pytest.mark.parametrize("name", FORMS)
def test_the_model_is_not_touched(name: str) -> None:
    make, batch = FORMS[name]
    model = make()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {p: dict(vars(m)) for p, m in model.named_modules()}
    random = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Compiled(capture(model, batch(ROWS))).eval()
    assert torch.equal(random, torch.get_rng_state())
    assert all(m.training for m in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for path, module in model.named_modules():
        assert vars(module).keys() == attributes[path].keys()
        assert all(vars(module)[k] is v for k, v in attributes[path].items())


def test_two_modes_only_where_python_forks() -> None:
    assert set(captured("ForksOnTraining")[1].graphs) == {"train", "eval"}
    assert set(captured("Dropouts")[1].graphs) == {"both"}
    graph = captured("Dropouts")[1].graphs["both"]
    assert [n.target for n in graph.nodes if n.op == "get_attr"].count("training") == 2


def test_in_place_addition_stays_in_place_only_where_it_is_seen() -> None:
    graph = captured("InPlace")[1].graphs["both"]
    names = [getattr(n.target, "__name__", n.target) for n in graph.nodes]
    assert names.count("add") == 5 and "iadd" not in names  # y += ...: no other tensor sees it
    assert "imul" in names  # z *= 2 is seen through a view
    assert "setitem" in names and "unsqueeze_" in names


def test_constants_are_folded_and_follow_to() -> None:
    _, it = captured("Bags")
    fast = Compiled(it).double()
    dense, offsets, indices = FORMS["Bags"][1](5)
    assert fast(dense.double(), offsets, indices).dtype is torch.float64
    assert [n for n in it.graphs["both"].nodes if n.target is torch.tensor] == []
    _, it = captured("PlainTensorAttribute")
    fast = Compiled(it).double()
    assert fast(*FORMS["PlainTensorAttribute"][1](4)).dtype is torch.float64


def test_stored_attributes_are_stored() -> None:
    model, it = captured("StoresResult")
    fast = Compiled(it)
    args = FORMS["StoresResult"][1](5)
    model(*args)
    fast(*args)
    torch.testing.assert_close(fast.last, model.last)


def test_example_batches_are_not_kept() -> None:
    """``len(x)`` compares both; anything the model kept of them would be pickled with it."""
    _, it = captured("LengthIsTheBatch")
    read = {str(n.target) for g in it.graphs.values() for n in g.nodes if n.op == "get_attr"}
    held = constants(it.root)
    assert {f"{held.ATTRIBUTE}.{name}" for name in vars(held)} <= read


def test_what_is_set_by_super_is_kept() -> None:
    _, it = captured("FunctionsOfBases")
    fast = Compiled(it)
    for rows in (ROWS, 5):
        fast(*FORMS["FunctionsOfBases"][1](rows))
        assert fast.rows == rows
