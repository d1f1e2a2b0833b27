"""What the rule engine guarantees, whatever a rule does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn

from recast.rewriter import order, pipeline, rule
from recast.rewriter.ir import KEY, Node, Note, is_call, note
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule


def captured(model: nn.Module) -> tuple[fx.Graph, pipeline.Context]:
    graph = fx.Tracer().trace(model)
    for node in graph.nodes:
        node.meta[KEY] = Note(origin=(str(node.target),), where=f"user.py:{len(node.name)}")
    return graph, pipeline.Context(model)


def value(model: nn.Module, graph: fx.Graph, *args: torch.Tensor) -> object:
    return fx.GraphModule(model, graph)(*args)


def _relu_of_neg(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, torch.relu):
        return None
    inner = node.args[0]
    if not is_call(inner, torch.neg):
        return Miss(node, "its input is not a negation", ("negate it",))
    return Match([inner, node], [node])


def _clamp(match: Match, build: Build) -> Sequence[Node]:
    inner = match.nodes[0]
    return [build.call(torch.neg, build.call(torch.clamp, inner.args[0], max=0))]


RULE = Rule("relu-of-neg", "relu(-x) => -min(x, 0)", _relu_of_neg, _clamp)


class Simple(nn.Module):
    def forward(self, x):
        return torch.relu(torch.neg(x)) + 1


def test_fires_and_keeps_the_value():
    model = Simple()
    graph, context = captured(model)
    assert rule.apply(graph, [RULE], context) == 1
    x = torch.randn(5, 3)
    torch.testing.assert_close(value(model, graph, x), model(x))
    (fired,) = context.journal.fired
    assert fired.rule == "relu-of-neg" and fired.where == "user.py:3"
    made = [n for n in graph.nodes if note(n).rule == "relu-of-neg"]
    assert len(made) == 2 and all(note(n).origin for n in made)


def test_a_value_that_escapes_is_a_miss():
    class Escapes(nn.Module):
        def forward(self, x):
            y = torch.neg(x)
            return torch.relu(y), y

    graph, context = captured(Escapes())
    assert rule.apply(graph, [RULE], context) == 0
    (missed,) = context.journal.missed
    assert missed.why == "its value is also used by output"


def test_a_miss_is_journaled_once_with_line_and_remedy():
    class Near(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    graph, context = captured(Near())
    rule.apply(graph, [RULE], context)
    rule.apply(graph, [RULE], context)
    (missed,) = context.journal.missed
    assert (missed.why, missed.tries) == ("its input is not a negation", ("negate it",))
    assert missed.where == "user.py:4"


def test_fuel_is_counted():
    class Twice(nn.Module):
        def forward(self, x):
            return torch.relu(torch.neg(torch.relu(torch.neg(x))))

    graph, context = captured(Twice())
    context.fuel.left = 1
    assert rule.apply(graph, [RULE], context) == 1
    assert context.fuel_left() == 0
    assert sum(is_call(n, torch.relu) for n in graph.nodes) == 1


@pytest.mark.parametrize("where", ["match", "rewrite"])
def test_a_rule_that_raises_is_skipped_and_leaves_the_graph(where):
    def bad(*args):
        if where == "rewrite":
            args[1].call(torch.neg, args[0].nodes[0].args[0])
        raise RuntimeError("boom")

    broken = Rule("broken", "", bad if where == "match" else _relu_of_neg,
                  bad if where == "rewrite" else _clamp)  # fmt: skip
    graph, context = captured(Simple())
    before = str(graph)
    assert rule.apply(graph, [broken], context) == 0
    assert str(graph) == before
    assert any("boom" in r.error for r in context.journal.raised)
    context.strict = True
    with pytest.raises(RuntimeError, match="boom"):
        rule.apply(graph, [broken], context)


@pytest.mark.parametrize(
    ("match", "rewrite", "said"),
    [
        (lambda node, root: True, _clamp, "rule odd: match answered True, which is none of None"),
        (lambda node, root: Match([], []), _clamp, "rule odd: the outputs of a Match"),
        (lambda node, root: Match([node], []), _clamp, "rule odd: the outputs of a Match"),
        (_relu_of_neg, lambda match, build: None, "rule odd: rewrite returned None, not a list"),
        (_relu_of_neg, lambda match, build: [1], r"rule odd: rewrite returned \[1\], not a list"),
        (
            _relu_of_neg,
            lambda match, build: [*_clamp(match, build)] * 2,
            "rule odd: rewrite returned 2 nodes for 1 outputs",
        ),
    ],
)
def test_a_rule_that_answers_what_no_rule_may_is_told_so_by_name(match, rewrite, said):
    odd = Rule("odd", "", match, rewrite)
    graph, context = captured(Simple())
    before = str(graph)
    assert rule.apply(graph, [odd], context) == 0
    assert str(graph) == before
    assert context.journal.raised
    context.strict = True
    with pytest.raises((TypeError, ValueError), match=said):
        rule.apply(graph, [odd], context)


def _pair(node: Node, root: nn.Module) -> Answer:
    """All sines at once, anchored on the last."""
    sines = [n for n in node.graph.nodes if is_call(n, torch.sin)]
    if len(sines) < 2 or node is not sines[-1]:
        return None
    return Match(sines, sines)


def _stacked(match: Match, build: Build) -> Sequence[Node]:
    both = build.call(torch.stack, [n.args[0] for n in match.nodes])
    done = build.call(torch.sin, both)
    return [build.item(done, k) for k in range(len(match.nodes))]


GROUP = Rule("group", "sin(a), sin(b) => sin([a, b])", _pair, _stacked)


def test_a_group_is_moved_above_its_first_user():
    class Late(nn.Module):
        def forward(self, x):
            a = torch.sin(x) * 2
            return a, torch.sin(x + 1)

    model = Late()
    graph, context = captured(model)
    assert rule.apply(graph, [GROUP], context) == 1
    graph.lint()
    x = torch.randn(4)
    torch.testing.assert_close(value(model, graph, x), model(x))


def test_a_group_whose_input_needs_its_output_is_a_miss():
    class Chained(nn.Module):
        def forward(self, x):
            return torch.sin(torch.sin(x) + 1)

    graph, context = captured(Chained())
    assert rule.apply(graph, [GROUP], context) == 0
    assert "computed from an output" in context.journal.missed[0].why


def test_nothing_moves_across_a_write_in_place():
    class Writes(nn.Module):
        def forward(self, x):
            a = torch.sin(x) * 2
            x.add_(1)
            return a, torch.sin(x)

    graph, context = captured(Writes())
    assert rule.apply(graph, [GROUP], context) == 0
    assert "in place" in context.journal.missed[0].why


def _drops(node: Node, root: nn.Module) -> Answer:
    drops = [n for n in node.graph.nodes if n.op == "call_module"]
    return Match(drops, drops) if node is drops[-1] and len(drops) == 2 else None


def test_random_numbers_keep_their_order():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout()

        def forward(self, x):
            a = self.drop(x)
            noise = torch.rand_like(x)
            return a + self.drop(x) + noise

    draws = Rule("drops", "", _drops, lambda m, b: [b.call(torch.neg, n.args[0]) for n in m.nodes])
    graph, context = captured(Draws())
    assert rule.apply(graph, [draws], context) == 0
    assert "random numbers" in context.journal.missed[0].why


def test_constants_are_shared_moved_and_absent_from_state_dict():
    model = Simple()
    held = rule.constants(model)
    first = held.add(torch.arange(3), "index")
    assert held.add(torch.arange(3), "index") == first
    assert held.add(torch.arange(4), "index") != first
    assert rule.resolve(model, first).tolist() == [0, 1, 2]
    held.apply(lambda t: t.to(torch.int32))
    assert rule.resolve(model, first).dtype == torch.int32
    assert not model.state_dict()


# ---------------------------------------------------------------- pipeline and verifier


class Lies:
    name = "lies"

    def run(self, graph, context):
        node = next(n for n in graph.nodes if is_call(n, torch.relu))
        node.target = torch.sigmoid
        return 0


def test_a_pass_that_lies_is_found():
    graph, context = captured(Simple())
    with pytest.raises(AssertionError, match="pass lies changed the graph but reports"):
        pipeline.run(graph, [Lies()], context)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(self.a(x)) + self.b(x) + self.drop(x)


def _break(change):
    class Breaks:
        name = "breaks"

        def run(self, graph, context):
            change(graph, {n.name: n for n in graph.nodes})
            return 1

    return Breaks()


def _swap(graph, n):
    n["a"].target, n["b"].target = "c", "b"


def _detach(graph, n):
    n["add"].args = (n["drop"], n["drop"])


def _unnote(graph, n):
    del n["a"].meta[KEY]


def _late(graph, n):
    n["add"].append(n["a"])


def _lose(graph, n):
    n["drop_1"].replace_all_uses_with(n["x"])
    graph.erase_node(n["drop_1"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_swap, "reads c, which the model does not have"),
        (_detach, "b.bias no longer reaches the output"),
        (_unnote, "a carries no note"),
        (_late, "before it is computed"),
        (_lose, "the random draw of drop second is gone"),
    ],
)
def test_the_verifier_says_what_broke(change, sentence):
    graph, context = captured(Two())
    for node in graph.nodes:
        if node.name == "drop_1":
            node.meta[KEY] = Note(origin=("drop", "second"))
    with pytest.raises(AssertionError, match="pass breaks broke an invariant") as error:
        pipeline.run(graph, [_break(change)], context)
    assert sentence in str(error.value)


def test_stable_sort_moves_only_what_must_move():
    class Many(nn.Module):
        def forward(self, x):
            a, b, c = x + 1, x + 2, x + 3
            return a * b * c

    graph, _ = captured(Many())
    names = [n.name for n in graph.nodes]
    order.stable_sort(graph)
    assert [n.name for n in graph.nodes] == names
    nodes = {n.name: n for n in graph.nodes}
    nodes["mul_1"].append(nodes["add_1"])
    order.stable_sort(graph)
    assert [n.name for n in graph.nodes] == ["x", "add", "add_2", "add_1", "mul", "mul_1", "output"]


def test_pipelines_as_text():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class One:
        name = "fuse-one"
        max_layers: int = 8

        def run(self, graph, context):
            return 0

    registry = {"fuse-one": One}
    default = (One(),)
    parse = pipeline.parse
    assert parse("default", registry, default) == default
    assert parse("default, fuse-one{max-layers=4}", registry, default)[1].max_layers == 4
    with pytest.raises(ValueError, match="there is no pass 'fuse-on'") as error:
        parse("fuse-on", registry, default)
    assert "try  fuse-one" in str(error.value)
    with pytest.raises(ValueError, match="has no option 'layers'"):
        parse("fuse-one{layers=3}", registry, default)
