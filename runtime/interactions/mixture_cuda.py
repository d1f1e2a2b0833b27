"""``cross_mixture`` on a GPU: few products, and one pass over each of the results between them.

The gates' logits are extra columns of the first product, (B, E r + E), so x is read once for both,
and its gradient comes from one product, added to that of the tail. The second product is E products
of (B, r) by (r, r); its weight's gradient is E sums over the whole batch, each shared by many
blocks. Between products ``csrc/cuda/cross_mixture.cu`` makes a pass over (B, E r), for activations
and gates in forward, and for their gradients in backward.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp import products

ACTIVATIONS = ("none", "relu", "sigmoid", "tanh")  # as RECAST_ACT
MOST_EXPERTS = 32
_BLOCK = 256
_STEP = 8  # columns come in multiples of it: aligned matrices
_PARTS = 128  # parts of the rows, summed separately for the gradient of a small matrix
_FEWEST = 256  # rows per part
_MOST = 2**31 - 1
_NAMES = ("mixture_activate", "mixture_through", "mixture_weigh", "mixture_unweigh")


@lru_cache(maxsize=16)
def _kernels(activation: int, vec: int) -> dict[str, Kernel]:
    defines = {"RECAST_ACT": activation, "RECAST_VEC": vec, "RECAST_BLOCK": _BLOCK}
    program = nvrtc.program("cross_mixture.cu", defines=defines)
    return {name: Kernel(program, name) for name in _NAMES}


class Kept(NamedTuple):
    """What forward keeps for backward."""

    z: Tensor  # (B, columns): V x, activated if there is a core; logits; zeros
    hidden: Tensor  # (E, B, r): before the last activation
    weighed: Tensor  # (B, E r)


class Gradients(NamedTuple):
    """Gradients of the parameters and of z; the product with the first weight is still to do."""

    z: Tensor
    first: Tensor  # (columns, d)
    core: Tensor | None
    u: Tensor
    gate_bias: Tensor | None
    inner: Tensor | None


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer; float32 throughout."""

    gpu: Gpu
    v: Tensor  # (E, r, d)
    core: Tensor | None
    u: Tensor
    gate: Tensor | None
    gate_bias: Tensor | None
    activation: str

    def first(self) -> Tensor:
        """(columns, d): V of all experts, the gates' matrix, zeros."""
        parts = [self.v.reshape(self._wide, -1)]
        parts += [] if self.gate is None else [self.gate]
        columns = sum(map(len, parts))
        spare = -columns % _STEP
        parts += [parts[0].new_zeros(spare, parts[0].shape[1])] if spare else []
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def last(self) -> Tensor:
        """(d, E r)."""
        return self.u.transpose(0, 1).reshape(-1, self._wide)

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        """Σ_e p_e U_e h_e as (B, d), of ``x`` (B, d)."""
        z = products.linear(products.rows(x), self.first(), None)
        hidden = self._each(z)
        if self.core is not None:
            self._over("mixture_activate", z, (), ())
            hidden = torch.bmm(hidden, self.core.transpose(1, 2))
        weighed = z.new_empty(len(z), self._wide)
        self._by_row("mixture_weigh", z, hidden, (), (c_void_p(weighed.data_ptr()),))
        return products.linear(weighed, self.last(), None), Kept(z, hidden, weighed)

    def backward(self, x: Tensor, dm: Tensor, kept: Kept, *, sums: bool) -> Gradients:
        """From that of the mixture, ``dm`` (B, d). ``sums``: its columns' sums are wanted too."""
        z, hidden, weighed = kept
        of_u = dm.new_empty(dm.shape[1], self._wide)
        inner = dm.new_empty(dm.shape[1]) if sums else None
        products.weight_gradient(dm, weighed, of_u, inner)()
        grad = products.input_gradient(self.gpu, dm, self.last(), None, None).x
        dz = torch.empty_like(z)
        into = self._each(dz) if self.core is None else torch.empty_like(hidden)
        logits = 0 if self.gate is None else len(self.v)
        self._by_row(
            "mixture_unweigh", z, hidden, (c_void_p(grad.data_ptr()),),
            (
                c_void_p(into.data_ptr()), *map(c_int64, into.stride()[:2]),
                c_void_p(dz[:, self._wide :].data_ptr()),
                c_int32(dz.shape[1] - self._wide - logits),
            ),
        )  # fmt: skip
        core = None
        if self.core is not None:
            core = _of_core(into, self._each(z))
            back = torch.bmm(into, self.core)
            rank = c_int32(self.v.shape[1])
            self._over(
                "mixture_through", z, (c_void_p(back.data_ptr()), rank), (c_void_p(dz.data_ptr()),)
            )
        first = z.new_empty(z.shape[1], x.shape[1])
        products.weight_gradient(dz, x, first, None)()
        bias = None
        if self.gate_bias is not None:
            bias = dz[:, self._wide : self._wide + logits].sum(0)
        of_u = of_u.unflatten(1, self.v.shape[:2]).permute(1, 0, 2).contiguous()
        return Gradients(dz, first, core, of_u, bias, inner)

    def _each(self, z: Tensor) -> Tensor:
        """(E, B, r) of the first columns."""
        return z[:, : self._wide].unflatten(1, self.v.shape[:2]).transpose(0, 1)

    def _over(
        self, name: str, z: Tensor, given: tuple[Argument, ...], results: tuple[Argument, ...]
    ) -> None:
        """A kernel over all of the first columns."""
        batch, stride = z.shape
        arguments = (
            c_void_p(z.data_ptr()), c_int32(stride), *given, c_int32(self._wide), c_int32(batch),
            *results,
        )  # fmt: skip
        grid = (-(-batch * (self._wide // self._vec) // _BLOCK), 1, 1)
        self.gpu.launch(self._kernel(name), grid, (_BLOCK, 1, 1), 0, arguments)

    def _by_row(
        self, name: str, z: Tensor, hidden: Tensor, given: tuple[Argument, ...],
        results: tuple[Argument, ...],
    ) -> None:  # fmt: skip
        """A kernel with a warp for each row."""
        (batch, stride), bias = z.shape, self.gate_bias
        logits = None if self.gate is None else z[:, self._wide :].data_ptr()
        arguments = (
            c_void_p(hidden.data_ptr()), *map(c_int64, hidden.stride()[:2]), c_void_p(logits),
            c_int32(stride), pointer(bias), *given,
            *map(c_int32, (*self.v.shape[:2], batch)), *results,
        )  # fmt: skip
        grid = (-(-batch * 32 // _BLOCK), 1, 1)
        self.gpu.launch(self._kernel(name), grid, (_BLOCK, 1, 1), 0, arguments)

    def _kernel(self, name: str) -> Kernel:
        return _kernels(ACTIVATIONS.index(self.activation), self._vec)[name]

    @property
    def _wide(self) -> int:
        return self.v.shape[0] * self.v.shape[1]

    @property
    def _vec(self) -> int:
        """So many columns that a warp has all of an expert's at once, or as many as it may."""
        rank = self.v.shape[1]
        return 4 if not rank % 128 else 2 if not rank % 64 else 1


def takes(x: Tensor, v: Tensor) -> bool:
    """Whether the kernels serve so many rows and experts; what they are of is known to fit."""
    rows = x.numel() // max(x.shape[-1], 1)
    wide = v.shape[0] * v.shape[1]
    return 0 < rows * (wide + 2 * _STEP) <= _MOST and v.numel() > 0 and len(v) <= MOST_EXPERTS


def _of_core(grad: Tensor, h: Tensor) -> Tensor:
    """(E, r, r): the sums over rows of grad' h, of (E, B, r).

    A batch of products would have a block for each expert: here rows are summed in parts.
    """
    experts, batch, rank = grad.shape
    each = max(_FEWEST, -(-batch // _PARTS))
    parts = batch // each
    whole = parts * each
    found = grad.new_zeros(experts, rank, rank)
    for e in range(experts):
        if parts:
            left = grad[e, :whole].unflatten(0, (parts, each)).transpose(1, 2)
            right = h[e, :whole].unflatten(0, (parts, each))
            torch.sum(torch.bmm(left, right), 0, out=found[e])
        if whole < batch:
            found[e].addmm_(grad[e, whole:].t(), h[e, whole:])
    return found
