"""fuse-recurrence: a loop over packed steps is one call for any number of steps, or asked again."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

import pytest
import torch
from passkit import calls
from test_padded_pass import Attentional, Batch, D, Dynamic, Evolving, H, T, batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import recast
from recast.errors import RecastWarning

LONGEST = 8  # of the examples; no other size


def examples() -> list[Batch]:
    return [batch(rows, k, LONGEST, torch.float32) for k, rows in enumerate((16, 23))]


def others() -> list[Batch]:
    """Batches whose longest sequences are shorter and longer than those of the examples."""
    return [batch(9, 7 + n, n, torch.float32) for n in (LONGEST, 1, T, 2)]


def test_any_longest_history_in_a_loop() -> None:
    torch.manual_seed(2)
    net = Evolving(Dynamic())
    fast = recast.optimize(net, example=examples(), strict=True)
    assert len(calls(fast, "gru")) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recast.diff(net, fast, others()[1], steps=2).check()
        for given in others():
            torch.testing.assert_close(fast(*given), net(*given))


class Packed(nn.Module):
    """nn.GRU, padded again to all steps, or to as many as the longest sequence has."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.gru, self.whole = nn.GRU(D, H, batch_first=True), whole

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        total = T if self.whole else None
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=total)
        return out.sum(1) + scores.sum()


@pytest.mark.parametrize("whole", [True, False])
def test_any_longest_history_in_a_layer(whole: bool) -> None:
    torch.manual_seed(2)
    net = Packed(whole)
    fast = recast.optimize(net, example=examples(), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if whole else "ignore", RecastWarning)
        for given in others():
            torch.testing.assert_close(fast(*given), net(*given))


def test_a_history_that_is_longer_than_what_is_padded_to() -> None:
    class Short(Packed):
        def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.gru(packed)[0], True, total_length=LONGEST)
            return out.sum(1) + scores.sum()

    net = Short(True)
    fast = recast.optimize(net, example=examples(), strict=True)
    for given in others():
        if int(given[2].max()) <= LONGEST:
            torch.testing.assert_close(fast(*given), net(*given))
            continue
        with warnings.catch_warnings(), pytest.raises(ValueError, match="total_length"):
            warnings.simplefilter("ignore", RecastWarning)
            fast(*given)


# ---------------------------------------------------------------- loops that count their steps


def ticking() -> Callable[[], int]:
    """Counts its calls."""
    ticks = [0]

    def tick() -> int:
        ticks[0] += 1
        return ticks[0]

    return tick


class Counting(nn.Module):
    """A loop like that of :class:`Dynamic`, whose number of steps shows in what it returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.how, self.calls = Attentional(), how, 0
        self.bias, self.other = nn.Parameter(torch.ones(H)), nn.Parameter(torch.zeros(H))

    def forward(self, packed: PackedSequence, scores: Tensor) -> PackedSequence:
        rows, counts, order, back = packed
        h = torch.zeros(int(counts[0]), H, dtype=rows.dtype, device=rows.device)
        out = torch.zeros(rows.size(0), H, dtype=rows.dtype, device=rows.device)
        begin, steps, seen, inside, shift = 0, 0, [], [0], self.bias
        odd, other, grown, ticks = False, self.other, self.bias, torch.zeros(1)
        queue, nested, numbers, tick = deque([1]), [[1]], iter(range(99)), ticking()
        first = second = third = None
        self.calls = 0
        for n in counts:
            h = self.cell(rows[begin : begin + n], h[0:n], scores[begin : begin + n])
            out[begin : begin + n] = h
            begin += n
            if self.how == "counter":
                steps += 1
            elif self.how == "list":
                seen.append(n)
            elif self.how == "inside":
                inside[0] += 1
            elif self.how == "attribute":
                self.calls += 1
            elif self.how == "parameter":
                shift = shift + self.bias
            elif self.how == "flag":
                odd = not odd
            elif self.how == "swap":
                shift, other = other, shift
            elif self.how == "shape":
                grown = F.pad(grown, (0, 1))
            elif self.how == "in place":
                ticks += 1
            elif self.how == "deque":
                queue.append(1)
            elif self.how == "nested":
                nested[0].append(1)
            elif self.how == "iterator":
                next(numbers)
            elif self.how == "closure":
                tick()
            elif self.how == "late":
                third, second, first = second, first, h
            elif self.how == "drawn":
                torch.rand(1)
            elif self.how == "asked" and n < 1:
                break
        if self.how == "enumerate":
            for t, _ in enumerate(counts):
                steps = t + 1
        many = {
            "enumerate": steps,
            "counter": steps,
            "list": len(seen),
            "inside": inside[0],
            "attribute": self.calls,
            "flag": int(odd),
            "shape": grown.numel(),
            "in place": ticks,
            "deque": len(queue),
            "nested": len(nested[0]),
            "iterator": next(numbers),
            "closure": tick(),
            "late": int(third is not None),
            "drawn": torch.rand(1) if self.how == "drawn" else 0,
        }
        out = out * (many.get(self.how, 0) + 1) + shift
        return PackedSequence(out, counts, order, back)


FORMS = (
    "counter", "list", "inside", "attribute", "parameter", "enumerate", "flag", "swap", "shape",
    "in place", "deque", "nested", "iterator", "closure", "late", "drawn", "asked",
)  # fmt: skip


@pytest.mark.parametrize("how", FORMS)
def test_loops_that_count_their_steps(how: str) -> None:
    torch.manual_seed(2)
    net = Evolving(Counting(how))
    fast = recast.optimize(net, example=examples(), strict=True)
    for given in others():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.manual_seed(3)
            want = net(*given)
            torch.manual_seed(3)
            torch.testing.assert_close(fast(*given), want)
