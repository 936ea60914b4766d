"""Merging patches beside publishing: a compactor in a thread of its own."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from stitch.board import Run
from stitch.codec.choice import Decode
from stitch.publish.compact import Compactor

log = logging.getLogger(__name__)


class BackgroundMerging:
    """Writes merged patches as versions appear, with one thread, until closed.

    It reads the versions from the board as anybody would and holds the view twice, so it neither
    waits for the publisher nor makes it wait. What is left undone, the next one does.
    """

    def __init__(self, run: Run, *, encoding: str, decode: Decode, scratch: Path | None) -> None:
        self._run = run
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._compactor = Compactor(
            run,
            scratch=scratch,
            encoding=encoding,
            decode=decode,
            threads=1,
            stop=self._stopping.is_set,
        )
        self._thread = threading.Thread(
            target=self._work, name=f"stitch-merging-{run.name}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """There may be a new version."""
        self._wake.set()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop soon, in the middle of a span if need be; TimeoutError after `timeout_s`."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"after {timeout_s:.3g} s the merging of patches of run {self._run.name!r} goes on"
            )

    def _work(self) -> None:
        try:
            while True:
                self._wake.clear()
                if self._stopping.is_set():  # asked after clearing, or `close` could be missed
                    return
                self._merge()
                self._wake.wait()
        finally:
            self._compactor.close()

    def _merge(self) -> None:
        try:
            self._compactor.compact()
        except Exception as error:  # a background convenience must not fail a published version
            log.warning("event=merging_failed run=%s error=%s", self._run.name, error)
