"""Execution order: which nodes have side effects, and a sort that moves only what must move."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from recast.rewriter.capture.calls import OUT_OF_PLACE
from recast.rewriter.capture.opaque_calls import OpaqueCall

from .ir import Graph, Node

_RANDOM: set[Callable[..., Any]] = {
    torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.randperm, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson,
    nn.functional.dropout, nn.functional.alpha_dropout, nn.functional.feature_alpha_dropout,
    nn.functional.dropout1d, nn.functional.dropout2d, nn.functional.dropout3d,
    nn.functional.gumbel_softmax, nn.functional.rrelu, torch.dropout, torch.dropout_,
    nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.feature_alpha_dropout, torch.feature_alpha_dropout_, torch.native_dropout,
    torch.rrelu, torch.rrelu_, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
    torch.binomial, torch._standard_gamma, torch._sample_dirichlet, torch._fused_dropout,
    torch.svd_lowrank, torch.pca_lowrank, torch.lobpcg,
    nn.functional.fractional_max_pool2d, nn.functional.fractional_max_pool2d_with_indices,
    nn.functional.fractional_max_pool3d, nn.functional.fractional_max_pool3d_with_indices,
    nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.xavier_uniform_,
    nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_,
    nn.init.orthogonal_, nn.init.sparse_,
    torch.manual_seed,
}  # fmt: skip
_RANDOM_METHODS = {
    "bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "random_", "exponential_",
    "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip
_DRAWING_MODULES = (
    nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.Transformer,
    nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip
_NEW_TENSORS = {torch.cat, torch.stack, operator.add, operator.sub, operator.mul}
_INPLACE_AT = {  # the position of the argument ``inplace``
    F.relu: 1,
    F.relu6: 1,
    F.selu: 1,
    F.silu: 1,
    F.mish: 1,
    F.hardswish: 1,
    F.hardsigmoid: 1,
    F.elu: 2,
    F.celu: 2,
    F.leaky_relu: 2,
    F.hardtanh: 3,
    F.threshold: 3,
    F.rrelu: 4,
    F.dropout: 3,
    F.alpha_dropout: 3,
    F.feature_alpha_dropout: 3,
    F.dropout1d: 3,
    F.dropout2d: 3,
    F.dropout3d: 3,
}
# what a subclass may define without changing what a call of the layer does
_INERT = {
    "__init__", "__module__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__repr__",
    "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__", "__constants__",
    "reset_parameters", "extra_repr", "_fill_padding_idx_with_zero", "from_pretrained",
}  # fmt: skip
_ASSERTIONS: set[Any] = {torch._assert}
_STATEFUL = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}


def foreign(module: nn.Module) -> bool:
    """Whether nothing is known about what ``module`` does: it is not torch's own, or has hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or not _torchs_own(type(module))


def _torchs_own(kind: type) -> bool:
    """Whether a call of ``kind`` runs torch's own code alone; a subclass may initialise and print
    as it likes.
    """
    if getattr(kind, "recast_layer", False):
        return True
    base = next(k for k in kind.__mro__ if k.__module__.startswith(("torch.", "builtins")))
    if not base.__module__.startswith("torch.nn.modules."):
        return False
    above = kind.__mro__[: kind.__mro__.index(base)]
    return not any(hasattr(base, name) and name not in _INERT for k in above for name in vars(k))


def renormalises(module: nn.Module) -> bool:
    """Whether reading ``module``, a table of torch, rewrites its rows."""
    # other modules may have an attribute of this name, for what they clip
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def renormalised(node: Node, root: nn.Module) -> torch.Tensor | None:
    """The table whose rows ``node`` rewrites as it looks them up (``max_norm``)."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return module._parameters.get("weight") if renormalises(module) else None
    if node.target not in (F.embedding, F.embedding_bag):
        return None
    limit = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    table = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    if limit is None or not isinstance(table, Node) or table.op != "get_attr":
        return None
    found = operator.attrgetter(str(table.target))(root)
    return found if isinstance(found, torch.Tensor) else None


def declare_random(function: Callable[..., Any]) -> None:
    """State that a call of ``function``, which a pass writes into graphs, draws random numbers."""
    _RANDOM.add(function)


def declare_assertion(function: Callable[..., Any]) -> None:
    """State that a call of ``function`` may raise, and is kept in its place for that."""
    _ASSERTIONS.add(function)


def asserts(node: Node) -> bool:
    """Whether ``node`` is there because it may raise."""
    return node.op == "call_function" and node.target in _ASSERTIONS


def draws(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` may draw random numbers (so that their order must be kept)."""
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return torch.Tag.nondeterministic_seeded in node.target.tags
        return isinstance(node.target, OpaqueCall) or node.target in _RANDOM
    if node.op == "call_method":
        return node.target in _RANDOM_METHODS
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if isinstance(module, nn.RNNBase) and module.num_layers == 1:
            return foreign(module)  # dropout acts between layers, and there is only one
        return foreign(module) or isinstance(module, _DRAWING_MODULES)
    return False


def writes(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` may write to a value of the graph in place (own buffers do not count)."""
    if node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return any(n.op != "get_attr" for n in written(node))
        if isinstance(target, OpaqueCall) or communicates(node):
            return True
        name = getattr(target, "__name__", "")
        if target in (operator.setitem, operator.delitem) or asserts(node):
            return True
        at = _INPLACE_AT.get(target, len(node.args))  # type: ignore[arg-type]
        given = node.args[at] if at < len(node.args) else node.kwargs.get("inplace", False)
        if given is not False or node.kwargs.get("out") is not None:
            return True
        if renormalised(node, root) is not None:
            return True
        if target in (operator.and_, operator.or_):  # so called for Python's keywords
            return False
        return target in OUT_OF_PLACE or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_method":
        name = str(node.target)
        if only_reshapes(node):
            return False
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return foreign(module) or bool(getattr(module, "inplace", False)) or renormalises(module)
    return False


def only_reshapes(node: Node) -> bool:
    """Whether ``node`` is ``x.unsqueeze_(dim)`` of a fresh tensor x that nobody else sees."""
    if node.op != "call_method" or node.target != "unsqueeze_":
        return False
    x = node.args[0]
    fresh = isinstance(x, Node) and x.op == "call_function" and x.target in _NEW_TENSORS
    return fresh and set(x.users) == {node}  # type: ignore[union-attr]


def written(node: Node) -> set[Node]:
    """The values that an operator call writes to, according to its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found: set[Node] = set()
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            fx.node.map_arg(given, found.add)
    return found


def movable(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` has the same value wherever it is placed after its inputs."""
    return not (draws(node, root) or writes(node, root))


def droppable(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` may be erased when it has no users: movable, and without own state."""
    if node.op in ("placeholder", "output"):
        return False
    if keeps_statistics(node, root):
        return False
    if isinstance(node.target, torch._ops.OpOverload) and written(node):
        return False
    return movable(node, root)


def communicates(node: Node) -> bool:
    """Whether ``node`` is a call of ``torch.distributed`` that the model makes itself."""
    home = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and home.startswith("torch.distributed.")


def keeps_statistics(node: Node, root: nn.Module) -> bool:
    """Whether a call of ``node`` may change buffers of its own, as batch normalization does."""
    if node.op == "call_module":
        return next(root.get_submodule(str(node.target)).buffers(), None) is not None
    return node.target in _STATEFUL


def live(graph: Graph, root: nn.Module) -> set[Node]:
    """The nodes that the output or a write in place depends on. Others may be there because they
    draw random numbers.
    """
    found: set[Node] = set()
    writing = (n for n in graph.nodes if writes(n, root) and n.op != "call_module")
    left = [*(n for n in graph.nodes if n.op == "output"), *writing]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return found


def stable_sort(graph: Graph) -> None:
    """Order the nodes so that inputs come before users, moving only what must move.

    Raises ValueError on a cycle, before anything has moved.
    """
    order: list[Node] = []
    state: dict[Node, int] = {}  # 1: being visited, 2: done
    for start in graph.nodes:
        stack = [(start, iter(start.all_input_nodes))]
        if state.get(start) == 2:
            continue
        state[start] = 1
        while stack:
            node, inputs = stack[-1]
            nxt = next(inputs, None)
            if nxt is None:
                state[node] = 2
                order.append(node)
                stack.pop()
            elif state.get(nxt) == 1:
                raise ValueError(f"cycle through {nxt}")
            elif nxt not in state:
                state[nxt] = 1
                stack.append((nxt, iter(nxt.all_input_nodes)))
    previous: Node | None = None
    for node in order:
        if previous is not None and node.prev is not previous:
            previous.append(node)
        previous = node


def positions(graph: Graph) -> dict[Node, int]:
    """The position of each node in ``graph``."""
    return {node: k for k, node in enumerate(graph.nodes)}


def hoisted(inputs: Iterable[Node], before: Node, place: dict[Node, int]) -> set[Node]:
    """The nodes that must move above ``before`` so that ``inputs`` are computed by then."""
    moved: set[Node] = set()
    stack = list(inputs)
    while stack:
        node = stack.pop()
        if node not in moved and place[node] > place[before]:
            moved.add(node)
            stack.extend(node.all_input_nodes)
    return moved
