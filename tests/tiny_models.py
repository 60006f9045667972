"""Tiny targets with random weights and real tokenizers, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

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
