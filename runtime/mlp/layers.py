"""Chains of linear layers and relu (sigmoid, tanh at a narrow end) on the CPU: one call of C++.

Without gradients, a layer may be followed by a batch norm with running statistics.

The products are our own (csrc/gemm_kernel.h): bias, relu and the relu's gradient are applied while
a tile of the result is still in registers, and all layers are one autograd node. On an AMD EPYC
with AVX2 the products are as fast as MKL's, 26 of 32 flops per cycle, and faster if a width is not
a multiple of eight; the gain is in everything between them. On an Intel Xeon with AVX-512, DLRM's
forward takes 0.78 to 0.97 of its time on MKL, at batches of 128 and 2048, and its step 0.95 to
1.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime import device, kept_memory, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.mlp import gemm
from recast.runtime.mlp.chain import Chain, Step, parse, plain, there
from recast.runtime.mlp.run import apart, versions

WHEN = (
    "linear layers with relu, or a narrow sigmoid or tanh, without gradients batch norms too;"
    " float32, where torch's are no faster"
)
# Flops of a forward from which it pays: x0.9 to x1.06 of torch's time below, down to x0.85 above.
WORTH = 1e7
# Without gradients torch's calls, one a layer, cost more than small products: rows from which it
# pays (x0.3 to x0.8 of torch's time on an Intel Xeon), and weights up to which fewer rows do (x0.3
# to x0.6; more weights are read by torch's products of few rows at a higher rate).
WORTH_ROWS = 16
WORTH_WEIGHTS = 1 << 15
# Rows whose gradients go back through all layers at once: they stay in the caches, and their buffer
# does not grow with the batch (16,384 rows of DLRM's chains: x0.73 and x0.84).
_BLOCK = 1024
_THENS = {"relu": "r", "sigmoid": "s", "tanh": "t"}


@cache
def why_not() -> str | None:
    """Why torch's products are faster on this machine; None if they are not."""
    extension = device.extension()
    if extension is None:
        return device.why_missing()
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return "this processor is not known"
    intel = "GenuineIntel" in info.read_text()
    # With full AVX-512 on a processor that is not Intel's, torch's products go to oneDNN: faster.
    taken = {("AVX2", False), ("AVX512", True)}
    if (torch.backends.cpu.get_cpu_capability(), intel) not in taken and not gemm.in_halves():
        return "torch's libraries are at their best on this processor"
    return None


@cache
def one_is_torchs() -> bool:
    """Whether torch is faster at a single layer. Where MKL has AVX-512 its products are: ours have
    x0.6 to x1.0 of its speed on an Intel Xeon with AMX, x0.7 to x1.3 in training, mostly below
    1; and there is nothing between two layers that we would gain from.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


class Layout(NamedTuple):
    """A chain as the kernels see it, layer by layer.

    linears, norms: the linear layers, and the batch norm behind each or None; thens: the activation
    after each, as a letter.
    """

    linears: tuple[Step, ...]
    norms: tuple[Step | None, ...]
    thens: str

    @property
    def normed(self) -> bool:
        return any(norm is not None for norm in self.norms)


@lru_cache(maxsize=256)
def layout(names: tuple[str, ...]) -> Layout | None:
    """The steps layer by layer; None if the kernels lack one. Dropout counts as nothing."""
    linears: list[Step] = []
    norms: list[Step | None] = []
    thens: list[str] = []
    for step in parse(names).steps:
        if step.name == "dropout":
            continue
        if step.name == "linear":
            linears.append(step)
            norms.append(None)
            thens.append("n")
        elif not linears:
            return None
        elif step.name == "batch_norm" and norms[-1] is None and thens[-1] == "n":
            norms[-1] = step
        elif step.name in _THENS and thens[-1] == "n":
            thens[-1] = _THENS[step.name]
        elif not (step.name == "relu" and thens[-1] == "r"):  # relu of relu is relu
            return None
    return Layout(tuple(linears), tuple(norms), "".join(thens)) if linears else None


def fitting(chain: Chain, input: Tensor, steps: Sequence[str], *, recorded: bool) -> Layout | None:
    """:func:`layout`; also None if the kernels do not suit this machine or this input, or if there
    is something to drop or to train. ``recorded``: by autograd.
    """
    found = layout(tuple(steps))  # first: the cheapest check, and the likeliest to fail
    if found is None or input.dtype is not torch.float32 or input.dim() != 2 or not input.is_cpu:
        return None
    if any(chain.training) or (recorded and found.normed):
        return None
    if device.held() is not None or device.extension() is None:
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    if not device.forced():
        if len(found.linears) == 1 and not found.normed and one_is_torchs():
            return None
        weights, rows = 0, input.shape[0]
        for p in chain.params:
            weights += 0 if p is None else p.numel()
        small = not recorded and (rows >= WORTH_ROWS or weights <= WORTH_WEIGHTS)
        if (2 * rows * weights < WORTH and not small) or why_not() is not None:
            return None
    return found


def run(input: Tensor, params: Sequence[Tensor | None], thens: str) -> list[Tensor] | None:
    """The result of each layer; None if the kernels do not support these tensors."""
    rows, threads = input.shape[0], device.threads()
    weights = params[0::2]
    outs = [kept_memory.empty((rows, there(w).shape[0]), input.dtype) for w in weights]
    taken = device.extension().layers_forward(input, list(params), thens, outs, [], threads)
    return outs if taken else None


class Layers(torch.autograd.Function):
    """Inputs: the chain, its activations, the result of each layer, ``input``, then all params."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: Chain,
        thens: str,
        outs: list[Tensor],
        input: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # what a loss does not reach gets no gradient
        ctx.chain, ctx.thens, ctx.versions = chain, thens, versions(chain)
        # As in torch, tensors that backward does not read may be written to before it.
        first = params[:1] if ctx.needs_input_grad[3] else ()
        last = () if thens[-1] == "n" else outs[-1:]
        # As of torch's own layers a view is kept: ``weight.data =`` leaves it as it was.
        weights = [w if w is None else w.detach() for w in (*first, *params[2::2])]
        ctx.save_for_backward(input, *outs[:-1], *last, *weights)
        return outs[-1]

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        chain: Chain = ctx.chain
        if grad is None:
            return (None,) * (4 + len(chain.params))
        input, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():
            chain, source = apart(ctx, input)
            x = source
            for step in chain.steps:
                x = plain(chain, step, x)
            own, needs = [source, *chain.params], ctx.needs_input_grad[3:]
            return (None, None, None, *partials.gradients([x], own, needs, [grad]))
        thens, dense = ctx.thens, grad.contiguous()
        wants_input, *wants = ctx.needs_input_grad[3:]
        kept = len(thens) - (thens[-1] == "n")
        outs = rest[:kept] if kept == len(thens) else [*rest[:kept], dense]  # not read
        params = list(chain.params)
        params[0 if wants_input else 2 :: 2] = rest[kept:]
        grads = [
            None if p is None or not want else torch.empty_like(p)
            for p, want in zip(params, wants, strict=True)
        ]
        of_input = kept_memory.empty(input.shape, input.dtype) if wants_input else None
        widest = max(there(w).shape[0] for w in params[0::2])
        room = list(kept_memory.empty((2, min(input.shape[0], _BLOCK) * widest), grad.dtype))
        taken = device.extension().layers_backward(
            dense, input, params, thens, outs, grads, of_input, room, device.threads()
        )  # fmt: skip
        assert taken, "such tensors were taken in forward"
        return (None, None, None, of_input, *grads)


def forward(chain: Chain, input: Tensor, steps: Sequence[str]) -> Tensor | None:
    """The result, not recorded by autograd; None if the kernels do not support the chain."""
    found = fitting(chain, input, steps, recorded=False)
    if found is None:
        return None
    params: list[Tensor | None] = []
    for step in found.linears:
        params += chain.params[step.param : step.param + 2]
    norms: list[tuple[Any, ...] | None] = []
    if found.normed:
        norms = [None if step is None else _running(chain, step) for step in found.norms]
        if any(norm is not None and norm[0] is None for norm in norms):
            return None  # the statistics are those of the batch
    # Results between layers are not kept: 192 rows at a time go through all layers in the caches,
    # several per register, so that weights are read in place and never packed.
    out = input.new_empty((input.shape[0], there(params[-2]).shape[0]))
    kernel, threads = device.extension().layers_forward, device.threads()
    return out if kernel(input, params, found.thens, [out], norms, threads) else None


def _running(chain: Chain, step: Step) -> tuple[Any, ...]:
    """A batch norm with running statistics, as the kernel takes it."""
    mean, var = chain.stats[step.stat : step.stat + 2]
    return mean, var, *chain.params[step.param : step.param + 2], chain.number(step.number + 1)


def result(chain: Chain, input: Tensor, steps: Sequence[str]) -> Tensor | None:
    """The result, recorded by autograd; None if the kernels do not support the chain."""
    found = fitting(chain, input, steps, recorded=True)
    if found is None:
        return None
    outs = run(input, chain.params, found.thens)
    return None if outs is None else Layers.apply(chain, found.thens, outs, input, *chain.params)
