"""A row gradient in every usage that a plain gradient sees, beside the plain one."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from row_lookup import IDS, OTHER_IDS, dense, is_rows, ours, piece, plain, same, twins, weigh
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from recast.errors import UsageError
from recast.runtime.rows.grad import RowGrad, counters, row_grad

clip_norm = torch.nn.utils.clip_grad_norm_
clip_value = torch.nn.utils.clip_grad_value_


def backward_both(rows: int = 100) -> tuple[Parameter, Parameter]:
    a, b = twins(rows)
    weigh(ours(a)).backward()
    weigh(plain(b)).backward()
    return a, b


def expect_counts(**expected: int) -> None:
    """Dense events since the test began, by their first word."""
    got = {"write": 0, "read": 0, "step": 0}
    for key, times in counters().items():
        if key.startswith("dense-"):
            got[key.removeprefix("dense-").split(":")[0]] += times
    assert got == {"write": 0, "read": 0, "step": 0, **expected}, counters()


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
    assert torch.equal(ask(a.grad)[IDS], ask(b.grad)[IDS])


# --- reads of a dense copy -----------------------------------------------------------------------


def test_other_reads_see_the_dense_gradient() -> None:
    a, b = backward_both()
    same(a.grad.norm(dim=1), b.grad.norm(dim=1))
    same(a.grad.abs().max(), b.grad.abs().max())
    same(a.grad.sum(0), b.grad.sum(0))
    same(a.grad.double(), b.grad.double())
    same(a.grad @ torch.eye(4), b.grad)
    assert a.grad.tolist() == dense(a.grad).tolist()
    assert (a.grad.numpy() == dense(a.grad).numpy()).all()
    assert is_rows(a.grad)
    expect_counts(read=7)


def test_the_norm_of_order_zero_and_of_negative_order() -> None:
    a, b = backward_both()
    for order in (0, -1.0, -float("inf")):
        same(torch.linalg.vector_norm(a.grad, order), torch.linalg.vector_norm(b.grad, order))


def test_repr_is_short_and_reads_nothing() -> None:
    a, _ = backward_both()
    assert repr(a.grad) == "RowGrad((100, 4), 6 rows, dtype=torch.float32)"
    expect_counts()


def test_a_clone_is_another_gradient() -> None:
    a, b = backward_both()
    copied = a.grad.clone()
    assert is_rows(copied)
    copied.mul_(2)
    same(a.grad, b.grad)
    same(copied, 2 * b.grad)
    a.grad[0, 0] = 1.0
    another = a.grad.clone()
    another.zero_()
    assert a.grad[0, 0] == 1.0


def test_deepcopy_of_a_gradient_and_of_a_module() -> None:
    a, b = backward_both()
    copied = copy.deepcopy(a.grad)
    assert is_rows(copied)
    same(copied, b.grad)
    module = torch.nn.Module()
    module.w = a
    same(copy.deepcopy(module).w, b)


@pytest.mark.parametrize("how", ["save", "pickle"])
def test_a_saved_gradient_is_a_plain_tensor(how: str) -> None:
    a, b = backward_both()
    if how == "save":
        file = io.BytesIO()
        torch.save(a.grad, file)
        file.seek(0)
        loaded = torch.load(file)
    else:
        loaded = pickle.loads(pickle.dumps(a.grad))
    assert type(loaded) is Tensor
    same(loaded, b.grad)
    expect_counts(read=1)


# --- writes and views ----------------------------------------------------------------------------


def test_zero_grad_in_place_then_backward() -> None:
    a, b = backward_both()
    for w, find in ((a, ours), (b, plain)):
        torch.optim.SGD([w], lr=0.1).zero_grad(set_to_none=False)
        assert not dense(w.grad).any()
        weigh(find(w, OTHER_IDS)).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    expect_counts()


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clip_grad_value_makes_it_dense_for_good(foreach: bool | None) -> None:
    a, b = backward_both()
    held = a.grad
    clip_value([a], 0.1, foreach=foreach)
    clip_value([b], 0.1)
    assert not is_rows(a.grad)
    same(a.grad, b.grad)
    same(held, b.grad)
    expect_counts(write=1)


def test_writes_reach_every_alias() -> None:
    a, b = backward_both()
    alias, detached = a.grad, a.grad.detach()
    noise = torch.randn(100, 4)
    for w in (a, b):
        w.grad.add_(noise)
        w.grad[3] = 0
        w.grad.clamp_(-0.5, 0.5)
        w.grad.view(-1)[5] = 7.0
        w.grad.data.mul_(0.5)
    for grad in (a.grad, alias, detached):
        same(grad, b.grad)
    expect_counts(write=1)


def test_another_gradient_behind_the_same_name() -> None:
    a, b = backward_both()
    for w in (a, b):
        assert w.grad is not None
        w.grad.data = w.grad.data * 0.25
        w.grad.data = w.grad.data.clamp(-0.1, 0.1)
    same(a.grad, b.grad)
    clip_value([a], 0.05)
    clip_value([b], 0.05)
    same(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_module_cast_between_backward_and_step(dtype: torch.dtype) -> None:
    a, b = backward_both()
    modules = [torch.nn.ParameterList([w]) for w in (a, b)]
    for module in modules:
        module.to(dtype)
    assert a.grad is not None and a.grad.dtype == dtype
    same(a.grad, b.grad)
    for module in modules:
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    same(a, b)


def test_a_view_taken_early_sees_later_writes() -> None:
    a, b = backward_both()
    row = a.grad[1]
    a.grad.mul_(2)
    same(row, 2 * b.grad[1])
    expect_counts(write=1)


def test_memory_handed_out_by_address_is_that_of_the_gradient() -> None:
    a, b = backward_both()
    address = a.grad.data_ptr()
    assert address == a.grad.dense().data_ptr()
    same(a.grad, b.grad)
    expect_counts(write=1)


def test_storage_that_is_not_there_is_an_error() -> None:
    a, _ = backward_both()
    with pytest.raises(RuntimeError, match="invalid python storage"):
        a.grad.untyped_storage().fill_(0)
    assert is_rows(a.grad)


def test_scaling_by_a_scalar_stays_rows() -> None:
    a, b = backward_both()
    for w in (a, b):
        w.grad.data.mul_(0.5)
        w.grad /= 2
        w.grad = w.grad * 0.5
        w.grad = torch.tensor(3.0) * w.grad
        w.grad = -w.grad / torch.tensor(0.25)
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    expect_counts()


def test_scaling_lists_stays_rows() -> None:
    a, b = backward_both()
    for w in (a, b):
        torch._foreach_div_([w.grad], 2.0)
        torch._foreach_mul_([w.grad], [3.0])
        torch._foreach_mul_([w.grad], torch.tensor(0.5))
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    torch._foreach_zero_([a.grad, b.grad])
    assert is_rows(a.grad)
    same(a.grad, b.grad)
    expect_counts()


def test_scaling_by_a_matrix_is_a_write() -> None:
    a, b = backward_both()
    mask = torch.rand(100, 1)
    for w in (a, b):
        w.grad.mul_(mask)
    same(a.grad, b.grad)
    expect_counts(write=1)


def test_copying_rows_into_a_matrix_and_back() -> None:
    a, b = backward_both()
    bucket = torch.randn(100, 4)
    same(bucket.copy_(a.grad), b.grad)
    expect_counts()
    a.grad.copy_(bucket * 2)
    same(a.grad, 2 * b.grad)
    expect_counts(write=1)


# --- hooks ---------------------------------------------------------------------------------------


def test_a_hook_that_scales() -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        w.register_hook(lambda g: g * 2)
        weigh(find(w)).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)


def test_a_hook_that_writes() -> None:
    a, b = twins()

    def hook(grad: Tensor) -> None:
        grad.clamp_(-0.1, 0.1)

    for w, find in ((a, ours), (b, plain)):
        w.register_hook(hook)
        weigh(find(w)).backward()
    same(a.grad, b.grad)
    expect_counts(write=1)


def test_a_hook_after_accumulation() -> None:
    a, b = twins()

    def halve(weight: Tensor) -> None:
        weight.grad.mul_(0.5)

    for w, find in ((a, ours), (b, plain)):
        w.register_post_accumulate_grad_hook(halve)
        weigh(find(w)).backward()
        weigh(find(w, OTHER_IDS)).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)


# --- graphs --------------------------------------------------------------------------------------


def test_a_gradient_penalty() -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        (grad,) = torch.autograd.grad(weigh(find(w)), w, create_graph=True)
        assert grad.requires_grad
        grad.pow(2).sum().backward()
    same(a.grad, b.grad)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph() -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        weigh(find(w)).backward(create_graph=True)
        penalty = (w.grad**2).sum()
        w.grad = None
        penalty.backward()
    same(a.grad, b.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    a, b = twins()
    for w, find in ((a, ours), (b, plain)):
        z = torch.ones(1, requires_grad=True)
        out = checkpoint(lambda z, w=w, find=find: find(w) * z, z, use_reentrant=reentrant)
        weigh(out).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # torch 2.11
def test_compiled_around_a_lookup_that_is_not() -> None:
    a, b = twins()
    find = torch.compiler.disable(ours)
    compiled = torch.compile(lambda w: weigh(torch.tanh(find(w) * 2)), backend="aot_eager")
    compiled(a).backward()
    weigh(torch.tanh(plain(b) * 2)).backward()
    assert is_rows(a.grad)
    same(a.grad, b.grad)


def test_inference_and_frozen_tables() -> None:
    a, _ = twins()
    a.requires_grad_(False)
    with torch.inference_mode():
        same(ours(a), plain(a))
    head = Parameter(torch.randn(4, 1))
    weigh(ours(a) @ head).backward()
    assert a.grad is None and head.grad is not None


# --- the batch belongs to the user after backward ------------------------------------------------


def test_ids_may_be_overwritten_after_backward() -> None:
    a, b = twins()
    buffer = IDS.clone()
    weigh(ours(a, buffer)).backward()
    buffer.copy_(OTHER_IDS)
    weigh(ours(a, buffer)).backward()
    buffer.zero_()
    weigh(plain(b)).backward()
    weigh(plain(b, OTHER_IDS)).backward()
    same(a.grad, b.grad)


def test_an_upstream_gradient_overwritten_after_backward_is_an_error() -> None:
    upstream = torch.randn(6, 4)
    grad = row_grad((100, 4), torch.float32, torch.device("cpu"), [piece(IDS, upstream)])
    upstream.mul_(2)
    with pytest.raises(UsageError, match="overwritten"):
        grad.norm()


def test_a_neighbour_in_a_concatenated_gradient_may_be_overwritten() -> None:
    upstream = torch.randn(6, 8)
    want = torch.zeros(100, 4).index_add_(0, IDS, upstream[:, :4])
    grad = row_grad((100, 4), torch.float32, torch.device("cpu"), [piece(IDS, upstream[:, :4])])
    upstream[:, 4:].zero_()
    same(grad, want)


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    table = torch.randn(50, 5).to(dtype)
    a, b = Parameter(table), Parameter(table.double())
    ids, upstream = torch.randint(0, 50, (300,)), torch.randn(300, 5).to(dtype)
    ours(a, ids).backward(upstream)
    plain(b, ids).backward(upstream.double())
    assert is_rows(a.grad) and a.grad.dtype == dtype
    torch.testing.assert_close(dense(a.grad), b.grad.to(dtype))


def test_a_low_precision_output_of_a_full_precision_table() -> None:
    rows = torch.randn(6, 4).bfloat16()
    grad = row_grad((100, 4), torch.float32, torch.device("cpu"), [piece(IDS, rows)])
    same(grad, torch.zeros(100, 4).index_add_(0, IDS, rows.float()))


def test_row_grads_are_tensors() -> None:
    a, _ = backward_both()
    assert isinstance(a.grad, RowGrad) and isinstance(a.grad, Tensor)
    assert not a.grad.is_sparse and a.grad.layout is torch.strided and a.grad.is_contiguous()
