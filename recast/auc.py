"""The AUC of a model, and whether a rewrite changes it.

recast.auc.auc(scores, labels)                  # exact, ties count half
recast.auc.paired(plain, fast, batches)         # both models as they are, on the same rows
recast.auc.trained(...)                         # both models trained, with a control
"""

from recast.rewriter.diff.auc import AucReport, auc, paired, reordered, trained
from recast.rewriter.diff.reordered_units import reordered_units

__all__ = ["AucReport", "auc", "paired", "reordered", "reordered_units", "trained"]
