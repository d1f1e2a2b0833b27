"""The runtime: operations, their kernels, row gradients. Importing it registers the ops."""

from recast.runtime import (
    compressed_interaction,
    contraction,
    dot_interaction,
    embedding_bags,
    fm_interaction,
    inner_products,
    mlp,
    overlap,
    quantised_embedding_bags,
    relu_dropout,
    row_optimizer,
)
from recast.runtime.cost import Cost
from recast.runtime.op import OPS, Kernel, Op, Sample, register

__all__ = [
    "OPS",
    "Cost",
    "Kernel",
    "Op",
    "Sample",
    "compressed_interaction",
    "contraction",
    "dot_interaction",
    "embedding_bags",
    "fm_interaction",
    "inner_products",
    "mlp",
    "overlap",
    "quantised_embedding_bags",
    "register",
    "relu_dropout",
    "row_optimizer",
]
