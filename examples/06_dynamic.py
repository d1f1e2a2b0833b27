"""Raw ids, day by day: no vocabulary, tables that take new ids and forget old ones."""

import sys

import flights
import torch
import torch.nn.functional as F
from torch import nn

import recast
from recast.auc import auc

FIELDS = ("tailnum", "flight", "dest", "origin", "hour")
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200

frame = flights.table().iloc[: STEPS * 512]
ids = torch.stack([flights.hashed(frame[name]) for name in FIELDS], 1)  # 64 bits of the text
late = torch.tensor((frame.arr_delay > flights.LATE).to_numpy(), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleDict({name: nn.Embedding(100, 16) for name in FIELDS})
        self.top = nn.Sequential(nn.Linear(16 * len(FIELDS), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        rows = [emb(ids[:, k]) for k, emb in enumerate(self.emb.values())]
        return self.top(torch.cat(rows, 1)).squeeze(1)


torch.manual_seed(0)
model = Model()
opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
start = recast.dynamic.Initial("normal", 0.0, 0.05)  # the initial row of a new id
tables = {f"emb.{name}": recast.Dynamic(max_rows=5000, initial=start) for name in FIELDS}
tables["emb.tailnum"] = recast.Dynamic(max_rows=1500, evict="lru", initial=start)
fast, opt = recast.optimize(model, opt, example=ids[:512], tables=tables)

scores = []
for batch, label in zip(ids.split(512), late.split(512), strict=True):
    with torch.no_grad():
        scores.append(fast(batch))  # before it learns from them: of days to come
    opt.zero_grad()
    F.binary_cross_entropy_with_logits(fast(batch), label).backward()
    opt.step()

half = len(late) // 2
print(f"AUC of the second half, each batch before it is trained: "
      f"{auc(torch.cat(scores)[half:], late[half:]):.4f}")  # fmt: skip
for table in recast.dynamic.tables(fast).values():
    print(*table.told())

served = recast.dynamic.export(fast.emb["tailnum"])  # sorted ids, and a plain matrix
plain = nn.Embedding.from_pretrained(served.rows)
number = torch.searchsorted(served.ids, served.ids[7])
print("exported:", plain, torch.equal(plain(number), fast.eval().emb["tailnum"](served.ids[7])))
