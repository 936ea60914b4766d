"""From token ids to text, piece by piece: whole UTF-8 characters, stop strings held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_UNFINISHED = "�"


class TextStream:
    """The text of one choice as its tokens come.

    A piece is released once it cannot change any more and cannot be the beginning of a stop
    string. A stop string that appears ends the text before it.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._ids: list[int] = []
        self._context = 0
        self._read = 0
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take one token; return the text that is released by it."""
        self._ids.append(token_id)
        self._held += self._decoded(final=False)
        if may_stop and self._cut():
            return self._release(len(self._held))
        return self._release(len(self._held) - self._num_doubtful())

    def finish(self) -> str:
        """Return what is still held: no more tokens come."""
        if self.stopped_by is None:
            self._held += self._decoded(final=True)
            self._cut()
        return self._release(len(self._held))

    def _decoded(self, *, final: bool) -> str:
        """Text of the unread tokens, or "" while they end inside a character.

        Decoded together with the tokens read before them: tokenizers treat a first token specially.
        """
        before = self._decode(self._ids[self._context : self._read])
        whole = self._decode(self._ids[self._context :])
        if not final and (whole.endswith(_UNFINISHED) or len(whole) <= len(before)):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return whole[len(before) :]

    def _cut(self) -> bool:
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if not found:
            return False
        at, self.stopped_by = min(found)
        self._held = self._held[:at]
        return True

    def _num_doubtful(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out
