"""The corpus: conversations in the target's own words, and the held-out prompts that judge a drafter.

A drafter must predict what the target writes, so every answer is the target's own. Made in
batches, each saved as one compressed file of token ids, so that an interrupted making goes on
where it stopped. Rows are told apart for good: training, held out (the smallest digests
of the prompts), and the evaluation workload, whose overlap with every prompt is excluded
and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specnb.errors import PlanError, StorageError
from specnb.provenance import utc_now
from specnb.training.decode import Clock, generate
from specnb.training.openings import OPENINGS, draw_opening
from specnb.training.plan import CorpusPlan, TrainPlan
from specnb.training.target import TargetModel
from specnb.workloads import Prompt, load_workload

NGRAM_WORDS = 13
KINDS = ("self", "follow", "traffic", *OPENINGS)
_LOOP_NGRAM = 8
_LOOP_REPEATS = 8
_MARK = "specnbmark"
_MANIFEST = "corpus.json"
_EVALUATION = "evaluation.npz"
_MIN_WORDS = 2

IntArray = np.ndarray[Any, np.dtype[Any]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Conversations as token ids, one prompt and one answer each.

    `tokens` of all rows end to end, `lengths` and `prompt_lengths` [rows], `temperatures` [rows] (0: greedy),
    `digests` [rows] of the normalised prompts, `kinds` [rows] as numbers into `KINDS`.
    """

    tokens: IntArray
    lengths: IntArray
    prompt_lengths: IntArray
    temperatures: IntArray
    digests: IntArray
    kinds: IntArray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answers."""
        return int(self.lengths.sum() - self.prompt_lengths.sum())

    def split(self) -> list[IntArray]:
        """Token ids row by row."""
        return np.split(self.tokens, self.lengths.cumsum()[:-1]) if len(self) else []

    def take(self, rows: IntArray) -> Rows:
        """The given rows in the given order."""
        pieces = self.split()
        chosen = [pieces[row] for row in rows]
        return Rows(
            tokens=np.concatenate(chosen) if chosen else self.tokens[:0],
            **{name: getattr(self, name)[rows] for name in _PER_ROW},
        )


_PER_ROW = ("lengths", "prompt_lengths", "temperatures", "digests", "kinds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training and held-out rows, the evaluation workload's greedy answers, and the manifest."""

    training: Rows
    held_out: Rows
    evaluation: Rows
    manifest: dict[str, Any]


class ChatFormat:
    """Text around a user's words in the target's chat template, found by rendering a marked conversation."""

    def __init__(self, target: TargetModel) -> None:
        self._tokenizer = target.tokenizer
        self._fallback = target.stop_ids[0] if target.stop_ids else 0

    def before_answers(self, conversations: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        """Prompt ids of conversations that end with the user's turn."""
        return self._ids([self._rendered(messages, answer=True) for messages in conversations])

    def before_users(self, begun: Sequence[tuple[list[dict[str, str]], str]]) -> list[list[int]]:
        """Ids up to and with the first words of the next user turn, for (history, first words)."""
        texts = []
        for history, opening in begun:
            turn = {"role": "user", "content": f"{opening}{_MARK}"}
            text = self._rendered([*history, turn], answer=False)
            texts.append(text[: text.rindex(_MARK)])
        return self._ids(texts)

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token ids without special tokens."""
        # An empty batch would be taken for one row without tokens.
        decoded: list[str] = self._tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []
        return decoded

    def _rendered(self, messages: Sequence[dict[str, str]], *, answer: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer
        )
        return text

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # All at once: the tokenizer then works in parallel.
        found = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [ids or [self._fallback] for ids in found]


def build_corpus(
    plan: TrainPlan, target: TargetModel, folder: Path, *, say: Say = lambda line: None
) -> Corpus:
    """Makes what is missing of a corpus in `folder` and reads it.

    Raises
    ------
    PlanError
        `corpus.reuse` holds no finished corpus or one of another target, or too few rows came out.
    StorageError
        The folder can't be written.
    """
    if plan.corpus.reuse is not None:
        source = Path(plan.located(plan.corpus.reuse))
        if not (source / _MANIFEST).exists():
            raise PlanError(f"corpus.reuse: {source} holds no finished corpus ({_MANIFEST}); name its folder")
        return _finished(plan, target, source, "corpus.reuse")
    if not (folder / _MANIFEST).exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _make(plan, target, folder, say)
        except OSError as error:
            raise StorageError(
                f"{folder}: can't be written ({error.strerror or error}); make room and resume"
            ) from error
    return _finished(plan, target, folder, "corpus")


def read_rows(path: Path) -> Rows:
    """Rows of one saved file."""
    with np.load(path, allow_pickle=False) as held:
        return Rows(**{name: held[name] for name in ("tokens", *_PER_ROW)})


def _finished(plan: TrainPlan, target: TargetModel, folder: Path, key: str) -> Corpus:
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest["target_sha256"] != target.sha256:
        raise PlanError(f"{key}: {folder} was made by another target; make a new corpus")
    parts = [read_rows(path) for path in sorted(folder.glob("rows-*.npz"))]
    rows = Rows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _row_names()})
    by_digest = np.argsort(rows.digests, kind="stable")
    held_out = min(plan.corpus.held_out, len(rows) // 2)
    if held_out == 0:
        raise PlanError(f"{key}: only {len(rows)} rows came out; raise corpus.seconds or corpus.max_rows")
    return Corpus(
        training=rows.take(np.sort(by_digest[held_out:])),
        held_out=rows.take(by_digest[:held_out]),
        evaluation=read_rows(folder / _EVALUATION),
        manifest=manifest,
    )


def _row_names() -> tuple[str, ...]:
    return ("tokens", *_PER_ROW)


@dataclass(slots=True)
class _Turn:
    """A user turn in the making."""

    kind: str
    history: list[dict[str, str]]
    text: str
    closed: bool
    whole: bool = True


@dataclass(slots=True)
class _Making:
    """What one making keeps in mind between batches."""

    seen: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    pairs: list[list[dict[str, str]]] = field(default_factory=list)
    spent_s: float = 0.0


def _make(plan: TrainPlan, target: TargetModel, folder: Path, say: Say) -> None:
    settings = plan.corpus
    chat = ChatFormat(target)
    excluded = _ngrams_of_workloads(plan)
    state = _Making()
    traffic = load_workload(plan.located(settings.traffic)).prompts if settings.traffic else ()
    for path in sorted(folder.glob("progress-*.json")):
        done = json.loads(path.read_text())
        state.counts.update(done["counts"])
        state.spent_s += done["seconds"]
        rows = read_rows(folder / done["file"])
        state.seen.update(int(value) for value in rows.digests)
        state.num_rows += len(rows)
    _evaluation_rows(plan, target, chat, folder, say)
    batch = len(list(folder.glob("progress-*.json")))
    while state.num_rows < settings.max_rows and state.spent_s < settings.seconds:
        begun = time.perf_counter()
        rng = np.random.default_rng([plan.seed, batch])
        size = min(settings.rows_per_batch, settings.max_rows - state.num_rows)
        part = traffic[batch * settings.rows_per_batch :][:size]
        clock = Clock(settings.seconds - state.spent_s)
        counts: Counter[str] = Counter()
        turns = _user_turns(settings, target, chat, state, rng, part, size, clock)
        turns = _admitted(turns, state.seen, excluded, counts)
        rows = _answered(settings, target, chat, state, turns, rng, counts)
        name = f"rows-{batch:05d}.npz"
        _save(folder / name, rows, target)
        spent = time.perf_counter() - begun
        progress = {"file": name, "counts": dict(counts), "seconds": spent}
        _write_json(folder / f"progress-{batch:05d}.json", progress)
        state.counts.update(counts)
        state.spent_s += spent
        state.num_rows += len(rows)
        say(
            f"Corpus: {state.num_rows} rows, {rows.num_answer_tokens / spent:.0f} answer tokens/s, "
            f"{state.spent_s:.0f} of {settings.seconds:.0f} s"
        )
        batch += 1
        if len(rows) == 0 and batch > len(traffic) // settings.rows_per_batch + 20:
            break
    _write_json(
        folder / _MANIFEST,
        {
            "target": target.label,
            "target_sha256": target.sha256,
            "finished": utc_now(),
            "seed": plan.seed,
            "settings": settings.model_dump(mode="json"),
            "rows": state.num_rows,
            "counts": dict(sorted(state.counts.items())),
            "seconds": round(state.spent_s, 1),
            "overlap": {
                "words": NGRAM_WORDS,
                "workloads": list(settings.exclude),
                "dropped_prompts": state.counts["overlapping"],
            },
        },
    )


def _user_turns(
    settings: CorpusPlan,
    target: TargetModel,
    chat: ChatFormat,
    state: _Making,
    rng: np.random.Generator,
    traffic: Sequence[Prompt],
    size: int,
    clock: Clock,
) -> list[_Turn]:
    turns = [_from_traffic(prompt) for prompt in traffic]
    for _ in range(size - len(turns)):
        draw = rng.random()
        if draw < settings.task_share:
            opening = draw_opening(rng)
            turns.append(_Turn(opening.task, [], opening.text, opening.closed))
        elif draw < settings.task_share + settings.follow_share and state.pairs:
            history = state.pairs[int(rng.integers(len(state.pairs)))]
            turns.append(_Turn("follow", history, "", False))
        else:
            turns.append(_Turn("self", [], "", False))
    unfinished = [turn for turn in turns if not turn.closed]
    if unfinished:
        prompts = chat.before_users([(turn.history, turn.text) for turn in unfinished])
        added = generate(
            target.model,
            prompts,
            [1.0] * len(prompts),
            max_new_tokens=settings.prompt_tokens,
            stop_ids=target.stop_ids,
            top_p=0.9,
            seed=int(rng.integers(2**31)),
            keep_going=lambda: clock.open,
        )
        for turn, ids, text in zip(unfinished, added, chat.texts(added), strict=True):
            ended = bool(ids) and ids[-1] in target.stop_ids
            # A cut document still makes a prompt; it ends at its last whole sentence.
            turn.text = turn.text + (text if ended else _whole_sentences(text))
            turn.whole = ended or turn.kind not in ("self", "follow")
    return turns


def _from_traffic(prompt: Prompt) -> _Turn:
    if prompt.text is not None:
        return _Turn("traffic", [], prompt.text, True)
    messages = [message.to_dict() for message in prompt.messages]
    return _Turn("traffic", messages[:-1], messages[-1]["content"], True)


def _admitted(
    turns: Sequence[_Turn], seen: set[int], excluded: set[int], counts: Counter[str]
) -> list[_Turn]:
    """Turns that are whole, new and apart from the excluded workloads. Effects: adds to `seen`, `counts`."""
    kept = []
    for turn in turns:
        turn.text = turn.text.strip()
        if not turn.whole or len(turn.text.split()) < _MIN_WORDS:
            counts["unfinished"] += 1
            continue
        digest = _digest(turn)
        if digest in seen:
            counts["duplicate"] += 1
        elif not excluded.isdisjoint(_ngrams(turn.text)):
            counts["overlapping"] += 1
        else:
            seen.add(digest)
            kept.append(turn)
    return kept


def _answered(
    settings: CorpusPlan,
    target: TargetModel,
    chat: ChatFormat,
    state: _Making,
    turns: Sequence[_Turn],
    rng: np.random.Generator,
    counts: Counter[str],
) -> Rows:
    """The turns with the target's answers. Effects: adds to `counts`, replaces `state.pairs`."""
    conversations = [[*turn.history, {"role": "user", "content": turn.text}] for turn in turns]
    prompts = chat.before_answers(conversations)
    room = settings.max_length - 8
    chosen = [number for number, prompt in enumerate(prompts) if len(prompt) <= room]
    counts["too long"] += len(prompts) - len(chosen)
    greedy = rng.random(len(chosen)) < settings.greedy_share
    heat = np.where(greedy, 0.0, settings.temperature)
    answers = (
        generate(
            target.model,
            [prompts[number] for number in chosen],
            heat.tolist(),
            max_new_tokens=settings.answer_tokens,
            stop_ids=target.stop_ids,
            top_p=settings.top_p,
            seed=int(rng.integers(2**31)),
        )
        if chosen
        else []
    )
    found = []
    state.pairs = []
    texts = chat.texts(answers)
    for number, temperature, answer, text in zip(chosen, heat, answers, texts, strict=True):
        ids = answer[: settings.max_length - len(prompts[number])]
        end = loop_start(ids)
        if end is not None:
            counts["looping"] += 1
            ids = ids[:end] if settings.cut_loops else ids
        elif ids[-1] in target.stop_ids:
            counts["ended"] += 1
        if len(ids) < 2:
            counts["empty"] += 1
            continue
        turn = turns[number]
        counts[turn.kind] += 1
        counts["answer_tokens"] += len(ids)
        found.append((prompts[number], ids, temperature, _digest(turn), KINDS.index(turn.kind)))
        # Short exchanges only: the longest row of a batch sets the width of all.
        short = len(prompts[number]) + len(ids) < settings.max_length // 4
        if short and end is None and not turn.history and text.strip():
            state.pairs.append([*conversations[number], {"role": "assistant", "content": text.strip()}])
    return rows_from(found, target)


def rows_from(found: Sequence[tuple[list[int], list[int], float, int, int]], target: TargetModel) -> Rows:
    """Rows from (prompt ids, answer ids, temperature, digest, kind)."""
    tokens = [np.array([*prompt, *answer], dtype=_token_type(target)) for prompt, answer, *_ in found]
    return Rows(
        tokens=np.concatenate(tokens) if tokens else np.zeros(0, dtype=_token_type(target)),
        lengths=np.array([len(row) for row in tokens], dtype=np.int32),
        prompt_lengths=np.array([len(row[0]) for row in found], dtype=np.int32),
        temperatures=np.array([row[2] for row in found], dtype=np.float32),
        digests=np.array([row[3] for row in found], dtype=np.uint64),
        kinds=np.array([row[4] for row in found], dtype=np.uint8),
    )


def _evaluation_rows(plan: TrainPlan, target: TargetModel, chat: ChatFormat, folder: Path, say: Say) -> None:
    """Greedy answers to the evaluation workload, in file order; its prompts' labels lie beside them."""
    if (folder / _EVALUATION).exists():
        return
    settings = plan.evaluation
    prompts = load_workload(plan.located(settings.workload)).prompts[: settings.max_prompts]
    say(f"Answering {len(prompts)} prompts of {settings.workload}, which stay out of training")
    turns = [_from_traffic(prompt) for prompt in prompts]
    ids = chat.before_answers([[*turn.history, {"role": "user", "content": turn.text}] for turn in turns])
    answers: list[list[int]] = []
    for start in range(0, len(ids), plan.corpus.rows_per_batch):
        batch = ids[start : start + plan.corpus.rows_per_batch]
        answers += generate(
            target.model,
            batch,
            [0.0] * len(batch),
            max_new_tokens=settings.max_tokens,
            stop_ids=target.stop_ids,
        )
    found = [
        (prompt, answer, 0.0, _digest(turn), KINDS.index("traffic"))
        for prompt, answer, turn in zip(ids, answers, turns, strict=True)
    ]
    labels = [
        {"id": prompt.id, "tier": prompt.tier, "task": prompt.task, "looping": loop_start(answer) is not None}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    _write_json(folder / "evaluation.json", labels)
    _save(folder / _EVALUATION, rows_from(found, target), target)


def loop_start(ids: Sequence[int]) -> int | None:
    """Index of the token at which an answer has begun to repeat itself; None if it does not.

    An answer loops where more than 8 of its 8-grams have occurred in it before.
    """
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for end in range(_LOOP_NGRAM, len(ids) + 1):
        gram = tuple(ids[end - _LOOP_NGRAM : end])
        repeats += gram in seen
        seen.add(gram)
        if repeats > _LOOP_REPEATS:
            return end
    return None


def _ngrams_of_workloads(plan: TrainPlan) -> set[int]:
    names = {*plan.corpus.exclude, plan.evaluation.workload}
    found: set[int] = set()
    for name in sorted(names):
        for prompt in load_workload(plan.located(name)).prompts:
            texts = [prompt.text] if prompt.text is not None else [m.content for m in prompt.messages]
            for text in texts:
                found |= _ngrams(text)
    return found


def _ngrams(text: str) -> set[int]:
    """Digests of the word 13-grams of a text, case and punctuation aside."""
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[start : start + NGRAM_WORDS])) for start in range(len(words) - NGRAM_WORDS + 1)}


def _digest(turn: _Turn) -> int:
    """63 bits of the normalised conversation before the answer."""
    texts = [message["content"] for message in turn.history] + [turn.text]
    normal = "\n".join(" ".join(re.findall(r"\w+", text.lower())) for text in texts)
    return int.from_bytes(hashlib.sha256(normal.encode()).digest()[:8]) >> 1


def _whole_sentences(text: str) -> str:
    ends = [match.end() for match in re.finditer(r"[.!?:;}\])\"']\s|\n", text)]
    return text[: ends[-1]].rstrip() if ends else text


def _token_type(target: TargetModel) -> Any:
    return np.uint16 if int(target.config.vocab_size) <= 1 << 16 else np.uint32


def _save(path: Path, rows: Rows, target: TargetModel) -> None:
    aside = path.with_name(f".{path.name}.partial.npz")
    np.savez_compressed(aside, **{name: getattr(rows, name) for name in _row_names()})
    aside.rename(path)


def _write_json(path: Path, content: Any) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.rename(path)
