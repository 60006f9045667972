"""The in-process engine: PyTorch and transformers, CPU or GPU, no server between question and measurement.

Runs baseline and speculative decoding through the same step code: propose drafts (none
in the baseline), one target forward over every active request, verify, emit. The load
is closed: a cell's concurrency is a number of slots, kept full; a finished request is
replaced at once. Logs every step, position and token.

Loads any decoder-only model with dense attention whose state can be rolled back by
forgetting keys. Whether it computes the right logits for ragged batches is not assumed
but checked at load, against the model's own plain forward.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specnb import schema
from specnb.config import DEMO_TARGET, Arm, Cell, Plan
from specnb.drafters import Draft, Drafter, Features, TargetShape, check_drafter, make_drafter
from specnb.drafters.dflash2 import Target
from specnb.engines.base import CellContext, PlannedRequest
from specnb.engines.loading import quiet_transformers, resolve_device, stop_token_ids
from specnb.engines.ragged import RaggedCache, register_attention
from specnb.engines.verification import Judgement, SamplingLaw, judge, token_facts
from specnb.errors import EngineError, PlanError, UnsupportedModelError
from specnb.provenance import directory_sha256
from specnb.workloads import Prompt, grade

_DENSE_LAYERS = ("full_attention", "sliding_attention")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
_FP64_PARAMETER_LIMIT = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One request in flight. `length` counts the tokens whose keys are in the cache."""

    request: PlannedRequest
    number: int
    prompt_ids: list[int]
    sent_s: float
    rng: np.random.Generator
    length: int = 0
    output: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_steps: int = 0
    num_chunks: int = 0
    entropy_sum_nats: float = 0.0
    finish_reason: str | None = None
    drafted: list[_Drafted] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafted:
    """One step's rows in `positions`, to be completed when the answer is known.

    `row` is the first one; `start` is the place in the answer that it drafted.
    """

    row: int
    start: int
    draft: Draft


class _Taps:
    """Outputs of tapped target layers in the latest forward."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._states: dict[int, torch.Tensor] = {}

    def store(self, layer: int, output: Any) -> None:
        """Keeps a decoder layer's output: its hidden states, alone or first of a tuple."""
        self._states[layer] = output[0] if isinstance(output, tuple) else output

    def features(self, row: int) -> Features | None:
        """The states of one row of the latest forward; None without taps."""
        if not self._layers:
            return None
        return Features(states=tuple(self._states[layer] for layer in self._layers), row=row)


class TransformersEngine:
    """In-process engine of one plan; loads the target when built.

    Raises
    ------
    EngineError
        The model is missing, not in safetensors, too large, or has no chat template though the
        workload needs one.
    UnsupportedModelError
        Its state can't be rolled back (recurrent or hybrid layers), or the ragged-batch check fails.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._device = resolve_device(plan.engine.device, key="engine.device")
        if plan.engine.num_threads is not None:
            torch.set_num_threads(plan.engine.num_threads)
        self._label, self._path, self._digest = _resolve_target(plan)
        with _loading(self._path):
            read = _read_config(plan, self._path)
        self._check_drafters(read.get_text_config())
        with _loading(self._path):
            self._model, self._tokenizer = _load(plan, self._path, self._device, read)
        config = self._model.config.get_text_config()
        self._max_positions: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self._vocab_size: int = config.vocab_size
        self._num_layers: int = config.num_hidden_layers
        self._window, self._mask_kind = _attention_layout(config)
        self._stop_ids = stop_token_ids(self._model, self._tokenizer)
        self._attention = self._choose_attention()
        self._drafters = {arm.name: self._make_drafter(arm) for arm in plan.arms}

    # -- facts -----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Target, device and settings for the manifest."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        facts: dict[str, Any] = {
            "kind": "transformers",
            "label": "in-process engine (PyTorch, transformers)",
            "simulated": False,
            "target": {
                "label": self._label,
                "dtype": str(self._model.dtype).removeprefix("torch."),
                "num_parameters": parameters,
                "vocab_size": self._vocab_size,
                "num_layers": self._num_layers,
                "sha256": self._digest,
                "revision": self._plan.target.revision,
            },
            "device": str(self._device),
            "attention": self._attention,
            "stop_token_ids": sorted(self._stop_ids),
            "num_threads": torch.get_num_threads(),
        }
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            facts["gpu"] = {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "cuda": torch.version.cuda,
            }
        return facts

    def describe_arm(self, arm: Arm) -> dict[str, Any]:
        """The arm's drafter with its defaults resolved."""
        drafter = self._drafters[arm.name]
        return {"speculative": drafter.describe() if drafter else None}

    # -- measuring -------------------------------------------------------------------------------

    def warm_up(self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext) -> None:
        """Runs requests through the cell's own code path and throws the records away."""
        self.run_cell(cell, requests, context)

    @torch.inference_mode()
    def run_cell(
        self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> dict[str, pl.DataFrame]:
        """Tables of one cell: requests, chunks, steps, engine_steps, and positions and tokens if asked for.

        Times are read after the device has finished. Prompts that don't fit the model's context
        become rows with status `error` and kind `prompt_too_long`.
        """
        return _CellRun(self, cell, context).run(requests)

    def cell_facts(self) -> dict[str, Any]:
        """Nothing beyond the tables."""
        return {}

    @torch.inference_mode()
    def judge_splits(
        self, splits: pl.DataFrame, requests: pl.DataFrame, prompts: Mapping[str, Prompt]
    ) -> pl.DataFrame:
        """Margins at each split from the target, in the run's dtype and, up to 1e9 parameters, in float64.

        The logits come from one forward over prompt and common prefix into an empty cache.
        """
        if splits.is_empty():
            return splits
        key = ("arm", "prompt_id", "sampling", "concurrency", "repeat")
        answers = {tuple(row[:-1]): row[-1] for row in requests.select(*key, "output_token_ids").iter_rows()}
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        models = [self._model]
        if parameters <= _FP64_PARAMETER_LIMIT:
            models.append(copy.deepcopy(self._model).double())
        margins: list[list[float | None]] = [[], []]
        for split in splits.iter_rows(named=True):
            reference = (
                split["reference_arm"],
                split["prompt_id"],
                split["sampling"],
                split["concurrency"],
                split["reference_repeat"],
            )
            one, other = split["reference_token_id"], split["token_id"]
            prefix = self.encode(prompts[split["prompt_id"]]) + answers[reference][: split["index"]]
            for place, found in enumerate(margins):
                if one is None or other is None or place >= len(models):
                    found.append(None)
                    continue
                logits = self._next_logits(models[place], prefix)
                found.append(float(logits[one] - logits[other]))
        return splits.with_columns(
            pl.Series("margin_nats", margins[0], dtype=pl.Float64),
            pl.Series("margin_fp64_nats", margins[1], dtype=pl.Float64),
        )

    def _next_logits(self, model: Any, token_ids: list[int]) -> torch.Tensor:
        """float64 logits of the token after these, with the masks that the model's layers take."""
        cache = self.new_cache(num_rows=1, capacity=len(token_ids), dtype=model.dtype)
        arguments = cache.inputs(first_row=0, starts=[0], width=len(token_ids))
        ids = torch.tensor([token_ids], device=self._device)
        logits: torch.Tensor = model(input_ids=ids, logits_to_keep=1, **arguments).logits[0, -1].double()
        return logits

    def close(self) -> None:
        """Frees the model."""
        del self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def tapped(self, layers: tuple[int, ...]) -> Iterator[_Taps]:
        """Keeps the outputs of these decoder layers, before any final norm, for as long as it is open.

        Forwards outside, and all forwards if there are no layers to tap, pay nothing.
        """
        taps = _Taps(layers)
        blocks = _decoder_layers(self._model, self._num_layers) if layers else []

        def hook(layer: int) -> Any:
            return lambda module, inputs, output: taps.store(layer, output)

        handles = [blocks[layer].register_forward_hook(hook(layer)) for layer in layers]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    # -- one forward -----------------------------------------------------------------------------

    def forward(
        self,
        cache: RaggedCache,
        token_ids: list[list[int]],
        starts: list[int],
        *,
        first_row: int = 0,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Target logits for equally wide rows of tokens, each continuing at its own position.

        Parameters
        ----------
        cache
            Holds the rows' earlier keys; receives the new ones.
        token_ids
            # shape: [rows, width]
        starts
            Position of each row's first token.
        first_row
            Cache row of the first row.
        last_only
            Compute the vocabulary head for the last column alone.

        Returns
        -------
        torch.Tensor
            # shape: [rows, width or 1, vocabulary]
        """
        tokens = torch.tensor(token_ids, device=self._device)
        arguments = cache.inputs(first_row=first_row, starts=starts, width=tokens.shape[1])
        logits: torch.Tensor = self._model(
            input_ids=tokens, logits_to_keep=1 if last_only else 0, **arguments
        ).logits
        return logits

    def new_cache(self, *, num_rows: int, capacity: int, dtype: torch.dtype | None = None) -> RaggedCache:
        """An empty cache for this target, in its dtype unless another is given."""
        return RaggedCache(
            num_layers=self._num_layers,
            num_rows=num_rows,
            capacity=capacity,
            device=self._device,
            dtype=dtype or self._model.dtype,
            sliding_window=self._window,
            mask_kind=self._mask_kind,
        )

    def synchronise(self) -> None:
        """Waits for the device, so that a clock read means what it says."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: chat messages through the model's template, raw text as it is."""
        if not prompt.messages:
            ids: list[int] = self._tokenizer(prompt.text)["input_ids"]
            return ids
        if not self._tokenizer.chat_template:
            raise EngineError(
                f"{self._label}: the tokenizer has no chat template but the workload has chat messages; "
                "use a workload of plain prompts or an instruct model"
            )
        encoded = self._tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in prompt.messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self._plan.workload.chat_template_kwargs,
        )
        ids = list(encoded["input_ids"])
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    @property
    def plan(self) -> Plan:
        """The plan this engine was built for."""
        return self._plan

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self._stop_ids

    @property
    def max_positions(self) -> int:
        """Longest sequence the target's positions allow."""
        return self._max_positions

    def drafter(self, arm: Arm) -> Drafter | None:
        """The arm's drafter; None for the baseline."""
        return self._drafters[arm.name]

    # -- drafters --------------------------------------------------------------------------------

    def _check_drafters(self, config: Any) -> None:
        """Refuses drafters that don't fit, before the target's weights are loaded."""
        for arm in self._plan.arms:
            if arm.speculative is not None:
                with _naming(arm):
                    check_drafter(arm.speculative, _target_shape(config), model=self._drafter_model(arm))

    def _make_drafter(self, arm: Arm) -> Drafter | None:
        if arm.speculative is None:
            return None
        target = None
        if arm.speculative.method == "dflash":
            target = Target(
                shape=_target_shape(self._model.config.get_text_config()),
                embedding=self._model.get_input_embeddings().weight.detach(),
                head=self._model.get_output_embeddings(),
            )
            _decoder_layers(self._model, self._num_layers)
        with _naming(arm):
            return make_drafter(arm.speculative, target=target, model=self._drafter_model(arm))

    def _drafter_model(self, arm: Arm) -> str | None:
        name = arm.speculative.model if arm.speculative else None
        return None if name is None else self._plan.located(name)

    # -- loading ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _choose_attention(self) -> str:
        """The fastest attention under which ragged batches give the model's own logits.

        Feeds two rows of different length in pieces, with rejected drafts in between, and compares
        with a plain forward.
        """
        rng = np.random.default_rng(0)
        longest = 40 if self._window is None else min(self._window + 16, 600)
        rows = [
            rng.integers(0, self._vocab_size, longest - 7).tolist(),
            rng.integers(0, self._vocab_size, longest).tolist(),
        ]
        expected = [
            self._model(input_ids=torch.tensor([row], device=self._device), use_cache=False).logits[0]
            for row in rows
        ]
        original = self._model.config._attn_implementation
        problems = []
        for name in self._attention_candidates():
            try:
                self._model.set_attn_implementation(name)
                error = self._ragged_error(rows, expected)
            except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as failure:
                problems.append(
                    f"{name}: {str(failure).splitlines()[0] if str(failure) else type(failure).__name__}"
                )
                continue
            if error <= _CHECK_TOLERANCE[self._model.dtype]:
                return name
            problems.append(f"{name}: logits differ by {error:.2g} (relative)")
        self._model.set_attn_implementation(original)
        raise UnsupportedModelError(
            f"{self._label}: logits of ragged batches differ from the model's own ({'; '.join(problems)}); "
            "use engine.kind: vllm"
        )

    def _attention_candidates(self) -> tuple[str, ...]:
        """Attention names, fastest first: CUDA has no fused kernel for grouped heads with a mask."""
        grouped = register_attention()
        return (grouped, "sdpa", "eager") if self._device.type == "cpu" else ("sdpa", grouped, "eager")

    def _ragged_error(self, rows: list[list[int]], expected: list[torch.Tensor]) -> float:
        cache = self.new_cache(num_rows=2, capacity=len(rows[1]) + 8)
        found: list[list[torch.Tensor]] = [[], []]
        lengths = [5, 12]
        for index, row in enumerate(rows):
            logits = self.forward(cache, [row[: lengths[index]]], [0], first_row=index)
            found[index].append(logits[0])
        while all(length + 3 <= len(row) for length, row in zip(lengths, rows, strict=True)):
            wrong = [
                [(token + 1) % self._vocab_size for token in row[at : at + 3]]
                for at, row in zip(lengths, rows, strict=True)
            ]
            self.forward(cache, wrong, lengths)
            right = [row[at : at + 3] for at, row in zip(lengths, rows, strict=True)]
            logits = self.forward(cache, right, lengths)
            for index in range(2):
                found[index].append(logits[index])
                lengths[index] += 3
        worst = 0.0
        for pieces, reference in zip(found, expected, strict=True):
            computed = torch.cat(pieces).float()
            reference = reference[: len(computed)].float()
            scale = reference.std().clamp(min=1e-6)
            worst = max(worst, float((computed - reference).abs().max() / scale))
        return float("inf") if math.isnan(worst) else worst


class _CellRun:
    """The closed loop of one cell, and the rows it writes."""

    def __init__(self, engine: TransformersEngine, cell: Cell, context: CellContext) -> None:
        self._engine = engine
        self._cell = cell
        self._context = context
        self._drafter = engine.drafter(cell.arm)
        self._law = SamplingLaw(
            temperature=cell.sampling.temperature, top_p=cell.sampling.top_p, top_k=cell.sampling.top_k
        )
        self._stop_ids = frozenset() if cell.sampling.ignore_eos else engine.stop_ids
        self._logging = engine.plan.logging
        self._slots: list[_Slot] = []
        self._requests: list[dict[str, Any]] = []
        self._chunks: dict[str, list[Any]] = {
            name: [] for name in ("request_id", "chunk", "received_s", "num_tokens")
        }
        self._steps: dict[str, list[Any]] = {name: [] for name in schema.STEPS.names[3:]}
        self._engine_steps: dict[str, list[Any]] = {name: [] for name in schema.ENGINE_STEPS.names[3:]}
        self._positions: dict[str, list[Any]] = {name: [] for name in schema.POSITIONS.names[3:]}
        self._tokens: dict[str, list[Any]] = {name: [] for name in schema.TOKENS.names[3:]}

    def run(self, requests: Sequence[PlannedRequest]) -> dict[str, pl.DataFrame]:
        queue = self._encode(requests)
        width = 1 + (self._drafter.num_speculative_tokens if self._drafter else 0)
        needed = max((len(ids) + request.max_tokens for request, ids in queue), default=1) + width
        rows = min(self._cell.concurrency, max(len(queue), 1))
        self._cache = self._engine.new_cache(num_rows=rows, capacity=needed)
        if self._drafter is not None:
            self._drafter.begin(num_slots=rows, capacity=needed)
        free_s = [self._context.clock()] * self._cell.concurrency
        with self._engine.tapped(self._drafter.taps if self._drafter else ()) as self._taps:
            while queue or self._slots:
                prefill_s = self._admit(queue, free_s)
                if self._slots:
                    self._step(prefill_s)
                self._release(free_s)
        return self._frames()

    def _encode(self, requests: Sequence[PlannedRequest]) -> deque[tuple[PlannedRequest, list[int]]]:
        queue: deque[tuple[PlannedRequest, list[int]]] = deque()
        for request in requests:
            ids = self._engine.encode(request.prompt)
            room = self._engine.max_positions - len(ids)
            if room < request.max_tokens:
                self._fail(
                    request,
                    ids,
                    "prompt_too_long",
                    f"{len(ids)} prompt tokens and {request.max_tokens} new ones exceed the model's "
                    f"{self._engine.max_positions} positions",
                )
                continue
            queue.append((request, ids))
        return queue

    def _admit(self, queue: deque[tuple[PlannedRequest, list[int]]], free_s: list[float]) -> float:
        """Fills free slots, one prefill each, and returns the seconds that took."""
        began = time.perf_counter()
        while queue and len(self._slots) < self._cell.concurrency:
            request, ids = queue.popleft()
            slot = _Slot(
                request=request,
                number=len(self._slots),
                prompt_ids=ids,
                sent_s=free_s.pop(0),
                rng=np.random.default_rng(request.seed),
            )
            logits = self._engine.forward(self._cache, [ids], [0], first_row=slot.number, last_only=True)
            verdict = judge(logits[:, -1:], [Draft()], self._law, [slot.rng])[0]
            self._slots.append(slot)
            slot.length = len(ids)
            self._emit([slot], [verdict], [Draft()], logits[:, -1:], step=False)
            if self._drafter is not None:
                self._drafter.admit(slot.number, [*ids, *slot.output], self._taps.features(0))
                self._engine.synchronise()
            if slot.finish_reason is not None:
                self._release(free_s)
        return time.perf_counter() - began

    def _step(self, prefill_s: float) -> None:
        """One target forward over every active request, with its drafts if the arm has a drafter."""
        slots = self._slots
        began = time.perf_counter()
        drafts = [Draft()] * len(slots)
        if self._drafter is not None:
            drafts = self._drafter.propose(
                [slot.number for slot in slots],
                temperature=self._law.temperature,
                rngs=[slot.rng for slot in slots],
            )
            self._engine.synchronise()
        drafted = time.perf_counter()
        width = 1 + max(len(draft) for draft in drafts)
        rows = [
            [slot.output[-1], *draft.token_ids] + [slot.output[-1]] * (width - 1 - len(draft))
            for slot, draft in zip(slots, drafts, strict=True)
        ]
        logits = self._engine.forward(self._cache, rows, [slot.length for slot in slots])
        verdicts = judge(logits, drafts, self._law, [slot.rng for slot in slots])
        self._engine.synchronise()
        verified = time.perf_counter()
        log = self._engine_steps
        log["engine_step"].append(len(log["engine_step"]))
        log["batch_size"].append(len(slots))
        log["num_query_tokens"].append(width * len(slots))
        log["prefill_s"].append(prefill_s)
        log["draft_s"].append(drafted - began)
        log["verify_s"].append(verified - drafted)
        log["end_s"].append(self._context.clock())
        self._emit(slots, verdicts, drafts, logits, step=True)

    def _emit(
        self,
        slots: Sequence[_Slot],
        verdicts: Sequence[Judgement],
        drafts: Sequence[Draft],
        logits: torch.Tensor,
        *,
        step: bool,
    ) -> None:
        """Hands each request its tokens, cut at a stop token or the limit, and logs them."""
        now = self._context.clock()
        emitted: list[list[int]] = []
        for slot, verdict in zip(slots, verdicts, strict=True):
            tokens = verdict.tokens[: slot.request.max_tokens - len(slot.output)]
            stop = next((place for place, token in enumerate(tokens) if token in self._stop_ids), None)
            if stop is not None:
                tokens = tokens[: stop + 1]
                slot.finish_reason = "stop"
            elif len(slot.output) + len(tokens) >= slot.request.max_tokens:
                slot.finish_reason = "length"
            emitted.append(tokens)
        if self._logging.tokens:
            self._log_tokens(slots, verdicts, drafts, logits, emitted)
        rows = zip(slots, verdicts, drafts, emitted, strict=True)
        for row, (slot, verdict, draft, tokens) in enumerate(rows):
            self._log_chunk(slot, now, len(tokens))
            if step:
                self._log_step(slot, verdict, draft, len(tokens))
                slot.length += verdict.num_accepted + 1
                slot.num_steps += 1
                if self._drafter is not None:
                    self._drafter.observe(slot.number, tokens, self._taps.features(row))
            else:
                slot.first_token_s = now
            slot.last_token_s = now
            slot.output += tokens

    def _release(self, free_s: list[float]) -> None:
        """Writes finished requests' rows and closes their gaps, so that rows in use stay the first ones."""
        now = self._context.clock()
        number = 0
        while number < len(self._slots):
            slot = self._slots[number]
            if slot.finish_reason is None:
                number += 1
                continue
            self._finish(slot)
            free_s.append(now)
            last = self._slots.pop()
            if last is not slot:
                self._cache.copy_row(last.number, number, last.length)
                self._slots[number] = last
                self._move_drafts(last, number)
            elif self._drafter is not None:
                self._drafter.release(slot.number)
            self._context.on_request_done()

    def _move_drafts(self, slot: _Slot, number: int) -> None:
        if self._drafter is not None:
            self._drafter.release(number)
            self._drafter.move(slot.number, number)
        slot.number = number

    # -- rows ------------------------------------------------------------------------------------

    def _log_chunk(self, slot: _Slot, now: float, num_tokens: int) -> None:
        log = self._chunks
        log["request_id"].append(slot.request.request_id)
        log["chunk"].append(slot.num_chunks)
        log["received_s"].append(now)
        log["num_tokens"].append(num_tokens)
        slot.num_chunks += 1

    def _log_step(self, slot: _Slot, verdict: Judgement, draft: Draft, num_emitted: int) -> None:
        log = self._steps
        log["request_id"].append(slot.request.request_id)
        log["prompt_id"].append(slot.request.prompt.id)
        log["step"].append(slot.num_steps)
        log["num_draft_tokens"].append(len(draft))
        log["num_accepted_tokens"].append(verdict.num_accepted)
        log["num_emitted_tokens"].append(num_emitted)
        log["engine_step"].append(len(self._engine_steps["engine_step"]) - 1)
        if not self._logging.positions:
            return
        rows = self._positions
        if len(draft):
            row = len(rows["position"])
            slot.drafted.append(_Drafted(row=row, start=len(slot.output), draft=draft))
        reached = len(verdict.draft_target_prob)
        for position in range(len(draft)):
            rows["request_id"].append(slot.request.request_id)
            rows["prompt_id"].append(slot.request.prompt.id)
            rows["step"].append(slot.num_steps)
            rows["position"].append(position)
            rows["reached"].append(position < reached)
            rows["accepted"].append(position < verdict.num_accepted)
            rows["target_rank"].append(verdict.argmax_rank[position] if position < reached else None)
            rows["draft_prob"].append(draft.prob_of(position))
            rows["target_prob"].append(verdict.draft_target_prob[position] if position < reached else None)
            rows["in_answer"].append(False)
            rows["answer_rank"].append(None)

    def _log_tokens(
        self,
        slots: Sequence[_Slot],
        verdicts: Sequence[Judgement],
        drafts: Sequence[Draft],
        logits: torch.Tensor,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        rows = [row for row, tokens in enumerate(emitted) for _ in tokens]
        columns = [column for tokens in emitted for column in range(len(tokens))]
        facts = token_facts(logits[rows, columns], [token for tokens in emitted for token in tokens])
        log = self._tokens
        for place, (row, column) in enumerate(zip(rows, columns, strict=True)):
            slot, verdict, draft = slots[row], verdicts[row], drafts[row]
            if column < verdict.num_accepted:
                origin = "accepted"
            elif len(draft) == 0:
                origin = "baseline"
            else:
                origin = "recovered" if column < len(draft) else "bonus"
            log["request_id"].append(slot.request.request_id)
            log["prompt_id"].append(slot.request.prompt.id)
            log["index"].append(len(slot.output) + column)
            log["token_id"].append(emitted[row][column])
            log["origin"].append(origin)
            log["logprob"].append(facts.logprob[place])
            log["entropy_nats"].append(facts.entropy_nats[place])
            log["top1_top2_margin"].append(facts.margin_nats[place])
            log["cdf_low"].append(verdict.cdf_low[column])
            log["cdf_high"].append(verdict.cdf_high[column])
            slot.entropy_sum_nats += facts.entropy_nats[place]

    def _complete_positions(self, slot: _Slot) -> None:
        """Compares each drafted place, reached or not, with what the finished answer holds there."""
        ranks, inside = self._positions["answer_rank"], self._positions["in_answer"]
        for step in slot.drafted:
            answer = slot.output[step.start : step.start + len(step.draft)]
            inside[step.row : step.row + len(answer)] = [True] * len(answer)
            if step.draft.candidate_ids is not None:
                found = [step.draft.rank_of(position, token) for position, token in enumerate(answer)]
                ranks[step.row : step.row + len(answer)] = found

    def _finish(self, slot: _Slot) -> None:
        self._complete_positions(slot)
        text = self._engine.decode(slot.output)
        self._requests.append(
            {
                **self._labels(slot.request),
                "scheduled_s": slot.sent_s,
                "sent_s": slot.sent_s,
                "first_token_s": slot.first_token_s,
                "first_answer_s": slot.first_token_s,
                "last_token_s": slot.last_token_s,
                "num_prompt_tokens": len(slot.prompt_ids),
                "num_cached_tokens": 0,
                "num_output_tokens": len(slot.output),
                "num_first_chunk_tokens": 1,
                "num_chunks": slot.num_chunks,
                "finish_reason": slot.finish_reason,
                "status": "ok",
                "output_text": text,
                "output_token_ids": slot.output,
                "grader_score": grade(slot.request.prompt, text),
                "mean_token_entropy_nats": slot.entropy_sum_nats / len(slot.output)
                if self._logging.tokens
                else None,
            }
        )

    def _fail(self, request: PlannedRequest, ids: list[int], kind: str, error: str) -> None:
        self._requests.append(
            {
                **self._labels(request),
                "scheduled_s": self._context.clock(),
                "num_prompt_tokens": len(ids),
                "status": "error",
                "error_kind": kind,
                "error": error,
            }
        )
        self._context.on_request_done()

    def _labels(self, request: PlannedRequest) -> dict[str, Any]:
        cell, prompt = self._cell, request.prompt
        return {
            "repeat": cell.repeat,
            "sampling": cell.sampling.name,
            "concurrency": cell.concurrency,
            "request_id": request.request_id,
            "prompt_id": prompt.id,
            "prompt_sha256": prompt.sha256,
            "task": prompt.task,
            "entropy_tier": prompt.tier,
            "length_tier": prompt.length,
        }

    def _frames(self) -> dict[str, pl.DataFrame]:
        keys = {"run_id": self._context.run_id, "arm": self._cell.arm.name, "cell_id": self._cell.cell_id}
        requests = sorted(self._requests, key=lambda row: str(row["request_id"]))
        content: dict[str, Any] = {
            "requests": {name: [row.get(name) for row in requests] for name in schema.REQUESTS.names},
            "chunks": self._chunks,
            "steps": self._steps,
            "engine_steps": self._engine_steps,
        }
        if self._logging.positions:
            content["positions"] = self._positions
        if self._logging.tokens:
            content["tokens"] = self._tokens
        frames = {}
        for name, columns in content.items():
            table = schema.TABLES[name]
            rows = len(next(iter(columns.values())))
            full = {column: columns.get(column) for column in table.names}
            full.update({key: [value] * rows for key, value in keys.items() if key in table.names})
            frames[name] = pl.DataFrame(full, schema=table.polars_schema)
        return frames


def _resolve_target(plan: Plan) -> tuple[str, str, str | None]:
    """Label for reports, path or hub id to load, and sha256 of a local directory."""
    if plan.target.model == DEMO_TARGET:
        from specnb.demo import DEMO_TARGET_LABEL, ensure_demo_target

        folder = ensure_demo_target()
        return DEMO_TARGET_LABEL, str(folder), directory_sha256(folder)
    name = plan.located(plan.target.model)
    path = Path(name)
    if path.is_dir():
        if not list(path.glob("*.safetensors")):
            raise EngineError(
                f"target.model: {path} holds no .safetensors file; convert the weights (pickle is refused)"
            )
        return path.name, str(path), directory_sha256(path)
    if path.exists() or name.startswith((".", "/", "~")):
        raise EngineError(f"target.model: {name}: no such model directory")
    return name, name, None


def _shared_arguments(plan: Plan) -> dict[str, Any]:
    return {"revision": plan.target.revision, "trust_remote_code": plan.target.trust_remote_code}


def _read_config(plan: Plan, path: str) -> Any:
    """The target's config, refused if its state can't be rolled back."""
    config = AutoConfig.from_pretrained(path, **_shared_arguments(plan))
    _refuse_stateful(config, path)
    return config


def _load(plan: Plan, path: str, device: torch.device, config: Any) -> tuple[Any, Any]:
    dtype: Any = plan.target.dtype
    if dtype != "auto":
        dtype = _DTYPES[dtype]
    elif device.type == "cpu":
        dtype = torch.float32
    shared = _shared_arguments(plan)
    tokenizer = AutoTokenizer.from_pretrained(path, **shared)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True, config=config, **shared
    )
    return loaded.to(device).eval(), tokenizer


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Keeps transformers quiet, and turns its errors into one line."""
    with quiet_transformers():
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"target.model: {path} does not fit the device's memory; use a smaller dtype"
            ) from error
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise EngineError(
                f"target.model: {path} can't be loaded ({str(error).strip().splitlines()[0]})"
            ) from error


@contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Puts the arm before a drafter's refusal."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"arms.{arm.name}.{error}") from error
    except EngineError as error:
        raise EngineError(f"arms.{arm.name}.{error}") from error


def _target_shape(config: Any) -> TargetShape:
    return TargetShape(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_layers=config.num_hidden_layers
    )


def _decoder_layers(model: Any, count: int) -> Any:
    """The target's decoder layers in order.

    Raises
    ------
    UnsupportedModelError
        They can't be told from the model's structure.
    """
    found = [
        module
        for module in model.get_decoder().children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"target.model: the decoder layers of {type(model).__name__} can't be found, so no drafter can "
            "read their outputs; use engine.kind: vllm"
        )
    return found[0]


def _refuse_stateful(config: Any, path: str) -> None:
    """Raises for models whose state can't be rolled back by forgetting keys."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    stateful = bool(getattr(model_class, "_is_stateful", False))
    if kinds - set(_DENSE_LAYERS) or stateful:
        found = ", ".join(sorted(kinds - set(_DENSE_LAYERS))) or "recurrent state"
        raise UnsupportedModelError(
            f"target.model: {path} has layers whose state can't be rolled back ({found}); "
            "the in-process engine needs dense attention: use engine.kind: vllm"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"target.model: {path} is an encoder-decoder; specnb measures decoder-only models"
        )


def _attention_layout(text_config: Any) -> tuple[int | None, str]:
    """Sliding window width (None without) and the kind of mask the model's layers take."""
    window = getattr(text_config, "sliding_window", None)
    if window is None or getattr(text_config, "use_sliding_window", True) is False:
        return None, "full"
    kinds = set(getattr(text_config, "layer_types", None) or ("sliding_attention",))
    if kinds == {"full_attention"}:
        return None, "full"
    return int(window), "mixed" if getattr(text_config, "layer_types", None) else "sliding"
