"""A tokenizer as the server needs it: text to ids, ids to text, and the bytes of one token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from stitch.engines.embedded.body import BadRequestError


class Vocabulary:
    """Wraps one Hugging Face tokenizer. One thread at a time may use an object of this class."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self.raw = lru_cache(maxsize=100_000)(self._raw)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the model's own template, ready for the assistant's turn."""
        if not self._tokenizer.chat_template:
            raise BadRequestError("this model has no chat template: use /v1/completions")
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of output tokens; special tokens give none."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def text(self, token_id: int) -> str:
        """One token for people: part of a character shows as a byte escape.

        Ids that the model knows and the tokenizer does not are shown as `token_id:N`.
        """
        return self.raw(token_id).decode("utf-8", "backslashreplace") or f"token_id:{token_id}"

    def _raw(self, token_id: int) -> bytes:
        """Bytes of one token, special ones included."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            table = _byte_table()
            if all(letter in table for letter in name):
                return bytes(table[letter] for letter in name)
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


@cache
def _byte_table() -> dict[str, int]:
    """Letter -> byte of byte-level BPE (GPT-2's table: printable bytes stand for themselves)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    spare = 256
    for byte in range(256):
        if byte not in plain:
            table[chr(spare)] = byte
            spare += 1
    return table
