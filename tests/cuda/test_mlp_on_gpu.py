"""``mlp`` on a real GPU: cublasLt's epilogues, both ways of products, and captured graphs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from emulated_chains import MLP, chain, compare, leaves, replayed
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import device, fastest
from recast.runtime.gpu import cublaslt, gpu
from recast.runtime.gpu.cublaslt import Epilogue
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import turned as mlp_turned
from recast.runtime.tolerances import excess

WHY_NOT = cublaslt.why_not()
WHERE = "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"cublasLt: {WHY_NOT}"),
]
of_all_dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(WHERE)


def near(ours: Tensor, exact: Tensor, plain: Tensor) -> None:
    assert excess(ours, plain.to(ours.dtype), exact) <= 1


@of_all_dtypes
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4096, 512, 256), (64, 16, 130), (33, 13, 7)], ids=str)
def test_epilogues(shape: tuple[int, int, int], rank: int, dtype: torch.dtype) -> None:
    """Every one that there is an algorithm for; where all sizes are even, there is one for all."""
    rows, k, n = shape
    x, weight = rand(rows, k).to(dtype), (rand(n, k, seed=1) / k**0.5).to(dtype)
    bias, dy = rand(n, seed=2).to(dtype), rand(rows, n, seed=3).to(dtype)
    below = rand(rows, k, seed=4) > 0
    bits = mlp_mask.empty(rows, k, x)
    padded = F.pad(below, (0, 8 * bits.shape[1] - k)).view(rows, -1, 8)
    bits.copy_((padded << torch.arange(8, device=WHERE)).sum(2))
    assert torch.equal(mlp_mask.unpack(bits, k), below)
    found = set()
    for epilogue in (Epilogue.RELU_BIAS, Epilogue.RELU_AUX_BIAS, Epilogue.RELU_AUX):
        out, mask = x.new_empty(rows, n), mlp_mask.empty(rows, n, x)
        masked, biased = "AUX" in epilogue.name, "BIAS" in epilogue.name
        ready = cublaslt.product(
            x, weight.t(), out, epilogue, bias if biased else None, mask if masked else None, rank
        )
        if ready is None:
            continue
        ready.run()
        found.add(epilogue)
        plain = F.linear(x, weight, bias if biased else None)
        exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
        near(out, exact.relu(), plain.relu())
        if masked:
            sure = exact.abs() > 0.05  # where rounding cannot turn the sign
            assert torch.equal(mlp_mask.unpack(mask, n)[sure], exact[sure] > 0)
    for epilogue in (Epilogue.DRELU, Epilogue.DRELU_BGRAD):
        out, sums = x.new_empty(rows, k), x.new_empty(k)
        used = sums if epilogue is Epilogue.DRELU_BGRAD else None
        ready = cublaslt.product(dy, weight, out, epilogue, used, bits, rank)
        if ready is None:
            continue
        ready.run(1.25)
        found.add(epilogue)
        exact = 1.25 * dy.double() @ weight.double() * below
        plain = (1.25 * (dy @ weight).float() * below).to(dtype)
        near(out, exact, plain)
        if used is not None:
            near(sums, exact.sum(0), plain.sum(0))
    for of_out in {dtype, F32}:
        out, sums = torch.empty(n, k, device=WHERE, dtype=of_out), rand(n).to(of_out)
        ready = cublaslt.product(dy.t(), x, out, Epilogue.BGRAD, sums, rank=rank)
        if ready is None:
            continue
        ready.run()
        found.add(Epilogue.BGRAD)
        near(out, dy.double().t() @ x.double(), dy.t() @ x)
        near(sums, dy.double().sum(0), dy.sum(0))
    if rank == 0 and shape == (4096, 512, 256):
        assert len(found) == 6, f"only {found}"


@of_all_dtypes
@pytest.mark.parametrize("way", device.WAYS)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_chains(way: str, p: float, dtype: torch.dtype) -> None:
    with device.use(way):
        compare(MLP, chain(33, [13, 24, 17, 1], p), dtype, where=WHERE)
        compare(MLP, chain(1, [8, 130, 3], p, last=True), dtype, where=WHERE)
        compare(MLP, chain(1000, [64, 256, 128, 1], p), dtype, where=WHERE)


@of_all_dtypes
def test_chains_that_choose(dtype: torch.dtype) -> None:
    for p in (0.0, 0.2):
        compare(MLP, chain(2048, [128, 512, 256, 1], p), dtype, where=WHERE)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("shape", [(8192, 512, 2524), (5000, 30, 13), (4097, 3, 257)], ids=str)
def test_products_of_turned_operands(shape: tuple[int, int, int]) -> None:
    """Judged as float16, which has as many digits as TF32."""
    (rows, out, width), here = shape, gpu.serving(torch.empty(1, device=WHERE))
    assert here is not None
    dy, weight, x = rand(rows, out), rand(out, width, seed=1), rand(rows, width, seed=2)
    turned, turned_dy = (mlp_turned.turned(here, t) for t in (weight, dy))
    assert torch.equal(turned, weight) and torch.equal(turned_dy, dy)
    for a, b, t, c in ((dy, weight, dy, turned), (dy.t(), x, turned_dy.t(), x)):
        exact, plain = a.double() @ b.double(), a.half() @ b.half()
        for rank in range(4):
            ready = cublaslt.product(t, c, dy.new_empty(exact.shape), Epilogue.NONE, rank=rank)
            if ready is not None:
                ready.run()
                near(ready.out.half(), exact, plain)


@pytest.mark.usefixtures("tf32")
def test_a_replay_turns_the_weight_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(key: object, ways: dict[str, object], *rest: object) -> str:
        return next((name for name in ways if name.endswith("turned")), [*ways][-1])

    monkeypatch.setattr(fastest, "choose", choose)
    monkeypatch.setattr(fastest, "chosen", lambda key: None)
    turns = []
    turned = mlp_turned.turned
    monkeypatch.setattr(mlp_turned, "turned", lambda *to: turns.append(to) or turned(*to))
    x, weight, dy = rand(4096, 64), rand(32, 64, seed=1), rand(4096, 32, seed=2)
    wanted = [x.requires_grad_(), weight.requires_grad_()]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            MLP.target(x, [weight, None], [], ["linear"], [], []), wanted, dy
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    turns.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_x, of_weight = step()
    assert len(turns) == 2
    for _ in range(2):
        with torch.no_grad():
            weight.mul_(-1.5)
        graph.replay()
        near(of_x.half(), dy.double() @ weight.double(), dy.half() @ weight.half())
        near(of_weight.half(), dy.double().t() @ x.double(), dy.half().t() @ x.half())


@pytest.mark.parametrize("way", device.WAYS)
def test_no_gradient_passes_at_exactly_zero(way: str) -> None:
    x = torch.zeros(256, 64, device=WHERE)
    weight, last = rand(128, 64).requires_grad_(), rand(32, 128, seed=1).requires_grad_()
    bias = torch.zeros(128, device=WHERE, requires_grad=True)
    with device.use(way):
        for _ in range(2):
            out = MLP.target(
                x, [weight, bias, last, None], [], ["linear", "relu", "linear"], [], []
            )
            (grad,) = torch.autograd.grad(out, bias, torch.ones_like(out))
            assert not grad.any()


@of_all_dtypes
@pytest.mark.parametrize("way", [*device.WAYS, None])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_relu_of_nan_is_nan(p: float, way: str | None, dtype: torch.dtype) -> None:
    """Algorithms of cublasLt that make it 0 are not trusted with relu."""
    x, params, *rest = chain(512, [64, 256, 128, 1], p)
    x[3, 2] = float("nan")
    args = (x.to(WHERE, dtype), [None if t is None else t.to(WHERE, dtype) for t in params], *rest)
    wanted = [t.requires_grad_() for t in leaves(args)]
    with device.use(way) if way else contextlib.nullcontext():
        for _ in range(2):
            out = MLP.target(*args)
            rows = out.isnan().any(1)
            assert bool(rows[3]) and int(rows.sum()) == 1
        grads = torch.autograd.grad(out, wanted, torch.ones_like(out))
        assert all(bool(g.isnan().any()) for g in grads[-2:-1])
        with torch.no_grad():
            assert bool(MLP.target(*args)[3].isnan().all())


@pytest.mark.parametrize("way", [*device.WAYS, None])
def test_in_a_captured_graph(way: str | None) -> None:
    """Replays draw new masks, and their gradients are those of plain torch under these."""
    if way is not None:
        with device.use(way):
            _captured()
    else:
        _captured()


def _captured() -> None:
    x, params, *rest = chain(512, [64, 256, 128, 1], 0.3)
    x, params = x.to(WHERE), [p.to(WHERE).requires_grad_() for p in params if p is not None]
    upstream = rand(512, 1, seed=9)

    def step() -> tuple[list[Tensor], list[Tensor]]:
        out = MLP.target(x, params, *rest)
        masks = mlp_mask.masks(out)
        return [out.detach(), *torch.autograd.grad(out, params, upstream)], masks

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, masks = step()
    seen: list[Tensor] = []
    for _ in range(3):
        graph.replay()
        assert not any(torch.equal(masks[0], before) for before in seen)
        seen.append(masks[0].clone())
        with replayed(masks):
            out = MLP.reference(x, params, *rest)
        wanted = [out.detach(), *torch.autograd.grad(out, params, upstream)]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("way", device.WAYS)
def test_autocast(way: str, dtype: torch.dtype) -> None:
    x, params, *rest = chain(300, [64, 128, 32, 1], 0.2)
    args = (x.to(WHERE), [None if p is None else p.to(WHERE) for p in params], *rest)
    wanted = [t.requires_grad_() for t in leaves(args)]
    with device.use(way), torch.autocast(WHERE, dtype):
        out = MLP.target(*args)
    masks, upstream = mlp_mask.masks(out), rand(300, 1, seed=9).to(dtype)
    found = torch.autograd.grad(out, wanted, upstream)
    with replayed(masks), torch.autocast(WHERE, dtype):
        plain = MLP.reference(*args)
    near_grads = torch.autograd.grad(plain, wanted, upstream)
    with replayed(masks):
        wide = (args[0].double(), [None if p is None else p.double() for p in args[1]], *rest)
        exact = MLP.reference(*wide)
    exact_grads = torch.autograd.grad(exact, wanted, upstream.double())
    assert out.dtype == plain.dtype
    near(out, exact, plain)
    for a, b, c in zip(found, near_grads, exact_grads, strict=True):
        assert a.dtype == b.dtype == F32
        near(a.to(dtype), c.double(), b.to(dtype))


def test_on_another_stream() -> None:
    args = chain(700, [64, 256, 1], 0.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compare(MLP, args, F32, where=WHERE)
    torch.cuda.current_stream().wait_stream(stream)
