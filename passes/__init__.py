"""What Recast knows about recommendation models: one file per pass, and the order of the passes."""

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
from .cross_entropy import FuseCrossEntropy
from .dice import FuseDice
from .dropout import FuseReluDropout
from .dynamic import misread
from .einsums import SplitEinsums
from .embeddings import GroupEmbeddings
from .experts import FuseGatedSums
from .factorisation import FuseFmInteraction
from .field_attention import FuseFieldAttention
from .gated_activations import FuseGatedActivations
from .gather import GatherInDots
from .indexed_tables import LookUpRows
from .interactions import FuseDotInteraction
from .join_cats import JoinCats
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
from .rms_norm import FuseRmsNorm
from .sabotage import SABOTEURS
from .shard import ShardTables
from .share import ShareValues
from .siblings import JoinLinears
from .silu_attention import FuseSiluAttention
from .sparse_products import MultiplySparse
from .split_columns import SplitColumns
from .synchronise import SynchroniseBatchNorm, inner
from .synchronise_draws import SynchroniseDraws
from .synchronise_dropout import SynchroniseDropout, batchwise
from .synchronise_means import SynchroniseMeans
from .synchronise_pairs import SynchronisePairs
from .transformers import OpenTransformers

PIPELINE: tuple[Pass, ...] = (
    CleanUp(),  # first: dead values must not be fused with live ones
    OpenTransformers(),  # before all passes that look for what it exposes
    Normalize(),  # early: the other passes look for one spelling only
    LookUpRows(),  # before all that look for lookups
    ShareValues(),  # once spelled alike; before lookups are grouped: they may be repeated too
    JoinCats(),  # once spelled alike; before all that ask what is concatenated
    PoolSequences(),  # before lookups are grouped: it turns some into pooled ones
    GroupEmbeddings(),  # before all fusion, which could take a lookup's inputs away
    FuseDotInteraction(),  # after the lookups, so that it takes their rows without a copy
    FuseFmInteraction(),  # likewise
    FuseCompressedInteraction(),  # likewise
    FuseCross(),  # before the chains, which would take a low-rank projection
    SplitEinsums(),  # after the cross networks, whose gates and experts are einsums too
    ContractProducts(),  # after the interactions, which are more than a product and a sum
    FusePairProducts(),  # what these leave: products in loops, unsummed or of two tensors
    FuseFieldAttention(),  # its products are no interaction, its dropout is in no chain
    FuseSiluAttention(),  # likewise, and before the chains, which would take its silu
    FuseRecurrence(),  # before the chains, which would take a cell's products
    MultiplyWindows(),  # anywhere here: no other pass takes a Conv2d
    MultiplySparse(),  # anywhere: no other pass takes a sparse matrix
    FuseLayerNorm(),  # before Dice, which takes a norm as its gate
    FuseRmsNorm(),  # anywhere here: no other pass takes one
    FuseDice(),  # before the chains, which would take its batch norm
    FuseGatedActivations(),  # before the chains, which would take its activation
    FuseCrossEntropy(),  # before the chains, which would take its layer
    FuseMlp(),  # after the interactions, whose cat and view would end a chain
    JoinLinears(),  # after the chains, whose first layers it takes
    FuseGatedSums(),  # after the chains, whose in-place steps would lie between the experts
    FuseReluDropout(),  # after the chains: only what they leave
    CleanUp(),  # drops what the passes before it left unused
    SplitColumns(),  # after all passes that read single columns, and shared ones
    JoinLookups(),  # after all fusion and without dead readers: it asks who reads rows
    NarrowLookups(),  # likewise
    AlignRows(),  # likewise; after lookups are joined, as it aligns their rows too
    OverlapLookups(),  # last: after it, lookups no longer have their own name
)


def communication(
    plan: Plan,
    wire: tuple[str, str] = ("fp32", "fp32"),
    repeating: frozenset[str] = frozenset(),
) -> tuple[Pass, ...]:
    """The passes that turn the graphs of one process into those of a rank of ``plan``; run last."""
    return (
        ShardTables(plan),  # first: the next one exchanges a call whole or not at all
        Communicate(plan, wire, repeating),
        SynchronisePairs(),  # after all fusion: it reads fused losses
        SynchroniseMeans(),  # of what is left: in pairs they are those of all ranks
        SynchroniseBatchNorm(),  # after all fusion: it takes fused chains apart again
        SynchroniseDraws(),
        SynchroniseDropout(),  # after all fusion, and the draws: it refuses those that are left
    )


# what captured parts need too
BATCHWISE = (
    SynchronisePairs, SynchroniseMeans, SynchroniseBatchNorm, SynchroniseDraws, SynchroniseDropout,
)  # fmt: skip

_ASKED_FOR = (
    GatherInDots,  # it is not always faster
    QuantiseTables,
    SynchronisePairs,
    SynchroniseMeans,
    SynchroniseBatchNorm,
    SynchroniseDraws,
    SynchroniseDropout,
)
REGISTRY: Mapping[str, Callable[..., Pass]] = {
    **{p.name: type(p) for p in PIPELINE},
    **{p.name: p for p in _ASKED_FOR},
    **SABOTEURS,
}

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
    "FuseCrossEntropy",
    "FuseDice",
    "FuseDotInteraction",
    "FuseFieldAttention",
    "FuseFmInteraction",
    "FuseGatedActivations",
    "FuseGatedSums",
    "FuseLayerNorm",
    "FuseMlp",
    "FusePairProducts",
    "FuseRecurrence",
    "FuseReluDropout",
    "FuseRmsNorm",
    "FuseSiluAttention",
    "GatherInDots",
    "GroupEmbeddings",
    "JoinCats",
    "JoinLinears",
    "JoinLookups",
    "LookUpRows",
    "MultiplySparse",
    "MultiplyWindows",
    "NarrowLookups",
    "Normalize",
    "OpenTransformers",
    "OverlapLookups",
    "PoolSequences",
    "QuantiseTables",
    "ShardTables",
    "ShareValues",
    "SplitColumns",
    "SplitEinsums",
    "SynchroniseBatchNorm",
    "SynchroniseDraws",
    "SynchroniseDropout",
    "SynchroniseMeans",
    "SynchronisePairs",
    "batchwise",
    "bound",
    "communication",
    "inner",
    "looked_up_inputs",
    "misread",
    "ragged_inputs",
]
