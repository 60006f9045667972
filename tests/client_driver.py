"""The real client as a process of its own, driven like `bare_reader.py`: one JSON object in, one out.

    {"port": 8000, "path": "/v1/chat/completions", "bodies": [...], "concurrency": 32}
    {"requests": [{"key", "status", "sent_s", "chunks", ...}, ...], "facts": {...}, "cpu_s": ...}

More keys of the order: `keep_chunks` (false: none in the reply), `on_done_sleep_s` (a consumer that is slow
on every answer, which makes the client late). A process of its own keeps the test runner's memory, garbage
collection and threads out of the time stamps.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from specnb.engines.openai import Answer, Client
from specnb.load import ClosedLoop, Job

_FIELDS = (
    "status",
    "error_kind",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "last_token_s",
    "num_output_tokens",
    "num_first_chunk_tokens",
    "chunks",
)


def main() -> None:
    """Reads the order, runs it, writes the answer."""
    order: dict[str, Any] = json.load(sys.stdin)
    keys = [body.get("fake", {}).get("key") for body in order["bodies"]]
    jobs = [
        Job(request_id=str(i), path=order["path"], body=json.dumps(body).encode())
        for i, body in enumerate(order["bodies"])
    ]
    sleep_s = order.get("on_done_sleep_s", 0.0)

    def on_done(answer: Answer) -> None:
        if sleep_s:
            time.sleep(sleep_s)

    client = Client(f"http://127.0.0.1:{order['port']}", clock=time.perf_counter)
    answers, facts = client.run(ClosedLoop(jobs, order["concurrency"]), on_done=on_done)
    cpu_s = time.process_time()
    requests = []
    for answer in answers:
        row = {name: getattr(answer, name) for name in _FIELDS}
        if not order.get("keep_chunks", True):
            del row["chunks"]
        requests.append({"key": keys[int(answer.request_id)], **row})
    json.dump({"requests": requests, "facts": dataclasses.asdict(facts), "cpu_s": cpu_s}, sys.stdout)


if __name__ == "__main__":
    main()
