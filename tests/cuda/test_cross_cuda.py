"""Cross networks as a GPU runs them, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions import mixture_cuda
from recast.runtime.interactions.cross_matrix import cross_matrix
from recast.runtime.interactions.cross_mixture import cross_mixture
from recast.runtime.interactions.cross_vector import cross_vector
from recast.runtime.op import Op, Sample
from recast.runtime.tolerances import excess


def network(batch: int, width: int, layers: int, *, apart: bool, spare: int = 0) -> list[Tensor]:
    """x_0, x, then a weight, a scalar and a bias per layer; ``spare`` columns between rows."""
    g = torch.Generator().manual_seed(batch + width + layers)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x0 = rand(batch, width + spare)[:, :width]
    x = rand(batch, width + spare)[:, :width] if apart else x0
    parts = [(rand(width) / width, rand(1), rand(width)) for _ in range(layers)]
    return [x0, x, *(p for part in parts for p in part)]


def run(inputs: list[Tensor], up: Tensor) -> list[Tensor]:
    """The result, and the gradients of all inputs."""
    same = inputs[1] is inputs[0]
    leaves = [t.detach().requires_grad_() for t in inputs]
    x = leaves[0] if same else leaves[1]
    rest = leaves[2:]
    out = cross_vector.target(leaves[0], x, rest[::3], rest[1::3], rest[2::3])
    out.backward(up.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("batch", "width", "layers", "spare"),
    [(5, 1, 1, 0), (6, 40, 3, 0), (7, 33, 8, 2)],
)
def test_forward_and_backward(batch: int, width: int, layers: int, spare: int, apart: bool) -> None:
    inputs = network(batch, width, layers, apart=apart, spare=spare)
    up = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
    with emulated_gpu.serve() as emulated:
        found = run(inputs, up)
    assert emulated.launched == ["cross_forward", "cross_backward"]
    plain = run(inputs, up)
    truth_of = [t.double() for t in inputs]
    if not apart:
        truth_of[1] = truth_of[0]
    truth = run(truth_of, up)
    assert len(found) == len(plain) == len(truth) == 2 + apart + 3 * layers
    for a, b, c in zip(found, plain, truth, strict=True):
        assert excess(a, b, c) <= 1


def test_more_layers_than_registers_and_other_dtypes_go_to_torch() -> None:
    for inputs in (
        network(4, 8, 9, apart=False), [t.double() for t in network(4, 8, 2, apart=True)],
    ):  # fmt: skip
        with emulated_gpu.serve() as emulated:
            run(inputs, torch.ones(4, 8))
        assert not emulated.launched


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    inputs, up = network(70, 40, 3, apart=False), torch.ones(70, 40)
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(inputs, up))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def tensors_of(sample: Sample, to: torch.dtype) -> list[object]:
    """The arguments, floats as leaves of that dtype; a tensor passed twice stays one."""
    made: dict[int, Tensor] = {}

    def one(value: object) -> object:
        if isinstance(value, list):
            return [one(v) for v in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in made:
            made[id(value)] = value.detach().to(to).requires_grad_()
        return made[id(value)]

    return [one(value) for value in sample.args]


def trained(op: Op, sample: Sample, to: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of all leaves."""
    args = tensors_of(sample, to)
    out = op.target(*args)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(to)
    out.backward(up)
    flat = [v for a in args for v in (a if isinstance(a, list) else [a])]
    leaves = list({id(t): t for t in flat if isinstance(t, Tensor)}.values())
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


MATRICES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in (cross_matrix, cross_mixture)
    for sample in op.samples()
    if not (op is cross_mixture and sample.args[-1])  # dropout draws: torch runs it
]


def kernels_of(op: Op, sample: Sample) -> set[str]:
    tails = {"tail_forward", "tail_backward"}
    if op is cross_matrix:
        return tails
    core = {"mixture_activate", "mixture_through"} if sample.args[3] is not None else set()
    return {*tails, "mixture_weigh", "mixture_unweigh", *core}


@pytest.mark.parametrize(("op", "sample"), MATRICES)
def test_layers_of_matrices(op: Op, sample: Sample) -> None:
    with emulated_gpu.serve() as emulated:
        found = trained(op, sample, torch.float32)
    if found[0].numel() and set(emulated.launched):
        assert set(emulated.launched) == kernels_of(op, sample)
    plain, truth = (trained(op, sample, to) for to in (torch.float32, torch.float64))
    assert len(found) == len(plain) == len(truth)
    scale = max(float(t.abs().max()) for t in truth if t.numel()) if found[0].numel() else None
    for a, b, c in zip(found, plain, truth, strict=True):
        assert excess(a, b, c, scale=scale) <= 1


@pytest.mark.long
def test_samples_reach_the_kernels() -> None:
    with emulated_gpu.serve() as emulated:
        for param in MATRICES:
            trained(*param.values, torch.float32)
    assert emulated.launched.count("tail_backward") > len(MATRICES)


def test_rows_are_summed_in_parts() -> None:
    """The gradient of a small matrix over many rows, which do not divide into whole parts."""
    g = torch.Generator().manual_seed(5)
    grad, h = (torch.randn(2, 1100, 6, generator=g)[..., 1:5] for _ in range(2))
    found = mixture_cuda._of_core(grad, h)
    truth = grad.double().transpose(1, 2) @ h.double()
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-4)
