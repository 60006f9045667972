"""Tiny targets with random weights and real tokenizers, made on the spot."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import scipy.stats
import torch
import transformers
from safetensors.torch import save_file
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


def drafter_config(target_folder: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a small drafter for the target; a change of None removes the key.

    Keys of `dflash_config` are changed by their own names. Two layers, head width 8, both groups of
    heads, block of 8, convolution and selector on, no tapped layer is the target's last one.
    """
    target = transformers.AutoConfig.from_pretrained(target_folder).get_text_config()
    layers, vocabulary = target.num_hidden_layers, target.vocab_size
    own = {
        "block_size": 8,
        "mask_token_id": vocabulary - 1,
        "target_layer_ids": sorted({0, (layers - 1) // 2, max(layers - 2, 0)}),
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": min(16, vocabulary),
    }
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "is_causal": False,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention"] * changes.get("num_hidden_layers", 2),
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_window_layers": changes.get("num_hidden_layers", 2),
        "vocab_size": vocabulary,
        "num_target_layers": layers,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    if changes.get("architectures") == ["DFlashDraftModel"]:
        own = {key: own[key] for key in ("block_size", "mask_token_id", "target_layer_ids")}
    for key, value in changes.items():
        (own if key in own or key.startswith(("conv_", "selector_")) else config)[key] = value
    own = {key: value for key, value in own.items() if value is not None}
    return {**{key: value for key, value in config.items() if value is not None}, "dflash_config": own}


def drafter_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors in the published names and shapes; convolution and selector far from neutral."""
    own = config["dflash_config"]
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width

    def normal(*shape: int, scale: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(shape, generator=generator) * scale

    def near_one(size: int) -> torch.Tensor:
        return 1 + normal(size, scale=0.2)

    tensors = {
        "fc.weight": normal(hidden, len(own["target_layer_ids"]) * hidden),
        "hidden_norm.weight": near_one(hidden),
        "norm.weight": near_one(hidden),
    }
    if own.get("selector_rank"):
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = normal(
                config["vocab_size"], own["selector_rank"], scale=1
            )
        tensors["candidate_selector.hidden_projection.weight"] = normal(own["selector_rank"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (queries, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, queries)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            tensors[f"{prefix}.{name}.weight"] = normal(*shape)
            if config["attention_bias"] and name.startswith("self_attn"):
                tensors[f"{prefix}.{name}.bias"] = normal(shape[0], scale=0.3)
        for name, size in (
            ("self_attn.q_norm", width),
            ("self_attn.k_norm", width),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            tensors[f"{prefix}.{name}.weight"] = near_one(size)
        if own.get("conv_kernel_size"):
            taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                base = normal(2, taps, hidden, scale=0.3)
                base[:, 0] += 1
                tensors[f"{prefix}.{name}.base_kernel"] = base
                tensors[f"{prefix}.{name}.kernel_projection.weight"] = normal(
                    2 * taps * groups, hidden, scale=0.1
                )
    return tensors


def save_tiny_drafter(
    folder: Path, target_folder: Path, *, seed: int = 0, num_shards: int = 1, **changes: Any
) -> Path:
    """Saves a random drafter for the target in the published format; `changes` as in `drafter_config`.

    Plain DFlash: `architectures=["DFlashDraftModel"]`. Without convolution: `conv_kernel_size=None`.
    Without selector: `selector_rank=None`. `dtype` sets the tensors' type, too.
    """
    config = drafter_config(target_folder, **changes)
    dtype = getattr(torch, config["dtype"])
    tensors = {name: value.to(dtype) for name, value in drafter_tensors(config, seed=seed).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
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


def dflash_plan(
    folder: Path,
    *arms: dict[str, Any],
    concurrency: int = 3,
    dtype: str = "float32",
    device: str = "cpu",
    **sampling: Any,
) -> Plan:
    """Baseline (arm 0) and one arm for each block of keys, K = 7 unless it says otherwise."""
    blocks = [{"method": "dflash", "num_speculative_tokens": 7, **arm} for arm in arms]
    return plan_from_dict(
        {
            "name": "tiny",
            "target": {"model": str(folder), "dtype": dtype},
            "engine": {"kind": "transformers", "device": device, "endpoint": "completions"},
            "arms": [
                {"name": "baseline"},
                *({"name": f"arm{number}", "speculative": block} for number, block in enumerate(blocks, 1)),
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


@torch.inference_mode()
def triple_law_p_value(
    model: Any, prompt_ids: list[int], answers: list[list[int]], *, temperature: float
) -> float:
    """Chi-square p-value of answers' first three tokens against the model's law by enumeration.

    The first token's counts are taken as seen; rare pairs after it are pooled. Small vocabularies only.
    """
    counts = Counter(tuple(answer[:3]) for answer in answers)
    firsts = Counter(answer[0] for answer in answers)
    vocabulary = model.config.vocab_size
    observed, expected = [0.0], [0.0]
    for first, seen in firsts.items():
        batch = torch.tensor([[*prompt_ids, first, second] for second in range(vocabulary)])
        logits = model(input_ids=batch).logits.double()
        law = (logits[0, -2] / temperature).softmax(-1).tolist()
        after = (logits[:, -1] / temperature).softmax(-1).tolist()
        for second, third in itertools.product(range(vocabulary), repeat=2):
            mass = seen * law[second] * after[second][third]
            count = counts[(first, second, third)]
            if mass >= 5:
                observed.append(count)
                expected.append(mass)
            else:
                observed[0] += count
                expected[0] += mass
    # Each first token's total is given, so it costs one degree of freedom.
    cells = len(observed) - 1 + (expected[0] > 0) - len(firsts)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)
    return float(scipy.stats.chi2.sf(statistic, cells))


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
