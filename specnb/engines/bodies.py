"""Request bodies of OpenAI-compatible servers, with every sampling parameter written out.

A parameter that is left out takes the server's default, which model authors and versions change; so
everything that moves the law that tokens are drawn from is sent, neutral values included. Separate from the
client so that a run can record what it sent without sending it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specnb.config import Sampling

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOptions:
    """What a request asks for beside sampling.

    Parameters
    ----------
    return_token_ids
        Ask for the ids of each chunk's tokens and of the prompt (vLLM).
    continuous_usage
        Ask for the running token count in every chunk, for servers that don't return ids.
    chat_template_kwargs
        Arguments of the server's chat template (`enable_thinking`); chat only.
    """

    return_token_ids: bool = False
    continuous_usage: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def sampling_fields(sampling: Sampling, *, max_tokens: int, seed: int) -> dict[str, Any]:
    """Every sampling field of a request, neutral ones included, as it is sent and should be recorded.

    `top_k` -1 switches it off on vLLM, SGLang and llama.cpp; `ignore_eos` is there only when it is on.
    """
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "max_tokens": max_tokens,
        "n": 1,
    }
    if sampling.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def chat_body(
    model: str,
    messages: Sequence[Mapping[str, str]],
    sampling: Sampling,
    *,
    max_tokens: int,
    seed: int,
    options: BodyOptions | None = None,
) -> bytes:
    """JSON body of a streamed chat completion.

    The cap goes out as `max_completion_tokens` and as `max_tokens`: servers know one or the other.

    Parameters
    ----------
    model
        The served model's name.
    messages
        The chat: `role` and `content` each.
    sampling
        The plan's setting; its `max_tokens` and `seed` give way to the request's own.
    max_tokens, seed
        Cap on new tokens, and seed, of this request.
    options
        What else to ask for.
    """
    options = options or BodyOptions()
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        **sampling_fields(sampling, max_tokens=max_tokens, seed=seed),
        "max_completion_tokens": max_tokens,
    }
    if options.chat_template_kwargs:
        body["chat_template_kwargs"] = dict(options.chat_template_kwargs)
    return _encoded(body, options)


def completions_body(
    model: str,
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    seed: int,
    options: BodyOptions | None = None,
) -> bytes:
    """JSON body of a streamed completion of a raw prompt: text, or token ids.  # shape: [num_prompt_tokens]

    Parameters as in `chat_body`; `chat_template_kwargs` have no meaning here and are not sent.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        **sampling_fields(sampling, max_tokens=max_tokens, seed=seed),
    }
    return _encoded(body, options or BodyOptions())


def _encoded(body: dict[str, Any], options: BodyOptions) -> bytes:
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if options.continuous_usage:
        body["stream_options"]["continuous_usage_stats"] = True
    if options.return_token_ids:
        body["return_token_ids"] = True
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
