"""fuse-recurrence: what is packed, run and padded again becomes one call over the padded rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from passkit import calls, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import recast

D, H, T = 5, 7, 9
Batch = tuple[Tensor, Tensor, Tensor]


def batch(rows: int, seed: int, longest: int = T, dtype: torch.dtype = torch.float64) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, T, D, generator=g, dtype=torch.float64).to(dtype)
    scores = torch.randn(rows, T, generator=g, dtype=torch.float64).to(dtype)
    lengths = torch.randint(1, longest + 1, (rows,), generator=g)
    lengths[rows // 2] = longest
    return x, scores, lengths


BATCHES = [batch(16, 0), batch(23, 1)]  # in no step do as many take part in both
FORMS: dict[str, dict[str, Any]] = {
    "any order": {},
    "sorted": {"ordered": True},
    "time first": {"first": False},
    "time first, sorted": {"first": False, "ordered": True},
    "padding value": {"value": -3.0},
    "given state": {"start": True},
    "given state, sorted": {"start": True, "ordered": True},
    "no bias": {"bias": False},
    "int32": {"kind": torch.int32},
    "packed batch first, padded time first": {"pad_first": False},
}


class Net(nn.Module):
    """nn.GRU of packed sequences; every result is read."""

    def __init__(
        self, ordered: bool = False, first: bool = True, value: float = 0.0, start: bool = False,
        bias: bool = True, kind: torch.dtype = torch.int64, pad_first: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gru = nn.GRU(D, H, batch_first=first, bias=bias)
        self.h = nn.Parameter(torch.randn(1, H)) if start else None
        self.ordered, self.first, self.value, self.kind = ordered, first, value, kind
        self.pad_first = first if pad_first is None else pad_first

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        x, lengths = x * scores.unsqueeze(2), lengths.to(self.kind)
        if self.ordered:
            lengths = lengths.sort(descending=True).values
        packed = pack_padded_sequence(
            x if self.first else x.transpose(0, 1), lengths, self.first, self.ordered
        )
        h = None
        if self.h is not None:
            h = (self.h * scores[:, :1]).unsqueeze(0)
        out, last = self.gru(packed, h)
        states, seen = pad_packed_sequence(out, self.pad_first, self.value, total_length=T)
        return states * 2.0, states, last * seen.unsqueeze(1)


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Net(**FORMS[form]), BATCHES, steps=form == "any order")
    (call,) = calls(fast, "gru")
    assert call.args[1] is None and call.args[6] is not None
    names = " ".join(n.name for n in fast.graph.nodes)
    assert "pack" not in names and "scatter" not in names


@pytest.mark.parametrize("form", FORMS)
def test_the_kernels(form: str) -> None:
    torch.manual_seed(2)
    net = Net(**FORMS[form])
    given = [batch(rows, rows, dtype=torch.float32) for rows in (33, 8, 1)]
    fast = recast.optimize(net, example=given[:2], strict=True)
    recast.diff(net, fast, given, steps=2).check()


class Attentional(nn.Module):
    """The cell of DIEN."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(D, 3 * H), nn.Linear(H, 3 * H)

    def forward(self, x: Tensor, h: Tensor, score: Tensor) -> Tensor:
        (xr, xz, xn), (hr, hz, hn) = self.x(x).chunk(3, 1), self.h(h).chunk(3, 1)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        w = score.view(-1, 1) * torch.sigmoid(xz + hz)
        return (1.0 - w) * h + w * n


class Dynamic(nn.Module):
    """A loop over the steps of packed sequences, as in DIEN."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Attentional()

    def forward(self, packed: PackedSequence, scores: Tensor) -> PackedSequence:
        rows, counts, order, back = packed
        h = torch.zeros(int(counts[0]), H, dtype=rows.dtype, device=rows.device)
        out = torch.zeros(rows.size(0), H, dtype=rows.dtype, device=rows.device)
        begin = 0
        for n in counts:
            new = self.cell(rows[begin : begin + n], h[0:n], scores[begin : begin + n])
            out[begin : begin + n] = new
            h = new
            begin += n
        return PackedSequence(out, counts, order, back)


class Evolving(nn.Module):
    def __init__(self, loop: nn.Module) -> None:
        super().__init__()
        self.loop, self.end = loop, nn.Linear(H, 2)

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        def packed(values: Tensor) -> PackedSequence:
            return pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)

        out = self.loop(packed(x), packed(F.softmax(scores, 1)).data)
        states, _ = pad_packed_sequence(out, batch_first=True, total_length=T)
        return self.end(states)


def test_loops_over_packed_steps() -> None:
    torch.manual_seed(2)
    fast = same(Evolving(Dynamic()), BATCHES, steps=False)
    (call,) = calls(fast, "gru")
    assert call.args[1] is None and call.args[2] is not None and call.args[6] is not None
    net, given = Evolving(Dynamic()), [batch(n, n, dtype=torch.float32) for n in (33, 8, 1)]
    fast = recast.optimize(net, example=given[:2], strict=True)
    recast.diff(net, fast, given, steps=2).check()


def test_what_lies_beyond_a_length_is_not_read() -> None:
    torch.manual_seed(2)
    net, (x, scores, lengths) = Net(), batch(9, 1, dtype=torch.float32)
    fast = recast.optimize(net, example=[(x, scores, lengths), batch(6, 0, dtype=torch.float32)])
    x[torch.arange(T) >= lengths.unsqueeze(1)] = float("nan")
    ours, theirs = (
        torch.autograd.grad(
            [out.sum() for out in model(x, scores, lengths)], list(net.parameters())
        )
        for model in (fast, net)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("ordered", "bad"), [(False, 0), (False, -1), (False, T + 1), (True, None)]
)
def test_bad_lengths_raise_what_torch_raises(
    ordered: bool, bad: int | None, dtype: torch.dtype
) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(D, H, batch_first=True)

        def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, True, ordered)
            out, _ = pad_packed_sequence(self.gru(packed)[0], True, total_length=T)
            return out

    net, given = Plain().to(dtype), [batch(6, 0, dtype=dtype), batch(9, 1, dtype=dtype)]
    for one in given:
        one[2].copy_(one[2].sort(descending=True).values)
    fast = recast.optimize(net, example=given, strict=True)
    x, scores, lengths = given[0]
    wrong = lengths.flip(0) if bad is None else lengths.clone()
    if bad is not None:
        wrong[3 if bad < 1 else 0] = bad
    with pytest.raises(Exception) as theirs:
        net(x, scores, wrong)
    with warnings.catch_warnings(), pytest.raises(Exception) as ours:
        warnings.simplefilter("ignore", recast.errors.RecastWarning)
        fast(x, scores, wrong)
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)
    torch.testing.assert_close(fast(*given[1]), net(*given[1]))
