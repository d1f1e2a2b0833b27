"""Cases in which a graph raises but the plain forward would not; checked only then, at no cost.

For example ids of another size or number of dimensions than in the example, a buffer that was set
to None, or an id outside its table in a forward that catches IndexError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from recast.errors import IdError, InputError
from recast.rewriter import order
from recast.rewriter.capture.constants import Constants
from recast.rewriter.capture.opaque_calls import Reshaped
from recast.rewriter.ir import Graph, Node

from .codegen import Program
from .plain_calls import FORM, Why
from .signature import Signature
from .undo import Snapshot

FEWER_ROWS = "expand that of fewer, or give such a batch too: example=[a, b]"


def why_fall_back(
    error: Exception, program: Program, graph: Graph, root: nn.Module, leaves: Sequence[Any],
    signature: Signature, catches: bool, empty: AbstractSet[str],
    snapshot: Snapshot | None,
) -> Why | None:  # fmt: skip
    """Why the plain forward should run after ``error``; None if it should not, because there is no
    such reason, or because the graph had already written something or drawn random numbers.
    ``empty``: what was None in the model when the program was made. ``snapshot``: undoes what was
    done; None if that is not possible.
    """
    if isinstance(error, Reshaped) and snapshot is not None and snapshot.restore_all():
        return Why(error.what, FORM)
    why = _reason(error, graph, root, leaves, signature, catches, empty)
    node = failing(error, program)
    if node is None:
        return None
    if why is None and not isinstance(error, IdError) and not _reads_offsets(node):
        why = _other_rows(leaves, signature)
    if why is None:
        return None
    # the operation only checked its inputs, or was not called at all
    checked = isinstance(error, InputError) or _functionalized(error)
    return why if _nothing_done(graph, node, root, checked) else None


def _reason(
    error: Exception, graph: Graph, root: nn.Module, leaves: Sequence[Any], signature: Signature,
    catches: bool, empty: AbstractSet[str],
) -> Why | None:  # fmt: skip
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    for now, then in zip(tensors, signature.ranks, strict=False):
        if now.dim() != then:
            return Why(f"an input has {now.dim()} dimensions, and {then} in the example", FORM)
    if _functionalized(error):
        what = "torch.func.functionalize does not take our operations"
        return Why(what, "functionalize the model that recast.optimize was given")
    gone = emptied(graph, root) - empty
    if gone:
        return Why(f"{min(gone)} is None")
    if catches:
        what = f"forward catches errors, and there is one: {error}"
        return Why(what, "calls without an error run the graph")
    other = None if isinstance(error, IdError) else signature.other_size(leaves)
    return None if other is None else Why(other, FORM)


def _other_rows(leaves: Sequence[Any], signature: Signature) -> Why | None:
    """Which inputs differ in their number of rows, as one user beside many items does: torch
    broadcasts the one, which not all of our operations do.
    """
    fixed = {k for k, sizes in signature.alike if any(dim == 0 for dim, _ in sizes)}
    rows = {
        signature.labels[k]: len(leaf)
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and k not in fixed
    }
    label = next(iter(rows), "")
    other = next((one for one, count in rows.items() if count != rows[label]), None)
    what = f"there are no longer equally many rows of {label} and {other}"
    return None if other is None else Why(what, FEWER_ROWS)


def _reads_offsets(node: Node) -> bool:
    """Whether ``node`` looks bags up: of its inputs, numbers of rows differ in any batch, and torch
    checks less.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return any(one is not None for one in given.get("offsets") or ())


def _functionalized(error: Exception) -> bool:
    """Whether torch refused to run an operation without its writes in place, in its own words."""
    return isinstance(error, RuntimeError) and "only support functionalizing" in str(error)


def emptied(graph: Graph, root: nn.Module) -> set[str]:
    """The parameters and buffers that ``graph`` reads and that are None now."""
    return {str(n.target) for n in graph.nodes if n.op == "get_attr" and _emptied(n, root)}


def gone(graph: Graph, root: nn.Module) -> str:
    """The first parameter or buffer that ``graph`` reads and that ``root`` has no longer."""
    for node in graph.nodes:
        owner, _, name = str(node.target).rpartition(".")
        if node.op != "get_attr" or owner.startswith(Constants.ATTRIBUTE):  # which are our own
            continue
        try:
            module = root.get_submodule(owner)
        except AttributeError:
            # Not a module but a table: what is stored in fewer bits is an attribute of its own.
            table = dict(root.named_parameters(remove_duplicate=False)).get(owner)
            return f"the module {owner!r}" if table is None else f"the stored form of {owner}"
        if not any(name in held for held in (*_slots(module), vars(module))):
            return f"the parameter {node.target!s}"
    return "a parameter"


def _emptied(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` reads a parameter or a buffer that is None."""
    owner, _, name = str(node.target).rpartition(".")
    try:
        module = root.get_submodule(owner)
    except AttributeError:
        return False
    return any(name in slots and slots[name] is None for slots in _slots(module))


def _slots(module: nn.Module) -> tuple[Mapping[str, Any], ...]:
    return module._parameters, module._buffers


def failing(error: Exception, program: Program) -> Node | None:
    """The node of ``program`` whose line raised."""
    line, tb = None, error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == program.file:
            line = tb.tb_lineno
        tb = tb.tb_next
    return program.nodes.get(line) if line is not None else None


def _nothing_done(graph: Graph, node: Node, root: nn.Module, checked: bool) -> bool:
    """Whether everything up to ``node`` may be computed again as if it had not run."""
    for one in graph.nodes:
        if one.op in ("placeholder", "get_attr"):
            continue
        if one is node and checked:
            return True
        if not order.droppable(one, root):
            return False
        if one is node:
            return True
    return False
