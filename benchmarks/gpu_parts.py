"""Parts of a step alone: an MLP with dropout, each fused op; beside eager and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import gpu_cases
import gpu_groups
import torch
from gpu_groups import Item
from gpu_measure import Rates, Variant, chain_work, measure, rows
from torch import Tensor, nn

import recast
from recast.runtime import OPS, fastest

BATCH = 65536
Found = dict[str, object]


def compiled(module: Callable[..., Any], tiny: bool) -> Callable[..., Any]:
    """``torch.compile``; in a dry run without its compiler."""
    return torch.compile(module, dynamic=False, backend="eager" if tiny else "inductor")


def effort(tiny: bool, seconds: float) -> dict[str, Any]:
    """How long to measure."""
    if tiny:
        return {"seconds": 0.0, "warmup": 5, "steps": 1, "rounds": 1}
    return {"seconds": seconds}


def dropout(rates: Rates, device: torch.device, tiny: bool) -> Iterator[Item]:
    """An MLP with dropout, forward and backward."""
    yield Item("dropout MLP", partial(_dropout, rates, device, tiny))


def _dropout(rates: Rates, device: torch.device, tiny: bool) -> Found:
    sizes, batch = ([16, 16, 8, 8], 8) if tiny else ([1024, 1024, 512, 256], BATCH)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.2)]
    torch.manual_seed(0)
    plain = nn.Sequential(*layers).to(device)
    x = [torch.randn(batch, sizes[0], device=device) for _ in range(2)]
    fast = recast.optimize(plain, example=(x[0],))
    low = torch.bfloat16

    def both(forward: Callable[..., Tensor]) -> Callable[[int], None]:
        leaves = [t.detach().to(low).requires_grad_() for t in x]
        upstream = torch.randn(batch, sizes[-1], device=device, dtype=low)

        def step(k: int) -> None:
            with torch.autocast(device.type, low):
                out = forward(leaves[k])
            torch.autograd.grad(out, [leaves[k], *plain.parameters()], upstream)

        return step

    found = [
        Variant("recast", both(fast)),
        Variant("recast graph", _captured(both(fast), device)),
        Variant("eager", both(plain)),
        Variant("eager graph", _captured(both(plain), device)),
        Variant("torch.compile", both(compiled(plain, tiny))),
    ]
    measure(found, device, batches=2, **effort(tiny, 4))
    moved, flops = chain_work(sizes, batch, 2)
    floor = {"ms": rates.ms(moved, flops, "bfloat16"), "GFLOP": flops / 1e9, "GB": moved / 1e9}
    lines = rows("dropout MLP, forward and backward, bf16", found, floor)
    return {"rows": lines, "chosen": fastest.timings()}


def _captured(step: Callable[[int], None], device: torch.device) -> Callable[[int], object]:
    """``step`` of batch 0 as a CUDA graph: what the device takes without its host."""
    replay: list[Callable[[], object]] = []

    def run(_: int) -> object:
        if device.type != "cuda":
            return step(0)
        if not replay:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(0)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(0)
            replay.append(graph.replay)
        return replay[0]()

    return run


def ops(rates: Rates, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Each fused op alone, in the shapes of the models above, forward and backward."""
    full, half = torch.float32, torch.bfloat16
    for name, make, dtype in (
        ("lookups, one id, 26 x 128", partial(gpu_cases.lookup, 26, 1, 128), full),
        ("lookups, one id, 26 x 128", partial(gpu_cases.lookup, 26, 1, 128), half),
        ("lookups, 20 ids, 26 x 64", partial(gpu_cases.lookup, 26, 20, 64), full),
        ("dots, 27 x 128", partial(gpu_cases.dot, 27, 128), full),
        ("dots, 27 x 128", partial(gpu_cases.dot, 27, 128), half),
        ("dots with lookups, 26 x 128", partial(gpu_cases.gathered, 26, 128), full),
        ("factorisation machine, 39 x 16", partial(gpu_cases.fm, 39, 16), full),
        ("cross network, 4 vectors of 624", partial(gpu_cases.vectors, 4, 624), full),
        ("cross network, 3 x 3456, rank 512", partial(gpu_cases.matrices, 3, 3456, 512), full),
        ("products of pairs, 26 x 16", partial(gpu_cases.pairs, 26, 16, "none"), full),
        ("inner products, 26 x 16", partial(gpu_cases.pairs, 26, 16, "dim"), full),
        ("CIN layer, 26 by 26 to 32, 16", partial(gpu_cases.layer, 26, 26, 32, 16), full),
        ("CIN layer, 26 by 26 to 128, 16", partial(gpu_cases.layer, 26, 26, 128, 16), half),
        ("attention, 39 fields, 2 x 16", partial(gpu_cases.attention, 39, 2, 16), full),
        ("gates, 8 experts, 3 tasks, 128", partial(gpu_cases.gates, 8, 3, 128), full),
        ("Dice, 200", partial(gpu_cases.dice, 200), full),
        ("MLP 479-1024-1024-512-256-1", partial(gpu_cases.mlp, gpu_cases.MLP), full),
        ("MLP 479-1024-1024-512-256-1", partial(gpu_cases.mlp, gpu_cases.MLP), half),
    ):
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        yield Item(label, partial(_op, rates, label, make, dtype, device, tiny))


def _op(
    rates: Rates,
    label: str,
    make: Callable[..., gpu_cases.Case],
    dtype: torch.dtype,
    device: torch.device,
    tiny: bool,
) -> Found:
    """The op, its definition in eager torch, and that compiled; on leaves of ``dtype``."""
    op, args, moved, flops = make(dtype, device, 8 if tiny else BATCH)
    if op not in OPS:
        raise gpu_groups.Skip(f"there is no op {op}")
    leaves = [
        t for a in args for t in (a if isinstance(a, list) else [a])
        if isinstance(t, Tensor) and t.is_floating_point()
    ]  # fmt: skip
    leaves = list({id(t): t.requires_grad_() for t in leaves}.values())
    with torch.no_grad():
        outs = OPS[op].target(*args)
    upstream = [torch.randn_like(o) for o in (outs if isinstance(outs, list) else [outs])]

    def both(call: Callable[..., Any], backward: bool) -> Callable[[int], None]:
        def step(_: int) -> None:
            with torch.set_grad_enabled(backward):
                outs = call(*args)
            if backward:
                torch.autograd.grad(
                    outs, leaves, upstream if isinstance(outs, (list, tuple)) else upstream[0],
                    allow_unused=True,
                )  # fmt: skip

        return step

    found: list[dict[str, object]] = []
    word = str(dtype).removeprefix("torch.")
    for backward in (False, True):
        variants = [
            Variant("recast", both(OPS[op].target, backward)),
            Variant("eager", both(OPS[op].reference, backward)),
            Variant("torch.compile", both(compiled(OPS[op].reference, tiny), backward)),
        ]
        if op == "gathered_dots":
            variants.insert(1, Variant("recast, two ops", both(gpu_cases.apart, backward)))
        measure(variants, device, batches=1, trace=False, **effort(tiny, 1))
        share = 1.0 if backward else gpu_cases.forward_share(op)
        floor = {"ms": rates.ms(moved * share, flops * share, word), "GB": moved * share / 1e9}
        found += rows(
            f"{label}, {'forward and backward' if backward else 'forward'}", variants, floor
        )
    return {"rows": found}
