"""The routes. Every one reads its request, asks the decoder, and answers as the OpenAI API does."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from cloud.api import requests, responses
from cloud.api.answers import Answer
from cloud.api.body_limit import BodyLimit
from cloud.api.errors import ApiError, handle_errors
from cloud.api.prompts import aside, chat_prompt, text_prompt
from cloud.api.shapes import ChatShape, Json, Shape, TextShape, token_text
from cloud.api.streams import ClientGoneError, EventStream, unless_gone
from cloud.completion import Ask
from cloud.completion import Request as Replies
from cloud.metrics import DecoderState
from cloud.sampling import check_sampling, check_vocabulary
from cloud.voice import Voice
from shared.tokenizer import decode

MAX_BODY = 8 * 1024 * 1024
"""Bytes of a request."""
MAX_SCHEMA = 64 * 1024
"""Bytes of a JSON schema."""
PATIENCE = 5.0
"""Seconds for a step, after which the engine counts as standing still."""


class House(Protocol):
    """What the API asks of the decoder it belongs to."""

    @property
    def voice(self) -> Voice: ...
    @property
    def model(self) -> str: ...
    @property
    def started(self) -> int: ...
    def blob_of(self, digest: str) -> bytes | None: ...
    async def state(self, patience: float) -> DecoderState: ...


def make_app(house: House) -> ASGIApp:
    """Return the application that serves a decoder."""
    app = FastAPI(
        title="deltarelay",
        description="OpenAI-compatible API of a deltarelay decoder.",
        version="1",
        responses={
            400: {"model": responses.ErrorBody, "description": "The request is not acceptable."},
            404: {"model": responses.ErrorBody, "description": "There is no such thing here."},
            413: {"model": responses.ErrorBody, "description": "The body is too long."},
            503: {"model": responses.ErrorBody, "description": "The decoder is overloaded."},
        },
    )
    handle_errors(app)
    _replies(app, house)
    _tokens(app, house)
    _operation(app, house)
    _leave_out_422(app)
    return BodyLimit(app, MAX_BODY)


def _replies(app: FastAPI, house: House) -> None:
    stream: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
    route = functools.partial(app.post, responses=stream, tags=["replies"])

    @route("/v1/chat/completions", response_model=responses.ChatBody)
    async def chat(http: Request, body: requests.ChatRequest) -> Response:
        """Reply to a chat."""
        voice = house.voice
        _check(body, house)
        size = sum(len(message.text) for message in body.messages)
        prompt = await aside(
            size, lambda: chat_prompt(body.messages, voice.template, voice.tokenizer)
        )
        ask = body.ask(
            prompt,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            schema=_schema(body.schema_text),
            top_scores=(body.top_logprobs or 0) if body.logprobs else None,
        )
        shape = ChatShape(voice.tokenizer, scored=body.logprobs)
        return await _answer(http, body, voice, [ask], shape)

    @route("/v1/completions", response_model=responses.CompletionBody)
    async def complete(http: Request, body: requests.CompletionRequest) -> Response:
        """Go on with a text, or with token ids."""
        voice = house.voice
        _check(body, house)
        size = sum(map(len, body.prompts))
        prompts = await aside(
            size, lambda: [text_prompt(prompt, voice.tokenizer) for prompt in body.prompts]
        )
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens = 0 is for echo = true only", param="max_tokens")
        scored = body.logprobs if body.echo else None
        asks = [
            body.ask(
                prompt,
                max_tokens=body.max_tokens,
                top_scores=body.logprobs,
                prompt_scores=scored,
            )
            for prompt in prompts
        ]
        shape = TextShape(
            voice.tokenizer, prompts, echo=body.echo, scored=body.logprobs is not None
        )
        return await _answer(http, body, voice, asks, shape)

    _ = chat, complete


def _tokens(app: FastAPI, house: House) -> None:
    @app.post("/tokenize", response_model=responses.TokenizeBody, tags=["tokens"])
    async def tokenize(body: requests.TokenizeRequest) -> Response:
        """Return the token ids of a text or chat."""
        voice, messages, text = house.voice, body.messages, body.prompt
        _check_model(body.model, house)
        if messages is not None:
            size = sum(len(message.text) for message in messages)
            ids = await aside(size, lambda: chat_prompt(messages, voice.template, voice.tokenizer))
        elif text:
            special = body.add_special_tokens
            ids = await aside(
                len(text), lambda: text_prompt(text, voice.tokenizer, special=special)
            )
        else:
            ids = []
        names = [token_text(voice.tokenizer, token) for token in ids]
        return _json(
            {
                "tokens": ids,
                "token_strs": names,
                "count": len(ids),
                "max_model_len": voice.context,
            }
        )

    @app.post("/detokenize", response_model=responses.DetokenizeBody, tags=["tokens"])
    async def detokenize(body: requests.DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        tokenizer = house.voice.tokenizer
        _check_model(body.model, house)
        check_vocabulary(body.tokens, tokenizer.header.vocabulary, "tokens")
        return _json({"prompt": decode(tokenizer, body.tokens)})

    @app.get("/tokenizer/{digest}", response_class=Response, tags=["tokens"])
    async def tokenizer(digest: str) -> Response:
        """Return the tokenizer with this SHA-256, as the relay hands it to vehicles."""
        blob = house.blob_of(digest)
        if blob is None:
            held = house.voice.tokenizer.digest
            raise ApiError(404, f"tokenizer {digest!r} is not held here; {held} is")
        return Response(blob, media_type="application/octet-stream")

    _ = tokenize, detokenize, tokenizer


def _operation(app: FastAPI, house: House) -> None:
    @app.get("/v1/models", response_model=responses.ModelList, tags=["operation"])
    async def models() -> Response:
        """List what can be asked."""
        return _json({"object": "list", "data": [_model(house)]})

    @app.get("/v1/models/{model:path}", response_model=responses.ModelBody, tags=["operation"])
    async def model(model: str) -> Response:
        """Describe one model."""
        _check_model(model, house)
        return _json(_model(house))

    @app.get("/health", response_model=responses.HealthBody, tags=["operation"])
    async def health() -> Response:
        """Answer 200 if the engine moves: it was asked, and it answered."""
        state = await house.state(PATIENCE)
        return _json({"status": "ok", "steps": state.steps})

    @app.get("/metrics", response_class=Response, tags=["operation"])
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        text = house.voice.metrics.scrape(await house.state(PATIENCE))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    _ = models, model, health, metrics


async def _answer(
    http: Request,
    body: requests.ChatRequest | requests.CompletionRequest,
    voice: Voice,
    asks: Sequence[Ask],
    shape: Shape,
) -> Response:
    answer = Answer(Replies(voice, asks), shape, body.model)
    if body.stream:
        return EventStream(answer.events(usage=body.wants_usage))
    try:
        return _json(await unless_gone(http.receive, answer.whole()))
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it


def _check(body: requests.ChatRequest | requests.CompletionRequest, house: House) -> None:
    _check_model(body.model, house)
    vocabulary = house.voice.tokenizer.header.vocabulary
    check_sampling(body.sampling, vocabulary)
    check_vocabulary(body.stop_token_ids, vocabulary, "stop_token_ids")


def _check_model(name: str | None, house: House) -> None:
    if name is not None and name != house.model:
        raise ApiError(
            404,
            f"model {name!r} is not served here; {house.model!r} is",
            param="model",
            code="model_not_found",
        )


def _schema(schema: dict[str, Any] | None) -> str:
    text = json.dumps(schema) if schema is not None else ""
    if len(text) > MAX_SCHEMA:
        raise ApiError(
            400,
            f"the JSON schema has {len(text)} bytes; at most {MAX_SCHEMA} are taken",
            param="response_format",
        )
    return text


def _model(house: House) -> Json:
    return {
        "id": house.model,
        "object": "model",
        "created": house.started,
        "owned_by": "deltarelay",
        "max_model_len": house.voice.context,
        "root": house.model,
        "parent": None,
    }


def _json(value: Json) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _leave_out_422(app: FastAPI) -> None:
    """FastAPI documents a status for invalid bodies that this API answers with 400."""
    document: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        schema = document()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
