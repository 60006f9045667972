"""A trained drafter as a published checkpoint: config.json, safetensors shards, facts and model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specnb.errors import StorageError
from specnb.provenance import file_sha256
from specnb.training.model import TrainedDrafter

FACTS = "training.json"
_CURVE_ROWS = 16
_CURVE_KEYS = (
    *("kind", "leg", "step", "seconds", "loss", "eal", "argmax_eal", "oracle_al", "recall", "step_ms"),
    *("position_top1", "position_recall", "position_selector"),
)
_CURVE_NOTE = (
    "Means since the line before (training) or over all held-out rows (validation). EAL: expected acceptance "
    "length of the selector's path, bonus token included; argmax: of the unary scores alone; oracle: if "
    "every token among the candidates were picked."
)
# What a continued checkpoint keeps of the training before it.
_CARRIED = (
    *("name", "label", "seed", "legs", "corpus", "hardware", "versions", "train_seconds", "gpu_hours"),
    *("curves", "results", "init"),
)


def publish(
    drafter: TrainedDrafter,
    folder: Path,
    *,
    facts: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    shard_bytes: int,
) -> Path:
    """Writes the drafter to `folder`, replacing what was there.

    Parameters
    ----------
    facts
        What `training.json` holds beside the digests, and the card shows.
    curves
        Metric lines of the training, oldest first.
    shard_bytes
        Most bytes of a file; a single tensor above it gets a file of its own.

    Raises
    ------
    StorageError
        The folder can't be written.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / "config.json").write_text(json.dumps(drafter.published_config, indent=1) + "\n")
        _save_shards(_tensors(drafter), aside, shard_bytes)
        digests = {path.name: file_sha256(path) for path in sorted(aside.iterdir())}
        content = {**facts, "curves": thinned(curves), "files": digests}
        (aside / FACTS).write_text(json.dumps(content, indent=1) + "\n")
        (aside / "README.md").write_text(model_card(content, drafter.published_config))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise StorageError(f"{folder}: can't be written ({error.strerror or error}); make room") from error
    return folder


def _tensors(drafter: TrainedDrafter) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in drafter.named_parameters()
    }


def _save_shards(tensors: Mapping[str, torch.Tensor], folder: Path, limit: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, value in tensors.items():
        size = value.numel() * value.element_size()
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = value
        used += size
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def earlier_trainings(folder: Path) -> list[dict[str, Any]]:
    """Facts of the trainings that a checkpoint went through, oldest first; none where it holds no facts."""
    path = folder / FACTS
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return [*found.get("earlier", []), {key: found[key] for key in _CARRIED if key in found}]


def thinned(curves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """At most 16 lines of each kind, evenly spread, the last one included; what a curve's table shows."""
    kept = []
    for kind in ("training", "validation"):
        found = [line for line in curves if line["kind"] == kind]
        stride = max(1, -(-len(found) // _CURVE_ROWS))
        chosen = found[::-1][::stride][::-1]
        kept += [{key: line[key] for key in _CURVE_KEYS if key in line} for line in chosen]
    return kept


def model_card(facts: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The checkpoint's README.md: what it is, what it was trained on, and what it reached."""
    own = config["dflash_config"]
    corpus = facts["corpus"]
    lines = [
        "---",
        "license: apache-2.0",
        "---",
        f"# {facts['label']} drafter for {facts['target']['label']}",
        "",
        "A speculative-decoding drafter, trained by specnb. Checkpoint format: "
        f"`{config['architectures'][0]}`, bfloat16; embeddings and vocabulary head are the target's.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {facts['num_parameters']:,} |",
        f"| layers, block size, drafts a step | {config['num_hidden_layers']}, {own['block_size']}, "
        f"{own['block_size'] - 1} |",
        f"| tapped target layers (0-based) | {', '.join(str(layer) for layer in own['target_layer_ids'])} |",
        f"| convolution | {_taps(own)} |",
        f"| path selector | {_selector(own)} |",
        f"| target sha256 | {facts['target']['sha256']} |",
        "",
        "## Training",
        "",
        f"Corpus: {corpus['training_rows']:,} conversations with {corpus['training_answer_tokens']:,} answer "
        f"tokens, all written by the target (seed {facts['seed']}); {corpus['held_out_rows']:,} more were "
        f"held out. Prompts that share {corpus['overlap']['words']} words in a row with "
        f"{', '.join(corpus['overlap']['workloads'])} were dropped: {corpus['overlap']['dropped_prompts']}.",
        "",
        "| kind of prompt | rows |",
        "|---|---|",
        *(f"| {kind} | {count:,} |" for kind, count in corpus["kinds"].items()),
        "",
        f"Hardware: {facts['hardware']['device']}. Optimiser time: {facts['train_seconds']:.0f} s; corpus: "
        f"{corpus['seconds']:.0f} s. Versions: "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
        + ".",
        "",
        "| leg | steps | seconds | rows x blocks a step | optimiser, lr | begun from |",
        "|---|---|---|---|---|---|",
    ]
    for number, leg in enumerate(facts["legs"]):
        settings = leg["settings"]
        rule = f"{settings['optimizer']}, {settings['lr']:g}"
        begun = "the leg before" if number else facts.get("init") or "random weights"
        lines.append(
            f"| {number} | {leg['steps']:,} | {leg['seconds']:.0f} "
            f"| {settings['rows']} x {settings['anchors']} | {rule} | {begun} |"
        )
    lines += ["", "## Curves", "", _CURVE_NOTE, "", *_curve_table(facts["curves"])]
    lines += ["", "## Results", "", *_results(facts)]
    for number, attempt in enumerate(facts.get("earlier", ())):
        seconds = f"{attempt['train_seconds']:.0f} s"
        lines += [
            "",
            f"## Earlier training {number}: {attempt['name']}, seed {attempt['seed']}, {seconds}",
            "",
        ]
        lines += [*_curve_table(attempt["curves"]), "", *_results(attempt)]
    return "\n".join(lines) + "\n"


def _taps(own: Mapping[str, Any]) -> str:
    if not own.get("conv_kernel_size"):
        return "none"
    return f"{own['conv_kernel_size']} taps, groups of {own['conv_group_size']} channels"


def _selector(own: Mapping[str, Any]) -> str:
    if not own.get("selector_rank"):
        return "none"
    return f"rank {own['selector_rank']}, top {own['selector_top_k']}"


def _curve_table(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "| leg | step | seconds | on | loss | EAL | argmax | oracle | recall | ms a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {line['leg']} | {line['step']} | {line['seconds']:.0f} | {line['kind']} | {line['loss']:.3f} "
            f"| {line['eal']:.3f} | {line['argmax_eal']:.3f} | {line['oracle_al']:.3f} "
            f"| {line['recall']:.3f} | {line.get('step_ms', '')} |"
            for line in curves
        ),
    ]


def _results(facts: Mapping[str, Any]) -> list[str]:
    lines = [
        "Acceptance at temperature 0, read off the target's greedy answers (bonus token included).",
        "",
        "| prompts | answers | steps | mean acceptance length | survival by position |",
        "|---|---|---|---|---|",
    ]
    for name, found in facts["results"].items():
        length = found["mean_acceptance_length"]
        survival = " ".join(f"{value:.3f}" for value in found["survival"] or ())
        shown = "no steps" if length is None else f"{length:.3f}"
        lines.append(f"| {name} | {found['answers']} | {found['steps']} | {shown} | {survival} |")
    return lines
