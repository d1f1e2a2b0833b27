"""Every op x sample x dtype x kernel against its reference in float64, forward and backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import emulated_gpu
import pytest
import torch
from op_checks import (
    APART_WITHOUT_GRADIENTS,
    BY_KERNEL,
    CASES,
    DTYPES,
    EMULATED,
    GPU,
    OWN_DRAWS,
    OWN_MASKS,
    STATEFUL,
    TRAINED,
    UNLIKE_DIFFERENCES,
    as_list,
    cast,
    dense,
    device_of,
    evaluate,
    expected,
    floats,
    sent,
    upstream_of,
    ways,
    why_not,
)
from torch import Tensor

from recast.runtime import OPS, device, tolerances
from recast.runtime.gpu import cuda_launch
from recast.runtime.op import Op, Sample


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces all ops to use the kernel of this name; skips if the machine has none."""
    name: str = request.param
    op, sample = (request.node.callspec.params[given] for given in ("op", "sample"))
    if name in (EMULATED, GPU) and sample.label in OWN_MASKS.get(op.name, ()):
        pytest.skip("its masks are its own")
    if name == GPU and sample.label in OWN_DRAWS.get(op.name, ()):
        pytest.skip("its masks are drawn there")
    if name == EMULATED:
        with emulated_gpu.serve():
            yield name
        return
    why = why_not(name)
    if why:
        pytest.skip(why)
    with contextlib.nullcontext() if name == GPU else device.use(name):
        yield name


@pytest.mark.parametrize(("op", "sample", "kernel"), BY_KERNEL, indirect=["kernel"])
def test_against_float64(op: Op, sample: Sample, kernel: str) -> None:
    """In each dtype; in float32, no_grad and inference_mode give the bits of grad mode, unless it
    runs on other kernels.
    """
    where = device_of(kernel)
    apart = sample.label in APART_WITHOUT_GRADIENTS.get(op.name, ())
    for dtype in DTYPES:
        upstream = upstream_of(op, sample, dtype)
        ours = evaluate(op.target, op, cast(sample.args, dtype, where), upstream)
        plain, truth, scale = expected(op, sample, dtype)
        for part in (0, 1):
            assert len(ours[part]) == len(truth[part])
            for i, (a, b, c) in enumerate(zip(ours[part], plain[part], truth[part], strict=True)):
                assert a.dtype == b.dtype and a.shape == b.shape
                share = tolerances.excess(a, b, c, scale=scale)
                kind = ("output", "gradient")[part]
                assert share <= 1, f"{dtype}, {kind} {i}: {share:.2f} of the limit"
        for mode in (torch.no_grad, torch.inference_mode) if dtype == torch.float32 else ():
            with mode():
                torch.manual_seed(5)
                got = as_list(op.target(*cast(sample.args, dtype, where)))
            for i, (a, b) in enumerate(zip(got, ours[0], strict=True)):
                assert not a.requires_grad, mode
                if apart:
                    limits = plain[0][i], truth[0][i]
                    assert tolerances.excess(a.cpu(), *limits, scale=scale) <= 1, mode
                else:
                    assert torch.equal(a.cpu(), b), mode


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_buffers_and_inputs(op: Op, sample: Sample) -> None:
    """Inputs stay as they were; buffers end as with the reference, within the tolerances."""
    ours, plain = (cast(sample.args, torch.float32) for _ in range(2))
    judge = cast(sample.args, torch.float64)
    for call, args in ((op.target, ours), (op.reference, plain), (op.reference, judge)):
        outs, _ = evaluate(call, op, args, None)
        for out in outs:
            out.detach().fill_(float("nan"))  # an output that shares memory with an input shows
    before = cast(sample.args, torch.float32)
    for a, b, c, d in zip(ours, plain, before, judge, strict=True):
        each = (v if isinstance(v, list) else [v] for v in (a, b, c, d))
        for x, y, z, truth in zip(*each, strict=True):
            if not isinstance(x, Tensor):
                continue
            if op.name in STATEFUL and a is ours[2]:
                assert tolerances.excess(x, y, truth) <= 1
            else:
                assert torch.equal(x, y)
                assert torch.equal(x, z)


FIRST_ISA = next((name for name in device.ISAS if not why_not(name)), None)
STRIDED = [
    pytest.param(*case.values, id=case.id, marks=[pytest.mark.long] * (EMULATED in case.values))
    for case in BY_KERNEL
]


@pytest.mark.parametrize(("op", "sample", "kernel"), STRIDED, indirect=["kernel"])
def test_strided_upstream(op: Op, sample: Sample, kernel: str) -> None:
    """Upstream gradients that are expanded (stride 0), transposed or sliced give the same.

    Kernels of one source, compiled for several instruction sets, are handed them by the same code:
    all forms go to the first of those, two to the others.
    """
    wanted = [u.shape for u in upstream_of(op, sample, torch.float32)]
    where = device_of(kernel)
    g = torch.Generator().manual_seed(29)
    forms: dict[str, Callable[[torch.Size], Tensor]] = {
        "expanded": lambda s: torch.randn(1, generator=g).reshape([1] * len(s)).expand(s),
        "rows": lambda s: torch.randn([*[1] * min(len(s), 1), *s[1:]], generator=g).expand(s),
        "reversed": lambda s: torch.randn(s[::-1], generator=g).permute(tuple(range(len(s)))[::-1]),
        "sliced": lambda s: torch.randn([*s, 3], generator=g)[..., 1],
    }  # fmt: skip
    if kernel in device.ISAS and kernel != FIRST_ISA:
        forms = {name: forms[name] for name in ("expanded", "reversed")}
    for name, form in forms.items():
        upstream = [sent(form(s), where) if where != "cpu" else form(s) for s in wanted]
        args = cast(sample.args, torch.float32, where)
        _, got = evaluate(op.target, op, args, upstream)
        args = cast(sample.args, torch.float32, where)
        _, good = evaluate(op.target, op, args, [u.clone().contiguous() for u in upstream])
        for a, b in zip(got, good, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_create_graph(op: Op, sample: Sample) -> None:
    """The differentiable backward gives the gradients of the fast one."""
    upstream = upstream_of(op, sample, torch.float64)
    _, wanted = evaluate(op.target, op, cast(sample.args, torch.float64), upstream)
    args = cast(sample.args, torch.float64)
    leaves = [t.requires_grad_() for t in floats(op, args)]
    torch.manual_seed(5)
    outs = as_list(op.target(*args))
    got = torch.autograd.grad(outs, leaves, upstream, create_graph=True, allow_unused=True)
    for a, b, leaf in zip(got, wanted, leaves, strict=True):
        torch.testing.assert_close(dense(a, leaf).detach(), b)


GRAPHED = [case for case in STRIDED if case.values[2] in (FIRST_ISA, EMULATED)]


@pytest.mark.parametrize("turned", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("op", "sample", "kernel"), GRAPHED, indirect=["kernel"])
def test_create_graph_of_inputs_that_depend_on_each_other(
    op: Op, sample: Sample, kernel: str, turned: bool
) -> None:
    """As where a table is the layer after it, too: each way from one to the other counts once."""
    if op.name == "embedding_bags" and any(sample.args[8]):
        pytest.skip("torch adds no dense gradient to a sparse one")
    upstream = upstream_of(op, sample, torch.float32)
    found = []
    for create_graph in (False, True):
        args = cast(sample.args, torch.float32)
        leaves = [t.requires_grad_() for t in floats(op, args)]
        made: dict[int, Tensor] = {}
        before = torch.zeros(())
        for leaf in leaves[::-1] if turned else leaves:
            if not leaf.isfinite().all():  # a mask: of zero times infinity came NaN
                continue
            made[id(leaf)] = leaf * (1 + before)
            before = made[id(leaf)].sum() / max(leaf.numel(), 1)
        chained = [
            [made.get(id(t), t) for t in a] if isinstance(a, list) else made.get(id(a), a)
            for a in args
        ]
        torch.manual_seed(5)
        outs = as_list(op.target(*chained))
        grads = torch.autograd.grad(
            outs, leaves, upstream, create_graph=create_graph, allow_unused=True
        )
        found.append([dense(g, leaf).detach() for g, leaf in zip(grads, leaves, strict=True)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# By finite differences, the first samples of each op; the others are long tests.
DIFFERENCES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}", marks=[pytest.mark.long] * (k > 2))
    for op in TRAINED
    for k, sample in enumerate(op.samples())
]


@pytest.mark.parametrize(("op", "sample"), DIFFERENCES)
def test_gradcheck(op: Op, sample: Sample) -> None:
    """First and second derivatives by finite differences, in float64."""
    args = cast(sample.args, torch.float64)
    leaves = [t for t in floats(op, args) if t.numel()]
    if not leaves or sum(t.numel() for t in leaves) > 150:
        pytest.skip("too large for finite differences")
    flagged = [t.detach().clone().requires_grad_() for t in leaves]

    def call(*values: Tensor) -> Any:
        swap = dict(zip(map(id, leaves), values, strict=True))
        fresh = [
            [swap.get(id(t), copy.deepcopy(t)) for t in a] if isinstance(a, list)
            else swap.get(id(a), a)
            for a in args
        ]  # fmt: skip
        torch.manual_seed(5)
        out = as_list(op.target(*fresh))
        return tuple(out) if len(out) > 1 else out[0]

    if sample.label in UNLIKE_DIFFERENCES:
        pytest.skip(UNLIKE_DIFFERENCES[sample.label])
    # Row gradients are read densely; the fast mode would multiply them by vectors.
    torch.autograd.gradcheck(dense_gradients(call, flagged), flagged, fast_mode=False)
    torch.autograd.gradgradcheck(call, flagged, fast_mode=True)


def dense_gradients(call: Callable[..., Any], leaves: list[Tensor]) -> Callable[..., Any]:
    """``call`` on products with ones, whose backward reads the row gradients as dense tensors.

    gradcheck overwrites its upstream gradients, which a row gradient still refers to.
    """
    return lambda *values: call(*(v * torch.ones_like(v) for v in values))


DEVICES = [
    pytest.param(op, where, id=f"{op.name}-{where}")
    for op in OPS.values()
    for where in ("cpu", *(name for name in ways(op) if name in (EMULATED, GPU)))
]


@pytest.mark.parametrize(("op", "where"), DEVICES)
def test_opcheck(op: Op, where: str) -> None:
    """torch's own checks: schema, autograd registration, fake tensors, export."""
    if where == GPU and (why := cuda_launch.why_not()):
        pytest.skip(why)
    with emulated_gpu.serve() if where == EMULATED else contextlib.nullcontext():
        opcheck(op, device_of(where))


def opcheck(op: Op, where: str) -> None:
    for sample in op.samples():
        if sample.label in ("empty batch", "empty gather", "no bags", "gather scalar"):
            continue  # opcheck itself indexes into these
        args = cast(sample.args, torch.float32, where)
        random = any(word in sample.label for word in ("drop", "train", "transposed", "3-d", "p 1"))
        utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if random:
            utils.remove("test_schema")
        torch.library.opcheck(op.target, args, test_utils=utils)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_fake(op: Op) -> None:
    """The fake kernel gives the shapes, dtypes and strides of the results."""
    for sample in op.samples():
        args = cast(sample.args, torch.float32)
        with torch.no_grad():
            real = as_list(op.target(*args))
        fakes = as_list(op.fake(*cast(sample.args, torch.float32)))
        assert [(f.shape, f.dtype) for f in fakes] == [(r.shape, r.dtype) for r in real]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_cost(op: Op) -> None:
    for sample in op.samples():
        cost = op.cost(*sample.args)
        outs = as_list(op.fake(*sample.args))
        assert cost.bytes >= sum(o.numel() * o.element_size() for o in outs)
        assert cost.flops >= 0


@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if EMULATED in ways(op)], ids=lambda op: op.name
)
def test_kernels_of_a_gpu_are_launched(op: Op) -> None:
    """The emulator's log shows that these tests run the kernels, and not a way around them."""
    wide = op.name.startswith("cross_")  # their kernels are of float32 only, as they say
    for dtype in (torch.float32,) if wide else (torch.float32, torch.bfloat16):
        with emulated_gpu.serve() as emulated:
            for sample in op.samples():
                evaluate(op.target, op, cast(sample.args, dtype), upstream_of(op, sample, dtype))
                if emulated.launched:
                    break
        assert emulated.launched, dtype


def test_kernels_are_listed() -> None:
    for op in OPS.values():
        listed = op.usable()
        assert listed and listed[-1][1], "the last kernel takes everything"
        assert all(reason for _, _, reason in listed)
