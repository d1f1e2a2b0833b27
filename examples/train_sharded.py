"""Train on several processes: each table lives on one of them, or in parts on all. The training
loop is the usual one.

torchrun --nproc-per-node 4 examples/train_sharded.py [STEPS | epoch]
"""

import copy
import sys
from functools import partial

import flights
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dlrm import DLRM

import recast
from recast.auc import auc, reordered_units

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data, BATCH = flights.load(), 1024
order = torch.nonzero(~data.test).squeeze(1)
order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
test = torch.nonzero(data.test).squeeze(1)
# With the default eps, a gradient of pure rounding noise becomes a step of lr.
adagrad = partial(torch.optim.Adagrad, lr=0.02, eps=1e-6)
said = sys.argv[1] if len(sys.argv) > 1 else "20"
STEPS = -(-len(order) // BATCH) if said == "epoch" else int(said)


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
plain = copy.deepcopy(model)
opt = adagrad(model.parameters())
fast, opt = recast.optimize(model, opt, example=batch(order[: BATCH // world]))
many = train(fast, opt, slice(rank * BATCH // world, (rank + 1) * BATCH // world))
alone, found = [], [None] * world
for seed in (rank, rank + world):  # one process; past seed 0 with all its sums in another order
    random = torch.Generator().manual_seed(seed)
    own = reordered_units(plain, random) if seed else copy.deepcopy(plain)
    rows = torch.randperm(BATCH, generator=random) if seed else slice(None)
    alone.append(train(own, adagrad(own.parameters()), rows))
dist.all_gather_object(found, alone)
if rank == 0:
    one, spread = found[0][0], max(map(max, found)) - min(map(min, found))
    print(fast.plan)
    print(f"AUC after {STEPS} steps: {many:.7f} on {world} processes, {one:.7f} on one")
    print(f"{abs(many - one):.1e} apart; {2 * world} orders of one's sums range over {spread:.1e}")
    print("within that" if abs(many - one) <= max(spread, 1e-6) else "OUTSIDE of that")
dist.destroy_process_group()
