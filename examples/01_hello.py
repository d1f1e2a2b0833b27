"""The whole interface: a plain model and a plain optimizer in, the same two out, faster."""

import torch
from dlrm import loss, model

import recast

net, example, _ = model()
opt = torch.optim.Adagrad(net.parameters(), lr=0.01)

fast, opt = recast.optimize(net, opt, example=example)
print(fast.report)

for _ in range(3):  # the training loop is the one you have
    opt.zero_grad()
    click = loss(fast(*example))
    click.backward()
    opt.step()
    print(f"loss {click.item():.4f}")
