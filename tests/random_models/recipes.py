"""Random recommendation models, as programs: a recipe is drawn, written out as Python, and run.

A failing recipe shrinks, and its program is what the failure prints.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from blocks import BLOCKS
from habits import PLAIN, Habit, habits
from hypothesis import strategies as st
from interactions import INTERACTIONS as FIRST
from lookup_forms import MORE
from modern import CLASSES, MODERN
from torch import Tensor, nn

INTERACTIONS = {**FIRST, **BLOCKS, **MODERN}

FORMS = ("column", "packed", "functional", "sequence", "masked", "bag", "ragged", "weighted")
POOLED = ("bag", "ragged", "weighted")
BY_COLUMN = ("column", "packed", "functional")
OUTPUTS = {
    "one": ["return torch.sigmoid(y)"],
    "tuple": ["return torch.sigmoid(y[:, 0]), y[:, 1]"],
    "dict": ['return {"click": torch.sigmoid(y[:, :1]), "hidden": h}'],
    "list": ["return [y, h.mean(1)]"],
    "nested": ['return {"tasks": [(y[:, 0], 1), {"h": h}], "none": None}'],
    "loss": [
        "loss = F.binary_cross_entropy_with_logits(y[:, 0], label)",
        "return loss + 0.01 * sum(p.pow(2).sum() for p in self.head.parameters())",
    ],
    "loss of tables": [
        "loss = F.mse_loss(torch.sigmoid(y).sum(1), label, reduction='none').mean()",
        "return loss + 0.01 * (self.t0.weight ** 2).sum() + 0.01 * e0.norm()",
    ],
    "loss in a dict": [
        "p = y.sigmoid().squeeze(-1)",
        "loss = F.binary_cross_entropy(p[:, 0], label)",
        "if self.training:",
        '    return {"loss": loss, "logits": y}',
        'return {"logits": y}',
    ],
    "named": ["return Out(logit=y, hidden=h.mean(-1))"],
    "loss of quantiles": [
        "gap = label.unsqueeze(1) - y",
        "pinball = torch.maximum(0.1 * gap, -0.9 * gap).mean()",
        "return pinball + F.huber_loss(y[:, 1], label, delta=0.5)",
    ],
    "focal loss": [
        "p = torch.sigmoid(y[:, 0])",
        "right = torch.where(label > 0, p, 1 - p).clamp(1e-3, 1 - 1e-3)",
        "return (-((1 - right) ** 2) * torch.log(right)).mean(), p.detach()",
    ],
    "loss in the batch": [
        "left, right = F.normalize(y + 3.0, dim=-1), F.normalize(h.detach()[:, :1] + 3.0, dim=0)",
        "scores = left @ (right * y + 2.0).t() / 0.5",
        "return F.cross_entropy(scores, torch.arange(scores.size(0)), label_smoothing=0.1)",
    ],
    "loss by pairs": [
        "right, wrong = y[:, 0], y[:, 1].roll(1, 0)",
        "return -F.logsigmoid(right - wrong).mean(), torch.sigmoid(y.detach())",
    ],
}
ACTIVATIONS = ("ReLU", "Sigmoid", "Tanh", "LeakyReLU", "PReLU", "GELU", "SiLU", "ELU")


@dataclass(frozen=True)
class Table:
    rows: int
    dim: int
    padding: int | None
    sparse: bool
    mode: str  # of pooled lookups


@dataclass(frozen=True)
class Lookup:
    table: int
    form: str


@dataclass(frozen=True)
class Recipe:
    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    dense: int  # numeric inputs
    interactions: tuple[str, ...]  # of INTERACTIONS; their results side by side
    chain: tuple[str, ...]  # "linear", "norm", "drop" or an activation, in order
    style: str  # how the chain is written: sequential, loop, functional
    flag: bool  # python control flow on self.training
    outputs: str  # of OUTPUTS
    container: str  # how inputs come: flat, dict
    first_order: bool = False  # a table of width 1 beside each looked up by column
    apart: bool = False  # each numeric input through a layer of its own
    switch: bool = False  # python control flow on an argument with a default, and on a shape
    aware: bool = False  # field-aware pairs of the lookups by column
    habit: Habit = PLAIN  # how it is trained


# ---------------------------------------------------------------- drawing


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any model of one to four lookups over one to three tables."""
    drawn = draw(st.lists(st.sampled_from(list(INTERACTIONS)), min_size=1, max_size=2, unique=True))
    alike = any(INTERACTIONS[name].stacked for name in drawn)
    least = max(INTERACTIONS[name].least for name in drawn)
    dim = draw(st.sampled_from((2, 3, 4)))
    count = draw(st.integers(1, 3))
    tables = tuple(
        Table(
            rows=draw(st.integers(3, 9)),
            dim=dim if alike else draw(st.sampled_from((1, 2, 4))),
            padding=draw(st.sampled_from((None, None, 0, 1))),
            sparse=draw(st.booleans()),
            mode=draw(st.sampled_from(("sum", "mean", "max"))),
        )
        for _ in range(count)
    )
    form = st.one_of(st.sampled_from(FORMS), st.sampled_from(list(MORE)))
    lookups = tuple(
        Lookup(draw(st.integers(0, count - 1)), draw(form))
        for _ in range(draw(st.integers(least, max(4, least))))
    )
    element = st.sampled_from(
        ("linear", "linear", "norm", "drop", "shared", "noise", "own", *ACTIVATIONS)
    )
    return Recipe(
        tables, lookups,
        dense=draw(st.sampled_from((0, 1, 3))),
        interactions=tuple(drawn),
        chain=tuple(draw(st.lists(element, max_size=7))),
        style=draw(st.sampled_from(("sequential", "loop", "functional"))),
        flag=draw(st.booleans()),
        outputs=draw(st.one_of(st.just("one"), st.sampled_from(list(OUTPUTS)))),
        container=draw(st.sampled_from(("flat", "dict"))),
        first_order=draw(st.booleans()),
        apart=draw(st.booleans()),
        # "rounded" cuts its weight to a grid by a function of its own, whose rows nobody knows
        switch=draw(st.booleans()) and "rounded" not in drawn,
        aware=draw(st.booleans()),
        habit=draw(habits(any(t.sparse for t in tables))),
    )  # fmt: skip


def lookups(recipe: Recipe) -> int:
    """How many lookups the program has, at least: one of a matrix product is none."""
    column = [x for x in recipe.lookups if x.form in BY_COLUMN]
    again = len(column) if recipe.first_order else 0
    pairs = len(column) * (len(column) - 1) if recipe.aware else 0
    return len(recipe.lookups) - sum(x.form in MORE for x in recipe.lookups) + again + pairs


# ---------------------------------------------------------------- writing


def program(recipe: Recipe) -> str:
    """The model as Python source: a class ``Model``."""
    made = ["from typing import NamedTuple", "", "import torch", "import torch.nn.functional as F"]
    made += ["from torch import nn", "", ""]
    forms = [x.form for x in recipe.lookups]
    for name in dict.fromkeys([*recipe.chain, *recipe.interactions, *forms, recipe.outputs]):
        made += [*CLASSES[name], "", ""] if name in CLASSES else []
    made += ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    made += [f"        {line}" for line in _layers(recipe)]
    names = inputs(recipe)
    switch = ", halve=True" if recipe.switch else ""
    if recipe.container == "dict":
        made += ["", f"    def forward(self, batch{switch}):"]
        made += [f"        {name} = batch[{name!r}]" for name in names]
    else:
        made += ["", f"    def forward(self, {', '.join(names)}{switch}):"]
    return "\n".join([*made, *(f"        {line}" for line in _forward(recipe))]) + "\n"


def inputs(recipe: Recipe) -> list[str]:
    """The names of the model's arguments."""
    names: list[str] = []
    forms = [x.form for x in recipe.lookups]
    names += ["ids"] if {"column", "functional"} & set(forms) else []
    names += ["packed"] if "packed" in forms else []
    for k, form in enumerate(forms):
        names += [f"s{k}"] if form in ("sequence", "masked", "bag", "weighted") else []
        names += [f"i{k}", f"o{k}"] if form == "ragged" else []
        names += [f"w{k}"] if form == "weighted" else []
        names += [f"{letter}{k}" for letter in MORE[form].given] if form in MORE else []
    names += ["label"] if "loss" in recipe.outputs else []
    return names + (["x"] if recipe.dense or not names else [])


def _layers(recipe: Recipe) -> list[str]:
    lines = [*_tables(recipe), *_lookup_layers(recipe), *_dense_layers(recipe)]
    width = 0
    for name in recipe.interactions:
        kind = INTERACTIONS[name]
        size = _size(recipe, kind.stacked)
        lines += kind.layers(*size)
        width += kind.width(*size)
    return lines + _chain(recipe, width)


def _tables(recipe: Recipe) -> list[str]:
    lines = []
    for k, t in enumerate(recipe.tables):
        lines.append(
            f"self.t{k} = nn.Embedding({t.rows}, {t.dim}, padding_idx={t.padding},"
            f" sparse={t.sparse})"
        )
        if recipe.first_order:
            lines.append(f"self.f{k} = nn.Embedding({t.rows}, 1, padding_idx={t.padding})")
    for (i, x), (j, _) in itertools.permutations(_columns(recipe), 2) if recipe.aware else ():
        lines.append(f"self.a{i}_{j} = nn.Embedding({recipe.tables[x.table].rows}, 2)")
    return lines


def _lookup_layers(recipe: Recipe) -> list[str]:
    lines = []
    for k, x in enumerate(recipe.lookups):
        t = recipe.tables[x.table]
        if x.form in POOLED:
            mode = "sum" if x.form == "weighted" else t.mode
            lines.append(
                f"self.b{k} = nn.EmbeddingBag({t.rows}, {t.dim}, mode={mode!r},"
                f" padding_idx={t.padding}, sparse={t.sparse and mode != 'max'})"
            )
        if x.form in MORE:
            made = MORE[x.form].layers(k, t.rows, t.dim)
            lines += [line.replace("TABLE", f"self.t{x.table}") for line in made]
    return lines


def _dense_layers(recipe: Recipe) -> list[str]:
    if not recipe.dense or not _stacked(recipe):
        return []
    if recipe.apart:
        layer = f"nn.Linear(1, {_dim(recipe)}, bias=False)"
        return [f"self.numeric = nn.ModuleList({layer} for _ in range({recipe.dense}))"]
    return [f"self.bottom = nn.Linear({recipe.dense}, {_dim(recipe)})"]


def _chain(recipe: Recipe, width: int) -> list[str]:
    """The chain of layers over ``width`` columns, and the head."""
    widened = {"linear": "nn.Linear({}, 5)", "own": "Centred({}, 5)"}  # to five columns
    others = {
        "norm": "nn.BatchNorm1d({})",
        "drop": "nn.Dropout(0.3)",
        "shared": "self.shared",
        "noise": "Noise()",
    }
    elements = []
    for element in recipe.chain:
        form = widened.get(element) or others.get(element, f"nn.{element}()")
        elements.append(form.format(width))
        width = 5 if element in widened else width
    inside = ", ".join(elements)
    if recipe.style == "sequential":
        chain = f"self.chain = nn.Sequential({inside})"
    else:
        chain = f"self.chain = nn.ModuleList([{inside}])"
    lines = ["self.shared = nn.Dropout(0.2)"] if "shared" in recipe.chain else []
    return [*lines, chain, f"self.head = nn.Linear({width}, 2)"]


def _stacked(recipe: Recipe) -> bool:
    return any(INTERACTIONS[name].stacked for name in recipe.interactions)


def _dim(recipe: Recipe) -> int:
    return recipe.tables[recipe.lookups[0].table].dim


def _numeric(recipe: Recipe) -> int:
    """How many vectors the numeric inputs become."""
    return recipe.dense if recipe.apart else int(recipe.dense > 0)


def _size(recipe: Recipe, stacked: bool) -> tuple[int, int]:
    """How many features of how many numbers an interaction reads."""
    if stacked:
        return len(recipe.lookups) + _numeric(recipe), _dim(recipe)
    dims = [recipe.tables[x.table].dim for x in recipe.lookups]
    numeric = _dim(recipe) * _numeric(recipe) if _stacked(recipe) else recipe.dense
    return 1, sum(dims) + numeric


def _forward(recipe: Recipe) -> list[str]:
    lines: list[str] = []
    columns, packed = itertools.count(), itertools.count()
    for k, x in enumerate(recipe.lookups):
        lines += _lookup(k, x, recipe.tables[x.table], columns, packed, recipe)
    rows = [f"e{k}" for k in range(len(recipe.lookups))]
    lines += _interact(recipe, rows)
    if recipe.style == "sequential":
        lines.append("h = self.chain(h)")
    elif recipe.style == "loop":
        lines += ["for layer in self.chain:", "    h = layer(h)"]
    else:
        lines += _functional(recipe)
    if recipe.flag:
        lines += ["if self.training:", "    h = h * 0.5"]
    if recipe.switch:
        lines += ["if halve and h.dim() == 2 and h.size(1) != 3:", "    h = h / 2"]
    lines.append("y = self.head(h)")
    if recipe.first_order:
        column = [f"w{k}" for k, x in enumerate(recipe.lookups) if x.form in BY_COLUMN]
        lines += [f"y = y + {' + '.join(column)}"] if column else []
    aware = itertools.combinations(_columns(recipe), 2) if recipe.aware else ()
    for (i, _), (j, _) in aware:
        product = f"self.a{i}_{j}(c{i}) * self.a{j}_{i}(c{j})"
        lines.append(f"y = y + ({product}).sum(1, keepdim=True)")
    return [*lines, *OUTPUTS[recipe.outputs]]


def _columns(recipe: Recipe) -> list[tuple[int, Lookup]]:
    return [(k, x) for k, x in enumerate(recipe.lookups) if x.form in BY_COLUMN]


def _lookup(
    k: int, x: Lookup, t: Table, columns: Iterator[int], packed: Iterator[int], recipe: Recipe
) -> list[str]:
    table = f"self.t{x.table}"
    if x.form in MORE:
        return MORE[x.form].lines(k, table, t.dim)
    if x.form in BY_COLUMN:
        packs = x.form == "packed"
        ids = f"packed[:, {next(packed)}].long()" if packs else f"ids[:, {next(columns)}]"
        call = f"{table}({ids})"
        if x.form == "functional":
            call = f"F.embedding({ids}, {table}.weight, padding_idx={t.padding})"
        first = [f"w{k} = self.f{x.table}({ids})"] if recipe.first_order else []
        named = [f"c{k} = {ids}"] if recipe.aware else []
        return [*named, f"e{k} = {call}", *first]
    if x.form == "sequence":
        return [f"e{k} = {table}(s{k}).mean(1)"]
    if x.form == "masked":
        return [
            f"m{k} = (s{k} != 0).unsqueeze(-1).float()",
            f"e{k} = ({table}(s{k}) * m{k}).sum(1) / (m{k}.sum(1) + 1e-8)",
        ]
    arguments = {
        "bag": f"s{k}",
        "ragged": f"i{k}, o{k}",
        "weighted": f"s{k}, per_sample_weights=w{k}",
    }
    return [f"e{k} = self.b{k}({arguments[x.form]})"]


def _interact(recipe: Recipe, rows: list[str]) -> list[str]:
    lines: list[str] = []
    parts = rows + (["x"] if recipe.dense else [])
    if _stacked(recipe):
        dense = [f"d{k}" for k in range(_numeric(recipe))]
        if recipe.apart:
            lines += [
                f"{d} = self.numeric[{k}](x[:, {k}].float().view(-1, 1))"
                for k, d in enumerate(dense)
            ]
        else:
            lines += [f"{d} = self.bottom(x)" for d in dense]
        parts = dense + rows
        lines.append(f"z = torch.stack([{', '.join(parts)}], dim=1)")
    lines.append(f"flat = torch.cat([{', '.join(parts)}], dim=1)")
    for k, name in enumerate(recipe.interactions):
        kind = INTERACTIONS[name]
        lines += kind.lines(*_size(recipe, kind.stacked))
        lines.append(f"h{k} = h")
    several = len(recipe.interactions) > 1
    return [*lines, "h = torch.cat([h0, h1], dim=1)"] if several else lines


def _functional(recipe: Recipe) -> list[str]:
    lines = []
    for k, element in enumerate(recipe.chain):
        lines.append(
            {
                "drop": "h = F.dropout(h, 0.3, self.training)",
                "ReLU": "h = F.relu(h)",
                "Sigmoid": "h = h.sigmoid()",
                "Tanh": "h = torch.tanh(h)",
                "GELU": "h = F.gelu(h)",
            }.get(element, f"h = self.chain[{k}](h)")
        )
    return lines


# ---------------------------------------------------------------- running

_count = itertools.count()


def model(recipe: Recipe) -> nn.Module:
    """The model, with seeded weights; its lines can be read by tools that show source."""
    source = program(recipe)
    name = f"<random model {next(_count)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made: nn.Module = space["Model"]()
    return made


def batch(recipe: Recipe, rows: int, seed: int) -> tuple[Any, ...]:
    """Arguments for ``rows`` rows; bags hold 0 to 3 ids."""
    g = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}

    def some(table: int, *shape: int) -> Tensor:
        return torch.randint(recipe.tables[table].rows, shape, generator=g)

    column = [some(x.table, rows) for x in recipe.lookups if x.form in ("column", "functional")]
    packed = [some(x.table, rows).float() for x in recipe.lookups if x.form == "packed"]
    for k, x in enumerate(recipe.lookups):
        if x.form in ("sequence", "masked", "bag", "weighted"):
            made[f"s{k}"] = some(x.table, rows, 3)
        if x.form == "weighted":
            made[f"w{k}"] = torch.randn(rows, 3, generator=g)
        if x.form == "ragged":
            counts = torch.randint(0, 4, (rows,), generator=g)
            made[f"i{k}"] = some(x.table, int(counts.sum()))
            made[f"o{k}"] = torch.cumsum(counts, 0) - counts
        for letter in MORE[x.form].given if x.form in MORE else "":
            made[f"{letter}{k}"] = {
                "c": lambda t=x.table: some(t, rows),
                "s": lambda t=x.table: some(t, rows, 3),
                "n": lambda: torch.randint(1, 4, (rows,), generator=g),
                "w": lambda: torch.randn(rows, 3, generator=g),
            }[letter]()
    if "loss" in recipe.outputs:
        made["label"] = torch.randint(2, (rows,), generator=g).float()
    if column:
        made["ids"] = torch.stack(column, 1)
    if packed:
        made["packed"] = torch.stack(packed, 1)
    if "x" in inputs(recipe):
        made["x"] = torch.randn(rows, recipe.dense, generator=g)
    ordered = {name: made[name] for name in inputs(recipe)}
    return (ordered,) if recipe.container == "dict" else tuple(ordered.values())
