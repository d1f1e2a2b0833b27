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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device
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
from recast.runtime.mlp.chain import ARITY, Chain, Step, there
from recast.runtime.mlp.mask import Finish, Gate
from recast.runtime.mlp.one_output import Layer
from recast.runtime.mlp.relu_dropout import check as check_probability
from recast.runtime.mlp.run import (
    BACKWARD,
    RUN,
    Info,
    Need,
    State,
    again,
    backward_activation,
    differentiated,
    needs_of,
    run_activation,
    versions,
)

CUBLASLT = "float32, float16 and bfloat16; each product that timing finds faster this way"
PLAIN = "the others of these: torch's products with a kernel behind them"

_CASTS = frozenset({"linear", "prelu"})  # layers that autocast computes in its own dtype


class Stage(NamedTuple):
    """Layers that run together."""

    kind: str  # "linear"; "mask": dropout, perhaps after relu, without linear; "step": torch's own
    at: int  # index of its first step in the chain
    relu: bool = False
    p: float = 0.0  # of its dropout; 0: none

    @property
    def masked(self) -> bool:
        return self.relu or self.p > 0


def stages(chain: Chain) -> tuple[Stage, ...]:
    """The chain cut into stages; dropouts that do nothing are left out.

    Raises InputError for a p outside [0, 1].
    """
    drops = tuple(
        (chain.number(step.number), chain.training[step.flag])
        for step in chain.steps
        if step.name == "dropout"
    )
    return _stages(chain.steps, drops)


@lru_cache(maxsize=1024)
def _stages(steps: tuple[Step, ...], drops: tuple[tuple[float, bool], ...]) -> tuple[Stage, ...]:
    found: list[Stage] = []
    left = iter(drops)
    for i, step in enumerate(steps):
        last = found[-1] if found else None
        if step.name == "dropout":
            p, training = next(left)
            check_probability(p)
            if not training or p == 0:
                continue
            if last is not None and last.kind == "step" and steps[last.at].name == "relu":
                found[-1] = Stage("mask", last.at, relu=True, p=p)
            elif last is not None and last.kind == "linear" and not last.p:
                found[-1] = last._replace(p=p)
            else:
                found.append(Stage("mask", i, p=p))
        elif step.name == "relu" and last is not None and last.kind == "linear" and not last.masked:
            found[-1] = last._replace(relu=True)
        else:
            found.append(Stage("linear" if step.name == "linear" else "step", i))
    return tuple(found)


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


Kept = list[Tensor | None]


class Memory(NamedTuple):
    """What a stage must remember about its relu and dropout."""

    keeps: bool  # anything at all
    by_output: bool = False  # its output is kept until backward anyway, and serves as the mask
    sums: torch.dtype | None = None  # dtype of its bias gradient; None: not wanted


_NOTHING = Memory(False)


def _memories(chain: Chain, parts: Sequence[Stage], needs: Sequence[Need]) -> tuple[Memory, ...]:
    """The memory of each stage; ``chain`` holds the original weights, not cast ones."""
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
        found.append(Memory(keeps, by_output, None if bias is None else bias.dtype))
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
    memories: Sequence[Memory] | None,
) -> tuple[Tensor, list[Kept], list[Record]]:
    """The result, and per stage what backward may need.

    A "linear" stage keeps [input, mask, weight, output], with input and weight padded if they were
    for the product, and the output if it serves as the mask; a "mask" stage keeps [mask], a "step"
    its tape. ``memories`` None: there will be no backward.
    """
    seed = mlp_mask.seed_for(input) if any(stage.p for stage in parts) else None
    kept: list[Kept] = []
    records: list[Record] = []
    x, ours = input, False  # ours: a buffer of this call that backward does not need
    for number, stage in enumerate(parts):
        step, memory = chain.steps[stage.at], memories[number] if memories else _NOTHING
        shape, dtype, info = x.shape, x.dtype, Info()
        if stage.kind == "linear":
            weight = there(chain.params[step.param])
            if number:
                flat, weight = mlp_products.rows(x.to(weight.dtype)), mlp_products.rows(weight)
            else:
                flat, weight = mlp_aligned.operands(gpu, x, weight, memories is not None)
            bias = chain.params[step.param + 1]
            bias = None if bias is None else bias.contiguous()
            by_output = memory.by_output and memory.keeps
            if by_output:
                above = chain.steps[parts[number + 1].at] if number + 1 < len(parts) else None
                by_output = mlp_products.by_output(
                    gpu, flat, weight, bias,
                    None if above is None else there(chain.params[above.param]), memory.sums,
                )  # fmt: skip
            after = mlp_products.After(stage.relu, stage.p, number)
            if stage.masked or len(weight) > 1:
                y, bits = mlp_products.forward(
                    gpu, flat, weight, bias, after, seed, memory.keeps and not by_output
                )
            else:
                y, bits = mlp_one_output.forward(gpu, flat, weight, bias), None
            x, ours = (y if len(shape) == 2 else y.view(*shape[:-1], y.shape[1])), True
            kept.append([flat, bits, weight, x if by_output else None])
        elif stage.kind == "mask":
            x, bits = mlp_mask.dropout(
                gpu, x, ours, stage.relu, stage.p, seed, number, memory.keeps
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
        memories = _memories(chain, parts, ctx.needs)
        out, kept, ctx.records = _run(gpu, cast, parts, input, compute, memories)
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
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable_backward(ctx, grad)
        return None, None, None, *_Backward(ctx).run(grad)

    @staticmethod
    def masks(ctx: Any) -> list[Tensor]:
        """See :func:`.mask.masks`."""
        found = []
        for stage, mine, record in zip(ctx.stages, _kept(ctx), ctx.records, strict=True):
            if stage.p:
                linear = stage.kind == "linear"
                weight = ctx.chain.params[ctx.chain.steps[stage.at].param] if linear else None
                width = record.shape[-1] if weight is None else weight.shape[0]
                bits = mlp_mask.unpack(there(mine[1 if linear else 0]), width)
                found.append(bits.view(*record.shape[:-1], width))
        return found


def _kept(ctx: Any) -> list[Kept]:
    """What each stage kept for backward."""
    saved = iter(ctx.saved_tensors[1:])
    return [[next(saved) if there else None for there in mine] for mine in ctx.present]


class _Backward:
    """One run through the stages from the last to the first, without a graph."""

    def __init__(self, ctx: Any) -> None:
        self.gpu, self.chain, self.needs = ctx.gpu, ctx.chain, ctx.needs
        self.stages, self.records, self.kept = ctx.stages, ctx.records, _kept(ctx)
        self.wants_input = ctx.needs_input_grad[3]
        self.grads: list[Tensor | None] = [None] * len(ctx.versions)
        # The gradient of the current stage's output, and whether it is a buffer of this call.
        self.g: Tensor | None = None
        self.ours = False
        # Whether the stage above has applied this stage's mask to it, and the bias gradient if so.
        self.masked = False
        self.sums: Tensor | None = None
        self.unfinished: list[Finish] = []  # sums that are not needed before the end
        self.reads: list[object] = []  # what the second stream reads

    def run(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input and of the params."""
        self.g = grad
        for i in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[i]
            if not self.needs[stage.at].any:
                self.g = None
            if self.g is None:
                break
            if stage.kind == "linear":
                self._linear(i, self.g)
            elif stage.kind == "mask":
                self._mask(i, self.g)
            else:
                self._step(i, self.g)
        for finish in self.unfinished:
            finish()
        if self.reads:
            self.gpu.join(())
            self.reads.clear()
        return (self.g if self.wants_input else None, *self.grads)

    def _linear(self, i: int, g: Tensor) -> None:
        stage, (x, _, weight, _) = self.stages[i], self.kept[i]
        step, need = self.chain.steps[stage.at], self.needs[stage.at]
        of_weight, of_bias = self._likes(step, need)
        flat, gate = mlp_products.rows(g), self._gate(i)
        if gate is not None and not self.masked:
            flat = self._passed(flat, gate, None if of_bias is None else of_bias.dtype)
        if gate is None and need.input and of_weight is not None and x is not None:
            layer = self._one_output(i, flat, of_weight, of_bias is not None)
            found = mlp_one_output.backward(self.gpu, layer)
            if found is not None:
                self.grads[step.param], self.sums = found.weight, found.below
                self.grads[step.param + 1] = found.bias
                self._later(found.finish)
                self._goes_on(i, found.x, layer.gate)
                return
        bias_done = gate is not None
        if of_bias is not None and bias_done:
            self.grads[step.param + 1] = self.sums
        of_bias = None if bias_done else of_bias
        if of_weight is None:
            if of_bias is not None:
                self.grads[step.param + 1] = flat.sum(0, dtype=of_bias.dtype)
        else:
            x, out = there(x), of_weight.new_empty(of_weight.shape)
            sums = None if of_bias is None else out.new_empty(out.shape[0])
            self.grads[step.param] = out
            if sums is not None:
                self.grads[step.param + 1] = sums
            wide = out if x.shape[1] == out.shape[1] else out.new_empty(out.shape[0], x.shape[1])
            work = mlp_products.weight_gradient(flat, x, wide, sums)
            if wide is not out:
                work = mlp_aligned.only_columns(work, wide, out)
            if need.input:
                self._beside(work, flat, x, wide)
            else:
                if self.unfinished:
                    self._beside(None)
                work()
        self.g, self.masked, self.sums = None, False, None
        if need.input:
            under, of_below = self._below(i)
            dx, self.sums, finish = mlp_products.input_gradient(
                self.gpu, flat, there(weight), under, of_below
            )
            self._later(finish)
            self._goes_on(i, dx, under)

    def _gate(self, i: int) -> Gate | None:
        """The gate of stage i's relu and dropout; None if it has neither."""
        stage, mine = self.stages[i], self.kept[i]
        bits, out = (mine[1], mine[3]) if stage.kind == "linear" else (mine[0], None)
        if not stage.masked or (bits is None and out is None):
            return None
        return Gate(bits, None if out is None else mlp_mask.flat(out), mlp_mask.scale_of(stage.p))

    def _below(self, i: int) -> tuple[Gate | None, torch.dtype | None]:
        """The gate of the stage below i, and the dtype of its bias gradient."""
        gate = self._gate(i - 1) if i else None
        if gate is None or self.stages[i - 1].kind != "linear":
            return gate, None
        step = self.chain.steps[self.stages[i - 1].at]
        wanted = self._likes(step, self.needs[self.stages[i - 1].at])[1]
        return gate, None if wanted is None else wanted.dtype

    def _one_output(self, i: int, g: Tensor, like: Tensor, has_bias: bool) -> Layer:
        """Stage i, which keeps its input and weight and has no mask."""
        x, _, weight, _ = self.kept[i]
        under, sums = self._below(i)
        return Layer(g, there(weight), there(x), under, like, has_bias, sums)

    def _goes_on(self, i: int, dx: Tensor, under: Gate | None) -> None:
        """Go on with ``dx``, the gradient of stage i's input with the gate ``under`` applied."""
        record = self.records[i]
        self.masked, self.ours = under is not None, True
        dx = dx if dx.shape[1] == record.shape[-1] else dx[:, : record.shape[-1]]
        dx = dx if len(record.shape) == 2 else dx.view(record.shape)
        self.g = dx if dx.dtype == record.dtype else dx.to(record.dtype)

    def _later(self, finish: Finish | None) -> None:
        if finish is not None:
            self.unfinished.append(finish)

    def _beside(self, work: Finish | None, *reads: Tensor) -> None:
        """Start ``work`` and all unfinished sums on the second stream.

        They use memory of the first stream only, kept until that has waited for them: so nothing
        need be recorded with the allocator, which can reuse the memory within a capture.
        """
        with self.gpu.beside(()):
            if work is not None:
                work()
            for finish in self.unfinished:
                finish()
        self.reads += [*reads, *self.unfinished]
        self.unfinished.clear()

    def _likes(self, step: Step, need: Any) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of a linear layer, each None if its gradient is not wanted."""
        weight, bias = self.chain.params[step.param : step.param + 2]
        return weight if need.params[0] else None, bias if need.params[1] else None

    def _passed(self, flat: Tensor, gate: Gate, sums: torch.dtype | None) -> Tensor:
        """``flat`` with the gate applied; its column sums go to ``self.sums``."""
        dense = flat.contiguous()
        out = dense if self.ours or dense is not flat else torch.empty_like(dense)
        self.sums = None if sums is None else dense.new_empty(dense.shape[1], dtype=sums)
        self._later(mlp_mask.gradient(self.gpu, dense, gate, out, self.sums))
        return out

    def _mask(self, i: int, g: Tensor) -> None:
        if not self.masked:
            flat, gate = mlp_mask.flat(g.contiguous()), self._gate(i)
            assert gate is not None
            self.ours = self.ours or not g.is_contiguous()
            self.g = self._passed(flat, gate, None).view(g.shape)
            self.ours = True
        self.masked = False

    def _step(self, i: int, g: Tensor) -> None:
        stage, record = self.stages[i], self.records[i]
        step, need, (*tape, weight) = self.chain.steps[stage.at], self.needs[stage.at], self.kept[i]
        call = BACKWARD.get(step.name, backward_activation)
        self.g, found = call(self.chain, step, tape, record.info, weight, need, g, self.ours)
        if self.g is not None and self.g.dtype != record.dtype:
            self.g = self.g.to(record.dtype)
        self.ours = self.ours or self.g is not g
        self.grads[step.param : step.param + len(found)] = found


def _differentiable_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """For ``create_graph``: recompute the layers in plain torch, with the masks already drawn."""
    cast = _cast(ctx.gpu, ctx.chain, ctx.compute)
    x = source = ctx.saved_tensors[0]
    for stage, record, mine in zip(ctx.stages, ctx.records, _kept(ctx), strict=True):
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
    return differentiated(ctx, source, x, grad, ctx.needs_input_grad[3:])
