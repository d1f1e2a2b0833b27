"""What Recast knows of recommendation models: one file a pass, and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recast.rewriter.pipeline import Pass

from .cleanup import CleanUp
from .compressed import FuseCompressedInteraction
from .dropout import FuseReluDropout
from .embeddings import GroupEmbeddings
from .factorisation import FuseFmInteraction
from .interactions import FuseDotInteraction
from .mlp import FuseMlp
from .narrow import NarrowLookups
from .normalize import Normalize
from .overlap import OverlapLookups
from .precision import QuantiseTables
from .products import ContractProducts
from .ragged import ragged_inputs
from .sabotage import SABOTEURS
from .share import ShareValues

PIPELINE: tuple[Pass, ...] = (
    CleanUp(),  # first: what a model computes and forgets must not be fused into what it uses
    Normalize(),  # early: the others look for one spelling
    ShareValues(),  # once spelled alike; before the lookups, which may be repeated too
    GroupEmbeddings(),  # before all fusion: nothing else may take a lookup's inputs away
    FuseDotInteraction(),  # after the lookups, whose rows it then takes without a copy
    FuseFmInteraction(),  # likewise
    FuseCompressedInteraction(),  # likewise
    ContractProducts(),  # after the interactions that are more than a product and a sum
    FuseMlp(),  # after the interaction, whose cat and view would otherwise end no chain
    FuseReluDropout(),  # after the chains: only what they left
    CleanUp(),  # drops what the others no longer use
    NarrowLookups(),  # after all fusion and without dead readers: it asks who reads the rows
    OverlapLookups(),  # at the end: nobody looks for the lookups by their own name after it
)

_PASSES = (
    Normalize,
    ShareValues,
    GroupEmbeddings,
    FuseDotInteraction,
    FuseFmInteraction,
    FuseCompressedInteraction,
    ContractProducts,
    FuseMlp,
    FuseReluDropout,
    CleanUp,
    NarrowLookups,
    OverlapLookups,
    QuantiseTables,
)
REGISTRY: Mapping[str, Callable[..., Pass]] = {p.name: p for p in _PASSES} | dict(SABOTEURS)

__all__ = [
    "PIPELINE",
    "REGISTRY",
    "CleanUp",
    "ContractProducts",
    "FuseCompressedInteraction",
    "FuseDotInteraction",
    "FuseFmInteraction",
    "FuseMlp",
    "FuseReluDropout",
    "GroupEmbeddings",
    "NarrowLookups",
    "Normalize",
    "OverlapLookups",
    "QuantiseTables",
    "ShareValues",
    "ragged_inputs",
]
