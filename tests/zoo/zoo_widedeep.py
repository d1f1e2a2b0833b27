"""The models of pytorch-widedeep: one matrix of floats, a column at a time."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from zoo_absent import without
from zoo_data import DEEP, DIM, FEW, NUMBERS, ROWS, Draw, Made, Subject, listed, packed

with without(
    "gensim", "spacy", "cv2", "torchvision", "sentence_transformers", "transformers", "fastparquet",
    "sentencepiece",
):  # fmt: skip
    import pytorch_widedeep.models as wide
    import pytorch_widedeep.models.rec as rec

MLP = {"mlp_hidden_dims": list(DEEP), "mlp_dropout": 0.2}


def _fields(rows: tuple[int, ...], numbers: int) -> dict[str, Any]:
    """Where each column is, and which of them hold numbers."""
    ids, floats = [f"C{k}" for k in range(len(rows))], [f"I{k}" for k in range(numbers)]
    where = {"column_idx": {name: k for k, name in enumerate([*ids, *floats])}}
    return {**where, "continuous_cols": floats} if numbers else where


def _tables(rows: tuple[int, ...], *dim: int) -> dict[str, Any]:
    return {"cat_embed_input": [(f"C{k}", n, *dim) for k, n in enumerate(rows)]}


def _of(
    kind: type, rows: tuple[int, ...] = ROWS, numbers: int = NUMBERS, dim: int = 0, **options: Any
) -> Any:
    """``dim``: of the tables where each may have its own; 0: the model asks for one."""

    def make() -> Made:
        tables = _tables(rows, *[dim] * bool(dim))
        return kind(**tables, **_fields(rows, numbers), **options), packed(rows, numbers, least=1)

    return make


def _wide_and_deep() -> Made:
    deep = wide.TabMlp(**_tables(ROWS, DIM), **_fields(ROWS, NUMBERS), **MLP)
    model = wide.WideDeep(wide=wide.Wide(sum(ROWS), 1), deeptabular=deep)
    starts = torch.tensor([0, *itertools.accumulate(ROWS[:-1])])

    def draw(rows: int, g: Draw) -> tuple[dict[str, Tensor]]:
        (x,) = packed(ROWS, NUMBERS, least=1)(rows, g)
        return ({"wide": x[:, : len(ROWS)].long() + starts, "deeptabular": x},)

    return model, draw


def subjects() -> list[Subject]:
    normed = {"cont_norm_layer": "batchnorm", **MLP}
    embedded = {"embed_continuous_method": "standard", "input_dim": DIM}
    free = {**embedded, "cont_norm_layer": None}
    blocks = {"blocks_dims": [128, 64, 32], "blocks_dropout": 0.2}
    mixed = {"low_rank": 16, "num_experts": 3, "structure": "stacked"}
    return listed("widedeep", [
        ("DeepCrossNetwork", _of(rec.DeepCrossNetwork, dim=DIM, **normed)),
        ("DeepCrossNetworkV2", _of(rec.DeepCrossNetworkV2, dim=DIM, **normed)),
        ("DeepCrossNetworkV2-mix", _of(rec.DeepCrossNetworkV2, dim=DIM, **mixed, **normed)),
        ("GatedDCN", _of(rec.GatedDeepCrossNetwork, dim=DIM, **normed)),
        ("DeepFM", _of(rec.DeepFactorizationMachine, num_factors=DIM, **normed)),
        ("AutoInt", _of(rec.AutoInt, **free)),
        ("AutoIntPlus", _of(rec.AutoIntPlus, **free, **MLP)),
        ("DeepFFM", _of(rec.DeepFieldAwareFactorizationMachine, FEW, 0, num_factors=8, **MLP)),
        ("xDeepFM", _of(
            rec.ExtremeDeepFactorizationMachine, input_dim=DIM, cin_layer_dims=[32, 32], **normed
        )),
        ("TabMlp", _of(wide.TabMlp, dim=DIM, **MLP)),
        ("TabResnet", _of(wide.TabResnet, dim=DIM, **blocks)),
        ("FTTransformer", _of(wide.FTTransformer, **embedded, n_blocks=1, n_heads=2)),
        ("TabTransformer", _of(wide.TabTransformer, input_dim=DIM, n_blocks=1, n_heads=2)),
        ("WideDeep", _wide_and_deep),
    ])  # fmt: skip
