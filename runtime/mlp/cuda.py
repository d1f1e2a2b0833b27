"""Chains of layers on the GPU: a linear layer with its relu and dropout is one stage.

In forward, a stage is one product and at most one kernel. In backward, the product that computes
the gradient of a layer's input, or a kernel after it, applies mask and scale of the layer below and
sums its bias gradient (see :mod:`~recast.runtime.mlp.products`), while the weight gradients run in
parallel on a second stream. For relu and dropout together, one bit per element is saved
(:mod:`~recast.runtime.mlp.mask`); for relu alone the same, or nothing if its output is saved in any
case. All other layers are torch's own calls, as on a CPU.

Dropout masks differ from those of ``torch.nn.Dropout`` on a GPU, but follow the same seed: each
call draws one number from torch's generator for the device, which :func:`torch.manual_seed` sets.

Tested on the emulator, with a stand-in for cublasLt, and on an H100 and an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp import (
    aligned as mlp_aligned,
)
from recast.runtime.mlp import (
    casts as mlp_casts,
)
from recast.runtime.mlp import (
    mask as mlp_mask,
)
from recast.runtime.mlp import (
    one_output as mlp_one_output,
)
from recast.runtime.mlp import (
    products as mlp_products,
)
from recast.runtime.mlp.chain import ARITY, Chain, there
from recast.runtime.mlp.cuda_backward import Backward, Saved, saved_of
from recast.runtime.mlp.run import (
    RUN,
    Info,
    Need,
    State,
    again,
    apart,
    needs_of,
    no_view,
    run_activation,
    versions,
)
from recast.runtime.mlp.stages import Stage, stages

CUBLASLT = "float32, float16 and bfloat16; each product that timing finds faster this way"
PLAIN = "the others of these: torch's products with a kernel behind them"

_CASTS = frozenset({"linear", "prelu"})  # layers that autocast computes in its own dtype


def takes(chain: Chain, input: Tensor, compute: torch.dtype | None = None) -> bool:
    """Whether this file supports the chain: its dtypes and sizes, and no empty product.

    ``compute``: the dtype of products under autocast. Also False if the operands do not fit
    together: torch's own layers then raise the error.
    """
    dtypes = mlp_mask.CODES
    dtype = compute or input.dtype
    if device.held() == "torch" or dtype not in dtypes or input.dtype not in dtypes:
        return False
    if not input.numel() or not input.dim() or not mlp_mask.fits(input):
        return False
    width, where = input.shape[-1], input.device
    for step in chain.steps:
        if step.name != "linear":
            continue
        weight, bias = chain.params[step.param], chain.params[step.param + 1]
        if weight is None or weight.dim() != 2 or weight.shape[1] != width:
            return False
        width = weight.shape[0]
        if width > mlp_mask.MOST:
            return False
        if bias is not None and bias.shape != (width,):
            return False
        for t in (weight,) if bias is None else (weight, bias):
            fits = t.dtype == dtype or (compute is not None and t.dtype in dtypes)
            if not fits or not t.numel() or t.device != where:
                return False
    return True


def _cast(gpu: Gpu, chain: Chain, compute: torch.dtype | None) -> Chain:
    """The chain with its weights cast to autocast's dtype; the weight of a linear layer that comes
    first may be padded with zero columns.
    """
    if compute is None:
        return chain
    params = list(chain.params)
    places = [
        i
        for step in chain.steps
        if step.name in _CASTS
        for i in range(step.param, step.param + ARITY[step.name][0])
    ]
    found = [(i, t) for i in places if (t := params[i]) is not None and t.dtype != compute]
    if found and not torch.is_grad_enabled() and all(mlp_casts.takes(t) for _, t in found):
        first = params[0] if chain.steps[0].name == "linear" else None
        casts = mlp_casts.every(gpu, [t for _, t in found], compute, first)
    else:
        casts = [t.to(compute) for _, t in found]
    for (i, _), t in zip(found, casts, strict=True):
        params[i] = t
    return Chain(chain.steps, params, chain.stats, chain.numbers, chain.training)


# ---------------------------------------------------------------- forward


class Record(NamedTuple):
    """What a stage keeps for backward, besides tensors."""

    shape: torch.Size  # of its input
    dtype: torch.dtype
    info: Info


class MaskNeed(NamedTuple):
    """What a stage must keep of its relu and dropout for backward."""

    keeps: bool  # anything at all
    by_output: bool = False  # its output is kept until backward anyway, and serves as the mask
    sums: torch.dtype | None = None  # dtype of its bias gradient; None: not wanted


_NOTHING = MaskNeed(False)


def _mask_needs(
    chain: Chain, parts: Sequence[Stage], needs: Sequence[Need]
) -> tuple[MaskNeed, ...]:
    """What each stage keeps of its mask; ``chain`` holds the original weights, not cast ones."""
    found = []
    for i, stage in enumerate(parts):
        step, need = chain.steps[stage.at], needs[stage.at]
        above = parts[i + 1] if i + 1 < len(parts) else None
        # The result of the call is kept by its readers anyway; if it has none, it is small.
        lasts = above is None or (above.kind == "linear" and needs[above.at].params[0])
        linear = stage.kind == "linear"
        bias = chain.params[step.param + 1] if linear and need.params[1] else None
        # create_graph needs the dropout masks too.
        keeps = stage.masked and (need.any or stage.p > 0)
        by_output = linear and stage.relu and not stage.p and lasts
        found.append(MaskNeed(keeps, by_output, None if bias is None else bias.dtype))
    return tuple(found)


def forward(gpu: Gpu, chain: Chain, input: Tensor, compute: torch.dtype | None = None) -> Tensor:
    """The result, not recorded by autograd. ``compute``: the dtype of products under autocast."""
    return _run(gpu, _cast(gpu, chain, compute), stages(chain), input, compute, None)[0]


def _run(
    gpu: Gpu,
    chain: Chain,
    parts: Sequence[Stage],
    input: Tensor,
    compute: torch.dtype | None,
    mask_needs: Sequence[MaskNeed] | None,
) -> tuple[Tensor, list[Saved], list[Record]]:
    """The result, and per stage what backward may need.

    A "linear" stage keeps [input, mask, weight, output], with input and weight padded if they were
    for the product, and the output if it serves as the mask; a "mask" stage keeps [mask], a "step"
    its tape. ``mask_needs`` None: there will be no backward.
    """
    seed = mlp_mask.seed_for(input) if any(stage.p for stage in parts) else None
    kept: list[Saved] = []
    records: list[Record] = []
    x, ours = input, False  # ours: a buffer of this call that backward does not need
    for number, stage in enumerate(parts):
        step, mask_need = chain.steps[stage.at], mask_needs[number] if mask_needs else _NOTHING
        shape, dtype, info = x.shape, x.dtype, Info()
        if stage.kind == "linear":
            weight = there(chain.params[step.param])
            if number:
                flat, weight = mlp_products.rows(x.to(weight.dtype)), mlp_products.rows(weight)
            else:
                flat, weight = mlp_aligned.operands(gpu, x, weight, mask_needs is not None)
            bias = chain.params[step.param + 1]
            bias = None if bias is None else bias.contiguous()
            by_output = mask_need.by_output and mask_need.keeps
            if by_output:
                above = chain.steps[parts[number + 1].at] if number + 1 < len(parts) else None
                by_output = mlp_products.by_output(
                    gpu, flat, weight, bias,
                    None if above is None else there(chain.params[above.param]), mask_need.sums,
                )  # fmt: skip
            after = mlp_products.ReluDropout(stage.relu, stage.p, number)
            if stage.masked or len(weight) > 1:
                y, bits = mlp_products.forward(
                    gpu, flat, weight, bias, after, seed, mask_need.keeps and not by_output
                )
            else:
                y, bits = mlp_one_output.forward(gpu, flat, weight, bias), None
            x, ours = (y if len(shape) == 2 else y.view(*shape[:-1], y.shape[1])), True
            kept.append([flat, bits, weight, x if by_output else None])
        elif stage.kind == "mask":
            x, bits = mlp_mask.dropout(
                gpu, x, ours, stage.relu, stage.p, seed, number, mask_need.keeps
            )
            ours = True
            kept.append([bits])
        else:
            if compute is not None and step.name in _CASTS:
                x = x.to(compute)
            state = RUN.get(step.name, run_activation)(chain, step, State(x, ours, False))
            x, ours, info = state.x, state.ours, state.info
            kept.append([*state.tape])
        records.append(Record(shape, dtype, info))
    # The result of an op never aliases its input.
    return (input.clone() if x is input else x), kept, records


# ---------------------------------------------------------------- backward


class MlpCuda(torch.autograd.Function):
    """Inputs: the gpu, the chain, autocast's dtype or None, ``input``, then all params in order."""

    @staticmethod
    def forward(
        ctx: Any,
        gpu: Gpu,
        chain: Chain,
        compute: torch.dtype | None,
        input: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        cast, parts = _cast(gpu, chain, compute), stages(chain)
        ctx.needs = needs_of(chain.steps, ctx.needs_input_grad[2:])
        mask_needs = _mask_needs(chain, parts, ctx.needs)
        out, kept, ctx.records = _run(gpu, cast, parts, input, compute, mask_needs)
        ctx.gpu, ctx.chain, ctx.compute, ctx.stages = gpu, chain, compute, parts
        ctx.versions = versions(chain)
        for stage, mine in zip(ctx.stages, kept, strict=True):
            step, need = chain.steps[stage.at], ctx.needs[stage.at]
            if stage.kind == "linear":
                mine[0] = mine[0] if need.params[0] else None
                mine[2] = mine[2] if need.input else None
            elif stage.kind == "step":
                mine[0] = mine[0] if need.keeps else None
                mine.append(cast.params[step.param] if need.weight else None)
        ctx.present = [[t is not None for t in mine] for mine in kept]
        ctx.save_for_backward(input, *(t for mine in kept for t in mine if t is not None))
        return no_view(out)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable_backward(ctx, grad)
        return None, None, None, *Backward(ctx).run(grad)

    @staticmethod
    def masks(ctx: Any) -> list[Tensor]:
        """See :func:`.mask.masks`."""
        found = []
        for stage, mine, record in zip(ctx.stages, saved_of(ctx), ctx.records, strict=True):
            if stage.p:
                linear = stage.kind == "linear"
                weight = ctx.chain.params[ctx.chain.steps[stage.at].param] if linear else None
                width = record.shape[-1] if weight is None else weight.shape[0]
                bits = mlp_mask.unpack(there(mine[1 if linear else 0]), width)
                found.append(bits.view(*record.shape[:-1], width))
        return found


def _differentiable_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """For ``create_graph``: recompute the layers in plain torch, with the masks already drawn."""
    chain, source = apart(ctx, ctx.saved_tensors[0])
    cast, x = _cast(ctx.gpu, chain, ctx.compute), source
    for stage, record, mine in zip(ctx.stages, ctx.records, saved_of(ctx), strict=True):
        step = cast.steps[stage.at]
        if ctx.compute is not None and step.name in _CASTS:
            x = x.to(ctx.compute)
        if stage.kind == "step":
            x = again(cast, step, mine[: step.slots], record.info, x)
            continue
        if stage.kind == "linear":
            x = F.linear(x, there(cast.params[step.param]), cast.params[step.param + 1])
        x = F.relu(x) if stage.relu else x
        if stage.p:
            bits = there(mine[1 if stage.kind == "linear" else 0])
            kept = mlp_mask.unpack(bits, x.shape[-1]).view(x.shape)
            x = x * kept.to(x.dtype).mul_(mlp_mask.scale_of(stage.p))
    own = [source, *chain.params]
    return partials.gradients([x], own, ctx.needs_input_grad[3:], [grad])
