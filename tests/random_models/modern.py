"""Interactions of random models in the style of newer papers and of code that relies on torch.

Each makes ``h`` (B, its width) of ``z`` (B, f, d) or ``flat`` (B, width); see :mod:`interactions`.
"""

from __future__ import annotations

from blocks import _flat, _stacked
from interactions import Interaction, _pairs, _two

MODERN: dict[str, Interaction] = {
    "self-masked-cross": _flat(  # DCN v3
        lambda f, d: [
            "h = flat",
            "for layer, norm, shift in zip(self.halves, self.half_norms, self.half_shifts):",
            "    half = layer(h)",
            "    half = torch.cat([half, F.relu(norm(half)) * half], dim=-1)",
            f"    h = h * (half[:, :{d}] + shift) + h",
        ],
        lambda f, d: [
            f"self.halves = nn.ModuleList(nn.Linear({d}, {(d + 1) // 2}) for _ in range(2))",
            f"self.half_norms = nn.ModuleList(nn.LayerNorm({(d + 1) // 2}) for _ in range(2))",
            f"self.half_shifts = nn.ParameterList(nn.Parameter(torch.zeros({d})) for _ in '01')",
        ],
    ),
    "gate-and-value": _flat(  # SwiGLU behind a root-mean-square norm, residual
        lambda f, d: [
            "r = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-2) * self.rms",
            "gate, value = self.both_ways(r).chunk(2, dim=-1)",
            "h = flat + self.back(F.silu(gate) * value)",
        ],
        lambda f, d: [
            f"self.rms = nn.Parameter(torch.ones({d}))",
            f"self.both_ways = nn.Linear({d}, 6, bias=False)",
            f"self.back = nn.Linear(3, {d}, bias=False)",
        ],
    ),
    "rms-layer": _flat(
        lambda f, d: ["h = self.rms_layer(flat)"],
        lambda f, d: [f"self.rms_layer = nn.RMSNorm({d}, eps=1e-2)"],
    ),
    "mixed-tokens": _stacked(  # RankMixer
        lambda f, d: [
            "mixed = z.transpose(1, 2).reshape(z.size(0), z.size(1), -1)",
            "mixed = self.token_norm(mixed + z)",
            "inner = torch.einsum('btd,tdh->bth', mixed, self.token_in)",
            "h = (torch.einsum('bth,thd->btd', F.gelu(inner), self.token_out) + mixed).flatten(1)",
        ],
        lambda f, d: [
            f"self.token_norm = nn.LayerNorm({d})",
            f"self.token_in = nn.Parameter(torch.randn({f}, {d}, 3) * 0.4)",
            f"self.token_out = nn.Parameter(torch.randn({f}, 3, {d}) * 0.4)",
        ],
    ),
    "compressed-dots": _stacked(  # Wukong: X (X' Y), norm, mlp
        lambda f, d: [
            "low = torch.bmm(z, torch.matmul(z.transpose(1, 2), self.low_rank))",
            f"low = self.low_mlp(self.low_norm(low.reshape(-1, {2 * f})))",
            "line = self.low_line(z.permute(0, 2, 1)).permute(0, 2, 1)",
            f"h = (low.view(-1, {f}, {d}) + line + z).flatten(1)",
        ],
        lambda f, d: [
            f"self.low_rank = nn.Parameter(torch.randn({f}, 2) * 0.5)",
            f"self.low_norm = nn.LayerNorm({2 * f})",
            f"self.low_mlp = nn.Sequential(nn.Linear({2 * f}, 4), nn.ReLU(),"
            f" nn.Linear(4, {f * d}))",
            f"self.low_line = nn.Linear({f}, {f}, bias=False)",
        ],
    ),
    "field-matrices": _stacked(  # HiFormer: projections of each field's own
        lambda f, d: [
            "q, k, v = (torch.einsum('bfd,fde->bfe', z, w) for w in self.own_qkv)",
            f"scores = (q @ k.transpose(-2, -1) / {d} ** 0.5).softmax(-1)",
            "h = (scores @ v + z).contiguous().view(z.size(0), -1)",
        ],
        lambda f, d: [
            f"self.own_qkv = nn.ParameterList(nn.Parameter(torch.randn({f}, {d}, {d}) * 0.4)"
            " for _ in range(3))"
        ],
    ),
    "polar": _stacked(  # EulerNet
        lambda f, d: [
            "re, im = torch.cos(z) + 1.5, torch.sin(z)",
            "size = 0.5 * torch.log(re ** 2 + im ** 2 + 1e-2).flatten(1)",
            "turn = torch.atan2(im, re).flatten(1)",
            "size, turn = torch.exp((size @ self.orders_of).tanh()), turn @ self.orders_of",
            "h = size * torch.cos(turn) + size * torch.sin(turn)",
        ],
        lambda f, d: [f"self.orders_of = nn.Parameter(torch.randn({f * d}, {f * d}) * 0.2)"],
    ),
    "subspaces": _stacked(  # xDeepInt
        lambda f, d: [
            "x0 = torch.cat(torch.chunk(z, z.shape[2], dim=2), dim=1).transpose(1, 2)",
            "h = x0",
            "for layer in self.subspace:",
            "    h = x0 * layer(h) + h",
            "h = h.reshape(z.shape[0], -1)",
        ],
        lambda f, d: [
            f"self.subspace = nn.ModuleList(nn.Linear({f * d}, {f * d}) for _ in range(2))"
        ],
    ),
    "bridged": _stacked(  # EDCN: regulated streams, joined by a product in every layer
        lambda f, d: [
            "cross, deep = ((z * (g / 0.8).softmax(-1).unsqueeze(-1)).flatten(1)"
            " for g in self.fields)",
            "x0 = cross",
            "for line, layer in zip(self.lines, self.deep):",
            "    cross = x0 * torch.mm(cross, line) + cross",
            "    deep = F.relu(layer(deep))",
            "    bridge = cross * deep",
            "    cross = deep = bridge",
            "h = bridge",
        ],
        lambda f, d: [
            f"self.fields = nn.Parameter(torch.rand(2, {f}))",
            f"self.lines = nn.ParameterList(nn.Parameter(torch.randn({f * d}, 1) * 0.3)"
            " for _ in range(2))",
            f"self.deep = nn.ModuleList(nn.Linear({f * d}, {f * d}) for _ in range(2))",
        ],
    ),
    "fused-streams": _flat(  # FinalMLP: two towers joined by a product of heads
        lambda f, d: [
            "left, right = (tower(flat * 2 * torch.sigmoid(c.expand(flat.shape[0], -1)))"
            " for tower, c in zip(self.streamed, self.contexts))",
            "both = torch.einsum('bhi,hij,bhj->b', left.view(-1, 2, 2), self.heads_of,"
            " right.view(-1, 2, 2))",
            "h = torch.cat([left, right, both.unsqueeze(-1)], -1)",
        ],
        lambda f, d: [
            "self.streamed = nn.ModuleList(nn.Sequential("
            f"nn.Linear({d}, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))",
            f"self.contexts = nn.ParameterList(nn.Parameter(torch.zeros(1, {d})) for _ in '01')",
            "self.heads_of = nn.Parameter(torch.randn(2, 2, 2) * 0.5)",
        ],
        lambda d: 9,
    ),
    "two-tokens": _flat(  # AITM
        lambda f, d: [
            "first, second = self.aitm[0](flat), self.aitm[1](flat)",
            "two = torch.stack([second, F.relu(self.aitm[2](first))], dim=1)",
            "key, query, value = (layer(two) for layer in self.aitm[3:])",
            "weights = torch.softmax((key * query).sum(-1) / 3 ** 0.5, dim=1)",
            "h = torch.cat([first, (weights.unsqueeze(-1) * value).sum(1)], dim=1)",
        ],
        lambda f, d: [
            f"self.aitm = nn.ModuleList([nn.Linear({d}, 3), nn.Linear({d}, 3),"
            " *(nn.Linear(3, 3) for _ in range(4))])"
        ],
        lambda d: 6,
    ),
    "best-experts": _flat(  # the two best of three, by scatter
        lambda f, d: [
            "scores = self.router(flat)",
            "best, which = scores.topk(2, dim=-1)",
            "gate = torch.full_like(scores, float('-inf')).scatter(-1, which, best).softmax(-1)",
            "each = torch.tanh(torch.einsum('bd,edo->beo', flat, self.routed))",
            "h = (each * gate[..., None]).sum(1)",
        ],
        lambda f, d: [
            f"self.router = nn.Linear({d}, 3)",
            f"self.routed = nn.Parameter(torch.randn(3, {d}, 4) * 0.4)",
        ],
        lambda d: 4,
    ),
    "own-weights": _flat(  # APG: a small matrix made for each row
        lambda f, d: [
            "made = self.make(flat).view(-1, 2, 2)",
            "h = torch.bmm((flat @ self.down_to).unsqueeze(1), made).squeeze(1) @ self.up_from",
        ],
        lambda f, d: [
            f"self.make = nn.Linear({d}, 4)",
            f"self.down_to = nn.Parameter(torch.randn({d}, 2) * 0.4)",
            "self.up_from = nn.Parameter(torch.randn(2, 5) * 0.4)",
        ],
        lambda d: 5,
    ),
    "by-domain": _flat(  # STAR: shared weights times those of the row's domain
        lambda f, d: [
            "domain = (flat[:, 0] > 0).long()",
            "weight = self.shared_weight * self.domain_weight[domain]",
            "h = torch.einsum('bd,bdo->bo', flat, weight) + self.domain_bias[domain]",
        ],
        lambda f, d: [
            f"self.shared_weight = nn.Parameter(torch.randn({d}, 3) * 0.4)",
            f"self.domain_weight = nn.Parameter(torch.ones(2, {d}, 3))",
            "self.domain_bias = nn.Parameter(torch.zeros(2, 3))",
        ],
        lambda d: 3,
    ),
    "unit-weights": _flat(  # cosine layers
        lambda f, d: [
            "h = F.linear(F.normalize(flat + 2.0, dim=-1), F.normalize(self.unit, dim=-1)) * 3",
        ],
        lambda f, d: [f"self.unit = nn.Parameter(torch.randn(4, {d}))"],
        lambda d: 4,
    ),
    "weight-norm": _flat(
        lambda f, d: ["h = self.normed(flat)"],
        lambda f, d: [f"self.normed = nn.utils.parametrizations.weight_norm(nn.Linear({d}, 4))"],
        lambda d: 4,
    ),
    "named-experts": _flat(  # dicts of layers and of parameters
        lambda f, d: [
            "each = {name: F.elu(layer(flat)) for name, layer in self.by_name.items()}",
            "h = torch.cat([each[k] * torch.exp(-self.scale_of[k]) for k in sorted(each)], 1)",
        ],
        lambda f, d: [
            f"self.by_name = nn.ModuleDict({{k: nn.Linear({d}, 2) for k in ('buy', 'click')}})",
            "self.scale_of = nn.ParameterDict({k: nn.Parameter(torch.zeros(()))"
            " for k in ('buy', 'click')})",
        ],
        lambda d: 4,
    ),
    "double-part": _flat(
        lambda f, d: ["h = torch.logaddexp(flat.double(), flat.double() * 0.5).float()"]
    ),
    "third-order": _stacked(  # by recursion over the features
        lambda f, d: [
            "orders = [torch.ones_like(z[:, 0])] + [torch.zeros_like(z[:, 0])] * 3",
            "for i in range(z.shape[1]):",
            "    for o in (3, 2, 1):",
            "        orders[o] = orders[o] + orders[o - 1] * z[:, i]",
            "h = torch.cat([orders[2], orders[3], z.flatten(1)], dim=1)[:, : z[0].numel()]",
        ],
        least=2,
    ),
    "sorted-features": _stacked(
        lambda f, d: [
            "order = self.rank_of.argsort(descending=True).view(1, -1, 1)",
            "h = torch.take_along_dim(z, order, dim=1).cumsum(1).flip(1).flatten(1)",
        ],
        lambda f, d: [f"self.rank_of = nn.Parameter(torch.rand({f}), requires_grad=False)"],
    ),
    "bilinear-layer": Interaction(
        True,
        lambda f, d: 2,
        lambda f, d: [f"self.two_sided = nn.Bilinear({d}, {d}, 2)"],
        lambda f, d: ["h = torch.tanh(self.two_sided(z[:, 0], z[:, 1]))"],
        least=2,
    ),
    "pairs-of-gram": Interaction(
        True,
        lambda f, d: _pairs(f) + d,
        lambda f, d: [f"self.field_gate = nn.Parameter(torch.rand({f}, 1))"],
        lambda f, d: [
            *_two(f),
            "gated = z * self.field_gate.sigmoid()",
            f"gram = torch.einsum('bid,bjd->bij', gated, z).flatten(1)[:, li * {f} + lj]",
            "h = torch.hstack([gram, gated.logsumexp(1)])",
        ],
        least=2,
    ),
    "two-precisions": _flat(  # whatever autocast holds around the model
        lambda f, d: [
            "with torch.autocast('cpu', torch.bfloat16):",
            "    rough = self.rough(flat)",
            "    with torch.autocast('cpu', enabled=False):",
            "        exact = self.exact(flat) @ self.rough[0].weight",
            "h = torch.cat([rough.float(), exact], dim=1)",
        ],
        lambda f, d: [
            f"self.rough = nn.Sequential(nn.Linear({d}, 3), nn.ReLU(), nn.Linear(3, 2))",
            f"self.exact = nn.Linear({d}, 3)",
        ],
        lambda d: 2 + d,
    ),
    "overwritten-attention": _stacked(  # through a view of its result
        lambda f, d: [
            "mixed = torch.softmax(z @ z.transpose(1, 2) / 2, dim=-1) @ z",
            "mixed.view(z.size(0), -1)[:, :2] *= 0.5",
            "h = (mixed + z).flatten(1)",
        ],
    ),
    "reversed": _flat(  # adversarial heads of domains
        lambda f, d: ["h = torch.cat([flat, Reversed.apply(flat, 0.5).tanh()], dim=1)"],
        width=lambda d: 2 * d,
    ),
    "rounded": _flat(  # straight through; of weights, too
        lambda f, d: [
            "weight = self.on_a_grid.weight",
            "h = F.linear(Rounded.apply(flat * 4) / 4, Rounded.apply(weight * 8) / 8)",
        ],
        lambda f, d: [f"self.on_a_grid = nn.Linear({d}, 3)"],
        lambda d: 3,
    ),
}

# What a program needs that names one of these.
_FUNCTION = [
    "    @staticmethod",
    "    def forward(ctx, {0}):",
    "        {1}",
    "",
    "    @staticmethod",
    "    def backward(ctx, grad):",
    "        return {2}",
]
CLASSES: dict[str, list[str]] = {
    "noise": [
        "class Noise(nn.Module):",
        "    def forward(self, h):",
        "        return h + torch.randn_like(h) * 0.1 if self.training else h",
    ],
    "named": ["class Out(NamedTuple):", "    logit: torch.Tensor", "    hidden: torch.Tensor"],
    "own": [
        "class Centred(nn.Linear):",
        "    def forward(self, h):",
        "        return F.linear(h, self.weight - self.weight.mean(1, True), self.bias)",
    ],
    "scaled-table": [
        "class Scaled(nn.Embedding):",
        "    def forward(self, ids):",
        "        return super().forward(ids.long()) * self.embedding_dim**0.5",
    ],
    "reversed": [
        "class Reversed(torch.autograd.Function):",
        *(
            line.format(
                "x, scale", "ctx.scale = scale; return x.view_as(x)", "-ctx.scale * grad, None"
            )
            for line in _FUNCTION
        ),
    ],
    "rounded": [
        "class Rounded(torch.autograd.Function):",
        *(line.format("x", "return torch.round(x)", "grad") for line in _FUNCTION),
    ],
}
