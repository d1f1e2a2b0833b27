"""Pairwise dot products on the emulator against plain torch, with float64 as the judge."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import simt_build
import torch
from torch import Tensor

from recast.runtime.interactions.dot_interaction import dot_interaction
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CODES = {F32: 0, F16: 1, BF16: 2}
TF32 = 3  # what RECAST_ELEMENT calls it
PAIRS = ("any", "lower", "lower with self", "upper")


@dataclass(frozen=True)
class Class:
    """What the macros of dot_interaction.cu say."""

    features: int
    dim: int
    pairs: str = "lower"
    of: torch.dtype = F32
    out: torch.dtype = F32
    vec: int = 4
    element: int = 0
    samples: int = 2
    block: int = 64

    def kernels(self) -> simt_build.Kernels:
        defines = {
            "RECAST_FEATURES": self.features,
            "RECAST_DIM": self.dim,
            "RECAST_PAIRS": PAIRS.index(self.pairs),
            "RECAST_IN": CODES[self.of],
            "RECAST_OUT": CODES[self.out],
            "RECAST_VEC": self.vec,
            "RECAST_ELEMENT": self.element,
            "RECAST_SAMPLES": self.samples,
            "RECAST_BLOCK": self.block,
        }
        return simt_build.kernels(simt_build.CUDA / "dot_interaction.cu", defines=defines)

    def shared(self, products: int | None) -> int:
        """Bytes of a block: forward with so many products, or backward (None)."""
        multiple = 16 if self.element else 4
        size = 2 if self.element in (1, 2) else 4
        rows = -(-self.features // multiple) * multiple
        kept = rows * (-(-self.dim // multiple) * multiple * size + 16)
        more = rows * (rows * size + 16) if products is None else 4 * products
        return self.samples * sum(-(-part // 16) * 16 for part in (kept, more))

    def list(self) -> tuple[Tensor, Tensor]:
        n = self.features
        if self.pairs == "any":  # unordered, repeated, and with itself
            li = torch.tensor([n - 1, 0, 2, 2, 0, 0, 1, n - 1, n - 1])
            return li, torch.tensor([0, n - 1, 2, 1, 0, 0, n - 1, 2, 0])
        if self.pairs == "upper":
            li, lj = torch.triu_indices(n, n, 1)
        else:
            li, lj = torch.tril_indices(n, n, 0 if "self" in self.pairs else -1)
        return li, lj


CLASSES = {
    "lower": Class(27, 16),
    "lower with self": Class(5, 9, "lower with self", vec=1, samples=3),
    "upper": Class(6, 130, "upper", vec=2, samples=1),
    "any": Class(7, 64, "any", block=32),
    "two numbers": Class(2, 1, vec=1),
    "fp16": Class(9, 24, of=F16, vec=8),
    "bf16 to fp32": Class(3, 6, "any", of=BF16, out=F32, vec=2),
    "tensor lower": Class(27, 32, of=BF16, out=BF16, vec=8, element=2),
    "tensor lower with self": Class(
        17, 16, "lower with self", of=F16, out=F16, element=1, samples=1, block=32
    ),
    "tensor any": Class(5, 48, "any", of=BF16, out=BF16, vec=1, element=2),
    "tensor upper": Class(34, 16, "upper", of=BF16, out=BF16, vec=8, element=2, samples=1),
    "tensor of odd width": Class(4, 7, of=F16, out=F16, vec=1, element=1),
    "tensor rounds fp32": Class(9, 20, of=F32, out=BF16, element=2),
    "tensor to fp32": Class(6, 24, of=F16, out=F32, vec=8, element=1),
    "tf32": Class(27, 20, of=F32, out=F32, element=TF32),
    "tf32 any": Class(5, 7, "any", of=F32, out=F32, vec=1, element=TF32),
}


@dataclass
class Given:
    """Features as the user has them: two vectors and a stack, apart in memory."""

    features: list[Tensor]
    dense: Tensor | None
    pad: int

    @property
    def batch(self) -> int:
        return self.features[0].shape[0]

    @property
    def width(self) -> int:
        return 0 if self.dense is None else self.dense.shape[1]


def example(of: Class, batch: int, dense: str, seed: int = 0) -> Given:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = of.of) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    spare = 2 * of.vec if of.vec > 1 else 3
    first = rand(batch, of.dim + spare)[:, : of.dim]
    second = rand(2 * batch, of.dim)[::2]
    stack = rand(batch, of.features - 1, of.dim)[:, : of.features - 2]
    if dense == "same" and of.of == of.out:
        return Given([first, second, stack], first, 1)
    other = rand(batch, 5, dtype=of.out)[:, 1:]
    return Given([first, second, stack], None if dense == "none" else other, 3)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(12))


def rows(features: list[Tensor]) -> Tensor:
    """Address of sample 0 and stride of each row of T."""
    found = []
    for f in features:
        for r in range(f.shape[1] if f.dim() == 3 else 1):
            row = f[:, r] if f.dim() == 3 else f
            found.append([row.data_ptr(), row.stride(0)])
    return torch.tensor(found)


def forward(of: Class, given: Given, **how: int) -> Tensor:
    li, lj = of.list()
    places = (torch.maximum(li, lj) * of.features + torch.minimum(li, lj)).int()
    width = given.width + len(li) + given.pad
    around = torch.full((given.batch, width + 3), -7.0, dtype=of.out)
    products = of.features**2 if of.pairs == "any" else len(li)
    of.kernels().launch(
        "dot_forward", -(-given.batch // of.samples), of.block, of.shared(products),
        rows(given.features), given.dense, 0 if given.dense is None else given.dense.stride(0),
        given.width, places if of.pairs == "any" else None, len(li), given.pad, given.batch,
        around[:, 1:], around.stride(0), **how,
    )  # fmt: skip
    assert (around[:, 0] == -7).all() and (around[:, width + 1 :] == -7).all()
    return around[:, 1 : width + 1]


def backward(of: Class, given: Given, grad: Tensor, **how: int) -> list[Tensor]:
    """Gradients of the features, shaped as they are."""
    li, lj = of.list()
    cells = torch.maximum(li, lj) * of.features + torch.minimum(li, lj)
    order = cells.argsort(stable=True)
    distinct, counts = cells.unique(return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    lists = (distinct.int(), starts, order.int()) if of.pairs == "any" else (None, None, None)
    grads = [torch.full(f.shape, float("nan"), dtype=of.of) for f in given.features]
    same = given.dense is given.features[0]
    of.kernels().launch(
        "dot_backward", -(-given.batch // of.samples), of.block, of.shared(None),
        rows(given.features), grad, grad.stride(0), given.width, *lists,
        len(distinct) if of.pairs == "any" else 0, given.batch, 0 if same else -1, rows(grads),
        **how,
    )  # fmt: skip
    return grads


def reference(
    of: Class, given: Given, dtype: torch.dtype, grad: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output, and with ``grad`` the gradients of the features."""
    features = [f.to(dtype, copy=True).requires_grad_() for f in given.features]
    same = given.dense is given.features[0]
    dense = None if given.dense is None else given.dense.to(dtype)
    out = dot_interaction.reference(features, features[0] if same else dense, *of.list(), given.pad)
    if grad is None:
        return out.detach(), []
    out.backward(grad.to(dtype))
    return out.detach(), [f.grad for f in features if f.grad is not None]


def rounded(of: Class) -> torch.dtype:
    """The dtype in which plain torch makes about the errors that the kernel may make.

    Without tensor cores, sums are of fp32 factors. TF32 has the 11 bits of fp16.
    """
    return {0: F32, 1: F16, 2: BF16, TF32: F16}[of.element]


@pytest.mark.parametrize("dense", ["none", "same", "other"])
@pytest.mark.parametrize("name", CLASSES)
def test_forward_and_backward(name: str, dense: str) -> None:
    of = CLASSES[name]
    given = example(of, 5, dense)
    out = forward(of, given)
    grad = random(out.shape[0], out.shape[1] + 2).to(of.out)[:, 1:-1]
    grads = backward(of, given, grad)
    truth = reference(of, given, torch.float64, grad)
    plain = reference(of, given, rounded(of), grad)
    assert excess(out, plain[0].to(of.out), truth[0]) <= 1
    for ours, near, true in zip(grads, plain[1], truth[1], strict=True):
        assert excess(ours, near.to(of.of), true) <= 1


@pytest.mark.parametrize("name", ["any", "tensor lower"])
def test_results_do_not_depend_on_the_order_of_threads(name: str) -> None:
    of = CLASSES[name]
    given = example(of, 7, "same")
    out = forward(of, given)
    grad = random(*out.shape).to(of.out)
    grads = backward(of, given, grad)
    for seed in (1, 2):
        assert torch.equal(out, forward(of, given, seed=seed, workers=2))
        again = backward(of, given, grad, seed=seed, workers=2)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("name", ["lower with self", "tensor any"])
def test_rows_without_gradient_are_left_alone(name: str) -> None:
    of = CLASSES[name]
    given = example(of, 3, "none")
    li, _ = of.list()
    grad = random(3, len(li) + given.pad).to(of.out)
    whole = backward(of, given, grad)
    li, lj = of.list()
    grads = [torch.full(f.shape, -7.0, dtype=of.of) for f in given.features]
    told = rows(grads)
    told[1, 0] = told[3, 0] = 0
    cells = torch.maximum(li, lj) * of.features + torch.minimum(li, lj)
    distinct, counts = cells.unique(return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    lists = (distinct.int(), starts, cells.argsort(stable=True).int())
    of.kernels().launch(
        "dot_backward", -(-3 // of.samples), of.block, of.shared(None), rows(given.features),
        grad, grad.stride(0), 0, *lists, len(distinct), 3, -1, told,
    )  # fmt: skip
    assert torch.equal(grads[0], whole[0]) and (grads[1] == -7).all()
    assert (grads[2][:, 1] == -7).all() and torch.equal(grads[2][:, 0], whole[2][:, 0])


def test_tiles_of_the_tensor_cores_are_exact_for_small_integers() -> None:
    of = CLASSES["tensor lower"]
    given = example(of, 4, "none")
    given.features = [f.mul(2).round().clamp(-3, 3) for f in given.features]
    assert torch.equal(forward(of, given), reference(of, given, F32)[0].to(BF16))
