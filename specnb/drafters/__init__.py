"""Drafters of the in-process engine, by vLLM's method name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specnb.config import Speculative
from specnb.drafters.base import Draft, Drafter, Features
from specnb.drafters.checkpoints import Checkpoint, TargetShape, locate, open_checkpoint
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.errors import PlanError

if TYPE_CHECKING:
    from specnb.drafters.dflash2 import Target

__all__ = [
    "Draft",
    "Drafter",
    "Features",
    "PromptLookup",
    "TargetShape",
    "check_drafter",
    "make_drafter",
]

METHODS = ("ngram", "dflash")


def check_drafter(speculative: Speculative, shape: TargetShape | None, *, model: str | None = None) -> None:
    """Raises if an arm's `speculative` block can't be served for a target of this shape; reads no weights.

    Parameters
    ----------
    shape
        None if it is not known: then keys and checkpoint are checked by themselves.
    model
        Folder or hub id of the drafter, where that is not `speculative.model` itself.

    Raises
    ------
    PlanError
        An unknown method, or a key that the method does not take.
    EngineError
        The drafter's checkpoint is not whole or does not fit the target.
    """
    _check_keys(speculative)
    if speculative.method == "dflash":
        checkpoint = _open(speculative, model)
        if shape is not None:
            checkpoint.check_fit(shape, num_speculative_tokens=speculative.num_speculative_tokens)


def make_drafter(
    speculative: Speculative, *, target: Target | None = None, model: str | None = None
) -> Drafter:
    """The drafter that an arm's `speculative` block asks for.

    Parameters
    ----------
    target
        Needed by drafters that share the target's embedding and head.
    model
        As in `check_drafter`.

    Raises
    ------
    PlanError
        As in `check_drafter`, or the method needs a target.
    EngineError
        As in `check_drafter`, or the weights can't be read.
    """
    _check_keys(speculative)
    if speculative.method == "dflash":
        if target is None:
            raise PlanError(
                "speculative.method: dflash drafts from a target's hidden states; give the target"
            )
        from specnb.drafters.dflash2 import DFlash2

        return DFlash2(
            _open(speculative, model),
            target,
            num_speculative_tokens=speculative.num_speculative_tokens,
            draft_sample_method=speculative.draft_sample_method or "greedy",
            use_selector=(speculative.model_extra or {}).get("selector", True),
        )
    return PromptLookup(
        num_speculative_tokens=speculative.num_speculative_tokens,
        prompt_lookup_min=speculative.prompt_lookup_min or 1,
        prompt_lookup_max=speculative.prompt_lookup_max or 3,
    )


def _check_keys(speculative: Speculative) -> None:
    method, extra = speculative.method, speculative.model_extra or {}
    if method not in METHODS:
        raise PlanError(
            f"speculative.method: '{method}' is not available in the in-process engine "
            f"(it has {', '.join(METHODS)}); use engine.kind: vllm"
        )
    taken = {
        "ngram": {"prompt_lookup_min", "prompt_lookup_max"},
        "dflash": {"draft_sample_method", "selector", "revision"},
    }[method]
    optional = ("draft_sample_method", "rejection_sample_method", "prompt_lookup_min", "prompt_lookup_max")
    given = {*extra} | {key for key in optional if getattr(speculative, key) is not None}
    if method == "dflash" and speculative.rejection_sample_method == "standard":
        given.discard("rejection_sample_method")
    unknown = sorted(given - taken)
    if unknown:
        raise PlanError(f"speculative: method {method} takes no key '{unknown[0]}' in the in-process engine")
    if method == "ngram" and speculative.model is not None:
        raise PlanError("speculative.model: method ngram has no weights; remove the key")
    if method == "dflash" and speculative.model is None:
        raise PlanError("speculative.model: method dflash needs the folder or hub id of a drafter; add it")
    if not isinstance(extra.get("selector", True), bool):
        raise PlanError("speculative.selector: must be true or false")
    if not isinstance(extra.get("revision", ""), str):
        raise PlanError("speculative.revision: must be the name of a hub revision")


def _open(speculative: Speculative, model: str | None) -> Checkpoint:
    name = model or speculative.model or ""
    return open_checkpoint(locate(name, revision=(speculative.model_extra or {}).get("revision")))
