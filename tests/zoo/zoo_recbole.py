"""The models of RecBole: rows of named columns in a container; some with their loss as forward."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import recbole
import torch
import yaml
from scipy.sparse import coo_matrix, dok_matrix
from torch import Tensor, nn
from zoo_absent import without
from zoo_data import FEW, HISTORY, NUMBERS, ROWS, TAGS, Draw, Made, Subject, history, ids, listed

USERS, ITEMS, CLASSES, BUCKETS, TAKEN = 2000, 3000, 30, 8, 20000
FOLDER = Path(recbole.__file__).parent
CONTEXT = [
    "LR", "FM", "NFM", "AFM", "DeepFM", "FNN", "WideDeep", "DCN", "DCNV2", "xDeepFM", "PNN",
    "AutoInt", "FiGNN", "DSSM", "EulerNet", "KD_DAGFM", "FwFM", "FFM",
]  # fmt: skip
SEQUENTIAL = [
    "SASRec", "BERT4Rec", "GRU4Rec", "NARM", "STAMP", "Caser", "NextItNet", "SRGNN", "GCSAN",
    "FDSA", "SHAN", "HGN", "FPMC", "TransRec", "LightSANs", "CORE", "SINE", "GRU4RecF", "S3Rec",
    "DIN", "DIEN", "NPE", "FOSSIL",
]  # fmt: skip
GENERAL = [
    "BPR", "NeuMF", "ConvNCF", "CDAE", "ENMF", "NAIS", "FISM", "LINE", "NNCF", "MultiVAE",
    "MultiDAE", "MacridVAE",
]  # fmt: skip
LOSSES = {  # both ways
    "FM", "DeepFM", "AutoInt", "SASRec", "FPMC", "TransRec", "CDAE", "ENMF", "GRU4Rec", "NARM",
    "STAMP", "Caser", "NextItNet", "CORE", "SINE", "LightSANs", "NPE", "MultiVAE", "MultiDAE",
    "MacridVAE",
}  # fmt: skip
GRAPH = ["LightGCN"]  # its forward takes nothing: its loss alone

with without("ray", "thop", "plotly"):
    from recbole.data.interaction import Interaction
    from recbole.utils import FeatureSource, FeatureType

    KINDS = {
        name: getattr(importlib.import_module(f"recbole.model.{of}.{name.lower()}"), name)
        for of, names in (
            ("context_aware_recommender", CONTEXT),
            ("sequential_recommender", SEQUENTIAL),
            ("general_recommender", GENERAL + GRAPH),
        )
        for name in names
    }
if not hasattr(dok_matrix, "_update"):  # which RecBole calls, and scipy no longer has
    dok_matrix._update = lambda matrix, entries: matrix._dict.update(entries)
torch.autograd.set_detect_anomaly(False)  # sine.py switches it on, for every model of the process

CHANGED: dict[str, dict[str, Any]] = {
    "FFM": {"embedding_size": 8},
    "ConvNCF": {"embedding_size": 64},
    "NNCF": {"num_conv_kernel": 8},
    "NARM": {"hidden_size": 32},
    "DIN": {"numerical_features": []},
    "DIEN": {"numerical_features": []},
    **{name: {"hidden_size": 32, "inner_size": 64} for name in (
        "SASRec", "BERT4Rec", "GRU4Rec", "GCSAN", "FDSA", "LightSANs", "CORE", "GRU4RecF", "S3Rec"
    )},
}  # fmt: skip


class _Config(dict[str, Any]):
    """The settings of a model, as keys and as attributes; those that are not set are ``None``."""

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self if key == "final_config_dict" else self[key]


def _config(name: str) -> _Config:
    """RecBole's own settings, with dimensions of the zoo."""
    found = _Config()
    for part in ("overall", "dataset/sample", f"model/{name}"):
        found.update(yaml.safe_load((FOLDER / f"properties/{part}.yaml").read_text()) or {})
    for key, value in found.items():  # YAML takes 1e-5 for a word
        if isinstance(value, str) and value[:1].isdigit():
            found[key] = float(value)
    return _Config({
        **found, "device": torch.device("cpu"), "embedding_size": 16,
        "numerical_features": [f"number{k}" for k in range(NUMBERS)],
        "MAX_ITEM_LIST_LENGTH": HISTORY, "MASK_ITEM_SEQ": "masked", "POS_ITEMS": "pos_items",
        "NEG_ITEMS": "neg_items", "MASK_INDEX": "mask_index", "INVERSE_ITEM_SEQ": "inverse",
        **CHANGED.get(name, {}),
    })  # fmt: skip


class _Data:
    """What constructors ask of a data set: fields, sizes, and who took what."""

    uid_field, iid_field, user_num, item_num = "user_id", "item_id", USERS, ITEMS

    def __init__(self, config: _Config, rows: tuple[int, ...]) -> None:
        half = len(rows) // 2
        self.config, self.numbers = config, config["numerical_features"]
        self.user = {f"user{k}": n for k, n in enumerate(rows[:half])}
        self.item = {f"item{k}": n for k, n in enumerate(rows[half:])}
        self.sizes = {
            "user_id": USERS, "item_id": ITEMS, "class": CLASSES, **self.user, **self.item,
            "tags": TAGS, **dict.fromkeys(self.numbers, BUCKETS),
        }  # fmt: skip
        self.field2type = {
            **dict.fromkeys(self.sizes, FeatureType.TOKEN), "tags": FeatureType.TOKEN_SEQ,
            **dict.fromkeys(self.numbers, FeatureType.FLOAT), "label": FeatureType.FLOAT,
        }  # fmt: skip
        self.field2seqlen = {"item_id_list": HISTORY}
        g = np.random.default_rng(0)
        self.pairs = np.unique([g.integers(1, n, TAKEN) for n in (USERS, ITEMS)], axis=1)
        self.inter_num = self.pairs.shape[1]
        self.inter_feat = self.columns(("user_id", "item_id"), TAKEN, Draw())

    def num(self, field: str) -> int:
        return self.sizes[field]

    def fields(self, ftype: Any = None, source: Any = ()) -> list[str]:
        of = {
            FeatureSource.USER_ID: ["user_id"], FeatureSource.ITEM_ID: ["item_id"],
            FeatureSource.USER: list(self.user),
            FeatureSource.ITEM: [*self.item, "tags", *self.numbers],
        }  # fmt: skip
        return [name for kind in source for name in of.get(kind, ())]

    def columns(self, names: Any, rows: int, g: Draw) -> Any:
        """``rows`` rows of the columns ``names``; a number comes with the bucket that it is in."""
        found = {}
        for name in names:
            found[name] = ids(rows, self.sizes[name], g)
            if self.field2type[name] == FeatureType.FLOAT:
                found[name] = torch.stack([torch.rand(rows, generator=g), found[name].float()], 1)
            elif self.field2type[name] == FeatureType.TOKEN_SEQ:
                found[name] = history(rows, TAGS, g, 5)[0]
        return Interaction(found)

    def get_user_feature(self) -> Any:
        return self._of_all("user_id", USERS, list(self.user))

    def get_item_feature(self) -> Any:
        return self._of_all("item_id", ITEMS, ["class", *self.item, "tags", *self.numbers])

    def _of_all(self, key: str, rows: int, names: list[str]) -> Any:
        found = self.columns([key, *names], rows, Draw().manual_seed(0))
        found[key] = torch.arange(rows)
        return found

    def inter_matrix(self, form: str = "coo", value_field: Any = None) -> Any:
        ones = np.ones(self.inter_num, dtype=np.float32)
        return coo_matrix((ones, tuple(self.pairs)), shape=(USERS, ITEMS)).asformat(form)

    def history_item_matrix(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each user: items, padded with 0; how much of each; how many they are."""
        matrix = self.inter_matrix("csr")
        rows = [torch.from_numpy(matrix.getrow(k).indices).long() for k in range(USERS)]
        items = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return items, (items > 0).float(), torch.tensor([len(row) for row in rows])


class Loss(nn.Module):
    """The loss of a model as a forward: what RecBole's trainer calls."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, interaction: Any) -> Tensor:
        return self.model.calculate_loss(interaction)


def _fields(name: str, loss: bool) -> Made:
    """A model of rows of fields."""
    config = _config(name)
    data = _Data(config, FEW if name in ("FFM", "FwFM", "AFM", "FiGNN") else ROWS)
    model = KINDS[name](config, data)
    names = [*data.user, "user_id", *data.item, "tags", *data.numbers, "item_id"]

    def draw(rows: int, g: Draw) -> tuple[Any, ...]:
        found = data.columns(names, rows, g)
        if loss:
            found["label"] = ids(rows, 2, g).float()
        return (found,)

    return Loss(model) if loss else model, draw


ARGUMENTS = {  # of forward, and the columns that they are
    "item_seq": "item_id_list", "seq_item": "item_id_list", "neg_item_seq": "neg_item_id_list",
    "item_seq_len": "item_length", "seq_item_len": "item_length", "user": "user_id",
    "x_users": "user_id", "h": "user_id", "item": "item_id", "next_items": "item_id",
    "next_item": "item_id", "t": "item_id", "x_items": "taken", "rating_matrix": "taken",
}  # fmt: skip


def _takes(rows: int, g: Draw) -> dict[str, Tensor]:
    """Users with what they took, in order, what they take next, and what they do not."""
    past, count = history(rows, ITEMS, g)
    return {
        "user_id": ids(rows, USERS, g, 1), "item_id": ids(rows, ITEMS, g, 1),
        "neg_item_id": ids(rows, ITEMS, g, 1), "item_id_list": past, "item_length": count,
        "neg_item_id_list": history(rows, ITEMS, g)[0], "label": ids(rows, 2, g).float(),
        "taken": (torch.rand(rows, ITEMS, generator=g) < 0.01).float(),
    }  # fmt: skip


def _people(name: str, loss: bool) -> Made:
    """A model of users, items and histories."""
    config = _config(name)
    model = KINDS[name](config, _Data(config, FEW))
    asked = inspect.signature(model.forward).parameters.values()
    columns = [ARGUMENTS[p.name] for p in asked if p.default is p.empty]

    def draw(rows: int, g: Draw) -> tuple[Any, ...]:
        found = _takes(rows, g)
        return (Interaction(found),) if loss else tuple(found[c] for c in columns)

    return Loss(model) if loss else model, draw


def subjects() -> list[Subject]:
    found = []
    for names, make in ((CONTEXT, _fields), (SEQUENTIAL + GENERAL, _people)):
        for name in names:
            found.append((name, lambda name=name, make=make: make(name, False)))
            if name in LOSSES:
                found.append((f"{name}-loss", lambda name=name, make=make: make(name, True)))
    found += [(f"{name}-loss", lambda name=name: _people(name, True)) for name in GRAPH]
    return listed("recbole", found)
