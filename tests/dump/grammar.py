"""A recogniser of the dump's language, written from its grammar and not from its printer."""

from __future__ import annotations

import re

TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # string
    r"|-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])|-?(?:inf|nan)\b"
    r"|-?(?:\d+\.)?\{-?\d+\.\.-?\d+(?:\.\.-?\d+)?\}"  # a running number of a family
    r"|\d+(?=\.\.)|\d+(?=×)"
    r"|\.\.\.|\.\."
    r"|[A-Za-z_][\w]*(?:\{[^{}]*\}|\w)*(?:\.(?!\.)(?:\{[^{}]*\}|[^\s,.()\[\]{}<>=:×\"])+)*"  # word
    r"|<[^<>]*(?:<[^<>]*>[^<>]*)*>"
    r"|\.[A-Za-z_]\w*(?=\()"  # method
    r"|[\[\](){}=,:×]"
)
NAME = r"[A-Za-z_]\w*(?:\{[^{}]*\}\w*)*"
OPEN = re.compile(r"graph [\w.]+\(")
INPUT = re.compile(rf"({NAME}): (.+)")
NODE = re.compile(rf"  ({NAME}) += (.+?)(?:  # (.+))?")
SPEC = re.compile(r"[a-z]\w*\[(?:[\w*]+(?:,[\w*]+)*)?\]|\?")
WORDS = r"(?:[^\s{}]+|\{[^{}]*\})+"
NOTE = re.compile(rf"(?:[a-z0-9-]+ ←)?(?: ?{WORDS})*(?: ?@\S+)?(?: ?\S+\.\w+:[\d{{}}.]+)?")


class GrammarError(AssertionError):
    """A line that the grammar does not allow."""


def check(text: str) -> None:
    """Raise GrammarError unless every line of ``text`` fits the grammar."""
    lines = text.splitlines()
    rest = _header(lines)
    if not rest or not rest[-1].startswith("  return "):
        raise GrammarError(f"no return at the end: {rest[-1:]}")
    value(rest[-1].removeprefix("  return "))
    for line in rest[:-1]:
        found = NODE.fullmatch(line)
        if not found:
            raise GrammarError(f"not a node: {line!r}")
        left, separator, kind = found[2].rpartition(" : ")
        value(left if separator else kind)
        if separator:
            type_(kind)
        if found[3] and not NOTE.fullmatch(found[3]):
            raise GrammarError(f"not a note: {found[3]!r}")


def _header(lines: list[str]) -> list[str]:
    opened = OPEN.match(lines[0])
    if not opened:
        raise GrammarError(f"not a header: {lines[0]!r}")
    if lines[0].endswith(")"):
        inputs = [x for x in re.split(r", (?=[A-Za-z_][^ ]*: )", lines[0][opened.end() : -1]) if x]
        rest = lines[1:]
    else:
        end = lines.index(")")
        inputs = [line.removeprefix("    ").removesuffix(",") for line in lines[1:end]]
        rest = lines[end + 1 :]
    for one in inputs:
        found = INPUT.fullmatch(one)
        if not found:
            raise GrammarError(f"not an input: {one!r}")
        type_(found[2])
    return rest


def type_(text: str) -> None:
    """Raise GrammarError unless ``text`` is one type."""
    if _type(text):
        raise GrammarError(f"left over in the type {text!r}")


def _type(text: str) -> str:
    """Consume one type; return the rest."""
    text = re.sub(r"^\d+×", "", text)
    if not text.startswith("("):
        found = SPEC.match(text)
        if not found:
            raise GrammarError(f"not a type: {text!r}")
        return text[found.end() :]
    text = text[1:]
    while not text.startswith(")"):
        text = _type(text)
        if text.startswith(", "):
            text = text[2:]
        elif not text.startswith(")"):
            raise GrammarError(f"no end of a tuple type: {text!r}")
    return text[1:]


def value(text: str) -> None:
    """Raise GrammarError unless ``text`` is one value."""
    tokens = _tokens(text)
    rest = _value(tokens, text)
    if rest:
        raise GrammarError(f"left over {rest!r} in {text!r}")


def _tokens(text: str) -> list[str]:
    out, at = [], 0
    while at < len(text):
        if text[at] == " ":
            at += 1
            continue
        found = TOKEN.match(text, at)
        if not found:
            raise GrammarError(f"no token at {text[at : at + 20]!r} in {text!r}")
        out.append(found[0])
        at = found.end()
    return out


def _value(tokens: list[str], text: str) -> list[str]:
    """Consume one value and what is called or indexed with it; return the rest."""
    if not tokens:
        raise GrammarError(f"a value is missing in {text!r}")
    head, rest = tokens[0], tokens[1:]
    if head in "[(" and len(head) == 1:
        return _items(rest, "]" if head == "[" else ")", text)
    if head == "{":
        return _pairs(rest, text)
    if head in "]}):,=×" and len(head) == 1:
        raise GrammarError(f"unexpected {head!r} in {text!r}")
    while rest and rest[0] in ("(", "["):
        rest = _items(rest[1:], ")" if rest[0] == "(" else "]", text)
    return rest


def _items(tokens: list[str], close: str, text: str) -> list[str]:
    while tokens and tokens[0] != close:
        tokens = _item(tokens, text)
        if tokens and tokens[0] == ",":
            tokens = tokens[1:]
        elif not tokens or tokens[0] != close:
            raise GrammarError(f"expected , or {close} before {tokens[:3]} in {text!r}")
    if not tokens:
        raise GrammarError(f"no {close} in {text!r}")
    return tokens[1:]


def _item(tokens: list[str], text: str) -> list[str]:
    if tokens[1:2] == ["="]:
        tokens = tokens[2:]
    if tokens[1:2] == ["×"]:
        tokens = tokens[2:]
    if tokens[1:2] == [".."]:
        return tokens[3:]
    if tokens[0] != ":":
        tokens = _value(tokens, text)
    for _ in range(2):
        if tokens[:1] == [":"]:
            tokens = tokens[1:]
            if tokens and tokens[0] not in (":", ",", "]", ")"):
                tokens = _value(tokens, text)
    return tokens


def _pairs(tokens: list[str], text: str) -> list[str]:
    while tokens and tokens[0] != "}":
        tokens = _value(tokens, text)
        if tokens[:1] != [":"]:
            raise GrammarError(f"expected : in {text!r}")
        tokens = _value(tokens[1:], text)
        tokens = tokens[1:] if tokens[:1] == [","] else tokens
    return tokens[1:]
