"""A defect of ours costs a rewrite, never an answer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recast
from recast import passes


class Defective:
    """Drops the last node it can, so that a parameter no longer reaches the output."""

    name = "normalize"

    def run(self, graph, context):
        output = next(n for n in graph.nodes if n.op == "output")
        first = next(n for n in graph.nodes if n.op == "placeholder")
        output.args = (first,)
        return 1


class Fails:
    name = "normalize"

    def run(self, graph, context):
        raise RuntimeError("boom")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


@pytest.mark.parametrize(("defect", "word"), [(Defective, "no longer reaches"), (Fails, "boom")])
def test_a_defective_default_pass_is_left_out_and_named(defect, word, monkeypatch):
    monkeypatch.setattr(passes, "PIPELINE", (defect(), *passes.PIPELINE[1:]))
    plain, x = model(), torch.randn(4, 3)
    with pytest.warns(recast.RecastWarning, match=f"without normalize: .*{word}") as told:
        fast = recast.optimize(plain, example=x)
    assert told[0].filename == __file__  # the line of the call
    torch.testing.assert_close(fast(x), plain(x), rtol=0, atol=0)
    (raised,) = fast.report.journal.raised
    assert raised.rule == "normalize" and word in raised.error
    with pytest.raises((AssertionError, RuntimeError), match=word):
        recast.optimize(plain, example=x, strict=True)


def test_a_defective_pass_that_was_asked_for_raises():
    with pytest.raises(recast.VerifyError, match="no longer reaches"):
        recast.optimize(model(), example=torch.randn(4, 3), passes=(Defective(),))


class Replaces:
    """Breaks no invariant: every sigmoid becomes something else."""

    name = "clean-up"

    def __init__(self, target):
        self.target = target

    def run(self, graph, context):
        found = [n for n in graph.nodes if n.target is torch.sigmoid]
        for node in found:
            node.target = self.target
        return len(found)


def refuses(x):
    raise RuntimeError("a view is being modified\nand more")


WRONG = [
    (torch.tanh, "not that of the model"),
    (refuses, "it raises RuntimeError: a view is being modified"),
]


@pytest.mark.parametrize(("target", "why"), WRONG)
def test_wrong_graphs_are_not_kept_nor_reported_as_rewrites(target, why, monkeypatch):
    """The captured graph runs instead, and the report does not claim the undone rewrites."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, ids):
            return torch.sigmoid(self.out(self.emb(ids)).square())

    monkeypatch.setattr(passes, "PIPELINE", (*passes.PIPELINE, Replaces(target)))
    plain, ids = Net(), torch.randint(9, (6,))
    with pytest.warns(recast.RecastWarning, match=f"without a rewrite: .*{why}") as told:
        fast = recast.optimize(plain, example=ids)
    assert told[0].filename == __file__
    torch.testing.assert_close(fast(ids), plain(ids), rtol=0, atol=0)
    report = fast.report.to_dict()
    assert report["lookups"] == {"found": 1, "fused": 0}
    assert report["fired"] == {}
    (raised,) = fast.report.journal.raised
    assert why in raised.error


class Precise(nn.Module):
    """Records the precision at which it was run."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 1)
        self.seen = set()

    def forward(self, x):
        conv = torch.backends.cudnn.conv.fp32_precision == "tf32"
        self.seen.add(
            (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu"), conv)
        )
        return self.out(x)


def test_a_graph_is_proved_in_full_precision():
    """TF32 rounds by more than the limit for a wrong graph, and would condemn a correct one."""
    from recast.rewriter.capture import proof

    matmul, x = torch.backends.cuda.matmul, torch.randn(4, 3)
    cudnn, allowed = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    before = torch.get_float32_matmul_precision(), matmul.fp32_precision
    try:
        for word in ("high", "medium", "highest"):
            torch.set_float32_matmul_precision(word)
            cudnn.allow_tf32 = True
            held = matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
            net = Precise()
            with torch.autocast("cpu", torch.bfloat16):
                proof._run((), lambda n=net: n(x))
            assert net.seen == {("highest", False, False)}
            assert cudnn.allow_tf32 and cudnn.conv.fp32_precision == "tf32"
            assert torch.get_float32_matmul_precision() == word
            assert held == (matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.fp32_precision = before[1]
        cudnn.allow_tf32 = allowed


def test_a_precision_that_follows_that_of_all_backends_still_does():
    """A user who optimised under TF32 and then asks for exact products must get them."""
    from recast.rewriter.capture import proof

    matmul, backends = torch.backends.cuda.matmul, torch.backends
    before = matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.fp32_precision
    try:
        matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"
        backends.fp32_precision = "tf32"
        proof._run((), lambda: None)
        assert matmul.fp32_precision == backends.mkldnn.matmul.fp32_precision == "tf32"
        backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = before[2]
        matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = before[:2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_graph_may_round_otherwise(dtype):
    """Within its dtype: by a few units in the last place, but not by a hundred."""
    from recast.rewriter.capture import proof

    wanted = torch.randn(100).to(dtype)
    eps = torch.finfo(dtype).eps
    near, far = ((wanted.double() * (1 + n * eps)).to(dtype) for n in (2, 100))
    assert proof._differ([near], [wanted]) is None
    if dtype is not torch.float32:
        assert "not that of the model" in (proof._differ([far], [wanted]) or "")


class Rounded(nn.Module):
    """Tables in bfloat16, read in float32: an output in float32 has their rounding."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.bags = nn.EmbeddingBag(40, 8).bfloat16()
        self.mean = nn.EmbeddingBag(30, 8, mode="mean").bfloat16()
        self.top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids):
        bags = [self.bags(ids).float(), self.mean(ids % 30).float()]
        return torch.sigmoid(self.top(torch.cat(bags, 1)).square()).squeeze(1)


def test_narrow_tables_read_in_float32_keep_their_rewrites():
    for seed in range(8):
        plain, ids = Rounded(seed), torch.randint(40, (16, 20))
        fast = recast.optimize(plain, example=ids)
        assert not fast.report.journal.raised
        assert fast.report.journal.lookups_fused == 2
        truth = copy.deepcopy(plain).float()(ids)
        ours, usual = (float((m(ids) - truth).detach().abs().max()) for m in (fast, plain))
        assert ours <= 2 * usual + 1e-5


def slightly_more(x):
    return torch.sigmoid(x) * 1.01


def test_wrong_numbers_behind_narrow_tables_are_not_taken_for_rounding(monkeypatch):
    monkeypatch.setattr(passes, "PIPELINE", (*passes.PIPELINE, Replaces(slightly_more)))
    plain, ids = Rounded(0), torch.randint(40, (16, 20))
    with pytest.warns(recast.RecastWarning, match="without a rewrite.*not that of the model"):
        fast = recast.optimize(plain, example=ids)
    torch.testing.assert_close(fast(ids), plain(ids), rtol=0, atol=0)


class Overflowing(torch.nn.Module):
    """One number is more than fp16 can hold."""

    def __init__(self):
        super().__init__()
        self.rows, self.top = torch.nn.Embedding(50, 8).half(), torch.nn.Linear(8, 4).half()
        with torch.no_grad():
            self.rows.weight[0] = 3e4
            self.top.weight[0] = 1.0

    def forward(self, ids):
        x = self.top(self.rows(ids))
        return torch.sigmoid(x) * (x - 1)  # not x: that would be silu


def half_as_much(x):
    return torch.sigmoid(x) * 0.5


def test_wrong_numbers_beside_an_infinite_one(monkeypatch):
    monkeypatch.setattr(passes, "PIPELINE", (*passes.PIPELINE, Replaces(half_as_much)))
    plain, ids = Overflowing().eval(), torch.arange(6)
    with pytest.warns(recast.RecastWarning, match="without a rewrite.*not that of the model"):
        fast = recast.optimize(plain, example=ids)
    torch.testing.assert_close(fast(ids), plain(ids), rtol=1e-2, atol=1e-2)
