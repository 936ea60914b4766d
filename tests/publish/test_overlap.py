"""Publishing faster than versions can be made: newest wins, or the caller waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from publish_helpers import (
    DEADLINE_S,
    Gate,
    TinyModel,
    failing_after,
    read_version,
    view_of,
    write_base,
)

from stitch.board import Board
from stitch.errors import PublisherClosedError
from stitch.publish import Publisher, Ticket
from stitch.publish.settings import WhenBusy
from stitch.testing.published import NO_RETRIES, digest_of, quick_board
from stitch.types import VersionRef


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def base(tmp_path: Path, model: TinyModel) -> Path:
    return write_base(tmp_path / "base.safetensors", model)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return quick_board(tmp_path / "board")


def gated(board: Board, base: Path, when_busy: WhenBusy) -> tuple[Publisher, Gate]:
    publisher = Publisher.start(board, "r", base, when_busy=when_busy, retry=NO_RETRIES, threads=1)
    return publisher, Gate(publisher._pipeline)


def untied(model: TinyModel) -> dict[str, object]:
    return {n: t for n, t in model.state_dict().items() if n != "head.weight"}


def publish_step(publisher: Publisher, model: TinyModel, step: int, form: str) -> Ticket:
    model.train_step(step)
    source = model if form == "module" else iter(untied(model).items())
    return publisher.publish(source, step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["module", "iterator"])
def test_the_newest_waiting_snapshot_wins(
    board: Board, base: Path, model: TinyModel, form: str
) -> None:
    publisher, gate = gated(board, base, "coalesce")
    first = publish_step(publisher, model, 1, form)
    one = digest_of(view_of(model, publisher.run.schema))
    gate.wait_entered()
    later = [publish_step(publisher, model, step, form) for step in (2, 3, 4)]
    last = digest_of(view_of(model, publisher.run.schema))
    assert [ticket.coalesced for ticket in [first, *later]] == [False, True, True, False]
    assert not any(ticket.done for ticket in [first, *later])
    gate.let_pass(2)
    publisher.close()
    assert first.wait(0) == VersionRef("r", 1)
    assert [ticket.wait(0) for ticket in later] == [VersionRef("r", 2)] * 3
    assert gate.steps == [1, 4]
    run = board.open_run("r")
    assert run.newest() == 2
    assert [run.manifest(v).digest_after for v in (1, 2)] == [one, last]
    assert run.manifest(2).step == 4
    assert read_version(run, base).digest == last


def test_the_version_under_way_is_never_replaced(
    board: Board, base: Path, model: TinyModel
) -> None:
    publisher, gate = gated(board, base, "coalesce")
    first = publish_step(publisher, model, 1, "module")
    second = publish_step(publisher, model, 2, "module")  # the worker may not have begun yet
    gate.let_pass(2)
    publisher.close()
    assert not first.coalesced
    assert (first.wait(0).version, second.wait(0).version) == (1, 2)


@pytest.mark.parametrize("count", [0, 3])
def test_a_source_that_breaks_does_not_take_a_waiting_snapshot_with_it(
    board: Board, base: Path, model: TinyModel, count: int
) -> None:
    publisher, gate = gated(board, base, "coalesce")
    publish_step(publisher, model, 1, "module")
    gate.wait_entered()
    waiting = publish_step(publisher, model, 2, "module")
    wanted = digest_of(view_of(model, publisher.run.schema))
    model.train_step(3)
    with pytest.raises(RuntimeError, match="the source broke"):
        publisher.publish(failing_after(untied(model), count))
    assert not waiting.coalesced
    gate.let_pass(2)
    publisher.close()
    assert waiting.wait(0) == VersionRef("r", 2)
    assert board.open_run("r").manifest(2).digest_after == wanted


def test_a_mapping_that_does_not_fit_leaves_a_waiting_snapshot_alone(
    board: Board, base: Path, model: TinyModel
) -> None:
    publisher, gate = gated(board, base, "coalesce")
    publish_step(publisher, model, 1, "module")
    gate.wait_entered()
    waiting = publish_step(publisher, model, 2, "module")
    with pytest.raises(ValueError, match="missing"):
        publisher.publish({"count": model.count})
    gate.let_pass(2)
    publisher.close()
    assert waiting.wait(0) == VersionRef("r", 2)


def test_extra_buffers_go_when_nothing_overlaps_any_more(
    board: Board, base: Path, model: TinyModel
) -> None:
    publisher, gate = gated(board, base, "coalesce")
    for step in range(1, 5):
        publish_step(publisher, model, step, "iterator")
    gate.let_pass(9)
    publisher.flush(DEADLINE_S)
    assert len(publisher._queue._pool._free) == 1
    publish_step(publisher, model, 9, "module").wait(DEADLINE_S)
    publisher.close()


def test_a_blocking_publisher_lets_the_caller_wait(
    board: Board, base: Path, model: TinyModel
) -> None:
    publisher, gate = gated(board, base, "block")
    first = publish_step(publisher, model, 1, "module")
    gate.wait_entered()
    tickets: list[Ticket] = []
    caller = threading.Thread(
        target=lambda: tickets.append(publish_step(publisher, model, 2, "module"))
    )
    caller.start()
    gate.let_pass()
    first.wait(DEADLINE_S)
    gate.let_pass()
    caller.join(DEADLINE_S)
    publisher.close()
    assert tickets[0].wait(0) == VersionRef("r", 2)
    assert not first.coalesced
    assert gate.steps == [1, 2]


def test_closing_wakes_a_caller_that_waits(board: Board, base: Path, model: TinyModel) -> None:
    publisher, gate = gated(board, base, "block")
    publish_step(publisher, model, 1, "module")
    gate.wait_entered()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            publisher.publish(model)
        except PublisherClosedError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    with pytest.raises(TimeoutError, match=r"1 accepted snapshots .*trainer steps \[1\]"):
        publisher.close(timeout_s=0.05)
    caller.join(DEADLINE_S)
    assert len(errors) == 1
    gate.let_pass()
    publisher.close()
    assert board.open_run("r").newest() == 1


def test_flush_and_tickets_time_out_without_harm(
    board: Board, base: Path, model: TinyModel
) -> None:
    publisher, gate = gated(board, base, "coalesce")
    ticket = publish_step(publisher, model, 1, "module")
    with pytest.raises(TimeoutError, match="step 1"):
        ticket.wait(0.01)
    with pytest.raises(TimeoutError, match="1 accepted snapshots"):
        publisher.flush(0.01)
    gate.let_pass()
    publisher.flush(DEADLINE_S)
    assert ticket.ref == VersionRef("r", 1)
    publisher.close()
