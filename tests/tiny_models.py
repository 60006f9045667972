"""Tiny targets with random weights and real tokenizers, made on the spot."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from specnb.config import Cell, Plan, plan_cells, plan_from_dict
from specnb.engines.base import CellContext, PlannedRequest, request_seed
from specnb.engines.transformers import TransformersEngine
from specnb.workloads import Prompt

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def save_tiny_target(
    folder: Path, config: Any | None = None, *, vocab_size: int = 8, sharpness: float = 1.0, seed: int = 0
) -> Path:
    """Saves a random model whose vocabulary is `t0 t1 ...` (t0 ends an answer), one word a token."""
    torch.manual_seed(seed)
    config = config or LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Fresh weights give a nearly flat law; a steeper head gives one worth testing.
        model.get_output_embeddings().weight.mul_(sharpness)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(config.get_text_config().vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0", unk_token="t1")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def tiny_plan(folder: Path, *, concurrency: int = 3, device: str = "cpu", **sampling: Any) -> Plan:
    """Baseline and prompt lookup (K = 4) on one saved target, one sampling setting."""
    return plan_from_dict(
        {
            "name": "tiny",
            "target": {"model": str(folder), "dtype": "float32"},
            "engine": {"kind": "transformers", "device": device, "endpoint": "completions"},
            "arms": [
                {"name": "baseline"},
                {"name": "lookup", "speculative": {"method": "ngram", "num_speculative_tokens": 4}},
            ],
            "workload": {"set": "builtin-en", "tiers": ["low"]},
            "sampling": [{"name": "s", "temperature": 0.0, "max_tokens": 24, **sampling}],
            "load": {"concurrency": [concurrency]},
        }
    )


def planned(texts: list[str], *, max_tokens: int = 24, arm: str = "") -> list[PlannedRequest]:
    """One request a text, each with its own seed."""
    return [
        PlannedRequest(
            request_id=f"{arm}.{number:05d}",
            prompt=Prompt(id=f"p{number}", tier="low", length="short", text=text),
            max_tokens=max_tokens,
            seed=request_seed(arm, number),
        )
        for number, text in enumerate(texts)
    ]


def run_arm(engine: TransformersEngine, arm: int, requests: list[PlannedRequest]) -> dict[str, pl.DataFrame]:
    """Tables of one arm's cell; the clock counts its own readings."""
    cell: Cell = plan_cells(engine.plan)[arm]
    ticks = itertools.count()
    return engine.run_cell(cell, requests, CellContext(run_id="r", clock=lambda: float(next(ticks))))


TEXTS = [
    "t1 t2 t3 t1 t2 t3 t1",
    "t4 t5",
    "t6 t7 t6 t7 t6 t7 t6 t7 t6",
    "t2",
    "t3 t3 t3 t3 t3 t3 t3 t3 t3 t3 t3 t3",
    "t7 t1 t5 t7 t1",
    "t5 t4 t3 t2 t1 t5 t4",
]

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen3, sliding": lambda: transformers.Qwen3Config(
        **SMALL, head_dim=16, sliding_window=6, use_sliding_window=True, max_window_layers=2
    ),
    "mistral, sliding": lambda: transformers.MistralConfig(**SMALL, sliding_window=6, head_dim=8),
    "gemma2, softcapped": lambda: transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=0
    ),
    "gpt-oss, sinks": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    "granite, scaled": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=4.0),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "phi3": lambda: transformers.Phi3Config(**SMALL),
}
