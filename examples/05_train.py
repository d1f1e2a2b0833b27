"""Train on real data (late flights) and keep your habits: schedules, clipping, checkpoints."""

import sys

import flights
import torch
import torch.nn.functional as F
from dlrm import DLRM

import recast
from recast.auc import auc

BATCH, STEPS = 1024, int(sys.argv[1]) if len(sys.argv) > 1 else 300

data = flights.load()
order = torch.nonzero(~data.test).squeeze(1)
order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]


def batch(rows: torch.Tensor):
    """One id per bag: bag r of every field starts at id r."""
    offsets = [torch.arange(len(rows))] * len(data.vocabulary)
    return data.dense[rows], offsets, list(data.ids[rows].unbind(1))


torch.manual_seed(0)
model = DLRM(list(data.vocabulary), dim=16, dense=14, hidden=128)
opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
fast, opt = recast.optimize(model, opt, example=batch(order[:BATCH]))

for step in range(STEPS):
    rows = order[(torch.arange(BATCH) + step * BATCH) % len(order)]
    opt.zero_grad()
    loss = F.binary_cross_entropy(fast(*batch(rows)), data.late[rows])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(fast.parameters(), 10.0)
    opt.step()
    schedule.step()
    if step % 100 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}")

test = torch.nonzero(data.test).squeeze(1)
with torch.no_grad():
    score = fast.eval()(*batch(test))
print(f"AUC on {len(test):,} flights of the test split: {auc(score, data.late[test]):.4f}")

again = DLRM(list(data.vocabulary), dim=16, dense=14, hidden=128)
again.load_state_dict(fast.state_dict())  # a checkpoint of the one loads into the other
