"""fuse-field-attention of masked scores: by hand, torch's two functions, rows without keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passkit import EXACT, calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

import recast
from recast.runtime import device

ROWS, HEADS, DIM = 5, 2, 6
CAUSAL = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)


def batch(rows: int, seed: int, length: int = ROWS) -> tuple[Tensor, ...]:
    """Vectors of a sequence, and ids of which trailing ones are 0, but never the first."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 9, (rows, length), generator=g)
    ids[torch.arange(length) >= torch.randint(1, length + 1, (rows, 1), generator=g)] = 0
    return torch.randn(rows, length, DIM, generator=g, dtype=torch.float64), ids


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(x, ids) = attend(self, x, ids)``, with layers to use."""

    def __init__(self, attend: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.attend = attend
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(DIM, DIM))
        self.drop = nn.Dropout(0.3)
        self.near = nn.Parameter(torch.randn(ROWS, ROWS))
        self.one = nn.MultiheadAttention(DIM, HEADS, dropout=0.3, batch_first=True)
        self.first = nn.MultiheadAttention(DIM, HEADS, dropout=0.3)
        self.plain = nn.MultiheadAttention(DIM, 1, bias=False, batch_first=True)
        self.register_buffer("far", torch.where(CAUSAL, -1e4, 0.0))

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.attend(self, x, ids)


def _heads(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    split = (x.shape[0], x.shape[1], HEADS, DIM // HEADS)
    return tuple(layer(x).view(split).transpose(1, 2) for layer in (m.q, m.k, m.v))


def _by_hand(
    cover: Callable[[Any, Tensor, Tensor], Tensor],
) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Attention with heads, whose scores ``cover(m, scores, ids)`` masks."""

    def attend(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = _heads(m, x)
        scores = cover(m, torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(3), ids)
        return torch.matmul(m.drop(F.softmax(scores, dim=-1)), v).transpose(1, 2).flatten(2)

    return attend


def _padded(ids: Tensor) -> Tensor:
    return (ids == 0).unsqueeze(1).unsqueeze(2)


def _flat(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    scores = torch.bmm(m.q(x), m.k(x).mT).masked_fill((ids == 0)[:, None], -1e9)
    return torch.bmm(torch.softmax(scores, -1), m.v(x))


def _causal(m: Any, x: Tensor, **given: Any) -> Tensor:
    """As SASRec calls it: a query of its own, rows of a sequence first."""
    x = x.transpose(0, 1)
    mask = ~torch.tril(torch.ones(ROWS, ROWS, dtype=torch.bool))
    return m.first(m.q(x), x, x, attn_mask=mask, **given)[0]


def _sdpa(**given: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    return lambda m, x, ids: F.scaled_dot_product_attention(*_heads(m, x), **given)


FORMS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "masked_fill": _by_hand(lambda m, s, ids: s.masked_fill(_padded(ids), -1e9)),
    "masked_fill_": _by_hand(lambda m, s, ids: s.masked_fill_(_padded(ids), -1e9)),
    "where of ones": _by_hand(
        lambda m, s, ids: torch.where(_padded(ids), torch.ones_like(s) * (-(2**32) + 1), s)
    ),
    "where not, of a number like them": _by_hand(
        lambda m, s, ids: torch.where(~_padded(ids), s, torch.full_like(s, -1e9))
    ),
    "masked_fill of a comparison": _by_hand(
        lambda m, s, ids: s.masked_fill((ids > 0).unsqueeze(1).repeat(1, ROWS, 1)[:, None] == 0, -9)
    ),
    "where": _by_hand(lambda m, s, ids: torch.where(~_padded(ids), s, -1e9)),
    "where of the others": _by_hand(lambda m, s, ids: torch.where(_padded(ids), -1e9, s)),
    "added": _by_hand(lambda m, s, ids: s + m.far),
    "subtracted": _by_hand(lambda m, s, ids: s - _padded(ids).double() * 1e4),
    "learned, then filled": _by_hand(
        lambda m, s, ids: (m.near + s).masked_fill(_padded(ids), -torch.inf)
    ),
    "three dimensions": _flat,
    "module": lambda m, x, ids: m.one(x, x, x, key_padding_mask=ids == 0)[0],
    "module, both masks": lambda m, x, ids: m.one(
        x, x, x, key_padding_mask=ids == 0, attn_mask=CAUSAL
    )[0],
    "module, a mask for each head": lambda m, x, ids: m.one(
        x, x, x, attn_mask=(ids == 0)[:, None].repeat_interleave(HEADS, 0).expand(-1, ROWS, -1)
    )[0],
    "module, numbers": lambda m, x, ids: m.plain(x, x, x, attn_mask=m.far, need_weights=False)[0],
    "module, rows first, one query": lambda m, x, ids: _causal(m, x),
    "module, no weights": lambda m, x, ids: _causal(m, x, need_weights=False),
    "module, a target": lambda m, x, ids: m.one(
        m.q(x)[:, :1], x, x, key_padding_mask=ids == 0, need_weights=False
    )[0],
    "module, a hint": lambda m, x, ids: m.one(
        x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False
    )[0],
    "module, a wrong hint": lambda m, x, ids: m.one(
        x, x, x, attn_mask=ids[:1] != ids[:1].T, is_causal=True, need_weights=False
    )[0],
    "module, a hint that nobody reads": lambda m, x, ids: m.one(
        x, x, x, None, True, m.near, True, True
    )[0],
    "module, one query and no bias": lambda m, x, ids: m.plain(m.q(x), x, x)[0],
    "sdpa": lambda m, x, ids: F.scaled_dot_product_attention(*_heads(m, x), _padded(ids) == 0),
    "sdpa, numbers": lambda m, x, ids: F.scaled_dot_product_attention(*_heads(m, x), m.far),
    "sdpa, causal": _sdpa(is_causal=True, scale=0.7),
    "sdpa, three dimensions": lambda m, x, ids: F.scaled_dot_product_attention(
        m.q(x), m.k(x), m.v(x), (ids != 0)[:, None].expand(-1, ROWS, -1)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_mask(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["fuse-field-attention"] == 1, journal(fast).missed
    (call,) = calls(fast, "field_attention")
    assert len(call.args) > 7 or "one query and no bias" in form
    left = (F.softmax, torch.softmax, torch.masked_fill, F.scaled_dot_product_attention)
    assert not [n for n in fast.graph.nodes if n.target in (*left, "masked_fill", "masked_fill_")]


@pytest.mark.parametrize("form", ["masked_fill", "module, both masks", "sdpa, causal"])
@pytest.mark.parametrize("isa", device.ISAS)
def test_the_kernels_agree_with_plain_torch(form: str, isa: str) -> None:
    """In float32, with a batch of none, of one, and a slice of a larger one."""
    why = device.why_not(isa)()
    if why is not None:
        pytest.skip(why)
    model = Model(FORMS[form]).eval()
    (x, ids), g = batch(12, 3), torch.Generator().manual_seed(5)
    x = x.float()
    fast = optimized(model, [(x, ids), (x[:2], ids[:2])])
    assert calls(fast, "field_attention")
    with device.use(isa):
        for part in (slice(0, 0), slice(3, 4), slice(1, 12, 2)):
            given = [x[part].clone().requires_grad_() for _ in range(2)]
            outs = [m(t, ids[part]) for m, t in zip((fast, model), given, strict=True)]
            up = torch.randn(outs[0].shape, generator=g)
            grads = [
                torch.autograd.grad(o, [t, *model.parameters()], up, allow_unused=True)
                for o, t in zip(outs, given, strict=True)
            ]
            torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["one", "first", "plain"])
def test_a_query_without_keys_is_what_torch_makes_it(name: str, weights: bool) -> None:
    """Zeros or NaN: torch's slow and fast ways differ, as do its calls with and without weights."""

    def attend(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        module = getattr(m, name)
        mask = (ids == 0)[:, None].repeat_interleave(module.num_heads, 0).expand(-1, ROWS, -1)
        x = x if module.batch_first else x.transpose(0, 1)
        return module(x, x, x, attn_mask=mask, need_weights=weights)[0]

    model = Model(attend).double()
    x, ids = batch(4, 2)
    fast = optimized(model, [(x, ids), (x[:2], ids[:2])])
    assert calls(fast, "field_attention")
    ids[1] = 0
    kinds = set()
    for training in (True, False):
        model.train(training)
        fast.train(training)
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                torch.manual_seed(1)
                want = model(x, ids)
                torch.manual_seed(1)
                torch.testing.assert_close(fast(x, ids), want, equal_nan=True, **EXACT)
            kinds.add(bool(want.isnan().any()))
    assert kinds == ({True} if weights else {False, True} if name == "one" else {False})


@pytest.mark.parametrize(
    ("padding", "mask"),
    [((1, ROWS), None), (None, (HEADS, ROWS, ROWS))],
)
def test_masks_that_torch_refuses_are_not_spread(padding: Any, mask: Any) -> None:
    """Though they would broadcast."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor, mask: Tensor) -> Any:
            return self.one(x, x, x, key_padding_mask=padding, attn_mask=mask)[0]

    def given(rows: int) -> tuple[Tensor, ...]:
        shapes = (rows, ROWS), (rows * HEADS, ROWS, ROWS)
        masks = (torch.zeros(s, dtype=torch.bool) for s in shapes)
        return torch.randn(rows, ROWS, DIM), *masks

    model = Masked()
    fast = optimized(model, [given(4), given(3)])
    assert calls(fast, "field_attention")
    x, one, other = given(4)
    one = one if padding is None else torch.zeros(padding, dtype=torch.bool)
    other = other if mask is None else torch.zeros(mask, dtype=torch.bool)
    for m in (model, fast):
        with pytest.raises((RuntimeError, AssertionError, recast.InputError)):
            m(x, one, other)


def test_a_result_with_rows_first_lies_as_torchs() -> None:
    """Of ``batch_first=False``: a caller may ask for a view of it."""
    model = Model(lambda m, x, ids: (lambda y: m.first(y, y, y)[0])(x.transpose(0, 1)))
    fast = optimized(model.double(), BATCHES)
    assert calls(fast, "field_attention")
    for m in (model, fast):
        assert m(*BATCHES[0]).is_contiguous()


@pytest.mark.parametrize("fill", [-torch.inf, -1e9])
def test_a_row_that_is_all_filled_is_what_torch_makes_it(fill: float) -> None:
    """NaN, or the mean of all: not the softmax of the scores, and no gradient reaches them."""
    model = Model(_by_hand(lambda m, s, ids: s.masked_fill(_padded(ids), fill))).eval()
    x, ids = batch(4, 2)
    fast = optimized(model, [(x.float(), ids), (x[:2].float(), ids[:2])])
    assert calls(fast, "field_attention")
    ids[1] = 0
    found = []
    for m in (model, fast):
        given = x.float().requires_grad_()
        out = m(given, ids)
        out.backward(torch.ones_like(out).cumsum(-1))
        found.append((out.detach(), given.grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool(found[0][0].isnan().any()) is math.isinf(fill)


def _seen(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """The scores are read before they are filled, too."""
    q, k, v = _heads(m, x)
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(3)
    mean = scores.mean((1, 2, 3))
    weights = F.softmax(scores.masked_fill_(_padded(ids), -9), dim=-1)
    out = torch.matmul(weights, v).transpose(1, 2).flatten(2)
    return out + mean[:, None, None]


MISSES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], str]] = {
    "in place": (_seen, "filled in place"),
    "weights": (
        lambda m, x, ids: m.one(x, x, x, key_padding_mask=ids == 0), "weights are used",
    ),
    "hint": (
        lambda m, x, ids: m.one(
            x, x, x, attn_mask=CAUSAL, is_causal=m.training, need_weights=False
        )[0],
        "is_causal lets torch read the mask or not",
    ),
    "long vectors": (
        lambda m, x, ids: (
            lambda y: F.scaled_dot_product_attention(y, y, y, is_causal=True)
        )(x.repeat(1, 1, 6)),
        "for vectors of 36 elements torch's own call is as fast",
    ),
    "dropout": (
        lambda m, x, ids: F.scaled_dot_product_attention(*_heads(m, x), None, 0.3, True),
        "order of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    attend, why = MISSES[form]
    fast = same(Model(attend), BATCHES, steps=False)
    assert not calls(fast, "field_attention")
    assert any(why in text for text in misses(fast, "fuse-field-attention")), journal(fast).missed


def test_dropped_weights_pay_for_longer_sequences() -> None:
    """Up to 256 places with dropout, up to 128 without."""
    attend = _by_hand(lambda m, s, ids: s.masked_fill(_padded(ids), -1e9))
    for p, pays in ((0.3, True), (0.0, False)):
        model = Model(attend)
        model.drop.p = p
        fast = optimized(model.double(), [batch(3, 0, 160), batch(2, 1, 160)])
        assert bool(calls(fast, "field_attention")) is pays
        assert any("160 fields" in t for t in misses(fast, "fuse-field-attention")) is not pays


@pytest.mark.parametrize(
    "attend",
    [
        _by_hand(lambda m, s, ids: s.masked_fill(_padded(ids), -1e9) * 2),  # scaled after it
        _by_hand(lambda m, s, ids: s.masked_fill(_padded(ids), s.detach().min())),  # no number
        lambda m, x, ids: m.one(x, m.k(x), x, key_padding_mask=ids == 0)[0],
    ],
)
def test_what_is_none_stays(attend: Callable[[Any, Tensor, Tensor], Any]) -> None:
    fast = same(Model(attend), BATCHES, steps=False)
    assert not calls(fast, "field_attention")


@pytest.mark.parametrize("form", ["masked_fill", "module", "sdpa"])
def test_on_a_gpu_masked_attention_stays_with_torch(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recast.passes.attention_call.device_of", lambda root: "cuda")
    fast = optimized(Model(FORMS[form]).double(), BATCHES)
    assert not calls(fast, "field_attention")
    assert any("on a CPU only" in text for text in misses(fast, "fuse-field-attention"))


@pytest.mark.parametrize(("length", "width", "pays"), [(64, 80, False), (60, 80, True)])
def test_long_vectors_of_many_places_do_not_pay(length: int, width: int, pays: bool) -> None:
    """Without dropout, on a CPU."""

    def attend(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        y = x.repeat(1, 1, 14)[..., :width]
        return torch.softmax(y @ y.mT / 9, -1) @ y

    fast = optimized(Model(attend).double(), [batch(3, 0, length), batch(2, 1, length)])
    assert bool(calls(fast, "field_attention")) is pays
    assert any("80 elements" in t for t in misses(fast, "fuse-field-attention")) is not pays
