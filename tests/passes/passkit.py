"""What the tests of the passes share: optimise, count what fired, compare all numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import recast
from recast.rewriter.ir import Node
from recast.rewriter.report.journal import Journal
from recast.runtime.rows import optimizer as row_optimizer

# torch warns at the first sparse gradient unless this default is asked for; warnings are errors.
torch.sparse.check_sparse_tensor_invariants.disable()
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # float64 throughout; only the order of sums differs


def optimized(model: nn.Module, batches: Sequence[Any], passes: str | None = None) -> Any:
    """The optimised model; a rule that raises is an error."""
    return recast.optimize(model, example=list(batches), passes=passes, strict=True)


def journal(fast: Any) -> Journal:
    return fast.report.journal


def fired(fast: Any) -> Counter[str]:
    """How often each rule fired, except those that only clean up."""
    rules = Counter(entry.rule for entry in journal(fast).fired)
    for name in ("normalize", "share-values", "clean-up"):
        rules.pop(name, None)
    return rules


def misses(fast: Any, rule: str) -> list[str]:
    return [entry.why for entry in journal(fast).missed if entry.rule == rule]


def calls(fast: Any, name: str) -> list[Node]:
    """The calls of ``torch.ops.recast.<name>`` in the graph in force."""
    target = getattr(torch.ops.recast, name).default
    return [n for n in fast.graph.nodes if n.target is target]


def dense(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return grad.to_dense() if grad.layout == torch.sparse_coo else grad + 0.0


def run(model: nn.Module, batch: tuple[Any, ...], seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs, and the gradients of parameters and inputs under a random upstream gradient."""
    model.zero_grad(set_to_none=True)
    batch = copy.deepcopy(batch)
    inputs = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.is_floating_point()]
    for t in inputs:
        t.requires_grad_()
    torch.manual_seed(seed)
    outputs = [t for t in tree_leaves(model(*batch)) if isinstance(t, Tensor)]
    g = torch.Generator().manual_seed(seed + 1)
    up = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in outputs]
    if any(t.requires_grad for t in outputs):
        torch.autograd.backward(outputs, up)
    grads: dict[str, Any] = {n: dense(p.grad) for n, p in model.named_parameters()}
    grads |= {f"input {k}": t.grad for k, t in enumerate(inputs)}
    return [t.detach() for t in outputs], grads


def agree(plain: nn.Module, fast: nn.Module, batches: Sequence[Any]) -> None:
    """Outputs and all gradients, in eval and in train mode; buffers after it."""
    for training in (False, True):
        plain.train(training)
        fast.train(training)
        for k, batch in enumerate(batches):
            (want, wanted), (got, had) = run(plain, batch, k), run(fast, batch, k)
            torch.testing.assert_close(got, want, **EXACT)
            assert had.keys() == wanted.keys()
            for name, grad in wanted.items():
                assert (grad is None) == (had[name] is None), f"gradient of {name}"
                if grad is not None:
                    torch.testing.assert_close(
                        had[name], grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}"
                    )
    buffers = dict(fast.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, **EXACT)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> None:
    """Three steps under random upstream gradients."""
    model.train()
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        outputs = [t for t in tree_leaves(model(*copy.deepcopy(batches[step % len(batches)])))]
        g = torch.Generator().manual_seed(step)
        up = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in outputs]
        torch.autograd.backward(outputs, up)
        optimizer.step()


def same(
    model: nn.Module, batches: Sequence[Any], passes: str | None = None, *, steps: bool = True
) -> Any:
    """Optimise ``model`` in float64, compare everything with the plain one, return the result."""
    model = model.double()
    plain, trained = copy.deepcopy(model), copy.deepcopy(model)
    fast = optimized(model, batches, passes)
    quick = copy.deepcopy(fast)  # as it is before any run, and sooner made than by optimising again
    agree(plain, fast, batches)
    if steps and any(p.requires_grad for p in plain.parameters()):
        one = torch.optim.Adagrad(trained.parameters(), lr=0.1, initial_accumulator_value=0.1)
        two = torch.optim.Adagrad(quick.parameters(), lr=0.1, initial_accumulator_value=0.1)
        row_optimizer.attach(two)  # as optimize() does with an optimizer
        train(trained, one, batches)
        train(quick, two, batches)
        for (name, a), (_, b) in zip(
            quick.named_parameters(), trained.named_parameters(), strict=True
        ):
            torch.testing.assert_close(a, b, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
    return fast
