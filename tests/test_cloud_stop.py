"""Stop strings over token ids."""

from hypothesis import given
from hypothesis import strategies as st

from cloud.stop import StopFilter
from shared.tokenizer import Tokenizer, decode, load_tokenizer
from tests.vocabularies import small_blob

TOKENIZER: Tokenizer = load_tokenizer(small_blob("small-gpt-2"))


def through(text: str, stops: list[str]) -> tuple[list[int], bool]:
    stop = StopFilter(TOKENIZER, stops)
    out: list[int] = []
    for token in TOKENIZER.encode(text):
        released, ended = stop.feed(token)
        out += released
        if ended:
            return out, True
    return out + stop.flush(), False


def test_a_stop_string_over_several_tokens_ends_the_reply_before_it() -> None:
    out, ended = through("Turn left.\nUser: and then", ["\nUser:"])
    assert ended
    assert decode(TOKENIZER, out) == "Turn left."


def test_the_beginning_of_a_stop_string_that_goes_on_differently_is_released() -> None:
    out, ended = through("one\nUsual two", ["\nUser:"])
    assert not ended
    assert decode(TOKENIZER, out) == "one\nUsual two"


def test_what_is_held_back_when_the_reply_ends_is_released() -> None:
    out, ended = through("end\nUse", ["\nUser:"])
    assert not ended
    assert decode(TOKENIZER, out) == "end\nUse"


@given(
    st.text("abc \n", max_size=40), st.lists(st.text("abc \n", min_size=1, max_size=4), max_size=3)
)
def test_released_text_never_holds_a_stop_string(text: str, stops: list[str]) -> None:
    out, ended = through(text, stops)
    shown = decode(TOKENIZER, out)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert ended == any(stop in text for stop in stops)
