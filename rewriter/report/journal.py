"""What happened during a rewrite: the record from which the report is written."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule rewrote something."""

    rule: str
    node: str  # name of the node it made
    origin: tuple[str, ...]
    where: str | None
    what: str  # a sentence: "26 lookups in one call"
    saves: str | None = None  # what it is worth: "25 launches, 13 MB a step"


@dataclass(frozen=True, slots=True)
class Missed:
    """A rule nearly matched."""

    rule: str
    node: str
    why: str
    where: str | None
    tries: tuple[str, ...] = ()  # what the user could change


@dataclass(frozen=True, slots=True)
class Raised:
    """A rule raised; it was skipped and the graph left unchanged."""

    rule: str
    node: str
    error: str
    where: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A table was stored in another precision than the model's."""

    table: str  # its name in the model
    precision: str
    bytes: int
    bytes_before: int
    most: float  # the largest difference of a stored number from the model's
    mean: float  # their mean


@dataclass(slots=True)
class Step:
    """One pass of the pipeline."""

    name: str
    fired: int = 0
    seconds: float = 0.0
    changed: bool = False
    text: str = ""  # the dump after it, when asked for


@dataclass(slots=True)
class Journal:
    """Everything that happened, in order."""

    fired: list[Fired] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences for the user, in order
    lookups_found: int = 0
    lookups_fused: int = 0

    def miss(self, entry: Missed) -> None:
        """Add a near miss once, however often the rule is tried."""
        if entry not in self.missed:
            self.missed.append(entry)
