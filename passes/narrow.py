"""Lookups whose rows are only multiplied: under autocast they are written in its dtype right away.

Autocast to 16 bits rounds the operands of a matrix product. Where looked-up rows have no other use,
the lookup itself can round them: half as much memory is written and read, and no cast remains. The
products have the same bits, and the gradients are those of autocast, as long as each row is read
once: with two readers, autograd would add the gradients in 16 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, depends, is_call, items, note, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, bytes_of, differs, human, module_of, on_gpu, plural

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_BAGS = torch.ops.recast.embedding_bags.default
_DOT = torch.ops.recast.dot_interaction.default
_MLP = torch.ops.recast.mlp.default
_CAT = torch.ops.recast.embedding_cat.default
_NARROW = {_BAGS: 9, _CAT: 11}  # the place of the flag among the arguments

# Calls that pass values on unchanged, in another shape or next to others.
_SHAPES = (
    torch.reshape, torch.flatten, torch.unflatten, torch.transpose, torch.unsqueeze, torch.squeeze,
    torch.cat, torch.stack,
)  # fmt: skip
# Products whose factors autocast rounds, all of them.
_PRODUCTS = (torch.matmul, operator.matmul, torch.bmm, torch.mm)


def _refused(node: Node, root: nn.Module) -> Miss | None:
    """Why ``node``, seen through views and joins, is more than an operand that autocast rounds."""
    region = note(node).autocast or ()
    while node.users:
        user = sole_user(node)
        if user is None:
            names = ", ".join(u.name for u in node.users)
            return Miss(
                node, f"rows are read by {names}, whose gradients would be added in 16 bits"
            )
        if (note(user).autocast or ()) != region:
            return Miss(user, "torch.autocast is switched between the lookup and what reads it")
        if _rounds(user, node, root):
            return None
        if not is_call(user, *_SHAPES):
            return Miss(user, "it reads looked-up rows, which autocast does not round for it")
        wide = _wide(user, root)
        if wide is not None:
            return Miss(user, f"beside rows it reads {wide.name}, which autocast leaves in float32")
        node = user
    return None


def _wide(join: Node, root: nn.Module) -> Node | None:
    """What ``join`` puts beside rows though no product made it narrow, so that it widens them."""
    parts = argument(join, 0, "tensors") if is_call(join, torch.cat, torch.stack) else ()
    made = {n for n in join.graph.nodes if is_call(n, _BAGS, _CAT) or _multiplies(n, root)}
    return next((part for part in parts if not depends(part, made)), None)


def _multiplies(node: Node, root: nn.Module) -> bool:
    product = is_call(node, _MLP, _DOT, F.linear, *_PRODUCTS)
    return product or isinstance(module_of(node, root), nn.Linear)


def _rounds(user: Node, node: Node, root: nn.Module) -> bool:
    """Whether autocast rounds ``node`` where ``user`` reads it, and ``user`` reads it once."""
    if is_call(user, _DOT):
        features = list(argument(user, 0, "features"))
        return features.count(node) == 1 and argument(user, 1, "dense") is not node
    if is_call(user, _MLP):
        return argument(user, 0, "input") is node and argument(user, 3, "steps")[0] == "linear"
    if is_call(user, *_PRODUCTS):
        return user.args.count(node) + list(user.kwargs.values()).count(node) == 1
    if is_call(user, F.linear):
        return argument(user, 0, "input") is node
    module = module_of(user, root)
    return isinstance(module, nn.Linear) and differs(user, module, nn.Linear) is None


def _matcher(everywhere: bool) -> Callable[[Node, nn.Module], Answer]:
    def match(node: Node, root: nn.Module) -> Answer:
        if not is_call(node, *_NARROW) or len(node.args) > _NARROW[node.target]:  # type: ignore[index]
            return None
        if not everywhere and not on_gpu(node, root):
            return None
        outputs = [item for _, item in sorted(items(node), key=lambda found: found[0])]
        # When lookups are joined to a matrix, it is the matrix that becomes narrow.
        narrowed = outputs if is_call(node, _BAGS) else [o for o in outputs if o.args[1] == 0]
        refused = filter(None, (_refused(item, root) for item in narrowed))
        return next(refused, None) or Match([node, *outputs], outputs, node)

    return match


def _rewrite(match: Match, build: Build) -> list[Node]:
    call: Node = match.found
    lookups = _BAGS if is_call(call, _BAGS) else _CAT
    made = build.call(lookups, *call.args, True, name=call.name.rstrip("_0123456789"))
    return [build.item(made, item.args[1]) for item in match.outputs]  # type: ignore[arg-type]


def _describe(match: Match) -> str:
    count = len(match.found.args[1])
    return f"{plural(count, 'lookup')} written in autocast's dtype where it is on"


def _worth(match: Match) -> str | None:
    """Bytes saved per sample: each element is written and read at half its size."""
    saved = 0
    for item in match.outputs:
        size = bytes_of(item)
        if size is None:
            return None
        saved += size
    return f"{human(saved)} of traffic a sample under autocast to 16 bits"


@cache
def narrow_rule(everywhere: bool) -> Rule:
    """The rule for tables on a GPU only, or for all."""
    return Rule(
        name="narrow-lookups",
        equation="matmul(bags(ws, xs)[k], y) => matmul(bags(ws, xs, narrow=True)[k], y)",
        match=_matcher(everywhere),
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )


@dataclass(frozen=True)
class NarrowLookups:
    """matmul(bags(ws, xs)[k], y) => matmul(bags(ws, xs, narrow=True)[k], y)

    Where each row of a call is read by exactly one product that autocast rounds for (Linear,
    matmul, dot_interaction, mlp), possibly through views, cat and stack. Without autocast nothing
    changes. Only for tables on a GPU, whose kernels can do it, unless ``everywhere``.
    """

    name: ClassVar[str] = "narrow-lookups"
    everywhere: bool = False

    def run(self, graph: Graph, context: Context) -> int:
        """Narrow the lookups of ``graph``; returns the number of calls."""
        return apply(graph, [narrow_rule(self.everywhere)], context)
