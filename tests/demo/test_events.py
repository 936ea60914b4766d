"""Events that go through a file."""

from __future__ import annotations

from pathlib import Path

from stitch.demo.events import EventReader, EventWriter


def test_events_are_read_once_and_only_when_their_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.new() == []
    writer = EventWriter(path)
    writer.emit("step", step=1)
    with path.open("ab") as file:
        file.write(b'{"event": "fi')
    assert reader.new() == [{"event": "step", "step": 1}]
    assert reader.new() == []
    with path.open("ab") as file:
        file.write(b'nal"}\n')
    assert reader.new() == [{"event": "final"}]
