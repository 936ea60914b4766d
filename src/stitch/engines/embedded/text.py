"""From token ids to text, piece by piece: whole UTF-8 characters, stop strings held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_UNFINISHED = "�"
_MAX_UNFINISHED = 3
"""Bytes of a character that may still be waiting for its last one."""


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
        self._shown = 0
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
        """Text that the last token made certain.

        Decoded together with the tokens read before: tokenizers treat a first token specially.
        """
        whole = self._decode(self._ids[self._context :])
        certain = len(whole) if final else len(whole) - _num_unfinished(whole)
        if certain <= self._shown:
            return ""
        new, self._shown = whole[self._shown : certain], certain
        if certain == len(whole):
            self._context, self._read = self._read, len(self._ids)
            self._shown = len(self._decode(self._ids[self._context : self._read]))
        return new

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


def _num_unfinished(text: str) -> int:
    """Characters at the end that the next token may turn into others."""
    return min(len(text) - len(text.rstrip(_UNFINISHED)), _MAX_UNFINISHED)
