"""Pictures: what is folded, what is marked, and that something can lay them out."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import graphs
import pytest
import torch
from torch import fx, nn

from recast.errors import UsageError
from recast.rewriter.report import draw

SCREEN = (1280, 900)  # pixels: what one sees without scrolling
SVG = "{http://www.w3.org/2000/svg}"


def by_name(graph: fx.Graph, root: nn.Module) -> dict[str, draw.Box]:
    return {box.name: box for box in draw.boxes(graph, root)}


def test_siblings_are_one_box() -> None:
    boxes = by_name(*graphs.before())
    assert boxes["embs_0"].count == 26
    assert boxes["offsets_0"].count == boxes["indices_0"].count == 26
    assert boxes["embs_0"].inputs == {"indices_0": 26, "offsets_0": 26}
    assert len(boxes) < 15


def test_a_table_that_is_used_otherwise_is_no_sibling() -> None:
    graph, root = graphs.before(4)
    bag = next(n for n in graph.nodes if n.name == "embs_2")
    last = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(last):
        graph.call_function(torch.neg, (bag,))
    boxes = by_name(graph, root)
    assert boxes["embs_0"].count == 3
    assert boxes["embs_2"].count == 1
    assert boxes["indices_2"].count == 1


def test_a_chain_of_one_container_is_one_box() -> None:
    boxes = by_name(*graphs.before(3))
    assert [len(step) for step in boxes["bot_0"].steps] == [1, 1, 1, 1]
    assert "bot_3" not in boxes
    assert boxes["cat"].inputs == {"bot_0": 1, "embs_0": 3}


def test_a_chain_of_functions_is_one_box_but_not_a_fork() -> None:
    boxes = by_name(*graphs.before(3))
    assert [step[0].name for step in boxes["cat"].steps] == ["cat", "view"]
    assert "transpose" in boxes  # the view is read by two
    assert boxes["bmm"].inputs == {"cat": 1, "transpose": 1}


def test_what_would_be_too_wide_is_folded_by_depth() -> None:
    """Ten values, each used differently: no siblings, but ten boxes would be unreadable."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = [graph.call_function(torch.mul, (x, k)) for k in range(10)]
    y = parts[0]
    for part in parts[1:]:
        y = graph.call_function(torch.sub, (y, part))
    graph.output(y)
    boxes = draw.boxes(graph)
    assert next(b for b in boxes if b.name == "mul").count == 10
    names = [b.name for b in boxes]
    for box in boxes:  # no cycle: a box only reads boxes drawn before it
        assert all(names.index(source) < names.index(box.name) for source in box.inputs)


def test_every_node_with_a_value_is_in_one_box() -> None:
    """Folding loses only attributes, sizes and parts of tuples."""
    for graph, root in (graphs.before(5), graphs.after(5)):
        drawn = [n.name for box in draw.boxes(graph, root) for n in box.nodes]
        assert len(drawn) == len(set(drawn))
        left = {n.name for n in graph.nodes} - set(drawn)
        assert all(
            re.fullmatch(r"getattr_1|getitem(_\d+)?|li|lj|(embs|bot|top)_\w+", n) for n in left
        )
        assert "getitem_1" in drawn or "dot_interaction_default" in drawn


def test_dot_is_golden(golden: Callable[[str, str], None]) -> None:
    golden("dump/dlrm-after.dot", draw.dot(*graphs.after(), missed={"mlp_default"}))


def test_marks() -> None:
    before, after = draw.dot(*graphs.before(2), missed={"top_0"}), draw.dot(*graphs.after(2))
    assert before.count("#d0312d") == 1
    assert "← fuse-mlp" in after
    assert "← fuse-mlp" not in before
    assert 'label=" 2×"' in before


needs_layout = pytest.mark.skipif(
    not draw.can_layout(), reason="neither pygraphviz nor the program dot is installed"
)


@needs_layout
@pytest.mark.parametrize("make", [graphs.before, graphs.after])
def test_twenty_six_tables_fit_one_screen(make: Callable[[], tuple[fx.Graph, nn.Module]]) -> None:
    picture = draw.svg(*make())
    root = ElementTree.fromstring(picture)
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    assert width <= SCREEN[0]
    assert height <= SCREEN[1]


@needs_layout
def test_svg_titles_are_the_notes() -> None:
    picture = draw.svg(*graphs.after(3))
    titles = [e.text or "" for e in ElementTree.fromstring(picture).iter(f"{SVG}title")]
    told = "\n".join(titles)
    assert "group-embeddings ← embs.{0..2} dlrm.py:41" in told
    assert "f32[B,1]" in told
    assert "mlp_default_1->output" not in told


def test_the_program_dot_gives_the_same_boxes(tmp_path: Path) -> None:
    if shutil.which("dot") is None:
        pytest.skip("the program dot is not installed")
    done = subprocess.run(
        ["dot", "-Tsvg"], input=draw.dot(*graphs.after(3)).encode(), capture_output=True, check=True
    )
    assert done.stdout.count(b'class="node"') == draw.svg(*graphs.after(3)).count('class="node"')


def test_nothing_to_lay_out_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_pygraphviz", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not draw.can_layout()
    with pytest.raises(UsageError) as caught:
        draw.svg(*graphs.after(2))
    assert str(caught.value).splitlines() == [
        "svg: nothing here can lay out a graph",
        "  why  neither the package pygraphviz nor the program dot is installed",
        "  try  pip install 'torch-recast[viz]'   |   --format dot",
    ]
