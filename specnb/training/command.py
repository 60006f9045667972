"""`specnb train`: all stages of a training plan, each skipped where its files are there already."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specnb.errors import PlanError, StorageError
from specnb.provenance import PACKAGES, git_sha, host_facts, package_versions
from specnb.training.corpus import KINDS, Corpus, build_corpus
from specnb.training.evaluate import acceptance
from specnb.training.export import earlier_trainings, publish
from specnb.training.loop import DrafterTraining, TeacherParts, TrainedResult, read_metrics
from specnb.training.model import published_config, speculators_parts
from specnb.training.plan import TrainPlan
from specnb.training.target import (
    TargetModel,
    check_taps,
    default_taps,
    greedy_agreement,
    load_target,
    refuse_unexplained,
)

_PLAN = "plan.json"

Say = Callable[[str], None]


def train(plan: TrainPlan, out: Path, *, resume: bool = False, say: Say = lambda line: None) -> Path:
    """Makes the corpus, trains every drafter of the plan and publishes each to `out/drafters/NAME/model`.

    Every stage leaves files and is not repeated: `corpus/`, and for each drafter `checkpoint.pt`,
    `metrics.jsonl` and `model/`. A training that was interrupted goes on from its checkpoint; one that was
    finished goes on with another leg if the plan's `training` has changed.

    Parameters
    ----------
    out
        Folder of this training.
    resume
        Continue in a folder that holds a training of this plan.
    say
        Called with a line of text as work goes on.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    PlanError
        The plan does not fit the target or the folder.
    EngineError
        The target can't be loaded, speculators is missing, or the loss is no number any more.
    StorageError
        The folder can't be written.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _claim(plan, out, resume)
    speculators_parts()
    target = load_target(plan)
    num_layers = int(target.config.num_hidden_layers)
    taps = plan.drafters[0].target_layer_ids or default_taps(num_layers)
    check_taps(taps, num_layers)
    configs = {drafter.name: published_config(drafter, target, taps) for drafter in plan.drafters}
    corpus = build_corpus(plan, target, out / "corpus", say=say)
    say(
        f"{len(corpus.training)} rows to train on with {corpus.training.num_answer_tokens} answer tokens, "
        f"{len(corpus.held_out)} held out"
    )
    parts = TeacherParts(plan, target, corpus, tuple(taps), say)
    refuse_unexplained(greedy_agreement(target, parts.evaluation), target.label)
    for drafter in plan.drafters:
        folder = out / "drafters" / drafter.name
        training = DrafterTraining(plan, drafter, configs[drafter.name], target, parts, folder, say)
        result = training.run()
        facts = _facts(plan, target, corpus, training, result, out)
        facts["init"] = Path(drafter.init).name if drafter.init else None
        facts["earlier"] = earlier_trainings(Path(plan.located(drafter.init))) if drafter.init else []
        publish(
            result.drafter,
            folder / "model",
            facts=facts,
            curves=list(read_metrics(folder)),
            shard_bytes=int(plan.shard_mib * 2**20),
        )
        for name, found in facts["results"].items():
            say(f"{drafter.name}: acceptance length {found['mean_acceptance_length']} on {name}")
    return out


def _claim(plan: TrainPlan, out: Path, resume: bool) -> None:
    """Ties the folder to the plan.

    Raises
    ------
    PlanError
        It holds another plan's training, or a training that is not to be resumed.
    """
    path = out / _PLAN
    if path.exists():
        if not resume:
            raise PlanError(f"{out}: holds a training already; say --resume {out}, or choose another --out")
        if json.loads(path.read_text())["sha256"] != plan.sha256:
            raise PlanError(
                f"{out}: was trained by another plan; only device, price and training may change on --resume"
            )
        return
    if resume:
        raise PlanError(f"{out}: holds no training to resume; leave out --resume")
    try:
        out.mkdir(parents=True, exist_ok=True)
        content = {"sha256": plan.sha256, "plan": plan.model_dump(mode="json")}
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"{out}: can't be written ({error.strerror or error}); choose another --out"
        ) from error


def _facts(
    plan: TrainPlan,
    target: TargetModel,
    corpus: Corpus,
    training: DrafterTraining,
    result: TrainedResult,
    out: Path,
) -> dict[str, Any]:
    """What a reader of the checkpoint must know; holds no path and no host name."""
    kinds = np.bincount(corpus.training.kinds, minlength=len(KINDS))
    seconds = sum(leg["seconds"] for leg in result.legs)
    own = result.drafter.published_config["dflash_config"]
    conv, selector = bool(own.get("conv_kernel_size")), bool(own.get("selector_rank"))
    names = {
        (True, True): "DFlash 2",
        (False, True): "DFlash 2 without convolution",
        (True, False): "DFlash 2 without selector",
        (False, False): "DFlash",
    }
    on_gpu = target.device.type == "cuda"
    host = host_facts()
    corpus_seconds = float(corpus.manifest["seconds"])
    return {
        "name": plan.name,
        "label": names[conv, selector],
        "target": {"label": target.label, "sha256": target.sha256},
        "num_parameters": sum(value.numel() for value in result.drafter.parameters()),
        "seed": plan.seed,
        "plan_sha256": plan.sha256,
        "git_sha": git_sha(),
        "hardware": {
            "device": torch.cuda.get_device_name(target.device) if on_gpu else host["processor"],
            "kind": target.device.type,
            "num_cores": host["num_cores"],
        },
        "versions": package_versions((*PACKAGES, "speculators")),
        "corpus": {
            "training_rows": len(corpus.training),
            "training_answer_tokens": corpus.training.num_answer_tokens,
            "held_out_rows": len(corpus.held_out),
            "kinds": {kind: int(count) for kind, count in zip(KINDS, kinds, strict=True) if count},
            "counts": corpus.manifest["counts"],
            "overlap": corpus.manifest["overlap"],
            "seconds": corpus_seconds,
        },
        "train_seconds": round(seconds, 1),
        "gpu_hours": round((seconds + corpus_seconds) / 3600, 4) if on_gpu else None,
        "gpu_hour_price": plan.price.model_dump(mode="json") if plan.price else None,
        "legs": result.legs,
        "results": _results(plan, training, result, out),
    }


def _results(
    plan: TrainPlan, training: DrafterTraining, result: TrainedResult, out: Path
) -> dict[str, dict[str, Any]]:
    """Acceptance by group of prompts; looping answers apart, since they are easy to draft."""
    corpus_folder = Path(plan.located(plan.corpus.reuse)) if plan.corpus.reuse else out / "corpus"
    labels = json.loads((corpus_folder / "evaluation.json").read_text())
    walked = training.walked_evaluation()
    num_drafts = result.drafter.block_size - 1
    groups: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        workload = plan.evaluation.workload
        if label["looping"]:
            groups.setdefault(f"{workload}, looping answers", []).append(number)
            continue
        groups.setdefault(f"{workload}, answers without a loop", []).append(number)
        groups.setdefault(f"{workload}, tier {label['tier']}", []).append(number)
        groups.setdefault(f"{workload}, {label['task']}", []).append(number)
    found = {
        name: acceptance([walked[number] for number in members], num_drafts=num_drafts)
        for name, members in sorted(groups.items())
    }
    if "held_out" in result.evaluation:
        found["held out of the corpus"] = result.evaluation["held_out"]
    return found
