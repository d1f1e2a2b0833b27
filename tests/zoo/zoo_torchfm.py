"""The models of torchfm: one table for all fields, ids shifted by the fields before."""

from __future__ import annotations

import numpy as np
from torchfm.model.afi import AutomaticFeatureInteractionModel
from torchfm.model.afm import AttentionalFactorizationMachineModel
from torchfm.model.afn import AdaptiveFactorizationNetwork
from torchfm.model.dcn import DeepCrossNetworkModel
from torchfm.model.dfm import DeepFactorizationMachineModel
from torchfm.model.ffm import FieldAwareFactorizationMachineModel
from torchfm.model.fm import FactorizationMachineModel
from torchfm.model.fnfm import FieldAwareNeuralFactorizationMachineModel
from torchfm.model.fnn import FactorizationSupportedNeuralNetworkModel
from torchfm.model.lr import LogisticRegressionModel
from torchfm.model.ncf import NeuralCollaborativeFiltering
from torchfm.model.nfm import NeuralFactorizationMachineModel
from torchfm.model.pnn import ProductNeuralNetworkModel
from torchfm.model.wd import WideAndDeepModel
from torchfm.model.xdfm import ExtremeDeepFactorizationMachineModel
from zoo_data import DEEP, DIM, FEW, ITEMS, ROWS, Subject, columns, listed

P = 0.2
PEOPLE = (50000, ITEMS)


def subjects() -> list[Subject]:
    many, few, deep = columns(ROWS), columns(FEW), list(DEEP)
    users, items = np.array([0]), np.array([1])
    return listed("torchfm", [
        ("LR", lambda: (LogisticRegressionModel(ROWS), many)),
        ("FM", lambda: (FactorizationMachineModel(ROWS, DIM), many)),
        ("FFM", lambda: (FieldAwareFactorizationMachineModel(FEW, 8), few)),
        ("FNN", lambda: (FactorizationSupportedNeuralNetworkModel(ROWS, DIM, deep, P), many)),
        ("WideDeep", lambda: (WideAndDeepModel(ROWS, DIM, deep, P), many)),
        ("IPNN", lambda: (ProductNeuralNetworkModel(ROWS, DIM, deep, P, "inner"), many)),
        ("OPNN", lambda: (ProductNeuralNetworkModel(ROWS, DIM, deep, P, "outer"), many)),
        ("FNFM", lambda: (FieldAwareNeuralFactorizationMachineModel(FEW, 8, deep, (P, P)), few)),
        ("DCN", lambda: (DeepCrossNetworkModel(ROWS, DIM, 3, deep, P), many)),
        ("AFM", lambda: (AttentionalFactorizationMachineModel(ROWS, DIM, 16, (P, P)), many)),
        ("NFM", lambda: (NeuralFactorizationMachineModel(ROWS, DIM, deep, (P, P)), many)),
        ("NCF", lambda: (
            NeuralCollaborativeFiltering(PEOPLE, users, items, DIM, [64, 64], P), columns(PEOPLE)
        )),
        ("DeepFM", lambda: (DeepFactorizationMachineModel(ROWS, DIM, deep, P), many)),
        ("xDeepFM", lambda: (
            ExtremeDeepFactorizationMachineModel(ROWS, DIM, deep, P, (64, 64), True), many
        )),
        ("AutoInt", lambda: (
            AutomaticFeatureInteractionModel(ROWS, DIM, 32, 2, 3, deep, (P, P, P)), many
        )),
        ("AFN", lambda: (AdaptiveFactorizationNetwork(ROWS, DIM, 64, deep, (P, P, P)), many)),
    ])  # fmt: skip
