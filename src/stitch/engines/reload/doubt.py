"""A note, kept with the generations, that an engine is in doubt until it is restarted.

A stock engine that runs on its own outlives the replica that gave it up. The next replica must not
take it for sound: some failures of a reload stay with the process, whatever it loads afterwards. An
engine's label is lost when it restarts, so the note names those that the doubtful one may have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stitch.errors import FatalReplicaError
from stitch.tensors.durable import replacing_file

NOTE = "doubt.json"


class Doubt:
    """The note in a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NOTE
        self._labels: Sequence[str] = ()

    def expect(self, *labels: str) -> None:
        """What the engine may be labelled with if what is done now fails."""
        self._labels = labels

    def note(self, reason: str, label: str | None) -> None:
        labels = sorted({*self._labels, *([] if label is None else [label])})
        with replacing_file(self._path) as file:
            file.write(json.dumps({"reason": reason, "labels": labels}).encode())

    def clear(self) -> None:
        """The engine is proven: nothing is in doubt any more."""
        self._labels = ()
        self._path.unlink(missing_ok=True)

    def check(self, label: str) -> None:
        """Raise FatalReplicaError if the engine that is labelled so is the one in doubt."""
        try:
            note = json.loads(self._path.read_bytes())
            labels, reason = note["labels"], note["reason"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FatalReplicaError(
                f"{self._path} cannot be read ({error!r}); it says that an engine is in doubt: "
                "restart the engine and remove it"
            ) from error
        if label in labels:
            raise FatalReplicaError(
                f"the engine is in doubt since an earlier fault ({reason}): restart it"
            )
