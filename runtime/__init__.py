"""The runtime: operations, their kernels, row gradients. Importing it registers the ops."""

from recast.runtime import (
    compressed_interaction,
    contraction,
    cross_matrix,
    cross_mixture,
    cross_vector,
    dice,
    dot_interaction,
    embedding_bags,
    field_attention,
    fm_interaction,
    gated_sums,
    inner_products,
    linears,
    mlp,
    overlap,
    pair_products,
    quantised_embedding_bags,
    relu_dropout,
    scaled_einsum,
)
from recast.runtime.cost import Cost
from recast.runtime.op import OPS, Kernel, Op, Sample, register
from recast.runtime.ranks import batch_norm_global, dropout_global
from recast.runtime.rows import optimizer as row_optimizer

__all__ = [
    "OPS",
    "Cost",
    "Kernel",
    "Op",
    "Sample",
    "batch_norm_global",
    "compressed_interaction",
    "contraction",
    "cross_matrix",
    "cross_mixture",
    "cross_vector",
    "dice",
    "dot_interaction",
    "dropout_global",
    "embedding_bags",
    "field_attention",
    "fm_interaction",
    "gated_sums",
    "inner_products",
    "linears",
    "mlp",
    "overlap",
    "pair_products",
    "quantised_embedding_bags",
    "register",
    "relu_dropout",
    "row_optimizer",
    "scaled_einsum",
]
