"""Training plans: what a drafter is trained on, how long, and which drafters share one corpus.

Same rules as measuring plans: YAML, strict types, unknown keys refused with the nearest
known one, one line for every fault. Imports no torch, so that a plan can be checked
before a GPU is rented.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from specnb.config import (
    BUILTIN_NAMES,
    Name,
    Price,
    Strict,
    Target,
    contradiction,
    parsed_plan,
    refuse_duplicates,
    validated_plan,
)

# Decoding keeps this many candidates of the law before top-p; a full sort of the vocabulary costs more
# than the model.
SAMPLING_CANDIDATES = 64


class CorpusPlan(Strict):
    """What the target is asked, and how long its answers may take.

    `reuse` names the corpus folder of an earlier training. Otherwise rows are made in batches, until
    `seconds` have passed or there are `max_rows`: first the prompts of `traffic` (a JSONL file), then the
    target's own. Of these `task_share` continue an opening of a known kind of task (summarise, extract, JSON,
    code, questions, stories, brainstorming), `follow_share` are a second question after an answer of the
    batch before, the others begin at the bare chat header. `greedy_share` of the answers are greedy, the rest
    sampled at `temperature` and `top_p`. `exclude` lists workloads whose word 13-grams no prompt may share.
    `cut_loops` ends an answer where it has begun to repeat itself.
    """

    reuse: str | None = Field(default=None, min_length=1)
    traffic: str | None = Field(default=None, min_length=1)
    seconds: float = Field(default=300, gt=0)
    max_rows: int = Field(default=200_000, ge=2)
    task_share: float = Field(default=0.75, ge=0, le=1)
    follow_share: float = Field(default=0.1, ge=0, le=1)
    prompt_tokens: int = Field(default=160, ge=4, le=4096)
    answer_tokens: int = Field(default=256, ge=8, le=8192)
    max_length: int = Field(default=512, ge=16, le=16384)
    rows_per_batch: int = Field(default=4096, ge=1, le=65536)
    greedy_share: float = Field(default=0.6, ge=0, le=1)
    temperature: float = Field(default=0.8, gt=0, le=10)
    top_p: float = Field(default=0.95, gt=0, le=1)
    held_out: int = Field(default=384, ge=1)
    cut_loops: bool = True
    exclude: tuple[str, ...] = ("builtin-en", "builtin-zh")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.task_share + self.follow_share > 1:
            raise contradiction("with task_share it is above 1; lower one", "follow_share")
        return self


class EvaluationPlan(Strict):
    """Prompts that are never trained on: acceptance of greedy answers of at most `max_tokens` is measured."""

    workload: str = Field(default="builtin-en", min_length=1)
    max_tokens: int = Field(default=128, ge=8)
    max_prompts: int | None = Field(default=None, ge=1)


class TrainingPlan(Strict):
    """Budget and schedule of one leg; each drafter gets the whole budget.

    A leg ends after `seconds` (time in steps, without pauses) or `steps`, with the learning rate at 0:
    linear warm-up over the share `warmup`, then linear decay. A step takes `rows` sequences with `anchors`
    drafted blocks each. `gamma` is the decay of the loss over positions in the block, in tokens.
    `graph` records a step as a CUDA graph, which saves launching its kernels one by one. `teacher_gib`
    caps the target's stored hidden states; a corpus beyond it is taken in parts, one after the other.
    """

    seconds: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    rows: int = Field(default=64, ge=1)
    anchors: int = Field(default=8, ge=1)
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    gamma: float = Field(default=4.0, gt=0)
    selector_weight: float = Field(default=1.0, ge=0)
    graph: bool = False
    teacher_gib: float = Field(default=80, gt=0)
    checkpoint_seconds: float = Field(default=60, gt=0)
    validate_seconds: float = Field(default=120, gt=0)
    log_steps: int = Field(default=50, ge=1)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.seconds is None) == (self.steps is None):
            raise contradiction("give one of seconds and steps", "seconds")
        return self


class DrafterPlan(Strict):
    """One drafter's architecture, in the published format's words.

    `target_layer_ids` are 0-based decoder layers whose outputs feed the drafter (default: five, spread
    evenly). `conv_kernel_size` 0 leaves out the convolution, `selector_rank` 0 the selector; both 0 is plain
    DFlash. `mask_token_id` defaults to the target's pad token; a token that no text holds is better.
    `init` names a published checkpoint of the same shape to begin from.
    """

    name: Name
    layers: int = Field(default=3, ge=1, le=64)
    block_size: int = Field(default=8, ge=2, le=64)
    target_layer_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    mask_token_id: int | None = Field(default=None, ge=0)
    conv_kernel_size: int = Field(default=2, ge=0, le=8)
    conv_group_size: int = Field(default=16, ge=1)
    selector_rank: int = Field(default=64, ge=0)
    top_k: int = Field(default=16, ge=2)
    sliding_window: int = Field(default=2048, ge=16)
    init: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = self.target_layer_ids
        if ids is not None and (list(ids) != sorted(set(ids)) or ids[0] < 0):
            raise contradiction(f"{list(ids)} must rise and not be negative; sort them", "target_layer_ids")
        if self.conv_kernel_size > self.block_size:
            raise contradiction(
                f"{self.conv_kernel_size} is above block_size ({self.block_size}); lower it",
                "conv_kernel_size",
            )
        return self


class TrainPlan(Strict):
    """A validated training plan. Read one with `read_train_plan`."""

    name: Name
    target: Target
    device: str = Field(default="auto", min_length=1)
    num_threads: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, le=2**31)
    corpus: CorpusPlan = Field(default_factory=CorpusPlan)
    evaluation: EvaluationPlan = Field(default_factory=EvaluationPlan)
    training: TrainingPlan
    drafters: tuple[DrafterPlan, ...] = Field(min_length=1)
    shard_mib: float = Field(default=15.0, gt=0)
    price: Price | None = None
    _folder: Path = PrivateAttr(default_factory=Path)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_duplicates([drafter.name for drafter in self.drafters], "drafters", inner="name")
        first = self.drafters[0]
        for number, drafter in enumerate(self.drafters):
            if drafter.target_layer_ids != first.target_layer_ids:
                raise contradiction(
                    "drafters of one plan share the target's stored states, so their layers must be the same",
                    *("drafters", number, "target_layer_ids"),
                )
        return self

    def located(self, name: str) -> str:
        """A model, workload or folder of the plan: a path from the folder of the plan's file if it exists."""
        if name in BUILTIN_NAMES or Path(name).is_absolute():
            return name
        found = self._folder / name
        return str(found.resolve()) if found.exists() else name

    @property
    def sha256(self) -> str:
        """Digest of what must not change between a training and its continuation: all but the budget."""
        content = self.model_dump(
            mode="json", exclude={"training", "price", "device", "num_threads", "shard_mib"}
        )
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_train_plan(path: Path | str) -> TrainPlan:
    """The training plan in a YAML file, validated.

    Raises
    ------
    PlanError
        One line with file, line, key and fix.
    """
    path = Path(path)
    node, content = parsed_plan(path)
    plan = validated_plan(TrainPlan, content, source=str(path), node=node)
    plan._folder = path.parent
    return plan


def train_plan_from_dict(content: dict[str, Any], *, source: str = "plan") -> TrainPlan:
    """The training plan in a dict; errors as in `read_train_plan`, without lines."""
    return validated_plan(TrainPlan, content, source=source)
