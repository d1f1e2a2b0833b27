"""The models of deepctr-torch: one matrix of floats, cut into columns; a table for each field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from zoo_absent import without
from zoo_data import (
    DEEP,
    DIM,
    FEW,
    HISTORY,
    ITEMS,
    KINDS,
    NUMBERS,
    ROWS,
    TAGS,
    Draw,
    Made,
    Subject,
    history,
    ids,
    listed,
    packed,
)

with without("tensorflow"):
    import deepctr_torch.models as deepctr
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

WIDTH_OF_TAGS = 5


def _columns(rows: tuple[int, ...], dim: int, numbers: int, tags: int) -> list[Any]:
    found: list[Any] = [SparseFeat(f"C{k}", n, embedding_dim=dim) for k, n in enumerate(rows)]
    found += [DenseFeat(f"I{k}", 1) for k in range(numbers)]
    if tags:
        words = SparseFeat("tags", TAGS, embedding_dim=dim)
        found.append(VarLenSparseFeat(words, maxlen=tags, combiner="mean"))
    return found


def _of(
    kind: type, rows: tuple[int, ...] = ROWS, dim: int = DIM, numbers: int = NUMBERS,
    tags: int = WIDTH_OF_TAGS, lists: int = 2, **options: Any,
) -> Any:  # fmt: skip
    """A model that takes ``lists`` lists of columns: those of its linear part, and all."""

    def make() -> Made:
        columns = _columns(rows, dim, numbers, tags)
        return kind(*[columns] * lists, **options), packed(rows, numbers, tags)

    return make


def _mlr() -> Made:
    columns = _columns(ROWS, DIM, NUMBERS, 0)
    return deepctr.MLR(columns, columns, bias_feature_columns=columns[:1]), packed(ROWS)


def _of_histories(kind: type, **options: Any) -> Any:
    """A model of a user's click history, by item and by category."""

    def make() -> Made:
        few = FEW[:8]
        columns: list[Any] = [SparseFeat(f"C{k}", n, embedding_dim=8) for k, n in enumerate(few)]
        columns += [
            SparseFeat("item", ITEMS, embedding_dim=16), SparseFeat("kind", KINDS, embedding_dim=8),
            DenseFeat("price", 1),
        ]  # fmt: skip
        for name, rows, dim in (("item", ITEMS, 16), ("kind", KINDS, 8)):
            past = SparseFeat(f"hist_{name}", rows, embedding_dim=dim, embedding_name=name)
            columns.append(VarLenSparseFeat(past, HISTORY, length_name="seq_length"))
        model = kind(columns, ["item", "kind"], dnn_hidden_units=DEEP, dnn_dropout=0.2, **options)

        def draw(rows: int, g: Draw) -> tuple[Tensor]:
            items, count = history(rows, ITEMS, g)
            kinds = torch.randint(1, KINDS, items.shape, generator=g) * (items > 0)
            parts = [ids(rows, n, g).unsqueeze(1) for n in few]
            parts += [ids(rows, n, g, 1).unsqueeze(1) for n in (ITEMS, KINDS)]
            parts += [torch.rand(rows, 1, generator=g), items, count.unsqueeze(1), kinds]
            return (torch.cat([part.float() for part in parts], 1),)

        return model, draw

    return make


def subjects() -> list[Subject]:
    deep = {"dnn_hidden_units": DEEP, "dnn_dropout": 0.2}
    tower = {"tower_dnn_hidden_units": (64,), "dnn_dropout": 0.2}
    plain = {"tags": 0, "lists": 2}
    return listed("deepctr", [
        ("WDL", _of(deepctr.WDL, **deep)),
        ("DeepFM", _of(deepctr.DeepFM, **deep, dnn_use_bn=True)),
        ("xDeepFM", _of(deepctr.xDeepFM, **deep, cin_layer_size=(64, 64))),
        ("AFM", _of(deepctr.AFM, numbers=0, afm_dropout=0.2)),
        ("DIFM", _of(deepctr.DIFM, **deep)),
        ("IFM", _of(deepctr.IFM, **deep)),
        ("AutoInt", _of(deepctr.AutoInt, **deep)),
        ("DCN-vector", _of(deepctr.DCN, **deep, cross_parameterization="vector")),
        ("DCN-matrix", _of(deepctr.DCN, **deep, cross_parameterization="matrix")),
        ("DCNMix", _of(deepctr.DCNMix, **deep)),
        ("FiBiNET-all", _of(deepctr.FiBiNET, **deep, bilinear_type="all")),
        ("FiBiNET-each", _of(deepctr.FiBiNET, **deep, bilinear_type="each")),
        ("FiBiNET-interaction", _of(deepctr.FiBiNET, **deep, bilinear_type="interaction")),
        ("NFM", _of(deepctr.NFM, **deep, bi_dropout=0.2)),
        ("MLR", _mlr),
        ("ONN", _of(deepctr.ONN, FEW, 8, **plain, **deep, dnn_use_bn=True)),
        ("PNN-inner", _of(deepctr.PNN, lists=1, **deep)),
        ("PNN-outer", _of(deepctr.PNN, lists=1, **deep, use_inner=False, use_outter=True)),
        ("CCPM", _of(deepctr.CCPM, numbers=0, dnn_hidden_units=(128,), dnn_dropout=0.2)),
        ("AFN", _of(deepctr.AFN, ltl_hidden_size=64, afn_dnn_hidden_units=DEEP, dnn_dropout=0.2)),
        ("SharedBottom", _of(
            deepctr.SharedBottom, lists=1, **tower, bottom_dnn_hidden_units=DEEP
        )),
        ("ESMM", _of(deepctr.ESMM, lists=1, tower_dnn_hidden_units=DEEP, dnn_dropout=0.2)),
        ("MMOE", _of(deepctr.MMOE, lists=1, **tower, expert_dnn_hidden_units=DEEP)),
        ("PLE", _of(deepctr.PLE, lists=1, **tower, expert_dnn_hidden_units=DEEP)),
        ("DIN", _of_histories(deepctr.DIN, att_weight_normalization=True)),
        ("DIEN", _of_histories(deepctr.DIEN, gru_type="AUGRU")),
    ])  # fmt: skip
