"""A gated recurrent unit over sequences, plain or with attention (AUGRU), as in DIEN and GRU4Rec.

A step with input x, state h and score s (1 without ``scores``)::

    r, z = sigmoid(W x + b + U h + c)        with the rows of r and of z
    n = tanh(W_n x + b_n + r (U_n h + c_n))
    h' = h + w (n - h)        w = s (1 - z) where ``keeps``, as torch.nn.GRU; else s z

Returns [all h', the last h' of each sequence]. Sequences are (B, T, D), all of T steps or with
``lengths``; or packed as in ``PackedSequence``: (Σ batch_sizes, D). torch makes some twelve calls
per step and thirty in backward, each a pass over rows that stay in L1 here; W x is one product for
all steps, and so is the gradient of each weight. What lies beyond a length is never read.

Backward, with g the gradient of h' and q = U_n h + c_n::

    d n = g w (1 - n²)     d q = r d n     d r = d n q r (1 - r)     d z = ± s g (n - h) z (1 - z)
    d h = g (1 - w) + Uᵀ (d r, d z, d q)     d s = Σ g (n - h) w / s
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import pack_padded_sequence

from recast.errors import InputError
from recast.runtime import device, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.mlp import gemm
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, transformed, wants_grad

SCHEMA = (
    "(Tensor input, Tensor? batch_sizes, Tensor? scores, Tensor? start, Tensor?[] params,"
    " bool keeps, Tensor? lengths=None, bool ordered=False, float padding=0.0,"
    " bool turned=False) -> Tensor[]"
)
_WIDEST = 256  # elements of h: beyond, U outgrows the cache and torch's products are faster

Params = Sequence[Tensor | None]  # W (3 H, D), U (3 H, H), b and c (3 H,) or None: r, z, n


# ---------------------------------------------------------------- the definition


def reference(
    input: Tensor,
    batch_sizes: Tensor | None,
    scores: Tensor | None,
    start: Tensor | None,
    params: Params,
    keeps: bool,
    lengths: Tensor | None = None,
    ordered: bool = False,
    padding: float = 0.0,
    turned: bool = False,
) -> list[Tensor]:
    """Plain torch.

    ``scores``: (B, T) or (Σ batch_sizes,). ``start``: (B, H), zeros if None. Packed sequences are
    ordered by decreasing length; ``batch_sizes`` and ``lengths`` (B,): int64 on the CPU. Raises
    what ``pack_padded_sequence`` raises for ``lengths``, which fall if ``ordered``. If not, and if
    they are fewer than the rows, the other rows are left out, as in torch. All h' beyond a length
    are ``padding``. With ``turned`` step follows step in their memory.
    """
    input, scores, start = _with_lengths(input, scores, start, lengths, ordered)
    size = check(input, batch_sizes, scores, start, params)
    if lengths is not None:
        found = _padded(input, lengths, ordered, padding, scores, start, params, keeps)
        return [_laid(found[0], turned), found[1]]
    if batch_sizes is None:
        out, last = _steps(input, None, scores, start, params, keeps, size)
        return [_laid(out, turned), last]
    return _steps(input, batch_sizes, scores, start, params, keeps, size)


def _with_lengths(
    input: Tensor, scores: Tensor | None, start: Tensor | None, lengths: Tensor | None,
    ordered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The rows that have a length."""
    if lengths is None or ordered:
        return input, scores, start
    rows = len(lengths)
    return (
        input[:rows],
        None if scores is None else scores[:rows],
        None if start is None else start[:rows],
    )


def _laid(out: Tensor, turned: bool) -> Tensor:
    """``out`` (B, T, H) as it is to lie in memory."""
    return out.transpose(0, 1).contiguous().transpose(0, 1) if turned else out.contiguous()


def _padded(
    input: Tensor, lengths: Tensor, ordered: bool, padding: float, scores: Tensor | None,
    start: Tensor | None, params: Params, keeps: bool,
) -> list[Tensor]:  # fmt: skip
    """By torch's own packing, of the places of the rows."""
    rows, steps = input.shape[:2]
    places = torch.arange(rows * steps).view(rows, steps)
    packed = pack_padded_sequence(places, lengths, batch_first=True, enforce_sorted=ordered)
    places, counts = packed.data.to(input.device), packed.batch_sizes
    order, back = (t if t is None else t.to(input.device) for t in packed[2:])
    taken = input.reshape(rows * steps, -1).index_select(0, places)
    weights = None if scores is None else scores.reshape(-1).index_select(0, places)
    if start is not None and order is not None:
        start = start.index_select(0, order)
    size = check(taken, counts, weights, start, params)
    out, last = _steps(taken, counts, weights, start, params, keeps, size)
    whole = out.new_full((rows * steps, size), padding).index_copy(0, places, out)
    last = last if back is None else last.index_select(0, back)
    return [whole.view(rows, steps, size), last]


def _steps(
    input: Tensor, batch_sizes: Tensor | None, scores: Tensor | None, start: Tensor | None,
    params: Params, keeps: bool, size: int,
) -> list[Tensor]:  # fmt: skip
    """One call after the other."""
    counts = _counts(input, batch_sizes)
    rows = counts[0] if counts else len(input)
    h = input.new_zeros(rows, size) if start is None else start
    if keeps and scores is None and not transformed():  # torch's has no forward derivative
        return _torchs(input, batch_sizes, h, params)
    weight, inner, bias, shift = _params(params)
    whole = F.linear(input, weight, bias)
    outs, lasts, begin = [], [], 0
    for t, count in enumerate(counts):
        at: Any = (slice(None), t) if batch_sizes is None else slice(begin, begin + count)
        begin += count
        lasts.append(h[count:])
        s = None if scores is None else scores[at].unsqueeze(1)
        h = _step(whole[at], F.linear(h[:count], inner, shift), h[:count], s, keeps)
        outs.append(h)
    last = torch.cat([h, *lasts[::-1]])
    return [torch.stack(outs, 1) if batch_sizes is None else torch.cat(outs), last]


def _step(x: Tensor, inner: Tensor, h: Tensor, score: Tensor | None, keeps: bool) -> Tensor:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), inner.chunk(3, 1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    share = 1 - z if keeps else z
    return h + (share if score is None else score * share) * (n - h)


def _torchs(input: Tensor, batch_sizes: Tensor | None, h: Tensor, params: Params) -> list[Tensor]:
    """torch's own GRU, which needs both biases or neither."""
    weight, inner, bias, shift = _params(params)
    given = [weight, inner]
    biased = bias is not None or shift is not None
    if biased:
        given += [weight.new_zeros(len(weight)) if b is None else b for b in (bias, shift)]
    how: Any = (given, biased, 1, 0.0, False, False)
    run: Any = torch.gru
    if batch_sizes is None:
        out, last = run(input, h.unsqueeze(0), *how, True)
        return [out, last[0]]
    out, last = run(input, batch_sizes, h.unsqueeze(0), *how)
    return [out, last[0]]


def _params(params: Params) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    weight, inner, bias, shift = params
    assert weight is not None and inner is not None
    return weight, inner, bias, shift


def _counts(input: Tensor, batch_sizes: Tensor | None) -> list[int]:
    """How many sequences take part in each step."""
    if batch_sizes is None:
        return [len(input)] * input.shape[1]
    found: list[int] = batch_sizes.tolist()
    return found


def check(
    input: Tensor, batch_sizes: Tensor | None, scores: Tensor | None, start: Tensor | None,
    params: Params,
) -> int:  # fmt: skip
    """The size of h; raises InputError for shapes that do not fit."""
    if len(params) != 4 or params[0] is None or params[1] is None:
        raise InputError("gru: params are not two weights and two biases")
    weight, inner, bias, shift = _params(params)
    size = inner.shape[-1]
    if inner.shape != (3 * size, size) or weight.shape != (3 * size, input.shape[-1]):
        raise InputError(
            f"gru of {tuple(input.shape)} with weights of {tuple(weight.shape)} and"
            f" {tuple(inner.shape)}",
            why="they are (3 H, D) and (3 H, H), for inputs of D numbers",
        )
    if any(b is not None and b.shape != (3 * size,) for b in (bias, shift)):
        raise InputError("gru: a bias does not fit", why=f"each has {3 * size} numbers")
    if input.dim() != (3 if batch_sizes is None else 2):
        raise InputError(
            f"gru of an input of {input.dim()} dimensions",
            why="sequences are (batch, steps, D), or (rows, D) with batch sizes",
        )
    if scores is not None and scores.shape != input.shape[:-1]:
        raise InputError(
            f"gru of {tuple(input.shape)} with scores of {tuple(scores.shape)}",
            why="each step of a sequence has one",
        )
    if start is not None and (start.dim() != 2 or start.shape[1] != size):
        raise InputError(
            f"gru from a state of {tuple(start.shape)}", why=f"it is (sequences, {size})"
        )
    return size


def fake(
    input: Tensor,
    batch_sizes: Tensor | None,
    scores: Tensor | None,
    start: Tensor | None,
    params: Params,
    keeps: bool,
    lengths: Tensor | None = None,
    ordered: bool = False,
    padding: float = 0.0,
    turned: bool = False,
) -> list[Tensor]:
    """Shapes and dtypes of the results."""
    input, scores, start = _with_lengths(input, scores, start, lengths, ordered)
    size = check(input, batch_sizes, scores, start, params)
    rows: Any = len(input) if start is None else len(start)
    if turned and batch_sizes is None:
        out = input.new_empty((input.shape[1], len(input), size)).transpose(0, 1)
        return [out, input.new_empty((rows, size))]
    if batch_sizes is not None and start is None:  # their number depends on data
        if batch_sizes.is_meta:  # torch would say so too, after loading all of its symbols
            raise ValueError("gru: how many sequences there are is not known without data")
        traced = isinstance(batch_sizes, FakeTensor)
        rows = torch.library.get_ctx().new_dynamic_size() if traced else int(batch_sizes[0])
    return [input.new_empty((*input.shape[:-1], size)), input.new_empty((rows, size))]


# ---------------------------------------------------------------- kernels


def _native(
    input: Tensor, batch_sizes: Tensor | None, scores: Tensor | None, start: Tensor | None,
    params: Params, lengths: Tensor | None, ordered: bool,
) -> Any:  # fmt: skip
    """The kernels; None if they do not support this call. Raises InputError for wrong shapes."""
    if lengths is not None and len(lengths) != len(input):
        return None  # torch leaves rows out, or says why not
    size = check(input, batch_sizes, scores, start, params)
    given = [t for t in (input, scores, start, *params) if t is not None]
    if not all(t.is_cpu and t.dtype is torch.float32 for t in given) or not input.numel():
        return None
    if size > _WIDEST or device.held() == "torch":
        return None
    if any(
        t is not None and (not t.is_cpu or t.dtype is not torch.int64 or t.dim() != 1)
        for t in (batch_sizes, lengths)
    ):
        return None
    if lengths is not None and not _packable(input, lengths, ordered):
        return None  # torch says why
    return device.extension()


def _packable(input: Tensor, lengths: Tensor, ordered: bool) -> bool:
    least, most = (int(n) for n in lengths.aminmax())
    if least < 1 or most > input.shape[1]:
        return False
    return not ordered or bool((lengths[1:] <= lengths[:-1]).all())


class _Run:
    """One call of the kernels: the layout of its steps, and what forward keeps for backward."""

    def __init__(
        self, native: Any, input: Tensor, batch_sizes: Tensor | None, scores: Tensor | None,
        start: Tensor | None, params: Params, keeps: bool, lengths: Tensor | None, padding: float,
        turned: bool,
    ) -> None:  # fmt: skip
        self.native, self.keeps, self.padding = native, keeps, padding
        self.weight, self.inner, self.bias, self.shift = _params(params)
        self.shape, self.size = input.shape, self.inner.shape[1]
        self.packed, self.lengths = batch_sizes is not None, lengths
        self.turned = turned and not self.packed  # how all states lie
        self.steps = input.shape[1] if batch_sizes is None else len(batch_sizes)
        self.rows = len(input) if batch_sizes is None else int(batch_sizes[0])
        if start is not None and len(start) != self.rows:
            raise InputError(f"gru of {self.rows} sequences from {len(start)} states")
        dense = not self.packed and lengths is None
        across = input.transpose(0, 1) if dense else input
        self.x_turned = dense and not input.is_contiguous() and across.is_contiguous()
        self.layout = (batch_sizes, lengths, self.rows, self.steps, self.x_turned, self.turned)
        if lengths is None:
            self.x = (across if self.x_turned else input).reshape(-1, self.shape[-1])
        else:
            input = input if input.stride(-1) == 1 else input.contiguous()
            self.x = input.new_empty(int(lengths.sum()), self.shape[-1])
            native.gru_move_rows(input, lengths, self.x, False)
        self.start = None if start is None else start.contiguous()
        self.scores = None if scores is None else self.flat(scores, 1)

    def flat(self, value: Tensor, width: int) -> Tensor:
        """``value``, of each step of each sequence, as rows that lie as the states do."""
        turned = value.transpose(0, 1) if self.turned else value
        return turned.reshape(-1, width).contiguous()

    def states(self) -> tuple[Tensor, Tensor]:
        """A new tensor for all states, which is no view: that could not be written in place; and
        its rows.
        """
        x, width = self.x, self.size
        if not self.turned:
            value = x.new_empty(*self.shape[:-1], width)
            return value, value.view(-1, width)
        strides = width, self.rows * width, 1
        value = x.new_empty_strided((self.rows, self.steps, width), strides)
        return value, value.transpose(0, 1).view(-1, width)

    def forward(self, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """All states, the last ones, the gates (N, 3 H) and, for training, U_n h + c_n (N, H)."""
        gates = gemm.linear(self.x, self.weight, self.bias)
        out, rows = self.states()
        last = gates.new_empty(self.rows, self.size)
        kept = gates.new_empty(len(gates), self.size) if trains else None
        shift = None if self.shift is None else self.shift.contiguous().view(1, -1)
        self.native.gru_forward(
            self.layout, self.inner.contiguous(), shift, self.start, self.scores, self.keeps,
            self.padding, gates, kept, rows, last, device.threads(),
        )  # fmt: skip
        return out, last, gates, kept

    def backward(
        self, out: Tensor, gates: Tensor, kept: Tensor, of_out: Tensor | None,
        of_last: Tensor | None, needs: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of input, scores, start and the four params; None where ``needs`` is False."""
        of_gates, of_h = torch.empty_like(gates), torch.empty_like(gates)
        before = torch.empty_like(kept)
        of_scores = gates.new_zeros(out.numel() // self.size, 1) if needs[1] else None
        of_start = gates.new_empty(self.rows, self.size) if needs[2] else None
        self.native.gru_backward(
            self.layout, self.inner.contiguous(), self.start, self.scores, self.keeps, gates, kept,
            self.flat(out, self.size), None if of_out is None else self.flat(of_out, self.size),
            None if of_last is None else of_last.contiguous(),
            of_gates, of_h, before, of_scores, of_start, device.threads(),
        )  # fmt: skip
        of_input = of_weight = of_inner = of_bias = of_shift = None
        if needs[0]:
            of_input = self._of_input(gemm.of_input(of_gates, self.weight))
        if needs[3]:
            of_weight = gemm.of_weight(of_gates, self.x)
        if needs[4]:
            of_inner = gemm.of_weight(of_h, before)
        if needs[5]:
            of_bias = of_gates.sum(0)
        if needs[6]:
            of_shift = of_h.sum(0)
        if of_scores is not None:
            b, t = self.shape[0], self.steps
            of_scores = of_scores.view(t, b).t() if self.turned else of_scores.view(self.shape[:-1])
        return [of_input, of_scores, of_start, of_weight, of_inner, of_bias, of_shift]

    def _of_input(self, of_rows: Tensor) -> Tensor:
        if self.x_turned:
            return of_rows.view(self.steps, self.rows, -1).transpose(0, 1)
        if self.lengths is None:
            return of_rows.view(self.shape)
        whole = of_rows.new_empty(self.shape)
        self.native.gru_move_rows(whole, self.lengths, of_rows.contiguous(), True)
        return whole


def forward(
    input: Tensor,
    batch_sizes: Tensor | None,
    scores: Tensor | None,
    start: Tensor | None,
    params: Params,
    keeps: bool,
    lengths: Tensor | None = None,
    ordered: bool = False,
    padding: float = 0.0,
    turned: bool = False,
) -> list[Tensor]:
    """The results, not recorded by autograd."""
    native = _native(input, batch_sizes, scores, start, params, lengths, ordered)
    how = keeps, lengths, ordered, padding, turned
    if native is None:
        return reference(input, batch_sizes, scores, start, params, *how)
    run = _Run(native, input, batch_sizes, scores, start, params, keeps, lengths, padding, turned)
    return list(run.forward(trains=False)[:2])


class Gru(torch.autograd.Function):
    """Inputs: the kernels; keeps, ordered, padding, turned; batch sizes, lengths; then input,
    scores, start and the params.
    """

    @staticmethod
    def forward(
        ctx: Any, native: Any, how: tuple[bool, bool, float, bool], batch_sizes: Tensor | None,
        lengths: Tensor | None, input: Tensor, scores: Tensor | None, start: Tensor | None,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.native, ctx.how = native, how
        ctx.set_materialize_grads(False)
        keeps, _, padding, turned = how
        run = _Run(
            native, input, batch_sizes, scores, start, params, keeps, lengths, padding, turned
        )
        out, last, gates, kept = run.forward(trains=True)
        ctx.save_for_backward(batch_sizes, lengths, input, scores, start, *params, out, gates, kept)
        # As of torch's own layers a view is kept: ``weight.data =`` leaves it as it was.
        ctx.params = [None if p is None else p.detach() for p in params]
        return out, last

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        batch_sizes, lengths, input, scores, start, *rest = ctx.saved_tensors
        params, (out, gates, kept) = rest[:4], rest[4:]
        keeps, ordered, padding, turned = ctx.how
        needs: Sequence[bool] = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            given = [input, scores, start, *params]
            how = keeps, lengths, ordered, padding, turned
            found = _differentiable_backward(given, batch_sizes, how, grads, needs)
        else:
            run = _Run(
                ctx.native, input, batch_sizes, scores, start, ctx.params, keeps, lengths, padding,
                turned,
            )  # fmt: skip
            found = run.backward(out, gates, kept, grads[0], grads[1], needs)
        found = [g if n else None for g, n in zip(found, needs, strict=True)]
        return (None, None, None, None, *found)


def _differentiable_backward(
    given: Sequence[Tensor | None], batch_sizes: Tensor | None, how: tuple[Any, ...],
    grads: Sequence[Tensor | None], needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients from autograd through the definition."""
    own = partials.apart(given)
    input, scores, start, *params = own
    assert input is not None
    outs = reference(input, batch_sizes, scores, start, params, *how)
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
    return partials.gradients([out for out, _ in pairs], own, needs, [grad for _, grad in pairs])


def differentiable(
    input: Tensor,
    batch_sizes: Tensor | None,
    scores: Tensor | None,
    start: Tensor | None,
    params: Params,
    keeps: bool,
    lengths: Tensor | None = None,
    ordered: bool = False,
    padding: float = 0.0,
    turned: bool = False,
) -> list[Tensor]:
    """The results, recorded by autograd."""
    how = keeps, lengths, ordered, padding, turned
    if not wants_grad((input, scores, start, list(params))):
        return forward(input, batch_sizes, scores, start, params, *how)
    native = _native(input, batch_sizes, scores, start, params, lengths, ordered)
    if native is None:
        return reference(input, batch_sizes, scores, start, params, *how)
    fixed = keeps, ordered, padding, turned
    return list(Gru.apply(native, fixed, batch_sizes, lengths, input, scores, start, *params))


def cost(
    input: Tensor,
    batch_sizes: Tensor | None,
    scores: Tensor | None,
    start: Tensor | None,
    params: Params,
    keeps: bool,
    lengths: Tensor | None = None,
    ordered: bool = False,
    padding: float = 0.0,
    turned: bool = False,
) -> Cost:
    """The products with both weights, and some sixty flops per element of h for its gates."""
    weight, inner, bias, shift = _params(params)
    rows = input.numel() // max(input.shape[-1], 1)
    size = inner.shape[1]
    flops = 2 * rows * (weight.numel() + inner.numel()) + 60 * rows * size
    written = rows * 4 * size * input.element_size()
    return Cost(flops, moved(input, scores, start, weight, inner, bias, shift) + 2 * written)


def samples() -> list[Sample]:
    """Plain and attended, dense and packed, with biases and without, odd sizes, strides."""
    g = torch.Generator().manual_seed(43)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def params(dim: int, size: int, *biases: bool) -> list[Tensor | None]:
        scale = size**-0.5
        found: list[Tensor | None] = [rand(3 * size, dim) * scale, rand(3 * size, size) * scale]
        return found + [rand(3 * size) if there else None for there in biases]

    def share(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g)

    both, none = (True, True), (False, False)
    agru = params(3, 5, *both)  # an update gate that is always open: the score alone weighs
    assert agru[2] is not None
    agru[2][5:10] = 100.0
    counts = torch.tensor([3, 3, 1])
    lengths, falling = torch.tensor([2, 1, 4, 4, 2]), torch.tensor([4, 2, 1])
    return [
        Sample("dense", (rand(3, 2, 2), None, None, None, params(2, 3, *both), True)),
        Sample("packed", (rand(7, 2), counts, None, rand(3, 2), params(2, 2, *none), True)),
        Sample("scores", (rand(2, 3, 2), None, share(2, 3), None, params(2, 2, *both), False)),
        Sample("packed scores", (rand(7, 2), counts, share(7), None, params(2, 2, *both), False)),
        Sample("update", (rand(2, 2, 3), None, None, rand(2, 2), params(3, 2, True, False), False)),
        Sample("kept scores", (rand(2, 2, 2), None, share(2, 2), None, params(2, 2, *none), True)),
        Sample("odd sizes", (rand(9, 5, 7), None, None, rand(9, 17), params(7, 17, *both), True)),
        Sample("one bias", (rand(6, 3, 4), None, None, None, params(4, 9, False, True), True)),
        Sample("whole registers", (rand(11, 4, 8), None, share(11, 4), None,
                                   params(8, 16, *both), False)),
        Sample("open gate", (rand(4, 3, 3), None, share(4, 3), None, agru, False)),
        Sample("wide", (rand(5, 2, 3), None, None, None, params(3, 40, *none), True)),
        Sample("one row", (rand(1, 6, 3), None, None, None, params(3, 4, *both), True)),
        Sample("one step", (rand(5, 1, 3), None, None, None, params(3, 4, *both), True)),
        Sample("far gates", (300 * rand(4, 3, 3), None, None, None, params(3, 5, *both), True)),
        Sample("time first", (rand(4, 6, 3).transpose(0, 1), None, None, None,
                              params(3, 5, *both), True)),
        Sample("transposed weights", (rand(4, 3, 5), None, share(3, 4).t(), rand(6, 4).t(),
                                      [rand(5, 18).t(), rand(6, 18).t(), rand(36)[::2], None],
                                      False)),
        Sample("lengths", (rand(5, 4, 3), None, None, rand(5, 4), params(3, 4, *both), True,
                           lengths)),
        Sample("scored lengths", (rand(5, 4, 3), None, share(4, 5).t(), None, params(3, 4, *both),
                                  False, lengths)),
        Sample("fewer lengths", (rand(6, 4, 3), None, share(6, 4), rand(6, 5), params(3, 5, *both),
                                 False, lengths)),
        Sample("padded lengths", (rand(4, 3, 3).transpose(0, 1), None, share(3, 4), None,
                                  params(3, 9, *none), True, falling, True, -2.0, True)),
        Sample("turned", (rand(3, 4, 2), None, share(3, 4), rand(3, 5), params(2, 5, *both), False,
                          None, False, 0.0, True)),
        Sample("both turned", (rand(4, 6, 3).transpose(0, 1), None, None, None,
                               params(3, 5, *both), True, None, False, 0.0, True)),
    ]  # fmt: skip


gru = register(
    Op(
        name="gru",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            *cpu_kernels(f"float32, h of at most {_WIDEST}"),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
        not_worth={"cuda": "there torch's own takes cuDNN's"},
    )
)  # fmt: skip
