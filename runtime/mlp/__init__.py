"""Chains of linear layers with their activations, batch norms and dropout.

the ops            mlp (a chain), linears (several layers on one input), relu_dropout
on a CPU           run (a chain on torch's kernels), gemm, batch_norm, small; torch_draws (dropout)
on a GPU           cuda (a chain) by stages, cuda_backward; products (of one layer, with what
                   follows) by product_ways, relu_trust and turned copies; one_output, mask, casts
"""
