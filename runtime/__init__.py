"""The runtime: operations, their kernels, row gradients. Importing it registers the ops."""

from recast.runtime import dot_interaction, embedding_bags, mlp, relu_dropout, row_optimizer
from recast.runtime.cost import Cost
from recast.runtime.op import OPS, Kernel, Op, Sample, register

__all__ = [
    "OPS",
    "Cost",
    "Kernel",
    "Op",
    "Sample",
    "dot_interaction",
    "embedding_bags",
    "mlp",
    "register",
    "relu_dropout",
    "row_optimizer",
]
