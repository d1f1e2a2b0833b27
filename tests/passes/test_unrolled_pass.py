"""fuse-recurrence: loops over the steps of a cell become one call; what keeps them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

D, H, T = 5, 7, 4


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, T, D, generator=g, dtype=torch.float64)
    scores = torch.rand(rows, T, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, T + 1, (rows,), generator=g)
    lengths[0], lengths[1] = T, 1
    return x, scores, lengths


BATCHES = [batch(6, 0), batch(9, 1)]


class Attentional(nn.Module):
    """The cell of DIEN: AUGRU, or AGRU, whose score is all of the update gate."""

    def __init__(self, update: bool) -> None:
        super().__init__()
        self.update = update
        self.x, self.h = nn.Linear(D, 3 * H), nn.Linear(H, 3 * H)

    def forward(self, x: Tensor, h: Tensor, score: Tensor) -> Tensor:
        (xr, xz, xn), (hr, hz, hn) = self.x(x).chunk(3, 1), self.h(h).chunk(3, 1)
        r = torch.sigmoid(xr + hr)
        n = torch.tanh(xn + r * hn)
        w = score.view(-1, 1)
        if self.update:
            w = w * torch.sigmoid(xz + hz)
        return (1.0 - w) * h + w * n


class Products(nn.Module):
    """AGRU with a matrix for each gate, and no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.randn(D, H) for _ in range(2))
        self.u = nn.ParameterList(torch.randn(H, H) for _ in range(2))

    def forward(self, x: Tensor, h: Tensor, score: Tensor) -> Tensor:
        r = torch.sigmoid(x @ self.w[0] + h @ self.u[0])
        return h + score.unsqueeze(1) * (torch.tanh(x @ self.w[1] + r * (h @ self.u[1])) - h)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)

    def forward(self, x: Tensor, h: Tensor, score: Tensor) -> Tensor:
        return self.cell(x, h)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "augru": lambda: Attentional(True),
    "agru": lambda: Attentional(False),
    "products": Products,
    "nn.GRUCell": Torchs,
}


class Looped(nn.Module):
    """A loop over the steps of a cell; ``collect`` says what is made of its states."""

    def __init__(self, cell: nn.Module, collect: str = "last", first: int = 0) -> None:
        super().__init__()
        self.cell, self.collect, self.first = cell, collect, first
        self.end = nn.Linear(H, 2)

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        if self.collect == "steps first":
            x, scores = x.transpose(0, 1), scores.transpose(0, 1)
        h = torch.zeros(lengths.shape[0], H, dtype=x.dtype)
        states = []
        for t in range(self.first, T):
            if self.collect == "steps first":
                h = self.cell(x[t], h, scores[t])
            elif self.collect == "computed":
                h = self.cell(x[:, t].tanh(), h, scores[:, t] + t)
            else:
                h = self.cell(x[:, t, :], h, scores[:, t])
            states.append(h)
        if self.collect == "cat":
            return self.end(torch.cat([one.unsqueeze(1) for one in states], dim=1)) + h.sum()
        if self.collect == "each":
            return self.end(states[0] + 2.0 * states[1] * states[2]) + self.end(h)
        if self.collect in ("stack", "steps first"):
            return self.end(torch.stack(states, 0 if self.collect == "steps first" else 1))
        return self.end(h)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell(cell: str) -> None:
    torch.manual_seed(2)
    fast = same(Looped(CELLS[cell](), "stack"), BATCHES, steps=cell == "agru")
    assert len(calls(fast, "gru")) == 1
    assert fired(fast)["fuse-recurrence"] == (1 if cell == "nn.GRUCell" else T + 1)


@pytest.mark.parametrize(
    ("collect", "first"),
    [("last", 0), ("last", 1), ("cat", 0), ("each", 0), ("steps first", 0), ("computed", 0)],
)
def test_every_loop(collect: str, first: int) -> None:
    torch.manual_seed(2)
    fast = same(Looped(Attentional(True), collect, first), BATCHES, steps=False)
    (call,) = calls(fast, "gru")
    assert call.args[1] is None
    copies = [n for n in fast.graph.nodes if n.target in (torch.stack, torch.cat)]
    assert len(copies) == (2 if collect == "computed" else 0)


def test_steps_that_read_earlier_states_stay_apart() -> None:
    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.back = Attentional(True), nn.Linear(H, D)

        def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[0], H)
            for t in range(2):
                h = self.cell(x[:, t] + self.back(h), h, scores[:, t])
            return h

    torch.manual_seed(2)
    fast = same(Fed(), BATCHES, steps=False)
    assert len(calls(fast, "gru")) == 2


class Alone(nn.Module):
    """nn.GRUCell in loops that cannot be one call, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cell = how, nn.GRUCell(D, H)
        self.back = nn.Linear(H, D)

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        h = torch.zeros(lengths.shape[0], H, dtype=x.dtype)
        for t in range(1 if self.how == "one step" else T):
            if self.how == "mixed":  # attention between the steps
                w = scores[:, t : t + 1]
                h = (1 - w) * h + w * self.cell(x[:, t], h)
            elif self.how == "read":
                h = self.cell(x[:, t] + self.back(h), h)
            else:
                h = self.cell(x[:, t], h)
        return h


@pytest.mark.parametrize(("how", "count"), [("one step", 1), ("mixed", T), ("read", 1)])
def test_cells_of_torch_outside_loops_stay_torchs(how: str, count: int) -> None:
    torch.manual_seed(2)
    fast = same(Alone(how), BATCHES, steps=False)
    assert not calls(fast, "gru")
    assert "fuse-recurrence" not in fired(fast)
    why = "the input of a step is computed from the state before it"
    told = why if how == "read" else "a call for each step"
    joint = ":" if how == "read" else ","
    assert misses(fast, "fuse-recurrence") == [f"nn.GRUCell is left to torch{joint} {told}"] * count


class Forked(nn.Module):
    """Two loops of one cell that go on from the same state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        h = self.cell(x[:, 0], torch.zeros(lengths.shape[0], H, dtype=x.dtype))
        a, b = h, h
        for t in range(1, T):
            a, b = self.cell(x[:, t], a), self.cell(x[:, T - t], b)
        return a * torch.tanh(b) + h


def test_loops_that_fork_are_one_call_each() -> None:
    torch.manual_seed(2)
    fast = same(Forked(), BATCHES, steps=False)
    assert len(calls(fast, "gru")) == 2
    assert misses(fast, "fuse-recurrence") == ["nn.GRUCell is left to torch, a call for each step"]


def test_two_cells_stay_two() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([Attentional(True), Attentional(True)])

        def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[0], H)
            for t in range(T):
                h = self.cells[t // 2](x[:, t], h, scores[:, t])
            return h

    torch.manual_seed(2)
    fast = same(Two(), BATCHES, steps=False)
    assert len(calls(fast, "gru")) == 2


class Dynamic(nn.Module):
    """As in DIEN: a loop over the rows of packed sequences, written into one tensor."""

    def __init__(self, update: bool, joined: bool, peek: bool = False) -> None:
        super().__init__()
        self.cell, self.joined, self.peek = Attentional(update), joined, peek

    def forward(self, packed: PackedSequence, scores: Tensor) -> tuple[PackedSequence, Tensor]:
        rows, counts, order, back = packed
        h = torch.zeros(int(counts[0]), H, dtype=rows.dtype, device=rows.device)
        out = torch.zeros(rows.size(0), H, dtype=rows.dtype, device=rows.device)
        begin, states, seen = 0, [], rows.new_zeros(())
        for n in counts:
            h = self.cell(rows[begin : begin + n], h[0:n], scores[begin : begin + n])
            if self.joined:
                states.append(h)
            else:
                out[begin : begin + n] = h
            if self.peek and len(states) == 0:
                seen = seen + out.sum()
            begin += n
        if self.joined:
            out = torch.cat(states)
        return PackedSequence(out, counts, order, back), seen


class Evolving(nn.Module):
    def __init__(self, loop: Dynamic) -> None:
        super().__init__()
        self.loop, self.end = loop, nn.Linear(H, 2)

    def forward(self, x: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        def packed(values: Tensor) -> PackedSequence:
            return pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)

        out, seen = self.loop(packed(x), packed(F.softmax(scores, 1)).data)
        states, _ = pad_packed_sequence(out, batch_first=True, total_length=T)
        return self.end(states) + seen


@pytest.mark.parametrize("update", [True, False], ids=["augru", "agru"])
@pytest.mark.parametrize("joined", [True, False])
def test_packed_loops(update: bool, joined: bool) -> None:
    torch.manual_seed(2)
    fast = same(Evolving(Dynamic(update, joined)), BATCHES, steps=update and not joined)
    assert fast.report.captured == "whole"
    (call,) = calls(fast, "gru")
    assert call.args[1] is None and call.args[6] is not None  # lengths: see test_padded_pass
    assert not [n for n in fast.graph.nodes if n.name.startswith("setitem")]


def test_a_loop_whose_result_is_read_half_written_stays() -> None:
    torch.manual_seed(2)
    fast = same(Evolving(Dynamic(True, joined=False, peek=True)), BATCHES, steps=False)
    assert len(calls(fast, "gru")) == T
