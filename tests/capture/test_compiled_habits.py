"""A Compiled is used as the user's model is used: arguments, modes, attributes, hooks, errors."""

from __future__ import annotations

import copy
import time
import timeit
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiledkit import Plain, batch, pair, same, twins
from forms import FORMS
from torch import Tensor, nn

import recast
from recast.errors import IdError, RecastWarning
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.compiled.module import Compiled


def test_arguments_as_the_users() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    dense, ids = batch(7)
    same(plain, fast)
    same(plain, lambda *a: fast(dense, ids=ids))
    same(plain, lambda *a: fast(ids=ids, dense=dense))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bais'"):
        fast(dense, ids, bais=1.0)
    with pytest.raises(TypeError, match="missing a required argument: 'ids'"):
        fast(dense)
    with pytest.warns(RecastWarning, match="other constants"):
        same(plain, fast, bias=0.5)


def test_train_and_eval_follow_every_flag() -> None:
    plain, fast = twins()
    for mode in (True, False, True):
        same(plain.train(mode), fast.train(mode))
        assert fast.training is mode
    for model in (plain, fast):
        model.train()
        model.top[1].eval()
    same(plain, fast)
    for model in (plain, fast):
        model.top[3].p = 0.0
        model.top[1].eps = 0.1
    same(plain, fast)
    assert fast.top[1].num_batches_tracked == plain.top[1].num_batches_tracked > 0


def test_flags_are_its_own_and_tensors_are_shared() -> None:
    plain, fast = pair()
    fast.eval()
    assert plain.training and plain.top[3].training
    with torch.no_grad():
        plain.top[0].weight.mul_(2)
    same(plain.eval(), fast)
    fast.load_state_dict(
        {k: v * 1.5 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    )
    same(plain, fast)


def test_mixed_flags_that_no_graph_covers_run_plain() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = FORMS["ForksOnTraining"][0](), FORMS["ForksOnTraining"][0]()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    model = Two()
    args = FORMS["ForksOnTraining"][1](6)
    plain, fast = copy.deepcopy(model), Compiled(capture(model, args))
    for one in (plain, fast):
        one.a.eval()
    with pytest.warns(RecastWarning, match="some modules are in train mode and some in eval"):
        same(plain, fast, args)
    assert set(fast.graphs) == {"train", "eval"}


def test_users_attributes_and_methods_are_there() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    assert fast.kind == "ranker"
    assert fast.temperature == 1.0
    torch.testing.assert_close(fast.predict(*batch(5)), plain.predict(*batch(5)))
    with pytest.raises(AttributeError, match="nothing"):
        _ = fast.nothing


def test_a_changed_attribute_is_not_silent() -> None:
    plain, fast = pair()
    plain.eval(), fast.eval()
    plain.temperature = fast.temperature = 2.0
    with pytest.warns(RecastWarning, match=r"temperature was 1\.0 and is now 2\.0"):
        same(plain, fast)
    fast.temperature = plain.temperature = 1.0
    same(plain, fast)


def test_a_replaced_module_is_not_silent() -> None:
    plain, fast = twins()
    plain.eval(), fast.eval()
    new = nn.Linear(8, 1)
    plain.top[4] = new
    fast.top[4] = new
    with pytest.warns(RecastWarning, match=r"the module 'top\.4' was replaced"):
        same(plain, fast)
    plain.top[0].weight = fast.top[0].weight = nn.Parameter(torch.randn_like(plain.top[0].weight))
    same(plain, fast)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "global"])
def test_a_hook_added_later_runs(kind: str) -> None:
    _, fast = pair()
    graph = fast.graph
    for node in list(graph.nodes):  # as a pass does: the module is no longer called
        if node.target == "top.0":
            with graph.inserting_before(node):
                weight = graph.get_attr("top.0.weight")
                bias = graph.get_attr("top.0.bias")
                new = graph.call_function(nn.functional.linear, (node.args[0], weight, bias))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    fast._runner.build()
    fast.eval()
    wanted = fast(*batch(5))
    seen: list[str] = []
    note = lambda *a: seen.append(kind)  # noqa: E731
    add = {
        "forward": fast.top[0].register_forward_hook,
        "pre": fast.top[0].register_forward_pre_hook,
        "backward": fast.top[0].register_full_backward_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind]
    handle = add(note)
    whose = "all modules" if kind == "global" else "the module 'top.0'"
    with pytest.warns(RecastWarning, match=f"a hook was added to {whose}"):
        got = fast(*batch(5))
    got.sum().backward()
    assert seen
    torch.testing.assert_close(got, wanted)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(*batch(5))


def test_asking_costs_microseconds() -> None:
    fast = Compiled(capture(Plain(tables=4), batch(16)))
    seconds = min(timeit.repeat(fast._runner.why_stale, number=200, repeat=5)) / 200
    assert seconds < 50e-6


def test_hooks_and_parametrizations_there_before_are_kept() -> None:
    torch.manual_seed(0)
    model = Plain()
    seen: list[int] = []
    model.top[0].register_forward_hook(lambda *a: seen.append(1))
    nn.utils.parametrizations.weight_norm(model.top[4])
    it = capture(model, batch(16))
    plain, fast = copy.deepcopy(model), Compiled(it)
    why = {m.node: m.why for m in it.misses}
    assert "forward hooks" in why["top.0"]
    assert "parametrized" in why["top.4"]
    assert it.kind == "whole"
    seen.clear()
    same(plain.eval(), fast.eval())
    assert len(seen) == 2
    assert list(fast.state_dict()) == list(plain.state_dict())


def test_a_hooked_container_runs_its_hook_and_its_inside_is_captured() -> None:
    torch.manual_seed(0)
    model = Plain()
    model.top.register_forward_hook(lambda m, args, out: out * 2)
    it = capture(model, batch(16))
    assert it.kind == "partial"
    assert list(it.parts) == ["top"]
    assert it.parts["top"].kind == "whole"
    assert {n.target for n in it.parts["top"].graphs["both"].nodes if n.op == "call_module"} == {
        "0", "1", "2", "3", "4",
    }  # fmt: skip
    plain, fast = copy.deepcopy(model), Compiled(it)
    for mode in (True, False):
        same(plain.train(mode), fast.train(mode))
    assert isinstance(fast.top, nn.Sequential)
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in plain.named_modules()]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Softened(nn.PReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: Doubled(8, 1), []),  # read like a module of the user's
        (Softened, [("top.4", "a subclass of PReLU that overrides forward")]),
    ],
)
def test_a_subclass_that_overrides_forward(
    layer: Callable[[], nn.Module], why: list[tuple[str, str]]
) -> None:
    torch.manual_seed(0)
    model = Plain()
    model.top[4] = layer()
    it = capture(model, batch(16))
    assert [(m.node, m.why) for m in it.misses] == why
    same(copy.deepcopy(model).eval(), Compiled(it).eval())


class Labelled(nn.Module):
    """Gives its loss if there are labels, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = nn.EmbeddingBag(9, 4), nn.Linear(4, 1)
        self.calls = 0

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        y = self.out(self.emb(ids)).squeeze(1)
        if labels is None:
            return y
        return nn.functional.binary_cross_entropy_with_logits(y, labels)


def test_two_results_of_one_model_train_and_serve_the_same_parameters() -> None:
    """Each keeps its own count of calls, and warns once for each cause."""
    plain, ids, labels = Labelled(), torch.randint(9, (6, 3)), torch.ones(6)
    opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    trained, opt = recast.optimize(plain, opt, example=(ids, labels))
    serving = recast.optimize(plain, example=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = serving(ids)
        for _ in range(2):
            trained(ids, labels).backward()
            opt.step()
        after = serving(ids)
    assert (after - before).abs().min() > 0.01
    torch.testing.assert_close(after, plain(ids))
    assert (plain.calls, trained.calls, serving.calls) == (1, 2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            serving(ids, labels), trained(ids)
    assert [w.category for w in caught] == [RecastWarning] * 2
    assert serving.report.running() == []


def test_errors_name_the_module_and_the_line() -> None:
    _, fast = pair()
    dense, ids = batch(4)
    with pytest.raises(IndexError) as caught:
        fast(dense, ids + 100)
    assert any("emb.0" in n and "compiledkit.py:" in n for n in caught.value.__notes__)

    def bad(*_: Any, **__: Any) -> None:
        raise IdError("id 100 is outside its table")

    fast.top[0].forward = bad
    with pytest.raises(IdError) as ours:
        fast(dense, ids)
    assert ours.value.where is not None
    assert "top.0" in ours.value.where and "compiledkit.py:" in ours.value.where


def test_capture_takes_less_than_a_second() -> None:
    model = Plain(tables=26)
    args = torch.randn(64, 3), torch.randint(0, 10, (64, 26))
    started = time.process_time()
    it = capture(model, args)
    assert it.kind == "whole"
    assert time.process_time() - started < 1.0


def test_an_operation_that_knows_tables_by_number_names_them() -> None:
    _, fast = pair()
    graph = fast.graph
    node = next(n for n in graph.nodes if n.target == "emb.2")
    with graph.inserting_before(node):
        weights = [graph.get_attr(f"emb.{k}.weight") for k in range(4)]
        new = graph.call_function(broken, (weights, node.args[0]))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    fast._runner.build()
    with pytest.raises(IdError) as caught:
        fast(*batch(4))
    text = str(caught.value).splitlines()
    assert text[0] == "id 9 of lookup 0 (table emb.2.weight) is outside its 3 rows"
    assert text[1].startswith("  at   compiledkit.py:")
    assert text[1].endswith("(emb.2.weight)")


def broken(weights: list[Tensor], ids: Tensor) -> Tensor:
    raise IdError("id 9 of lookup 0 (table 2) is outside its 3 rows")


def test_modules_may_be_named_as_attributes_of_the_result() -> None:
    """The attributes of the result hide them, but it runs, prints and finds them all the same."""
    names = ("parts", "graph", "graphs", "code", "report", "plan", "spread", "prove", "refuse")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            for name in names:
                x = getattr(self, name)(x).cos()
            return x

    net, x = Net(), torch.rand(5, 4)
    fast = recast.optimize(net, example=x)
    assert all(f"Linear[{name}]" in str(fast) for name in names)
    for name in names:
        assert fast.get_parameter(f"{name}.weight") is getattr(net, name).weight
    recast.diff(net, fast, x, steps=2).check()


def test_a_part_that_is_a_bag_can_be_printed() -> None:
    """torch's own ``EmbeddingBag.extra_repr`` shows all attributes, also the forward in it."""

    class Clocked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.bag(ids) * (2 if time.time() > 0 else 1)
            return out

    fast = recast.optimize(Clocked(), example=torch.randint(9, (5, 2)))
    assert fast.report.captured == "partial"
    assert "(bag): EmbeddingBag(9, 4" in repr(fast)
    assert "EmbeddingBag(9, 4" in repr(fast.bag)
    assert "EmbeddingBag)(9, 4" in repr(fast.parts["bag"])
