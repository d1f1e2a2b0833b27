"""Errors and warnings: the one module that every layer may import.

An error prints up to four lines, always in this order: what happened, where (the user's file:line),
why, and what to try. Each class also derives from the builtin exception that plain torch would
raise in its place, so that existing ``except`` clauses keep working.
"""

from __future__ import annotations

from collections.abc import Iterable


class RecastError(Exception):
    """Base of all errors of this package: ``what``, ``where``, ``why``, ``tries``."""

    def __init__(
        self, what: str, *, where: str | None = None, why: str = "", tries: Iterable[str] = ()
    ) -> None:
        self.what = what
        self.where = where
        self.why = why
        self.tries = tuple(tries)
        super().__init__(what, where, why, self.tries)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at   {self.where}")
        if self.why:
            why = self.why.rstrip().replace("\n", "\n       ")
            lines.append(f"  why  {why}")
        if self.tries:
            lines.append(f"  try  {'   |   '.join(self.tries)}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.why, self.tries))


def _rebuild(
    kind: type[RecastError], what: str, where: str | None, why: str, tries: tuple[str, ...]
) -> RecastError:
    return kind(what, where=where, why=why, tries=tries)


class UsageError(RecastError, ValueError):
    """The call itself is wrong: an unknown pass, an optimizer over another model's parameters."""


class PlanError(UsageError):
    """No plan fits the machines; the message says, in figures, what would help."""


class NotBuiltError(RecastError, NotImplementedError):
    """A documented combination of arguments that is not implemented yet."""


class CaptureError(RecastError, RuntimeError):
    """A model, or a part of one, cannot be turned into a graph."""


class VerifyError(RecastError, AssertionError):
    """A pass left a graph that breaks an invariant."""

    culprit: str | None = None  # the name of the pass


class InputError(RecastError, ValueError):
    """The batch is one that the plain model would not accept either."""


class IdError(InputError, IndexError, RuntimeError):
    """An id outside its table, or offsets outside their ids: in torch, an IndexError of
    ``nn.Embedding`` and a RuntimeError of ``nn.EmbeddingBag``.
    """


class DtypeError(InputError, TypeError, RuntimeError):
    """A tensor of the wrong dtype, which torch calls a RuntimeError."""


class KernelError(RecastError, RuntimeError):
    """A device kernel cannot be compiled, loaded or launched."""


class CheckpointError(RecastError, RuntimeError):
    """A state_dict or a saved model does not fit."""


class TierError(RecastError, RuntimeError):
    """The disk tier of a dynamic table cannot be read or written: full, read-only, damaged."""


class RankError(RecastError, RuntimeError):
    """Another rank died, hangs or left, so a collective with it cannot be finished."""


class DiffError(RecastError, AssertionError):
    """Two models that should agree do not agree."""


class RecastWarning(UserWarning):
    """Something works but costs more, or differs from what was asked for."""
