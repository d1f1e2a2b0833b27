"""What is said where the plain forward runs in a graph's place, or would: why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from recast.errors import UsageError

from .copies import modules_by_path

FORM = "give recast.optimize a batch of this form, too: forms=[batch]"
_CHANGED = "call recast.optimize again after such a change"


@dataclass(frozen=True)
class Why:
    """Why a call runs plain. ``remedy``: what to do about it; None: the model has changed."""

    what: str
    remedy: str | None = None

    @property
    def cause(self) -> str:
        """``what`` without the present value, which may be another one at each call."""
        return self.what.partition(" and is now ")[0]


def warning(name: str, why: Why, root: nn.Module, lazy: bool) -> str:
    """``lazy``: the optimizer leaves rows that have no gradient as they are."""
    remedy = why.remedy or f"{_CHANGED}{_if_varying(why.what, root)}"
    same = "The numbers are the same, the speed is not"
    if lazy:
        same = "Its tables get dense gradients, by which lazy steps move every row"
    return f"{name} runs its plain forward: {why.what}. {same}; {remedy}"


def refusal(name: str, why: Why, root: nn.Module) -> UsageError:
    """On ranks, where the plain forward cannot take over."""
    return UsageError(
        f"{name} cannot run: {why.what}",
        why="the plain forward would run instead, and it reads whole tables",
        tries=(
            "arguments of the example's form in every call, with and without gradients;"
            " optimize(..., forms=[batch]) takes calls of another form",
            "example=[a, b], two batches that differ as batches do",
            f"if the model has changed, recast.optimize after that{_if_varying(why.what, root)}",
        ),
    )


def _if_varying(what: str, root: nn.Module) -> str:
    """What to do about a number that is changed again and again, as a temperature is."""
    path, _, values = what.partition(" was ")
    if not values.rpartition(" and is now ")[2].lstrip("-")[:1].isdigit():
        return ""
    owner, _, name = path.rpartition(".")
    if name in vars(modules_by_path(root).get(owner, root)):
        return f", or give it varying=[{path!r}] first: the number is then read at each call"
    return ", or keep the number in a buffer, which is read at each call"
