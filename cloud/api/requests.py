"""Bodies of requests, as the OpenAI API has them. A field we do not know is refused by name."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cloud.completion import Ask
from cloud.sampling import (
    LEAST_TOP_P,
    MAX_BIASES,
    MAX_SEED,
    MAX_STOP,
    MAX_STOPS,
    MAX_TEMPERATURE,
)
from shared.frames import Sampling

MAX_REPLIES = 16
MAX_SCORES = 20
MAX_PROMPTS = 64

MAX_TOKENS = 131_072
MAX_FIELDS = 64

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """A field that is null is one that was left out, as OpenAI has it."""
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise ValueError(f"{len(fields)} fields; at most {MAX_FIELDS} are known")
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted; there is none."""


class _Generate(_Body):
    """What chat and plain completions have in common."""

    model: str
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_REPLIES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], float] | None = Field(
        None, max_length=MAX_BIASES
    )
    user: str | None = Field(None, max_length=256)
    metadata: dict[str, Any] | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: str | None = None
    """These four are for the client's own books; nothing here depends on them."""

    # not OpenAI's: vLLM's names
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=256)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream = true only")
        return self

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            temperature=self.temperature,
            top_p=max(self.top_p, LEAST_TOP_P),
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """A stream ends with the tokens used."""
        return self.stream_options is not None and self.stream_options.include_usage

    def ask(self, prompt: list[int], **about: Any) -> Ask:
        """Return what is asked of the engine behind `prompt`."""
        return Ask(
            prompt,
            self.sampling,
            min_tokens=self.min_tokens,
            stop=self.stops,
            stop_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            num_replies=self.n,
            **about,
        )


class TextPart(_Body):
    """A part of a message; text is all this model reads."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """Of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """All its text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class JsonSchema(_Body):
    """A schema that the reply follows."""

    name: str = "reply"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class TextFormat(_Body):
    """Any text."""

    type: Literal["text"]


class JsonFormat(_Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(_Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(_Generate):
    """Of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_SCORES)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _scores_are_asked_for(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs = true only")
        return self

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the reply, if it has one."""
        match self.response_format:
            case SchemaFormat(json_schema=schema):
                return schema.schema_
            case JsonFormat():
                return {"type": "object"}
            case _:
                return None


class CompletionRequest(_Generate):
    """Of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int = Field(16, ge=0, lt=2**31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_SCORES)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[str | list[int]] = []
        ids: list[int] = []
        for prompt in self.prompt:
            if isinstance(prompt, int):
                ids.append(prompt)
            else:
                prompts.append(prompt)
        return [*prompts, ids] if ids else prompts


class LoadAdapterRequest(_Body):
    """Of `/v1/load_lora_adapter`: `lora_path` is a PEFT folder on the decoder's host."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)


class UnloadAdapterRequest(_Body):
    """Of `/v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1)


class TokenizeRequest(_Body):
    """Of `/tokenize`: a text, or a chat up to the opening of its next reply."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool = True
    """Begin a text with the token that prompts of this model begin with, if it has one."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is to be given")
        return self


class DetokenizeRequest(_Body):
    """Of `/detokenize`."""

    model: str | None = None
    tokens: Tokens
