"""The groups of the benchmark, in the order in which they run."""

from __future__ import annotations

from functools import partial

from gpu.bench import judged_models, results_page, step_parts, whole_steps
from gpu.bench.roofline import Rates
from gpu.harness.items import Group

RATES, MORE = "rates", "more of "  # names, or begins of names, of groups


def groups(known: Rates) -> dict[str, Group]:
    """All groups: judged ones first (bars in milliseconds before ratios), long ones last."""
    subjects: dict[str, whole_steps.Subjects] = {
        name: partial(judged_models.synthetic, config, bar, known)
        for name, (config, bar) in results_page.MODELS.items()
    }
    subjects["dlrm"] = partial(judged_models.dlrm, results_page.DLRM, known)
    return {
        "tiny": partial(whole_steps.judged, subjects["tiny"]),
        "dlrm": partial(whole_steps.judged, subjects["dlrm"]),
        "dropout": partial(step_parts.dropout, known),
        "small": partial(whole_steps.judged, subjects["small"]),
        "ops": partial(step_parts.ops, known),
        "updates": partial(step_parts.updates, known),
        **{f"{MORE}{name}": partial(whole_steps.more, subjects[name]) for name in sorted(subjects)},
    }


NAMES = tuple(groups(Rates(1.0, {})))
