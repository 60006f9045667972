"""The training loop of one drafter: legs with a complete schedule each, resumable at any checkpoint.

A leg warms up, decays to zero and ends by time or steps; a finished training goes on with a
new leg. Which rows and anchors a step takes follows from (seed, leg, step) alone, so a
resumed training draws what an uninterrupted one would have drawn. On a GPU the whole step
may be recorded once and replayed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from specnb.errors import EngineError, PlanError, StorageError
from specnb.training.corpus import Corpus, Rows
from specnb.training.evaluate import acceptance, matched_lengths, walk
from specnb.training.model import Batch, Batches, Scored, TrainedDrafter, context_length
from specnb.training.optimizers import build_optimizers
from specnb.training.plan import DrafterPlan, TrainingPlan, TrainPlan
from specnb.training.target import TargetModel, TeacherStates, bytes_per_token, teacher_states

CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
_STEPS_BEFORE_GRAPH = 3
_PASSES_OF_A_PART = 2
_VALIDATION_ROWS = 64
_SHARE_OF_FREE_MEMORY = 0.8

Say = Callable[[str], None]


class TeacherParts:
    """The corpus's stored states, the whole of it or one part after another where memory is short."""

    def __init__(
        self, plan: TrainPlan, target: TargetModel, corpus: Corpus, taps: tuple[int, ...], say: Say
    ) -> None:
        self._target = target
        self._taps = taps
        self._say = say
        self._rows = corpus.training
        self._sequences = corpus.training.split()
        self.longest = int(max(rows.lengths.max() for rows in (corpus.training, corpus.held_out)))
        size = bytes_per_token(target, taps)
        room = plan.training.teacher_gib * 2**30
        if target.device.type == "cuda":
            # What decoding left in the allocator's hands counts as free only after this.
            torch.cuda.empty_cache()
            room = min(room, _SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(target.device)[0])
        num_parts = max(1, math.ceil(int(corpus.training.lengths.sum()) * size / room))
        # Shuffled once, so that every part is like the whole.
        order = np.random.default_rng(plan.seed).permutation(len(self._rows))
        self._parts = [np.sort(part) for part in np.array_split(order, num_parts) if len(part)]
        self._held: tuple[int, TeacherStates] | None = None
        self.validation = _stored(target, taps, corpus.held_out)
        greedy = np.flatnonzero(corpus.held_out.temperatures == 0)
        self.held_out_greedy = _stored(target, taps, corpus.held_out.take(greedy)) if len(greedy) else None
        self.evaluation = _stored(target, taps, corpus.evaluation)

    @property
    def num_parts(self) -> int:
        """Parts of the corpus."""
        return len(self._parts)

    def part_rows(self, number: int) -> int:
        """Rows of a part."""
        return len(self._parts[number])

    def part(self, number: int) -> TeacherStates:
        """A part's states; the part before it is forgotten first."""
        if self._held is None or self._held[0] != number:
            self._held = None
            chosen = self._parts[number]
            states = teacher_states(
                self._target,
                self._taps,
                [self._sequences[row] for row in chosen],
                self._rows.prompt_lengths[chosen].tolist(),
                say=self._say,
            )
            self._held = (number, states)
        return self._held[1]


def _stored(target: TargetModel, taps: tuple[int, ...], rows: Rows) -> TeacherStates:
    return teacher_states(target, taps, rows.split(), rows.prompt_lengths.tolist())


@dataclass(slots=True)
class _State:
    """What a checkpoint holds beside weights and optimizers."""

    leg: int = 0
    step: int = 0
    spent_s: float = 0.0
    legs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedResult:
    """A finished training: legs with their settings, and the last evaluation."""

    drafter: TrainedDrafter
    legs: list[dict[str, Any]]
    evaluation: dict[str, Any]


class DrafterTraining:
    """Trains one drafter of a plan in `folder`, from its checkpoint if there is one."""

    def __init__(
        self,
        plan: TrainPlan,
        drafter: DrafterPlan,
        config: dict[str, Any],
        target: TargetModel,
        parts: TeacherParts,
        folder: Path,
        say: Say,
    ) -> None:
        self._plan = plan
        self._settings = plan.training
        self._drafter_plan = drafter
        self._target = target
        self._parts = parts
        self._folder = folder
        self._say = say
        folder.mkdir(parents=True, exist_ok=True)
        # Weights are drawn on the CPU, so that a seed means the same everywhere.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            model = TrainedDrafter(drafter, config)
        if drafter.init is not None:
            _load_init(model, Path(plan.located(drafter.init)), drafter.name)
        self.model = model.to(target.device)
        self._lr = torch.zeros((), device=target.device)
        self._optimizers = build_optimizers(
            self.model, self._settings.optimizer, self._lr, weight_decay=self._settings.weight_decay
        )
        self._state = _State()
        self._slots = drafter.block_size - 1
        self._context = context_length(parts.longest)
        self._graph: _Recorded | None = None
        self._num_warm = 0
        self._order: tuple[tuple[int, ...], np.ndarray[Any, Any]] | None = None
        self._load_checkpoint()
        self._recordable = self._settings.graph and target.device.type == "cuda"

    # -- running ---------------------------------------------------------------------------------

    def run(self) -> TrainedResult:
        """Trains until the plan's budget is spent; a training that was finished under it returns at once.

        Raises
        ------
        EngineError
            The loss is no number any more.
        StorageError
            A checkpoint can't be written.
        """
        state = self._state
        settings = self._settings.model_dump(mode="json")
        finished = [leg for leg in state.legs if leg["finished"]]
        if finished and len(finished) == len(state.legs):
            if finished[-1]["settings"] == settings:
                return TrainedResult(
                    drafter=self.model, legs=state.legs, evaluation=finished[-1]["evaluation"]
                )
            state.leg, state.step, state.spent_s = len(state.legs), 0, 0.0
        if len(state.legs) == state.leg:
            state.legs.append({"settings": settings, "finished": False})
        try:
            self._train()
        except KeyboardInterrupt:
            self._save_checkpoint()
            raise
        evaluation = self.evaluate()
        state.legs[state.leg] |= {
            "finished": True,
            "steps": state.step,
            "seconds": round(state.spent_s, 1),
            "evaluation": evaluation,
        }
        self._write_metrics("evaluation", evaluation)
        self._save_checkpoint()
        return TrainedResult(drafter=self.model, legs=state.legs, evaluation=evaluation)

    def _train(self) -> None:
        settings, state = self._settings, self._state
        # The target's pass over the corpus is not the leg's time.
        self._parts.part(self._place(state.step)[0])
        earlier = state.spent_s
        begun = time.perf_counter()
        last_saved = last_validated = last_logged = earlier
        sums = torch.zeros(_tally_size(self._slots), device=self._target.device)
        logged_step = state.step
        self.model.train()
        while True:
            share = self._share()
            if share >= 1:
                break
            self._lr.fill_(settings.lr * _schedule(share, settings.warmup))
            self._step(sums)
            state.step += 1
            at_log = state.step % settings.log_steps == 0
            if at_log and self._target.device.type == "cuda":
                torch.cuda.synchronize(self._target.device)
            state.spent_s = earlier + time.perf_counter() - begun
            if at_log or self._share() >= 1:
                found = _readings(sums, self._slots)
                sums.zero_()
                steps = state.step - logged_step
                found["step_ms"] = round(1000 * (state.spent_s - last_logged) / max(steps, 1), 2)
                logged_step, last_logged = state.step, state.spent_s
                self._refuse_nan(found["loss"])
                self._write_metrics("training", found)
                if state.spent_s - last_validated >= settings.validate_seconds:
                    self._write_metrics("validation", self.validate())
                    last_validated = state.spent_s
                if state.spent_s - last_saved >= settings.checkpoint_seconds:
                    self._save_checkpoint()
                    last_saved = state.spent_s
                state.spent_s = earlier + time.perf_counter() - begun
                # What was logged leaves out validation and saving.
                last_logged = state.spent_s
        if not all(bool(torch.isfinite(value).all()) for value in self.model.parameters()):
            self._refuse_nan(math.nan)

    def _share(self) -> float:
        settings, state = self._settings, self._state
        if settings.steps is not None:
            return state.step / settings.steps
        return state.spent_s / (settings.seconds or 1.0)

    def _refuse_nan(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise EngineError(
                f"drafters.{self._drafter_plan.name}: the loss is {loss} at step {self._state.step}; "
                "lower training.lr and resume from the checkpoint"
            )

    # -- one step --------------------------------------------------------------------------------

    def _step(self, sums: torch.Tensor) -> None:
        part, rows, uniform = self._drawn()
        if self._graph is not None and self._graph.part != part:
            self._graph = None
        if self._graph is not None:
            self._graph.replay(rows, uniform)
            return
        batches = Batches(
            self._parts.part(part), context=self._context, block_size=self._drafter_plan.block_size
        )
        self._forget_gradients()
        if not self._recordable:
            self._computed(batches, rows, uniform, sums)
            return
        if self._num_warm < _STEPS_BEFORE_GRAPH:
            # Away from the default stream, as recording asks for.
            stream: Any = torch.cuda.Stream(self._target.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._computed(batches, rows, uniform, sums)
            torch.cuda.current_stream().wait_stream(stream)
            self._num_warm += 1
            return
        graph = _Recorded(part, rows, uniform, self._target.device)
        try:
            graph.record(lambda drawn, numbers: self._computed(batches, drawn, numbers, sums))
        except RuntimeError as error:
            self._recordable = False
            first = str(error).strip().splitlines()[0]
            self._say(f"{self._drafter_plan.name}: a step can't be recorded ({first}); going on without")
            self._forget_gradients()
            self._computed(batches, rows, uniform, sums)
            return
        self._graph = graph
        graph.replay(rows, uniform)

    def _forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _computed(
        self, batches: Batches, rows: torch.Tensor, uniform: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Forward, backward and update; no line of it waits for the device."""
        settings = self._settings
        batch = batches.drawn(rows, batches.anchors(rows, uniform))
        scored = self._scored(batch)
        scored.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            sums += _tally(scored, self._drafter_plan.top_k)

    def _scored(self, batch: Batch) -> Scored:
        with self._precision():
            return self.model.score(
                self._target,
                batch,
                gamma=self._settings.gamma,
                selector_weight=self._settings.selector_weight,
            )

    def _precision(self) -> AbstractContextManager[Any]:
        if self._target.head.dtype == torch.float32:
            return nullcontext()
        # Without its cache a recorded step casts the weights anew at every replay.
        return torch.autocast(self._target.device.type, dtype=self._target.head.dtype, cache_enabled=False)

    def _drawn(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Part, rows [R] and uniform numbers [R, A] of the current step."""
        settings, state = self._settings, self._state
        part, done = self._place(state.step)
        size = self._parts.part_rows(part)
        index = done * settings.rows + np.arange(settings.rows)
        rows = np.empty(settings.rows, dtype=np.int64)
        for number in np.unique(index // size):
            chosen = index // size == number
            rows[chosen] = self._permutation(part, int(number))[index[chosen] % size]
        rng = np.random.default_rng([self._plan.seed, 1, state.leg, state.step])
        uniform = rng.random((settings.rows, settings.anchors), dtype=np.float32)
        return part, torch.from_numpy(rows), torch.from_numpy(uniform)

    def _place(self, step: int) -> tuple[int, int]:
        """Part of a step, and how many steps this leg has taken in that part before."""
        if self._parts.num_parts == 1:
            return 0, step
        steps = [
            max(1, _PASSES_OF_A_PART * self._parts.part_rows(part) // self._settings.rows)
            for part in range(self._parts.num_parts)
        ]
        rounds, rest = divmod(step, sum(steps))
        part = 0
        while rest >= steps[part]:
            rest -= steps[part]
            part += 1
        return part, rounds * steps[part] + rest

    def _permutation(self, part: int, number: int) -> np.ndarray[Any, Any]:
        key = (self._state.leg, part, number)
        if self._order is None or self._order[0] != key:
            rng = np.random.default_rng([self._plan.seed, 2, *key])
            self._order = (key, rng.permutation(self._parts.part_rows(part)))
        return self._order[1]

    # -- judging ---------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss and ranks on held-out rows, at the same anchors every time."""
        teacher = self._parts.validation
        batches = Batches(teacher, context=self._context, block_size=self._drafter_plan.block_size)
        rng = np.random.default_rng([self._plan.seed, 3])
        sums = torch.zeros(_tally_size(self._slots), device=self._target.device)
        for start in range(0, teacher.num_rows, _VALIDATION_ROWS):
            rows = torch.arange(start, min(start + _VALIDATION_ROWS, teacher.num_rows))
            uniform = torch.from_numpy(rng.random((len(rows), 8), dtype=np.float32))
            sums += _tally(
                self._scored(batches.drawn(rows, batches.anchors(rows, uniform))), self._drafter_plan.top_k
            )
        return _readings(sums, self._slots)

    def evaluate(self) -> dict[str, Any]:
        """Validation, and acceptance on held-out rows and on the evaluation workload by looping or not."""
        corpus_folder = self._parts
        found: dict[str, Any] = {"validation": self.validate()}
        if corpus_folder.held_out_greedy is not None:
            found["held_out"] = acceptance(
                self._walked(corpus_folder.held_out_greedy), num_drafts=self._slots
            )
        found["evaluation"] = acceptance(self._walked(corpus_folder.evaluation), num_drafts=self._slots)
        return found

    def walked_evaluation(self) -> list[np.ndarray[Any, Any]]:
        """Accepted drafts of each step of each evaluation prompt, in the workload's order."""
        return self._walked(self._parts.evaluation)

    def _walked(self, teacher: TeacherStates) -> list[np.ndarray[Any, Any]]:
        matched = matched_lengths(self.model, self._target, teacher, self._precision)
        return [walk(row) for row in matched]

    # -- keeping ---------------------------------------------------------------------------------

    def _write_metrics(self, kind: str, values: dict[str, Any]) -> None:
        state = self._state
        line = {"kind": kind, "leg": state.leg, "step": state.step, "seconds": round(state.spent_s, 2)}
        with (self._folder / METRICS).open("a") as stream:
            stream.write(json.dumps(line | values) + "\n")
        if "eal" in values:
            self._say(
                f"{self._drafter_plan.name} {kind}: step {state.step}, {state.spent_s:.0f} s, "
                f"loss {values['loss']:.3f}, expected acceptance length {values['eal']:.3f}, "
                f"recall at {self._drafter_plan.top_k} {values['recall']:.3f}"
                + (f", {values['step_ms']:.1f} ms a step" if "step_ms" in values else "")
            )

    def _save_checkpoint(self) -> None:
        state = self._state
        content = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "optimizer": self._settings.optimizer,
            "leg": state.leg,
            "step": state.step,
            "spent_s": state.spent_s,
            "legs": json.dumps(state.legs),
        }
        path = self._folder / CHECKPOINT
        aside = path.with_name(f".{CHECKPOINT}.partial")
        try:
            torch.save(content, aside)
            aside.rename(path)
        except OSError as error:
            raise StorageError(
                f"{path}: can't be written ({error.strerror or error}); make room and resume"
            ) from error

    def _load_checkpoint(self) -> None:
        path = self._folder / CHECKPOINT
        if not path.exists():
            return
        saved = torch.load(path, map_location=self._target.device, weights_only=True)
        try:
            self.model.load_state_dict(saved["model"])
        except RuntimeError as error:
            raise PlanError(
                f"{path}: holds a drafter of another shape than {self._drafter_plan.name}; use another --out"
            ) from error
        if saved["optimizer"] == self._settings.optimizer:
            for optimizer, held in zip(self._optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(held)
            for optimizer in self._optimizers:
                for group in getattr(optimizer, "param_groups", ()):
                    group["lr"] = self._lr
        self._state = _State(saved["leg"], saved["step"], saved["spent_s"], json.loads(saved["legs"]))
        open_leg = [leg for leg in self._state.legs if not leg["finished"]]
        if open_leg:
            # An unfinished leg keeps the schedule that it began with.
            self._settings = TrainingPlan.model_validate_json(json.dumps(open_leg[0]["settings"]))
        self._drop_metrics_after()

    def _drop_metrics_after(self) -> None:
        """Forgets lines that were written after the checkpoint: their steps are taken again."""
        path = self._folder / METRICS
        if not path.exists():
            return
        state = self._state
        kept = [
            line
            for line in path.read_text().splitlines()
            if (json.loads(line)["leg"], json.loads(line)["step"]) <= (state.leg, state.step)
        ]
        path.write_text("".join(f"{line}\n" for line in kept))


class _Recorded:
    """One training step as a CUDA graph over fixed inputs."""

    def __init__(self, part: int, rows: torch.Tensor, uniform: torch.Tensor, device: torch.device) -> None:
        self.part = part
        self._rows = rows.to(device)
        self._uniform = uniform.to(device)
        self._graph = torch.cuda.CUDAGraph()

    def record(self, step: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Records the step without running it; gradients must be None before, and live in the graph then."""
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            step(self._rows, self._uniform)

    def replay(self, rows: torch.Tensor, uniform: torch.Tensor) -> None:
        """Runs the recorded step on other rows."""
        self._rows.copy_(rows.pin_memory(), non_blocking=True)
        self._uniform.copy_(uniform.pin_memory(), non_blocking=True)
        self._graph.replay()


def _schedule(share: float, warmup: float) -> float:
    """Factor of the learning rate after this share of a leg: linear up, then linear down to 0."""
    if share < warmup:
        return (share + 1e-3) / (warmup + 1e-3)
    return (1 - share) / (1 - warmup)


def _tally_size(slots: int) -> int:
    return 4 + 4 * slots + 4


def _tally(scored: Scored, top_k: int) -> torch.Tensor:
    """Sums of one step as one vector: losses and steps, counts by position, runs by block."""
    valid = scored.valid
    first = (scored.rank == 0) & valid
    held = (scored.rank < top_k) & valid
    picked = scored.picked & valid
    blocks = valid.any(dim=1)
    runs = [(hits.int().cumprod(dim=1).sum(dim=1) + 1) * blocks for hits in (picked, first, held)]
    one = torch.ones((), device=valid.device)
    losses = torch.stack([scored.loss.detach(), scored.unary_loss, scored.selector_loss, one])
    places = torch.cat([hits.sum(dim=0).float() for hits in (valid, first, held, picked)])
    lengths = torch.stack([run.sum().float() for run in runs] + [blocks.sum().float()])
    return torch.cat([losses.float(), places, lengths])


def _readings(sums: torch.Tensor, slots: int) -> dict[str, Any]:
    """Means from summed tallies; acceptance lengths count the bonus token, lists go by position."""
    values = sums.tolist()
    steps = max(values[3], 1.0)
    valid, first, held, picked = (values[4 + n * slots : 4 + (n + 1) * slots] for n in range(4))
    picked_run, first_run, held_run, blocks = values[4 + 4 * slots :]
    blocks = max(blocks, 1.0)

    def shares(hits: list[float]) -> list[float]:
        return [round(hit / max(count, 1.0), 4) for hit, count in zip(hits, valid, strict=True)]

    return {
        "loss": values[0] / steps,
        "unary_loss": values[1] / steps,
        "selector_loss": values[2] / steps,
        "eal": round(picked_run / blocks, 4),
        "argmax_eal": round(first_run / blocks, 4),
        "oracle_al": round(held_run / blocks, 4),
        "recall": round(sum(held) / max(sum(valid), 1.0), 4),
        "position_top1": shares(first),
        "position_recall": shares(held),
        "position_selector": shares(picked),
    }


def _load_init(model: TrainedDrafter, folder: Path, name: str) -> None:
    """Weights of a published checkpoint of the same shape."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PlanError(
            f"drafters.{name}.init: {folder} holds no .safetensors file; name a checkpoint folder"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    try:
        model.load_state_dict({key: value.float() for key, value in tensors.items()})
    except RuntimeError as error:
        raise PlanError(
            f"drafters.{name}.init: {folder} holds a drafter of another shape; give the same layers, taps, "
            "conv_* and selector_* keys"
        ) from error


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of a drafter's metrics file."""
    path = folder / METRICS
    for line in path.read_text().splitlines() if path.exists() else ():
        yield json.loads(line)
