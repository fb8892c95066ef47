"""The model's own chat template, taken apart once: literal pieces around what people say.

The template is rendered with sentinels in place of texts and cut at them. A prompt is then put
together from the pieces' ids and the ids of each text, every one encoded alone. So what a user
types can never become a control token, and the prompt of k turns is a prefix of the prompt of k + 1
by construction; that the template itself agrees is checked at load.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.digest import sha256
from shared.errors import ModelError
from shared.tokenizer import Tokenizer

_SENTINEL = "\ue000{}\ue001"
_FOUND = re.compile("\ue000([a-z]+[0-9]*)\ue001")


@dataclass(frozen=True, slots=True)
class ChatPieces:
    """Ids of the literal pieces of a chat template."""

    opening: tuple[int, ...]
    """Before the first user text, when no system text is given."""
    system: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Before and behind a system text, up to the first user text; None: it takes none."""
    reply: tuple[int, ...]
    """Between a user text and the reply to it."""
    user: tuple[int, ...]
    """Between a reply and the next user text."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A user text and the reply to it, as ids."""

    user: Sequence[int]
    reply: Sequence[int]


class ChatTemplate:
    """Builds prompts. Without a template of the model: BOS, then the texts one after the other."""

    def __init__(self, source: str, tokenizer: Tokenizer, name: str) -> None:
        self.digest = sha256(source.encode())
        self._tokenizer = tokenizer
        self._control = tokenizer.controls()
        self._pieces = self._take_apart(source, name) if source else self._plain()

    def opening(self, system: str) -> list[int]:
        """Return the ids before the first user text.

        Raises:
            ModelError: a system text is given and the template takes none.
        """
        if not system:
            return list(self._pieces.opening)
        if self._pieces.system is None:
            raise ModelError(
                "this model's chat template takes no system text; leave `system` empty"
            )
        before, behind = self._pieces.system
        return [*before, *self._tokenizer.encode(system), *behind]

    def prompt(self, opening: Sequence[int], turns: Sequence[ChatTurn]) -> list[int]:
        """Return the ids up to where the next user text begins."""
        ids = list(opening)
        for turn in turns:
            ids += [*turn.user, *self._pieces.reply, *turn.reply, *self._pieces.user]
        return ids

    @property
    def reply_opening(self) -> tuple[int, ...]:
        """Ids between a finished user text and the reply."""
        return self._pieces.reply

    @property
    def user_opening(self) -> tuple[int, ...]:
        """Ids between a finished reply and the next user text."""
        return self._pieces.user

    # --- inside

    def _plain(self) -> ChatPieces:
        header = self._tokenizer.header
        bos = (header.bos,) if header.add_bos and header.bos >= 0 else ()
        return ChatPieces(bos, (bos, ()), (), ())

    def _take_apart(self, source: str, name: str) -> ChatPieces:
        bos = next((t for t, i in self._control.items() if i == self._tokenizer.header.bos), "")
        render = _compile(source, bos, name)
        two = [("user", "u0"), ("assistant", "a0"), ("user", "u1")]
        plain = _cut(render(two))
        if [who for who, _ in plain[:-1]] != ["u0", "a0", "u1"]:
            raise ModelError(f"{name}: its chat template drops or reorders texts; not supported")
        opening, reply, user, reply_again = (text for _, text in plain)
        three = render([*two, ("assistant", "a1"), ("user", "u2")])
        expected = "".join(
            (
                *(opening, _SENTINEL.format("u0"), reply, _SENTINEL.format("a0"), user),
                *(_SENTINEL.format("u1"), reply, _SENTINEL.format("a1"), user),
                *(_SENTINEL.format("u2"), reply),
            )
        )
        if reply != reply_again or three != expected:
            raise ModelError(
                f"{name}: with its chat template the prompt of a longer conversation does not "
                "begin with that of a shorter one; prefilled turns could not be kept"
            )
        return ChatPieces(
            tuple(self._literal(opening)),
            self._system_pieces(render),
            tuple(self._literal(reply)),
            tuple(self._literal(user)),
        )

    def _system_pieces(self, render: "_Render") -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        try:
            cut = _cut(render([("system", "s"), ("user", "u0")]))
        except ModelError:
            return None
        if [who for who, _ in cut[:-1]] != ["s", "u0"]:
            return None
        before, behind, _ = (text for _, text in cut)
        return tuple(self._literal(before)), tuple(self._literal(behind))

    def _literal(self, text: str) -> list[int]:
        """Encode a piece of the template itself, where control strings are control tokens."""
        names = sorted(self._control, key=len, reverse=True)
        pattern = "|".join(map(re.escape, names)) or r"(?!)"
        ids: list[int] = []
        at = 0
        for found in re.finditer(pattern, text):
            ids += self._tokenizer.encode(text[at : found.start()])
            ids.append(self._control[found[0]])
            at = found.end()
        return ids + self._tokenizer.encode(text[at:])


class _Render:
    """Renders a conversation of sentinels, up to the opening of the next reply."""

    def __init__(self, template: jinja2.Template, bos: str, name: str) -> None:
        self._template, self._bos, self._name = template, bos, name

    def __call__(self, messages: Sequence[tuple[str, str]]) -> str:
        texts = [{"role": role, "content": _SENTINEL.format(key)} for role, key in messages]
        try:
            return self._template.render(
                messages=texts, add_generation_prompt=True, bos_token=self._bos, tools=None
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"{self._name}: its chat template fails: {error}") from None


def _compile(source: str, bos: str, name: str) -> _Render:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    helpers: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": lambda _: ""}
    environment.globals.update(helpers)
    try:
        return _Render(environment.from_string(source), bos, name)
    except jinja2.TemplateError as error:
        raise ModelError(f"{name}: its chat template is malformed: {error}") from None


def _cut(rendered: str) -> list[tuple[str, str]]:
    """Return [(sentinel that follows, literal before it)...], the last with an empty name."""
    parts = _FOUND.split(rendered)
    names = [*parts[1::2], ""]
    return list(zip(names, parts[0::2], strict=True))
