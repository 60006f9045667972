"""Lossless verification of drafts: the law the target samples from, and which drafts it keeps.

One code path for baseline and speculative decoding: a step without drafts is a
verification of zero drafts. Exact for any temperature, top-k and top-p and for any
proposal with known probabilities:

* a draft x with proposal probability q(x) is kept with probability min(1, p(x)/q(x));
* at the first rejection a token is drawn from max(0, p - q), normalised;
* if every draft is kept, a bonus token is drawn from p.

References: Leviathan et al., arXiv 2211.17192, algorithm 1 and appendix A.1;
Chen et al., arXiv 2302.01318, algorithm 2. Greedy decoding is the limit in which the
law is one-hot. Positions are judged one after another across the batch, so that each
emitted token costs one law whether it was drafted or not: the arms pay alike.

Probabilities are float64: the sums over a vocabulary must not move a sampled law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specnb.drafters.base import Draft

_TOP_P_FIRST_TRY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLaw:
    """How logits become the law sampled from. Temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the law is one-hot at the largest logit (lowest id among equals)."""
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The law for each row of logits.

        Temperature first, then top-k, then top-p on what is left, as vLLM and transformers do.
        Ties at the top-k border are kept; ties inside the nucleus are ordered by token id.

        Parameters
        ----------
        logits
            Raw target logits.  # shape: [rows, vocabulary]

        Returns
        -------
        torch.Tensor
            float64 probabilities, each row sums to 1.  # shape: [rows, vocabulary]
        """
        if self.greedy:
            law = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
            return law.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        scaled = logits.double() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            border = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < border, -torch.inf)
        law = scaled.softmax(-1)
        if self.top_p < 1:
            law = _nucleus(law, self.top_p)
        return law


def _nucleus(law: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the smallest set of most likely tokens whose mass reaches top_p, and renormalises.

    Sorting a whole vocabulary costs more than a small model's forward; the nucleus nearly always
    lies inside the first few hundred tokens, so those are tried first and the full sort is the fallback.
    """
    width = law.shape[-1]
    size = min(_TOP_P_FIRST_TRY, width)
    values, ids = law.topk(size, dim=-1)
    # One step past the border must be visible, or a tie at the border could be cut wrongly.
    if size < width and bool(((values.sum(-1) < top_p) | (values[:, -1] >= _border(values, top_p))).any()):
        values, ids = law.sort(dim=-1, descending=True, stable=True)
    else:
        # topk leaves equal values in any order: sort the few by (value, id) for a law that is reproducible.
        order = ids.argsort(dim=-1, stable=True)
        values, ids = values.gather(-1, order), ids.gather(-1, order)
        order = values.argsort(dim=-1, descending=True, stable=True)
        values, ids = values.gather(-1, order), ids.gather(-1, order)
    before = values.cumsum(-1) - values
    kept = values.masked_fill(before >= top_p, 0.0)
    kept[:, 0] = values[:, 0]
    out = torch.zeros_like(law).scatter_(-1, ids, kept)
    return out / out.sum(-1, keepdim=True)


def _border(values: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest kept value of each row, given values sorted downwards."""
    before = values.cumsum(-1) - values
    inside = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return values.gather(-1, inside - 1).squeeze(-1)


def draw(law: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """One token a row by inverting the cumulative law in token-id order.

    Parameters
    ----------
    law
        Non-negative weights, normalised here.  # shape: [rows, vocabulary], float64
    uniforms
        One number in [0, 1) a row.

    Returns
    -------
    list of int
        Token ids; a token of weight 0 is never returned.
    """
    cumulative = law.cumsum(-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=law.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may land past the last token of positive weight.
    last = law.shape[-1] - 1 - (law > 0).flip(-1).int().argmax(-1)
    found: list[int] = torch.minimum(tokens, last).tolist()
    return found


@dataclass(slots=True, kw_only=True)
class Judgement:
    """What verification decided for one request in one step.

    `tokens` are the accepted drafts and then the recovered or bonus token, before any stop or
    limit cuts them. The lists below are aligned with `tokens`, except `draft_target_prob` and
    `argmax_rank`, which have one entry for each draft position reached.
    """

    num_accepted: int
    tokens: list[int]
    cdf_low: list[float | None]
    cdf_high: list[float | None]
    draft_target_prob: list[float]
    argmax_rank: list[int | None]


def judge(
    logits: torch.Tensor,
    drafts: Sequence[Draft],
    law: SamplingLaw,
    rngs: Sequence[np.random.Generator],
) -> list[Judgement]:
    """Which drafts each request keeps and the token that follows them.

    Parameters
    ----------
    logits
        Target logits; row b, column i follows the i-th draft of request b (column 0 follows its
        last verified token). Columns past a request's own drafts are ignored.
        # shape: [batch, 1 + longest draft, vocabulary]
    drafts
        One draft a request; it may be empty.
    law
        The law the target samples from.
    rngs
        One generator a request, so that its tokens don't depend on its neighbours in the batch.

    Returns
    -------
    list of Judgement
        In the order of `drafts`.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.
    """
    return _judge_greedy(logits, drafts) if law.greedy else _judge_sampled(logits, drafts, law, rngs)


def _judge_greedy(logits: torch.Tensor, drafts: Sequence[Draft]) -> list[Judgement]:
    picks: list[list[int]] = logits.argmax(-1).tolist()
    judgements = []
    for row, draft in zip(picks, drafts, strict=True):
        accepted = 0
        while accepted < len(draft) and row[accepted] == draft.token_ids[accepted]:
            accepted += 1
        reached = min(accepted + 1, len(draft))
        judgements.append(
            Judgement(
                num_accepted=accepted,
                tokens=row[: accepted + 1],
                cdf_low=[None] * (accepted + 1),
                cdf_high=[None] * (accepted + 1),
                draft_target_prob=[float(position < accepted) for position in range(reached)],
                argmax_rank=[draft.rank_of(position, row[position]) for position in range(reached)],
            )
        )
    return judgements


def _judge_sampled(
    logits: torch.Tensor, drafts: Sequence[Draft], law: SamplingLaw, rngs: Sequence[np.random.Generator]
) -> list[Judgement]:
    judgements = [
        Judgement(num_accepted=0, tokens=[], cdf_low=[], cdf_high=[], draft_target_prob=[], argmax_rank=[])
        for _ in drafts
    ]
    alive = list(range(len(drafts)))
    for position in range(logits.shape[1]):
        if not alive:
            break
        rows = logits[alive, position]
        target = law.probabilities(rows)
        ids = torch.arange(target.shape[-1], device=target.device)
        drafting = [row for row, index in enumerate(alive) if position < len(drafts[index])]
        rejected: dict[int, None] = {}
        if drafting:
            drafted = [drafts[alive[row]].token_ids[position] for row in drafting]
            probs: list[float] = target[drafting, drafted].tolist()
            best: list[int] = rows[drafting].argmax(-1).tolist()
            for row, prob, pick in zip(drafting, probs, best, strict=True):
                draft, judgement = drafts[alive[row]], judgements[alive[row]]
                judgement.draft_target_prob.append(prob)
                judgement.argmax_rank.append(draft.rank_of(position, pick))
                # u in [0, 1): u * q < p keeps with probability min(1, p/q) and never keeps p = 0.
                if not rngs[alive[row]].random() * draft.prob_of(position) < prob:
                    rejected[row] = None
        pending = [
            row for row, index in enumerate(alive) if row in rejected or position >= len(drafts[index])
        ]
        chosen = [
            drafts[index].token_ids[position] if position < len(drafts[index]) else -1 for index in alive
        ]
        if pending:
            residual = target[pending].clone()
            for place, row in enumerate(pending):
                if row in rejected:
                    drafts[alive[row]].subtract_from(residual[place], position)
                    if not bool(residual[place].any()):
                        # p equals q up to rounding: the rejection itself was rounding, so p is the law.
                        residual[place] = target[row]
            picked = draw(residual, [rngs[alive[row]].random() for row in pending])
            for row, token in zip(pending, picked, strict=True):
                chosen[row] = token
        picks = torch.tensor(chosen, device=target.device)[:, None]
        mass = target.gather(-1, picks)
        ahead = (target > mass) | ((target == mass) & (ids < picks))
        low: list[float] = (target * ahead).sum(-1).tolist()
        own: list[float] = mass[:, 0].tolist()
        ended = set(pending)
        for row, index in enumerate(alive):
            judgement = judgements[index]
            judgement.tokens.append(chosen[row])
            judgement.cdf_low.append(low[row])
            judgement.cdf_high.append(low[row] + own[row])
            judgement.num_accepted += row not in ended
        alive = [index for row, index in enumerate(alive) if row not in ended]
    return judgements


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """The target's own view of emitted tokens: temperature 1, no truncation; one entry a token."""

    logprob: list[float]
    entropy_nats: list[float]
    margin_nats: list[float]


def token_facts(logits: torch.Tensor, tokens: Sequence[int]) -> TokenFacts:
    """Log probability, entropy and top-1/top-2 gap of each token under the target's untruncated law.

    Parameters
    ----------
    logits
        Target logits that each token followed from.  # shape: [tokens, vocabulary]
    tokens
        Emitted token ids.

    Returns
    -------
    TokenFacts
        In nats; entropy in [0, log vocabulary], margin >= 0.
    """
    values = logits.float()
    chosen = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]
    top = values.topk(2, dim=-1).values
    weights = (values - top[:, :1]).exp_()
    mass = weights.sum(-1)
    log_mass = top[:, 0] + mass.log()
    # Masked vocabulary entries (-inf) have weight 0 and must not make 0 * -inf.
    mean = weights.mul_(values.clamp(min=-1e30)).sum(-1) / mass
    return TokenFacts(
        logprob=(chosen - log_mass).clamp(max=0.0).tolist(),
        entropy_nats=(log_mass - mean).clamp(min=0.0).tolist(),
        margin_nats=(top[:, 0] - top[:, 1]).tolist(),
    )
