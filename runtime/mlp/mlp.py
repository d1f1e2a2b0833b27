"""A chain of Linear, BatchNorm1d, activations and Dropout as one node.

``steps`` names the layers in order; ``params``, ``stats``, ``numbers`` and ``training`` are flat
lists that the steps consume from the left:

=============  =============================  ==========================================  =========
step           params                         numbers; stats                              training
=============  =============================  ==========================================  =========
linear         weight (out, in), bias?
batch_norm     weight?, bias?                 momentum?, eps; running_mean?,              one flag
                                              running_var?, num_batches_tracked?
relu sigmoid
tanh gelu silu
leaky_relu                                    slope
prelu          weight
elu                                           alpha
dropout                                       p                                           one flag
=============  =============================  ==========================================  =========

Each step means what its ``torch.nn`` module means, on a CPU dropout masks included (same seed).
What it saves over separate modules: activations are written in place into buffers of our own (never
into the caller's input), relu followed by dropout saves no mask, and the whole chain is one
autograd node. On a GPU :mod:`~recast.runtime.mlp.cuda` fuses relu and dropout into the products.

The input is (N, features), or any shape (..., features); a batch_norm of (N, C, L) has C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cublaslt, cuda_launch, gpu
from recast.runtime.mlp import (
    cuda as mlp_cuda,
)
from recast.runtime.mlp import (
    gemm,
    torch_draws,
)
from recast.runtime.mlp import (
    layers as mlp_layers,
)
from recast.runtime.mlp import (
    run as mlp_run,
)
from recast.runtime.mlp import (
    small as mlp_small,
)
from recast.runtime.mlp.chain import Chain, chain_of, parse, plain, there
from recast.runtime.mlp.samples import samples
from recast.runtime.op import Kernel, Op, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor input, Tensor?[] params, Tensor(a!)?[] stats, str[] steps, float?[] numbers,"
    " bool[] training) -> Tensor"
)

# Flops of a forward from which one node is faster than torch's layers in training, measured on an
# AMD EPYC core: x0.65 to x0.98 below, x1.01 to x1.09 above; Python costs 30 to 100 us per call.
FUSED_FROM = 3e8
# The same if oneDNN makes the products twice as fast (see gemm.py): torch's layers use MKL.
FUSED_FROM_ONEDNN = 2e7
# The same in numbers drawn for dropout: our kernel saves 10 ns each (see torch_draws.py).
FUSED_FROM_DRAWN = 10_000
# The same in numbers normalised: our kernel saves some 1 ns each (see batch_norm.py).
FUSED_FROM_NORMED = 65_536
# Both where torch's batch norm has AVX-512. On an Intel Xeon, chains that normalise run at x0.77 to
# x0.90 of torch's speed up to 300,000 numbers, x0.99 at 800,000, x1.05 to x1.11 above a million;
# with dropout at x0.80 to x0.92 up to 30,000 numbers, x1.14 to x1.26 from 65,000.
FUSED_FROM_NORMED_WIDE, FUSED_FROM_DRAWN_WIDE = 1 << 20, 50_000
# The same in numbers that a prelu takes: our backward saves 4 ns each (see prelu_backward.py).
FUSED_FROM_BENT = 20_000


def reference(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """Plain torch, layer by layer. Raises InputError for steps or lists that do not fit."""
    return _one_by_one(chain_of(params, stats, steps, numbers, training), input)


def _one_by_one(chain: Chain, input: Tensor) -> Tensor:
    x = input
    for step in chain.steps:
        x = plain(chain, step, x)
    # The result of an op never aliases its input.
    return x.clone() if x is input else x


def fake(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """Shape and dtype of the result."""
    width = input.shape[-1]
    for step in parse(tuple(steps)).steps:
        weight = params[step.param] if step.name == "linear" else None
        width = width if weight is None else weight.shape[0]
    return input.new_empty((*input.shape[:-1], width))


def forward(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """The result, not recorded by autograd."""
    runs = gpu.serving(input)
    here = input.is_cpu and runs is None
    if here and not device.forced():
        small = mlp_small.result(input, params, steps, training)
        if small is not None:
            return small
    chain = chain_of(params, stats, steps, numbers, training)
    whole = mlp_layers.forward(chain, input, steps) if here else None
    if whole is not None:
        return whole
    if runs is not None and mlp_cuda.takes(chain, input):
        return mlp_cuda.forward(runs, chain, input)
    if input.is_cuda:
        return reference(input, params, stats, steps, numbers, training)
    return mlp_run.result(chain, input)


def differentiable(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((input, params)):
        return forward(input, params, stats, steps, numbers, training)
    chain = chain_of(params, stats, steps, numbers, training)
    if (runs := gpu.serving(input)) is not None and mlp_cuda.takes(chain, input):
        return mlp_cuda.MlpCuda.apply(runs, chain, None, input, *params)
    whole = mlp_layers.result(chain, input, steps) if runs is None else None
    if whole is not None:
        return whole
    if input.is_cuda or not _pays(chain, input):
        return _one_by_one(chain, input)
    return mlp_run.Mlp.apply(chain, input, *params)


def _pays(chain: Chain, input: Tensor) -> bool:
    """Whether, on a CPU, the chain is large enough for one node to pay off."""
    held = device.held()
    if held in ("fused", "torch"):
        return held == "fused"
    per_row = 0
    for step in chain.steps:
        if step.name == "linear":
            per_row += 2 * there(chain.params[step.param]).numel()
    least = FUSED_FROM
    onednn = gemm.why_not_onednn() is None and not gemm.in_halves()
    if input.dtype is torch.float32 and onednn:
        least = min(least, FUSED_FROM_ONEDNN)
    if per_row * input.numel() >= least * input.shape[-1]:
        return True
    if _numbers(chain, input, "prelu") >= FUSED_FROM_BENT:
        return True
    if input.dtype is not torch.float32 or not any(chain.training):
        return False
    normed = 0 if device.extension() is None else _numbers(chain, input, "batch_norm")
    wide = normed > 0 and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if normed >= (FUSED_FROM_NORMED_WIDE if wide else FUSED_FROM_NORMED):
        return True
    drawn = _numbers(chain, input, "dropout") if torch_draws.why_not() is None else 0
    return drawn >= (FUSED_FROM_DRAWN_WIDE if wide else FUSED_FROM_DRAWN)


def _numbers(chain: Chain, input: Tensor, kind: str) -> int:
    """How many numbers the steps of this ``kind`` take, without those that only act in training
    and do not train.
    """
    width, taken = input.shape[-1], 0
    rows = input.numel() // max(width, 1)
    for step in chain.steps:
        if step.name == "linear":
            width = there(chain.params[step.param]).shape[0]
        elif step.name == kind and (kind == "prelu" or chain.training[step.flag]):
            taken += rows * width * (kind != "dropout" or chain.numbers[step.number] != 0)
    return taken


def autocast(dtype: torch.dtype, input: Tensor, *rest: Any) -> Tensor:
    """The call under autocast to ``dtype`` on a GPU: products are of ``dtype``, while weights and
    their gradients keep their dtypes.
    """
    params = rest[0]
    chain = chain_of(*rest)
    runs = gpu.serving(input)
    if runs is None or not mlp_cuda.takes(chain, input, dtype):
        with torch.autocast(input.device.type, dtype):
            return reference(input, *rest)
    if not wants_grad((input, params)):
        return mlp_cuda.forward(runs, chain, input, dtype)
    return mlp_cuda.MlpCuda.apply(runs, chain, dtype, input, *params)


def cost(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Cost:
    """The products of the linear layers; activations count as fused and free."""
    width = input.shape[-1]
    rows = input.numel() // max(width, 1)
    found = Cost(0, moved(input, *params))
    for step in parse(tuple(steps)).steps:
        if step.name == "linear":
            weight = there(params[step.param])
            width = weight.shape[0]
            found += Cost(2 * rows * weight.numel(), 0)
    return found + Cost(0, rows * width * input.element_size())


mlp = register(
    Op(
        name="mlp",
        random=True,
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        autocast=autocast,
        samples=samples,
        cost=cost,
        devices=("cpu", "cuda"),
        casts=True,
        kernels=(
            Kernel("cublaslt", "cuda", mlp_cuda.CUBLASLT, cublaslt.why_not),
            Kernel("plain", "cuda", mlp_cuda.PLAIN, cuda_launch.why_not),
            *cpu_kernels(mlp_layers.WHEN),
            Kernel(
                "fused", "cpu", "products large enough to be worth it; no autocast", lambda: None
            ),
            Kernel("torch", "cpu", "less work: the layers one after the other", lambda: None),
        ),
    )
)
