"""The HTTP API as its users meet it: through the official client, over a real socket."""

import asyncio
import json
import math
import threading
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud.api import app, operation
from shared.frames import Sampling
from shared.tokenizer import load_tokenizer
from tests.api_world import MODEL, ApiWorld, in_api_world
from tests.test_cloud_server import answer

SYSTEM = {"role": "system", "content": "You are the car's assistant."}
HELLO = {"role": "user", "content": "Find a charger on the way"}
LONG: dict[str, Any] = {"logit_bias": {"5": 100}}
"""Makes a reply as long as it may be."""
Body = dict[str, Any]


def chat(**changes: Any) -> Body:
    return {
        "model": MODEL,
        "messages": [SYSTEM, HELLO],
        "temperature": 0,
        "max_tokens": 12,
    } | changes


def text(**changes: Any) -> Body:
    return {"model": MODEL, "prompt": "Find a", "temperature": 0, "max_tokens": 12} | changes


async def streamed(world: ApiWorld, path: str, body: Body) -> list[Body]:
    """Return the events of a stream, as JSON."""
    found: list[Body] = []
    async with world.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    found += [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return found


# --- replies


def test_a_chat_gets_the_reply_that_a_vehicle_gets_over_the_relay() -> None:
    async def test(world: ApiWorld) -> None:
        async with (
            world.agent() as agent,
            agent.conversation(system=SYSTEM["content"], max_tokens=12) as talk,
        ):
            first = await answer(talk, HELLO["content"])
            second = await answer(talk, "and one more")
        tokenizer = world.decoder.brain.tokenizer
        made = await world.openai.chat.completions.create(**chat())
        ids = tokenizer.encode(made.choices[0].message.content or "")
        assert made.usage is not None
        assert made.usage.completion_tokens == len(first)
        later = chat(
            messages=[
                SYSTEM,
                HELLO,
                {"role": "assistant", "content": made.choices[0].message.content},
                {"role": "user", "content": [{"type": "text", "text": "and one more"}]},
            ]
        )
        if ids == first:  # the reply's text gives its ids back
            made = await world.openai.chat.completions.create(**later)
            assert made.usage is not None
            assert made.usage.completion_tokens == len(second)
            assert made.usage.prompt_tokens_details is not None

    in_api_world(test)


@pytest.mark.parametrize("about", [{}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}, LONG])
def test_a_streamed_chat_is_the_whole_one_in_pieces(about: Body) -> None:
    async def test(world: ApiWorld) -> None:
        whole = await world.openai.chat.completions.create(**chat(**about))
        events = await streamed(
            world, "/v1/chat/completions", chat(**about, stream_options={"include_usage": True})
        )
        *parts, last = events
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == whole.usage.completion_tokens  # type: ignore[union-attr]
        assert all(part["usage"] is None for part in parts)
        assert len({event["id"] for event in events}) == 1
        for choice in whole.choices:
            own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice.index]
            assert own[0]["delta"]["role"] == "assistant"
            assert not any("role" in one["delta"] for one in own[1:])
            joined = "".join(one["delta"].get("content", "") for one in own)
            assert joined == choice.message.content
            assert [one["finish_reason"] for one in own][-1] == choice.finish_reason
            assert not any(one["finish_reason"] for one in own[:-1])
            if choice.logprobs is not None:
                scores = [entry for one in own for entry in one["logprobs"]["content"]]
                assert [s["logprob"] for s in scores] == [
                    entry.logprob for entry in choice.logprobs.content or ()
                ]

    in_api_world(test)


def test_without_stream_options_no_event_speaks_of_usage() -> None:
    async def test(world: ApiWorld) -> None:
        events = await streamed(world, "/v1/chat/completions", chat())
        assert not any("usage" in event for event in events)

    in_api_world(test)


def test_log_probabilities_are_of_the_tokens_given() -> None:
    async def test(world: ApiWorld) -> None:
        made = await world.openai.chat.completions.create(
            **chat(logprobs=True, top_logprobs=4, **LONG)
        )
        choice = made.choices[0]
        assert choice.logprobs is not None
        scores = choice.logprobs.content or []
        assert len(scores) == 12
        data = b"".join(bytes(score.bytes or ()) for score in scores)
        assert data.decode(errors="replace") == choice.message.content
        for score in scores:
            best = [top.logprob for top in score.top_logprobs]
            assert best == sorted(best, reverse=True)
            assert len(best) == 4
            assert score.logprob <= best[0] <= 0

    in_api_world(test)


def test_seeds_reproduce_and_every_reply_of_a_request_has_its_own() -> None:
    async def test(world: ApiWorld) -> None:
        hot = chat(temperature=1.5, seed=7, n=3, ignore_eos=True)
        once = await world.openai.chat.completions.create(**_sdk(hot))
        again = await world.openai.chat.completions.create(**_sdk(hot))
        texts = [choice.message.content for choice in once.choices]
        assert texts == [choice.message.content for choice in again.choices]
        assert len(set(texts)) == 3
        other = await world.openai.chat.completions.create(**_sdk(hot | {"seed": 8, "n": 1}))
        assert other.choices[0].message.content == texts[1]

    in_api_world(test)


def _sdk(body: Body) -> Body:
    """Put what the official client does not know where it takes it."""
    extra = {"ignore_eos", "min_tokens", "top_k", "min_p", "repetition_penalty", "stop_token_ids"}
    known = {key: value for key, value in body.items() if key not in extra}
    return known | {"extra_body": {key: body[key] for key in extra & body.keys()}}


def test_a_stop_string_over_several_tokens_ends_the_text_right_before_it() -> None:
    async def test(world: ApiWorld) -> None:
        plain = await world.openai.chat.completions.create(
            **_sdk(chat(max_tokens=40, ignore_eos=True))
        )
        whole = plain.choices[0].message.content or ""
        for at in range(3, len(whole) - 4, 5):
            stop = whole[at : at + 4]
            events = await streamed(
                world,
                "/v1/chat/completions",
                chat(max_tokens=40, ignore_eos=True, stop=["never", stop]),
            )
            pieces = [event["choices"][0] for event in events]
            found = "".join(piece["delta"].get("content", "") for piece in pieces)
            assert found == whole[: whole.index(stop)]
            assert pieces[-1]["finish_reason"] == "stop"

    in_api_world(test)


def test_text_and_token_prompts_are_the_same_and_many_keep_their_order() -> None:
    async def test(world: ApiWorld) -> None:
        prompts = ["Find a", "Drive me home", "日本"]
        encode = world.decoder.brain.tokenizer.encode
        one = [(await world.openai.completions.create(**text(prompt=p))) for p in prompts]
        many = await world.openai.completions.create(**text(prompt=prompts, n=2))
        ids = await world.openai.completions.create(**text(prompt=[encode(p) for p in prompts]))
        single = await world.openai.completions.create(**text(prompt=encode(prompts[1])))
        assert [c.index for c in many.choices] == list(range(6))
        expected = [made.choices[0].text for made in one]
        assert [c.text for c in many.choices[::2]] == expected
        assert [c.text for c in many.choices[1::2]] == expected
        assert [c.text for c in ids.choices] == expected
        assert single.choices[0].text == expected[1]
        assert many.usage is not None
        assert many.usage.prompt_tokens == sum(len(encode(p)) for p in prompts)

    in_api_world(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_an_echo_is_the_prompt_with_the_scores_of_its_tokens(most: int, stream: bool) -> None:
    async def test(world: ApiWorld) -> None:
        body = text(prompt="Find a charger, please!", echo=True, logprobs=2, max_tokens=most) | LONG
        whole = (await world.openai.completions.create(**body)).choices[0]
        if stream:
            events = await streamed(world, "/v1/completions", body)
            choices = [event["choices"][0] for event in events]
            assert "".join(choice["text"] for choice in choices) == whole.text
            scores = [choice["logprobs"] for choice in choices]
            joined = {key: [x for s in scores for x in s[key]] for key in scores[0]}
            assert whole.logprobs is not None
            assert joined == whole.logprobs.model_dump()
            return
        assert whole.text.startswith("Find a charger, please!")
        assert whole.logprobs is not None
        tokens = whole.logprobs.tokens or []
        count = len(world.decoder.brain.tokenizer.encode("Find a charger, please!"))
        assert count <= len(tokens) <= count + most
        assert "".join(tokens) == whole.text
        twice = (await world.openai.completions.create(**body, n=2)).choices
        assert twice[0].logprobs == twice[1].logprobs == whole.logprobs
        assert whole.logprobs.token_logprobs is not None
        assert whole.logprobs.token_logprobs[0] is None
        assert all(p is not None and p <= 0 for p in whole.logprobs.token_logprobs[1:])
        assert whole.logprobs.text_offset == [sum(map(len, tokens[:i])) for i in range(len(tokens))]

    in_api_world(test)


def test_a_prompt_is_scored_the_same_whatever_was_shared_before() -> None:
    async def test(world: ApiWorld) -> None:
        body = text(prompt="Find a charger, please! " * 8, echo=True, logprobs=1, max_tokens=0)
        once = await world.openai.completions.create(**body)
        await world.openai.completions.create(**text(prompt=body["prompt"]))
        again = await world.openai.completions.create(**body)
        assert once.choices[0].logprobs == again.choices[0].logprobs

    in_api_world(test)


def test_a_prompt_seen_before_is_not_run_again() -> None:
    async def test(world: ApiWorld) -> None:
        body = chat(messages=[{"role": "user", "content": "Drive me home. " * 12}])
        first = await world.openai.chat.completions.create(**body)
        again = await world.openai.chat.completions.create(**body)
        cached = [
            made.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
            for made in (first, again)
        ]
        assert cached[0] == 0
        assert cached[1] is not None
        assert cached[1] >= 32
        assert first.choices == again.choices

    in_api_world(test)


def test_bias_penalties_and_lengths_do_what_they_say() -> None:
    async def test(world: ApiWorld) -> None:
        piece = world.decoder.brain.tokenizer.piece(5).decode()
        create = world.openai.chat.completions.create
        biased = await create(**chat(logit_bias={"5": 100}))
        assert biased.choices[0].message.content == piece * 12
        assert biased.choices[0].finish_reason == "length"
        varied = await create(**chat(logit_bias={"5": 1.9}, frequency_penalty=2, max_tokens=30))
        plain = await create(**chat(logit_bias={"5": 1.9}, max_tokens=30))
        counts = [made.choices[0].message.content.count(piece) for made in (varied, plain)]  # type: ignore[union-attr]
        assert counts[0] <= counts[1]
        stopped = await create(**_sdk(chat(logit_bias={"5": 100}, stop_token_ids=[5])))
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
            "",
            "stop",
        )
        long = await create(**_sdk(chat(stop_token_ids=[5], logit_bias={"5": 50}, min_tokens=4)))
        assert long.usage is not None
        assert long.usage.completion_tokens == 4

    in_api_world(test)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_least_length_beyond_the_end_of_a_grammar_ends_with_the_grammar(temperature: int) -> None:
    async def test(world: ApiWorld) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
        body = chat(response_format=form, min_tokens=50, max_tokens=60, temperature=temperature)
        for _ in range(2):
            made = await world.openai.chat.completions.create(**_sdk(body))
            assert json.loads(made.choices[0].message.content or "") == 1

    in_api_world(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_own_reply_and_no_other(stream: bool) -> None:
    async def test(world: ApiWorld) -> None:
        hot = chat(temperature=1.5, seed=3, n=4, max_tokens=40, ignore_eos=True)
        plain = await world.openai.chat.completions.create(**_sdk(hot))
        texts = [choice.message.content or "" for choice in plain.choices]
        stop = texts[1][5:8]
        expected = [text[: text.index(stop)] if stop in text else text for text in texts]
        for _ in range(5):
            if stream:
                events = await streamed(world, "/v1/chat/completions", hot | {"stop": stop})
                parts = [event["choices"][0] for event in events]
                own = [[p for p in parts if p["index"] == i] for i in range(4)]
                found = ["".join(p["delta"].get("content", "") for p in ps) for ps in own]
                reasons = [[p["finish_reason"] for p in ps if p["finish_reason"]] for ps in own]
                assert all(len(reason) == 1 for reason in reasons)
            else:
                made = await world.openai.chat.completions.create(**_sdk(hot | {"stop": stop}))
                found = [choice.message.content or "" for choice in made.choices]
            assert found == expected

    in_api_world(test)


def test_what_is_null_counts_as_left_out() -> None:
    async def test(world: ApiWorld) -> None:
        nulls = dict.fromkeys(("top_p", "n", "stop", "logprobs", "stream", "seed", "user"))
        made = await world.openai.chat.completions.create(**chat(**nulls, store=False, metadata={}))
        plain = await world.openai.chat.completions.create(**chat(top_p=0))
        assert made.choices == plain.choices

    in_api_world(test)


CAR_COMMAND = {
    "type": "object",
    "properties": {
        "action": {"enum": ["set_temperature", "navigate", "call"]},
        "value": {"type": "string", "maxLength": 12},
    },
    "required": ["action", "value"],
    "additionalProperties": False,
}


def test_a_car_command_follows_its_json_schema() -> None:
    async def test(world: ApiWorld) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "command", "schema": CAR_COMMAND}}
        for seed in range(3):
            made = await world.openai.chat.completions.create(
                **chat(response_format=form, max_tokens=200, temperature=1, seed=seed)
            )
            command = json.loads(made.choices[0].message.content or "")
            assert command["action"] in ("set_temperature", "navigate", "call")
            assert set(command) == {"action", "value"}
            assert made.choices[0].finish_reason == "stop"

    in_api_world(test)


# --- what is refused


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("chat/completions", chat(model="other"), 404, "model", "'other' is not served here"),
        ("chat/completions", chat(messages=[]), 400, "messages", "at least 1"),
        ("chat/completions", chat(messages=[HELLO, HELLO]), 400, "messages", "take turns"),
        ("chat/completions", chat(messages=[SYSTEM]), 400, "messages", "must be of 'user'"),
        ("chat/completions", chat(temperature=-1), 400, "temperature", "greater than or equal"),
        ("chat/completions", chat(top_p=-1), 400, "top_p", "greater than or equal to 0"),
        ("chat/completions", chat(messages=["hi"]), 400, "messages", "valid dictionary or object"),
        ("chat/completions", chat(n=0), 400, "n", "greater than or equal to 1"),
        ("chat/completions", chat(max_tokens=500), 400, None, "shorten it, or ask for fewer"),
        ("chat/completions", chat(logit_bias={"99999": 1}), 400, None, "token id 99999"),
        ("chat/completions", chat(logit_bias={"x": 1}), 400, "logit_bias", "pattern"),
        ("chat/completions", chat(logit_bias={"5": 101}), 400, None, "logit_bias[5] = 101"),
        ("chat/completions", chat(stop_token_ids=[99999]), 400, None, "stop_token_ids"),
        ("chat/completions", chat(tools=[]), 400, "tools", "not permitted"),
        ("chat/completions", chat(top_logprobs=2), 400, None, "logprobs = true"),
        ("chat/completions", chat(stream_options={}), 400, None, "stream = true"),
        ("chat/completions", chat(response_format={"type": "xml"}), 400, "response_format", "xml"),
        (
            "chat/completions",
            chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "color"}},
                }
            ),
            400,
            None,
            "schema",
        ),
        (
            "chat/completions",
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "text": ""}]}]),
            400,
            "messages",
            "'text'",
        ),
        ("completions", text(prompt=""), 400, "prompt", "the prompt is empty"),
        ("completions", text(prompt=[]), 400, "prompt", ""),
        ("completions", text(prompt=[[]]), 400, "prompt", "the prompt is empty"),
        ("completions", text(prompt=[-1]), 400, "prompt", ""),
        ("completions", text(prompt=[[99999]]), 400, None, "token id 99999"),
        ("completions", text(max_tokens=0), 400, "max_tokens", "echo = true"),
        ("completions", text(prompt="a " * 600), 400, None, "shorten it"),
        ("completions", text(seed=2**63), 400, "seed", "less than"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_name_and_bound(
    path: str, body: Body, status: int, param: str | None, says: str
) -> None:
    async def test(world: ApiWorld) -> None:
        for stream in (False, True):
            if stream and "stream_options" in body:
                continue
            response = await world.http.post(f"/v1/{path}", json=body | {"stream": stream})
            error = response.json()["error"]
            assert response.status_code == status, error
            assert error["param"] == param
            assert says in error["message"]
            assert error["type"] == "invalid_request_error"

    in_api_world(test)


def test_the_official_client_sees_its_own_error_classes() -> None:
    async def test(world: ApiWorld) -> None:
        create = world.openai.chat.completions.create
        with pytest.raises(openai.NotFoundError):
            await create(**chat(model="other"))
        with pytest.raises(openai.BadRequestError) as error:
            await create(**chat(max_tokens=511))
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await create(**chat(top_p=7))

    in_api_world(test)


def test_bodies_that_are_no_json_or_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BODY", 5000)

    async def endless() -> Any:
        for _ in range(20):
            yield b" " * 1000

    async def test(world: ApiWorld) -> None:
        as_json = {"content-type": "application/json"}
        for content, says in ((b"{", "no JSON"), (b"[1]", "must be a JSON object"), (b"\xff", "")):
            response = await world.http.post("/v1/completions", content=content, headers=as_json)
            assert response.status_code == 400
            assert says in response.json()["error"]["message"]
        long = await world.http.post("/v1/completions", json=text(prompt="x" * 6000))
        assert long.status_code == 413
        chunked = await world.http.post("/v1/completions", content=endless(), headers=as_json)
        assert chunked.status_code == 413
        nowhere = await world.http.get("/v1/nothing")
        assert nowhere.status_code == 404
        assert "GET /v1/nothing" in nowhere.json()["error"]["message"]
        assert (await world.http.get("/v1/completions")).status_code == 405

    in_api_world(test)


# --- clients that go away


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_client_that_leaves_a_stream_frees_its_work(after: int) -> None:
    async def test(world: ApiWorld) -> None:
        body = chat(max_tokens=400, n=3, stream=True, **LONG)
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(after):
                await anext(lines)
        await world.until(lambda: world.num_sequences == 0)

    in_api_world(test)


def test_a_client_that_leaves_while_it_waits_frees_its_work() -> None:
    async def test(world: ApiWorld) -> None:
        hold = threading.Event()
        world.decoder.worker.submit(lambda _engine: hold.wait() and None)  # nothing is begun
        asking = [
            asyncio.create_task(world.http.post("/v1/chat/completions", json=chat(stream=stream)))
            for stream in (False, True)
        ]
        await asyncio.sleep(0.1)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.sleep(0.1)
        hold.set()
        await world.until(lambda: world.num_sequences == 0)
        text = (await world.http.get("/metrics")).text
        assert 'finished_reason="abort"' in text

    in_api_world(test)


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async def test(world: ApiWorld) -> None:
        reader, writer = await asyncio.open_connection(*_place(world.url))
        body = json.dumps(chat(max_tokens=400, n=16, logprobs=True, top_logprobs=20, stream=True))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        for _ in range(5):
            await world.openai.chat.completions.create(**chat())
        writer.transport.abort()
        del reader

    in_api_world(test)


def _place(url: str) -> tuple[str, int]:
    parts = httpx.URL(url)
    assert parts.port is not None
    return parts.host, parts.port


# --- tokens and operation


def test_texts_become_tokens_and_tokens_texts() -> None:
    async def test(world: ApiWorld) -> None:
        tokenizer = world.decoder.brain.tokenizer
        plain = "Grüße aus 東京! <|im_end|>"
        made = (await world.http.post("/tokenize", json={"prompt": plain})).json()
        assert made["tokens"] == tokenizer.encode(plain)
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        back = await world.http.post("/detokenize", json={"tokens": made["tokens"]})
        assert back.json() == {"prompt": plain}
        talk = (await world.http.post("/tokenize", json={"messages": [SYSTEM, HELLO]})).json()
        used = (await world.openai.chat.completions.create(**chat())).usage
        assert used is not None
        assert talk["count"] == used.prompt_tokens
        bad = await world.http.post("/detokenize", json={"tokens": [10**6]})
        assert bad.status_code == 400
        blob = await world.http.get(f"/tokenizer/{tokenizer.digest}")
        assert load_tokenizer(blob.content).digest == tokenizer.digest
        assert (await world.http.get("/tokenizer/other")).status_code == 404

    in_api_world(test)


def test_the_models_served_are_listed() -> None:
    async def test(world: ApiWorld) -> None:
        listed = await world.openai.models.list()
        assert [model.id for model in listed.data] == [MODEL]
        assert (await world.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await world.openai.models.retrieve("other")

    in_api_world(test)


def test_health_says_whether_the_engine_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "PATIENCE", 0.1)

    async def test(world: ApiWorld) -> None:
        assert (await world.http.get("/health")).status_code == 200
        hold = threading.Event()
        world.decoder.worker.submit(lambda _engine: hold.wait() and None)
        stuck = await world.http.get("/health")
        assert stuck.status_code == 503
        assert "stands still" in stuck.json()["error"]["message"]
        hold.set()
        assert (await world.http.get("/health")).status_code == 200

    in_api_world(test)


def test_metrics_count_what_was_served() -> None:
    async def test(world: ApiWorld) -> None:
        made = await world.openai.chat.completions.create(**chat(n=2))
        text = (await world.http.get("/metrics")).text
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }
        assert made.usage is not None
        assert found["vllm:generation_tokens_total"] >= made.usage.completion_tokens
        assert found["vllm:time_to_first_token_seconds_count"] == 2
        assert found["vllm:e2e_request_latency_seconds_count"] == 2
        assert found["vllm:num_requests_running"] == 0
        assert 0 <= found["vllm:kv_cache_usage_perc"] <= 1
        assert found["deltarelay_steps_total"] == world.decoder.worker.num_steps
        assert math.isfinite(found["deltarelay_tokens_run_total"])

    in_api_world(test)


def test_turns_over_the_relay_are_counted_like_requests() -> None:
    async def test(world: ApiWorld) -> None:
        async with world.agent() as agent, agent.conversation(max_tokens=5) as talk:
            reply = await answer(talk, HELLO["content"])
            await world.until(lambda: talk.reply is not None)
            text = (await world.http.get("/metrics")).text
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }
        assert found["vllm:generation_tokens_total"] == len(reply)
        assert found["vllm:time_to_first_token_seconds_count"] == 1
        assert found["vllm:request_success_total"] == 1
        assert 'finished_reason="length"' in text or 'finished_reason="stop"' in text
        assert found["deltarelay_turns_total"] == 1
        assert found["deltarelay_devices"] == found["deltarelay_conversations"] == 1

    in_api_world(test)


def test_relay_and_http_work_on_one_engine_at_once() -> None:
    async def test(world: ApiWorld) -> None:
        async with world.agent() as agent:
            async with agent.conversation(max_tokens=12, sampling=Sampling()) as talk:
                alone = await answer(talk, HELLO["content"])
            async with agent.conversation(max_tokens=12) as talk:
                asking = asyncio.create_task(
                    world.openai.chat.completions.create(**chat(max_tokens=200, n=4, **LONG))
                )
                assert await answer(talk, HELLO["content"]) == alone
                made = await asking
        assert {choice.finish_reason for choice in made.choices} == {"length"}

    in_api_world(test)
