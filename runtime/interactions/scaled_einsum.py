"""An einsum of three factors, one of which only scales the result, as a product and a scaling.

    out[..] = s[..] · Σ a[..] b[..]          ``equation`` says which dimensions each one has

``torch.einsum`` multiplies from the left unless opt_einsum is installed, so for
``"bi,eij,bj->bei"`` it writes s a, a (b, e, i, j) tensor, before it sums over j; here the sum comes
first, and on a GPU one kernel scales it, or does both (:mod:`.scaled_tiles`). Under autocast, which
casts an einsum but not a product, the op runs its definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch
from recast.runtime.interactions import scaled_cuda, scaled_tiles
from recast.runtime.op import Kernel, Op, Sample, register

SCHEMA = "(Tensor scale, Tensor a, Tensor b, str equation) -> Tensor"


def reference(scale: Tensor, a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Plain torch. ``equation``: ``"bi,eij,bj->bei"``; every letter of the first is in the last."""
    _read(equation)
    return torch.einsum(equation, scale, a, b)


def _read(equation: str) -> tuple[str, str, str, str]:
    """The terms of the scale, of a and b, and of the result."""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    plain = all(term.isalpha() and len({*term}) == len(term) for term in (*terms, output))
    fits = bool(arrow) and len(terms) == 3 and plain
    if not fits or not scales(terms[0], terms[1], terms[2], output):
        raise InputError(
            f"scaled_einsum {equation!r}",
            why="three terms and the result; the letters of the first are in the result, in order,"
            " and all others of the result in the second or third",
        )
    return terms[0], terms[1], terms[2], output


def scales(scale: str, a: str, b: str, output: str) -> bool:
    """Whether the first term only scales what the others give."""
    in_order = scale == "".join(letter for letter in output if letter in scale)
    return in_order and {*output} <= {*a, *b}


def fake(scale: Tensor, a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Shape and dtype of the result."""
    first, second, third, output = _read(equation)
    shapes = (*scale.shape, *a.shape, *b.shape)
    sizes = dict(zip(first + second + third, shapes, strict=True))
    return scale.new_empty([sizes[letter] for letter in output])


def forward(scale: Tensor, a: Tensor, b: Tensor, equation: str) -> Tensor:
    """The result; autograd sees the product and the scaling."""
    if torch.is_autocast_enabled(scale.device.type):
        return reference(scale, a, b, equation)
    first, second, third, output = terms = _read(equation)
    found = scaled_tiles.scaled(scale, a, b, terms)
    if found is not None:
        return found
    product = torch.einsum(f"{second},{third}->{output}", a, b)
    found = scaled_cuda.scaled(scale, product, first, output)
    if found is not None:
        return found
    for k, letter in enumerate(output):
        if letter not in first:
            scale = scale.unsqueeze(k)
    return scale * product


def cost(scale: Tensor, a: Tensor, b: Tensor, equation: str) -> Cost:
    """A multiply-add for each element of the product, and the scaling."""
    first, second, third, output = _read(equation)
    shapes = (*scale.shape, *a.shape, *b.shape)
    sizes = dict(zip(first + second + third, shapes, strict=True))
    whole = torch.Size(sizes[letter] for letter in {*second, *third}).numel()
    written = torch.Size(sizes[letter] for letter in output).numel()
    return Cost(2 * whole + written, moved(scale, a, b) + written * scale.element_size())


def samples() -> list[Sample]:
    """Batched and not, one of each, strides, no rows."""
    g = torch.Generator().manual_seed(61)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x = rand(5, 6)
    return [
        Sample("experts", (x, rand(3, 6, 6), x, "bi,eij,bj->bei")),
        Sample("many columns", (rand(37, 36), rand(3, 36, 20), rand(37, 20), "bi,eij,bj->bei")),
        Sample("bilinear", (rand(4, 3), rand(3, 7), rand(4, 7), "bi,ij,bj->bi")),
        Sample("vectors", (rand(4), rand(4, 7), rand(7, 2), "b,bi,ij->bj")),
        Sample("one of each", (rand(1, 1), rand(1, 1, 1), rand(1, 1), "bi,eij,bj->bei")),
        Sample("empty batch", (rand(0, 4), rand(2, 4, 4), rand(0, 4), "bi,eij,bj->bei")),
        Sample("strided", (rand(6, 5).t(), rand(2, 6, 8)[:, :, ::2], rand(5, 4), "bi,eij,bj->bei")),
    ]


scaled_einsum = register(
    Op(
        name="scaled_einsum",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=forward,
        samples=samples,
        cost=cost,
        casts=True,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("torch", "cpu", "always; the definition under autocast", lambda: None),
            Kernel("cuda", "cuda", scaled_cuda.CONDITION, cuda_launch.why_not),
            Kernel("torch", "cuda", "anything else; the definition under autocast", lambda: None),
        ),
    )
)
