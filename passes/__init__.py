"""What Recast knows of recommendation models: one file a pass, and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recast.rewriter.pipeline import Pass
from recast.runtime.plan import Plan

from .align_rows import AlignRows
from .cleanup import CleanUp
from .communicate import Communicate
from .compressed import FuseCompressedInteraction
from .convolutions import MultiplyWindows
from .cross import FuseCross
from .dice import FuseDice
from .dropout import FuseReluDropout
from .dynamic import misread
from .einsums import SplitEinsums
from .embeddings import GroupEmbeddings
from .experts import FuseGatedSums
from .factorisation import FuseFmInteraction
from .field_attention import FuseFieldAttention
from .gather import GatherInDots
from .interactions import FuseDotInteraction
from .join_lookups import JoinLookups
from .layer_norm import FuseLayerNorm
from .limit import bound
from .looked_up import looked_up_inputs
from .mlp import FuseMlp
from .narrow import NarrowLookups
from .normalize import Normalize
from .overlap import OverlapLookups
from .pair_products import FusePairProducts
from .pooling import PoolSequences
from .precision import QuantiseTables
from .products import ContractProducts
from .ragged import ragged_inputs
from .recurrence import FuseRecurrence
from .sabotage import SABOTEURS
from .shard import ShardTables
from .share import ShareValues
from .siblings import JoinLinears
from .synchronise import SynchroniseBatchNorm, inner
from .synchronise_dropout import SynchroniseDropout, batchwise
from .transformers import OpenTransformers

PIPELINE: tuple[Pass, ...] = (
    CleanUp(),  # first: what a model computes and forgets must not be fused into what it uses
    OpenTransformers(),  # before all that look for what it lets out
    Normalize(),  # early: the others look for one spelling
    ShareValues(),  # once spelled alike; before the lookups, which may be repeated too
    PoolSequences(),  # before the lookups are grouped: it makes pooled ones of them
    GroupEmbeddings(),  # before all fusion: nothing else may take a lookup's inputs away
    FuseDotInteraction(),  # after the lookups, whose rows it then takes without a copy
    FuseFmInteraction(),  # likewise
    FuseCompressedInteraction(),  # likewise
    FuseCross(),  # before the chains, which would take a projection of low rank
    SplitEinsums(),  # after the cross networks, whose gates and experts are einsums too
    ContractProducts(),  # after the interactions that are more than a product and a sum
    FusePairProducts(),  # what all of them left: products in loops, unsummed or of two tensors
    FuseFieldAttention(),  # its products are no interaction, its dropout no chain's
    FuseRecurrence(),  # before the chains, which would take the products of a cell
    MultiplyWindows(),  # a layer by itself: nobody else looks for it
    FuseLayerNorm(),  # before what takes a norm as its gate
    FuseDice(),  # before the chains, which take its batch norm
    FuseMlp(),  # after the interaction, whose cat and view would otherwise end no chain
    JoinLinears(),  # after the chains, of which it takes the first layers
    FuseGatedSums(),  # after the chains, whose steps in place would stand between the experts
    FuseReluDropout(),  # after the chains: only what they left
    CleanUp(),  # drops what the others no longer use
    JoinLookups(),  # after all fusion and without dead readers: it asks who reads the rows
    NarrowLookups(),  # likewise
    AlignRows(),  # likewise, after the lookups that it makes rows of are joined
    OverlapLookups(),  # at the end: nobody looks for the lookups by their own name after it
)


def communication(
    plan: Plan,
    wire: tuple[str, str] = ("fp32", "fp32"),
    repeating: frozenset[str] = frozenset(),
) -> tuple[Pass, ...]:
    """What makes the graphs of one process those of a rank of ``plan``: after all other passes."""
    return (
        ShardTables(plan),  # before the next: a call is exchanged whole or not at all
        Communicate(plan, wire, repeating),
        SynchroniseBatchNorm(),  # after all fusion: it takes chains apart again
        SynchroniseDropout(),  # likewise, and their statistics are not its business
    )


BATCHWISE = (SynchroniseBatchNorm, SynchroniseDropout)  # of those, what parts of a model need too

_PASSES = (
    OpenTransformers,
    Normalize,
    ShareValues,
    PoolSequences,
    GroupEmbeddings,
    FuseDotInteraction,
    FuseFmInteraction,
    FuseCompressedInteraction,
    FuseCross,
    FuseLayerNorm,
    FuseDice,
    FuseRecurrence,
    MultiplyWindows,
    FuseGatedSums,
    SplitEinsums,
    ContractProducts,
    FusePairProducts,
    FuseFieldAttention,
    FuseMlp,
    JoinLinears,
    FuseReluDropout,
    CleanUp,
    JoinLookups,
    NarrowLookups,
    AlignRows,
    OverlapLookups,
    GatherInDots,  # in no pipeline: where it is faster, it has to be asked for
    QuantiseTables,
    SynchroniseBatchNorm,
    SynchroniseDropout,
)
REGISTRY: Mapping[str, Callable[..., Pass]] = {p.name: p for p in _PASSES} | dict(SABOTEURS)

__all__ = [
    "BATCHWISE",
    "PIPELINE",
    "REGISTRY",
    "AlignRows",
    "CleanUp",
    "Communicate",
    "ContractProducts",
    "FuseCompressedInteraction",
    "FuseCross",
    "FuseDice",
    "FuseDotInteraction",
    "FuseFieldAttention",
    "FuseFmInteraction",
    "FuseGatedSums",
    "FuseLayerNorm",
    "FuseMlp",
    "FusePairProducts",
    "FuseRecurrence",
    "FuseReluDropout",
    "GatherInDots",
    "GroupEmbeddings",
    "JoinLinears",
    "JoinLookups",
    "MultiplyWindows",
    "NarrowLookups",
    "Normalize",
    "OpenTransformers",
    "OverlapLookups",
    "PoolSequences",
    "QuantiseTables",
    "ShardTables",
    "ShareValues",
    "SplitEinsums",
    "SynchroniseBatchNorm",
    "SynchroniseDropout",
    "batchwise",
    "bound",
    "communication",
    "inner",
    "looked_up_inputs",
    "misread",
    "ragged_inputs",
]
