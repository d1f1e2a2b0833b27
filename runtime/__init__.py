"""The runtime: ops, their kernels, row gradients. Importing it registers the ops with torch."""

from recast.runtime import overlap
from recast.runtime.cost import Cost
from recast.runtime.embedding import embedding_bags, embedding_cat, quantised_embedding_bags
from recast.runtime.interactions import (
    compressed_interaction,
    contraction,
    cross_matrix,
    cross_mixture,
    cross_vector,
    dot_interaction,
    fm_interaction,
    gathered_dots,
    inner_products,
    pair_products,
    scaled_einsum,
)
from recast.runtime.layers import (
    cross_entropy,
    dice,
    elementwise,
    field_attention,
    gated_activation,
    gated_sums,
    gru,
    linear_cross_entropy,
    rms_norm,
    silu_attention,
    window_conv,
)
from recast.runtime.mlp import linears, mlp, relu_dropout
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
    "cross_entropy",
    "cross_matrix",
    "cross_mixture",
    "cross_vector",
    "dice",
    "dot_interaction",
    "dropout_global",
    "elementwise",
    "embedding_bags",
    "embedding_cat",
    "field_attention",
    "fm_interaction",
    "gated_activation",
    "gated_sums",
    "gathered_dots",
    "gru",
    "inner_products",
    "linear_cross_entropy",
    "linears",
    "mlp",
    "overlap",
    "pair_products",
    "quantised_embedding_bags",
    "register",
    "relu_dropout",
    "rms_norm",
    "row_optimizer",
    "scaled_einsum",
    "silu_attention",
    "window_conv",
]
