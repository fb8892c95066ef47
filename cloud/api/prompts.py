"""From what a request says to the token ids of its prompt."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from cloud.api.errors import ApiError
from cloud.api.requests import Message
from cloud.sampling import check_vocabulary
from cloud.template import ChatTemplate, ChatTurn
from shared.tokenizer import Tokenizer

Result = TypeVar("Result")

_LONG = 16_384
"""Characters, or tokens, from which work is done in a thread of its own: others go on meanwhile."""


def chat_prompt(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> list[int]:
    """Return the ids of a chat, up to the opening of the reply to its last message.

    Raises:
        ApiError: the messages do not take turns.
        ModelError: this model's template takes no system text.
    """
    system = messages[0].text if messages[0].role in ("system", "developer") else ""
    rest = messages[1:] if messages[0].role in ("system", "developer") else messages
    for number, message in enumerate(rest, len(messages) - len(rest)):
        expected = "assistant" if (number - len(messages) + len(rest)) % 2 else "user"
        if message.role != expected:
            raise ApiError(
                400,
                f"messages[{number}] is of {message.role!r}, expected {expected!r}: behind one "
                "system message, user and assistant take turns",
                param="messages",
            )
    if len(rest) % 2 == 0:
        raise ApiError(400, "the last message must be of 'user'", param="messages")
    texts = [tokenizer.encode(message.text) for message in rest]
    turns = [ChatTurn(u, a) for u, a in zip(texts[:-1:2], texts[1::2], strict=True)]
    opening = template.opening(system)
    return [*template.prompt(opening, turns), *texts[-1], *template.reply_opening]


def text_prompt(
    prompt: str | list[int], tokenizer: Tokenizer, *, special: bool = True
) -> list[int]:
    """Return the ids of a plain prompt. Names of control tokens in a text are text.

    Args:
        special: begin a text as prompts of this model begin.

    Raises:
        ApiError: it is empty.
        InputError: an id is out of the vocabulary.
    """
    header = tokenizer.header
    if isinstance(prompt, list):
        check_vocabulary(prompt, header.vocabulary, "prompt")
        ids = prompt
    else:
        ids = tokenizer.encode(prompt)
        if special and header.add_bos and header.bos >= 0:
            ids = [header.bos, *ids]
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt")
    return ids


async def aside(size: int, work: Callable[[], Result]) -> Result:
    """Return what `work` does with so many characters or tokens, aside if that may take long."""
    return await asyncio.to_thread(work) if size > _LONG else work()
