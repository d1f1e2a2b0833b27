"""The models of torchctr: offsets are tensors that the model holds as an attribute."""

from __future__ import annotations

from typing import Any

import torchctr.models as ctr
from zoo_data import DEEP, DIM, FEW, ROWS, Made, Subject, columns, listed


def _printable(kind: type) -> type:
    """``kind`` with a printable name: the library prints models before they can be printed."""
    return type(kind.__name__, (kind,), {"__str__": lambda self: kind.__name__})


def _of(kind: type, rows: tuple[int, ...] = ROWS, **options: Any) -> Any:
    def make() -> Made:
        return _printable(kind)(feature_dims=list(rows), **options), columns(rows)

    return make


def subjects() -> list[Subject]:
    deep = {"embed_dim": DIM, "hidden_dims": list(DEEP)}
    return listed("torchctr", [
        ("LR", _of(ctr.LogisticRegression)),
        ("FM", _of(ctr.FactorizationMachine, embed_dim=DIM)),
        ("WideDeep", _of(ctr.WideAndDeepModel, **deep)),
        ("DeepFM", _of(ctr.DeepFactorizationMachine, **deep)),
        ("NFM", _of(ctr.NeuralFactorizationMachine, **deep)),
        ("FFM", _of(ctr.FieldAwareFactorizationMachine, FEW, embed_dim=8)),
    ])  # fmt: skip
