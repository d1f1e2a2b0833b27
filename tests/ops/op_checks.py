"""Every op, sample, dtype and kernel, and what plain torch gives for them in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import OPS, device
from recast.runtime.gpu import cuda_launch
from recast.runtime.op import Op, Sample

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TRAINED = [op for op in OPS.values() if op.trains]  # tests/precision has the others
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in TRAINED
    for sample in op.samples()
]
EMULATED, GPU = "emulated cuda", "cuda"


def ways(op: Op) -> list[str]:
    """The names of the kernels of ``op``; also those of a GPU, on the emulator, except torch's."""
    found = [k.name if k.device == "cpu" else GPU for k in op.kernels]
    emulated = any(k.device == "cuda" and k.name != "torch" for k in op.kernels)
    return list(dict.fromkeys([*found, *[EMULATED] * emulated]))


def why_not(kernel: str) -> str | None:
    """Why this machine cannot run the kernels of this name."""
    if kernel == GPU:
        return cuda_launch.why_not()
    return device.why_not(kernel)() or None if kernel in device.ISAS else None


# One sample for each kernel that this machine cannot run: it is skipped, and says why.
BY_KERNEL = [
    pytest.param(op, sample, kernel, id=f"{op.name}-{sample.label}-{kernel}")
    for op in TRAINED
    for kernel in ways(op)
    for sample in list(op.samples())[: 1 if why_not(kernel) else None]
]


# Samples whose gradient is by definition not the slope of the output.
UNLIKE_DIFFERENCES = {
    "zeros": "relu has a kink at zero",
    "ties": "a maximum has a kink where two are equal",
    "gather padding int32": "the output depends on a gathered padding row, which has no gradient",
    **dict.fromkeys(
        ("a total", "total", "total ragged", "total weights"),
        "a total depends on its padding row, which has no gradient",
    ),
}

# Samples whose dropout masks a GPU draws for itself, not as torch does on a CPU: the tests of those
# kernels compare them under the masks that were drawn.
OWN_MASKS = {
    "mlp": {"norm relu drop", "relu norm drop", "drop first", "activation alone", "3-d"},
    "relu_dropout": {"train", "zeros", "transposed", "3-d", "empty batch", "one element"},
}
# The same on a real GPU only: the emulator uses torch's own masks on a CPU.
OWN_DRAWS = {"field_attention": {"train", "train weights"}, "cross_mixture": {"drop"}}
# Samples that run on other kernels without gradients, whose sums are in another order.
APART_WITHOUT_GRADIENTS = {"mlp": {"norm relu drop eval"}}
STATEFUL = ("mlp", "batch_norm_global")  # their third argument is a list of buffers


def floats(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that are differentiated, each once."""
    stats = args[2] if op.name in STATEFUL else []
    found: dict[int, Tensor] = {}
    for arg in args:
        if arg is stats:
            continue
        for t in arg if isinstance(arg, list) else [arg]:
            if isinstance(t, Tensor) and t.is_floating_point():
                found[id(t)] = t
    return list(found.values())


def cast(args: tuple[Any, ...], dtype: torch.dtype, where: str = "cpu") -> tuple[Any, ...]:
    """A copy of ``args`` in ``dtype``; a tensor passed twice stays one, strides are kept."""
    done: dict[int, Any] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if id(value) not in done:
            copied = copy.deepcopy(value)
            copied = copied.to(dtype) if value.is_floating_point() else copied
            done[id(value)] = copied if where == "cpu" else sent(copied, where)
        return done[id(value)]

    return tuple([one(x) for x in a] if isinstance(a, list) else one(a) for a in args)


def sent(t: Tensor, where: str) -> Tensor:
    """``t`` on another device, with its strides and its place in its storage."""
    whole = t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).to(where)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def device_of(kernel: str) -> str:
    return "cuda" if kernel == GPU else "cpu"


def as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def dense(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    return grad.to_dense() if grad.layout != torch.strided else grad + 0


def evaluate(
    call: Callable[..., Any], op: Op, args: tuple[Any, ...], upstream: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of all float inputs for ``upstream``."""
    leaves = [t.requires_grad_() for t in floats(op, args)]
    torch.manual_seed(5)
    outs = as_list(call(*args))
    if upstream is None:
        return [o.cpu() for o in outs], []
    grads = torch.autograd.grad(
        outs,
        leaves,
        [u.to(o) if u.device != o.device else u.to(o.dtype)
         for u, o in zip(upstream, outs, strict=True)],
        allow_unused=True,
    )  # fmt: skip
    return [o.cpu() for o in outs], [dense(g, t).cpu() for g, t in zip(grads, leaves, strict=True)]


_UPSTREAM: dict[tuple[str, str, torch.dtype], list[Tensor]] = {}


def upstream_of(op: Op, sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the outputs, the same at each call; the shapes are computed only once."""
    key = op.name, sample.label, dtype
    if key not in _UPSTREAM:
        g = torch.Generator().manual_seed(23)
        with torch.no_grad():
            shapes = [o.shape for o in as_list(op.reference(*cast(sample.args, torch.float32)))]
        _UPSTREAM[key] = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    return [u.clone() for u in _UPSTREAM[key]]


def dropout_of(dtype: torch.dtype) -> Callable[[Tensor, float, bool], Tensor]:
    """Dropout whose masks are drawn as ``dtype`` draws them, whatever ``x`` is."""

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        if not training or p == 0 or not x.numel():
            return x
        if p == 1:
            return x * 0
        noise = torch.empty_like(x, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
        return x * noise.to(x.dtype)

    return dropout


Results = tuple[list[Tensor], list[Tensor]]  # outputs, gradients
_EXPECTED: dict[tuple[str, str, torch.dtype], tuple[Results, Results, float]] = {}


def expected(op: Op, sample: Sample, dtype: torch.dtype) -> tuple[Results, Results, float]:
    """What plain torch gives in ``dtype`` and in float64, and the scale of the latter.

    Every value of a sample is of order one, so terms that cancel were of that scale before. All
    kernels are compared with the same results, so these are computed once.
    """
    key = op.name, sample.label, dtype
    if key not in _EXPECTED:
        upstream = upstream_of(op, sample, dtype)
        plain = evaluate(op.reference, op, cast(sample.args, dtype), upstream)
        wide = cast(cast(sample.args, dtype), torch.float64)
        with mock.patch.object(F, "dropout", dropout_of(dtype)):
            truth = evaluate(op.reference, op, wide, upstream)
        scale = max(
            (float(t.detach().abs().max()) for t in truth[0] + truth[1] if t.numel()), default=1
        )
        _EXPECTED[key] = plain, truth, scale
    return _EXPECTED[key]
