"""A row gradient read as a dense matrix, written into, viewed and copied, against a plain one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from row_backward import backward_both, clip_value, expect_counts
from row_lookup import OTHER_IDS, dense, is_rows, ours, plain, same, weigh
from torch import Tensor

# --- reads of a dense copy -----------------------------------------------------------------------


def test_other_reads_see_the_dense_gradient() -> None:
    a, b = backward_both()
    same(a.grad.norm(dim=1), b.grad.norm(dim=1))
    same(a.grad.abs().max(), b.grad.abs().max())
    same(a.grad.sum(0), b.grad.sum(0))
    same(a.grad.double(), b.grad.double())
    same(a.grad @ torch.eye(4), b.grad)
    assert a.grad.tolist() == dense(a.grad).tolist()
    assert is_rows(a.grad)
    expect_counts(read=6)


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


@pytest.mark.parametrize("array", [lambda g: g.numpy(), np.asarray], ids=["numpy", "asarray"])
def test_a_write_to_the_array_of_a_gradient(array: Callable[[Tensor], Any]) -> None:
    a, b = backward_both()
    for w in (a, b):
        out = array(w.grad)
        out *= 0.5
    same(a.grad, b.grad)
    expect_counts(write=1)


def test_a_write_by_another_library() -> None:
    a, b = backward_both()
    for w in (a, b):
        torch.from_dlpack(w.grad).mul_(0.5)
    same(a.grad, b.grad)


@pytest.mark.parametrize("call", [torch.add, torch.mul, torch.sub])
def test_out_is_written_to(call: Callable[..., Tensor]) -> None:
    a, b = backward_both()
    for w in (a, b):
        assert call(w.grad, w.grad, out=w.grad) is w.grad
    same(a.grad, b.grad)


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
