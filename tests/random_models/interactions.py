"""The feature interactions of random models, each as lines of code that a user would write.

``z`` is (B, f, d), the stacked feature vectors; ``flat`` is (B, width), all features side by side;
each writes ``h`` (B, its width).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interaction:
    """Of f features of d numbers if ``stacked``; else of ``flat``, whose width is d (f is 1)."""

    stacked: bool
    width: Callable[[int, int], int]
    layers: Callable[[int, int], list[str]]
    lines: Callable[[int, int], list[str]]
    least: int = 1  # features


def _none(f: int, d: int) -> list[str]:
    return []


def _pairs(f: int) -> int:
    return f * (f - 1) // 2


def _one_a_pair(f: int, d: int) -> int:
    return _pairs(f)


def _two(f: int) -> list[str]:
    return [f"li, lj = torch.triu_indices({f}, {f}, 1)"]


def _loop(body: str) -> list[str]:
    """A list with one value per pair, as most public models make it."""
    return [
        "pairs = []",
        "for i in range(z.shape[1]):",
        "    for j in range(i + 1, z.shape[1]):",
        f"        pairs.append({body})",
    ]


def _gram(self_too: bool) -> Interaction:
    offset = 0 if self_too else -1
    return Interaction(
        True,
        lambda f, d: d + (f * (f + 1) // 2 if self_too else _pairs(f)),
        _none,
        lambda f, d: [
            "p = torch.bmm(z, z.transpose(1, 2))",
            f"li, lj = torch.tril_indices(p.shape[1], p.shape[2], {offset})",
            "h = torch.cat([z[:, 0], p[:, li, lj]], dim=1)",
        ],
    )


def _bilinear(kind: str) -> Interaction:
    count = {"all": lambda f: 1, "each": lambda f: f, "pair": _pairs}[kind]
    index = {"all": "0", "each": "i", "pair": "len(pairs)"}[kind]
    return Interaction(
        True,
        lambda f, d: _pairs(f) * d,
        lambda f, d: [
            f"self.bilinear_{kind} = nn.ModuleList(nn.Linear({d}, {d}, bias=False)"
            f" for _ in range({count(f)}))"
        ],
        lambda f, d: [
            *_loop(f"self.bilinear_{kind}[{index}](z[:, i]) * z[:, j]"),
            "h = torch.cat(pairs, dim=1)",
        ],
        least=2,
    )


INTERACTIONS: dict[str, Interaction] = {
    "cat": Interaction(False, lambda f, d: d, _none, lambda f, d: ["h = flat"]),
    "dot": _gram(False),
    "dot-self": _gram(True),
    "fm": Interaction(
        True,
        lambda f, d: d,
        _none,
        lambda f, d: ["h = 0.5 * (z.sum(1) ** 2 - (z ** 2).sum(1))"],
    ),
    "fm-summed": Interaction(
        True,
        lambda f, d: 1,
        _none,
        lambda f, d: [
            "square_of_sum = torch.pow(torch.sum(z, dim=1, keepdim=True), 2)",
            "sum_of_square = torch.sum(z * z, dim=1, keepdim=True)",
            "h = 0.5 * torch.sum(square_of_sum - sum_of_square, dim=2)",
        ],
    ),
    "cross": Interaction(
        False,
        lambda f, d: d,
        lambda f, d: [f"self.scalar = nn.Linear({d}, 1, bias=False)"],
        lambda f, d: ["h = flat * self.scalar(flat) + flat"],
    ),
    "cross-vector": Interaction(
        False,
        lambda f, d: d,
        lambda f, d: [
            f"self.vectors = nn.ModuleList(nn.Linear({d}, 1, bias=False) for _ in range(3))",
            f"self.biases = nn.ParameterList(nn.Parameter(torch.zeros({d})) for _ in range(3))",
        ],
        lambda f, d: [
            "h = flat",
            "for layer, bias in zip(self.vectors, self.biases):",
            "    h = flat * layer(h) + bias + h",
        ],
    ),
    "cross-matrix": Interaction(
        False,
        lambda f, d: d,
        lambda f, d: [f"self.cross = nn.ModuleList(nn.Linear({d}, {d}) for _ in range(2))"],
        lambda f, d: ["h = flat", "for layer in self.cross:", "    h = flat * layer(h) + h"],
    ),
    "cross-low-rank": Interaction(
        False,
        lambda f, d: d,
        lambda f, d: [
            f"self.v = nn.ModuleList(nn.Linear({d}, 2, bias=False) for _ in range(2))",
            f"self.u = nn.ModuleList(nn.Linear(2, {d}) for _ in range(2))",
        ],
        lambda f, d: [
            "h = flat",
            "for v, u in zip(self.v, self.u):",
            "    h = flat * u(v(h)) + h",
        ],
    ),
    "cross-gated": Interaction(
        False,
        lambda f, d: d,
        lambda f, d: [
            f"self.w = nn.Linear({d}, {d})",
            f"self.g = nn.Linear({d}, {d}, bias=False)",
        ],
        lambda f, d: ["h = flat * self.w(flat) * torch.sigmoid(self.g(flat)) + flat"],
    ),
    "products-loop": Interaction(
        True,
        lambda f, d: _pairs(f) * d,
        _none,
        lambda f, d: [*_loop("z[:, i] * z[:, j]"), "h = torch.cat(pairs, dim=1)"],
        least=2,
    ),
    "products-index": Interaction(
        True,
        lambda f, d: _pairs(f) * d,
        _none,
        lambda f, d: [*_two(f), "h = (z[:, li] * z[:, lj]).flatten(1)"],
        least=2,
    ),
    "inner-index": Interaction(
        True,
        lambda f, d: _pairs(f),
        _none,
        lambda f, d: [*_two(f), "h = (z[:, li] * z[:, lj]).sum(-1)"],
        least=2,
    ),
    "inner-mask": Interaction(
        True,
        lambda f, d: _pairs(f),
        lambda f, d: [
            f"self.register_buffer('upper', torch.triu(torch.ones({f}, {f}), 1).bool(),"
            " persistent=False)"
        ],
        lambda f, d: [
            "gram = torch.matmul(z, z.transpose(1, 2))",
            f"h = torch.masked_select(gram, self.upper).view(-1, {_pairs(f)})",
        ],
        least=2,
    ),
    "weighted-pairs": Interaction(
        True,
        lambda f, d: 1,
        lambda f, d: [f"self.pair_weight = nn.Linear({_pairs(f)}, 1)"],
        lambda f, d: [*_two(f), "h = self.pair_weight((z[:, li] * z[:, lj]).sum(2))"],
        least=2,
    ),
    "outer": Interaction(
        True,
        lambda f, d: d,
        lambda f, d: [f"self.kernel = nn.Parameter(torch.randn({d}, {d}))"],
        lambda f, d: ["s = z.sum(1)", "h = torch.matmul(s, self.kernel) * s"],
    ),
    "attentional": Interaction(
        True,
        lambda f, d: d,
        lambda f, d: [f"self.attend = nn.Linear({d}, 3)", "self.project = nn.Linear(3, 1)"],
        lambda f, d: [
            *_two(f),
            "products = z[:, li] * z[:, lj]",
            "scores = torch.softmax(self.project(F.relu(self.attend(products))), dim=1)",
            "h = (scores * products).sum(1)",
        ],
        least=2,
    ),
    "bilinear-all": _bilinear("all"),
    "bilinear-each": _bilinear("each"),
    "bilinear-pair": _bilinear("pair"),
    "bilinear-matrices": Interaction(
        True,
        lambda f, d: _pairs(f) * d,
        lambda f, d: [f"self.matrix = nn.Parameter(torch.randn({_pairs(f)}, {d}, {d}))"],
        lambda f, d: [
            "v, w = torch.split(z, 1, dim=1), torch.split(self.matrix, 1, dim=0)",
            *_loop("torch.matmul(v[i], w[len(pairs)]) * v[j]"),
            "h = torch.cat(pairs, dim=1).flatten(1)",
        ],
        least=2,
    ),
    "compressed": Interaction(
        True,
        lambda f, d: 3,
        lambda f, d: [f"self.cin = nn.Conv1d({f * f}, 3, 1)"],
        lambda f, d: [
            "outer = torch.einsum('bhd,bmd->bhmd', z, z).flatten(1, 2)",
            "h = F.relu(self.cin(outer)).sum(-1)",
        ],
    ),
    "attention": Interaction(
        True,
        lambda f, d: f * d,
        lambda f, d: [f"self.qkv = nn.Linear({d}, {3 * d}, bias=False)"],
        lambda f, d: [
            "q, k, v = self.qkv(z).chunk(3, dim=-1)",
            "scores = torch.softmax(q @ k.transpose(1, 2), dim=-1)",
            "h = F.relu(scores @ v + z).flatten(1)",
        ],
    ),
    "squeeze-excite": Interaction(
        True,
        lambda f, d: f * d,
        lambda f, d: [f"self.squeeze = nn.Linear({f}, 2)", f"self.excite = nn.Linear(2, {f})"],
        lambda f, d: [
            "weights = torch.sigmoid(self.excite(F.relu(self.squeeze(z.mean(2)))))",
            "h = (z * weights.unsqueeze(-1)).flatten(1)",
        ],
    ),
    "experts": Interaction(
        False,
        lambda f, d: 4,
        lambda f, d: [
            f"self.experts = nn.ModuleList(nn.Sequential(nn.Linear({d}, 4), nn.ReLU())"
            " for _ in range(3))",
            f"self.gate = nn.Linear({d}, 3, bias=False)",
        ],
        lambda f, d: [
            "each = torch.stack([expert(flat) for expert in self.experts], dim=1)",
            "gate = F.softmax(self.gate(flat), dim=1)",
            "h = (gate.unsqueeze(-1) * each).sum(1)",
        ],
    ),
    "expert-levels": Interaction(
        False,
        lambda f, d: 6,
        lambda f, d: [
            f"self.level = nn.ModuleList(nn.Sequential(nn.Linear({d}, 3), nn.ReLU())"
            " for _ in range(3))",
            f"self.gates = nn.ModuleList(nn.Linear({d}, 2) for _ in range(2))",
        ],
        lambda f, d: [
            "own = [expert(flat) for expert in self.level[:2]]",
            "shared = self.level[2](flat)",
            "tasks = []",
            "for task, gate in enumerate(self.gates):",
            "    each = torch.stack([own[task], shared], dim=1)",
            "    tasks.append(torch.bmm(gate(flat).softmax(-1).unsqueeze(1), each).squeeze(1))",
            "h = torch.cat(tasks, dim=-1)",
        ],
    ),
    "towers": Interaction(
        False,
        lambda f, d: 2,
        lambda f, d: [
            f"self.towers = nn.ModuleList(nn.Sequential(nn.Linear({d}, 3), nn.ReLU(),"
            " nn.Dropout(0.3), nn.Linear(3, 1)) for _ in range(2))",
        ],
        lambda f, d: [
            "click, buy = (torch.sigmoid(tower(flat)) for tower in self.towers)",
            "h = torch.cat([click, click * buy], dim=1)",
        ],
    ),
    "masked-block": Interaction(
        False,
        lambda f, d: 3,
        lambda f, d: [
            f"self.before = nn.LayerNorm({d})",
            f"self.mask = nn.Sequential(nn.Linear({d}, 4), nn.ReLU(), nn.Linear(4, {d}))",
            f"self.after = nn.Sequential(nn.Linear({d}, 3, bias=False), nn.LayerNorm(3),"
            " nn.ReLU())",
        ],
        lambda f, d: ["h = self.after(self.mask(flat) * self.before(flat))"],
    ),
    "two-streams": Interaction(
        False,
        lambda f, d: 4,
        lambda f, d: [f"self.streams = nn.Linear({d}, 8)"],
        lambda f, d: [
            "left, right = torch.chunk(self.streams(flat), 2, dim=-1)",
            "h = left + left * right",
        ],
    ),
    "logarithmic": Interaction(
        True,
        lambda f, d: 3 * d,
        lambda f, d: [f"self.orders = nn.Linear({f}, 3, bias=False)"],
        lambda f, d: [
            "logs = torch.log1p(torch.clamp(torch.abs(z), min=1e-4))",
            "h = torch.exp(self.orders(logs.transpose(1, 2))).transpose(1, 2).flatten(1)",
        ],
    ),
    "cross-mixture": Interaction(
        False,
        lambda f, d: d,
        lambda f, d: [
            f"self.left = nn.Parameter(torch.randn(2, 2, {d}, 2) * 0.3)",
            f"self.right = nn.Parameter(torch.randn(2, 2, {d}, 2) * 0.3)",
            "self.core = nn.Parameter(torch.randn(2, 2, 2, 2))",
            f"self.gating = nn.ModuleList(nn.Linear({d}, 1, bias=False) for _ in range(2))",
            f"self.shift = nn.ParameterList(nn.Parameter(torch.zeros({d}, 1)) for _ in range(2))",
        ],
        lambda f, d: [
            "x0 = flat.unsqueeze(2)",
            "xl = x0",
            "for i in range(2):",
            "    scores, outs = [], []",
            "    for e in range(2):",
            "        scores.append(self.gating[e](xl.squeeze(2)))",
            "        v = torch.tanh(torch.matmul(self.right[i][e].t(), xl))",
            "        v = torch.tanh(torch.matmul(self.core[i][e], v))",
            "        u = torch.matmul(self.left[i][e], v) + self.shift[i]",
            "        outs.append((x0 * u).squeeze(2))",
            "    outs = torch.stack(outs, 2)",
            "    xl = torch.matmul(outs, torch.stack(scores, 1).softmax(1)) + xl",
            "h = xl.squeeze(2)",
        ],
    ),
    "field-aware": Interaction(
        True,
        _one_a_pair,
        lambda f, d: [f"self.aware = nn.Parameter(torch.randn({f}, {f}, {d}))"],
        lambda f, d: [
            "aware = z.unsqueeze(1) * self.aware",
            *_loop("(aware[:, i, j] * aware[:, j, i]).sum(-1, keepdim=True)"),
            "h = torch.cat(pairs, dim=1)",
        ],
        least=2,
    ),
    "matrixed-pairs": Interaction(
        True,
        lambda f, d: 1,
        lambda f, d: [f"self.matrices = nn.Parameter(torch.randn({_pairs(f)}, {d}, {d}))"],
        lambda f, d: [
            *_two(f),
            "left = torch.matmul(z.index_select(1, li).unsqueeze(2), self.matrices).squeeze(2)",
            "h = (left * z.index_select(1, lj)).sum(-1).sum(1, keepdim=True)",
        ],
        least=2,
    ),
    "compressed-layers": Interaction(
        True,
        lambda f, d: 4,
        lambda f, d: [f"self.c0 = nn.Conv1d({f * f}, 4, 1)", f"self.c1 = nn.Conv1d({2 * f}, 2, 1)"],
        lambda f, d: [
            "outer = (z.unsqueeze(2) * z.unsqueeze(1)).view(z.size(0), -1, z.size(2))",
            "up, now = torch.split(self.c0(outer), 2, dim=1)",
            "outer = (z.unsqueeze(2) * now.unsqueeze(1)).view(z.size(0), -1, z.size(2))",
            "h = torch.cat([up, self.c1(outer)], dim=1).sum(2)",
        ],
    ),
    "shape-flag": Interaction(
        False,
        lambda f, d: d,
        _none,
        lambda f, d: ["h = flat", "if h.dim() == 2 and h.shape[1] > 2:", "    h = h * 2 - 1"],
    ),
}
