"""Plans: each fault is one line with file, line, key and fix; equal plans have equal digests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specnb.config import Cell, Plan, plan_cells, plan_from_dict, read_plan
from specnb.errors import PlanError, SpecnbError

GOOD = """\
name: p
target: {model: m}
engine: {kind: simulated}
arms:
  - {name: baseline}
  - {name: a, speculative: {method: ngram, num_speculative_tokens: 3}}
workload: {set: builtin-en}
sampling:
  - {name: greedy, temperature: 0.0, max_tokens: 8}
load: {concurrency: [1, 2]}
"""
CLAIM = (
    "published: {source: s, conditions: c, claims: [\n"
    "  {arm: a, workload: w, concurrency: 1, acceptance_length: 2.0, baseline_tokens_per_s: 1.0, "
    "tokens_per_s: 2.0}]}\n"
)
NAME_RULE = "must be 1 to 64 letters, digits, '_' or '-', beginning with a letter or digit"
MAPPING = "a plan is a mapping of keys (name, target, engine, arms, ...), not"
ROOT_KEYS = (
    "name, modelled, target, engine, arms, workload, sampling, load, repeats, order, on_error, "
    "allow_differences, logging, price, published"
)


def message_of(path: Path) -> str:
    """The error of reading `path`, which must be one line that begins with the path."""
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def swapped(old: str, new: str) -> str:
    """GOOD with one piece exchanged."""
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def good() -> dict[str, Any]:
    """A fresh copy of the good plan's content."""
    content = yaml.safe_load(GOOD)
    assert isinstance(content, dict)
    return content


def test_good_plan_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(GOOD)
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.model_dump(mode="json") == {
        "name": "p",
        "modelled": False,
        "target": {"model": "m", "revision": None, "dtype": "auto", "trust_remote_code": False},
        "engine": {
            "kind": "simulated",
            "endpoint": "chat",
            "args": {},
            "device": "auto",
            "num_threads": None,
            "python": None,
            "env": {},
            "port": None,
            "devices": None,
            "start_timeout_s": 1800.0,
            "api_key_env": "SPECNB_API_KEY",
        },
        "arms": [
            {"name": "baseline", "speculative": None, "url": None, "args": {}},
            {
                "name": "a",
                "speculative": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "model": None,
                    "draft_sample_method": None,
                    "rejection_sample_method": None,
                    "prompt_lookup_max": None,
                    "prompt_lookup_min": None,
                },
                "url": None,
                "args": {},
            },
        ],
        "workload": {
            "set": "builtin-en",
            "tiers": ["low", "medium", "high"],
            "lengths": ["short", "medium", "long"],
            "prompts_per_cell": 32,
            "prompts_by_concurrency": [],
            "chat_template_kwargs": {},
            "max_tokens": {"short": None, "medium": None, "long": None, "unlabelled": None},
            "nonce": False,
        },
        "sampling": [
            {
                "name": "greedy",
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": 0,
                "max_tokens": 8,
                "seed": 0,
                "ignore_eos": False,
                "concurrency": None,
                "repeats": None,
            }
        ],
        "load": {
            "mode": "closed",
            "concurrency": [1, 2],
            "request_rate": None,
            "trace": None,
            "warmup_requests": 2,
            "stall_timeout_s": 120.0,
            "request_timeout_s": None,
            "cell_timeout_s": None,
        },
        "repeats": 1,
        "order": "abba",
        "on_error": "continue",
        "allow_differences": False,
        "logging": {"positions": True, "tokens": True},
        "price": None,
        "published": None,
    }
    assert plan.baseline.name == "baseline"


UNKNOWN = [
    (GOOD + "repeat: 3\n", ":11: unknown key 'repeat'; did you mean 'repeats'?"),
    (GOOD + "zzz: 3\n", f":11: unknown key 'zzz'; known keys: {ROOT_KEYS}"),
    (GOOD + '"a\\nb": 3\n', f":11: unknown key 'a\\nb'; known keys: {ROOT_KEYS}"),
    (swapped("name: p", "nme: p"), ":1: unknown key 'nme'; did you mean 'name'?"),
    (swapped("{model: m}", "{model: m, dtyp: x}"), ":2: unknown key 'dtyp' in target; did you mean 'dtype'?"),
    (
        swapped("{kind: simulated}", "{kind: simulated, devise: cpu}"),
        ":3: unknown key 'devise' in engine; did you mean 'device'?",
    ),
    (
        swapped("{name: baseline}", "{name: baseline, speculativ: 3}"),
        ":5: unknown key 'speculativ' in arms[0]; did you mean 'speculative'?",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, draft_sample_metod: greedy"),
        ":6: arms[1].speculative.draft_sample_metod: unknown key; did you mean 'draft_sample_method'?",
    ),
    (
        swapped("num_speculative_tokens: 3", "num_speculative_token: 3"),
        ":6: key 'arms[1].speculative.num_speculative_tokens' is missing; add it, "
        "or is 'num_speculative_token' meant for it?",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, tier: [low]}"),
        ":7: unknown key 'tier' in workload; did you mean 'tiers'?",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, max_tokens: {shrt: 3}}"),
        ":7: unknown key 'shrt' in workload.max_tokens; did you mean 'short'?",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, temprature: 1"),
        ":9: unknown key 'temprature' in sampling[0]; did you mean 'temperature'?",
    ),
    (
        swapped("{concurrency", "{warmup: 1, concurrency"),
        ":10: unknown key 'warmup' in load; did you mean 'warmup_requests'?",
    ),
    (
        GOOD + "logging: {token: true}\n",
        ":11: unknown key 'token' in logging; did you mean 'tokens'?",
    ),
    (
        GOOD + "price: {gpu_hour: 3, curency: EUR}\n",
        ":11: unknown key 'curency' in price; did you mean 'currency'?",
    ),
]

VALUES = [
    # target
    (swapped("{model: m}", "m"), ":2: target: must be a mapping of keys, got 'm'"),
    (swapped("{model: m}", ""), ":2: target: must be a mapping of keys, got null"),
    (swapped("{model: m}", "[m]"), ":2: target: must be a mapping of keys, not a list"),
    (swapped("{model: m}", "{}"), ":2: key 'target.model' is missing; add it"),
    (swapped("{model: m}", '{model: ""}'), ":2: target.model: is empty; give a text"),
    (
        swapped("{model: m}", "{model: m, revision: 1234567}"),
        ":2: target.revision: must be text, in quotes if need be, got 1234567",
    ),
    (
        swapped("{model: m}", "{model: m, dtype: fp32}"),
        ":2: target.dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', got 'fp32'",
    ),
    (
        swapped("{model: m}", "{model: m, trust_remote_code: 1}"),
        ":2: target.trust_remote_code: must be true or false, got 1",
    ),
    # engine
    (swapped("{kind: simulated}", "{}"), ":3: key 'engine.kind' is missing; add it"),
    (swapped("{kind: simulated}", "simulated"), ":3: engine: must be a mapping of keys, got 'simulated'"),
    (
        swapped("{kind: simulated}", "{kind: sglang}"),
        ":3: engine.kind: must be 'transformers', 'vllm', 'openai' or 'simulated', got 'sglang'",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, endpoint: x}"),
        ":3: engine.endpoint: must be 'chat' or 'completions', got 'x'",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, args: 3}"),
        ":3: engine.args: must be a mapping of keys, got 3",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, num_threads: 0}"),
        ":3: engine.num_threads: must be at least 1, got 0",
    ),
    (
        swapped("{kind: simulated}", '{kind: simulated, device: ""}'),
        ":3: engine.device: is empty; give a text",
    ),
    (
        swapped("{kind: simulated}", "{kind: transformers, args: {a: 1}}"),
        ":3: engine.args: the in-process engine takes no args; remove them",
    ),
    # arms
    (
        GOOD[: GOOD.index("arms:")] + "arms: []\n" + GOOD[GOOD.index("workload:") :],
        ":4: arms: is empty; give at least one",
    ),
    (
        GOOD[: GOOD.index("arms:")] + "arms: {a: {}}\n" + GOOD[GOOD.index("workload:") :],
        ":4: arms: must be a list, such as [1, 2], not a mapping",
    ),
    (
        swapped("  - {name: baseline}\n", "  - {name: baseline}\n  -\n"),
        ":6: arms[1]: must be a mapping of keys, got null",
    ),
    (
        swapped("  - {name: baseline}\n", ""),
        ":4: arms: exactly one arm has no 'speculative', the baseline; found none; add {name: baseline}",
    ),
    (
        swapped("  - {name: baseline}\n", "  - {name: baseline}\n  - {name: b2}\n"),
        ":4: arms: exactly one arm has no 'speculative', the baseline; found baseline, b2; keep one",
    ),
    (swapped("name: a,", "name: baseline,"), ":6: arms[1].name: 'baseline' is given twice; keep one"),
    (swapped("name: a,", "name: a.b,"), f":6: arms[1].name: {NAME_RULE}, got 'a.b'"),
    (swapped("name: a,", f"name: {'a' * 65},"), f":6: arms[1].name: {NAME_RULE}, got '{'a' * 56}..."),
    (
        swapped("name: a,", "name: a, args: {x: 1},"),
        ":6: arms[1].args: a differs in more than 'speculative'; move this to engine.args "
        "or say allow_differences: true",
    ),
    (
        swapped("name: a,", 'name: a, url: "http://h",'),
        ":6: arms[1].url: only engine.kind openai takes a url, not simulated; remove it",
    ),
    (
        swapped("simulated", "openai"),
        ":5: arms[0].url: engine.kind openai needs a url for each arm; add it",
    ),
    # speculative
    (
        swapped("{name: baseline}", "{name: baseline, speculative: yes}"),
        ":5: arms[0].speculative: must be a mapping of keys, got true",
    ),
    (
        swapped("method: ngram, ", ""),
        ":6: key 'arms[1].speculative.method' is missing; add it",
    ),
    (
        swapped("_tokens: 3", "_tokens: 0"),
        ":6: arms[1].speculative.num_speculative_tokens: must be at least 1, got 0",
    ),
    (
        swapped("_tokens: 3", "_tokens: 65"),
        ":6: arms[1].speculative.num_speculative_tokens: must be at most 64, got 65",
    ),
    (
        swapped("_tokens: 3", '_tokens: "3"'),
        ":6: arms[1].speculative.num_speculative_tokens: must be a whole number, got '3'; write 3",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3.0"),
        ":6: arms[1].speculative.num_speculative_tokens: must be a whole number, got 3.0",
    ),
    (
        swapped("_tokens: 3", "_tokens: true"),
        ":6: arms[1].speculative.num_speculative_tokens: must be a whole number, got true",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, draft_sample_method: x"),
        ":6: arms[1].speculative.draft_sample_method: must be 'greedy' or 'probabilistic', got 'x'",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, rejection_sample_method: x"),
        ":6: arms[1].speculative.rejection_sample_method: must be 'standard', 'synthetic', 'block' "
        "or 'fly', got 'x'",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, rejection_sample_method: synthetic"),
        ":6: arms[1].speculative.rejection_sample_method: with synthetic acceptance the text is not "
        "the target's; use standard or say modelled: true",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, prompt_lookup_min: 4, prompt_lookup_max: 2"),
        ":6: arms[1].speculative.prompt_lookup_min: 4 is above prompt_lookup_max (2); swap them",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, prompt_lookup_max: 0"),
        ":6: arms[1].speculative.prompt_lookup_max: must be at least 1, got 0",
    ),
    (
        swapped("_tokens: 3", "_tokens: 3, prompt_lookup_min: 33"),
        ":6: arms[1].speculative.prompt_lookup_min: must be at most 32, got 33",
    ),
    # workload
    (swapped("{set: builtin-en}", "{}"), ":7: key 'workload.set' is missing; add it"),
    (swapped("{set: builtin-en}", '{set: ""}'), ":7: workload.set: is empty; give a text"),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, tiers: [lo]}"),
        ":7: workload.tiers[0]: must be 'low', 'medium', 'high' or 'unlabelled', got 'lo'",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, tiers: []}"),
        ":7: workload.tiers: is empty; give at least one",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, tiers: [low, low]}"),
        ":7: workload.tiers[1]: 'low' is given twice; keep one",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, lengths: [long, short, long]}"),
        ":7: workload.lengths[2]: 'long' is given twice; keep one",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, lengths: [tiny]}"),
        ":7: workload.lengths[0]: must be 'short', 'medium', 'long' or 'unlabelled', got 'tiny'",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, prompts_per_cell: 0}"),
        ":7: workload.prompts_per_cell: must be at least 1, got 0",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, max_tokens: {long: 0}}"),
        ":7: workload.max_tokens.long: must be at least 1, got 0",
    ),
    (
        swapped("{set: builtin-en}", "{set: builtin-en, chat_template_kwargs: [1]}"),
        ":7: workload.chat_template_kwargs: must be a mapping of keys, not a list",
    ),
    # sampling
    (swapped("0.0", "-1"), ":9: sampling[0].temperature: must be at least 0, got -1"),
    (swapped("0.0", "11"), ":9: sampling[0].temperature: must be at most 10, got 11"),
    (swapped("0.0", "true"), ":9: sampling[0].temperature: must be a number, got true"),
    (swapped("0.0", "1e-1"), ":9: sampling[0].temperature: must be a number, got '1e-1'; write 0.1"),
    (swapped("0.0", "cold"), ":9: sampling[0].temperature: must be a number, got 'cold'"),
    (swapped("0.0", ".nan"), ":9: .nan is not a finite number; write a number"),
    (swapped("0.0", "-.inf"), ":9: -.inf is not a finite number; write a number"),
    (swapped("max_tokens: 8", "max_tokens: 0"), ":9: sampling[0].max_tokens: must be at least 1, got 0"),
    (
        swapped(", max_tokens: 8", ""),
        ":9: key 'sampling[0].max_tokens' is missing; add it",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, top_p: 0"),
        ":9: sampling[0].top_p: must be above 0, got 0",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, top_p: 1.1"),
        ":9: sampling[0].top_p: must be at most 1, got 1.1",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, top_k: -1"),
        ":9: sampling[0].top_k: must be at least 0, got -1",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, seed: -1"),
        ":9: sampling[0].seed: must be at least 0, got -1",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, ignore_eos: 0"),
        ":9: sampling[0].ignore_eos: must be true or false, got 0",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, concurrency: [3]"),
        ":9: sampling[0].concurrency: 3 is not in load.concurrency (1, 2); add it there",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, concurrency: []"),
        ":9: sampling[0].concurrency: is empty; give at least one",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, concurrency: [1, 1]"),
        ":9: sampling[0].concurrency[1]: 1 is given twice; keep one",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, repeats: 3"),
        ":9: sampling[0].repeats: 3 is more than the plan's repeats (1); raise those",
    ),
    (
        swapped("load: {c", "  - {name: greedy, temperature: 1, max_tokens: 8}\nload: {c"),
        ":10: sampling[1].name: 'greedy' is given twice; keep one",
    ),
    # load
    (swapped("[1, 2]", "[]"), ":10: load.concurrency: is empty; give at least one"),
    (swapped("[1, 2]", "[1, 0]"), ":10: load.concurrency[1]: must be at least 1, got 0"),
    (swapped("[1, 2]", "[5000]"), ":10: load.concurrency[0]: must be at most 4096, got 5000"),
    (swapped("[1, 2]", "4"), ":10: load.concurrency: must be a list, such as [1, 2], got 4"),
    (swapped("[1, 2]", "[2, 1, 2]"), ":10: load.concurrency[2]: 2 is given twice; keep one"),
    (
        swapped("{concurrency", "{mode: poisson, concurrency"),
        ":10: load.mode: must be 'closed' or 'open', got 'poisson'",
    ),
    (
        swapped("{concurrency", "{mode: open, request_rate: 0, concurrency"),
        ":10: load.request_rate: must be above 0, got 0",
    ),
    (
        swapped("{concurrency", "{mode: open, trace: 3, concurrency"),
        ":10: load.trace: must be text, in quotes if need be, got 3",
    ),
    (
        swapped("{concurrency", "{stall_timeout_s: 0, concurrency"),
        ":10: load.stall_timeout_s: must be above 0, got 0",
    ),
    (
        swapped("{concurrency", "{request_timeout_s: -1, concurrency"),
        ":10: load.request_timeout_s: must be above 0, got -1",
    ),
    (
        swapped("{concurrency", "{cell_timeout_s: 0, concurrency"),
        ":10: load.cell_timeout_s: must be above 0, got 0",
    ),
    (
        GOOD + "published: {source: 3, conditions: c, claims: []}\n",
        ":11: published.source: must be text, in quotes if need be, got 3",
    ),
    (
        GOOD + "published: {source: s, conditions: c, claims: []}\n",
        ":11: published.claims: is empty; give at least one",
    ),
    (
        GOOD + CLAIM.replace("conditions: c", "conditions: 3"),
        ":11: published.conditions: must be text, in quotes if need be, got 3",
    ),
    (
        GOOD + CLAIM.replace("conditions: c", "conditions: c, differences: 3"),
        ":11: published.differences: must be text, in quotes if need be, got 3",
    ),
    (
        GOOD + CLAIM.replace("arm: a", "arm: baseline"),
        ":12: published.claims[0].arm: 'baseline' is no arm that speculates (a); name one",
    ),
    (
        GOOD + CLAIM.replace("acceptance_length: 2.0", "acceptance_length: 0.5"),
        ":12: published.claims[0].acceptance_length: must be at least 1, got 0.5",
    ),
    (
        GOOD + CLAIM.replace("baseline_tokens_per_s: 1.0", "baseline_tokens_per_s: 0"),
        ":12: published.claims[0].baseline_tokens_per_s: must be above 0, got 0",
    ),
    (
        GOOD + CLAIM.replace(", tokens_per_s: 2.0", ", tokens_per_s: -1"),
        ":12: published.claims[0].tokens_per_s: must be above 0, got -1",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, python: 3}"),
        ":3: engine.python: must be text, in quotes if need be, got 3",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, env: {A: 1}}"),
        ":3: engine.env.A: must be text, in quotes if need be, got 1",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, env: {HF_TOKEN: x}}"),
        ":3: engine.env.HF_TOKEN: its value would stand in the run's manifest; remove it and set the "
        "variable where specnb is started",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, port: 70000}"),
        ":3: engine.port: must be at most 65535, got 70000",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, devices: 0}"),
        ":3: engine.devices: must be text, in quotes if need be, got 0",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, start_timeout_s: 0}"),
        ":3: engine.start_timeout_s: must be above 0, got 0",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, api_key_env: 'A B'}"),
        f":3: engine.api_key_env: {NAME_RULE}, got 'A B'",
    ),
    (
        swapped("set: builtin-en", "set: builtin-en, nonce: 3"),
        ":7: workload.nonce: must be true or false, got 3",
    ),
    (
        swapped(
            "set: builtin-en", "set: builtin-en, prompts_by_concurrency: [{from_concurrency: 0, prompts: 1}]"
        ),
        ":7: workload.prompts_by_concurrency[0].from_concurrency: must be at least 1, got 0",
    ),
    (
        swapped(
            "set: builtin-en", "set: builtin-en, prompts_by_concurrency: [{from_concurrency: 1, prompts: 0}]"
        ),
        ":7: workload.prompts_by_concurrency[0].prompts: must be at least 1, got 0",
    ),
    (
        swapped("{concurrency", "{warmup_requests: -1, concurrency"),
        ":10: load.warmup_requests: must be at least 0, got -1",
    ),
    # the rest
    (swapped("name: p\n", ""), ":1: key 'name' is missing; add it"),
    (swapped("name: p", "name: 12"), ":1: name: must be text, in quotes if need be, got 12"),
    (swapped("name: p", "name:"), ":1: name: must be text, in quotes if need be, got null"),
    (swapped("name: p", "name: a/b"), f":1: name: {NAME_RULE}, got 'a/b'"),
    (swapped("name: p", 'name: "p\\n"'), f":1: name: {NAME_RULE}, got 'p\\n'"),
    (GOOD + "modelled: 1\n", ":11: modelled: must be true or false, got 1"),
    (GOOD + "modelled: maybe\n", ":11: modelled: must be true or false, got 'maybe'"),
    (GOOD + "repeats: 0\n", ":11: repeats: must be at least 1, got 0"),
    (GOOD + "repeats: 101\n", ":11: repeats: must be at most 100, got 101"),
    (GOOD + "order: random\n", ":11: order: must be 'abba' or 'sequential', got 'random'"),
    (GOOD + "on_error: skip\n", ":11: on_error: must be 'continue' or 'stop', got 'skip'"),
    (GOOD + "allow_differences: x\n", ":11: allow_differences: must be true or false, got 'x'"),
    (GOOD + "logging: {positions: 1}\n", ":11: logging.positions: must be true or false, got 1"),
    (GOOD + "price: 3\n", ":11: price: must be a mapping of keys, got 3"),
    (GOOD + "price: {gpu_hour: 0}\n", ":11: price.gpu_hour: must be above 0, got 0"),
]

YAML_FAULTS = [
    ("", f": {MAPPING} an empty file"),
    ("# nothing\n", f": {MAPPING} an empty file"),
    ("- a\n", f": {MAPPING} a list"),
    ("hello", f": {MAPPING} a text"),
    ("3", f": {MAPPING} a number"),
    ("true", f": {MAPPING} true or false"),
    ("2020-01-01", f": {MAPPING} a date"),
    (GOOD + "name: q\n", ":11: key 'name' is given twice; keep one"),
    (swapped("{model: m}", "{model: m, model: n}"), ":2: key 'model' is given twice; keep one"),
    ("name: [p\ntarget: 3\n", ":2: not valid YAML (expected ',' or ']', but got ':')"),
    ("name: p: q\n", ":1: not valid YAML (mapping values are not allowed here)"),
    ("name: p\n\ttarget: 3\n", ":2: not valid YAML (a tab; indent with spaces)"),
    ("name: p\x01\n", ":1: character #x01 is not text; remove it"),
    ("name: p\ntarget: \x07\n", ":2: character #x07 is not text; remove it"),
    (GOOD + "---\n" + GOOD, ":11: not valid YAML (a second document; keep one)"),
    ("name: *x\n", ":1: not valid YAML (found undefined alias 'x')"),
    (GOOD + "3: 4\n", ":11: key 3 is not text; put it in quotes"),
    (GOOD + "~: 4\n", ":11: key ~ is not text; put it in quotes"),
    (GOOD + "? [1, 2]\n: 4\n", ":11: key is not text; put it in quotes"),
    (
        swapped("name: p", "name: !!python/object:os.system p"),
        ":1: a YAML tag os.system, which a plan can't hold; write text in quotes",
    ),
    (
        swapped("name: p", "name: 2020-01-01"),
        ":1: a date 2020-01-01, which a plan can't hold; write text in quotes",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, args: {d: 2020-13-45}}"),
        ":3: a date 2020-13-45, which a plan can't hold; write text in quotes",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, args: {d: !!binary aGk=}}"),
        ":3: a YAML tag binary, which a plan can't hold; write text in quotes",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, args: {d: !!int x}}"),
        ":3: x is not a number; quote text",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, args: {d: .inf}}"),
        ":3: .inf is not a finite number; write a number",
    ),
    (
        swapped("max_tokens: 8", "max_tokens: 8, seed: 9223372036854775808"),
        ":9: number 9223372036854775808 is out of range; the largest is 2**63 - 1",
    ),
    (
        swapped("max_tokens: 8", f"max_tokens: {'9' * 5000}"),
        f":9: number {'9' * 57}... is out of range; the largest is 2**63 - 1",
    ),
    (
        swapped("{model: m}", '{model: "\\ud800"}'),
        ":2: a lone surrogate (\\ud800 to \\udfff); write the whole character",
    ),
    (swapped("{model: m}", '{model: "a\\0b"}'), ":2: a NUL character; remove it"),
    ("name: " + "[" * 3000 + "]" * 3000, ": nested too deeply; a plan has 40 levels at most"),
    (
        "name: " + "[" * 60 + "]" * 60,
        ":1: nested too deeply, or an alias of itself; a plan has 40 levels at most",
    ),
    (
        swapped("{kind: simulated}", "{kind: simulated, args: &a {x: *a}}"),
        ":3: nested too deeply, or an alias of itself; a plan has 40 levels at most",
    ),
    (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        ":1: more than 20000 values with aliases written out; shorten the plan",
    ),
]


@pytest.mark.parametrize(("text", "expected"), [*UNKNOWN, *VALUES, *YAML_FAULTS])
def test_fault_is_one_line_with_the_place_and_the_fix(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    assert message_of(path) == expected


def test_every_field_of_a_plan_has_a_fault_above() -> None:
    """A new field must come with the message that its bad value gives."""

    def names(model: Any) -> set[str]:
        found: set[str] = set()
        for field, info in model.model_fields.items():
            found.add(field)
            for part in (info.annotation, *getattr(info.annotation, "__args__", ())):
                if isinstance(part, type) and hasattr(part, "model_fields"):
                    found |= names(part)
        return found

    said = " ".join(expected for _, expected in (*UNKNOWN, *VALUES))
    free_text = {
        "currency",
        "positions",
        "tokens",
        "short",
        "medium",
        "unlabelled",
    }  # same type as a tested one
    assert {name for name in names(Plan) if name not in said} <= free_text


def test_not_utf8_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"name: \xff\n")
    assert message_of(path) == ": not UTF-8 text (byte 6); save the plan as UTF-8"


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_plan(path).model_dump() == plan_from_dict(good()).model_dump()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none.yaml", ": can't read the plan (No such file or directory); give the path of a YAML file"),
        ("", ": can't read the plan (Is a directory); give the path of a YAML file"),
    ],
)
def test_unreadable_path(tmp_path: Path, name: str, expected: str) -> None:
    assert message_of(tmp_path / name if name else tmp_path) == expected


def test_path_with_a_nul() -> None:
    with pytest.raises(PlanError, match=r"^'a\\x00b': not a path \(embedded null byte\); give the path"):
        read_plan("a\0b")


def test_merge_keys_and_aliases_mean_what_yaml_says(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    greedy = "  - {name: greedy, temperature: 0.0, max_tokens: 8}\n"
    path.write_text(
        GOOD.replace(greedy, f"  - &g {greedy[4:]}  - {{<<: *g, name: warm, temperature: 0.5}}\n")
    )
    plan = read_plan(path)
    assert [(s.name, s.temperature, s.max_tokens) for s in plan.sampling] == [
        ("greedy", 0.0, 8),
        ("warm", 0.5, 8),
    ]


def test_fault_that_came_through_a_merge_is_placed_at_its_mapping(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    text = swapped("{kind: simulated}", "&e {kind: simulated}") + "price: {<<: *e, gpu_hour: 1}\n"
    path.write_text(text)
    assert message_of(path) == ":11: unknown key 'kind' in price; known keys: gpu_hour, currency"


def test_keys_of_the_engines_own_pass_unchanged() -> None:
    content = good()
    content["arms"][1]["speculative"]["attention_backend"] = {"a": [1, None, "x"]}
    plan = plan_from_dict(content)
    assert plan.arms[1].speculative is not None
    assert plan.arms[1].speculative.model_extra == {"attention_backend": {"a": [1, None, "x"]}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "plan: holds a value that JSON can't hold (Out of range float values are not JSON "),
        (b"x", "plan: holds a value that JSON can't hold (Object of type bytes is not JSON serializable); "),
    ],
)
def test_dict_with_what_json_can_not_hold(value: object, expected: str) -> None:
    content = good()
    content["engine"]["args"] = {"x": value}
    with pytest.raises(PlanError) as caught:
        plan_from_dict(content)
    assert str(caught.value).startswith(expected)


def test_dict_names_its_source() -> None:
    content = good()
    content["repeats"] = 0
    with pytest.raises(PlanError) as caught:
        plan_from_dict(content, source="run/manifest.json: plan")
    assert str(caught.value) == "run/manifest.json: plan: repeats: must be at least 1, got 0"


def test_openai_with_urls_and_allowed_differences_and_modelled_acceptance() -> None:
    content = good()
    content["engine"]["kind"] = "openai"
    for arm in content["arms"]:
        arm["url"] = "http://localhost:8000"
    content["arms"][1]["args"] = {"x": 1}
    content["arms"][1]["speculative"]["rejection_sample_method"] = "synthetic"
    plan = plan_from_dict({**content, "allow_differences": True, "modelled": True})
    assert [arm.url for arm in plan.arms] == ["http://localhost:8000"] * 2
    assert plan.modelled


# -- any text at all ---------------------------------------------------------------------------

SCRAPS = st.sampled_from(
    [
        *GOOD.splitlines(keepends=True),
        "name: [",
        "  - ",
        ": ",
        "*g",
        "&g ",
        "<<: ",
        "!!set ",
        "\t",
        "- {",
        "}",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(SCRAPS, max_size=14).map("".join)))
@example("&a\nname: *a\n")
@example("name: !!timestamp 2020-99-99\n")
@example("name: 0x_\n")
@example("? {a: b}\n: c\n")
@example("name: !!float x\n")
@example("name: !!bool x\n")
@example("<<: 3\n")
@example("<<: [*a]\n")
@example("=: 3\nname: =\n")
@example("name: 1:60\n")
def test_any_text_is_a_plan_or_a_one_line_error(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    problem = str(path)
    try:
        read_plan(path)
    except SpecnbError as error:
        problem = str(error)
    assert "\n" not in problem
    assert problem.startswith(str(path))


# -- digest ------------------------------------------------------------------------------------


def test_digest_is_pinned() -> None:
    """A changed digest makes every unfinished run unresumable: change it knowingly."""
    assert plan_from_dict(good()).sha256 == "bef58cd57527a7023479a25fe227eaf7e46beb2d9906c6525af6c7d0291aef61"


@settings(max_examples=30, deadline=None)
@given(
    order=st.permutations(list(good())),
    flow=st.booleans(),
    price=st.none() | st.floats(0.01, 1e6),
)
def test_digest_ignores_formatting_and_price(
    tmp_path_factory: Any, order: list[str], flow: bool, price: float | None
) -> None:
    content = {key: good()[key] for key in order}
    if price is not None:
        content["price"] = {"gpu_hour": price}
    path = tmp_path_factory.getbasetemp() / "hash.yaml"
    path.write_text("# a remark\n" + yaml.safe_dump(content, sort_keys=False, default_flow_style=flow))
    assert read_plan(path).sha256 == plan_from_dict(good()).sha256


def test_digest_survives_the_manifest() -> None:
    plan = plan_from_dict(good())
    again = plan_from_dict(json.loads(json.dumps(plan.model_dump(mode="json"))))
    assert again == plan
    assert again.sha256 == plan.sha256


CHANGES: list[tuple[tuple[str | int, ...], object]] = [
    (("name",), "q"),
    (("modelled",), True),
    (("target", "model"), "n"),
    (("target", "revision"), "abc"),
    (("target", "dtype"), "float32"),
    (("target", "trust_remote_code"), True),
    (("engine", "kind"), "vllm"),
    (("engine", "endpoint"), "completions"),
    (("engine", "args"), {"x": 1}),
    (("engine", "device"), "cpu"),
    (("engine", "num_threads"), 2),
    (("arms", 0, "name"), "base"),
    (("arms", 1, "speculative", "method"), "mtp"),
    (("arms", 1, "speculative", "num_speculative_tokens"), 4),
    (("arms", 1, "speculative", "model"), "d"),
    (("arms", 1, "speculative", "draft_sample_method"), "greedy"),
    (("arms", 1, "speculative", "rejection_sample_method"), "standard"),
    (("arms", 1, "speculative", "prompt_lookup_max"), 2),
    (("arms", 1, "speculative", "prompt_lookup_min"), 2),
    (("arms", 1, "speculative", "anything"), 2),
    (("workload", "set"), "builtin-zh"),
    (("workload", "tiers"), ["low"]),
    (("workload", "tiers"), ["medium", "low", "high"]),
    (("workload", "lengths"), ["long"]),
    (("workload", "prompts_per_cell"), 31),
    (("workload", "chat_template_kwargs"), {"enable_thinking": False}),
    (("workload", "max_tokens"), {"short": 9}),
    (("sampling", 0, "name"), "g"),
    (("sampling", 0, "temperature"), 0.5),
    (("sampling", 0, "top_p"), 0.5),
    (("sampling", 0, "top_k"), 5),
    (("sampling", 0, "max_tokens"), 9),
    (("sampling", 0, "seed"), 1),
    (("sampling", 0, "ignore_eos"), True),
    (("sampling", 0, "concurrency"), [1]),
    (("sampling", 0, "repeats"), 1),
    (("load", "concurrency"), [2, 1]),
    (("load", "warmup_requests"), 0),
    (("repeats",), 2),
    (("order",), "sequential"),
    (("on_error",), "stop"),
    (("allow_differences",), True),
    (("logging",), {"tokens": False}),
    (("logging",), {"positions": False}),
]


@pytest.mark.parametrize(("place", "value"), CHANGES)
def test_digest_changes_with_everything_else(place: tuple[str | int, ...], value: object) -> None:
    content: Any = good()
    spot = content
    for part in place[:-1]:
        spot = spot[part]
    spot[place[-1]] = value
    assert plan_from_dict(content).sha256 != plan_from_dict(good()).sha256


# -- cells -------------------------------------------------------------------------------------


def plan_of(**changes: Any) -> Plan:
    content = good()
    content["workload"]["tiers"] = ["low", "high"]
    content.update(changes)
    return plan_from_dict(content)


def short(cells: tuple[Cell, ...]) -> list[tuple[str, str, int, int]]:
    return [(cell.arm.name, cell.tier, cell.concurrency, cell.repeat) for cell in cells]


def test_cells_in_abba_order() -> None:
    assert short(plan_cells(plan_of(repeats=2))) == [
        ("baseline", "low", 1, 0),
        ("a", "low", 1, 0),
        ("baseline", "high", 1, 0),
        ("a", "high", 1, 0),
        ("baseline", "low", 2, 0),
        ("a", "low", 2, 0),
        ("baseline", "high", 2, 0),
        ("a", "high", 2, 0),
        ("a", "low", 1, 1),
        ("baseline", "low", 1, 1),
        ("a", "high", 1, 1),
        ("baseline", "high", 1, 1),
        ("a", "low", 2, 1),
        ("baseline", "low", 2, 1),
        ("a", "high", 2, 1),
        ("baseline", "high", 2, 1),
    ]


def test_cells_in_sequential_order_keep_the_arms_order() -> None:
    cells = plan_cells(plan_of(repeats=2, order="sequential"))
    assert [cell.arm.name for cell in cells] == ["baseline", "a"] * 8


def test_a_setting_may_narrow_concurrency_and_repeats() -> None:
    sampling = [
        {"name": "greedy", "temperature": 0.0, "max_tokens": 8},
        {"name": "warm", "temperature": 1.0, "max_tokens": 8, "concurrency": [2], "repeats": 1},
    ]
    cells = plan_cells(plan_of(repeats=2, sampling=sampling))
    warm = [cell.cell_id for cell in cells if cell.sampling.name == "warm"]
    assert warm == [
        "baseline.low.c2.warm.r0",
        "a.low.c2.warm.r0",
        "baseline.high.c2.warm.r0",
        "a.high.c2.warm.r0",
    ]
    assert len(cells) == 16 + 4


@settings(max_examples=40, deadline=None)
@given(
    repeats=st.integers(1, 4),
    concurrency=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    tiers=st.lists(st.sampled_from(["low", "medium", "high", "unlabelled"]), min_size=1, unique=True),
    order=st.sampled_from(["abba", "sequential"]),
)
def test_cells_cover_the_grid_once(
    repeats: int, concurrency: list[int], tiers: list[str], order: str
) -> None:
    content = good()
    content["workload"]["tiers"] = tiers
    plan = plan_from_dict(
        {**content, "repeats": repeats, "order": order, "load": {"concurrency": concurrency}}
    )
    cells = plan_cells(plan)
    grid = {
        (arm, t, c, r)
        for arm in ("baseline", "a")
        for t in tiers
        for c in concurrency
        for r in range(repeats)
    }
    assert set(short(cells)) == grid
    assert len(cells) == len(grid) == len({cell.cell_id for cell in cells})
    # The two arms of one comparison are always neighbours.
    for left, right in zip(cells[::2], cells[1::2], strict=True):
        assert (left.tier, left.concurrency, left.repeat) == (right.tier, right.concurrency, right.repeat)


# -- paths -------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_plans_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plans"
    (folder / "model").mkdir(parents=True)
    (folder / "drafter").mkdir()
    (folder / "mine.jsonl").write_text("{}")
    content = good()
    content["target"]["model"] = "model"
    content["workload"]["set"] = "mine.jsonl"
    content["arms"][1]["speculative"]["model"] = "drafter"
    (folder / "plan.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plan = read_plan("../plans/plan.yaml")
    assert plan.located(plan.target.model) == str(folder / "model")
    assert plan.located(plan.workload.set) == str(folder / "mine.jsonl")
    assert plan.arms[1].speculative is not None
    assert plan.located(plan.arms[1].speculative.model or "") == str(folder / "drafter")
    # What is stored and hashed is the plan's own text, the same in every checkout.
    assert plan.workload.set == "mine.jsonl"
    assert plan.sha256 == plan_from_dict(content).sha256


def test_the_servers_interpreter_is_relative_to_the_plans_folder_and_stays_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, environment = tmp_path / "data" / "plans", tmp_path / "env" / "bin"
    for made in (folder, environment):
        made.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    monkeypatch.chdir(environment)
    for name, expected in (
        ("../../env/bin/python", str(folder / "../../env/bin/python")),
        (str(environment / "python"), str(environment / "python")),
        ("python3", "python3"),
        (None, None),
    ):
        content = good()
        content["engine"] = {"kind": "vllm", "python": name}
        (folder / "plan.yaml").write_text(yaml.safe_dump(content))
        plan = read_plan("../../data/plans/plan.yaml")
        assert (plan.server_python, plan.engine.python) == (expected, name)
    (folder / "plan.yaml").write_text(
        yaml.safe_dump({**content, "engine": {"kind": "vllm", "python": "./a/b"}})
    )
    assert read_plan("../../data/plans/plan.yaml").server_python == str(folder / "a" / "b")


def test_the_cpu_plan_names_the_environment_that_make_makes() -> None:
    root = Path(__file__).parents[2]
    plan = read_plan(root / "data" / "plans" / "cpu-vllm-ngram.yaml")
    assert os.path.normpath(plan.server_python or "") == str(root / ".venv-vllm" / "bin" / "python")


def test_names_that_are_no_paths_stay(tmp_path: Path) -> None:
    content = good()
    content["target"]["model"] = "org/model"
    content["workload"]["set"] = "w" * 5000
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content))
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.located(plan.target.model) == "org/model"
    assert plan.located(plan.workload.set) == "w" * 5000


def test_names_of_built_in_things_are_no_paths(tmp_path: Path) -> None:
    for name in ("demo", "builtin-en"):
        (tmp_path / name).mkdir()
    content = good()
    content["target"]["model"] = "demo"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content))
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.located(plan.target.model) == "demo"
    assert plan.located(plan.workload.set) == "builtin-en"


def test_the_demos_plan_is_valid() -> None:
    plan = read_plan(Path(__file__).parents[2] / "data" / "plans" / "demo.yaml")
    assert plan.name == "demo"
    assert len(plan_cells(plan)) == 48


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((Path(__file__).parents[2] / "data" / "plans").glob("*.yaml"))
        if not path.name.startswith("train-")
    ],
    ids=str,
)
def test_every_plan_in_the_repository_is_valid(path: Path) -> None:
    assert plan_cells(read_plan(path))


def test_a_plan_of_the_first_version_keeps_its_digest() -> None:
    run = Path(__file__).parents[2] / "data" / "samples" / "demo" / "manifest.json"
    manifest = json.loads(run.read_text(encoding="utf-8"))
    assert "python" not in manifest["plan"]["engine"]
    assert plan_from_dict(manifest["plan"]).sha256 == manifest["plan_sha256"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"mode": "open", "concurrency": [4]}, "open needs request_rate or trace, found neither; give one"),
        (
            {"mode": "open", "concurrency": [4], "request_rate": 2.0, "trace": "t"},
            "open needs request_rate or trace, found both; give one",
        ),
        (
            {"concurrency": [4], "request_rate": 2.0},
            "a closed loop sends when a slot is free; say mode: open",
        ),
        ({"mode": "open", "concurrency": [4], "request_rate": 2.0}, "only servers take an open loop"),
    ],
)
def test_open_and_closed_loops_are_kept_apart(load: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_dict(good() | {"load": load})


def test_number_of_prompts_by_concurrency() -> None:
    content = good()
    content["workload"]["prompts_by_concurrency"] = [
        {"from_concurrency": 2, "prompts": 8},
        {"from_concurrency": 16, "prompts": 64},
    ]
    workload = plan_from_dict(content).workload
    assert [workload.num_prompts(concurrency) for concurrency in (1, 2, 15, 16, 64)] == [32, 8, 8, 64, 64]
    content["workload"]["prompts_by_concurrency"].reverse()
    with pytest.raises(PlanError, match="from_concurrency 16, 2 must rise; sort them"):
        plan_from_dict(content)


def test_a_launched_server_serves_its_arm_and_repeat_in_one_go() -> None:
    content = good() | {"repeats": 2}
    content["engine"] = {"kind": "vllm"}
    order = [(cell.arm.name, cell.repeat) for cell in plan_cells(plan_from_dict(content))]
    starts = [now for now, before in zip(order, [None, *order], strict=False) if now != before]
    assert starts == [("baseline", 0), ("a", 0), ("a", 1), ("baseline", 1)]
    cells = plan_cells(plan_from_dict(content))
    assert len({cell.cell_id for cell in cells}) == len(cells)
