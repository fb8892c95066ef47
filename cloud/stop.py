"""Stop strings on token ids: holds back what may be the beginning of one. Pure."""

from collections.abc import Sequence

from shared.tokenizer import TextDecoder, Tokenizer


class StopFilter:
    """Ends a reply before the first stop string in its text.

    Ids are released once their text cannot be part of a stop string any more. A token in which a
    stop string begins is dropped whole: ids cannot be cut.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = TextDecoder(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""
        """Text that is not released yet."""
        self.remainder = ""
        """Text before the stop string that is of no token released."""
        self._held: list[tuple[int, int]] = []
        """(id, where its text ends) of ids that are not released yet."""

    def feed(self, token: int) -> tuple[list[int], bool]:
        """Take a reply id; return the ids released and whether the reply ends here."""
        self._text += self._decoder.feed([token])
        self._held.append((token, len(self._text)))
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            end = len(self._text) - min(found)
            released = self._release(min(found))
            self.remainder = self._text[: len(self._text) - end]
            return released, True
        return self._release(len(self._text) - self._suspicious()), False

    def flush(self) -> list[int]:
        """Return the ids still held: the reply ended without a stop string."""
        return self._release(len(self._text))

    def _suspicious(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _release(self, upto: int) -> list[int]:
        released = [token for token, end in self._held if end <= upto]
        if released:
            cut = self._held[len(released) - 1][1]
            self._text = self._text[cut:]
            self._held = [(token, end - cut) for token, end in self._held[len(released) :]]
        return released
