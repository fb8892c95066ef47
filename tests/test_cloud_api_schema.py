"""The API against its own description: whatever is sent, it answers, and as it says it does."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cloud.api.app import make_app
from cloud.api.listener import HttpListener
from cloud.server import Decoder
from tests.brains import small_brain, small_settings
from tests.test_cloud_server import model_folder

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


class _Served(threading.Thread):
    """A decoder with its API on an event loop of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.url = ""

    def run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        folder = model_folder()
        decoder = Decoder(small_brain(folder, max_tokens=32), small_settings(folder, max_tokens=32))
        await decoder.start([])
        listener = HttpListener(make_app(decoder), "127.0.0.1:0")
        listener.start()
        self.url = listener.name
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self.ready.set()
        await self._end.wait()
        await listener.close()
        await decoder.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self.join()


@pytest.fixture(scope="module")
def description() -> Iterator[schemathesis.BaseSchema]:
    served = _Served()
    served.start()
    assert served.ready.wait(60)
    try:
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    finally:
        served.stop()


OPERATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer/{digest}"),
    ("GET", "/v1/models"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
)


def test_every_operation_is_tried(description: schemathesis.BaseSchema) -> None:
    found = {(o.method.upper(), o.path) for o in map(_ok, description.get_all_operations())}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_an_operation_keeps_what_its_description_says(
    method: str, path: str, description: schemathesis.BaseSchema
) -> None:
    operation = description[path][method]
    positive, negative = (operation.as_strategy(mode) for mode in schemathesis.GenerationMode)
    answered: Counter[int] = Counter()

    @given(case=st.one_of(positive, negative, positive.map(fitted), positive.map(fitted)))
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        answered[case.call_and_validate(checks=list(CHECKS)).status_code] += 1

    check()
    assert answered[200] or "{" in path or "adapter" in path, answered


def fitted(case: schemathesis.Case) -> schemathesis.Case:
    """Bring what no description can know into its bounds: names, ids, lengths, whose turn it is."""
    if not isinstance(case.body, dict):
        return case
    case.body = fit = {"prompt": "a"} | case.body
    if {"model", "messages"} & case.body.keys():
        fit |= {"model": str(model_folder())}
    if "/completions" not in case.path:
        fit.pop("messages", None)
    if "chat" in case.path or case.path == "/detokenize":
        del fit["prompt"]
    for key in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(fit.get(key), int):
            fit[key] = 1 + fit[key] % 8
    for key in ("logit_bias", "stop_token_ids", "stream_options", "top_logprobs"):
        fit.pop(key, None)
    if "prompt" in fit:
        fit["prompt"] = _known_ids(fit["prompt"])
    messages = fit.get("messages")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        last = len(messages) - len(messages) % 2 + 1
        roles = ("user", "assistant")
        fit["messages"] = [m | {"role": roles[i % 2]} for i, m in enumerate(messages[:last])]
    return case


def _known_ids(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_known_ids(part) for part in prompt] or [1]
    return prompt % 400 if isinstance(prompt, int) else prompt or "a"


def _ok(result: Any) -> Any:
    return result.ok()
