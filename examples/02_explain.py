"""What was done to a model, what was nearly done and why not, and the proof of equality."""

import sys

from dlrm import model

import recast

net, example, loss = model(tables=4)
net.emb[2].scale_grad_by_freq = True  # gradients that no grouped call computes

report = recast.explain(net, example=example)
print(report)

facts = report.to_dict()
print(f"\n{facts['lookups']['fused']} of {facts['lookups']['found']} lookups are grouped")
for miss in facts["missed"]:
    print(f"missed by {miss['rule']} at {miss['where']}: {miss['why']}")

fast = recast.optimize(net, example=example)
print()
print(fast)  # the graph in force: one line per node, with its origin and the rule that wrote it

difference = recast.diff(net, fast, example, loss=loss, steps=3)
print()
print(difference)
sys.exit(0 if difference.ok else 1)
