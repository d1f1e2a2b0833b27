"""Dynamic tables: embeddings for any int64 id, whose rows are made as ids arrive.

fast, opt = recast.optimize(model, opt, example=batch,
                            tables={"user_emb": recast.Dynamic(max_rows=10**7, evict="lru")})
recast.dynamic.tables(fast)["user_emb"]      # the table: counters, epoch, erase
recast.dynamic.export(fast.user_emb)         # sorted ids, and a plain matrix of their rows

Larger than memory: recast.Dynamic(tiers=[recast.Host("2GiB"), recast.Disk(path, "20GiB")]), and
``table.prefetch(ids)`` with the ids of the next batch.

On W ranks, each owns the ids that a hash assigns to it and has a W-th of the budget: eviction is
local to its part, everything else is as on one process. ``export(..., ranks="all")`` joins the
parts. With tiers, each rank has its own files, in <path>/rank-<number>.

Dynamic tables of a model on a GPU live there too; ``recast.TrainingStep`` can record steps with
them.
"""

from recast.runtime.dynamic.convert import tables_of as tables
from recast.runtime.dynamic.export import Changes, Rows, changed, export, import_, mark
from recast.runtime.dynamic.settings import Dynamic, Initial, MinCount
from recast.runtime.dynamic.table import DynamicTable

__all__ = [
    "Changes",
    "Dynamic",
    "DynamicTable",
    "Initial",
    "MinCount",
    "Rows",
    "changed",
    "export",
    "import_",
    "mark",
    "tables",
]
