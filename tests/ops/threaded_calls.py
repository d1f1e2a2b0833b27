"""Calls of every CPU kernel with enough work for several threads, small enough for sanitizers.

``CALLS`` gives, for each name, a function that makes new arguments and returns a call; the call
returns all results. Made apart, so that a test can choose what happens during the call alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recast.runtime import OPS, device
from recast.runtime.rows import fading
from recast.runtime.rows.ages import Ages, Setting
from recast.runtime.rows.grad import row_grad
from recast.runtime.rows.pieces import Piece, merge
from recast.runtime.rows.update import Action, Update, apply
from recast.runtime.rows.whole import Whole

Call = Callable[[], list[Tensor]]


def _rand(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(rows + sum(shape))
    return torch.randint(0, rows, shape, generator=generator, dtype=dtype)


def trained(name: str, *args: Any) -> Call:
    """An op, forward and backward, with upstream gradients that are not all alike."""
    leaves = [
        t.requires_grad_()
        for arg in args
        for t in (arg if isinstance(arg, list) else [arg])
        if isinstance(t, Tensor) and t.is_floating_point()
    ]

    def call() -> list[Tensor]:
        outs = OPS[name].target(*args)
        outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
        upstream = [_rand(*out.shape, seed=k).to(out.dtype) for k, out in enumerate(outs)]
        grads = torch.autograd.grad(outs, leaves, upstream, allow_unused=True)
        return outs + [
            g.to_dense() if g.layout != torch.strided else g + 0 for g in grads if g is not None
        ]

    return call


def lookups() -> Call:
    """Every mode and form of bags; float16 weights of samples are converted in scratch memory."""
    tables = [_rand(500, 32, seed=k) for k in range(5)]
    tables.append(_rand(500, 32).half())
    cuts = torch.arange(0, 2100, 3)
    ids = [
        _ids(500, 700, 3), _ids(500, 700, 3, dtype=torch.int32), _ids(500, 700, 3),
        _ids(500, 2100), _ids(500, 2100, dtype=torch.int32), _ids(500, 700, 3),
    ]  # fmt: skip
    weights = [None, None, None, None, _rand(2100), _rand(700, 3).half()]
    offsets = [None, None, None, None, cuts, None]
    modes = ["sum", "mean", "max", "none", "sum", "sum"]
    padding = [3, None, 7, None, None, None]
    off = [False] * 6
    return trained(
        "embedding_bags", tables, ids, offsets, weights, [*range(6)], modes, padding, off, off
    )


def stacked_lookups() -> Call:
    """Rows side by side: single ones, pooled ones, and one apart."""
    tables = [_rand(500, 40, seed=k) for k in range(9)]
    ids = [_ids(500, 700) for _ in range(4)] + [_ids(500, 700, 3) for _ in range(5)]
    none, off = [None] * 9, [False] * 9
    modes = ["none"] * 4 + ["sum"] * 5
    stacked = OPS["embedding_bags"].target.direct.stacked(((3, 0, 1, 2), (4, 6, 5, 8)))

    def call() -> list[Tensor]:
        with torch.no_grad():
            found: list[Tensor] = stacked(
                tables, ids, none, none, [*range(9)], modes, none, off, off
            )
        return found

    return call


def dense_layers(*widths: int, last: str = "relu") -> Call:
    params: list[Tensor] = []
    steps: list[str] = []
    x = _rand(600, widths[0])
    for before, width in itertools.pairwise(widths):
        params += [_rand(width, before) / before**0.5, _rand(width)]
        steps += ["linear", "relu"]
    steps[-1] = last
    return trained("mlp", x, params, [], steps, [], [])


def served_layers() -> Call:
    """A chain without gradients: its intermediate values stay in scratch memory."""
    x = _rand(600, 40)
    params = [_rand(64, 40) / 6, _rand(64), _rand(30, 64) / 8, _rand(30), _rand(1, 30) / 6, None]
    steps = ["linear", "relu", "linear", "relu", "linear", "sigmoid"]

    def call() -> list[Tensor]:
        with torch.no_grad():
            return [OPS["mlp"].target(x, params, [], steps, [], [])]

    return call


def small_chain() -> Call:
    x, params = _rand(3, 300), [_rand(500, 300) / 17, _rand(500), _rand(300, 500) / 22, None]

    def call() -> list[Tensor]:
        out = torch.empty(3, 300)
        assert device.extension().small_mlp(x, params, "lrlr", out, device.threads())
        return [out]

    return call


def normed() -> Call:
    stats: list[Tensor | None] = [None] * 3
    return trained(
        "mlp", _rand(2000, 70), [_rand(70), _rand(70)], stats, ["batch_norm"], [0.1, 1e-5], [True]
    )  # fmt: skip


def cross_matrices() -> Call:
    square = [_rand(64, 64) / 8, _rand(64, 64) / 8]
    biases = [_rand(64), _rand(64)]
    return trained(
        "cross_matrix", _rand(700, 64), _rand(700, 64, seed=9), square, biases,
        [_rand(64, 64) / 8, _rand(64), None, None], [None, _rand(64)], [1, 1],
    )  # fmt: skip


def _piece(count: int, rows: int, width: int, weighted: bool = False) -> Piece:
    ids, upstream = _ids(rows, count), _rand(count // 4, width)
    return Piece(ids, upstream, None, 4, _rand(count) if weighted else None, False, 7, None)


def stepped(action: Action, dtype: torch.dtype = torch.float32) -> Call:
    """One big table, whose sort threads share, and small ones, of which each thread sorts some."""
    counts = {"sgd": 0, "adam": 2}
    updates = []
    for k, (count, rows) in enumerate([(70_000, 900), (4000, 300), (4000, 10), (400, 50_000)]):
        weight = _rand(rows, 24).to(dtype)
        shape = (rows,) if action == "row_wise_adagrad" else (rows, 24)
        pieces = [_piece(count, rows, 24, weighted=k == 1)]
        states = tuple(torch.ones(shape) for _ in range(counts.get(action, 1)))
        grad = row_grad(weight.shape, dtype, weight.device, pieces)
        updates.append(Update(action, weight, grad, states, lr=0.1, eps=1e-3, betas=(0.9, 0.99)))

    def call() -> list[Tensor]:
        apply(updates)
        return [t for update in updates for t in (update.weight, *update.states)]

    return call


def swept(whole: bool = False) -> Call:
    """All rows, of which most have no gradient."""
    adam = torch.optim.Adam([torch.empty(0)], eps=1e-3, betas=(0.9, 0.99))
    sgd = torch.optim.SGD([torch.empty(0)], momentum=0.9)
    rmsprop = torch.optim.RMSprop([torch.empty(0)], eps=1e-3, momentum=0.9)
    updates = []
    for optimizer in (adam, sgd, rmsprop):
        rule, group = fading.rule_of(optimizer), optimizer.param_groups[0]
        assert rule is not None
        for count, rows in [(40, 9000), (4000, 5000), (400, 70)]:
            weight, width = _rand(rows, 24), 24
            moments = {name: _rand(rows, width).square() for name in rule.states}
            betas = rule.betas(group)
            ages = Whole(betas, moments, 3) if whole else Ages(Setting(rule, betas), moments, 3)
            grad = row_grad(weight.shape, weight.dtype, weight.device, [_piece(count, rows, width)])
            numbers = rule.numbers(group, 3)
            updates.append(Update(rule.action, weight, grad, ages.moments, *numbers, ages=ages))

    def call() -> list[Tensor]:
        for _ in range(2):
            for update in updates:
                assert update.ages is not None
                update.ages.begin_step(update.weight, update.lr)
            apply(updates)
            for update in updates:
                assert update.ages is not None
                update.ages.end_step(update.weight, {})
        return [t for update in updates for t in (update.weight, *update.states)]

    return call


def merged() -> Call:
    pieces = [_piece(70_000, 1000, 20), _piece(4000, 1000, 20, weighted=True)]
    return lambda: list(merge(pieces, (1000, 20), torch.float32, torch.device("cpu")))


def on_the_wire() -> Call:
    rows, extension = _rand(1500, 48), device.extension()

    def call() -> list[Tensor]:
        table, back = torch.empty(1500, 52, dtype=torch.uint8), torch.empty(1500, 48)
        assert extension.wire_encode(rows, table, device.threads())
        assert extension.wire_decode(table, back, device.threads())
        return [table, back]

    return call


def id_table() -> Call:
    table = device.extension().IdTable(6000, 100, "lfu", 1, 0)
    batches = [_ids(5000, 9000), _ids(9000, 9000), _ids(5000, 9000)]

    def call() -> list[Tensor]:
        found = []
        for ids in batches[::2]:
            rows, again = torch.empty_like(ids), torch.empty_like(ids)
            assert table.find_or_insert(ids, None, rows, device.threads()) is None
            table.find(batches[1], again, device.threads())
            table.advance()
            found += [rows, again]
        return found

    return call


def first_rows() -> Call:
    ids, rows = torch.arange(600), torch.randperm(600, generator=torch.Generator().manual_seed(1))

    def call() -> list[Tensor]:
        slab = torch.empty(600, 40)
        device.extension().initial_rows(ids, rows, slab, 1, 2, False, 0.0, 1.0, device.threads())
        return [slab]

    return call


_PAIRS = list(torch.tril_indices(9, 9, -1))  # of nine features

CALLS: dict[str, Callable[[], Call]] = {
    "embedding_bags": lookups,
    "embedding_bags stacked": stacked_lookups,
    "compressed_interaction": lambda: trained(
        "compressed_interaction", _rand(400, 9, 16), _rand(400, 9, 16), _rand(12, 81), _rand(12),
        True,
    ),
    "cross_vector": lambda: trained(
        "cross_vector", _rand(900, 64), _rand(900, 64, seed=9), [_rand(64), _rand(64)],
        [None, None], [_rand(64), None],
    ),
    "cross_matrix": cross_matrices,
    "dot_interaction": lambda: trained(
        "dot_interaction", [_rand(300, 32, seed=k) for k in range(9)], _rand(300, 32, seed=0),
        *_PAIRS, 1,
    ),
    "dot_interaction any": lambda: trained(
        "dot_interaction", [_rand(300, 32, seed=k) for k in range(9)], None,
        _ids(9, 20), _ids(9, 20), 0,
    ),
    "fm_interaction": lambda: trained("fm_interaction", [_rand(300, 70, 16)], 0.5, True),
    "pair_products": lambda: trained(
        "pair_products", [_rand(100, 9, 140)], [], *_PAIRS, _rand(100, 36), "dim"
    ),
    "cross_entropy": lambda: trained(
        "cross_entropy", _rand(700, 300), _ids(300, 700), "none", 7, 0.1
    ),
    "linear_cross_entropy": lambda: trained(
        "linear_cross_entropy", _rand(700, 20), _rand(600, 20), _rand(600), _ids(600, 700),
        "mean", 7, 0.0,
    ),
    "dice": lambda: trained("dice", _rand(2000, 40), _rand(2000, 40, seed=9), _rand(40)),
    "field_attention": lambda: trained(
        "field_attention", *(_rand(60, 2, 20, 8, seed=k) for k in range(3)), 0.35, 0.0, False, False
    ),
    "gated_activation": lambda: trained(
        "gated_activation", _rand(2000, 40), _rand(2000, 40, seed=9), "gelu"
    ),
    "gated_sums": lambda: trained(
        "gated_sums", [_rand(100, 32, seed=k) for k in range(70)], [_rand(100, 70), _rand(100, 2)],
        [*range(70), 1, 3], True, True,
    ),
    "gru": lambda: trained(
        "gru", _rand(300, 5, 20), None, None, None,
        [_rand(60, 20) / 5, _rand(60, 20, seed=9) / 5, _rand(60), _rand(60)], True,
    ),
    "mlp": lambda: dense_layers(40, 120, 60, 5),
    "mlp narrow": lambda: dense_layers(160, 1, last="sigmoid"),
    "mlp served": served_layers,
    "rms_norm": lambda: trained("rms_norm", _rand(2000, 40), _rand(40), 1e-6, "none"),
    "silu_attention": lambda: trained(
        "silu_attention", *(_rand(60, 2, 20, 8, seed=k) for k in range(3)), 0.5, 0.1,
        _rand(60, 1, 20, 20), _rand(20, 20),
    ),
    "small_mlp": small_chain,
    "batch_norm": normed,
    **{f"step {action}": lambda action=action: stepped(action)
       for action in ("sgd", "adagrad", "row_wise_adagrad", "adam")},
    "adam of all rows": swept,
    "adam of whole tables": lambda: swept(whole=True),
    "step of halves": lambda: stepped("adagrad", torch.bfloat16),
    "merge": merged,
    "wire": on_the_wire,
    "id_table": id_table,
    "initial_rows": first_rows,
}  # fmt: skip
