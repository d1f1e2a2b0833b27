"""The text of a graph: its grammar, its stability, and that it says everything once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import grammar
import graphs
import pytest
import torch
from torch import fx, nn

import recast
from recast.rewriter.ir import Note, Spec, annotate
from recast.rewriter.report import dump
from recast.rewriter.report.short_lists import braces


def test_dlrm_before_and_after(golden: Callable[[str, str], None]) -> None:
    """Twenty-six tables read in a few lines, before and after."""
    for name, (graph, root) in {"before": graphs.before(), "after": graphs.after()}.items():
        text = dump.text(graph, root)
        grammar.check(text)
        golden(f"dump/dlrm-{name}.txt", text)
    assert len(text.splitlines()) <= 10


def test_unfolded_has_a_line_for_every_node() -> None:
    graph, root = graphs.before()
    text = dump.text(graph, root, fold=False)
    grammar.check(text)
    for node in graph.nodes:
        if node.op not in ("get_attr", "output", "placeholder"):
            assert f"  {node.name} " in text


def test_the_text_does_not_depend_on_the_run() -> None:
    """No addresses, no order of sets: two separate traces print alike."""
    first, second = (dump.text(*graphs.after()) for _ in range(2))
    assert first == second
    assert "0x" not in first


def test_an_unrelated_edit_moves_no_other_line() -> None:
    graph, root = graphs.before(3)
    old = dump.text(graph, root).splitlines()
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    with graph.inserting_before(last):
        graph.call_function(torch.neg, (last.args[0],), name="a_rather_long_name_for_a_node")
    new = dump.text(graph, root).splitlines()
    assert [line for line in new if line not in old] == [
        "  a_rather_long_name_for_a_node = neg(top_1)"
    ]
    assert [line for line in old if line not in new] == []


class Everything(nn.Module):
    """One of each form of argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table = nn.Embedding(5, 4)

    def forward(self, x, ids, options):  # type: ignore[no-untyped-def]
        a = torch.add(x, self.scale, alpha=2.5)
        b = a[..., None, 1:3]
        c = a[:, ::2]
        d = torch.einsum("bi,bj->bij", a, a)
        e = torch.zeros(1, dtype=torch.float64, device="cpu")
        f = nn.functional.embedding(ids, self.table.weight)
        g = options['say "hi"']
        h = torch.clamp(x, min=float("-inf"), max=1e-12)
        i = torch.stack([x, x, x, x], -1)
        j = x.to(torch.bfloat16).sum(dim=(0, 1), keepdim=True)
        return {"a": a, "rest": (b, c, d, e, [f, g]), "h": h, "i": i, "j": j, "n": None}


def test_every_form_of_argument(golden: Callable[[str, str], None]) -> None:
    root = Everything()
    text = dump.text(fx.symbolic_trace(root).graph, root)
    grammar.check(text)
    golden("dump/arguments.txt", text)


@pytest.mark.parametrize(
    "line",
    [
        "  x = ",
        "  x = cat([a, b",
        "  x = cat(a b)",
        "x = cat(a)",
        "  x = cat(a) : f32",
        "  x = cat(a)) : f32[B]",
        "  x = @",
    ],
)
def test_the_recogniser_refuses(line: str) -> None:
    """The test of the grammar can fail."""
    with pytest.raises(grammar.GrammarError):
        grammar.check(f"graph m(a: f32[B])\n{line}\n  return x\n")


@pytest.mark.parametrize(
    ("words", "short"),
    [
        (["a", "b"], ["a", "b"]),
        (["ids_0", "ids_1", "ids_2"], ["ids_{0..2}"]),
        (["ids_0", "ids_1"], ["ids_0", "ids_1"]),
        (["x", "ids_0", "ids_2", "ids_4", "y"], ["x", "ids_{0..4..2}", "y"]),
        (["t_3", "t_1", "t_7"], ["t_{3,1,7}"]),
        (["bot.0.weight", "bot.0.bias"], ["bot.0.{weight,bias}"]),
        (
            [
                "bot.0.weight",
                "bot.0.bias",
                "bot.2.weight",
                "bot.2.bias",
                "bot.4.weight",
                "bot.4.bias",
            ],
            ["bot.{0..4..2}.{weight,bias}"],
        ),
        (["bags[0]", "bags[1]", "bags[2]"], ["bags[0..2]"]),
        (["e.1.t.1.w", "e.2.t.2.w", "e.3.t.3.w"], ["e.1.t.1.w", "e.2.t.2.w", "e.3.t.3.w"]),
        (["d.C0.w", "d.C1.w", "d.C2.w", "d.t.w"], ["d.C{0..2}.w", "d.t.w"]),
        (["d.C0", "d.C1", "d.C2", "d.t"], ["d.C{0..2}", "d.t"]),
        (["a_0", "b_1", "c_2"], ["a_0", "b_1", "c_2"]),
        (['"s0"', '"s1"', '"s2"'], ['"s0"', '"s1"', '"s2"']),
    ],
)
def test_braces(words: list[str], short: list[str]) -> None:
    assert braces(words) == short


def test_a_chain_is_no_family() -> None:
    """Layers that feed each other stay on their own lines, however alike they look."""
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    text = dump.text(fx.symbolic_trace(root).graph, root)
    assert text.count("Linear[") == 4


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (None, "?"),
        (Spec(torch.float32, ()), "f32[]"),
        (Spec(torch.complex64, ("2*B", 3)), "complex64[2*B,3]"),
        ((Spec(torch.bool, ("B",)),) * 2, "2×bool[B]"),
        ((Spec(torch.int32, ("B",)), None), "(i32[B], ?)"),
        ((Spec(torch.int32, ("B",)), (Spec(torch.float16, (1,)),)), "(i32[B], (f16[1]))"),
    ],
)
def test_types(spec: object, text: str) -> None:
    assert dump.type_text(spec) == text


def test_json_has_every_node_and_edge() -> None:
    graph, root = graphs.after(3)
    found = json.loads(dump.json(graph, root))
    assert {"version", "name", "inputs", "outputs", "nodes"} == set(found)
    nodes = {n["id"]: n for n in found["nodes"]}
    assert set(nodes) == {n.name for n in graph.nodes if n.op != "output"}
    for node in graph.nodes:
        if node.op != "output":
            assert nodes[node.name]["inputs"] == [i.name for i in node.all_input_nodes]
    mlp = nodes[found["outputs"][0]]
    assert mlp["rule"] == "fuse-mlp"
    assert mlp["origin"] == ["top.0", "top.1"]
    assert mlp["where"] == "dlrm.py:45"
    assert mlp["type"] == "f32[B,1]"


def test_python_runs() -> None:
    """FX's own code: defines a forward that computes what the module does."""
    root = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    scope: dict[str, object] = {}
    exec(dump.python(fx.symbolic_trace(root).graph, root), scope)
    x = torch.randn(2, 4)
    torch.testing.assert_close(scope["forward"](root, x), root(x))  # type: ignore[operator]


def test_python_imports_all_that_it_names() -> None:
    """Infinities, which FX writes as names, and this package for its operations."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.emb(ids).masked_fill(ids.unsqueeze(2) == 0, -math.inf)

    ids = torch.arange(6).view(2, 3)
    fast = recast.optimize(Masked(), example=ids)
    source, scope = dump.python(fast.graph, fast, "Masked"), dict[str, Any]()
    assert "from math import inf" in source and "import recast" in source
    exec(source, scope)
    assert torch.equal(scope["forward"](fast, ids), fast(ids))


def test_a_place_and_a_path_of_the_root_are_written() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.mul, (x, graph.get_attr("gain")))
    annotate(y, origin=("",), place="rows")
    graph.output(y)
    text = dump.text(graph, None, "m")
    grammar.check(text)
    assert "mul(x, self.gain)" in text
    assert "# self @rows" in text
    assert Note().place is None
