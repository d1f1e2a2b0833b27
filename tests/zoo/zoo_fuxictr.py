"""The models of FuxiCTR: a tuple of columns, of the columns of all items met, and of their mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from zoo_absent import without
from zoo_data import (
    DEEP,
    DIM,
    FEW,
    ITEMS,
    KINDS,
    NUMBERS,
    Draw,
    Made,
    Subject,
    history,
    ids,
    listed,
    named,
)

with without("polars", "ray"):
    from fuxictr.features import FeatureMap
    from model_zoo import LongCTR as models

# What a trainer of the library wants to know.
TRAINED = {
    "optimizer": "SGD", "loss": "binary_crossentropy", "metrics": ["AUC"], "verbose": 0,
    "model_root": ".",
}  # fmt: skip


def _features() -> Any:
    found = FeatureMap("zoo", ".")
    found.labels, found.default_emb_dim = ["clicked"], DIM
    for k, rows in enumerate(FEW):
        found.features[f"C{k}"] = {"type": "categorical", "source": "user", "vocab_size": rows}
    for k in range(NUMBERS):
        found.features[f"I{k}"] = {"type": "numeric", "source": "user"}
    for name, rows in (("item", ITEMS), ("kind", KINDS)):
        found.features[name] = {
            "type": "categorical", "source": "item", "vocab_size": rows, "padding_idx": 0,
        }  # fmt: skip
    found.num_fields = found.get_num_fields()
    found.set_column_index()
    return found


def _clicks(rows: int, g: Draw) -> tuple[Any, ...]:
    """Each row's clicks, oldest first and padded in front, then the item it is asked about."""
    (columns,) = named(FEW)(rows, g)
    past = history(rows, ITEMS, g)[0].flip(1)
    mask = past > 0
    kinds = torch.randint(1, KINDS, past.shape, generator=g) * mask
    items: dict[str, Tensor] = {
        name: torch.cat([seen, ids(rows, most, g, 1).unsqueeze(1)], 1).flatten()
        for name, seen, most in (("item", past, ITEMS), ("kind", kinds, KINDS))
    }
    return ((columns, items, mask.float()),)


def _of(kind: type, **options: Any) -> Any:
    def make() -> Made:
        return kind(_features(), embedding_dim=DIM, **TRAINED, **options), _clicks

    return make


def subjects() -> list[Subject]:
    # SDIM is left out: it sums rows of what it computed, by functional.embedding_bag, and so has
    # a lookup of no table.
    deep = {"dnn_hidden_units": list(DEEP), "net_dropout": 0.2}
    cross = {
        "stacked_dnn_hidden_units": list(DEEP), "parallel_dnn_hidden_units": list(DEEP),
        "net_dropout": 0.2,
    }  # fmt: skip
    nearest = {"topk": 5, "short_seq_len": 6, "num_heads": 2, **deep}
    return listed("fuxictr", [
        *((f"DCNv2-{way}", _of(models.DCNv2, model_structure=way, **cross))
          for way in ("crossnet_only", "stacked", "parallel", "stacked_parallel")),
        ("DCNv2-mix", _of(models.DCNv2, use_low_rank_mixture=True, batch_norm=True, **cross)),
        *((f"DIEN-{cell}", _of(models.DIEN, gru_type=cell, **deep))
          for cell in ("GRU", "AGRU", "AUGRU")),
        ("DIEN-din", _of(
            models.DIEN, attention_type="din_attention", enable_sum_pooling=True, **deep
        )),
        ("DIN", _of(models.DIN, **deep)),
        ("DIN-softmax", _of(
            models.DIN, din_use_softmax=True, dnn_activations="Dice",
            attention_hidden_units=[64, 16], **deep
        )),
        ("ETA", _of(models.ETA, **nearest)),
        ("FinalMLP", _of(models.FinalMLP, use_fs=False, num_heads=4, mlp1_dropout=0.1)),
        ("MIRRN", _of(models.MIRRN, **{**nearest, "topk": 6})),
        ("SIM", _of(models.SIM, **nearest)),
        ("TWIN", _of(models.TWIN, **nearest)),
        ("TransAct", _of(
            models.TransAct, num_heads=2, dim_feedforward=64, dcn_hidden_units=list(DEEP)
        )),
    ])  # fmt: skip
