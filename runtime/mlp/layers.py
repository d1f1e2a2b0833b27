"""Chains of linear layers and relu (sigmoid, tanh at a narrow end) on the CPU: one call of C++.

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
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device, kept_memory
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.mlp import gemm
from recast.runtime.mlp.chain import Chain, plain, there
from recast.runtime.mlp.run import differentiated, versions

WHEN = "linear layers with relu, or a narrow sigmoid or tanh; float32, where torch's are no faster"
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


@lru_cache(maxsize=256)
def thens(steps: tuple[str, ...]) -> str | None:
    """The activation after each linear layer, as a letter; None if the kernels lack one. Dropout
    counts as one that does nothing.
    """
    found: list[str] = []
    for step in steps:
        if step == "dropout":
            continue
        if step == "linear":
            found.append("n")
        elif found and found[-1] == "n" and step in _THENS:
            found[-1] = _THENS[step]
        elif not (found and found[-1] == "r" and step == "relu"):  # relu of relu is relu
            return None
    return "".join(found) or None


def letters(
    input: Tensor,
    params: Sequence[Tensor | None],
    steps: Sequence[str],
    training: Sequence[bool],
    *,
    recorded: bool,
) -> str | None:
    """:func:`thens`; also None if the kernels do not suit this machine or this input, or if there
    is something to drop. ``recorded``: by autograd.
    """
    kinds = thens(tuple(steps))  # first: the cheapest check, and the likeliest to fail
    if kinds is None or input.dtype is not torch.float32 or input.dim() != 2 or not input.is_cpu:
        return None
    if any(training) or device.held() is not None or device.extension() is None:
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    if not device.forced():
        weights, rows = 0, input.shape[0]
        for p in params:
            weights += 0 if p is None else p.numel()
        small = not recorded and (rows >= WORTH_ROWS or weights <= WORTH_WEIGHTS)
        if (2 * rows * weights < WORTH and not small) or why_not() is not None:
            return None
    return kinds


def run(input: Tensor, params: Sequence[Tensor | None], kinds: str) -> list[Tensor] | None:
    """The result of each layer; None if the kernels do not support these tensors."""
    rows = input.shape[0]
    weights = params[0::2]
    outs = [kept_memory.empty((rows, there(w).shape[0]), input.dtype) for w in weights]
    taken = device.extension().layers_forward(input, list(params), kinds, outs, device.threads())
    return outs if taken else None


class Layers(torch.autograd.Function):
    """Inputs: the chain, its letters, the result of each layer, ``input``, then all params."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: Chain,
        kinds: str,
        outs: list[Tensor],
        input: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # what a loss does not reach gets no gradient
        ctx.chain, ctx.kinds, ctx.versions = chain, kinds, versions(chain)
        # As in torch, tensors that backward does not read may be written to before it.
        first = params[:1] if ctx.needs_input_grad[3] else ()
        last = () if kinds[-1] == "n" else outs[-1:]
        ctx.save_for_backward(input, *outs[:-1], *last, *first, *params[2::2])
        return outs[-1]

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        chain: Chain = ctx.chain
        if grad is None:
            return (None,) * (4 + len(chain.params))
        input, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():
            x = input
            for step in chain.steps:
                x = plain(chain, step, x)
            needs = ctx.needs_input_grad[3:]
            return (None, None, None, *differentiated(ctx, input, x, grad, needs))
        kinds, dense = ctx.kinds, grad.contiguous()
        wants_input, *wants = ctx.needs_input_grad[3:]
        kept = len(kinds) - (kinds[-1] == "n")
        outs = rest[:kept] if kept == len(kinds) else [*rest[:kept], dense]  # not read
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
            dense, input, params, kinds, outs, grads, of_input, room, device.threads()
        )  # fmt: skip
        assert taken, "such tensors were taken in forward"
        return (None, None, None, of_input, *grads)


def forward(
    input: Tensor, params: Sequence[Tensor | None], steps: Sequence[str], training: Sequence[bool]
) -> Tensor | None:
    """The result, not recorded by autograd; None if the kernels do not support the chain."""
    kinds = letters(input, params, steps, training, recorded=False)
    if kinds is None:
        return None
    # Results between layers are not kept: 192 rows at a time go through all layers in the caches,
    # several per register, so that weights are read in place and never packed.
    out = input.new_empty((input.shape[0], there(params[-2]).shape[0]))
    extension, threads = device.extension(), device.threads()
    return out if extension.layers_forward(input, list(params), kinds, [out], threads) else None


def result(chain: Chain, input: Tensor, steps: Sequence[str]) -> Tensor | None:
    """The result, recorded by autograd; None if the kernels do not support the chain."""
    kinds = letters(input, chain.params, steps, chain.training, recorded=True)
    if kinds is None:
        return None
    outs = run(input, chain.params, kinds)
    return None if outs is None else Layers.apply(chain, kinds, outs, input, *chain.params)
