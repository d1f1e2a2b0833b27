"""Plans made without a model: from machines and tables, where each table would live.

machines = recast.planner.named("dgx-a100x16")           # or a Topology of your own, or a JSON file
loads = [TableLoad(Table("user", rows=10**8, dim=64), ids=3.0)]
made = recast.planner.plan(loads, machines, batch=4096)   # raises recast.PlanError where none fits
made.save("plan.json")

``recast plan --tables`` does the same on the command line. ``optimize`` makes a plan by itself for
its model: ``topology="dgx-a100"`` names the machines, and ``plan=`` passes a ready plan.
``explicit`` makes a plan without a cost model.
"""

from recast.runtime.plan import Placement, Shard, Table, explicit
from recast.runtime.planner import Dense, TableLoad, plan
from recast.runtime.topology import Topology, named

__all__ = [
    "Dense",
    "Placement",
    "Shard",
    "Table",
    "TableLoad",
    "Topology",
    "explicit",
    "named",
    "plan",
]
