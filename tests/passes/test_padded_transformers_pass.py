"""open-transformers with masks: torch's slow and fast ways, rows without keys, padding skipped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from passkit import EXACT, calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

from recast.runtime import device
from recast.runtime.layers import encoder_masks

WIDTH, HEADS, LENGTH = 8, 2, 6
# The first use in a process of what plain torch uses too, and its own conversion of its masks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Converting mask without torch.bool"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


class Net(nn.Module):
    """An encoder, or a layer alone, of given ``masks(self, ids)``."""

    def __init__(self, masks: Any, **options: Any) -> None:
        super().__init__()
        alone, nested = options.pop("alone", False), options.pop("nested", True)
        settings = {"dim_feedforward": 12, "dropout": 0.1, "batch_first": True} | options
        self.masks, self.batch_first = masks, settings["batch_first"]
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **settings)
        nested = nested and self.batch_first and not settings.get("norm_first")
        norm = nn.LayerNorm(WIDTH)
        self.encoder = layer if alone else nn.TransformerEncoder(layer, 2, norm, nested)
        self.table = nn.Embedding(9, WIDTH)
        near = torch.arange(LENGTH)
        self.register_buffer("near", -0.3 * (near[:, None] - near).abs().double())
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.encoder(x, **self.masks(self, ids))


def batch(rows: int, seed: int) -> tuple[Tensor]:
    """Ids of which trailing ones are 0, but never the first."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 9, (rows, LENGTH), generator=g)
    ids[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (rows, 1), generator=g)] = 0
    return (ids,)


BATCHES = [batch(4, 0), batch(7, 1)]


def _padding(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"src_key_padding_mask": ids == 0}


def _before(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"src_key_padding_mask": ids.flip(1) == 0}


def _numbers(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"src_key_padding_mask": (ids == 0).double() * -2.0}


def _infinite(m: Net, ids: Tensor) -> dict[str, Any]:
    return {
        "src_key_padding_mask": torch.zeros_like(ids).double().masked_fill(ids == 0, -torch.inf)
    }


def _both(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"mask": m.causal, "src_key_padding_mask": ids == 0}


def _both_numbers(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"mask": m.near, "src_key_padding_mask": (ids == 0).double() * 0.3}


def _each_head(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"mask": (ids == 0).repeat_interleave(HEADS, 0)[:, None].expand(-1, LENGTH, -1)}


def _hint(m: Net, ids: Tensor) -> dict[str, Any]:
    return {"mask": m.causal, "is_causal": True}


def _layer(masks: Any) -> Any:
    """The same, by the names of a layer."""

    def given(m: Net, ids: Tensor) -> dict[str, Any]:
        return {"src_mask" if k == "mask" else k: v for k, v in masks(m, ids).items()}

    return given


FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "padding": (_padding, {}),
    "padding, gelu": (_padding, {"activation": "gelu", "dropout": 0.0}),
    "padding, norms first": (_padding, {"norm_first": True}),
    "padding, no fast path": (_padding, {"activation": nn.LeakyReLU(), "nested": False}),
    "padding, rows first": (_padding, {"batch_first": False, "dropout": 0.0}),
    "padding, all places computed": (_padding, {"nested": False}),
    "padding before": (_before, {}),
    "numbers": (_numbers, {}),
    "infinite": (_infinite, {}),
    "both": (_both, {}),
    "both, norms first": (_both, {"norm_first": True, "dropout": 0.0}),
    "both, numbers": (_both_numbers, {}),
    "each head": (_each_head, {}),
    "near": (lambda m, ids: {"mask": m.near}, {}),
    "causal": (lambda m, ids: {"mask": m.causal}, {}),
    "causal, a hint": (_hint, {}),
    "wrong hint": (lambda m, ids: {"mask": m.near, "is_causal": True}, {}),
    "wrong hint, rows first": (
        lambda m, ids: {"mask": m.near, "is_causal": True},
        {"batch_first": False},
    ),
    "one layer": (_layer(_padding), {"alone": True}),
    "one layer, both": (_layer(_both), {"alone": True}),
    "one layer, wrong hint": (
        _layer(lambda m, ids: {"mask": m.near, "is_causal": True}), {"alone": True},
    ),
}  # fmt: skip


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own call leaves out no padded places."""
    monkeypatch.setattr(encoder_masks, "_padded", lambda length: 2.0)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does, wherever it may."""
    monkeypatch.setattr(encoder_masks, "_padded", lambda length: 0.0)
    monkeypatch.setattr(encoder_masks, "_WORTH", 0)


def _agree(plain: nn.Module, fast: nn.Module, ids: Tensor) -> Tensor:
    """The output of both, with NaN at the same places."""
    torch.manual_seed(1)
    want = plain(ids)
    torch.manual_seed(1)
    torch.testing.assert_close(fast(ids), want, equal_nan=True, **EXACT)
    return want


def _all_ways(plain: nn.Module, fast: nn.Module, form: str) -> None:
    """In train and eval mode, recorded or not: numbers, zeros or NaN, at the same places."""
    (ids,) = batch(5, 4)
    ids[1] = 0
    for training in (True, False):
        plain.train(training)
        fast.train(training)
        slow = _agree(plain, fast, ids)
        with torch.no_grad():
            quick = _agree(plain, fast, ids)
    if form in ("padding", "infinite"):  # padded places are not computed
        assert not quick.isnan().any()
        assert not torch.allclose(slow, quick)
    if form in ("padding before", "both", "each head"):
        assert quick.isnan().any()
        assert not slow.isnan().any()
    for m in (plain, fast):
        m.requires_grad_(False)
    frozen = _agree(plain, fast, ids)
    torch.testing.assert_close(frozen, quick, equal_nan=True, **EXACT)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        torch.testing.assert_close(_agree(plain, fast, ids), slow, **EXACT)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_mask(form: str) -> None:
    masks, options = FORMS[form]
    torch.manual_seed(2)
    model = Net(masks, **options).double()
    plain = copy.deepcopy(model)
    fast = same(model, BATCHES, steps=form in ("padding", "both"))
    layers = 1 if options.get("alone") else 2
    assert fired(fast)["open-transformers"] == 1, journal(fast).missed
    assert len(calls(fast, "field_attention")) == layers <= len(calls(fast, "mlp"))
    _all_ways(plain, fast, form)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("form", ["padding", "padding, gelu", "infinite"])
def test_torchs_own_call_leaves_out_padding(form: str) -> None:
    masks, options = FORMS[form]
    torch.manual_seed(3)
    model = Net(masks, **options).double()
    plain, fast = copy.deepcopy(model), optimized(model, BATCHES)
    _all_ways(plain, fast, form)


@pytest.mark.parametrize("form", ["padding", "both", "each head", "wrong hint"])
def test_opened_layers_agree_before_the_other_passes(form: str, always: None) -> None:
    """The masks are such that torch's own attention makes the same of them."""
    masks, options = FORMS[form]
    torch.manual_seed(3)
    model = Net(masks, **options).double()
    plain, fast = copy.deepcopy(model), optimized(model, BATCHES, "open-transformers")
    assert not calls(fast, "field_attention")
    _all_ways(plain, fast, form)


@pytest.mark.parametrize("form", ["padding before", "both"])
@pytest.mark.parametrize("isa", device.ISAS)
def test_the_kernels_agree_with_plain_torch(form: str, isa: str) -> None:
    why = device.why_not(isa)()
    if why is not None:
        pytest.skip(why)
    torch.manual_seed(3)
    model = Net(FORMS[form][0], dropout=0.0)
    plain, fast = copy.deepcopy(model), optimized(model, BATCHES)
    assert len(calls(fast, "field_attention")) == 2
    (ids,) = batch(5, 4)
    ids[1] = 0
    near: Any = {"rtol": 1e-4, "atol": 1e-5}
    with device.use(isa):
        outs = [m(ids) for m in (fast, plain)]
        torch.testing.assert_close(*outs, **near)
        up = torch.randn(outs[0].shape)
        grads = [
            torch.autograd.grad(o, [*m.parameters()], up)
            for o, m in zip(outs, (fast, plain), strict=True)
        ]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(fast.eval()(ids), plain.eval()(ids), equal_nan=True, **near)


@pytest.mark.parametrize("way", ["never", "always"])
def test_what_skipped_places_hold_is_not_read(way: str, request: pytest.FixtureRequest) -> None:
    """Without gradients; else NaN at a padded place makes all of its sample NaN."""
    request.getfixturevalue(way)
    torch.manual_seed(4)
    model = Net(_padding).double()
    with torch.no_grad():
        model.table.weight[0] = torch.nan
    plain, fast = copy.deepcopy(model).eval(), optimized(model, BATCHES).eval()
    (ids,) = batch(5, 4)
    assert _agree(plain, fast, ids).isnan().any()
    with torch.no_grad():
        assert not _agree(plain, fast, ids).isnan().any()


def test_torch_itself_leaves_out_padding_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If three of four places are padded, and enough of them."""
    by_torch, rows = encoder_masks._by_torch, []

    def counted(x: Tensor, *args: Any) -> Tensor:
        rows.append(len(x))
        return by_torch(x, *args)

    monkeypatch.setattr(encoder_masks, "_by_torch", counted)
    torch.manual_seed(4)
    model = Net(_padding)
    fast = optimized(model, BATCHES).eval()
    ids = torch.ones(9000, LENGTH, dtype=torch.long)
    with torch.no_grad():
        for padded, count, wanted in ((4, 9000, []), (5, 9000, [9000]), (5, 4, [])):
            ids[:, LENGTH - padded :] = 0
            rows.clear()
            fast(ids[:count])
            assert rows == wanted


MISSES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "rows are moved": (_padding, {"mask_check": False}, "mask_check=False lets torch move rows"),
    "hint": (
        lambda m, ids: {"mask": m.causal, "is_causal": m.training}, {},
        "is_causal lets torch read the mask or not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    masks, options, why = MISSES[form]
    model = Net(masks)
    vars(model.encoder).update(options)
    fast = same(model, BATCHES, steps=False)
    assert any(why in text for text in misses(fast, "open-transformers")), journal(fast).missed


def test_on_a_gpu_padded_encoders_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.passes.transformers.device_of", lambda root: "cuda")
    fast = optimized(Net(_padding).double(), BATCHES)
    assert any("fast path" in text for text in misses(fast, "open-transformers"))
