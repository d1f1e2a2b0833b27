"""Each way of calling an op reaches the right part: kernels, fake, or the plain reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from seen_ops import SeenOps
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx

from recast.runtime import OPS, device, tolerances
from recast.runtime.mlp import mlp as mlp_file
from recast.runtime.rows.grad import RowGrad

BAGS, DOT = OPS["embedding_bags"].target, OPS["dot_interaction"].target
MLP, DROP = OPS["mlp"].target, OPS["relu_dropout"].target


def bags(grad: bool = True, modes: tuple[str, ...] = ("sum", "mean")) -> tuple[Any, ...]:
    n = len(modes)
    tables = [torch.nn.Parameter(torch.randn(9, 4), requires_grad=grad) for _ in range(n)]
    ids = [torch.randint(0, 9, (5, 3)) for _ in range(n)]
    none = [None] * n
    return tables, ids, none, none, [*range(n)], [*modes], none, [False] * n, [False] * n


def pairs(grad: bool = True) -> tuple[Any, ...]:
    li, lj = torch.tril_indices(3, 3, -1)
    return [torch.randn(6, 3, 4, requires_grad=grad)], None, li, lj, 0


def chain(x: Tensor, grad: bool = True) -> tuple[Any, ...]:
    weight, bias = (torch.randn(s, requires_grad=grad) for s in ((4, x.shape[1]), (4,)))
    return x, [weight, bias], [], ["linear", "relu"], [], []


@pytest.mark.parametrize("grad", [True, False])
def test_a_dispatch_mode_sees_the_op_once(grad: bool) -> None:
    """It sees no embedding, bmm or index of plain torch."""
    for target, args in ((BAGS, bags(grad)), (DOT, pairs(grad))):
        with SeenOps() as seen:
            outs = target(*args)
        assert seen.names.count(str(target)) == 1
        assert not [*seen.of_torch("embedding"), *seen.of_torch("mm")]
        outs = outs if isinstance(outs, list) else [outs]
        assert all(o.requires_grad == grad for o in outs)
        if grad:
            upstream = [torch.randn_like(o) for o in outs]
            plain = [o.clone() for o in torch.autograd.grad(outs, args[0], upstream)]
            again = target(*args)
            again = again if isinstance(again, list) else [again]
            for a, b in zip(plain, torch.autograd.grad(again, args[0], upstream), strict=True):
                torch.testing.assert_close(a + 0, b + 0)


def test_gradients_are_row_gradients() -> None:
    args = bags(modes=("sum", "mean", "max", "none"))
    tables = args[0]
    outs = BAGS(*args)
    torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])
    assert all(isinstance(t.grad, RowGrad) for t in tables)


def test_frozen_tables_get_nothing() -> None:
    args = bags()
    args[0][1].requires_grad_(False)
    outs = BAGS(*args)
    assert [o.requires_grad for o in outs] == [True, False]
    outs[0].backward(torch.randn_like(outs[0]))
    assert isinstance(args[0][0].grad, RowGrad) and args[0][1].grad is None


def test_unused_lookups_give_no_gradient() -> None:
    args = bags()
    outs = BAGS(*args)
    outs[0].backward(torch.randn_like(outs[0]))
    assert args[0][0].grad is not None and args[0][1].grad is None


def test_sparse_tables_get_torch_s_sparse_gradient() -> None:
    tables, ids, none, _, _, modes, *_ = bags(modes=("sum", "mean"))
    flags = [True, True]
    outs = BAGS(tables, ids, none, none, [0, 1], modes, none, [False] * 2, flags)
    upstream = [torch.randn_like(o) for o in outs]
    ours = torch.autograd.grad(outs, tables, upstream)
    for t, i, m, u, g in zip(tables, ids, modes, upstream, ours, strict=True):
        out = torch.nn.functional.embedding_bag(i, t, mode=m, sparse=True)
        (plain,) = torch.autograd.grad(out, t, u)
        assert g.layout == plain.layout == torch.sparse_coo
        torch.testing.assert_close(g.to_dense(), plain.to_dense())
        assert g._nnz() == plain._nnz()


def test_shared_table_with_one_sparse_lookup_is_not_sparse() -> None:
    tables, ids, none, *_ = bags()
    modes, ends, sparse = ["sum", "sum"], [False, False], [True, False]
    outs = BAGS(tables[:1], ids, none, none, [0, 0], modes, none, ends, sparse)
    (grad,) = torch.autograd.grad(outs, tables[:1], [torch.randn_like(o) for o in outs])
    assert isinstance(grad, RowGrad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_plain_torch_s(dtype: torch.dtype) -> None:
    x = torch.randn(6, 5)
    args = chain(x)
    with torch.autocast("cpu", dtype):
        ours, plain = MLP(*args), OPS["mlp"].reference(*args)
    assert ours.dtype == plain.dtype
    assert torch.equal(ours, plain)
    with torch.autocast("cpu", dtype):
        args = bags()
        outs = BAGS(*args)
    assert outs[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", ["float32", "dense of autocast's", "a feature of autocast's"])
def test_pairs_under_autocast(dtype: torch.dtype, mixed: str) -> None:
    """Computed in float32 and rounded once: plain torch's dtypes, and at least as accurate."""
    (stack,), _, li, lj, pad = pairs(grad=False)
    dense, stack = torch.randn(6, 4), stack[:, 1:].clone()
    given = [dense.to(torch.float32 if mixed == "float32" else dtype), stack]
    also = given[0] if mixed != "a feature of autocast's" else torch.randn(6, 2)

    def run(call: Any, to: torch.dtype | None, cast: bool) -> list[Tensor]:
        leaves = [(t if to is None else t.to(to)).clone().requires_grad_() for t in (*given, also)]
        dense = leaves[0] if also is given[0] else leaves[2]
        with torch.autocast("cpu", dtype, enabled=cast):
            out = call(leaves[:2], dense, li, lj, pad)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        used = leaves[:2] if also is given[0] else leaves
        return [out, *torch.autograd.grad(out, used, upstream.to(out.dtype))]

    op = OPS["dot_interaction"]
    truth = run(op.reference, torch.float64, False)
    both = run(op.target, None, True), run(op.reference, None, True)
    for ours, plain, true in zip(*both, truth, strict=True):
        assert ours.dtype == plain.dtype
        assert tolerances.excess(ours.to(dtype), plain.to(dtype), true.detach()) <= 1


def test_function_transforms() -> None:
    x, weight = torch.randn(3, 6, 5), torch.randn(4, 5)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return MLP(x, [w, None], [], ["linear", "relu"], [], [])

    assert torch.vmap(call, (0, None))(x, weight).shape == (3, 6, 4)
    grad = torch.func.grad(lambda w: call(x[0], w).square().mean())(weight)
    leaf = weight.clone().requires_grad_()
    call(x[0], leaf).square().mean().backward()
    torch.testing.assert_close(grad, leaf.grad)
    _, tangent = torch.func.jvp(lambda w: call(x[0], w), (weight,), (weight,))
    torch.testing.assert_close(tangent, call(x[0], weight))


def test_tracing_records_the_op_without_gradients_and_plain_torch_with() -> None:
    li, lj = torch.tril_indices(3, 3, -1)

    def call(t: Tensor) -> Any:
        return DOT([t], None, li, lj, 0)

    frozen = make_fx(call)(torch.randn(2, 3, 4))
    assert any(n.target is DOT for n in frozen.graph.nodes)

    def gradient(t: Tensor) -> Any:
        t = t.requires_grad_()
        return torch.autograd.grad(call(t).square().sum(), t)

    traced = make_fx(gradient)(torch.randn(2, 3, 4))
    assert not any(n.target is DOT for n in traced.graph.nodes)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(traced(x.clone())[0], gradient(x.clone())[0])


@pytest.mark.parametrize("training", [True, False])
def test_compile(training: bool) -> None:
    """Fullgraph, forward and backward; the running statistics are updated."""
    norm = torch.nn.BatchNorm1d(4)
    weight = torch.nn.Parameter(torch.randn(4, 5))

    def call(x: Tensor, mean: Tensor, var: Tensor, count: Tensor) -> Tensor:
        return MLP(
            x, [weight, None, norm.weight, norm.bias], [mean, var, count],
            ["linear", "batch_norm", "relu"], [0.1, 1e-5], [training],
        )  # fmt: skip

    x = torch.randn(6, 5)
    stats = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    ours, plain = ([t.clone() for t in stats if t is not None] for _ in range(2))
    torch._dynamo.reset()
    out = torch.compile(call, backend="aot_eager", fullgraph=True)(x, *ours)
    wanted = call(x, *plain)
    torch.testing.assert_close(out, wanted)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    upstream = torch.randn_like(out)
    (a,) = torch.autograd.grad(out, weight, upstream)
    (b,) = torch.autograd.grad(wanted, weight, upstream)
    torch.testing.assert_close(a, b)


def test_ids_changed_before_backward_are_noticed() -> None:
    args = bags()
    outs = BAGS(*args)
    args[1][0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])


def test_outputs_can_be_changed_in_place() -> None:
    """Outputs share one allocation, but each counts its own changes."""
    outs = BAGS(*bags())
    before = outs[1].detach().clone()
    outs[0].relu_()
    torch.testing.assert_close(outs[1].detach(), before)
    torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])


def test_one_tensor_as_dense_and_as_feature() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    rest = torch.randn(5, 2, 4)
    li, lj = torch.tril_indices(3, 3, -1)
    upstream = torch.randn(5, 7)
    (ours,) = torch.autograd.grad(DOT([x, rest], x, li, lj, 0), x, upstream)
    reference = OPS["dot_interaction"].reference
    (plain,) = torch.autograd.grad(reference([x, rest], x, li, lj, 0), x, upstream)
    torch.testing.assert_close(ours, plain)


def test_masks_are_torch_s_own() -> None:
    """In fp32 on a CPU; and the generator ends where torch would leave it."""
    x = torch.randn(7, 33)
    for p in (0.0, 0.2, 0.999, 1.0):
        torch.manual_seed(3)
        plain = torch.nn.functional.dropout(torch.relu(x), p)
        end = torch.get_rng_state()
        for call in (
            lambda p: DROP(x, p, True),
            lambda p: MLP(x, [], [], ["relu", "dropout"], [p], [True]),
            lambda p: DROP(x.clone().requires_grad_(), p, True),
            lambda p: MLP(x.clone().requires_grad_(), [], [], ["relu", "dropout"], [p], [True]),
        ):
            torch.manual_seed(3)
            assert torch.equal(call(p), plain)
            assert torch.equal(torch.get_rng_state(), end)


def test_modules_in_a_row() -> None:
    """The chain against the modules it stands for, three steps of training, then eval."""
    from torch import nn

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Dropout(0.1), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6, momentum=None), nn.PReLU(6),
            nn.Linear(6, 3), nn.Sigmoid(),
        )  # fmt: skip

    def run(m: nn.Sequential, x: Tensor) -> Any:
        params, stats = [], []
        for layer in m:
            if isinstance(layer, (nn.Linear, nn.BatchNorm1d)):
                params += [layer.weight, layer.bias]
            if isinstance(layer, nn.BatchNorm1d):
                stats += [layer.running_mean, layer.running_var, layer.num_batches_tracked]
            if isinstance(layer, nn.PReLU):
                params.append(layer.weight)
        steps = ["dropout", "linear", "batch_norm", "relu", "dropout", "linear", "batch_norm",
                 "prelu", "linear", "sigmoid"]  # fmt: skip
        numbers = [0.1, 0.1, 1e-5, 0.3, None, 1e-5]
        return MLP(x, params, stats, steps, numbers, [m.training] * 4)

    ours, plain = build(), build()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, plain)]
    for step in range(3):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        upstream = torch.randn(16, 3, generator=torch.Generator().manual_seed(step + 9))
        for call, m, o in ((run, ours, optimizers[0]), (lambda m, x: m(x), plain, optimizers[1])):
            torch.manual_seed(step)
            o.zero_grad()
            call(m, x).backward(upstream)
            o.step()
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(run(ours.eval(), x), plain.eval()(x))


def test_one_row_in_training_is_refused_as_torch_does() -> None:
    norm = torch.nn.BatchNorm1d(4)
    args = (torch.randn(1, 4), [norm.weight, norm.bias], [None] * 3, ["batch_norm"], [0.1, 1e-5])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        MLP(*args, [True])


def test_small_chains_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flops of the call decide: rows times weights."""
    monkeypatch.setattr(mlp_file, "FUSED_FROM", 2 * 6 * 20)
    weight = torch.randn(4, 5, requires_grad=True)
    for rows, fused in ((5, False), (6, True)):
        out = MLP(torch.randn(rows, 5), [weight, None], [], ["linear", "relu"], [], [])
        assert (type(out.grad_fn).__name__ == "MlpBackward") is fused
    with device.use("torch"):
        out = MLP(torch.randn(9, 5), [weight, None], [], ["linear", "relu"], [], [])
    assert type(out.grad_fn).__name__ == "ReluBackward0"


def test_only_wanted_gradients_are_computed() -> None:
    x, first, second = torch.randn(6, 5), torch.randn(4, 5), torch.randn(3, 4)
    second.requires_grad_()
    out = MLP(x, [first, None, second, None], [], ["linear", "relu", "linear"], [], [])
    saved = [t for t in out.grad_fn.saved_tensors if t.shape == first.shape]
    assert not saved, "a frozen first layer needs no weight in backward"
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, second, upstream)
    torch.testing.assert_close(grad, upstream.t() @ torch.relu(x @ first.t()))
    assert torch.equal(upstream, upstream.clone())


def test_backward_leaves_the_upstream_gradient_alone() -> None:
    x = torch.randn(6, 5, requires_grad=True)
    out = MLP(x, [], [], ["tanh", "relu", "dropout", "sigmoid"], [0.5], [True])
    upstream = torch.randn_like(out)
    before = upstream.clone()
    out.backward(upstream)
    assert torch.equal(upstream, before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trained", [{0}, {4}, {0, 2}, {1, 4}, set()])
def test_second_derivatives_with_frozen_layers(trained: set[int], training: bool) -> None:
    """create_graph recomputes under the masks that were drawn, whichever layers are frozen."""
    g = torch.Generator().manual_seed(4)
    shapes = [(8, 5), (8,), (8,), (8,), (3, 8)]
    values = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    x, upstream = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((6, 5), (6, 3)))
    steps = ["linear", "batch_norm", "tanh", "relu", "dropout", "linear", "dropout"]

    def run(call: Any) -> list[Tensor]:
        params = [v.clone().requires_grad_(i in trained) for i, v in enumerate(values)]
        source = x.clone().requires_grad_(not trained)
        stats = [torch.zeros(8).double(), torch.ones(8).double(), torch.tensor(0)]
        torch.manual_seed(3)
        weight, bias, scale, shift, last = params
        out = call(
            source, [weight, bias, scale, shift, last, None], stats, steps,
            [0.1, 1e-5, 0.5, 0.3], [training] * 3,
        )  # fmt: skip
        leaves = [t for t in [source, *params] if t.requires_grad]
        first = torch.autograd.grad(out.tanh(), leaves, upstream, create_graph=True)
        second = torch.autograd.grad(
            sum((f.square().sum() for f in first), torch.zeros(())), leaves, allow_unused=True
        )
        return [*first, *(t for t in second if t is not None)]

    for a, b in zip(run(MLP), run(OPS["mlp"].reference), strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    args = bags()
    x = torch.randn(5, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        out = MLP(x, [], [], ["relu", "dropout"], [0.5], [True])
        return out + BAGS(*args)[0]

    results = []
    for wrap in (False, True):
        torch.manual_seed(1)
        out = checkpoint(block, x, use_reentrant=False) if wrap else block(x)
        results.append(torch.autograd.grad(out, [x, args[0][0]], torch.ones(5, 4) * 0.7))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a + 0, b + 0)


def test_double_registration_is_refused() -> None:
    from recast.runtime import register

    with pytest.raises(ValueError, match="'mlp' is registered already"):
        register(OPS["mlp"])


def test_what_could_write_and_does_not_is_traced_as_such() -> None:
    """Inductor does not accept the node that functionalisation makes of a writing op."""
    layer = torch.nn.Linear(4, 3)
    norm = torch.nn.BatchNorm1d(3).eval()
    stats = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    params = [layer.weight, layer.bias, norm.weight, norm.bias]
    chain = [layer.weight, layer.bias], [], ["linear", "relu"], [], []
    normed = params, stats, ["linear", "batch_norm"], [0.1, 1e-5], [False]
    x = torch.randn(5, 4)
    for args, target in ((chain, "recast.mlp.reading"), (normed, "auto_functionalized_v2")):
        graphs: list[Any] = []
        keep = lambda graph, _: graphs.append(graph) or graph  # noqa: E731, B023
        traced = aot_function(partial(_mlp, *map(len, args[:2]), args[2:]), fw_compiler=keep)
        with torch.no_grad():
            wanted = MLP(x, *args)
            torch.testing.assert_close(traced(x, *args[0], *args[1]), wanted)
        assert target in [str(n.target) for n in graphs[0].graph.nodes]


def _mlp(params: int, stats: int, rest: tuple[Any, ...], x: Tensor, *given: Tensor) -> Tensor:
    held = list(given[:params]), list(given[params : params + stats])
    return MLP(x, *held, *rest)
