"""Routes that reply: `/v1/chat/completions` and `/v1/completions`."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from llguidance import LLMatcher

from cloud.api import responses
from cloud.api.answers import Answer
from cloud.api.errors import ApiError
from cloud.api.house import House, OwnHouse, adapter_of, as_json
from cloud.api.prompts import aside, chat_prompt, text_prompt
from cloud.api.requests import ChatRequest, CompletionRequest
from cloud.api.shapes import ChatShape, Json, Shape, TextShape
from cloud.api.streams import ClientGoneError, EventStream, unless_gone
from cloud.api.visitor import OwnVisitor, Visitor
from cloud.completion import Ask
from cloud.completion import Request as Replies
from cloud.sampling import check_sampling, check_vocabulary

MAX_SCHEMA = 64 * 1024
"""Bytes of a JSON schema."""

_STREAM: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
router = APIRouter(tags=["replies"], responses=_STREAM)


@router.post("/v1/chat/completions", response_model=responses.ChatBody)
async def chat(http: Request, body: ChatRequest, house: OwnHouse, visitor: OwnVisitor) -> Response:
    """Reply to a chat."""
    voice = house.voice
    adapter = adapter_of(body.model, house)
    _check(body, house)
    size = sum(len(message.text) for message in body.messages)
    prompt = await aside(size, lambda: chat_prompt(body.messages, voice.template, voice.tokenizer))
    ask = body.ask(
        prompt,
        adapter=adapter,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        matcher=await _matcher(body.json_schema, house),
        top_scores=(body.top_logprobs or 0) if body.logprobs else None,
    )
    shape = ChatShape(voice.tokenizer, scored=body.logprobs)
    return await _answer(http, body, house, visitor, [ask], shape)


@router.post("/v1/completions", response_model=responses.CompletionBody)
async def complete(
    http: Request, body: CompletionRequest, house: OwnHouse, visitor: OwnVisitor
) -> Response:
    """Go on with a text, or with token ids."""
    voice = house.voice
    adapter = adapter_of(body.model, house)
    _check(body, house)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens = 0 is for echo = true only", param="max_tokens")
    size = sum(map(len, body.prompts))
    prompts = await aside(
        size, lambda: [text_prompt(prompt, voice.tokenizer) for prompt in body.prompts]
    )
    asks = [
        body.ask(
            prompt,
            adapter=adapter,
            max_tokens=body.max_tokens,
            top_scores=body.logprobs,
            prompt_scores=body.logprobs if body.echo else None,
        )
        for prompt in prompts
    ]
    scored = body.logprobs is not None
    shape = TextShape(voice.tokenizer, prompts, echo=body.echo, scored=scored)
    return await _answer(http, body, house, visitor, asks, shape)


async def _answer(
    http: Request,
    body: ChatRequest | CompletionRequest,
    house: House,
    visitor: Visitor,
    asks: Sequence[Ask],
    shape: Shape,
) -> Response:
    request = Replies(house.voice, asks, visitor.caller)
    visitor.admit(request)
    answer = Answer(request, shape, body.model)
    if body.stream:
        return EventStream(answer.events(usage=body.wants_usage), request.close)
    try:
        return as_json(await unless_gone(http.receive, answer.whole()))
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it
    finally:
        request.close()


def _check(body: ChatRequest | CompletionRequest, house: House) -> None:
    vocabulary = house.voice.tokenizer.header.vocabulary
    check_sampling(body.sampling, vocabulary)
    check_vocabulary(body.stop_token_ids, vocabulary, "stop_token_ids")


async def _matcher(schema: dict[str, Any] | None, house: House) -> LLMatcher | None:
    """Compile a schema, in a thread of its own: some take long."""
    if schema is None:
        return None
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA:
        raise ApiError(
            400,
            f"the JSON schema has {len(text)} bytes; at most {MAX_SCHEMA} are taken",
            param="response_format",
        )
    return await asyncio.to_thread(house.voice.grammar.compile, text)
