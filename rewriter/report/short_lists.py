"""Shorter lists of words: braces as in the shell, counts for repeats, ranges for integers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise


def fold(items: list[str]) -> list[str]:
    """Braces for words, counts for repeats, ranges for integers."""
    return _ranges(runs(braces(items)))


def runs(items: Sequence[str]) -> list[str]:
    """``x, x, x`` => ``3×x``."""
    out: list[str] = []
    k = 0
    while k < len(items):
        end = k
        while end < len(items) and items[end] == items[k]:
            end += 1
        out += [f"{end - k}×{items[k]}"] if end - k >= 3 else [items[k]] * (end - k)
        k = end
    return out


def _ranges(items: list[str]) -> list[str]:
    """``0, 1, 2, 3`` => ``0..3``."""
    out: list[str] = []
    k = 0
    while k < len(items):
        end = k + 1
        while (
            end < len(items)
            and items[k].isdecimal()
            and items[end].isdecimal()
            and int(items[end]) == int(items[k]) + end - k
        ):
            end += 1
        out += [f"{items[k]}..{items[end - 1]}"] if end - k >= 4 else items[k:end]
        k = end
    return out


_WORD = re.compile(r"[A-Za-z_][^\s,()\[\]{}<>=:×\"]*(\[\d+\])?")
_LEAF = re.compile(r"(.+)\.([A-Za-z_]\w*)")


def braces(words: Iterable[str]) -> list[str]:
    """Shorten runs of words with braces as in the shell, keeping order and number."""
    return _numbered(_owned(_numbered(list(words))))


def _owned(words: list[str]) -> list[str]:
    """``bot.0.weight, bot.0.bias`` => ``bot.0.{weight,bias}``."""
    out: list[str] = []
    k = 0
    while k < len(words):
        head = _split_leaf(words[k])
        end = k + 1
        while head and end < len(words):
            other = _split_leaf(words[end])
            if not other or other[0] != head[0]:
                break
            end += 1
        if head and end - k >= 2:
            leaves = [_split_leaf(w)[1] for w in words[k:end]]  # type: ignore[index]
            out.append(f"{head[0]}.{{{','.join(leaves)}}}")
        else:
            out += words[k:end]
        k = end
    return out


def _split_leaf(word: str) -> tuple[str, str] | None:
    found = _LEAF.fullmatch(word) if _WORD.fullmatch(word) else None
    return (found[1], found[2]) if found else None


def _numbered(words: list[str]) -> list[str]:
    """``ids_0, ids_1, ids_2`` => ``ids_{0..2}``: three or more that differ in one number."""
    out: list[str] = []
    k = 0
    while k < len(words):
        end, spot = _run_of_numbers(words, k)
        if end - k < 3:
            out.append(words[k])
            k += 1
            continue
        pieces = _pieces(words[k])
        span = _span([int(_pieces(w)[spot]) for w in words[k:end]])
        if pieces[spot - 1].endswith("["):
            span = span.strip("{}")
        out.append("".join([*pieces[:spot], span, *pieces[spot + 1 :]]))
        k = end
    return out


def _run_of_numbers(words: list[str], start: int) -> tuple[int, int]:
    """The end of the run that begins at ``start``, and which piece of its words varies."""
    spot = -1
    end = start + 1
    while end < len(words):
        spots = _differences(words[end - 1], words[end])
        if spots is None or len(spots) != 1 or (spot >= 0 and spots[0] != spot):
            break
        spot = spots[0]
        end += 1
    return end, spot


def _span(numbers: Sequence[int]) -> str:
    step = numbers[1] - numbers[0]
    if any(b - a != step for a, b in pairwise(numbers)) or step == 0:
        return f"{{{','.join(map(str, numbers))}}}"
    return f"{{{numbers[0]}..{numbers[-1]}" + ("}" if step == 1 else f"..{step}}}")


def _pieces(word: str) -> list[str]:
    """Text and numbers in turn; the numbers at odd places."""
    return re.split(r"(?<![\d{])(\d+)(?![\d}])", word)


def _differences(first: str, second: str) -> list[int] | None:
    """The odd places at which two words hold different numbers; None when their text differs."""
    if not (_plain(first) and _plain(second)):
        return None
    a, b = _pieces(first), _pieces(second)
    if len(a) != len(b) or a[0::2] != b[0::2]:
        return None
    return [k for k in range(1, len(a), 2) if a[k] != b[k]]


def _plain(word: str) -> bool:
    return word[:1].isalpha() or word[:1] == "_"
