"""Built-in prompts are what they claim, bad files are refused by exact message, selection is balanced."""

import ast
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specnb.workloads
from specnb.errors import WorkloadError
from specnb.workloads import (
    BUILTIN_WORKLOADS,
    LENGTHS,
    TIERS,
    ExactGrader,
    JsonSchemaGrader,
    Message,
    NumericGrader,
    Prompt,
    RegexGrader,
    Workload,
    grade,
    load_workload,
    select_prompts,
    warmup_prompts,
)

TASKS_BY_TIER = {
    "low": ("summarisation", "extraction", "structured_output", "code_completion"),
    "medium": ("dialogue", "question_answering"),
    "high": ("creative_writing", "brainstorming"),
}
NUM_PER_CELL = {
    "builtin-en": {"low": 6, "medium": 8, "high": 8},
    "builtin-zh": {"low": 3, "medium": 3, "high": 3},
}
ANSWERS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "grader_answers.jsonl").read_text("utf-8").splitlines()
]
BUILTIN = {name: load_workload(name) for name in BUILTIN_WORKLOADS}
PROMPT_BY_ID = {prompt.id: prompt for workload in BUILTIN.values() for prompt in workload.prompts}
NO_DEADLINE = settings(deadline=None, max_examples=50)


def ask(content: str = "Hello?", **labels: Any) -> Prompt:
    """A chat prompt of one user turn."""
    return Prompt(messages=(Message(role="user", content=content),), **labels)


def write(path: Path, *lines: str | bytes) -> Path:
    """Write a JSONL file and return its path."""
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


@pytest.mark.parametrize(("name", "total"), [("builtin-en", 168), ("builtin-zh", 72)])
def test_builtin_counts(name: str, total: int) -> None:
    workload = BUILTIN[name]
    expected = {
        (tier, task, length): NUM_PER_CELL[name][tier]
        for tier, tasks in TASKS_BY_TIER.items()
        for task in tasks
        for length in LENGTHS
    }
    assert Counter((p.tier, p.task, p.length) for p in workload.prompts) == expected
    assert len(workload.prompts) == total
    assert {p.language for p in workload.prompts} == {name.removeprefix("builtin-")}
    assert workload.name == name


def test_builtin_ids_are_unique_and_name_their_cell() -> None:
    prompts = [p for workload in BUILTIN.values() for p in workload.prompts]
    assert len({p.id for p in prompts}) == 240
    for p in prompts:
        assert re.fullmatch(rf"{p.language}-{p.task.replace('_', '-')}-{p.length}-\d\d", p.id)


def test_builtin_chats_alternate_and_dialogues_have_a_history() -> None:
    for p in PROMPT_BY_ID.values():
        roles = [turn.role for turn in p.messages if turn.role != "system"]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)], p.id
        assert "system" not in [turn.role for turn in p.messages[1:]], p.id
        assert (len(roles) > 1) == (p.task == "dialogue"), p.id
    assert any(p.messages[0].role == "system" for p in PROMPT_BY_ID.values())


def test_builtin_languages_are_what_they_say() -> None:
    for p in PROMPT_BY_ID.values():
        text = "".join(turn.content for turn in p.messages)
        num_han = sum("\u4e00" <= char <= "\u9fff" for char in text)
        assert (num_han >= 12) if p.language == "zh" else (num_han == 0), p.id


def test_builtin_prompts_have_no_near_duplicates() -> None:
    def grams(prompt: Prompt, size: int) -> set[str]:
        text = "\n".join(turn.content for turn in prompt.messages).lower()
        return {text[start : start + size] for start in range(len(text) - size + 1)}

    for workload in BUILTIN.values():
        sets = [(p.id, grams(p, 8)) for p in workload.prompts]
        for (left_id, left), (right_id, right) in itertools.combinations(sets, 2):
            assert len(left & right) / len(left | right) < 0.2, (left_id, right_id)


def test_builtin_graders_cover_the_checkable_tasks() -> None:
    graded = Counter(p.task for p in PROMPT_BY_ID.values() if p.grader)
    total = Counter(p.task for p in PROMPT_BY_ID.values())
    assert graded["structured_output"] == total["structured_output"]
    assert graded["extraction"] == total["extraction"]
    assert graded["code_completion"] == total["code_completion"]
    assert graded["question_answering"] > 0.8 * total["question_answering"]
    assert {type(p.grader) for p in PROMPT_BY_ID.values() if p.grader} == {
        ExactGrader,
        RegexGrader,
        JsonSchemaGrader,
        NumericGrader,
    }


def test_reference_answers_are_many_and_known() -> None:
    assert len({row["id"] for row in ANSWERS}) == len(ANSWERS) >= 60
    assert {PROMPT_BY_ID[row["id"]].language for row in ANSWERS} == {"en", "zh"}


@pytest.mark.parametrize("row", ANSWERS, ids=[row["id"] for row in ANSWERS])
def test_builtin_grader_tells_right_from_wrong(row: dict[str, str]) -> None:
    prompt = PROMPT_BY_ID[row["id"]]
    assert grade(prompt, row["right"]) == 1.0
    assert grade(prompt, row["wrong"]) == 0.0


def test_no_builtin_grader_accepts_nothing() -> None:
    assert [p.id for p in PROMPT_BY_ID.values() if grade(p, "") == 1.0] == []


def test_echoing_the_prompt_is_no_answer_outside_summaries() -> None:
    # A summary may quote its source at length; every other task must be answered.
    echoes = [p for p in PROMPT_BY_ID.values() if grade(p, p.messages[-1].content) == 1.0]
    assert [
        p.id
        for p in echoes
        if (p.task, p.length) != ("summarisation", "medium")
        and (p.task, p.length) != ("summarisation", "long")
    ] == []


def test_builtin_regexes_do_not_backtrack_on_looping_answers() -> None:
    # Small models repeat themselves. With an ambiguous pattern a single line of this test takes minutes.
    for row in ANSWERS:
        assert grade(PROMPT_BY_ID[row["id"]], f"{row['right']}\n{row['wrong']}\n" * 30) in (0.0, 1.0)


def test_builtin_round_trip(tmp_path: Path) -> None:
    for workload in BUILTIN.values():
        copy = write(tmp_path / "copy.jsonl", *(json.dumps(p.to_dict()) for p in workload.prompts))
        read = load_workload(copy)
        assert read.prompts == workload.prompts
        assert read.sha256 == workload.sha256


def test_specnb_data_moves_the_builtin_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workloads").mkdir()
    path = write(tmp_path / "workloads" / "builtin-en.jsonl", '{"prompt": "moved"}')
    monkeypatch.setenv("SPECNB_DATA", str(tmp_path))
    assert load_workload("builtin-en").path == path
    assert load_workload("builtin-en").prompts[0].text == "moved"
    missing = tmp_path / "workloads" / "builtin-zh.jsonl"
    with pytest.raises(WorkloadError) as caught:
        load_workload("builtin-zh")
    fix = "set SPECNB_DATA to the directory that holds workloads/"
    assert str(caught.value) == f"{missing}: no such file; {fix}"


def test_builtin_files_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECNB_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert load_workload("builtin-zh") == BUILTIN["builtin-zh"]


def test_imports_stay_in_their_layer() -> None:
    tree = ast.parse(Path(specnb.workloads.__file__).read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in modules if name.startswith("specnb")} == {"specnb.errors"}
    assert not {"torch", "transformers", "vllm"} & {name.partition(".")[0] for name in modules}


def test_user_file_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", "", '{"prompt": "a b"}', "  ", '{"prompt": "c", "id": null}')
    workload = load_workload(str(path))
    assert workload.name == "mine"
    assert workload.path == path
    assert workload.prompts == (Prompt(id="line-000002", text="a b"), Prompt(id="line-000004", text="c"))
    first = workload.prompts[0]
    assert (first.task, first.tier, first.length) == ("user", "unlabelled", "unlabelled")
    assert (first.language, first.messages, first.grader) == (None, (), None)


def test_user_file_with_everything(tmp_path: Path) -> None:
    row = {
        "id": "q1",
        "task": "sums",
        "tier": "low",
        "length": "short",
        "language": "en",
        "messages": [{"role": "system", "content": "Terse."}, {"role": "user", "content": "1 + 1?"}],
        "grader": {"kind": "numeric", "answer": 2},
    }
    (prompt,) = load_workload(write(tmp_path / "x.jsonl", json.dumps(row))).prompts
    assert prompt == Prompt(
        id="q1",
        task="sums",
        tier="low",
        length="short",
        language="en",
        messages=(Message(role="system", content="Terse."), Message(role="user", content="1 + 1?")),
        grader=NumericGrader(answer=2.0, tolerance=0.0),
    )


def test_bom_crlf_and_missing_last_newline_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes('\ufeff{"prompt": "é"}\r\n\r\n{"prompt": "b\u2028c"}'.encode())
    assert [(p.id, p.text) for p in load_workload(path).prompts] == [
        ("line-000001", "é"),
        ("line-000003", "b\u2028c"),
    ]


USER = '{"role": "user", "content": "x"}'
BAD_LINES = [
    ('{"prompt": "a",}', "malformed JSON at column 16 ({}); write one complete JSON object a line"),
    ("[", "malformed JSON at column 2 (Expecting value); write one complete JSON object a line"),
    ('["a"]', 'a list where an object is needed; write {"prompt": "..."} on each line'),
    ('"a"', 'a string where an object is needed; write {"prompt": "..."} on each line'),
    ("null", 'null where an object is needed; write {"prompt": "..."} on each line'),
    ("true", 'a boolean where an object is needed; write {"prompt": "..."} on each line'),
    ("{}", "neither 'prompt' nor 'messages'; add one of them"),
    ('{"prompt": null}', "neither 'prompt' nor 'messages'; add one of them"),
    (
        '{"prompt": "a", "messages": [USER]}'.replace("USER", USER),
        "both 'prompt' and 'messages'; keep one of them",
    ),
    ('{"promt": "a"}', "unknown key 'promt'; did you mean 'prompt'?"),
    ('{"prompt": "a", "Tier": "low"}', "unknown key 'Tier'; did you mean 'tier'?"),
    (
        '{"prompt": "a", "zzz": 1}',
        "unknown key 'zzz'; known keys: prompt, messages, id, task, tier, length, language, grader",
    ),
    ('{"prompt": "a", "tier": "mid"}', "unknown tier 'mid'; use low, medium or high, or leave it out"),
    ('{"prompt": "a", "tier": 1}', "unknown tier 1; use low, medium or high, or leave it out"),
    ('{"prompt": "a", "tier": ["low"]}', "unknown tier ['low']; use low, medium or high, or leave it out"),
    ('{"prompt": "a", "length": "xl"}', "unknown length 'xl'; use short, medium or long, or leave it out"),
    ('{"prompt": 5}', "'prompt' is a number, not a string; put text in quotes"),
    ('{"prompt": " \\n"}', "'prompt' is empty; write some text, or leave the line out"),
    ('{"prompt": "a", "id": 7}', "'id' is a number, not a string; put text in quotes"),
    ('{"prompt": "a", "id": ""}', "'id' is empty; write some text, or leave the line out"),
    ('{"prompt": "a", "task": false}', "'task' is a boolean, not a string; put text in quotes"),
    ('{"prompt": "a", "language": {}}', "'language' is an object, not a string; put text in quotes"),
    ('{"messages": "hi"}', "'messages' is a string, not a list; " + f"write [{USER.replace('x', '...')}]"),
    ('{"messages": []}', "'messages' is empty; add a user message"),
    ('{"messages": ["hi"]}', "message 1 is a string, not an object; give it a role and a content"),
    ('{"messages": [{"role": "user"}]}', "message 1 has no 'content'; give it a role and a content"),
    ('{"messages": [{"content": "x"}]}', "message 1 has no 'role'; give it a role and a content"),
    (
        '{"messages": [USER, {"role": "bot", "content": "x"}]}'.replace("USER", USER),
        "unknown role 'bot' in message 2; use system, user or assistant",
    ),
    (
        '{"messages": [{"role": "user", "content": ""}]}',
        "content of message 1 is empty; write some text, or leave the line out",
    ),
    (
        '{"messages": [{"role": "user", "content": ["x"]}]}',
        "content of message 1 is a list, not a string; put text in quotes",
    ),
    (
        '{"messages": [{"role": "user", "text": "x"}]}',
        "unknown key 'text' in message 1; did you mean 'content'?",
    ),
    (
        '{"messages": [USER, {"role": "assistant", "content": "x"}]}'.replace("USER", USER),
        "the last message is from 'assistant'; end with a user message",
    ),
    (b'{"prompt": "\xe9"}', "not valid UTF-8 at byte 13 of the line; save the file as UTF-8"),
    ('{"prompt": "\\ud83d"}', "a lone surrogate (\\ud800 to \\udfff); write the whole character"),
    ('{"prompt": "a", "\\udc00": 1}', "a lone surrogate (\\ud800 to \\udfff); write the whole character"),
    ('{"prompt": NaN}', "NaN is not JSON; write strict JSON"),
    ('{"prompt": -Infinity}', "-Infinity is not JSON; write strict JSON"),
    ('{"prompt": 1e999}', "number 1e999 is out of range; write strict JSON"),
    ('{"prompt": ' + "9" * 5000 + "}", "number 999999999999... is out of range; write strict JSON"),
    ('{"prompt": "a", "prompt": "b"}', "key 'prompt' occurs twice in one object; write strict JSON"),
    ("[" * 100_000, "JSON is nested too deeply; flatten it"),
]
BAD_GRADERS = [
    ('"exact"', "'grader' is a string, not an object; give it a 'kind'"),
    ("{}", "unknown grader kind None; use exact, regex, json_schema or numeric"),
    ('{"kind": "fuzzy"}', "unknown grader kind 'fuzzy'; use exact, regex, json_schema or numeric"),
    ('{"kind": ["exact"]}', "unknown grader kind ['exact']; use exact, regex, json_schema or numeric"),
    ('{"kind": "exact"}', "'answer' is missing in the exact grader; add it"),
    ('{"kind": "exact", "answer": 4}', "'answer' is a number, not a string; put text in quotes"),
    ('{"kind": "exact", "answer": " "}', "'answer' is empty; write some text, or leave the line out"),
    (
        '{"kind": "exact", "answer": "a", "ignorecase": true}',
        "unknown key 'ignorecase' in the exact grader; did you mean 'ignore_case'?",
    ),
    ('{"kind": "exact", "answer": "a", "ignore_case": 1}', "'ignore_case' is a number; use true or false"),
    (
        '{"kind": "regex", "pattern": "(a"}',
        "invalid regex in the grader (missing ), unterminated subpattern at position 0); correct 'pattern'",
    ),
    (
        '{"kind": "numeric", "answer": "4"}',
        "'answer' is a string, not a number; write a number without quotes",
    ),
    (
        '{"kind": "numeric", "answer": true}',
        "'answer' is a boolean, not a number; write a number without quotes",
    ),
    ('{"kind": "numeric", "answer": 4, "tolerance": -1}', "'tolerance' is -1; use 0 or more"),
    (
        '{"kind": "json_schema", "schema": [1]}',
        "invalid JSON schema in the grader (it is a list, not an object); correct 'schema'",
    ),
    (
        '{"kind": "json_schema", "schema": {"type": "strnig"}}',
        "invalid JSON schema in the grader ('strnig' is not valid under any of the given schemas); "
        "correct 'schema'",
    ),
    (
        '{"kind": "json_schema", "schema": {"pattern": "("}}',
        "invalid JSON schema in the grader ('(' is not a 'regex'); correct 'schema'",
    ),
    (
        '{"kind": "json_schema", "schema": {"$ref": "https://x.example/s.json"}}',
        "JSON schema refers to another document ('https://x.example/s.json'); copy it into '$defs'",
    ),
    (
        '{"kind": "json_schema", "schema": {"$ref": "#/$defs/a"}}',
        "JSON schema has no '#/$defs/a'; correct '$ref'",
    ),
    (
        '{"kind": "json_schema", "schema": {"$ref": "#"}}',
        "JSON schema is nested too deeply or refers to itself without end; correct 'schema'",
    ),
]


@pytest.mark.parametrize(
    ("line", "message"),
    BAD_LINES + [(f'{{"prompt": "a", "grader": {text}}}', message) for text, message in BAD_GRADERS],
    ids=itertools.count(),
)
def test_bad_line_is_refused(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", '{"prompt": "fine"}', "", line)
    if "{}" in message:  # the standard library's wording differs between Python versions
        with pytest.raises(json.JSONDecodeError) as wording:
            json.loads(line)
        message = message.replace("{}", wording.value.msg)
        message = re.sub(r"column \d+", f"column {wording.value.colno}", message)
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert str(caught.value) == f"{path}:3: {message}"


def test_duplicate_id_names_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"prompt": "a", "id": "line-000003"}', "", '{"prompt": "b"}')
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert str(caught.value) == f"{path}:3: id 'line-000003' is already used on line 1; make ids unique"


@pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_file_without_prompts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert str(caught.value) == f"{path}: no prompts in the file; add one JSON object a line"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "builtin-fr",
            "builtin-fr: no such file; give builtin-en or builtin-zh, or the path of a JSONL file "
            "(nearest: builtin-zh)",
        ),
        (
            "nowhere/p.jsonl",
            "nowhere/p.jsonl: no such file; give builtin-en or builtin-zh, or the path of a JSONL file",
        ),
        (".", ".: is a directory; give the path of a JSONL file"),
        ("a\0b", "'a\\x00b': not a path (embedded null byte); give the path of a JSONL file"),
        ("x" * 300, "x" * 300 + ": can't be read (File name too long); check the file"),
    ],
)
def test_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError) as caught:
        load_workload(name)
    assert str(caught.value) == message


@NO_DEADLINE
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.jsonl"
    path.write_bytes(b'{"prompt": "' + content)
    message = ""
    try:
        load_workload(path)
    except WorkloadError as error:
        message = str(error)
    assert message == "" or message.startswith(f"{path}:")
    assert "\n" not in message


@NO_DEADLINE
@given(text=st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), escape=st.booleans())
def test_any_text_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, escape: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "t.jsonl"
    write(path, json.dumps({"prompt": text}, ensure_ascii=escape))
    assert load_workload(path).prompts[0].text == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prompt(id="a"), "prompt 'a' needs exactly one of messages and text"),
        (lambda: ask(id="a", text="b"), "prompt 'a' needs exactly one of messages and text"),
        (lambda: Prompt(id="a", text=" "), "prompt 'a' has an empty text"),
        (
            lambda: Prompt(id="a", messages=(Message(role="assistant", content="b"),)),
            "prompt 'a' ends with a turn of 'assistant'; end with a user turn",
        ),
        (
            lambda: Prompt(id="a", text="b", tier="top"),
            "prompt 'a' has unknown tier 'top'; use low, medium, high or unlabelled",
        ),
        (
            lambda: Prompt(id="a", text="b", length="xl"),
            "prompt 'a' has unknown length 'xl'; use short, medium, long or unlabelled",
        ),
        (lambda: Message(role="bot", content="x"), "unknown role 'bot'; use system, user or assistant"),
        (lambda: Message(role="user", content=" "), "content is empty; give the turn a text"),
        (lambda: Workload(name="w", prompts=(), path=Path("w")), "workload 'w' has no prompts"),
        (
            lambda: Workload(name="w", prompts=(ask(id="a"), ask("b", id="a")), path=Path("w")),
            "workload 'w' has the id 'a' more than once",
        ),
    ],
)
def test_objects_validate_themselves(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_prompt_sha256_is_pinned_and_ignores_labels() -> None:
    # printf '[{"content":"Hello?","role":"user"}]' | sha256sum; printf '"Hello?"' | sha256sum
    chat, raw = ask(id="a"), Prompt(id="a", text="Hello?")
    assert chat.sha256 == "91ca2fa7c56073f440c389c94f9076e6c19c4b75987871d28b84dbf40372b3ba"
    assert raw.sha256 == "140b5f8f0035493e4b1d46166288c8493bb6fdc938f956d0eea4e18f894938b6"
    labelled = ask(id="b", task="t", tier="low", length="long", language="en", grader=ExactGrader(answer="x"))
    assert labelled.sha256 == chat.sha256


def test_workload_sha256_covers_what_changes_a_measurement() -> None:
    def digest(*prompts: Prompt, name: str = "w", path: str = "w.jsonl") -> str:
        return Workload(name=name, prompts=prompts, path=Path(path)).sha256

    first, second = ask("one", id="a", tier="low", length="short"), ask("two", id="b")
    reference = digest(first, second)
    assert digest(first, second, name="v", path="elsewhere/v.jsonl") == reference
    changed = [
        digest(second, first),
        digest(first),
        digest(ask("ONE", id="a", tier="low", length="short"), second),
        digest(ask("one", id="c", tier="low", length="short"), second),
        digest(ask("one", id="a", tier="high", length="short"), second),
        digest(ask("one", id="a", tier="low", length="long"), second),
        digest(ask("one", id="a", tier="low", length="short", task="t"), second),
        digest(ask("one", id="a", tier="low", length="short", grader=ExactGrader(answer="x")), second),
        digest(Prompt(id="a", tier="low", length="short", text="one"), second),
    ]
    assert len({reference, *changed}) == len(changed) + 1


def test_workload_sha256_ignores_how_the_file_spells_its_json(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", '{"prompt": "é", "id": "x"}', '{"prompt": "b", "id": "y"}')
    other = write(
        tmp_path / "b.jsonl", b'\xef\xbb\xbf{"id":"x","prompt":"\\u00e9"}\r\n', '{"id":"y","prompt":"b"}\r'
    )
    assert load_workload(plain).sha256 == load_workload(other).sha256


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
@pytest.mark.parametrize("tier", TIERS)
def test_selection_is_balanced_at_every_size(name: str, tier: str) -> None:
    chosen = select_prompts(BUILTIN[name], tier=tier, lengths=LENGTHS, num_prompts=None)
    assert len(chosen) == NUM_PER_CELL[name][tier] * 3 * len(TASKS_BY_TIER[tier])
    assert len({p.id for p in chosen}) == len(chosen)
    for stop in range(1, len(chosen) + 1):
        lengths = Counter({length: 0 for length in LENGTHS})
        tasks = Counter({task: 0 for task in TASKS_BY_TIER[tier]})
        lengths.update(p.length for p in chosen[:stop])
        tasks.update(p.task for p in chosen[:stop])
        assert max(lengths.values()) - min(lengths.values()) <= 1, (stop, lengths)
        assert max(tasks.values()) - min(tasks.values()) <= 2, (stop, tasks)


def test_selection_of_a_small_workload_by_hand() -> None:
    labels = [("short", "t"), ("short", "t"), ("short", "u"), ("long", "t"), ("long", "u")]
    prompts = [ask(str(i), id=str(i), tier="low", length=le, task=ta) for i, (le, ta) in enumerate(labels)]
    workload = Workload(name="w", prompts=(*prompts, ask("h", id="h", tier="high")), path=Path("w"))
    chosen = select_prompts(workload, tier="low", lengths=["long", "short"], num_prompts=None)
    # short t, long u (t has given one), short u (all tasks gave one, short has given t), long t, short t.
    assert [p.id for p in chosen] == ["0", "4", "2", "3", "1"]
    assert select_prompts(workload, tier="low", lengths=["long"], num_prompts=1, offset=1)[0].id == "4"
    assert [p.id for p in select_prompts(workload, tier="high", lengths=None, num_prompts=1)] == ["h"]


@NO_DEADLINE
@given(
    labels=st.lists(
        st.tuples(st.sampled_from((*LENGTHS, "unlabelled")), st.sampled_from("xyz")), min_size=1, max_size=25
    ),
    data=st.data(),
)
def test_selection_is_a_window_of_one_order(labels: list[tuple[str, str]], data: st.DataObject) -> None:
    prompts = tuple(ask(str(i), id=str(i), length=le, task=ta) for i, (le, ta) in enumerate(labels))
    workload = Workload(name="w", prompts=prompts, path=Path("w"))
    whole = select_prompts(workload, tier="unlabelled", lengths=None, num_prompts=None)
    assert sorted(p.id for p in whole) == sorted(p.id for p in prompts)
    offset = data.draw(st.integers(0, len(prompts) - 1))
    count = data.draw(st.integers(1, len(prompts) - offset))
    part = select_prompts(workload, tier="unlabelled", lengths=None, num_prompts=count, offset=offset)
    assert part == whole[offset : offset + count]
    available = Counter(p.length for p in prompts)
    taken: Counter[str] = Counter()
    for prompt in whole:
        assert taken[prompt.length] == min(taken[le] for le in available if taken[le] < available[le])
        taken[prompt.length] += 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "mid"}, "unknown tier 'mid'; use low, medium, high or unlabelled"),
        ({"lengths": ["xl"]}, "unknown length 'xl'; use short, medium, long or unlabelled"),
        ({"lengths": []}, "lengths is empty; name at least one of short, medium, long or unlabelled"),
        ({"num_prompts": 0}, "num_prompts is 0; use 1 or more, or leave it out for all"),
        ({"offset": -1}, "offset is -1; use 0 or more"),
        (
            {"num_prompts": 99},
            "workload builtin-en: 72 prompts of tier low, 99 needed; ask for fewer or add prompts "
            "(it has, by tier: low 72, medium 48, high 48)",
        ),
        (
            {"num_prompts": 40, "offset": 20, "lengths": ["short", "long"]},
            "workload builtin-en: 48 prompts of tier low and length short or long, 60 needed; "
            "ask for fewer or add prompts (it has, by tier: low 72, medium 48, high 48)",
        ),
        (
            {"num_prompts": None, "tier": "unlabelled"},
            "workload builtin-en: 0 prompts of tier unlabelled, 1 needed; ask for fewer or add prompts "
            "(it has, by tier: low 72, medium 48, high 48)",
        ),
    ],
)
def test_selection_refuses(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tier": "low", "lengths": None, "num_prompts": 1} | options
    with pytest.raises(WorkloadError) as caught:
        select_prompts(BUILTIN["builtin-en"], **arguments)
    assert str(caught.value) == message


def test_warmup_never_uses_a_measured_prompt() -> None:
    workload = BUILTIN["builtin-en"]
    measured = select_prompts(workload, tier="high", lengths=LENGTHS, num_prompts=32)
    warmup = warmup_prompts(workload, exclude=measured, num_prompts=9)
    assert len(warmup) == 9
    assert not {p.id for p in warmup} & {p.id for p in measured}
    assert Counter(p.length for p in warmup) == {"short": 3, "medium": 3, "long": 3}
    assert warmup_prompts(workload, exclude=measured, num_prompts=9) == warmup


def test_warmup_compares_contents_and_may_return_fewer() -> None:
    prompts = (ask("same", id="a"), ask("same", id="b"), ask("other", id="c"))
    workload = Workload(name="w", prompts=prompts, path=Path("w"))
    assert [p.id for p in warmup_prompts(workload, exclude=prompts[:1], num_prompts=5)] == ["c"]
    assert warmup_prompts(workload, exclude=prompts, num_prompts=5) == ()
    assert warmup_prompts(workload, exclude=(), num_prompts=0) == ()
    with pytest.raises(WorkloadError) as caught:
        warmup_prompts(workload, exclude=(), num_prompts=-1)
    assert str(caught.value) == "num_prompts is -1; use 0 or more"


def test_grade_is_undefined_without_grader_or_text() -> None:
    assert grade(ask(id="a"), "anything") is None
    assert grade(ask(id="a", grader=ExactGrader(answer="x")), None) is None
    assert grade(ask(id="a", grader=ExactGrader(answer="x")), "") == 0.0


SCHEMA = json.dumps({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("grader", "text", "score"),
    [
        (ExactGrader(answer="Paris"), " Paris.\n", 1.0),
        (ExactGrader(answer="Paris."), "Paris", 1.0),
        (ExactGrader(answer="翟青"), "翟青。", 1.0),
        (ExactGrader(answer="Paris"), "Paris..", 0.0),
        (ExactGrader(answer="Paris"), "paris", 0.0),
        (ExactGrader(answer="Paris", ignore_case=True), "PARIS", 1.0),
        (ExactGrader(answer="Paris"), "It is Paris", 0.0),
        (RegexGrader(pattern="a.b"), "xx a\nb xx", 1.0),
        (RegexGrader(pattern="^b"), "a\nb", 0.0),
        (JsonSchemaGrader(schema_json=SCHEMA), ' {"a": 1} ', 1.0),
        (JsonSchemaGrader(schema_json=SCHEMA), '```json\n{"a": 1}\n```', 1.0),
        (JsonSchemaGrader(schema_json=SCHEMA), '```\n{\n "a": 1}\n```\n', 1.0),
        (JsonSchemaGrader(schema_json=SCHEMA), 'Here: {"a": 1}', 0.0),
        (JsonSchemaGrader(schema_json=SCHEMA), '{"a": 1}{"a": 1}', 0.0),
        (JsonSchemaGrader(schema_json=SCHEMA), '{"a": "1"}', 0.0),
        (JsonSchemaGrader(schema_json=SCHEMA), '{"a": 1, "b": NaN}', 0.0),
        (JsonSchemaGrader(schema_json=SCHEMA), '{"a": 1, "a": 1}', 0.0),
        (JsonSchemaGrader(schema_json=SCHEMA), "[" * 100_000, 0.0),
        (NumericGrader(answer=12.5, tolerance=0.01), "about 12.51", 1.0),
        (NumericGrader(answer=12.5, tolerance=0.01), "about 12.52", 0.0),
        (NumericGrader(answer=0.2, tolerance=0.1), "0.3", 1.0),
        (NumericGrader(answer=1250000.5), "1,250,000.5 euros.", 1.0),
        (NumericGrader(answer=5), "first 4, then 5.", 1.0),
        (NumericGrader(answer=5), "first 5, then 4", 0.0),
        (NumericGrader(answer=-3), "it is -3", 1.0),
        (NumericGrader(answer=-3), "it is \u22123 degrees", 1.0),
        (NumericGrader(answer=15), "the range is 12-15", 1.0),
        (NumericGrader(answer=45), "an area of 45 m2", 1.0),
        (NumericGrader(answer=45), "EUR45", 1.0),
        (NumericGrader(answer=1500), "1.5e3", 1.0),
        (NumericGrader(answer=0.5), ".5", 1.0),
        (NumericGrader(answer=0), "none", 0.0),
        (NumericGrader(answer=0), "1e999", 0.0),
    ],
)
def test_grade(grader: specnb.workloads.Grader, text: str, score: float) -> None:
    assert grade(ask(id="a", grader=grader), text) == score


@NO_DEADLINE
@given(st.floats(-1e9, 1e9).map(lambda value: round(value, 3)))
def test_numeric_grader_reads_numbers_with_and_without_separators(value: float) -> None:
    for spelled in (f"{value:.3f}", f"{value:,.3f}", f"the answer is {value:,.3f}."):
        assert grade(ask(id="a", grader=NumericGrader(answer=value)), spelled) == 1.0


@NO_DEADLINE
@given(st.text(max_size=80))
def test_every_grader_gives_a_score_for_any_text(text: str) -> None:
    for grader in (NumericGrader(answer=1), JsonSchemaGrader(schema_json=SCHEMA), ExactGrader(answer="x")):
        assert grade(ask(id="a", grader=grader), text) in (0.0, 1.0)
