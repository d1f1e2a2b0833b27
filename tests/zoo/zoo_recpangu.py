"""The models of rec_pangu: a dict of columns, labels among them, and the loss is a result."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from zoo_absent import without
from zoo_data import (
    DEEP,
    DIM,
    FEW,
    HISTORY,
    NUMBERS,
    ROWS,
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


def _models() -> tuple[Any, Any, Any]:
    """Its packages of models, without what importing the library itself does: it asks its index
    for a newer version.
    """
    spec = importlib.util.find_spec("rec_pangu")
    if spec is None:
        raise ImportError("No module named 'rec_pangu'")
    package = ModuleType("rec_pangu")
    package.__path__ = list(spec.submodule_search_locations or [])
    package.__spec__ = ModuleSpec("rec_pangu", None, is_package=True)
    sys.modules["rec_pangu"] = package
    with without("dgl", "loguru"):
        import rec_pangu.models.multi_task as tasks
        import rec_pangu.models.ranking as ranking
        import rec_pangu.models.sequence as sequence
    return ranking, tasks, sequence


ranking, tasks, sequence = _models()


# ---------------------------------------------------------------- rows of fields


def _fields(rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    return {
        **{f"C{k}": {"vocab_size": n} for k, n in enumerate(rows)},
        **{f"I{k}": {"min": 0, "max": 1} for k in range(NUMBERS)},
    }


def _rows(rows: tuple[int, ...]) -> Inputs:
    labels = ("label", "task1_label", "task2_label")
    return joined(named(rows), lambda n, g: {name: ids(n, 2, g).float() for name in labels})


def _of(kind: type, rows: tuple[int, ...] = ROWS, **options: Any) -> Any:
    return lambda: (
        kind(embedding_dim=DIM, enc_dict=_fields(rows), **options), _rows(rows)
    )  # fmt: skip


# ---------------------------------------------------------------- histories

ITEMS = 3000  # every one of which is scored for every row


def _clicks(rows: int, g: Draw) -> tuple[Any, ...]:
    """Items in order, padded behind, and the one that was clicked next."""
    past, _ = history(rows, ITEMS, g)
    return ({
        "hist_item_list": past, "hist_mask_list": (past > 0).long(),
        "target_item": ids(rows, ITEMS, g, 1).unsqueeze(1),
    },)  # fmt: skip


def _after(kind: type, **options: Any) -> Any:
    config = {
        "embedding_dim": 32, "max_length": HISTORY, "device": torch.device("cpu"), "K": 4,
        "item_col": "item", "cate_cols": [], **options,
    }  # fmt: skip

    return lambda: (kind({"item": {"vocab_size": ITEMS}}, config), _clicks)


def _serving(make: Callable[[], Made]) -> Callable[[], Made]:
    """Without the loss: ``is_training=False``."""

    def made() -> Made:
        model, inputs = make()
        return model, lambda rows, g: (*inputs(rows, g), False)

    return made


def subjects() -> list[Subject]:
    # Left out: LR, whose constructor raises; those of session graphs (SRGNN, GCSAN, NISER), which
    # dgl computes; CMI, which writes to its tables at each call; the loss of MMOE, which adds 1e-6
    # to probabilities of 1. The others that only serve here loop over the batch in their loss: of
    # IOCRec and ContraRec a step takes seconds, and Re4, MIND and ComiRec are captured in part.
    deep: dict[str, Any] = {"hidden_units": list(DEEP)}
    dnn: dict[str, Any] = {"dnn_hidden_units": list(DEEP)}
    towers: dict[str, Any] = {"hidden_dim": list(DEEP)}
    loss = ("YotubeDNN", "NARM", "SASRec", "NextItNet", "STAMP", "GRU4Rec", "SINE", "CLRec")
    serve = ("Re4", "MIND", "ComirecSA", "ComirecDR", "IOCRec", "ContraRec")
    return listed("recpangu", [
        ("WDL", _of(ranking.WDL, **deep)),
        ("DeepFM", _of(ranking.DeepFM, **deep)),
        ("NFM", _of(ranking.NFM, **deep)),
        ("FiBiNet", _of(ranking.FiBiNet, FEW, **deep)),
        ("AFM", _of(ranking.AFM, FEW)),
        ("AFN", _of(ranking.AFN, FEW)),
        ("AOANet", _of(ranking.AOANet, **dnn)),
        ("AutoInt", _of(ranking.AutoInt, attention_layers=2, num_heads=2, **dnn)),
        ("CCPM", _of(ranking.CCPM)),
        ("FM", _of(ranking.FM)),
        ("xDeepFM", _of(ranking.xDeepFM, **dnn)),
        ("DCN", _of(ranking.DCN)),
        ("MaskNet", _of(ranking.MaskNet, **deep)),
        ("MaskNet-serial", _of(ranking.MaskNet, use_parallel=False, **deep)),
        ("AITM", _of(tasks.AITM, tower_dims=[*DEEP, 64])),
        ("ESSM", _of(tasks.ESSM, **towers)),
        ("MLMMOE", _of(tasks.MLMMOE, **towers)),
        ("MMOE-serve", _serving(_of(tasks.MMOE, **towers))),
        ("OMOE", _of(tasks.OMOE, **towers)),
        ("ShareBottom", _of(tasks.ShareBottom, **deep)),
        *((name, _after(getattr(sequence, name))) for name in loss),
        *((f"{name}-serve", _serving(_after(getattr(sequence, name)))) for name in serve),
        *((f"ContraRec-{encoder}-serve", _serving(
            _after(sequence.ContraRec, encoder_name=encoder)
          )) for encoder in ("GRU4Rec", "Caser")),
    ])  # fmt: skip
