"""One change to the source of a function, as someone else may have written it, or by mistake."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from random import Random
from typing import Any

# What a value becomes; X is the value.
VALUES = (
    "X.clone()", "X.contiguous()", "X.detach()", "X.float()", "X.to(torch.float64)", "X.data",
    "X.relu()", "X.tanh()", "X.sigmoid()", "X.abs()", "X.neg()", "X.square()", "X.pow(2)", "X / 3",
    "X.erf()", "X.clamp(-1, 1)", "X.softmax(-1)", "X.softmax(0)", "X.cumsum(-1)", "X.nan_to_num()",
    "X.mean(-1, keepdim=True)", "X.sum(-1, keepdim=True)", "X.std(-1, keepdim=True)",
    "X.norm(dim=-1, keepdim=True)", "X.logsumexp(-1, keepdim=True)", "X.amax(-1, keepdim=True)",
    "X.mean(0, keepdim=True)", "X.var(0, keepdim=True)", "X.mean()", "X.sum()", "X.sort(-1).values",
    "X.t().t()", "X.transpose(0, -1).transpose(0, -1)", "X.movedim(0, -1).movedim(-1, 0)",
    "X.unsqueeze(0).squeeze(0)", "X.unsqueeze(-1)[..., 0]", "X.squeeze()", "X.expand_as(X)",
    "X.reshape(-1).view_as(X)", "X.as_strided(X.shape, X.stride())", "X.repeat(1, 1)", "X.tril()",
    "X.flip(0)", "X.flip(-1)", "X.roll(1, -1)", "X[:1]", "X[..., :1]", "X[::2]", "X.unbind(0)[0]",
    "X.chunk(2, -1)[0]", "X.index_select(0, torch.zeros(1, dtype=torch.long))",
    "X.where(X > 0, 0.0)", "X.masked_fill(X > 0.3, 0.1)", "X.requires_grad_()",
    "X.clone().relu_()", "X.clone().mul_(0.5)", "X.relu_()", "X.mul_(0.5)", "X.add_(1)",
    "X.clamp_(-1, 1)", "X.zero_()", "X.fill_(0.3)", "X.copy_(X * 2)", "X.detach_()",
    "X.masked_fill_(X > 0.3, 0.1)",
)  # fmt: skip
# What follows a statement; X is a name in it.
STATEMENTS = (
    "X += 1", "X *= 0.5", "X[0] = 0.5", "X[-1] += 1", "X[..., 0].mul_(2)", "X[X > 0.2] = 0.2",
    "X = X.clone(); X[:, 0] = 0.1", "X.relu_()", "X.t().mul_(1.5)", "X[:1].zero_()",
    "X.flatten()[::2].mul_(2)", "X.data.mul_(0.9)", "X.detach().mul_(0.5)", "X.retain_grad()",
    "X = X + torch.rand_like(X) * 0.1", "X = [X, X][1]", "assert X.shape[0] > 0",
)  # fmt: skip
BLOCKS = ("torch.no_grad()", "torch.enable_grad()")
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
OTHER_NAMES = {
    "sum": "mean", "mean": "sum", "prod": "sum", "max": "min", "relu": "tanh", "sigmoid": "relu",
    "tanh": "sigmoid", "cat": "stack", "stack": "cat", "bmm": "matmul", "mul": "add", "add": "mul",
    "softmax": "log_softmax",
}  # fmt: skip

_Change = Callable[[ast.FunctionDef, Random], str | None]


def change(function: ast.FunctionDef, rng: Random) -> str | None:
    """Change ``function`` in one place; what was done, or None where nothing offers itself."""
    for one in rng.choices(_CHANGES, weights=_WEIGHTS, k=20):
        done = one(function, rng)
        if done is not None:
            ast.fix_missing_locations(function)
            return done
    return None


def _nodes(function: ast.FunctionDef, kind: type | tuple[type, ...]) -> list[Any]:
    return [n for statement in function.body for n in ast.walk(statement) if isinstance(n, kind)]


def _constant(function: ast.FunctionDef, rng: Random) -> str | None:
    found = [n for n in _nodes(function, ast.Constant) if isinstance(n.value, (bool, int, float))]
    if not found:
        return None
    node = rng.choice(found)
    old = node.value
    others = [not old] if isinstance(old, bool) else [old + 1, old - 1, -old, 2 * old, 0, 1]
    node.value = rng.choice([type(old)(new) for new in others if new != old])
    return f"{old} => {node.value}"


def _operator(function: ast.FunctionDef, rng: Random) -> str | None:
    found = _nodes(function, ast.BinOp)
    if not found:
        return None
    node = rng.choice(found)
    if rng.random() < 0.3:
        node.left, node.right = node.right, node.left
        return f"{ast.unparse(node)} the other way"
    node.op = rng.choice(OPERATORS)()
    return f"another operator: {ast.unparse(node)}"


def _arguments(function: ast.FunctionDef, rng: Random) -> str | None:
    found = [n for n in _nodes(function, ast.Call) if len(n.args) > 1]
    found += [n for n in _nodes(function, ast.List) if len(n.elts) > 1]
    if not found:
        return None
    node = rng.choice(found)
    if isinstance(node, ast.List):
        edit = rng.choice([lambda e: e.reverse(), lambda e: e.append(e[0]), lambda e: e.pop()])
        edit(node.elts)
    else:
        at = rng.randrange(len(node.args) - 1)
        node.args[at : at + 2] = node.args[at + 1], node.args[at]
    return f"other arguments: {ast.unparse(node)}"


def _name(function: ast.FunctionDef, rng: Random) -> str | None:
    found = [n for n in _nodes(function, ast.Attribute) if n.attr in OTHER_NAMES]
    if not found:
        return None
    node = rng.choice(found)
    node.attr = OTHER_NAMES[node.attr]
    return f"another name: {ast.unparse(node)}"


def _value(function: ast.FunctionDef, rng: Random) -> str | None:
    kinds = (ast.Call, ast.BinOp, ast.Name, ast.Subscript)
    found = [n for n in _nodes(function, kinds) if isinstance(getattr(n, "ctx", None), _Read)]
    if not found:
        return None
    node, form = rng.choice(found), rng.choice(VALUES)
    new = ast.parse(form.replace("X", f"({ast.unparse(node)})"), mode="eval").body

    class Replace(ast.NodeTransformer):
        def visit(self, n: ast.AST) -> ast.AST:
            return new if n is node else self.generic_visit(n)

    function.body = [Replace().visit(statement) for statement in function.body]
    return f"{ast.unparse(node)} => {form}"


_Read = (ast.Load, type(None))


def _statement(function: ast.FunctionDef, rng: Random) -> str | None:
    at = rng.randrange(len(function.body))
    names = {n.id for n in ast.walk(function.body[at]) if isinstance(n, ast.Name)}
    names -= {"self", "torch", "F", "nn", "range", "len", "zip"}
    if not names or isinstance(function.body[at], ast.Return):
        return None
    text = rng.choice(STATEMENTS).replace("X", rng.choice(sorted(names)))
    function.body[at + 1 : at + 1] = ast.parse(text).body
    return f"and then {text}"


def _block(function: ast.FunctionDef, rng: Random) -> str | None:
    found = [k for k, s in enumerate(function.body) if isinstance(s, (ast.Assign, ast.AugAssign))]
    if not found:
        return None
    at, text = rng.choice(found), rng.choice(BLOCKS)
    context = ast.withitem(ast.parse(text, mode="eval").body)
    function.body[at] = ast.With(items=[context], body=[function.body[at]])
    return f"with {text}"


def _order(function: ast.FunctionDef, rng: Random) -> str | None:
    if len(function.body) < 3:
        return None
    at = rng.randrange(len(function.body) - 2)
    if rng.random() < 0.5:
        function.body.insert(at, copy.deepcopy(function.body[at]))
        return f"{ast.unparse(function.body[at])}, twice"
    function.body[at : at + 2] = function.body[at + 1], function.body[at]
    return f"{ast.unparse(function.body[at])}, earlier"


_CHANGES: tuple[_Change, ...] = (
    _constant, _operator, _arguments, _name, _value, _statement, _block, _order,
)  # fmt: skip
_WEIGHTS = (2, 2, 1, 2, 6, 3, 1, 1)
