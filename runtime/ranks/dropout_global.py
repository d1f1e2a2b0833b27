"""Dropout on W ranks with the masks of one process with the global batch.

Every rank draws the mask of the global batch from a generator in the same state, and uses its own
rows of it; so masks do not depend on W, and the generators stay in step. ``global_rows`` tells each
rank the sizes of all batches, once a forward pass, and checks the generators::

    rows = global_rows(x, ...)                          (W,) samples of each rank
    noise = bernoulli(1 - p) / (1 - p)  of the global shape, from rows r0 to r0 + rows[rank]
    out = input * noise

On a CPU the draws are torch's own. On a GPU, or if it is not known which dimension counts samples
(``dim`` -1), each rank draws its own mask, independent of the others, and the generators stay in
step too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.cost import Cost, moved
from recast.runtime.mlp.mask_draws import drawn
from recast.runtime.mlp.relu_dropout import check
from recast.runtime.op import Kernel, Op, Sample, register
from recast.runtime.ranks import call_mode, collectives
from recast.runtime.ranks.sums import gathered

_STEP = 0x9E3779B97F4A7C15  # odd, so that ranks get seeds far apart


def generator() -> torch.Generator:
    """The generator that CPU dropout draws from."""
    return torch.default_generator


# ---------------------------------------------------------------- sizes of all batches


def rows_of_ranks(input: Tensor, dim: int, unit: int, active: Sequence[bool]) -> Tensor:
    """(W,) int64 on the CPU: the samples of each rank. ``input`` has ``unit`` rows per sample in
    dimension ``dim``; -1: no dimension counts samples. Zeros, without a collective, if nothing is
    ``active``.

    Raises:
        UsageError: on every rank, if their generators are in different states.
    """
    if not any(active) or input.is_meta:
        return torch.zeros(collectives.ranks(), dtype=torch.int64)
    own = input.shape[dim] // unit if dim >= 0 else 0
    if collectives.ranks() == 1:
        return torch.tensor([own])
    call_mode.exchange_once()
    found = gathered(torch.tensor([own, _state()], device=input.device)).cpu()
    if not bool((found[:, 1] == found[0, 1]).all()):
        raise UsageError(
            "the random generators of the ranks are in different states",
            why="every rank draws the dropout masks of the global batch, and takes its own rows",
            tries=(
                "torch.manual_seed(seed) with the same seed on every rank, before the loop",
                "a torch.Generator of its own for what ranks draw for themselves (shuffling)",
            ),
        )
    return found[:, 0].clone()


def _state() -> int:
    """A 64-bit digest of the generator's state."""
    state = generator().get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little", signed=True)


def fake_rows(input: Tensor, dim: int, unit: int, active: Sequence[bool]) -> Tensor:
    """Shape and dtype of the result."""
    return torch.empty(collectives.ranks(), dtype=torch.int64)


# ---------------------------------------------------------------- this rank's part


@dataclass(frozen=True)
class Part:
    """Where this rank's rows are in a tensor of the global batch.

    ``like`` is this rank's; ``shape`` that of the global batch, in whose dimension ``dim`` this
    rank's rows begin at ``first``. ``order`` lists the dimensions from the outermost in memory to
    the innermost, and ``back`` undoes it.
    """

    like: Tensor
    shape: list[int]
    dim: int
    first: int
    order: list[int]
    back: list[int]

    @classmethod
    def at(cls, like: Tensor, shape: list[int], dim: int, first: int) -> Part:
        """``like`` in a tensor of ``shape``."""
        # Numbers are drawn in memory order, that of the input. Of two dimensions with one stride,
        # the one of size 1 or 0 lies inside the other, as with the single row of a rank: else its
        # stride were larger.
        strides = like.stride()
        order = sorted(range(like.dim()), key=lambda d: (-strides[d], like.shape[d] <= 1))
        back = [order.index(d) for d in range(like.dim())]
        return cls(like, shape, dim, first, order, back)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """A tensor of the global batch, laid out in memory as this rank's is."""
        return torch.empty([self.shape[d] for d in self.order], dtype=dtype).permute(self.back)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of ``whole``."""
        return whole.narrow(self.dim, self.first, self.like.shape[self.dim])

    def spread(self, own: Tensor, others: float) -> Tensor:
        """A tensor of the global batch with this rank's rows, and all others filled."""
        whole = self.empty(own.dtype).fill_(others)
        self.own(whole).copy_(own.detach())
        return whole


def part_of(like: Tensor, rows: Tensor, dim: int, unit: int, what: str) -> Part:
    """The part that ``like`` is; ``rows``: from :func:`rows_of_ranks`. Raises UsageError where it
    has not ``unit`` rows for each sample of this rank; ``what`` is drawn of it, for the message.
    """
    rank, counts, shape = collectives.rank(), rows.tolist(), list(like.shape)
    if shape[dim] != counts[rank] * unit:
        raise UsageError(
            f"{what} of {shape[dim]} rows in dimension {dim}, in a batch of {counts[rank]}",
            why=f"it was taken for {unit} rows a sample",
            tries=("example=[batch_a, batch_b] of other sizes, to optimize()",),
        )
    shape[dim] = sum(counts) * unit
    return Part.at(like, shape, dim, sum(counts[:rank]) * unit)


# ---------------------------------------------------------------- the masks


def dropout(
    input: Tensor, rows: Tensor | None, p: float, training: bool, dim: int, unit: int
) -> Tensor:
    """``F.dropout(input, p, training)``; ``rows``: from :func:`rows_of_ranks`, None if dim is -1.

    The result never shares memory with ``input``. Raises InputError for ``p`` outside [0, 1].
    """
    check(p)
    if not training or p == 0 or input.is_meta:
        return input.clone()
    if collectives.ranks() == 1:
        out = F.dropout(input, p, training)
        return out.clone() if out is input else out
    return input * noise(input, rows, p, dim, unit)


def noise(input: Tensor, rows: Tensor | None, p: float, dim: int, unit: int) -> Tensor:
    """This rank's part of the factors by which torch's dropout multiplies the global batch."""
    if dim < 0 or rows is None or not input.is_cpu:
        own = own_generator(input.device)
        return drawn(input.numel(), 0, 0, 1 - p, input.detach(), own).view(input.shape)
    part = part_of(input, rows, dim, unit, "dropout")
    if 0 in part.shape:  # torch draws nothing
        return torch.ones_like(input)
    return _noise(input.detach(), part, p, generator())


def _noise(like: Tensor, part: Part, p: float, source: torch.Generator) -> Tensor:
    """That part of the noise of the global batch, like ``like``."""
    if p == 1:
        return torch.zeros_like(like)
    shape, dim, first, order = part.shape, part.dim, part.first, part.order
    inner = math.prod(shape) // max(shape[dim], 1)
    if order[:1] == [dim]:
        after = shape[dim] - first - like.shape[dim]
        made = drawn(like.numel(), first * inner, after * inner, 1 - p, like, source)
        return made.view([like.shape[d] for d in order]).permute(part.back)
    made = drawn(math.prod(shape), 0, 0, 1 - p, like, source)
    return part.own(made.view([shape[d] for d in order]).permute(part.back))


def own_generator(device: torch.device, *, alike: bool = False) -> torch.Generator:
    """A generator for this rank only, seeded by a draw that is the same on all ranks; ``alike``:
    one that is the same on all.
    """
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator()))
    seed = drawn if alike else (drawn + (collectives.rank() + 1) * _STEP) % 2**63
    return torch.Generator(device).manual_seed(seed)


def fake(
    input: Tensor, rows: Tensor | None, p: float, training: bool, dim: int, unit: int
) -> Tensor:
    """Shape and dtype of the result."""
    return torch.empty_like(input)


def samples() -> list[Sample]:
    """One rank; ranks are tested in tests/wire."""
    x = torch.randn(7, 13, generator=torch.Generator().manual_seed(29))
    rows = torch.tensor([7])
    return [
        Sample("train", (x, rows, 0.3, True, 0, 1)),
        Sample("eval", (x, rows, 0.3, False, 0, 1)),
        Sample("p 0", (x, rows, 0.0, True, 0, 1)),
        Sample("p 1", (x, None, 1.0, True, -1, 1)),
        Sample("transposed", (x.t(), rows, 0.5, True, 1, 1)),
        Sample("empty batch", (x[:0], torch.tensor([0]), 0.5, True, 0, 1)),
    ]


def row_samples() -> list[Sample]:
    """One rank, with and without an active dropout."""
    x = torch.zeros(6, 2)
    return [
        Sample("asked", (x, 0, 2, [False, True])),
        Sample("nothing drops", (x, 0, 2, [False])),
        Sample("nothing counts", (x, -1, 1, [True])),
    ]


global_rows = register(
    Op(
        name="global_rows",
        random=True,  # a collective must keep its order
        schema="(Tensor input, int dim, int unit, bool[] active) -> Tensor",
        reference=rows_of_ranks,
        fake=fake_rows,
        forward=rows_of_ranks,
        samples=row_samples,
        cost=lambda *args: Cost(0, 8 * collectives.ranks()),
        trains=False,
        devices=("cpu", "cuda"),
        kernels=(Kernel("torch", "cpu", "always", lambda: None),),
    )
)
dropout_global = register(
    Op(
        name="dropout_global",
        random=True,
        schema=(
            "(Tensor input, Tensor? rows, float p, bool training, int dim, int unit) -> Tensor"
        ),
        reference=dropout,
        fake=fake,
        forward=dropout,
        differentiable=dropout,
        samples=samples,
        cost=lambda input, *rest: Cost(2 * input.numel(), 2 * moved(input)),
        devices=("cpu", "cuda"),
        kernels=(Kernel("torch", "cpu", "always; torch's own masks", lambda: None),),
    )
)
