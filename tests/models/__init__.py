"""Small plain PyTorch recommendation models, written as their users write them.

Every test that needs a model takes it from here. ``CASES[name]`` says how to make a model, how to
make a batch of any size for it, and a loss. ``build(name)`` gives ``(model, [batch, batch], loss)``
with two batches of different size. Nothing here imports this project.

All are tiny (tables of some ten rows, dimension 4) so that a thousand of them run in a minute.
"""

from models import habits, published  # they register their cases
from models.batches import DIM, VOCAB, dense_and_bags, field_ids
from models.case import CASES, ROWS, Case, build, click_loss
from models.published import DLRM, MLP

__all__ = [
    "CASES",
    "DIM",
    "DLRM",
    "MLP",
    "ROWS",
    "VOCAB",
    "Case",
    "build",
    "click_loss",
    "dense_and_bags",
    "field_ids",
    "habits",
    "published",
]
