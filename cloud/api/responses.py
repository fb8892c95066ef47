"""Bodies of responses, as the OpenAI API has them. Only their schema is used: what goes out is
built as plain values."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Of every answer that is no success."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of `Usage`."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChatMessage(BaseModel):
    """A reply."""

    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    """One reply to a chat."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatBody(BaseModel):
    """Of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One reply to a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class CompletionBody(BaseModel):
    """Of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelBody(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(BaseModel):
    """Of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelBody]


class AdapterBody(BaseModel):
    """What a name stands for now; an empty digest: nothing."""

    lora_name: str
    digest: str


class TokenizeBody(BaseModel):
    """Of `/tokenize`."""

    tokens: list[int]
    token_strs: list[str]
    count: int
    max_model_len: int


class DetokenizeBody(BaseModel):
    """Of `/detokenize`."""

    prompt: str


class HealthBody(BaseModel):
    """Of `/health`."""

    status: Literal["ok"]
    steps: int
