"""Follows a request to its end: one JSON body, or a stream of events."""

import json
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from cloud.api.errors import as_api_error
from cloud.api.shapes import Json, Shape
from cloud.completion import Completion, Piece, Request
from shared.errors import AccessError


class Answer:
    """The answer to one request."""

    def __init__(self, request: Request, shape: Shape, model: str) -> None:
        self._request, self._shape = request, shape
        self._about: Json = {
            "id": f"{shape.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> Json:
        """Return the answer once all replies are complete."""
        replies: dict[int, list[Piece]] = {c.index: [] for c in self._request.completions}
        with self._request as request:
            async for completion, piece in request.pieces():
                replies[completion.index].append(piece)
        choices = [self._shape.choice(c, replies[c.index]) for c in self._request.completions]
        return {
            **self._about,
            "object": self._shape.whole,
            "choices": choices,
            "usage": self._usage(),
        }

    async def events(self, *, usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield the answer piece by piece.

        Args:
            usage: a last piece says how many tokens were used.
        """
        begun: set[int] = set()
        try:
            with self._request as request:
                async for completion, piece in request.pieces():
                    yield self._event(self._delta(completion, piece, begun), usage=usage)
        except AccessError as error:  # its status went out as 200: the stream says it
            yield json.dumps(as_api_error(error).body).encode()
            return
        if usage:
            yield self._event(None, usage=True)
        yield b"[DONE]"

    def _delta(self, completion: Completion, piece: Piece, begun: set[int]) -> Json:
        first = completion.index not in begun
        begun.add(completion.index)
        return self._shape.delta(completion, piece, first=first)

    def _event(self, choice: Json | None, *, usage: bool) -> bytes:
        body: dict[str, Any] = {
            **self._about,
            "object": self._shape.part,
            "choices": [] if choice is None else [choice],
        }
        if usage:
            body["usage"] = self._usage() if choice is None else None
        # all ASCII: clients that split lines as Unicode has them would cut a text at U+2028
        return json.dumps(body, separators=(",", ":")).encode()

    def _usage(self) -> Json:
        request = self._request
        replied = sum(completion.num_tokens for completion in request.completions)
        return {
            "prompt_tokens": request.num_prompt_tokens,
            "completion_tokens": replied,
            "total_tokens": request.num_prompt_tokens + replied,
            "prompt_tokens_details": {"cached_tokens": request.num_adopted},
        }
