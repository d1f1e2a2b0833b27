"""Lookups of random models that take more than one call, each as code that a user would write.

Each makes ``e{k}`` (B, d) from a table ``t`` (rows, d) of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _none(k: int, rows: int, d: int) -> list[str]:
    return []


@dataclass(frozen=True)
class Form:
    """``given``: its inputs. c: an id per row; s: three ids per row; n: how many of these count; w:
    a weight for each of them. Input c of lookup 2 is named ``c2``. TABLE in a layer is ``t``.
    """

    given: str
    lines: Callable[[int, str, int], list[str]]  # k, the table, d
    layers: Callable[[int, int, int], list[str]] = _none  # k, rows, d
    lookups: int = 1
    whole: bool = False  # reads the table as a matrix too


def _attended(scores: list[str], activation: str) -> Form:
    """Target attention (DIN): each row of the sequence is weighted by its score for the target."""
    return Form(
        "cs",
        lambda k, t, d: [
            f"q{k}, u{k} = {t}(c{k}), {t}(s{k})",
            f"v{k} = q{k}.unsqueeze(1).expand(-1, u{k}.shape[1], -1)",
            f"a{k} = torch.cat([v{k}, u{k}, v{k} - u{k}, v{k} * u{k}], dim=-1)",
            f"a{k} = self.attend{k}(a{k}).squeeze(-1)",
            *(line.replace("#", str(k)) for line in scores),
            f"e{k} = torch.bmm(a{k}.unsqueeze(1), u{k}).squeeze(1)",
        ],
        lambda k, rows, d: [
            f"self.attend{k} = nn.Sequential(nn.Linear({4 * d}, 3), nn.{activation}(),"
            " nn.Linear(3, 1))"
        ],
        lookups=2,
    )


def _recurrent(kind: str, last: str) -> Form:
    return Form(
        "s",
        lambda k, t, d: [f"r{k}, n{k} = self.cell{k}({t}(s{k}))", f"e{k} = {last.format(k=k)}"],
        lambda k, rows, d: [f"self.cell{k} = nn.{kind}({d}, {d}, batch_first=True)"],
    )


def _plain(line: str, given: str = "c", whole: bool = False, lookups: int = 1) -> Form:
    return Form(
        given,
        lambda k, t, d: [f"e{k} = " + line.replace("#", str(k)).replace("T", t)],
        whole=whole,
        lookups=lookups,
    )


_BY_LENGTH = "m{k} = (torch.arange(s{k}.shape[1]).unsqueeze(0) < n{k}.unsqueeze(1)).float()"


MORE: dict[str, Form] = {
    "target-sum": _attended(["a# = a# * (s# != 0).float()"], "PReLU"),
    "target-softmax": _attended(
        [
            "a# = torch.softmax(a#.masked_fill(s# == 0, -1e9), dim=-1)",
            "a# = F.dropout(a#, 0.2, self.training)",
        ],
        "Sigmoid",
    ),
    "gru": _recurrent("GRU", "n{k}[-1]"),
    "gru-mean": _recurrent("GRU", "r{k}.mean(dim=1)"),
    "lstm": _recurrent("LSTM", "n{k}[0].squeeze(0)"),
    "length-mean": Form(
        "sn",
        lambda k, t, d: [
            _BY_LENGTH.format(k=k),
            f"e{k} = ({t}(s{k}) * m{k}.unsqueeze(2)).sum(dim=1)",
            f"e{k} = e{k} / n{k}.unsqueeze(1).clamp(min=1)",
        ],
    ),
    "length-product": Form(
        "sn",
        lambda k, t, d: [
            _BY_LENGTH.format(k=k),
            f"e{k} = torch.matmul(m{k}.unsqueeze(1), {t}(s{k})).squeeze(1)",
        ],
    ),
    "last": Form(
        "sn",
        lambda k, t, d: [
            f"u{k} = {t}(s{k})",
            f"e{k} = u{k}[torch.arange(u{k}.shape[0]), n{k} - 1]",
        ],
    ),
    "gathered": Form(
        "sn",
        lambda k, t, d: [
            f"u{k} = {t}(s{k})",
            f"i{k} = (n{k} - 1).view(-1, 1, 1).expand(-1, 1, u{k}.size(2))",
            f"e{k} = u{k}.gather(1, i{k}).squeeze(1)",
        ],
    ),
    "max": _plain("T(s#).max(dim=1)[0]", "s"),
    "sum": _plain("T(s#).sum(-2)", "s"),
    "weighed": _plain("(T(s#) * w#.unsqueeze(-1)).sum(1)", "sw"),
    "functional-bag": _plain("F.embedding_bag(s#, T.weight, mode='mean')", "s"),
    "self-attended": Form(
        "s",
        lambda k, t, d: [
            f"u{k} = {t}(s{k})",
            f"a{k} = torch.softmax(u{k} @ self.query{k}, dim=1)",
            f"e{k} = (a{k}.unsqueeze(-1) * u{k}).sum(1)",
        ],
        lambda k, rows, d: [f"self.query{k} = nn.Parameter(torch.randn({d}))"],
    ),
    "shifted": Form(
        "c",
        lambda k, t, d: [f"e{k} = {t}((c{k} + self.shift{k}) % {t}.num_embeddings)"],
        lambda k, rows, d: [f"self.register_buffer('shift{k}', torch.tensor({rows - 1}))"],
    ),
    "indexed": _plain("T.weight[c#]"),
    "from-the-end": _plain("T.weight[c# - T.num_embeddings]"),
    "detached": _plain("T(c#).detach()"),
    "half-detached": _plain("T(c#) - 0.5 * T(c#).detach()", lookups=2),
    "no-grad": Form("c", lambda k, t, d: ["with torch.no_grad():", f"    e{k} = {t}(c{k}) * 2.0"]),
    "normal": _plain("F.normalize(T(c#) + 1.0, dim=-1)"),
    "scored": Form(
        "c",
        lambda k, t, d: [
            f"a{k} = torch.softmax({t}(c{k}) @ {t}.weight.t(), dim=-1)",
            f"e{k} = a{k} @ {t}.weight",
        ],
        whole=True,
    ),
    "convolved": Form(
        "c",
        lambda k, t, d: [
            f"g{k} = torch.mm(self.graph{k}, {t}.weight)",
            f"e{k} = ((g{k} + {t}.weight) / 2)[c{k}]",
        ],
        lambda k, rows, d: [
            f"self.register_buffer('graph{k}', torch.rand({rows}, {rows}) / {rows})"
        ],
        lookups=0,
        whole=True,
    ),
    "tied": Form(
        "c",
        lambda k, t, d: [f"e{k} = self.tied{k}(c{k})"],
        lambda k, rows, d: [
            f"self.tied{k} = nn.Embedding({rows}, {d})",
            f"self.tied{k}.weight = TABLE.weight",
        ],
    ),
    "listed": Form(
        "c",
        lambda k, t, d: [f"e{k} = {t}(c{k}) * self.listed{k}[0] + self.listed{k}[1]"],
        lambda k, rows, d: [
            f"self.listed{k} = [nn.Parameter(torch.rand({d})) for _ in range(2)]",
            f"self.kept{k} = nn.ParameterList(self.listed{k})",
        ],
    ),
    "quotient": Form(
        "c",
        lambda k, t, d: [
            f"e{k} = {t}(c{k}) * self.rest{k}(torch.remainder(c{k}, 3)) + self.whole{k}(c{k} // 3)"
        ],
        lambda k, rows, d: [
            f"self.rest{k}, self.whole{k} = nn.Embedding(3, {d}), nn.Embedding({rows}, {d})"
        ],
        lookups=3,
    ),
    "hashed": Form(
        "c",
        lambda k, t, d: [
            f"g{k} = torch.remainder((c{k} * 2654435761) ^ (c{k} >> 1), {t}.num_embeddings)",
            f"e{k} = {t}(g{k}) + {t}((c{k} * 31 + 7) % {t}.weight.shape[0])",
        ],
        lookups=2,
    ),
    "as-columns": _plain("T(c#.unsqueeze(1)).squeeze(1)"),
    "twice-written": Form("c", lambda k, t, d: [f"e{k} = {t}(c{k})", f"e{k} *= {d} ** 0.5"]),
    "selected": _plain("torch.index_select(T.weight, 0, c#)"),
    "taken": _plain("torch.take_along_dim(T.weight, c#.unsqueeze(-1), dim=0)", whole=True),
    "one-hot": _plain("F.one_hot(c#, T.num_embeddings).to(T.weight.dtype) @ T.weight", whole=True),
    "missing": Form(
        "c",
        lambda k, t, d: [
            f"e{k} = torch.where((c{k} == 0).unsqueeze(-1), self.missing{k}, {t}(c{k}))"
        ],
        lambda k, rows, d: [f"self.missing{k} = nn.Parameter(torch.zeros({d}))"],
    ),
    "projected": Form(
        "c",
        lambda k, t, d: [f"e{k} = F.linear({t}(c{k}), self.wide{k}) + {t}(c{k})"],
        lambda k, rows, d: [f"self.wide{k} = nn.Parameter(torch.randn({d}, {d}) * 0.5)"],
        lookups=2,
    ),
    "decayed": Form(
        "sw",
        lambda k, t, d: [
            f"a{k} = torch.exp(-w{k}.abs()) * (s{k} > 0)",
            f"e{k} = torch.einsum('bl,bld->bd', a{k}, {t}(s{k}))",
            f"e{k} = e{k} / a{k}.sum(1, True).clamp_min(0.1)",
        ],
    ),
    "masked-max": Form(
        "s",
        lambda k, t, d: [
            f"u{k} = {t}(s{k}).masked_fill((s{k} == 0).unsqueeze(-1), -1e4)",
            f"e{k} = u{k}.amax(dim=1).clamp(min=-3.0)",
        ],
    ),
    "convolved-steps": Form(
        "s",
        lambda k, t, d: [
            f"u{k} = F.pad({t}(s{k}).transpose(1, 2), (1, 0))",
            f"e{k} = F.relu(self.steps{k}(u{k})).transpose(1, 2)[:, -1]",
        ],
        lambda k, rows, d: [f"self.steps{k} = nn.Conv1d({d}, {d}, 2)"],
    ),
    "heads-over-steps": Form(
        "s",
        lambda k, t, d: [
            f"p{k} = (s{k} == 0) & (torch.arange(3) > 0)",
            f"u{k} = {t}(s{k}) + self.place{k}(torch.arange(s{k}.shape[1]))",
            f"u{k} = self.over{k}(u{k}, u{k}, u{k}, key_padding_mask=p{k})[0]",
            f"e{k} = u{k}.mean(1)",
        ],
        lambda k, rows, d: [
            f"self.place{k} = nn.Embedding(3, {d})",
            f"self.over{k} = nn.MultiheadAttention({d}, 1, batch_first=True)",
        ],
        lookups=2,
    ),
    "routed": Form(  # interests by dynamic routing (MIND), the nearest to a target
        "cs",
        lambda k, t, d: [
            f"u{k}, q{k} = {t}(s{k}), {t}(c{k})",
            f"b{k} = self.routing{k}.repeat(u{k}.size(0), 1, 1)",
            "for step in range(2):",
            f"    i{k} = torch.softmax(b{k}, dim=1) @ u{k}",
            f"    i{k} = i{k} / (1 + i{k}.pow(2).sum(-1, keepdim=True))",
            f"    b{k} = b{k} + i{k}.detach() @ u{k}.detach().transpose(1, 2)",
            f"a{k} = torch.softmax((i{k} * q{k}.unsqueeze(1)).sum(-1), dim=-1)",
            f"e{k} = torch.einsum('bk,bkd->bd', a{k}, i{k})",
        ],
        lambda k, rows, d: [f"self.register_buffer('routing{k}', torch.rand(1, 2, 3))"],
        lookups=2,
    ),
    "gated-steps": Form(  # a cell of gates by hand, its state kept where the sequence ends
        "sn",
        lambda k, t, d: [
            f"u{k} = {t}(s{k})",
            f"e{k} = torch.zeros_like(u{k}[:, 0])",
            f"for step in range(u{k}.size(1)):",
            f"    r{k}, g{k} = self.now{k}(u{k}[:, step]).chunk(2, -1)",
            f"    r{k} = torch.tanh(r{k} + self.then{k}(e{k}))",
            f"    on{k} = (step < n{k}).unsqueeze(-1)",
            f"    e{k} = torch.where(on{k}, e{k} + torch.sigmoid(g{k}) * (r{k} - e{k}), e{k})",
        ],
        lambda k, rows, d: [
            f"self.now{k} = nn.Linear({d}, {2 * d})",
            f"self.then{k} = nn.Linear({d}, {d}, bias=False)",
        ],
    ),
    "scaled-table": Form(
        "c",
        lambda k, t, d: [f"e{k} = self.own{k}(c{k}) + {t}(c{k})"],
        lambda k, rows, d: [f"self.own{k} = Scaled({rows}, {d})"],
        lookups=2,
    ),
}
