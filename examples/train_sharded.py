"""Train on several processes; each table lives on one, or in parts on all. The loop is the usual.

torchrun --nproc-per-node 4 examples/train_sharded.py [STEPS | epoch]
"""

import copy
import sys

import flights
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dlrm import DLRM

import recast
from recast.rewriter.auc import auc

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data, BATCH = flights.load(), 1024
order = torch.nonzero(~data.test).squeeze(1)
order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
test = torch.nonzero(data.test).squeeze(1)
STEPS = {"epoch": -(-len(order) // BATCH)}.get(said := (*sys.argv, "20")[1]) or int(said)


def batch(rows):
    offsets = [torch.arange(len(rows))] * len(data.vocabulary)  # one id per bag
    return data.dense[rows], offsets, list(data.ids[rows].unbind(1))


def train(model, opt, share):
    """``STEPS`` steps on the ``share`` of each batch; the AUC on the test split."""
    for step in range(STEPS):
        rows = order[(torch.arange(BATCH) + step * BATCH) % len(order)][share]
        opt.zero_grad()
        F.binary_cross_entropy(model(*batch(rows)), data.late[rows]).backward()
        opt.step()
    with torch.no_grad():
        return auc(model.eval()(*batch(test)), data.late[test])


torch.manual_seed(0)
model = DLRM(list(data.vocabulary), dim=16, dense=14, hidden=128)
alone = copy.deepcopy(model)
# By the default eps a gradient of rounding noise becomes a step of lr.
opt, other = (torch.optim.Adagrad(m.parameters(), lr=0.02, eps=1e-6) for m in (model, alone))
fast, opt = recast.optimize(model, opt, example=batch(order[: BATCH // world]))
many = train(fast, opt, slice(rank * BATCH // world, (rank + 1) * BATCH // world))
# The plain model; ranks past the first take its rows in another order: what rounding is worth.
rows = torch.randperm(BATCH, generator=torch.Generator().manual_seed(rank))
found = [None] * world
dist.all_gather_object(found, train(alone, other, rows if rank else slice(None)))
one, spread = found[0], max(found) - min(found)
if rank == 0:
    print(fast.plan)
    print(f"AUC after {STEPS} steps: {many:.7f} on {world} processes, {one:.7f} on one")
    print(f"{abs(many - one):.1e} apart; the order of the rows alone spreads {spread:.1e}")
dist.destroy_process_group()
