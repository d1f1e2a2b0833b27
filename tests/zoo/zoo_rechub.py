"""The models of torch-rechub: a dict of columns; tables may be shared with histories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from zoo_absent import without
from zoo_data import (
    DIM,
    FEW,
    HISTORY,
    ITEMS,
    KINDS,
    NUMBERS,
    ROWS,
    TAGS,
    Draw,
    Inputs,
    Made,
    Subject,
    history,
    ids,
    joined,
    listed,
    named,
)

with without("transformers", "annoy", "pymilvus"):
    import torch_rechub.models.matching as matching
    import torch_rechub.models.multi_task as tasks
    import torch_rechub.models.ranking as ranking
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature


def _sparse(rows: tuple[int, ...] = ROWS, dim: int = DIM, prefix: str = "C") -> list[Any]:
    return [SparseFeature(f"{prefix}{k}", n, embed_dim=dim) for k, n in enumerate(rows)]


def _numbers() -> list[Any]:
    return [DenseFeature(f"I{k}") for k in range(NUMBERS)]


def _mlp() -> dict[str, Any]:
    return {"dims": [128, 64], "dropout": 0.2, "activation": "relu"}


def _past(name: str, rows: int, pooling: str, key: str = "hist") -> Any:
    return SequenceFeature(
        f"{key}_{name}", rows, embed_dim=DIM, pooling=pooling, shared_with=name, padding_idx=0
    )


# ---------------------------------------------------------------- ranking


def _field_aware(kind: type, *more: Any) -> Any:
    """Tables of the crossed fields have a block of rows for each other field."""

    def make() -> Made:
        crossed = _sparse(tuple(n * len(FEW) for n in FEW), 8, "X")
        inputs = joined(
            lambda rows, g: named(FEW, 0)(rows, g), lambda rows, g: named(FEW, 0, "X")(rows, g)[0]
        )
        return kind(_sparse(FEW, 1), crossed, 8, *more, _mlp()), inputs

    return make


def _deep_fm() -> Made:
    tags = SequenceFeature("tags", TAGS, embed_dim=DIM, pooling="mean", padding_idx=0)
    model = ranking.DeepFM([*_numbers(), *_sparse(), tags], _sparse(), _mlp())
    return model, joined(named(ROWS), lambda rows, g: {"tags": history(rows, TAGS, g, 5)[0]})


def _clicks(rows: int, g: Draw) -> dict[str, Tensor]:
    found = {"item": ids(rows, ITEMS, g, 1), "kind": ids(rows, KINDS, g, 1)}
    for key in ("hist", "neg"):
        found[f"{key}_item"] = history(rows, ITEMS, g)[0]
        found[f"{key}_kind"] = history(rows, KINDS, g)[0]
    return found


def _of_clicks(kind: type, *more: Any, negatives: bool = False, **options: Any) -> Any:
    def make() -> Made:
        past = [_past(name, n, "concat") for name, n in (("item", ITEMS), ("kind", KINDS))]
        seen = [_past(name, n, "concat", "neg") for name, n in (("item", ITEMS), ("kind", KINDS))]
        target = [
            SparseFeature("item", ITEMS, embed_dim=DIM),
            SparseFeature("kind", KINDS, embed_dim=DIM),
        ]
        lists = [past, seen, target] if negatives else [past, target]
        return kind(_sparse(FEW), *lists, *more, **options), joined(named(FEW, 0), _clicks)

    return make


def _ranking() -> list[tuple[str, Any]]:
    many, deep = named(ROWS, 0), {"dims": [128, 64], "dropout": 0.2}
    return [
        ("AFM", lambda: (ranking.AFM(_sparse(), DIM, 32), many)),
        ("AutoInt", lambda: (
            ranking.AutoInt(_sparse(), _numbers(), 2, 2, 0.2, _mlp()), named(ROWS)
        )),
        ("DCN", lambda: (ranking.DCN(_sparse() + _numbers(), 3, _mlp()), named(ROWS))),
        ("DCNv2-mix", lambda: (ranking.DCNv2(_sparse() + _numbers(), 3, _mlp()), named(ROWS))),
        ("DCNv2-full", lambda: (
            ranking.DCNv2(_sparse() + _numbers(), 3, _mlp(), "stacked", False), named(ROWS)
        )),
        ("DeepFFM", _field_aware(ranking.DeepFFM)),
        ("FatDeepFFM", _field_aware(ranking.FatDeepFFM, 2)),
        ("DeepFM", _deep_fm),
        ("EDCN", lambda: (
            ranking.EDCN(_sparse(), 2, {"dropout": 0.2, "activation": "relu"}), many
        )),
        *((f"FiBiNet-{kind}", lambda kind=kind: (
            ranking.FiBiNet(_sparse(), _mlp(), bilinear_type=f"field_{kind}"), many
        )) for kind in ("all", "each", "interaction")),
        ("WideDeep", lambda: (
            ranking.WideDeep(_sparse(ROWS[:6]), _sparse() + _numbers(), _mlp()), named(ROWS)
        )),
        ("DIN", _of_clicks(ranking.DIN, deep, {"dims": [64, 16]})),
        ("BST", _of_clicks(
            ranking.BST, _mlp(), nhead=4, dropout=0.1, max_seq_len=HISTORY + 1
        )),
        ("DIEN", _of_clicks(ranking.DIEN, deep, negatives=True)),
    ]  # fmt: skip


# ---------------------------------------------------------------- several tasks


def _tasks() -> list[tuple[str, Any]]:
    kinds = ["classification", "classification"]
    expert = {"dims": [64], "dropout": 0.2}

    def fields() -> list[Any]:
        return _sparse() + _numbers()

    def towers() -> list[dict[str, Any]]:
        return [{"dims": [32], "dropout": 0.2} for _ in kinds]

    both = joined(named(FEW, 0, "P"), lambda rows, g: named(ROWS, 0)(rows, g)[0])
    bottom = {"dims": [64, 32], "dropout": 0.2}
    return [
        ("SharedBottom", lambda: (
            tasks.SharedBottom(fields(), kinds, _mlp(), towers()), named(ROWS)
        )),
        ("ESMM", lambda: (tasks.ESMM(_sparse(), _sparse(FEW, DIM, "P"), _mlp(), _mlp()), both)),
        ("MMOE", lambda: (tasks.MMOE(fields(), kinds, 4, dict(expert), towers()), named(ROWS))),
        ("PLE", lambda: (tasks.PLE(fields(), kinds, 2, 2, 1, dict(expert), towers()), named(ROWS))),
        ("AITM", lambda: (tasks.AITM(fields(), 2, dict(bottom), towers()), named(ROWS))),
    ]  # fmt: skip


# ---------------------------------------------------------------- two towers


def _of_users(kind: type, pooling: str, *more: Any, flat: bool = False) -> Any:
    """Users by their fields and history, items, and items that were not taken."""

    def make() -> Made:
        user, past = _sparse(FEW, DIM, "U"), _past("item", ITEMS, pooling)
        item = [SparseFeature("item", ITEMS, embed_dim=DIM)]
        others = SequenceFeature(
            "neg_items", ITEMS, embed_dim=DIM, pooling="concat", shared_with="item"
        )
        lists = [[*user, past], item, [others]] if flat else [user, [past], item, [others]]
        return kind(*lists, *more), _of_items()

    return make


def _of_items() -> Inputs:
    return joined(named(FEW, 0, "U"), lambda rows, g: {
        "hist_item": history(rows, ITEMS, g)[0],
        "item": ids(rows, ITEMS, g, 1),
        "kind": ids(rows, KINDS, g, 1),
        "neg_items": torch.randint(1, ITEMS, (rows, 3), generator=g),
    })  # fmt: skip


def _dssm() -> Made:
    item = [
        SparseFeature("item", ITEMS, embed_dim=DIM),
        SparseFeature("kind", KINDS, embed_dim=DIM),
    ]
    user = [*_sparse(FEW, DIM, "U"), _past("item", ITEMS, "mean")]
    towers = ({"dims": [64, 32], "activation": "prelu"} for _ in range(2))
    return matching.DSSM(user, item, *towers), _of_items()


def _matching() -> list[tuple[str, Any]]:
    tower = {"dims": [64, DIM], "activation": "prelu"}
    return [
        ("DSSM", _dssm),
        ("YoutubeDNN", _of_users(matching.YoutubeDNN, "mean", tower, 0.05, flat=True)),
        ("GRU4Rec", _of_users(matching.GRU4Rec, "concat", {"dims": [64, DIM], "dropout": 0.1})),
        ("ComirecSA", _of_users(matching.ComirecSA, "concat")),
        ("MIND", _of_users(matching.MIND, "concat", HISTORY)),
    ]


def subjects() -> list[Subject]:
    return listed("rechub", [*_ranking(), *_tasks(), *_matching()])
