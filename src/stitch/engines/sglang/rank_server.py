"""A rank's private socket: one caller, one call at a time, each answered in its order."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stitch.engines.group.ending import EXIT_STATUS
from stitch.engines.ranks.port import Answer
from stitch.engines.sglang import frames

AnswerCall = Callable[[int, str, Sequence[Any]], Answer]
"""(number, method, arguments) -> answer; never raises."""


def socket_path(directory: str | Path, rank: int) -> str:
    return str(Path(directory) / str(rank))


class RankServer:
    """Answers on a socket in `directory`, from a thread of its own, once it is made.

    Whoever can enter the directory may call. The process ends, with status 70, when its caller goes
    away while `must_end()`: then nobody is left who would bring this rank to an end.
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int,
        answer: AnswerCall,
        *,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._answer = answer
        self._must_end = must_end
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path(directory, rank))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name="stitch-rank-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    self._talk(connection)
                except OSError as error:
                    print(f"stitch rank: the front broke off: {error}", file=sys.stderr, flush=True)
            if self._must_end():
                print("stitch rank: fatal: left alone in a pause; exiting", file=sys.stderr)
                sys.stderr.flush()
                os._exit(EXIT_STATUS)

    def _talk(self, connection: socket.socket) -> None:
        while (call := frames.receive(connection)) is not None:
            connection.sendall(
                frames.frame(self._answer(call["call"], call["method"], call["args"]))
            )

    def close(self) -> None:
        """Take no further caller."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
