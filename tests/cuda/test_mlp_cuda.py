"""``mlp`` and ``relu_dropout`` as a GPU runs them, on the emulator and a stand-in for cublasLt.

Products are tested in both ways, with cublasLt's epilogues and as torch's products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from emulated_chains import (
    BF16,
    CHAINS,
    DROP,
    F16,
    F32,
    MLP,
    Machine,
    cast,
    chain,
    compare,
    leaves,
    replayed,
    run,
)
from torch import Tensor, nn
from torch.nn import functional as F

from recast.runtime import device
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp.mask import Gate
from recast.runtime.op import Sample
from recast.runtime.tolerances import excess

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)


SAMPLES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in (MLP, DROP)
    for sample in op.samples()
]


@pytest.mark.sampled(80)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("op", "sample"), SAMPLES)
def test_every_sample(machine: Machine, op: Any, sample: Sample, dtype: torch.dtype) -> None:
    compare(op, sample.args, dtype)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("name", CHAINS)
def test_chains(machine: Machine, name: str, p: float, bias: bool) -> None:
    rows, widths = CHAINS[name]
    for last in (False, True):
        compare(MLP, chain(rows, widths, p, bias, last=last), F32)
    compare(MLP, chain(rows, widths, p, bias), BF16, seed=2)


def test_the_epilogues_of_a_step(cublaslt_machine: Machine) -> None:
    """One product per layer forward, one per gradient backward, and no kernel of ours."""
    x, *rest = chain(64, [5, 9, 7, 2], 0.0)
    wanted = [x.requires_grad_(), *(p.requires_grad_() for p in rest[0])]
    out = MLP.target(x, *rest)
    cublaslt_machine.products()  # some were questions to new algorithms
    out = MLP.target(x, *rest)
    assert cublaslt_machine.products() == ["RELU_AUX_BIAS", "RELU_AUX_BIAS"]
    torch.autograd.grad(out, wanted, torch.randn_like(out))
    assert cublaslt_machine.products() == ["BGRAD", "DRELU_BGRAD", "DRELU_BGRAD"]
    assert not cublaslt_machine.gpu.launched
    with torch.no_grad():
        MLP.target(x, *rest)
        cublaslt_machine.products()
        MLP.target(x, *rest)
    assert not cublaslt_machine.gpu.launched
    assert cublaslt_machine.products() == ["RELU_BIAS", "RELU_BIAS"]


def test_few_rows_are_summed_apart(cublaslt_machine: Machine) -> None:
    """There cublasLt's own bias gradient is not to be trusted, and the plain one as fast."""
    for rows, epilogue in ((63, []), (64, ["BGRAD"])):
        dy, x = torch.randn(rows, 9), torch.randn(rows, 5)
        out, sums = torch.full((9, 5), torch.nan), torch.full((9,), torch.nan)
        mlp_products.weight_gradient(dy, x, out, sums)()
        torch.testing.assert_close(out, dy.t() @ x)
        torch.testing.assert_close(sums, dy.sum(0))
        assert cublaslt_machine.products() == epilogue
    for rows, way in ((63, "DRELU"), (64, "DRELU_BGRAD")):
        dy, weight = torch.randn(rows, 9), torch.randn(9, 5)
        bits = mlp_mask.empty(rows, 5, dy)
        y = torch.randn(rows, 5)
        mlp_mask.activate(cublaslt_machine.gpu, y, None, bits, relu=True, p=0.0, seed=None, layer=0)
        found = mlp_products.input_gradient(
            cublaslt_machine.gpu, dy, weight, Gate(bits, None), torch.float32
        )
        dx = (dy @ weight) * (y > 0)
        torch.testing.assert_close(found.x, dx)
        torch.testing.assert_close(found.sums, dx.sum(0))
        assert cublaslt_machine.products() == [way]


def test_dropout_is_one_kernel_forward_and_none_backward(cublaslt_machine: Machine) -> None:
    x, *rest = chain(64, [5, 9, 7, 2], 0.3)
    wanted = [x.requires_grad_(), *(p.requires_grad_() for p in rest[0])]
    out = MLP.target(x, *rest)
    assert cublaslt_machine.gpu.launched == ["mlp_activate"] * 2
    torch.autograd.grad(out, wanted, torch.randn_like(out))
    assert cublaslt_machine.gpu.launched == ["mlp_activate"] * 2
    assert cublaslt_machine.products() == ["BIAS"] * 2 + ["BGRAD"] + ["DRELU_BGRAD"] * 2


def test_weight_gradients_run_beside(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last, on the second stream, which the first waits for at the end.

    And sums that a kernel left in parts: those of the last go there by themselves.
    """
    seen: list[str] = []

    @contextlib.contextmanager
    def in_parallel(inputs: Sequence[Tensor]) -> Iterator[None]:
        seen.append("fork")
        yield
        seen.append("back")

    monkeypatch.setattr(machine.gpu, "in_parallel", in_parallel)
    monkeypatch.setattr(machine.gpu, "join", lambda outputs: seen.append("join"))
    x, *rest = chain(6, [5, 9, 7, 2], 0.3)
    every = [x, *rest[0]]
    for t in every[1:]:
        t.requires_grad_()
    out = MLP.target(x, *rest)
    torch.autograd.grad(out, every[1:], torch.randn_like(out))
    sums = ["fork", "back"] * ("mlp_sum_parts" in machine.gpu.launched)
    assert seen == ["fork", "back", "fork", "back", *sums, "join"]
    seen.clear()
    x, *rest = chain(6, [5, 9, 7, 2], 0.3)
    last = rest[0][4].requires_grad_()
    out = MLP.target(x, *rest)
    torch.autograd.grad(out, last, torch.randn_like(out))
    assert seen == [], "one gradient has nothing to run beside"


def test_what_is_kept(machine: Machine) -> None:
    """Of a relu and its dropout one bit an element; of frozen layers no input."""
    x, params, *rest = chain(64, [128, 256, 128, 1], 0.3)
    for p in params[2:]:
        p.requires_grad_()
    out = MLP.target(x, params, *rest)
    kept = [t.shape for t in out.grad_fn.saved_tensors if t.dtype == torch.uint8]
    assert kept == [(64, 32), (64, 16)]
    floats = sum(t.numel() for t in out.grad_fn.saved_tensors if t.dtype == F32)
    # x for create_graph, the inputs of two trained layers, the weight behind the first of them.
    assert floats == 64 * (128 + 256 + 128) + 128


def test_a_product_times_nothing_is_left_to_torch(cublaslt_machine: Machine) -> None:
    """Behind a dropout of everything the factor is 0, for which products have short cuts."""
    x, *rest = chain(64, [5, 9, 7, 2], 1.0)
    wanted = [x.requires_grad_(), *(p.requires_grad_() for p in rest[0])]
    out = MLP.target(x, *rest)
    found = torch.autograd.grad(out, wanted, torch.randn_like(out))
    assert not any(name.startswith("DRELU") for name in cublaslt_machine.products())
    assert not any(g.any() for g in found[:-1])


@pytest.mark.parametrize("epilogue", ["RELU_AUX_BIAS", "BIAS", "DRELU_BGRAD", "BGRAD"])
def test_a_product_without_an_algorithm_goes_the_plain_way(
    cublaslt_machine: Machine, epilogue: str
) -> None:
    from recast.runtime.gpu.cublaslt import Epilogue

    with cublaslt_machine.library.set("refuse", int(Epilogue[epilogue])):
        compare(MLP, chain(64, [5, 9, 7, 2], 0.3), F32)
        compare(MLP, chain(64, [5, 9, 7, 2], 0.0), F32)
    assert epilogue not in cublaslt_machine.products()


@pytest.mark.parametrize("trained", [{0}, {1, 2}, {4, 5}, {0, 3}, {2}, {1}, {5}, {6}, {0, 6}])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_only_wanted_gradients(machine: Machine, trained: set[int], p: float) -> None:
    """0: the input; then weights and biases in turn."""
    x, params, *rest = chain(6, [5, 9, 7, 2], p)
    every = [x, *params]
    for i in trained:
        every[i].requires_grad_()
    out = MLP.target(x, params, *rest)
    masks = mlp_mask.masks(out)
    wanted = [every[i] for i in sorted(trained)]
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, wanted, upstream)
    with replayed(masks):
        plain = MLP.reference(x, params, *rest)
    for a, b in zip(found, torch.autograd.grad(plain, wanted, upstream), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", [MLP, DROP], ids=lambda op: op.name)
def test_second_derivatives(machine: Machine, op: Any) -> None:
    """create_graph computes again under the masks that were drawn."""
    if op is DROP:
        args: tuple[Any, ...] = (torch.randn(6, 5), 0.4, True)
    else:
        x, params, stats, steps, numbers, flags = chain(6, [5, 9, 7, 2], 0.3)
        args = (x, params, stats, [*steps, "tanh"], numbers, flags)
    wanted = [t.requires_grad_() for t in leaves(args)]
    out = op.target(*args)
    masks = mlp_mask.masks(out)
    upstream = torch.randn_like(out)

    def both(out: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(out, wanted, upstream, create_graph=True)
        loss = sum(((f + t).square().sum() for f, t in zip(first, wanted, strict=True)), out.sum())
        return [*first, *torch.autograd.grad(loss, wanted)]

    with replayed(masks):
        plain = op.reference(*args)
    for a, b in zip(both(out), both(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_changed_before_backward_are_noticed(machine: Machine) -> None:
    args = chain(6, [5, 9, 2], 0.3)
    for p in args[1]:
        p.requires_grad_()
    out = MLP.target(*args)
    with torch.no_grad():
        args[1][2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(torch.ones_like(out))


def test_backward_leaves_the_upstream_gradient_alone(machine: Machine) -> None:
    for args in (chain(6, [5, 9], 0.3, last=True), (torch.randn(6, 5), 0.4, True)):
        wanted = [t.requires_grad_() for t in leaves(args)]
        out = (MLP if len(args) > 3 else DROP).target(*args)
        for upstream in (torch.randn_like(out), torch.randn(1).expand(out.shape)):
            before = upstream.clone()
            torch.autograd.grad(out, wanted, upstream, retain_graph=True)
            assert torch.equal(upstream, before)


def test_the_generator_governs_the_masks(machine: Machine) -> None:
    args = chain(16, [5, 40, 40, 2], 0.5)
    args[1][0].requires_grad_()
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(mlp_mask.masks(MLP.target(*args)))
    masks.append(mlp_mask.masks(MLP.target(*args)))
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
    for other in masks[2:]:
        assert not any(torch.equal(a, b) for a, b in zip(masks[0], other, strict=True))
    torch.manual_seed(1)
    with torch.no_grad():
        alone = MLP.target(*args)
    torch.manual_seed(1)
    assert torch.equal(MLP.target(*args), alone)


AUTOCAST = {
    "dropout": chain(6, [5, 9, 7, 2], 0.3),
    "no dropout": chain(6, [5, 9, 7, 2], 0.0),
    "no bias": chain(6, [5, 9, 2], 0.3, bias=False),
    "prelu first": (torch.randn(6, 5), [torch.rand(5), torch.randn(4, 5), None], [],
                    ["prelu", "linear"], [], []),
    **{s.label: s.args for s in MLP.samples() if s.label in {
        "norm relu drop", "drop first", "norm first", "prelu", "smooth", "3-d", "relu first",
        "dlrm top", "empty batch", "norm relu drop eval",
    }},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(machine: Machine, name: str, dtype: torch.dtype) -> None:
    """Products in ``dtype``; weights and their gradients in float32, as near as plain autocast."""
    args = AUTOCAST[name]
    ours, plain, wide = (cast(args, to) for to in (F32, F32, torch.float64))
    wanted = [t.requires_grad_() for t in leaves(ours)]
    with torch.autocast("cpu", dtype):
        out = MLP.target(*ours)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    masks = mlp_mask.masks(out)
    found = torch.autograd.grad(out, wanted, upstream)
    with replayed(masks), torch.autocast("cpu", dtype):
        near = run(MLP.reference, plain, upstream)
    with replayed(masks):
        truth = run(MLP.reference, wide, upstream)
    assert out.dtype == near[0].dtype
    every = [t for t in (truth[0], *truth[1]) if t is not None and t.numel()]
    scale = max((t.abs().max().item() for t in every), default=1.0)
    parts = zip((out, *found), (near[0], *near[1]), (truth[0], *truth[1]), strict=True)
    for i, (a, b, c) in enumerate(parts):
        assert b is not None and c is not None and a.dtype == b.dtype
        # As accurate as products of `dtype` can be, in whatever dtype the result is kept.
        share = excess(a.to(dtype), b.to(dtype), c, scale=scale)
        assert share <= 1, f"part {i}: {share:.2f} of the limit"
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert MLP.target(*ours).dtype == out.dtype


def test_autocast_stays_fused(cublaslt_machine: Machine) -> None:
    args = chain(64, [5, 9, 7, 2], 0.0)
    wanted = [t.requires_grad_() for t in leaves(args)]
    for _ in range(2):
        cublaslt_machine.products()
        with torch.autocast("cpu", BF16):
            out = MLP.target(*args)
    assert cublaslt_machine.products() == ["RELU_AUX_BIAS"] * 2
    grads = torch.autograd.grad(out, wanted, torch.randn_like(out))
    # The last needs no cast: it is of the weights' own dtype as it comes.
    assert sorted(cublaslt_machine.products()) == [
        "BGRAD", "DRELU_BGRAD", "DRELU_BGRAD", "NONE", "NONE",
    ]  # fmt: skip
    assert all(g.dtype == F32 for g in grads)


def test_steps_of_training(machine: Machine) -> None:
    """Some steps of an MLP with dropout against the same modules under the same masks."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(13, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 9), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(9, 1),
        )  # fmt: skip

    ours, plain = build(), build()
    optimizers = [torch.optim.Adagrad(m.parameters(), 0.05) for m in (ours, plain)]
    steps = ["linear", "relu", "dropout", "linear", "relu", "dropout", "linear"]
    for step in range(6):
        x = torch.randn(37, 13, generator=torch.Generator().manual_seed(step))
        target = torch.rand(37, 1, generator=torch.Generator().manual_seed(step + 50)).round()
        out = MLP.target(x, [*ours.parameters()], [], steps, [0.2, 0.5], [True, True])
        masks = mlp_mask.masks(out)
        with replayed(masks):
            near = plain(x)
        for result, optimizer in ((out, optimizers[0]), (near, optimizers[1])):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(result, target).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_not_for_the_kernels(machine: Machine) -> None:
    """float64 and ill-fitting operands are torch's own business, errors included."""
    x, params, *rest = chain(6, [5, 9, 2], 0.0)
    wide = [p.double() for p in params]
    torch.testing.assert_close(
        MLP.target(x.double(), wide, *rest), MLP.reference(x.double(), wide, *rest)
    )
    for bad in ([params[2], *params[1:]], [p.to(BF16) for p in params], wide):
        with pytest.raises(RuntimeError):
            MLP.target(x, bad, *rest)
    assert machine.products() == [] and machine.gpu.launched == []
    with pytest.raises(ValueError, match="dropout probability"):
        MLP.target(x, params, [], ["linear", "dropout", "linear"], [1.5], [True])
    with device.use("torch"):
        MLP.target(x, params, *rest)
    assert machine.products() == []
