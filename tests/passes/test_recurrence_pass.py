"""fuse-recurrence: layers of nn.GRU, dense and packed; cells in every spelling; each named Miss."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import recast

D, H, T = 5, 7, 4


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, T, D, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, T + 1, (rows,), generator=g)
    lengths[0] = T
    return x, lengths


BATCHES = [batch(6, 0), batch(9, 1)]


class Layers(nn.Module):
    """nn.GRU of dense sequences; both of its results are read."""

    def __init__(self, **options: bool | float) -> None:
        super().__init__()
        self.first = bool(options.get("batch_first"))
        self.gru = nn.GRU(D, H, **options)
        self.start = nn.Parameter(torch.randn(int(options.get("num_layers", 1)), 1, H))
        self.last = nn.Linear(H, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        seen = x if self.first else x.transpose(0, 1)
        out, h = self.gru(seen, self.start.expand(-1, x.shape[0], -1).contiguous())
        return self.last(out.sum(1 if self.first else 0) + h[-1] * lengths.unsqueeze(1))


@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"num_layers": 2}, {"batch_first": True, "num_layers": 2,
                                                "bias": False}],
    ids=["batch first", "two layers", "no bias"],
)  # fmt: skip
def test_layers(options: dict[str, bool | int]) -> None:
    torch.manual_seed(2)
    fast = same(Layers(**options), BATCHES, steps=options == {"batch_first": True})
    assert fired(fast)["fuse-recurrence"] == 1
    assert len(calls(fast, "gru")) == options.get("num_layers", 1)


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0"])
def test_weights_replaced_before_backward(name: str) -> None:
    """As one who perturbs weights for a forward only: its gradient is of those it read."""
    plain, found = Layers(batch_first=True).float(), []
    x, lengths = BATCHES[0][0].float(), BATCHES[0][1]
    for model in (plain, recast.optimize(copy.deepcopy(plain), example=(x, lengths))):
        weight = model.gru.get_parameter(name)
        kept, weight.data = weight.data, weight.data * 0.5
        loss = model(x, lengths).square().sum()
        weight.data = kept
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_states_that_are_returned_lie_as_torchs_do(first: bool) -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(D, H, num_layers=2, batch_first=first)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.gru(x if first else x.transpose(0, 1))[0]

    torch.manual_seed(2)
    fast = same(Returned(), BATCHES, steps=False)
    assert len(calls(fast, "gru")) == 2
    assert not [n for n in fast.graph.nodes if n.target in ("contiguous", torch.clone)]
    net, (x, lengths) = Returned(), BATCHES[0]
    fast = recast.optimize(net, example=[(b.float(), n) for b, n in BATCHES])
    ours, theirs = fast(x.float(), lengths), net(x.float(), lengths)
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs)


class Packed(nn.Module):
    """nn.GRU of sequences of different lengths, in no order."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(D, H, batch_first=True)
        self.end = nn.Linear(H, 1)
        self.last = last

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, h = self.gru(packed)
        if self.last:
            return self.end(h[0])
        return self.end(pad_packed_sequence(out, batch_first=True, total_length=T)[0].sum(1))


@pytest.mark.parametrize("last", [True, False])
def test_packed_sequences(last: bool) -> None:
    torch.manual_seed(2)
    fast = same(Packed(last), BATCHES, steps=False)
    assert fired(fast)["fuse-recurrence"] == 1 + 1  # the layer, and its packing
    assert len(calls(fast, "gru")) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [({"bidirectional": True}, "both directions"), ({"dropout": 0.2, "num_layers": 2}, "dropout")],
    ids=["both directions", "dropout"],
)
def test_layers_that_stay(options: dict[str, bool | float], why: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(D, H, batch_first=True, **options)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.gru(x)[0].sum(1) * lengths.unsqueeze(1)

    torch.manual_seed(2)
    fast = same(Plain(), BATCHES, steps=False)
    assert not calls(fast, "gru")
    assert any(why in said for said in misses(fast, "fuse-recurrence"))


class Others(nn.Module):
    """Recurrent layers that no rule takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.rnn = nn.LSTM(D, H, batch_first=True), nn.RNN(D, H, batch_first=True)
        self.cells = nn.ModuleList([nn.LSTMCell(D, H), nn.RNNCell(D, H)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.cells[0](x[:, 0])[0] + self.cells[1](x[:, 1])
        return (self.lstm(x)[0] + self.rnn(x)[0]).sum(1) * lengths.unsqueeze(1) + h


def test_other_layers_are_named_as_left_to_torch() -> None:
    torch.manual_seed(2)
    fast = same(Others(), BATCHES, steps=False)
    whole = "is left to torch, whose own kernels run all steps"
    step = "is left to torch, a call for each step"
    assert misses(fast, "fuse-recurrence") == [
        f"nn.LSTMCell {step}", f"nn.RNNCell {step}", f"nn.LSTM {whole}", f"nn.RNN {whole}",
    ]  # fmt: skip
    told = [m for m in fast.report.to_dict()["missed"] if m["rule"] == "fuse-recurrence"]
    assert all(m["where"].startswith("test_recurrence_pass.py:") for m in told)
    assert told[0]["tries"] == ["nn.LSTM over all steps"] and not told[2]["tries"]


# ---------------------------------------------------------------- cells

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # h, n, w
MIXES: dict[str, Mix] = {
    "paper": lambda h, n, w: (1 - w) * h + w * n,
    "the other way": lambda h, n, w: n * w + h * (1.0 - w),
    "torch's": lambda h, n, w: (1 - w) * n + w * h,
    "difference": lambda h, n, w: n + w * (h - n),
    "new one last": lambda h, n, w: h + w * (n - h),
}


class Cell(nn.Module):
    """Three steps of a cell whose products are spelled in some way."""

    def __init__(self, mix: Mix, form: str = "chunks") -> None:
        super().__init__()
        self.mix, self.form = mix, form
        self.x, self.h = nn.Linear(D, 3 * H), nn.Linear(H, 3 * H, bias=form == "chunks")
        self.w = nn.ParameterList(torch.randn(D, H) for _ in range(3))
        self.u = nn.ParameterList(torch.randn(H, H) for _ in range(3))
        self.b = nn.ParameterList(torch.randn(1, H) for _ in range(3))
        self.each = nn.ModuleList(nn.Linear(D, H, bias=k == 1) for k in range(3))

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.form == "chunks":
            (xr, xz, xn), (hr, hz, hn) = self.x(x).chunk(3, 1), self.h(h).chunk(3, -1)
        elif self.form == "functions, z first":
            xz, xr, xn = F.linear(x, self.x.weight, self.x.bias).split(H, 1)
            hz, hr, hn = F.linear(h, self.h.weight).chunk(3, dim=1)
        elif self.form == "layers":
            xr, xz, xn = (layer(x) for layer in self.each)
            hr, hz, hn = (h @ u for u in self.u)
        else:
            xr, xz, xn = (torch.matmul(x, w) for w in self.w)
            hr, hz, hn = (torch.matmul(h, u) for u in self.u)
            xr, xz, xn = xr + self.b[0], self.b[1] + xz, xn + self.b[2]
        r = torch.sigmoid(xr + hr)
        return r, torch.sigmoid(hz + xz), torch.tanh(xn + r * hn)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], H)
        for t in range(3):
            _, z, n = self.gates(x[:, t], h)
            h = self.mix(h, n, z)
        return h


@pytest.mark.parametrize("mix", MIXES)
def test_every_mixture(mix: str) -> None:
    torch.manual_seed(2)
    fast = same(Cell(MIXES[mix]), BATCHES, steps=mix == "paper")
    assert fired(fast)["fuse-recurrence"] == 3 + 1  # three cells, and their loop
    assert len(calls(fast, "gru")) == 1


@pytest.mark.parametrize("form", ["functions, z first", "layers", "products"])
def test_every_product(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Cell(MIXES["paper"], form), BATCHES, steps=False)
    assert len(calls(fast, "gru")) == 1


class Attended(nn.Module):
    """AUGRU: the score of a step takes part in its update gate."""

    def __init__(self, wide: bool, kept: bool = False) -> None:
        super().__init__()
        self.wide, self.kept = wide, kept
        self.cell = Cell(MIXES["paper"], "products")
        self.weigh = nn.Linear(D, H if wide else 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], H)
        for t in range(2):
            _, z, n = self.cell.gates(x[:, t], h)
            score = self.weigh(x[:, t])
            w = score.tanh() * z if self.wide else score * z
            h = n + w * (h - n) if self.kept else (1 - w) * h + w * n
        return h * lengths.unsqueeze(1)


def test_scores() -> None:
    torch.manual_seed(2)
    fast = same(Attended(wide=False), BATCHES, steps=False)
    (call,) = calls(fast, "gru")
    assert isinstance(call.args[2], torch.fx.Node)


def test_a_score_for_each_number_is_a_miss() -> None:
    torch.manual_seed(2)
    fast = same(Attended(wide=True), BATCHES, steps=False)
    assert not calls(fast, "gru")
    assert any("one number a sample" in why for why in misses(fast, "fuse-recurrence"))


def test_a_score_of_what_is_kept_is_a_miss() -> None:
    """1 - s z is not s (1 - z), which a score means to the op if z is what is kept."""
    torch.manual_seed(2)
    fast = same(Attended(wide=False, kept=True), BATCHES, steps=False)
    assert not calls(fast, "gru")
    assert any("weighs the state it keeps" in why for why in misses(fast, "fuse-recurrence"))
    assert not fast.report.to_dict()["raised"]


class Evolution(nn.Module):
    """As DIEN: a cell in a module whose loop depends on the lengths, which runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(D, D)
        self.loop = Loop()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.loop(self.table(x), lengths)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Step()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], H)
        for t in range(int(lengths.max())):
            h = torch.where(lengths.unsqueeze(1) > t, self.cell(x[:, t], h), h)
        return h


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(3 * H, D)), nn.Parameter(torch.randn(3 * H, H))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        (a, b, c), (d, e, f) = F.linear(x, self.w).chunk(3, 1), F.linear(h, self.u).chunk(3, 1)
        r, z = torch.sigmoid(a + d), torch.sigmoid(b + e)
        return (1 - z) * h + z * torch.tanh(c + r * f)


def test_a_cell_inside_what_runs_as_it_is() -> None:
    torch.manual_seed(2)
    short = (BATCHES[1][0], BATCHES[1][1].clamp(max=3))
    fast = same(Evolution(), [BATCHES[0], short], steps=False)
    assert fired(fast)["fuse-recurrence"] == 1
    assert fast.report.captured == "whole"
