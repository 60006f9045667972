"""Servers that specnb did not start, and how to tell that a server, whoever started it, is gone.

Separate from the engine, which drives servers of either kind and asks no more of them than `Server` has.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any, Final, Protocol

from specnb.config import Arm, Plan
from specnb.engines.bodies import CHAT_PATH, COMPLETIONS_PATH
from specnb.engines.openai import fetch, server_address
from specnb.engines.responses import Answer
from specnb.errors import EngineError, PlanError

_ASK_EVERY_S: Final = 1.0
_ABSENT_MODEL: Final = "specnb-control-no-such-model"


class Server(Protocol):
    """A server of one arm that answers, launched or not."""

    @property
    def url(self) -> str:
        """Its base address."""
        ...

    @property
    def model(self) -> str:
        """Name of the model as requests must give it."""
        ...

    def is_alive(self) -> bool:
        """Whether it can be sent requests."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the run keeps of it; JSON-able."""
        ...

    def stop(self) -> None:
        """Ends it, if it was launched."""
        ...


class AttachedServer:
    """A server that was running before, at an arm's `url`; never started or stopped here.

    Raises
    ------
    PlanError
        The url or the key is malformed.
    EngineError
        It can't be reached, or does not list the plan's model.
    """

    def __init__(self, plan: Plan, arm: Arm, *, api_key: str | None) -> None:
        assert arm.url is not None
        try:
            server_address(arm.url)
        except PlanError as error:
            raise PlanError(f"arms.{arm.name}.{error}") from error
        self.url = arm.url
        self.model = plan.target.model
        self._key = api_key
        self._facts = self._preflight(arm, plan.engine.endpoint)

    def is_alive(self) -> bool:
        """Whether it still answers; asked after a failed request only."""
        try:
            fetch(self.url, "/v1/models", timeout_s=5.0, api_key=self._key)
        except EngineError:
            return False
        return True

    def facts(self) -> dict[str, Any]:
        """What it said of itself: models, version, whether it answers for any model name."""
        return self._facts

    def stop(self) -> None:
        """Leaves it running."""

    def _preflight(self, arm: Arm, endpoint: str) -> dict[str, Any]:
        """Its list of models must name the target; an echo of the name in an answer is no evidence."""
        place = f"arms.{arm.name}.url: {arm.url}"
        status, body = self._asked(place, "/v1/models", timeout_s=10.0)
        if status in (401, 403):
            raise EngineError(
                f"{place}: refused ({status}); put the key into the variable of engine.api_key_env"
            )
        if status != 200:
            raise EngineError(f"{place}: /v1/models answers {status}; correct the url")
        try:
            entries = {str(entry["id"]): entry for entry in json.loads(body)["data"]}
            listed = list(entries)
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{place}: /v1/models is not an OpenAI list of models; correct the url"
            ) from error
        if self.model not in listed:
            raise EngineError(
                f"{place}: serves {', '.join(listed) or 'no model'}, not {self.model}; "
                "correct the url or target.model"
            )
        control: dict[str, Any] = {"model": _ABSENT_MODEL, "max_tokens": 1}
        if endpoint == "chat":
            control["messages"] = [{"role": "user", "content": "a"}]
        else:
            control["prompt"] = "a"
        path = CHAT_PATH if endpoint == "chat" else COMPLETIONS_PATH
        status, _ = self._asked(place, path, body=json.dumps(control).encode(), timeout_s=60.0)
        facts: dict[str, Any] = {"models": listed, "answers_any_model": status == 200, "version": None}
        try:
            status, body = fetch(self.url, "/version", timeout_s=5.0, api_key=self._key)
            facts["version"] = str(json.loads(body)["version"]) if status == 200 else None
        except (EngineError, ValueError, KeyError, TypeError):
            pass  # only vLLM has it
        # Under the names of a launched server's log, so that arms are compared alike.
        said = {"version": facts["version"], "max_seq_len": entries[self.model].get("max_model_len")}
        facts["settings"] = {name: value for name, value in said.items() if value is not None}
        return facts

    def _asked(
        self, place: str, path: str, *, body: bytes | None = None, timeout_s: float
    ) -> tuple[int, bytes]:
        method = "GET" if body is None else "POST"
        try:
            return fetch(self.url, path, method=method, body=body, timeout_s=timeout_s, api_key=self._key)
        except EngineError as error:
            raise EngineError(f"{place}: {error}") from error


class Watch:
    """Whether a server still answers, judged while it is driven by what becomes of its requests.

    A process tells of its own death. A running server is asked after a lost request, at most once a second
    where asking could hold up other streams. Either counts as gone once it hangs: twice as many requests as
    run at once have stalled since the last one that was answered.
    """

    def __init__(self, server: Server, *, concurrency: int, launched: bool) -> None:
        self._server = server
        self._launched = launched
        self._most_stalled = 2 * concurrency
        self._num_stalled = 0
        self._ask_again_s = -math.inf
        self._gone = False

    @property
    def hangs(self) -> bool:
        """Whether it was given up because nothing came back any more."""
        return self._num_stalled >= self._most_stalled

    def note(self, answer: Answer) -> None:
        """Takes one answer, or a failure."""
        kind = answer.error_kind
        if answer.status == "ok":
            self._num_stalled = 0
        elif kind == "stalled":
            self._num_stalled += 1
        if self._launched or self._gone or kind not in ("connect", "disconnected", "truncated", "stalled"):
            return
        now_s = time.monotonic()
        if kind in ("connect", "stalled") or now_s >= self._ask_again_s:
            self._gone = not self._server.is_alive()
            self._ask_again_s = now_s + _ASK_EVERY_S

    def is_alive(self) -> bool:
        """Whether more requests may be sent to it."""
        if self._gone or self.hangs:
            return False
        return not self._launched or self._server.is_alive()
