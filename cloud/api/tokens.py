"""Routes about tokens: `/tokenize`, `/detokenize`, `/tokenizer/{digest}`."""

from fastapi import APIRouter, Response

from cloud.api import responses
from cloud.api.errors import ApiError
from cloud.api.house import House, OwnHouse, adapter_of, as_json
from cloud.api.prompts import aside, chat_prompt, text_prompt
from cloud.api.requests import DetokenizeRequest, TokenizeRequest
from cloud.api.shapes import token_text
from cloud.api.visitor import known
from cloud.sampling import check_vocabulary
from shared.tokenizer import decode

router = APIRouter(tags=["tokens"], dependencies=[known])


@router.post("/tokenize", response_model=responses.TokenizeBody)
async def tokenize(body: TokenizeRequest, house: OwnHouse) -> Response:
    """Return the token ids of a text or chat."""
    tokenizer = house.voice.tokenizer
    if body.model is not None:
        adapter_of(body.model, house)
    ids = await _ids(body, house)
    names = await aside(len(ids), lambda: [token_text(tokenizer, token) for token in ids])
    answer = {
        "tokens": ids,
        "token_strs": names,
        "count": len(ids),
        "max_model_len": house.voice.context,
    }
    return as_json(answer)


async def _ids(body: TokenizeRequest, house: House) -> list[int]:
    voice, text, messages = house.voice, body.prompt, body.messages
    if messages is not None:
        size = sum(len(message.text) for message in messages)
        return await aside(size, lambda: chat_prompt(messages, voice.template, voice.tokenizer))
    if not text:
        return []
    special = body.add_special_tokens
    return await aside(len(text), lambda: text_prompt(text, voice.tokenizer, special=special))


@router.post("/detokenize", response_model=responses.DetokenizeBody)
async def detokenize(body: DetokenizeRequest, house: OwnHouse) -> Response:
    """Return the text of token ids."""
    tokenizer = house.voice.tokenizer
    if body.model is not None:
        adapter_of(body.model, house)
    check_vocabulary(body.tokens, tokenizer.header.vocabulary, "tokens")
    text = await aside(len(body.tokens), lambda: decode(tokenizer, body.tokens))
    return as_json({"prompt": text})


@router.get("/tokenizer/{digest}", response_class=Response)
async def tokenizer(digest: str, house: OwnHouse) -> Response:
    """Return the tokenizer with this SHA-256, as the relay hands it to vehicles."""
    blob = house.blob_of(digest)
    if blob is None:
        held = house.voice.tokenizer.digest
        raise ApiError(404, f"tokenizer {digest!r} is not held here; {held} is")
    return Response(blob, media_type="application/octet-stream")
