"""Prompts to measure with: loading, selecting, fingerprinting and grading them.

A workload is a JSONL file, one prompt a line, with the labels that the analysis
needs: entropy tier, expected output length, task, and a grader where the answer
can be checked. Two workloads come with the repository (`builtin-en`, `builtin-zh`);
a user's own file is read with the same strictness, because a line that is skipped
in silence changes a measurement without a trace.

May import `specnb.errors` only, and neither engines nor torch. Separate so that a
file can be checked, selected and graded on a laptop, before any GPU time is spent.
"""

import difflib
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from specnb.errors import WorkloadError

__all__ = [
    "BUILTIN_WORKLOADS",
    "LENGTHS",
    "TIERS",
    "UNLABELLED",
    "ExactGrader",
    "Grader",
    "JsonSchemaGrader",
    "Message",
    "NumericGrader",
    "Prompt",
    "RegexGrader",
    "Workload",
    "grade",
    "load_workload",
    "select_prompts",
    "warmup_prompts",
]

BUILTIN_WORKLOADS: Final = ("builtin-en", "builtin-zh")
TIERS: Final = ("low", "medium", "high")
LENGTHS: Final = ("short", "medium", "long")
UNLABELLED: Final = "unlabelled"

_ROLES: Final = ("system", "user", "assistant")
_KEYS: Final = ("prompt", "messages", "id", "task", "tier", "length", "language", "grader")
_MESSAGE_KEYS: Final = ("role", "content")
_GRADER_KEYS: Final = {
    "exact": ("kind", "answer", "ignore_case"),
    "regex": ("kind", "pattern"),
    "json_schema": ("kind", "schema"),
    "numeric": ("kind", "answer", "tolerance"),
}
_BOM: Final = b"\xef\xbb\xbf"
_FENCE: Final = re.compile(r"\A```[\w+-]*[ \t]*\n(.*)\n[ \t]*```\Z", re.DOTALL)
# A digit right after a lower-case letter belongs to a unit or a name (m2, x1), not to an answer.
_NUMBER: Final = re.compile(
    r"(?<![a-z\d.])(?:(?<![\w)])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat.

    Parameters
    ----------
    role : str
        `system`, `user` or `assistant`.
    content : str
        Text of the turn, not blank.

    Raises
    ------
    ValueError
        If the role is unknown or the content blank.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"unknown role {self.role!r}; use {_alternatives(_ROLES)}")
        if not self.content.strip():
            raise ValueError("content is empty; give the turn a text")

    def to_dict(self) -> dict[str, str]:
        """Return the turn as chat endpoints take it, `{"role": ..., "content": ...}`."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactGrader:
    """Right if the answer equals `answer`, spaces around it and one trailing period aside."""

    answer: str
    ignore_case: bool = False

    def accepts(self, text: str) -> bool:
        """Return whether `text` is the right answer."""
        left, right = _bare(text), _bare(self.answer)
        return left.casefold() == right.casefold() if self.ignore_case else left == right

    def to_dict(self) -> dict[str, Any]:
        """Return the grader as a workload line holds it."""
        return {"kind": "exact", "answer": self.answer, "ignore_case": self.ignore_case}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexGrader:
    """Right if `pattern` is found anywhere in the answer (`re.search`, dot matches newline).

    Notes
    -----
    There is no time limit. Models loop, so a chain such as `a.*b.*c` can backtrack for minutes;
    write it with atomic groups, `\\A(?>.*?a)(?>.*?b)(?>.*?c)`, as the built-in workloads do.
    """

    pattern: str

    def accepts(self, text: str) -> bool:
        """Return whether `text` is a right answer."""
        return re.search(self.pattern, text, re.DOTALL) is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the grader as a workload line holds it."""
        return {"kind": "regex", "pattern": self.pattern}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchemaGrader:
    """Right if the whole answer, or the one fenced block that it consists of, is JSON of a schema.

    Strict JSON: NaN, Infinity and repeated keys make the answer wrong, and so does prose
    around the JSON. The schema is read as draft 2020-12.

    Parameters
    ----------
    schema_json : str
        The schema as JSON text (text, so that the grader is immutable and can be hashed).
    """

    schema_json: str

    def accepts(self, text: str) -> bool:
        """Return whether `text` is a right answer."""
        stripped = text.strip()
        fenced = _FENCE.match(stripped)
        try:
            value = _strict_json(fenced.group(1) if fenced else stripped)
        except (ValueError, RecursionError):
            return False
        return bool(_validator(json.loads(self.schema_json)).is_valid(value))

    def to_dict(self) -> dict[str, Any]:
        """Return the grader as a workload line holds it."""
        return {"kind": "json_schema", "schema": json.loads(self.schema_json)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericGrader:
    """Right if the last number of the answer is within `tolerance` of `answer`.

    Thousands may be separated by commas (`1,250.5`). Digits that follow a lower-case
    letter directly are part of a unit or a name (`m2`) and are not read as a number.
    """

    answer: float
    tolerance: float = 0.0

    def accepts(self, text: str) -> bool:
        """Return whether `text` is a right answer."""
        found = _NUMBER.findall(text)
        if not found:
            return False
        value = float(found[-1].replace(",", "").replace("\u2212", "-"))
        # The slack is for binary fractions: 0.3 is to be within 0.1 of 0.2.
        return abs(value - self.answer) <= self.tolerance + 1e-9 * max(1.0, abs(self.answer))

    def to_dict(self) -> dict[str, Any]:
        """Return the grader as a workload line holds it."""
        return {"kind": "numeric", "answer": self.answer, "tolerance": self.tolerance}


Grader = ExactGrader | RegexGrader | JsonSchemaGrader | NumericGrader


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt with its labels.

    Parameters
    ----------
    id : str
        Unique in its workload; the `prompt_id` of the records and the cluster of the statistics.
    task : str
        Kind of work, `user` where the file does not say.
    tier : str
        Entropy tier: `low`, `medium`, `high` or `unlabelled`.
    length : str
        Expected output length: `short` (up to about 40 tokens), `medium` (40 to 150), `long`
        (150 to 400) or `unlabelled`.
    language : str, optional
        Language code; None where a user's file does not say.
    messages : tuple of Message
        The chat, ending with the user's turn. Empty for a raw prompt.
    text : str, optional
        Raw prompt for completion endpoints. Exactly one of `messages` and `text` is given.
    grader : Grader, optional
        How to check an answer; None where it can't be checked.

    Raises
    ------
    ValueError
        If both or neither of `messages` and `text` are given, the last turn is not the user's,
        or tier or length is unknown.
    """

    id: str
    task: str = "user"
    tier: str = UNLABELLED
    length: str = UNLABELLED
    language: str | None = None
    messages: tuple[Message, ...] = ()
    text: str | None = None
    grader: Grader | None = None

    def __post_init__(self) -> None:
        if bool(self.messages) == (self.text is not None):
            raise ValueError(f"prompt {self.id!r} needs exactly one of messages and text")
        if self.messages and self.messages[-1].role != "user":
            raise ValueError(
                f"prompt {self.id!r} ends with a turn of {self.messages[-1].role!r}; end with a user turn"
            )
        if self.text is not None and not self.text.strip():
            raise ValueError(f"prompt {self.id!r} has an empty text")
        for name, value, known in (("tier", self.tier, TIERS), ("length", self.length, LENGTHS)):
            if value not in (*known, UNLABELLED):
                options = _alternatives((*known, UNLABELLED))
                raise ValueError(f"prompt {self.id!r} has unknown {name} {value!r}; use {options}")

    @property
    def sha256(self) -> str:
        """Hex digest of what the model is given: the messages or the text, and no label."""
        return _digest(self.text if self.text is not None else [turn.to_dict() for turn in self.messages])

    def to_dict(self) -> dict[str, Any]:
        """Return the prompt as a workload line that `load_workload` reads back to an equal prompt."""
        row: dict[str, Any] = {"id": self.id}
        if self.language is not None:
            row["language"] = self.language
        row["task"] = self.task
        row |= {
            key: label for key, label in (("tier", self.tier), ("length", self.length)) if label != UNLABELLED
        }
        if self.text is not None:
            row["prompt"] = self.text
        else:
            row["messages"] = [turn.to_dict() for turn in self.messages]
        if self.grader is not None:
            row["grader"] = self.grader.to_dict()
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts in file order.

    Parameters
    ----------
    name : str
        Name of a built-in workload, or the file's name without its extension.
    prompts : tuple of Prompt
        At least one, ids unique.
    path : Path
        The file that was read.

    Raises
    ------
    ValueError
        If there is no prompt or an id occurs twice.
    """

    name: str
    prompts: tuple[Prompt, ...]
    path: Path

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError(f"workload {self.name!r} has no prompts")
        repeated = [key for key, count in Counter(prompt.id for prompt in self.prompts).items() if count > 1]
        if repeated:
            raise ValueError(f"workload {self.name!r} has the id {repeated[0]!r} more than once")

    @property
    def sha256(self) -> str:
        """Hex digest over all that can change a measurement.

        Covers the prompts in order with ids, labels, contents and graders. Name, path, and
        how the file spells its JSON (spaces, key order, blank lines, CRLF) do not count.
        """
        return _digest([prompt.to_dict() for prompt in self.prompts])


def load_workload(name_or_path: str | os.PathLike[str]) -> Workload:
    """Read a built-in workload or a user's JSONL file.

    Parameters
    ----------
    name_or_path : str or path
        `builtin-en` or `builtin-zh`, looked up in `workloads/` of the directory that the
        environment variable SPECNB_DATA names, else of `data/` in the repository that holds the
        package. Anything else is the path of a JSONL file in UTF-8: one object a line with
        exactly one of `prompt` (text) and `messages` (list of role and content), and optionally
        `id` (default `line-` and the line number), `task` (default `user`), `tier`, `length`
        (default `unlabelled`), `language`, `grader`. A key with null counts as absent. Blank
        lines are skipped; a byte order mark and CRLF are accepted.

    Returns
    -------
    Workload
        The prompts in file order.

    Raises
    ------
    WorkloadError
        `FILE: what; what to do` if the file is missing, can't be read, or holds no prompt, and
        `FILE:LINE: what; what to do` if a line is not UTF-8, not strict JSON (malformed, NaN,
        numbers out of range, repeated keys, lone surrogates), not an object, has an unknown or
        mistyped key, both or neither of `prompt` and `messages`, an unknown tier, length, role
        or grader, empty content, a last message that is not the user's, an id already used, or
        a grader whose regex or JSON schema is invalid.
    """
    source = os.fspath(name_or_path)
    builtin = source in BUILTIN_WORKLOADS
    path = _data_dir() / "workloads" / f"{source}.jsonl" if builtin else Path(source)
    prompts: list[Prompt] = []
    line_by_id: dict[str, int] = {}
    for line_number, line in _lines(path, builtin=builtin):
        prompt = _prompt(_Place(file=str(path), line=line_number), line)
        if prompt.id in line_by_id:
            _Place(file=str(path), line=line_number).fail(
                f"id {prompt.id!r} is already used on line {line_by_id[prompt.id]}", "make ids unique"
            )
        line_by_id[prompt.id] = line_number
        prompts.append(prompt)
    if not prompts:
        raise WorkloadError(f"{path}: no prompts in the file; add one JSON object a line")
    return Workload(name=source if builtin else path.stem, prompts=tuple(prompts), path=path)


def select_prompts(
    workload: Workload,
    *,
    tier: str,
    lengths: Sequence[str] | None,
    num_prompts: int | None,
    offset: int = 0,
) -> tuple[Prompt, ...]:
    """Return prompts of one tier, mixed evenly over length tiers and then over tasks.

    Parameters
    ----------
    workload : Workload
        Where to select from.
    tier : str
        `low`, `medium`, `high` or `unlabelled`.
    lengths : sequence of str, optional
        Length tiers to keep (`short`, `medium`, `long`, `unlabelled`), in any order; None keeps all.
    num_prompts : int, optional
        How many, at least 1; None means all after the offset.
    offset : int
        How many of the mixed order to leave out at its start.

    Returns
    -------
    tuple of Prompt
        Always the same for the same workload, and a prefix of the answer for any larger
        `num_prompts`.

    Raises
    ------
    WorkloadError
        If tier or a length is unknown, `lengths` is empty, `num_prompts` or `offset` is out of
        range, or the workload has fewer such prompts; the message names how many exist.

    Notes
    -----
    Each next prompt comes from the length that has given fewest so far and still has some, there
    from the task that has given fewest, and there in file order. Counts of two lengths thus differ
    by at most one until one of them runs out.
    """
    _check_option("tier", tier, TIERS)
    if lengths is not None and not lengths:
        raise WorkloadError(f"lengths is empty; name at least one of {_alternatives((*LENGTHS, UNLABELLED))}")
    for length in lengths or ():
        _check_option("length", length, LENGTHS)
    if num_prompts is not None and num_prompts < 1:
        raise WorkloadError(f"num_prompts is {num_prompts}; use 1 or more, or leave it out for all")
    if offset < 0:
        raise WorkloadError(f"offset is {offset}; use 0 or more")
    kept = [p for p in workload.prompts if p.tier == tier and (lengths is None or p.length in lengths)]
    wanted = offset + (1 if num_prompts is None else num_prompts)
    if wanted > len(kept):
        which = f"tier {tier}" + ("" if lengths is None else f" and length {_alternatives(lengths)}")
        have = ", ".join(f"{t} {n}" for t, n in Counter(p.tier for p in workload.prompts).items())
        raise WorkloadError(
            f"workload {workload.name}: {len(kept)} prompts of {which}, {wanted} needed; "
            f"ask for fewer or add prompts (it has, by tier: {have})"
        )
    stop = None if num_prompts is None else offset + num_prompts
    return tuple(_interleaved(kept))[offset:stop]


def warmup_prompts(
    workload: Workload, *, exclude: Collection[Prompt], num_prompts: int
) -> tuple[Prompt, ...]:
    """Return prompts to warm up with, none of which is measured.

    Parameters
    ----------
    workload : Workload
        Where to select from, any tier.
    exclude : collection of Prompt
        The measured prompts. Compared by content, so that no measured text is in a prefix cache.
    num_prompts : int
        How many are wanted, 0 or more.

    Returns
    -------
    tuple of Prompt
        Mixed evenly over lengths and tasks. Fewer than `num_prompts`, down to none, where the
        workload has no more; a warm-up never falls back on measured prompts.

    Raises
    ------
    WorkloadError
        If `num_prompts` is negative.
    """
    if num_prompts < 0:
        raise WorkloadError(f"num_prompts is {num_prompts}; use 0 or more")
    measured = {prompt.sha256 for prompt in exclude}
    return tuple(_interleaved([p for p in workload.prompts if p.sha256 not in measured]))[:num_prompts]


def grade(prompt: Prompt, text: str | None) -> float | None:
    """Return 1.0 if `text` is a right answer to the prompt, 0.0 if not, None if that is undefined.

    Parameters
    ----------
    prompt : Prompt
        The prompt with its grader.
    text : str, optional
        The answer without any reasoning channel; None where the request failed.

    Returns
    -------
    float or None
        None where the prompt has no grader or there is no text. An empty text is an answer.
    """
    if prompt.grader is None or text is None:
        return None
    return 1.0 if prompt.grader.accepts(text) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A line of a file, to put in front of what is wrong with it."""

    file: str
    line: int

    def fail(self, what: str, fix: str) -> NoReturn:
        raise WorkloadError(f"{self.file}:{self.line}: {what}; {fix}")


def _data_dir() -> Path:
    override = os.environ.get("SPECNB_DATA")
    return Path(override) if override else Path(__file__).resolve().parent.parent / "data"


def _lines(path: Path, *, builtin: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes without line end) of the lines that are not blank."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if builtin:
            fix = "set SPECNB_DATA to the directory that holds workloads/"
        else:
            near = difflib.get_close_matches(str(path), BUILTIN_WORKLOADS, n=1)
            hint = f" (nearest: {near[0]})" if near else ""
            fix = f"give {_alternatives(BUILTIN_WORKLOADS)}, or the path of a JSONL file{hint}"
        raise WorkloadError(f"{path}: no such file; {fix}") from None
    except IsADirectoryError:
        raise WorkloadError(f"{path}: is a directory; give the path of a JSONL file") from None
    except OSError as error:
        raise WorkloadError(f"{path}: can't be read ({error.strerror}); check the file") from error
    except ValueError as error:  # a NUL in the path
        raise WorkloadError(f"{str(path)!r}: not a path ({error}); give the path of a JSONL file") from None
    for line_number, line in enumerate(content.removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            yield line_number, line.removesuffix(b"\r")


def _prompt(place: _Place, line: bytes) -> Prompt:
    row = _parsed(place, line)
    if not isinstance(row, dict):
        place.fail(f"{_json_type(row)} where an object is needed", 'write {"prompt": "..."} on each line')
    _check_keys(place, row, _KEYS, of="")
    row = {key: value for key, value in row.items() if value is not None}
    if "prompt" in row and "messages" in row:
        place.fail("both 'prompt' and 'messages'", "keep one of them")
    if "prompt" not in row and "messages" not in row:
        place.fail("neither 'prompt' nor 'messages'", "add one of them")
    return Prompt(
        id=_text(place, row.get("id", f"line-{place.line:06d}"), "'id'"),
        task=_text(place, row.get("task", "user"), "'task'"),
        tier=_label(place, row.get("tier", UNLABELLED), "tier", TIERS),
        length=_label(place, row.get("length", UNLABELLED), "length", LENGTHS),
        language=_text(place, row["language"], "'language'") if "language" in row else None,
        messages=_messages(place, row["messages"]) if "messages" in row else (),
        text=_text(place, row["prompt"], "'prompt'") if "prompt" in row else None,
        grader=_grader(place, row["grader"]) if "grader" in row else None,
    )


def _parsed(place: _Place, line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        place.fail(f"not valid UTF-8 at byte {error.start + 1} of the line", "save the file as UTF-8")
    try:
        value = _strict_json(text)
    except json.JSONDecodeError as error:
        what = f"malformed JSON at column {error.colno} ({error.msg})"
        place.fail(what, "write one complete JSON object a line")
    except RecursionError:
        place.fail("JSON is nested too deeply", "flatten it")
    except ValueError as error:
        place.fail(str(error), "write strict JSON")
    for string in _strings(value):
        if any("\ud800" <= char <= "\udfff" for char in string):
            place.fail("a lone surrogate (\\ud800 to \\udfff)", "write the whole character")
    return value


def _strict_json(text: str) -> Any:
    """Parse JSON; ValueError for what Python reads and the standard does not allow."""

    def constant(literal: str) -> NoReturn:
        raise ValueError(f"{literal} is not JSON")

    def number(literal: str) -> float:
        value = float(literal)
        if math.isinf(value):
            raise ValueError(f"number {literal} is out of range")
        return value

    def integer(literal: str) -> int:
        if len(literal) > 300:
            raise ValueError(f"number {literal[:12]}... is out of range")
        return int(literal)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if repeated:
            raise ValueError(f"key {repeated[0]!r} occurs twice in one object")
        return dict(pairs)

    return json.loads(
        text, parse_constant=constant, parse_float=number, parse_int=integer, object_pairs_hook=unique
    )


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, keys too (iterative, as deep as the parser reads)."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as string:
                yield string
            case list() as items:
                pending.extend(items)
            case dict() as pairs:
                yield from pairs
                pending.extend(pairs.values())


def _messages(place: _Place, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list):
        place.fail(
            f"'messages' is {_json_type(value)}, not a list", 'write [{"role": "user", "content": "..."}]'
        )
    if not value:
        place.fail("'messages' is empty", "add a user message")
    turns = tuple(_message(place, item, f"message {index}") for index, item in enumerate(value, start=1))
    if turns[-1].role != "user":
        place.fail(f"the last message is from {turns[-1].role!r}", "end with a user message")
    return turns


def _message(place: _Place, value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        place.fail(f"{name} is {_json_type(value)}, not an object", "give it a role and a content")
    _check_keys(place, value, _MESSAGE_KEYS, of=f" in {name}")
    for key in _MESSAGE_KEYS:
        if value.get(key) is None:
            place.fail(f"{name} has no {key!r}", "give it a role and a content")
    role = value["role"]
    if role not in _ROLES:
        place.fail(f"unknown role {role!r} in {name}", f"use {_alternatives(_ROLES)}")
    return Message(role=role, content=_text(place, value["content"], f"content of {name}"))


def _grader(place: _Place, value: Any) -> Grader:
    if not isinstance(value, dict):
        place.fail(f"'grader' is {_json_type(value)}, not an object", "give it a 'kind'")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _GRADER_KEYS:
        place.fail(f"unknown grader kind {kind!r}", f"use {_alternatives(tuple(_GRADER_KEYS))}")
    _check_keys(place, value, _GRADER_KEYS[kind], of=f" in the {kind} grader")
    needed = _GRADER_KEYS[kind][1]
    if value.get(needed) is None:
        place.fail(f"{needed!r} is missing in the {kind} grader", "add it")
    match kind:
        case "exact":
            ignore_case = value.get("ignore_case", False)
            if not isinstance(ignore_case, bool):
                place.fail(f"'ignore_case' is {_json_type(ignore_case)}", "use true or false")
            return ExactGrader(answer=_text(place, value["answer"], "'answer'"), ignore_case=ignore_case)
        case "regex":
            pattern = _text(place, value["pattern"], "'pattern'")
            try:
                re.compile(pattern, re.DOTALL)
            except (re.error, OverflowError, RecursionError) as error:
                place.fail(f"invalid regex in the grader ({error})", "correct 'pattern'")
            return RegexGrader(pattern=pattern)
        case "json_schema":
            try:
                return _schema_grader(place, value["schema"])
            except RecursionError:
                place.fail(
                    "JSON schema is nested too deeply or refers to itself without end", "correct 'schema'"
                )
        case _:
            tolerance = _number(place, value.get("tolerance", 0.0), "'tolerance'")
            if tolerance < 0:
                place.fail(f"'tolerance' is {tolerance:g}", "use 0 or more")
            return NumericGrader(answer=_number(place, value["answer"], "'answer'"), tolerance=tolerance)


def _schema_grader(place: _Place, schema: Any) -> JsonSchemaGrader:
    # Imported where they are needed: with all of its format checkers jsonschema costs more than a second.
    import jsonschema
    import referencing.exceptions
    import referencing.jsonschema

    fix = "correct 'schema'"
    if not isinstance(schema, dict):
        place.fail(f"invalid JSON schema in the grader (it is {_json_type(schema)}, not an object)", fix)
    try:
        jsonschema.Draft202012Validator.check_schema(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    except jsonschema.SchemaError as error:
        place.fail(f"invalid JSON schema in the grader ({' '.join(error.message.split())})", fix)
    resource = referencing.jsonschema.DRAFT202012.create_resource(schema)
    registry: referencing.Registry[Any] = referencing.Registry().with_resource("", resource)
    for reference in _references(schema):
        # Grading works offline and must not fail after a measurement, so references resolve here and now.
        if not reference.startswith("#"):
            place.fail(f"JSON schema refers to another document ({reference!r})", "copy it into '$defs'")
        try:
            registry.resolver().lookup(reference)
        except referencing.exceptions.Unresolvable:
            place.fail(f"JSON schema has no {reference!r}", "correct '$ref'")
    _validator(schema).is_valid(None)  # a reference to itself without end shows here
    return JsonSchemaGrader(schema_json=_canonical(schema))


def _references(schema: Any) -> Iterator[str]:
    """Yield the targets of all references in a JSON schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        for key, item in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(item, str):
                yield item
            else:
                yield from _references(item)


def _validator(schema: Mapping[str, Any]) -> Any:
    import jsonschema
    import referencing

    # An explicit registry keeps jsonschema from fetching references over the network.
    return jsonschema.Draft202012Validator(schema, registry=referencing.Registry())


def _check_keys(place: _Place, row: Mapping[str, Any], known: Sequence[str], *, of: str) -> None:
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            place.fail(f"unknown key {key!r}{of}", fix)


def _text(place: _Place, value: Any, name: str) -> str:
    if not isinstance(value, str):
        place.fail(f"{name} is {_json_type(value)}, not a string", "put text in quotes")
    if not value.strip():
        place.fail(f"{name} is empty", "write some text, or leave the line out")
    return value


def _label(place: _Place, value: Any, name: str, known: Sequence[str]) -> str:
    if value == UNLABELLED:
        return UNLABELLED
    if not isinstance(value, str) or value not in known:
        place.fail(f"unknown {name} {value!r}", f"use {_alternatives(known)}, or leave it out")
    return value


def _number(place: _Place, value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.fail(f"{name} is {_json_type(value)}, not a number", "write a number without quotes")
    return float(value)


def _check_option(name: str, value: str, known: Sequence[str]) -> None:
    options = (*known, UNLABELLED)
    if value not in options:
        raise WorkloadError(f"unknown {name} {value!r}; use {_alternatives(options)}")


def _interleaved(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yield all prompts so that any prefix is balanced over lengths, then tasks."""
    queues: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault((prompt.length, prompt.task), []).append(prompt)
    rank = {length: index for index, length in enumerate((*LENGTHS, UNLABELLED))}
    task_rank = {task: index for index, task in enumerate(dict.fromkeys(task for _, task in queues))}
    taken: Counter[tuple[str, ...]] = Counter()

    def priority(cell: tuple[str, str]) -> tuple[int, ...]:
        length, task = cell
        return taken["length", length], rank[length], taken["task", task], taken[cell], task_rank[task]

    positions = dict.fromkeys(queues, 0)
    while positions:
        cell = min(positions, key=priority)
        yield queues[cell][positions[cell]]
        taken.update([("length", cell[0]), ("task", cell[1]), cell])
        positions[cell] += 1
        if positions[cell] == len(queues[cell]):
            del positions[cell]


def _alternatives(names: Sequence[str]) -> str:
    """Join names as `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def _bare(text: str) -> str:
    stripped = text.strip()
    return (stripped[:-1] if stripped.endswith((".", "\u3002")) else stripped).strip()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode("ascii")).hexdigest()
