"""Whose fault an error is: that of SPEC, if the plain model raises by itself, in a mode or in a
backward pass that capturing it does not need; else ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from recast.errors import RecastError
from recast.rewriter.diff.equivalence import batches_of

from . import bench, spec


@contextmanager
def blaming(subject: spec.Subject, *, trains: bool = True) -> Iterator[None]:
    """Turn an error inside it into a UsageError with the user's line, if the plain model of
    ``subject`` raises too: in eval mode or, if it ``trains``, in a step of training.
    """
    try:
        yield
    except RecastError:
        raise
    except Exception as error:
        own = _own_error(subject, trains)
        if own is None:
            raise
        mode, raised = own
        raise spec.raised(f"spec: the model of {subject.text} raises in {mode}", raised) from error


def _own_error(subject: spec.Subject, trains: bool) -> tuple[str, Exception] | None:
    """How the plain model is called, and what it then raises; None if it does not."""
    examples = subject.example, *subject.forms
    for batch in (b for one in examples for b in batches_of(one, subject.model)):
        model = copy.deepcopy(subject.model)
        steps = [("eval mode", bench.inference_step(model, batch))]
        if trains:
            steps.append(("a step of training", bench.training_step(model, batch, None, None)))
        for mode, step in steps:
            model.train(mode != "eval mode")
            try:
                step()
            except RecastError:
                return None
            except Exception as error:
                return mode, error
    return None
