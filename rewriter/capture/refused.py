"""The reason why a trace stopped: what cannot be captured, where, and what the user can do."""

from __future__ import annotations

from types import CodeType

from recast.errors import CaptureError
from recast.rewriter.compiled.value_checks import NotComparable

_APART = (
    "keep this part in a submodule of its own: it then stays as it is and all else is rewritten"
)
_REMEDIES = (
    "torch.where / masked_fill instead of python control flow on values",
    "example=[batch, batch_of_another_size]",
    _APART,
)
# what helps, by words that only such a reason holds
_OF_KIND: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("it asks for the time", ("what the clock says as an argument of forward", _APART)),
    ("it draws from", ("torch.rand or its like, which are drawn anew at each call", _APART)),
    ("it seeds random numbers", ("a torch.Generator that is made in __init__", _APART)),
    ("it opens a file", ("what is in the file as an argument of forward, or a buffer", _APART)),
    ("leaves torch for numpy", ("torch's own operation in place of numpy's", _APART)),
    ("tolist returns", ("operations on the whole tensor in place of a list of it", _APART)),
)

UNREGISTERED = (
    "nn.ModuleList or nn.ModuleDict in its place: train(), to() and state_dict() then reach it too",
)


class Refused(CaptureError):
    """A module cannot be traced; ``path`` is the innermost module whose forward is the cause."""

    path: str = ""
    # "len", "int", "float" or "range" of a size, which python wants real, "min" or "max" of sizes
    # ("min"), or "type" of a tensor: :mod:`.replaced_builtins`; "numpy" if it was met; "shape" of
    # what a function gives that leaves torch
    size: str = ""
    # the user's functions that were running: see :mod:`.opaque_calls`
    inside: tuple[CodeType, ...] = ()
    # the function that leaves torch and cannot run as one call, which was tried as what is in it
    # had been refused
    outside: CodeType | None = None
    transform: bool = False  # because of a torch.vmap, or the like
    error: bool = False  # because of an error that forward raised under the trace
    number: str = ""  # the attribute with the number that forward changes: :mod:`.kept_numbers`
    apart: bool = False  # the module that asks costs little to ask when it is captured by itself


def asked_again(error: Refused) -> set[str]:
    """What the next trace should answer in another way: ``size``, and of an ``int()`` its line too,
    since in a loop one count may move and another not.
    """
    line = {f"int {error.where}"} if error.size == "int" and error.where else set[str]()
    return line | {error.size} if error.size else set()


def refusal(why: str, where: str | None, path: str) -> Refused:
    """The error that says what cannot be traced, where, and what to do."""
    tries = next((tries for words, tries in _OF_KIND if words in why), _REMEDIES)
    error = Refused(
        f"capture: {path or 'the model'} cannot be traced", where=where, why=why, tries=tries
    )
    error.path = path
    return error


def not_comparable(error: NotComparable) -> Refused:
    """The refusal for a value that cannot be compared at each call."""
    refused = refusal(f"forward reads {error}", None, "")
    refused.tries = ("a tensor in its place", "a tuple of numbers, which cannot change")
    return refused
