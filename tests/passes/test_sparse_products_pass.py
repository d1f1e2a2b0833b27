"""multiply-sparse: every spelling, every Miss, the numbers, and a matrix that changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import fired, misses, optimized, same
from torch import Tensor, nn

from recast.runtime.layers import sparse_mm as kernel
from recast.runtime.layers.sparse_mm import sparse_mm

ROWS, DIM = 40, 5
BATCHES = [(torch.arange(6) * 7 % ROWS,), (torch.arange(4) * 3 % ROWS,)]


def matrix(rows: int = ROWS, columns: int = ROWS, seed: int = 0, entries: int = 300) -> Tensor:
    """With repeated and unsorted entries, and rows and columns without any."""
    g = torch.Generator().manual_seed(seed)
    places = torch.stack([
        torch.randint(rows - 3, (entries,), generator=g),
        torch.randint(columns - 2, (entries,), generator=g),
    ])  # fmt: skip
    values = torch.randn(entries, generator=g, dtype=torch.float64)
    return torch.sparse_coo_tensor(places, values, (rows, columns))


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "mm": torch.mm,
    "matmul": torch.matmul,
    "spmm": torch.spmm,
    "@": lambda a, x: a @ x,
    "method": lambda a, x: a.mm(x),
    "the other method": lambda a, x: a.matmul(x),
}


class Propagated(nn.Module):
    """LightGCN: rows of all, averaged over the layers."""

    def __init__(self, near: Tensor, product: str = "sparse.mm", kept: str = "buffer") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.product, self.kept = nn.Embedding(ROWS, DIM), product, kept
        if kept == "buffer":
            self.register_buffer("near", near)
        elif kept == "parameter":
            self.near = nn.Parameter(near, requires_grad=False)
        else:
            self.near = [near] if kept == "list" else near

    def forward(self, ids: Tensor) -> Tensor:
        near: Any = self.near[0] if self.kept == "list" else self.near
        layers = [self.rows.weight]
        for _ in range(2):
            layers.append(PRODUCTS[self.product](near, layers[-1]))
        return torch.stack(layers, 1).mean(1)[ids]


def products(fast: Any) -> int:
    return sum(n.target is sparse_mm for n in fast.graph.nodes)


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("sorted_", [True, False])
def test_every_spelling(product: str, sorted_: bool) -> None:
    near = matrix().coalesce() if sorted_ else matrix()
    fast = same(Propagated(near, product), BATCHES)
    assert fired(fast)["multiply-sparse"] == products(fast) == 2


@pytest.mark.parametrize("kept", ["attribute", "list"])
def test_wherever_it_is_kept(kept: str) -> None:
    assert products(same(Propagated(matrix(), kept=kept), BATCHES)) == 2


class Trained(Propagated):
    def __init__(self) -> None:
        super().__init__(matrix(), kept="parameter")
        self.near.requires_grad_()


class Turned(Propagated):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.sparse.mm(self.near.t(), self.rows.weight)[ids]


class Scaled(Propagated):
    def forward(self, ids: Tensor) -> Tensor:
        self.near._values().mul_(0.5)
        return torch.sparse.mm(self.near, self.rows.weight)[ids]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Trained, "its sparse matrix is trained"),
        (lambda: Propagated(matrix().to_sparse_csr()), "kept for a matrix in torch.sparse_csr"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_stays_is_told(make: Callable[[], nn.Module], why: str) -> None:
    fast = optimized(make().double(), BATCHES)
    assert not products(fast)
    assert any(why in said for said in misses(fast, "multiply-sparse"))


@pytest.mark.parametrize("make", [Turned, Scaled])
def test_a_matrix_that_is_made_or_written_in_forward_stays(make: type[Propagated]) -> None:
    assert not products(same(make(matrix().coalesce()), BATCHES, steps=False))


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "columns", "dim", "entries"),
    [(40, 40, 5, 300), (7, 60, 16, 90), (60, 9, 1, 33), (4, 3, 64, 1), (5, 6, 8, 0)],
)
def test_against_float64(
    rows: int, columns: int, dim: int, entries: int, dtype: torch.dtype
) -> None:
    a = matrix(rows, columns, 1, entries)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(dim, columns, generator=g, dtype=torch.float64).t()  # not contiguous
    up = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, dim)
    truth = a.to_dense() @ x
    wanted = a.to_dense().t() @ up
    ours = x.to(dtype).requires_grad_()
    found = sparse_mm(a.to(dtype), ours)
    (grad,) = torch.autograd.grad(found, ours, up.to(dtype))
    limit = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {}
    torch.testing.assert_close(found.double(), truth, **limit)
    torch.testing.assert_close(grad.double(), wanted, **limit)
    assert found.dtype is grad.dtype is dtype and found.is_contiguous()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's two kernels round alike where they multiply and add at once",
)
def test_it_is_torchs_sum_bit_by_bit() -> None:
    a, x = matrix().coalesce().float(), torch.randn(ROWS, 32)
    assert torch.equal(sparse_mm(a, x), torch.sparse.mm(a, x))


def test_derivatives_of_derivatives_and_batches_of_gradients() -> None:
    a, x = matrix(), torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    found = []
    for product in (sparse_mm, torch.mm):
        y = product(a, x)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        ups = torch.stack([torch.eye(ROWS, DIM, dtype=torch.float64), torch.ones_like(x)])
        each = [torch.autograd.grad(product(a, x), x, up)[0] for up in ups]
        found.append([y, first, second, *each])
    torch.testing.assert_close(*found)
    (at_once,) = torch.autograd.grad(sparse_mm(a, x), x, ups, is_grads_batched=True)
    torch.testing.assert_close(at_once, torch.stack(found[1][3:]))


def test_under_autocast_it_is_torchs() -> None:
    a, x = matrix().float(), torch.randn(ROWS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse_mm(a, x), torch.mm(a, x))
        assert sparse_mm(a, x).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("left", "right"), [((ROWS, 7), (ROWS, DIM)), ((ROWS, ROWS), (ROWS, DIM, 1))]
)
def test_what_does_not_fit_raises_what_torch_raises(left: Any, right: Any) -> None:
    a, x = matrix(*left), torch.ones(right, dtype=torch.float64)
    with pytest.raises(RuntimeError) as ours:
        sparse_mm(a, x)
    with pytest.raises(RuntimeError) as theirs:
        torch.mm(a, x)
    assert str(ours.value) == str(theirs.value)


# ---------------------------------------------------------------- a matrix that changes


def test_changes_of_the_matrix_are_followed() -> None:
    model = Propagated(matrix().coalesce(), kept="attribute").double()
    fast = optimized(model, BATCHES)
    (ids,) = BATCHES[0]

    def agree() -> None:
        torch.testing.assert_close(fast(ids), model(ids))

    agree()
    model.near._values().mul_(2)
    agree()
    model.near._values().data.add_(1)  # which torch does not count
    agree()
    model.near._indices()[1] = model.near._indices()[1].roll(1)
    agree()
    fast.near = model.near = matrix(seed=5)
    agree()
    fast.near = model.near = matrix(seed=6).coalesce()
    fast(ids).sum().backward()
    agree()


def test_values_that_change_before_backward_are_told() -> None:
    a, x = matrix().coalesce(), torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    y = sparse_mm(a, x)
    a._values().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_kept_does_not_keep_the_matrix() -> None:
    kernel._kept.clear()
    x = torch.randn(ROWS, DIM, dtype=torch.float64)
    for seed in range(40):
        sparse_mm(matrix(seed=seed), x)
        assert len(kernel._kept) <= 2
    several = [matrix(seed=seed) for seed in range(40)]
    for a in several:
        sparse_mm(a, x)
    assert len(kernel._kept) == kernel._KEPT


def test_copies_work_as_the_original() -> None:
    fast = optimized(Propagated(matrix().coalesce(), kept="attribute").double(), BATCHES)
    again = pickle.loads(pickle.dumps(fast))
    (ids,) = BATCHES[1]
    torch.testing.assert_close(again(ids), fast(ids))
    with torch.inference_mode():
        torch.testing.assert_close(fast(ids), again(ids))
