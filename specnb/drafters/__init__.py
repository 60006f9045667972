"""Drafters of the in-process engine, by vLLM's method name."""

from __future__ import annotations

from specnb.config import Speculative
from specnb.drafters.base import Draft, Drafter
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.errors import PlanError

__all__ = ["Draft", "Drafter", "PromptLookup", "make_drafter"]

METHODS = ("ngram",)


def make_drafter(speculative: Speculative) -> Drafter:
    """The drafter that an arm's `speculative` block asks for.

    Raises
    ------
    PlanError
        An unknown method, or a key that the method does not take.
    """
    if speculative.method != "ngram":
        raise PlanError(
            f"speculative.method: '{speculative.method}' is not available in the in-process engine "
            f"(it has {', '.join(METHODS)}); use engine.kind: vllm"
        )
    extra = sorted(
        {*(speculative.model_extra or {})}
        | {key for key in ("draft_sample_method", "rejection_sample_method") if getattr(speculative, key)}
    )
    if extra:
        raise PlanError(f"speculative: method ngram takes no key '{extra[0]}' in the in-process engine")
    if speculative.model is not None:
        raise PlanError("speculative.model: method ngram has no weights; remove the key")
    return PromptLookup(
        num_speculative_tokens=speculative.num_speculative_tokens,
        prompt_lookup_min=speculative.prompt_lookup_min or 1,
        prompt_lookup_max=speculative.prompt_lookup_max or 3,
    )
