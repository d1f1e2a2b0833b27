"""Small graphs with hand-made notes, so that the dump is tested without capture and passes."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

import recast.runtime  # noqa: F401  registers the operators
from recast.rewriter.ir import KEY, Note, Spec

F32, I64 = torch.float32, torch.int64


class DLRM(nn.Module):
    """The modules of a DLRM of ``tables`` bags."""

    def __init__(self, tables: int = 26) -> None:
        super().__init__()
        self.embs = nn.ModuleList(nn.EmbeddingBag(10, 8) for _ in range(tables))
        self.bot = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + tables * (tables + 1) // 2, 1), nn.Sigmoid())
        li, lj = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("li", li)
        self.register_buffer("lj", lj)


class Maker:
    """Adds nodes with a note each."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def add(
        self,
        op: str,
        target: object,
        args: tuple = (),
        spec: object = None,
        *,
        origin: tuple[str, ...] = (),
        line: int | None = None,
        rule: str | None = None,
    ) -> fx.Node:
        name = target if isinstance(target, str) and op != "call_method" else None
        node = self.graph.create_node(op, target, args, {}, name=name)  # type: ignore[arg-type]
        where = f"dlrm.py:{line}" if line else None
        node.meta[KEY] = Note(origin=origin, where=where, rule=rule, spec=spec)
        return node

    def inputs(self, tables: int) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
        dense = self.add("placeholder", "dense", (), f32("B", 13))
        offsets = [
            self.add("placeholder", f"offsets_{k}", (), Spec(I64, ("B",))) for k in range(tables)
        ]
        indices = [
            self.add("placeholder", f"indices_{k}", (), Spec(I64, ("n",))) for k in range(tables)
        ]
        return dense, offsets, indices

    def chain(self, x: fx.Node, path: str, widths: list[int], line: int) -> fx.Node:
        for k, width in enumerate(widths):
            here = f"{path}.{k}"
            x = self.add("call_module", here, (x,), f32("B", width), origin=(here,), line=line)
        return x


def f32(*shape: int | str) -> Spec:
    return Spec(F32, shape)


def before(tables: int = 26) -> tuple[fx.Graph, DLRM]:
    """A DLRM as captured."""
    m, root, features = Maker(), DLRM(tables), tables + 1
    dense, offsets, indices = m.inputs(tables)
    x = m.chain(dense, "bot", [16, 16, 8, 8], 40)
    bags = [
        m.add("call_module", f"embs.{k}", (indices[k], offsets[k]), f32("B", 8),
              origin=(f"embs.{k}",), line=41)
        for k in range(tables)
    ]  # fmt: skip
    cat = m.add("call_function", torch.cat, ([x, *bags], 1), f32("B", 8 * features), line=42)
    shape = m.add("call_function", getattr, (x, "shape"), line=42)
    size = m.add("call_function", operator.getitem, (shape, 0), line=42)
    view = m.add("call_method", "view", (cat, size, -1, 8), f32("B", features, 8), line=42)
    turned = m.add("call_method", "transpose", (view, 1, 2), f32("B", 8, features), line=43)
    z = m.add("call_function", torch.bmm, (view, turned), f32("B", features, features), line=43)
    li, lj = m.add("get_attr", "li"), m.add("get_attr", "lj")
    pairs = tables * features // 2
    some = slice(None)
    picked = m.add("call_function", operator.getitem, (z, (some, li, lj)), f32("B", pairs), line=44)
    joined = m.add("call_function", torch.cat, ([x, picked], 1), f32("B", 8 + pairs), line=45)
    m.graph.output(m.chain(joined, "top", [1, 1], 45))
    return m.graph, root


def after(tables: int = 26) -> tuple[fx.Graph, DLRM]:
    """The same DLRM, rewritten."""
    m, root, pairs = Maker(), DLRM(tables), tables * (tables + 1) // 2
    ops = torch.ops.recast
    dense, offsets, indices = m.inputs(tables)
    embs = [m.add("get_attr", f"embs.{k}.weight") for k in range(tables)]
    lookups = m.add(
        "call_function", ops.embedding_bags.default,
        (embs, indices, offsets, [None] * tables, list(range(tables)), ["sum"] * tables,
         [None] * tables, [False] * tables, [False] * tables),
        (f32("B", 8),) * tables, origin=tuple(f"embs.{k}" for k in range(tables)), line=41,
        rule="group-embeddings",
    )  # fmt: skip
    rows = [m.add("call_function", operator.getitem, (lookups, k)) for k in range(tables)]
    x = mlp(m, dense, "bot", [0, 2], ["linear", "relu", "linear", "relu"], f32("B", 8), 40)
    li, lj = m.add("get_attr", "li"), m.add("get_attr", "lj")
    dot = m.add(
        "call_function", ops.dot_interaction.default, ([x, *rows], x, li, lj, 0),
        f32("B", 8 + pairs), line=43, rule="fuse-dot-interaction",
    )  # fmt: skip
    m.graph.output(mlp(m, dot, "top", [0], ["linear", "sigmoid"], f32("B", 1), 45))
    return m.graph, root


def mlp(
    m: Maker, x: fx.Node, path: str, layers: list[int], steps: list[str], spec: Spec, line: int
) -> fx.Node:
    params = [m.add("get_attr", f"{path}.{k}.{p}") for k in layers for p in ("weight", "bias")]
    origin = tuple(f"{path}.{k}" for k in range(len(steps)))
    args = (x, params, [], steps, [], [])
    return m.add(
        "call_function", torch.ops.recast.mlp.default, args, spec, origin=origin, line=line,
        rule="fuse-mlp",
    )  # fmt: skip
