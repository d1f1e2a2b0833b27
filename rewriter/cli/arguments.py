"""``--arg name=value``: how a value on the command line is read.

As a Python literal: ``3``, ``1e-3``, ``True``, ``None``, ``[1, 2]``, ``"a text"``. ``true``,
``false``, ``none``, ``null``, ``inf`` and ``nan`` are the values that they name, however they are
written, unless the argument is a text by its default or annotation: a pooling may be called "none".
All else is text. Quotes make a text of anything: ``--arg 'name="3"'``.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

from recast.errors import UsageError

_WORDS = {
    "true": True, "false": False, "none": None, "null": None,
    "inf": math.inf, "+inf": math.inf, "-inf": -math.inf, "nan": math.nan,
}  # fmt: skip
_NAMED = {"str": str, "bool": bool, "int": int, "float": float}


HELP = (
    "an argument for the function that SPEC names; may be repeated. VALUE is a number, true, false,"
    " none, another Python literal, or else text; quoted it is text in any case: 'NAME=\"3\"'"
)


def parse_arguments(
    arguments: Sequence[str], parameters: Mapping[str, Parameter] | None = None
) -> dict[str, Any]:
    """``["tables=26", "pooling=mean", "tied=false"]`` as keyword arguments of a function with these
    ``parameters``. Raises UsageError for what cannot be meant.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(
                f"--arg: cannot read {argument!r}",
                why="an argument is a name, an equals sign and a Python literal",
                tries=("--arg tables=26",),
            )
        kind = _kind((parameters or {}).get(name))
        values[name] = _fitting(argument, _value(text, kind), kind)
    return values


def _value(text: str, kind: type | None) -> Any:
    word = text.strip().lower()
    if word in _WORDS and text.strip() not in ("True", "False", "None"):
        return text if kind is str else _WORDS[word]
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _fitting(argument: str, value: Any, kind: type | None) -> Any:
    """``value``, as a whole number where 1e6 stands for one. Raises UsageError for a switch that is
    given a word, as any word would switch it on, and for a number with commas, which is a tuple.
    """
    name = argument.partition("=")[0]
    if kind is bool and isinstance(value, str):
        raise UsageError(
            f"--arg: {argument} is neither true nor false",
            why=f"{name} is a bool, and as a text {value!r} would be true",
            tries=(f"--arg {name}=true", f"--arg {name}=false"),
        )
    if kind in (int, float) and isinstance(value, tuple):
        raise UsageError(
            f"--arg: {argument} is no number",
            why=f"with commas it is the tuple {value}, and {name} is a number",
            tries=(f"--arg {name}=1_000_000 for a million", f"--arg {name}=0.5 for a half"),
        )
    whole = kind is int and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _kind(parameter: Parameter | None) -> type | None:
    """The type of an argument, by its default, else by its annotation; None: not known."""
    if parameter is None:
        return None
    if parameter.default is not Parameter.empty and parameter.default is not None:
        return type(parameter.default)
    said = parameter.annotation
    return _NAMED.get(said) if isinstance(said, str) else said if isinstance(said, type) else None
