"""A row gradient that is added, shared, clipped and inspected, against a plain one."""

from __future__ import annotations

import pytest
import torch
from row_backward import backward_both, clip_norm, expect_counts
from row_lookup import OTHER_IDS, dense, is_rows, ours, piece, plain, same, twins, weigh
from torch import Tensor
from torch.nn import Parameter

from recast.errors import IdError
from recast.runtime.rows import dispatch
from recast.runtime.rows.grad import counters, row_grad

# --- how gradients add up ------------------------------------------------------------------------


def test_one_backward() -> None:
    a, b = backward_both()
    assert is_rows(a.grad)
    assert a.grad.shape == b.grad.shape and a.grad.dtype == b.grad.dtype
    same(a.grad, b.grad)
    expect_counts()


def test_a_table_used_twice_in_one_forward() -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        weigh(find(w) * find(w, OTHER_IDS)).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    expect_counts()


def test_a_lookup_and_a_dense_use_in_one_backward() -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        (weigh(find(w)) + 0.1 * w.pow(2).sum()).backward()
    same(a.grad, b.grad)


@pytest.mark.parametrize("dense_first", [False, True])
def test_a_dense_gradient_and_rows_in_two_backwards(dense_first: bool) -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        losses = [lambda w=w, find=find: weigh(find(w)), lambda w=w: 0.1 * w.pow(2).sum()]
        for loss in reversed(losses) if dense_first else losses:
            loss().backward()
    same(a.grad, b.grad)
    expect_counts(write=0 if dense_first else 1)


def test_torchs_own_sparse_gradient_on_top_stays_rows() -> None:
    a, b = twins()
    weigh(ours(a)).backward()
    weigh(torch.nn.functional.embedding(OTHER_IDS, a, sparse=True)).backward()
    weigh(plain(b)).backward()
    weigh(plain(b, OTHER_IDS)).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)


def test_rows_on_top_of_torchs_own_sparse_gradient() -> None:
    a, b = twins()
    weigh(torch.nn.functional.embedding(OTHER_IDS, a, sparse=True)).backward()
    weigh(ours(a)).backward()
    weigh(plain(b, OTHER_IDS)).backward()
    weigh(plain(b)).backward()
    same(a.grad, b.grad)


def test_accumulation_stays_rows_and_bounded_by_the_table() -> None:
    a, b = twins()
    for turn in range(50):
        ids = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(turn))
        weigh(ours(a, ids)).backward()
        weigh(plain(b, ids)).backward()
    assert is_rows(a.grad)
    assert sum(len(p.rows) for p in a.grad.cell.pieces) <= 100 + 50 + 16
    same(a.grad, b.grad)
    expect_counts()


def test_accumulation_does_not_merge_what_is_small() -> None:
    a, _ = twins(rows=10_000)
    for _ in range(5):
        weigh(ours(a)).backward()
    assert len(a.grad.cell.pieces) == 5
    assert "merge" not in counters()


def test_two_backwards_of_one_graph() -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        loss = weigh(find(w))
        loss.backward(retain_graph=True)
        loss.backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)


def test_autograd_grad_returns_rows() -> None:
    a, b = twins()
    (x,) = torch.autograd.grad(weigh(ours(a)), a)
    (y,) = torch.autograd.grad(weigh(plain(b)), b)
    assert is_rows(x)
    same(x, y)


@pytest.mark.parametrize("alpha", [1.0, -0.5])
def test_sums_of_row_gradients(alpha: float) -> None:
    a, b = backward_both()
    c, d = twins(seed=3)
    weigh(ours(c, OTHER_IDS), 4).backward()
    weigh(plain(d, OTHER_IDS), 4).backward()
    a.grad.mul_(3.0)
    b.grad.mul_(3.0)
    total = a.grad.add(c.grad, alpha=alpha)
    assert is_rows(total)
    same(total, b.grad.add(d.grad, alpha=alpha))
    a.grad.add_(c.grad, alpha=alpha)
    b.grad.add_(d.grad, alpha=alpha)
    same(a.grad, b.grad)
    same(dense(c.grad), d.grad)
    noise = torch.randn(100, 4)
    same(torch.add(noise, a.grad, alpha=alpha), torch.add(noise, b.grad, alpha=alpha))
    same(torch.add(a.grad, noise, alpha=alpha), torch.add(b.grad, noise, alpha=alpha))


def test_a_gradient_added_to_itself() -> None:
    a, b = backward_both()
    for w in (a, b):
        w.grad.add_(w.grad)
        w.grad.mul_(0.5).add_(w.grad.data, alpha=-0.25)
    assert is_rows(a.grad)
    same(a.grad, b.grad)


# --- two tables that share one upstream gradient -------------------------------------------------


def shared() -> tuple[list[Parameter], list[Parameter]]:
    (a, b), (c, d) = twins(), twins(seed=5)
    factors = torch.randn(6, 4)
    for one, two, find in ((a, c, ours), (b, d, plain)):
        (find(one) + find(two, OTHER_IDS)).backward(factors)
    assert a.grad.cell.pieces[0].rows.data_ptr() == c.grad.cell.pieces[0].rows.data_ptr()
    return [a, c], [b, d]


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_scales_a_shared_gradient_once(foreach: bool | None) -> None:
    mine, theirs = shared()
    same(clip_norm(mine, 0.5, foreach=foreach), clip_norm(theirs, 0.5))
    for x, y in zip(mine, theirs, strict=True):
        same(x.grad, y.grad)
    expect_counts()


def test_unscaling_scales_a_shared_gradient_once() -> None:
    mine, theirs = shared()
    for weights in (mine, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(torch.optim.SGD(weights, lr=0.1))
    for x, y in zip(mine, theirs, strict=True):
        same(x.grad, y.grad)
    expect_counts()


# --- reads that stay rows ------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_clip_grad_norm(norm: float, foreach: bool | None) -> None:
    a, b = backward_both()
    a.grad.mul_(-3.0)
    b.grad.mul_(-3.0)
    same(clip_norm([a], 0.1, norm, foreach=foreach), clip_norm([b], 0.1, norm))
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    expect_counts()


def test_the_norm_counts_duplicates_once_summed() -> None:
    w = Parameter(torch.zeros(10, 2))
    rows = torch.tensor([[3.0, 0.0], [0.0, 4.0], [-3.0, 0.0]])
    w.grad = row_grad(w.shape, w.dtype, w.device, [piece(torch.tensor([1, 1, 1]), rows)])
    assert w.grad.norm() == 4.0


def test_clip_grad_norm_of_a_gradient_without_rows() -> None:
    a, b = backward_both()
    for w in (a, b):
        w.grad.zero_()
    for norm in (2.0, float("inf")):
        same(clip_norm([a], 1.0, norm), clip_norm([b], 1.0, norm))
    assert is_rows(a.grad)


def test_clip_grad_norm_sees_what_is_not_finite() -> None:
    w, _ = twins()
    (ours(w) * float("nan")).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_norm([w], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("kind", ["zeros_like", "ones_like", "empty_like"])
def test_likes_look_at_the_shape_only(kind: str) -> None:
    a, b = backward_both()
    got, want = getattr(torch, kind)(a.grad), getattr(torch, kind)(b.grad)
    assert type(got) is Tensor and got.stride() == want.stride()
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert a.grad.new_zeros(3).tolist() == [0, 0, 0]
    expect_counts()


def test_detect_anomaly_stays_rows_and_finds_nan() -> None:
    a, _ = twins()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        weigh(ours(a)).backward()
    assert is_rows(a.grad)
    expect_counts()
    with (
        pytest.warns(UserWarning),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan"),
    ):
        (ours(a) * torch.full((6, 4), float("nan"))).sum().backward()


@pytest.mark.parametrize("ask", [torch.isnan, torch.isinf, torch.isfinite])
def test_questions_of_finiteness(ask: object) -> None:
    a, b = backward_both()
    assert callable(ask)
    assert torch.equal(ask(a.grad), ask(b.grad))
    for w in (a, b):
        w.grad.mul_(float("inf"))
    assert torch.equal(ask(a.grad), ask(b.grad))


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_division_by_zero_is_no_error(zero: float) -> None:
    a, b = backward_both()
    same(a.grad / zero, b.grad / zero)
    for w in (a, b):
        w.grad.div_(zero)
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    same(torch.ones(100, 4).add_(a.grad), torch.ones(100, 4).add_(b.grad))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_factor_that_is_not_finite_leaves_nothing_finite(
    factor: float | Tensor, kernel: str
) -> None:
    a, b = backward_both()
    for w in (a, b):
        w.grad.mul_(factor)
    for order in (1.0, 2.0, float("inf")):
        same(a.grad.norm(order), b.grad.norm(order))
    assert is_rows(a.grad), "a step that is skipped costs no matrix"
    same(a.grad.mul(2.0), b.grad.mul(2.0))
    assert not bool(a.grad.isfinite().any())
    if kernel == "cuda" and isinstance(factor, Tensor):
        return  # a sum would have to wait for the device
    for w, find in ((a, ours), (b, plain)):
        weigh(find(w, OTHER_IDS)).backward()
    same(a.grad, b.grad)


def test_division_of_fp64_by_an_integer_tensor_is_in_fp64() -> None:
    a, b = (Parameter(w.detach().double()) for w in twins())
    for w, find in ((a, ours), (b, plain)):
        weigh(find(w).float()).backward()
        w.grad /= torch.tensor(3)
    torch.testing.assert_close(dense(a.grad), b.grad, rtol=1e-15, atol=0)


def test_isclose_with_nan_writes_to_what_isnan_returns() -> None:
    a, b = backward_both()
    assert bool(torch.isclose(a.grad, b.grad, equal_nan=True).all())


def test_isnan_of_a_large_table_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops ask at each step, and its matrix may not fit beside the table."""
    a, _ = backward_both()
    monkeypatch.setattr(dispatch, "_WRITABLE", a.numel() - 1)
    found = torch.isnan(a.grad)
    assert found.shape == a.shape and found.untyped_storage().nbytes() == 1
    assert not bool(found.any())


def test_a_norm_is_not_asked_of_other_models() -> None:
    """Whose ids may be wrong: their error is theirs."""
    ids, rows = torch.tensor([2, 5]), torch.randn(2, 3)
    other = row_grad(torch.Size((4, 3)), torch.float32, rows.device, [piece(ids, rows)])
    grad = row_grad(torch.Size((9, 3)), torch.float32, rows.device, [piece(ids, rows)])
    torch.testing.assert_close(torch.linalg.vector_norm(grad), rows.norm())
    with pytest.raises(IdError, match="row 5 of a table of 4 rows"):
        torch.linalg.vector_norm(other)
