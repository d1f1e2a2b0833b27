"""A row gradient under hooks, graphs, other dtypes and reused memory, against a plain one."""

from __future__ import annotations

import pytest
import torch
from row_backward import backward_both, expect_counts
from row_lookup import IDS, OTHER_IDS, dense, is_rows, ours, piece, plain, same, twins, weigh
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from recast.errors import UsageError
from recast.runtime.rows.grad import RowGrad, row_grad

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
