"""More interactions of random models: attention, experts, gates, norms, random numbers, buffers.

Each makes ``h`` (B, its width) of ``z`` (B, f, d) or ``flat`` (B, width); see :mod:`interactions`.
"""

from __future__ import annotations

from collections.abc import Callable

from interactions import Interaction, _loop, _none, _pairs, _two

Lines = Callable[[int, int], list[str]]


def _flat(
    lines: Lines, layers: Lines = _none, width: Callable[[int], int] | None = None
) -> Interaction:
    """Of all features side by side."""
    return Interaction(False, lambda f, d: width(d) if width else d, layers, lines)


def _stacked(lines: Lines, layers: Lines = _none, least: int = 1) -> Interaction:
    """As wide as the stacked features."""
    return Interaction(True, lambda f, d: f * d, layers, lines, least)


def _outer(kernel: str, product: list[str]) -> Interaction:
    """The outer product of each pair, weighted by a matrix, a vector or a number per pair."""
    return Interaction(
        True,
        lambda f, d: _pairs(f),
        lambda f, d: [
            f"self.outer_{kernel} = nn.Parameter(torch.randn("
            + {
                "mat": f"{d}, {_pairs(f)}, {d}",
                "vec": f"{_pairs(f)}, {d}",
                "num": f"{_pairs(f)}, 1",
            }[kernel]
            + "))"
        ],
        lambda f, d: [*_two(f), "p, q = z[:, li], z[:, lj]", *product],
        least=2,
    )


def _compressed(how: str) -> Interaction:
    """Compressed interactions (xDeepFM) of two layers with activation, half of the first kept."""
    made = {
        "einsum": "    outer = torch.einsum('bhd,bmd->bhmd', now, z).flatten(1, 2)",
        "unsqueeze": "    outer = (now.unsqueeze(2) * z.unsqueeze(1)).flatten(1, 2)",
    }[how]
    return Interaction(
        True,
        lambda f, d: 6,
        lambda f, d: [
            f"self.cin_{how} = nn.ModuleList([nn.Conv1d({f * f}, 4, 1), nn.Conv1d({2 * f}, 4, 1)])"
        ],
        lambda f, d: [
            "now, kept = z, []",
            f"for i, layer in enumerate(self.cin_{how}):",
            made,
            "    out = F.relu(layer(outer))",
            "    now, own = torch.split(out, 2, dim=1) if i == 0 else (out, out)",
            "    kept.append(own)",
            "h = torch.cat(kept, dim=1).sum(-1)",
        ],
    )


def _experts(f: int, d: int) -> list[str]:
    return [
        f"self.pool = nn.ModuleList(nn.Sequential(nn.Linear({d}, 4), nn.ReLU(), nn.Linear(4, 3),"
        " nn.ReLU()) for _ in range(3))",
        f"self.ask = nn.ModuleList(nn.Sequential(nn.Linear({d}, 3), nn.Softmax(dim=-1))"
        " for _ in range(2))",
        "self.ends = nn.ModuleList(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))"
        " for _ in range(2))",
    ]


BLOCKS: dict[str, Interaction] = {
    "outer-mat": _outer(
        "mat",
        [
            "k = torch.sum(p.unsqueeze(1) * self.outer_mat, dim=-1).transpose(1, 2)",
            "h = torch.sum(k * q, dim=-1)",
        ],
    ),
    "outer-vec": _outer("vec", ["h = torch.sum(p * q * self.outer_vec.unsqueeze(0), -1)"]),
    "outer-num": _outer("num", ["h = (p * q * self.outer_num).sum(dim=2)"]),
    "compressed-einsum": _compressed("einsum"),
    "compressed-unsqueeze": _compressed("unsqueeze"),
    "field-weighted": Interaction(
        True,
        lambda f, d: 1,
        lambda f, d: [f"self.strength = nn.Parameter(torch.randn({f}, {f}))"],
        lambda f, d: [
            "gram = torch.bmm(z, z.transpose(1, 2)) * (self.strength + self.strength.t())",
            "h = gram.triu(1).sum(dim=(1, 2)).unsqueeze(-1)",
        ],
        least=2,
    ),
    "squeeze-bilinear": Interaction(
        True,
        lambda f, d: 2 * _pairs(f) * d,
        lambda f, d: [
            f"self.down, self.up = nn.Linear({f}, 2, bias=False), nn.Linear(2, {f}, bias=False)",
            f"self.between = nn.Linear({d}, {d}, bias=False)",
        ],
        lambda f, d: [
            "gate = F.relu(self.up(F.relu(self.down(torch.mean(z, dim=-1)))))",
            "both = []",
            "for v in (z, z * gate.unsqueeze(2)):",
            "    v = torch.split(v, 1, dim=1)",
            "    both += [self.between(v[i]) * v[j] for i in range(len(v)) for j in range(i + 1,"
            " len(v))]",
            "h = torch.cat(both, dim=1).flatten(1)",
        ],
        least=2,
    ),
    "heads": _stacked(
        lambda f, d: [
            "q, k, v = (torch.tensordot(z, w, dims=([-1], [0])) for w in self.heads[:3])",
            f"q, k, v = (torch.stack(torch.split(t, {d}, dim=2)) for t in (q, k, v))",
            "scores = F.softmax(torch.einsum('bnik,bnjk->bnij', q, k), dim=-1)",
            "scores = F.dropout(scores, 0.2, training=self.training)",
            "h = torch.cat(torch.split(torch.matmul(scores, v), 1), dim=-1).squeeze(0)",
            "h = F.relu(torch.tensordot(h, self.heads[3], dims=([-1], [0])) + z).flatten(1)",
        ],
        lambda f, d: [
            f"self.heads = nn.ParameterList([nn.Parameter(torch.randn({d}, {2 * d}) * 0.5) for _ in"
            f" range(3)] + [nn.Parameter(torch.randn({2 * d}, {d}) * 0.5)])"
        ],
    ),
    "attention-layer": _stacked(
        lambda f, d: ["h = self.mha(z, z, z, need_weights=False)[0].flatten(1)"],
        lambda f, d: [f"self.mha = nn.MultiheadAttention({d}, 1, dropout=0.2, batch_first=True)"],
    ),
    "transformer": _stacked(
        lambda f, d: ["h = self.encoder(z).flatten(1)"],
        lambda f, d: [
            f"self.encoder = nn.TransformerEncoderLayer({d}, 1, 5, dropout=0.1, batch_first=True)"
        ],
    ),
    "scaled-product": _stacked(
        lambda f, d: [
            "keep = 0.3 if self.training else 0.0",
            "q, k, v = (layer(z).unsqueeze(1) for layer in self.three)",
            "h = F.scaled_dot_product_attention(q, k, v, dropout_p=keep).squeeze(1).flatten(1)",
        ],
        lambda f, d: [f"self.three = nn.ModuleList(nn.Linear({d}, {d}) for _ in range(3))"],
    ),
    "norm-features": _stacked(
        lambda f, d: ["h = self.norm_features(z).flatten(1)"],
        lambda f, d: [f"self.norm_features = nn.BatchNorm1d({f}, momentum=0.3)"],
    ),
    "norm-vectors": _stacked(
        lambda f, d: ["h = torch.cat([n(z[:, i]) for i, n in enumerate(self.norms)], dim=-1)"],
        lambda f, d: [
            f"self.norms = nn.ModuleList(nn.LayerNorm({d}, elementwise_affine=i > 0)"
            f" for i in range({f}))"
        ],
    ),
    "convolved": _stacked(
        lambda f, d: ["h = torch.tanh(self.conv(z.unsqueeze(1))).mean(1).flatten(1)"],
        lambda f, d: ["self.conv = nn.Conv2d(1, 2, (3, 1), padding=(1, 0))"],
    ),
    "gates-of-tasks": _flat(
        lambda f, d: [
            "each = torch.stack([expert(flat) for expert in self.pool], dim=2)",
            "tasks = [(each * ask(flat).unsqueeze(1)).sum(2) for ask in self.ask]",
            "h = torch.cat([torch.sigmoid(end(t)) for end, t in zip(self.ends, tasks)], dim=1)",
        ],
        _experts,
        lambda d: 2,
    ),
    "gates-of-parameters": _flat(
        lambda f, d: [
            "each = torch.einsum('bd,dhe->bhe', flat, self.each) + self.shifts",
            "each = F.relu(each)",
            "gates = [torch.softmax(flat @ g, dim=-1) for g in self.gated]",
            "h = torch.cat([torch.bmm(each, g.unsqueeze(2)).squeeze(2) for g in gates], dim=1)",
        ],
        lambda f, d: [
            f"self.each = nn.Parameter(torch.randn({d}, 3, 4) * 0.5)",
            "self.shifts = nn.Parameter(torch.zeros(3, 4))",
            f"self.gated = nn.ParameterList(nn.Parameter(torch.randn({d}, 4)) for _ in range(2))",
        ],
        lambda d: 6,
    ),
    "two-levels": _flat(
        lambda f, d: [
            "ins = [flat, flat, flat]",
            "for level, gates in zip(self.levels, self.doors):",
            "    own = [expert(t) for expert, t in zip(level, ins)]",
            "    mixed = [torch.stack([own[0], own[1]], 1), torch.stack([own[2], own[1]], 1),"
            " torch.stack(own, 1)]",
            "    gates = [gate(t).softmax(dim=1) for gate, t in zip(gates, ins)]",
            "    outs = [torch.sum(m * g.unsqueeze(2), dim=1) for m, g in zip(mixed, gates)]",
            "    ins = [outs[0], outs[2], outs[1]]",
            "h = torch.cat([ins[0], ins[2]], 1)",
        ],
        lambda f, d: [
            "self.levels = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(i, 3), nn.ReLU())"
            f" for _ in range(3)) for i in ({d}, 3))",
            "self.doors = nn.ModuleList(nn.ModuleList(nn.Linear(i, o, bias=False) for o in"
            f" (2, 2, 3)) for i in ({d}, 3))",
        ],
        lambda d: 6,
    ),
    "low-rank-mixture": _flat(
        lambda f, d: [
            "h = flat",
            "for i in range(2):",
            "    gate = F.softmax(self.choose(h), dim=1)",
            "    outs = [flat * self.out[e](torch.tanh(self.into[e](h))) for e in range(2)]",
            "    h = (torch.stack(outs, dim=1) * gate.unsqueeze(2)).sum(dim=1) + h",
        ],
        lambda f, d: [
            f"self.choose = nn.Linear({d}, 2)",
            f"self.into = nn.ModuleList(nn.Linear({d}, 2, bias=False) for _ in range(2))",
            f"self.out = nn.ModuleList(nn.Linear(2, {d}) for _ in range(2))",
        ],
    ),
    "stopped-gate": _flat(
        lambda f, d: [
            "gate = 2 * torch.sigmoid(self.gated_by(torch.cat([flat.detach(), flat * 0.5], -1)))",
            "h = gate * flat",
        ],
        lambda f, d: [f"self.gated_by = nn.Linear({2 * d}, {d})"],
    ),
    "dice": _flat(
        lambda f, d: [
            "p = torch.sigmoid(self.dice_norm(flat))",
            "h = self.alpha * (1.0 - p) * flat + p * flat",
        ],
        lambda f, d: [
            f"self.dice_norm = nn.BatchNorm1d({d}, eps=1e-3, affine=False)",
            f"self.alpha = nn.Parameter(torch.zeros({d}))",
        ],
    ),
    "same-layer": _flat(
        lambda f, d: ["h = flat", "for _ in range(2):", "    h = F.relu(self.again(h)) + h"],
        lambda f, d: [f"self.again = nn.Linear({d}, {d})"],
    ),
    "tied-weights": _flat(
        lambda f, d: ["h = self.decode(torch.sigmoid(self.encode(flat)))"],
        lambda f, d: [
            f"self.encode, self.decode = nn.Linear({d}, {d}), nn.Linear({d}, {d})",
            "self.decode.weight = self.encode.weight",
        ],
    ),
    "shared-drop": _flat(
        lambda f, d: [
            "left = self.one_drop(F.relu(self.left_layer(flat)))",
            "h = torch.cat([self.one_drop(left), self.one_drop(self.right_layer(flat))], 1)",
        ],
        lambda f, d: [
            "self.one_drop = nn.Dropout(0.4)",
            f"self.left_layer, self.right_layer = nn.Linear({d}, 3), nn.Linear({d}, 2)",
        ],
        lambda d: 5,
    ),
    "noise": _flat(
        lambda f, d: ["h = flat + 0.1 * torch.randn_like(flat) if self.training else flat"]
    ),
    "random-mask": _flat(lambda f, d: ["h = flat * (torch.rand(flat.shape) < 0.8).float()"]),
    "random-choice": _flat(
        lambda f, d: [
            "noise = -torch.empty_like(flat).exponential_().log()",
            "h = flat * torch.softmax((flat + noise) / 2, dim=-1)",
        ]
    ),
    "shuffled": _flat(lambda f, d: ["h = flat * flat[torch.randperm(flat.size(0))]"]),
    "centred": _flat(
        lambda f, d: ["with torch.no_grad():", "    mean = flat.mean(0)", "h = flat - mean"]
    ),
    "moving-mean": _flat(
        lambda f, d: [
            "if self.training:",
            "    self.moving.mul_(0.9).add_(flat.detach().mean(0), alpha=0.1)",
            "h = flat - self.moving",
        ],
        lambda f, d: [f"self.register_buffer('moving', torch.zeros({d}))"],
    ),
    "counted": _flat(
        lambda f, d: ["self.calls += 1", "h = flat / self.calls.float()"],
        lambda f, d: ["self.register_buffer('calls', torch.zeros((), dtype=torch.long))"],
    ),
    "highest": _flat(
        lambda f, d: ["h = torch.topk(flat, 1, dim=1)[0] * 0.5 + flat"],
    ),
    "where": _flat(lambda f, d: ["h = torch.where(flat > 0.1, flat * 2, flat.clamp(max=0.05))"]),
    "in-place": _flat(
        lambda f, d: ["h = flat.clone()", "h[:, 0] = 0.5", "h *= 2.0", "h.add_(flat)"]
    ),
    "several-rows": _flat(
        lambda f, d: ["h = flat - flat.mean(0, keepdim=True) if flat.shape[0] > 2 else flat"]
    ),
    "attended-loop": Interaction(
        True,
        lambda f, d: d,
        lambda f, d: [f"self.weigh = nn.Parameter(torch.randn({d}, 1))"],
        lambda f, d: [
            *_loop("z[:, i] * z[:, j]"),
            "pairs = torch.stack(pairs, dim=1)",
            "scores = F.softmax(torch.matmul(torch.tanh(pairs), self.weigh), dim=1)",
            "h = torch.sum(F.dropout(scores * pairs, 0.2, self.training), 1)",
        ],
        least=2,
    ),
}  # fmt: skip
