"""All models of the zoo: those of public libraries, as far as they are installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Sequence

from zoo_data import Subject

LIBRARIES = (
    "torchfm", "torchctr", "deepctr", "rechub", "widedeep", "recbole", "fuxictr", "recpangu",
)  # fmt: skip
EXPECTED = 215  # models, with all eight libraries


def collect(libraries: Sequence[str] = LIBRARIES) -> tuple[list[Subject], dict[str, str]]:
    """The models of ``libraries``, and why some libraries cannot be imported."""
    found: list[Subject] = []
    missing: dict[str, str] = {}
    for library in libraries:
        # They print, and they use what numpy and torch have deprecated.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                found += importlib.import_module(f"zoo_{library}").subjects()
            except ImportError as error:
                missing[library] = str(error).splitlines()[0]
    return found, missing
