"""What code names, in Pythons that join its instructions and in those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from recast.rewriter.compiled.code_names import any_field, attributes_in, catches
from recast.rewriter.compiled.code_names import only_sets_entries as only_sets
from recast.rewriter.compiled.instructions import steps


def joined(self: Any, a: Any, b: Any) -> Any:
    return print(a, b.scale, self, self.rate)


def found_by_name(self: Any, name: str) -> Any:
    return getattr(self, name), vars(self)[name], self.__dict__


def found_in_others(self: Any, other: Any) -> Any:
    return other.__dict__


def sets(self: Any, key: Any, loss: Any) -> None:
    first, second = key, loss
    self.losses[first] = second
    self.losses[max(key, "b")] = loss + second


def reads(self: Any, key: Any, loss: Any) -> Any:
    self.losses[key] = loss
    return loss, self.losses


def cleans_up(f: Any) -> None:
    try:
        with open(f):
            f()
    finally:
        f(1)


def swallows(f: Any) -> None:
    try:
        f()
    except:  # noqa: E722
        f(1)


def test_attributes_of_local_variables() -> None:
    assert {("b", "scale"), ("self", "rate")} <= attributes_in(joined.__code__)


def test_fields_of_self_are_seen_elsewhere() -> None:
    assert not any_field(found_by_name.__code__)
    assert any_field(found_in_others.__code__)


def test_entries_that_are_set() -> None:
    assert only_sets(sets.__code__, "losses")
    assert not only_sets(reads.__code__, "losses")


@pytest.mark.parametrize("code", [joined, sets, reads, found_by_name])
def test_no_instruction_has_two_variables(code: Any) -> None:
    for step in steps(code.__code__):
        assert not ("FAST" in step.opname and isinstance(step.argval, tuple))
        assert step.opname in ("LOAD_FAST", "STORE_FAST") or "FAST" not in step.opname


def test_finally_catches_nothing() -> None:
    assert not catches(cleans_up.__code__)
    assert catches(swallows.__code__)
