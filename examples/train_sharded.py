"""Train on several processes; each table lives on one, or in parts on all. The loop is the usual.

torchrun --nproc-per-node 4 examples/train_sharded.py [STEPS]
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

BATCH, STEPS = 1024, int(sys.argv[1]) if len(sys.argv) > 1 else 20

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = flights.load()
order = torch.nonzero(~data.test).squeeze(1)
order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
test = torch.nonzero(data.test).squeeze(1)


def batch(rows):
    offsets = [torch.arange(len(rows))] * len(data.vocabulary)  # one id per bag
    return data.dense[rows], offsets, list(data.ids[rows].unbind(1))


def train(model, opt, share):
    """``STEPS`` steps on this process's share of each batch; its scores of the test split."""
    for step in range(STEPS):
        rows = order[(torch.arange(BATCH) + step * BATCH) % len(order)][share]
        opt.zero_grad()
        F.binary_cross_entropy(model(*batch(rows)), data.late[rows]).backward()
        opt.step()
    with torch.no_grad():
        return model.eval()(*batch(test))


torch.manual_seed(0)
model = DLRM(list(data.vocabulary), dim=16, dense=14, hidden=128)
alone = copy.deepcopy(model)
# By the default eps a gradient of rounding noise becomes a step of lr.
opt, other = (torch.optim.Adagrad(m.parameters(), lr=0.02, eps=1e-6) for m in (model, alone))
fast, opt = recast.optimize(model, opt, example=batch(order[: BATCH // world]))
score = train(fast, opt, slice(rank * BATCH // world, (rank + 1) * BATCH // world))

if rank == 0:
    print(fast.plan)
    whole = train(alone, other, slice(None))
    many, one = (auc(s, data.late[test]) for s in (score, whole))
    print(f"AUC after {STEPS} steps: {many:.7f} on {world} processes, {one:.7f} on one")
dist.destroy_process_group()
