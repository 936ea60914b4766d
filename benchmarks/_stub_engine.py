"""A stub engine: answers every request at once with one completion, about 1 KB of JSON.

Its own process, a bare asyncio protocol, so that what is measured is the proxy. It prints its port.
"""

from __future__ import annotations

import asyncio
import json


def completion() -> bytes:
    """A realistic answer without stamps: 24 tokens with log-probabilities."""
    tokens = [f" tok{i}" for i in range(24)]
    answer = {
        "id": "cmpl-7d1f0a3e5b9c4f62",
        "object": "text_completion",
        "created": 1764460800,
        "model": "stub",
        "choices": [
            {
                "index": 0,
                "text": "".join(tokens),
                "finish_reason": "length",
                "logprobs": {
                    "tokens": tokens,
                    "token_logprobs": [round(-0.13 * i - 0.0071, 4) for i in range(24)],
                    "text_offset": list(range(0, 24 * 5, 5)),
                },
            }
        ],
        "usage": {"prompt_tokens": 45, "completion_tokens": 24, "total_tokens": 69},
    }
    return json.dumps(answer).encode()


BODY = completion()
ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(BODY)).encode()
    + b"\r\n\r\n"
    + BODY
)


class Answering(asyncio.Protocol):
    """Reads requests with a content-length and answers each with the same bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        while (length := self._request_length()) is not None and len(self._data) >= length:
            self._data = self._data[length:]
            self._transport.write(ANSWER)

    def _request_length(self) -> int | None:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self._data[:end].lower()
        at = head.find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        return end + 4 + size


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answering, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
