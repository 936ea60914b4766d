"""`stitch fsck` finds every kind of damage, and says what can still be reached and from where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_kit import Program, Published, make_chain, words_of

from stitch.board import open_board
from stitch.cli import exits
from stitch.publish import Publisher, write_anchor
from stitch.tensors import HostWeights, open_checkpoint


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Run `math`: versions 0 to 9, merged patches, an anchor of version 6."""
    from stitch.publish.compact import Compactor

    folder = tmp_path_factory.mktemp("fsck")
    chain = make_chain(folder / "chain", num_steps=9)
    with Publisher.start(folder / "board", "math", chain[0], threads=1) as publisher:
        for step, path in enumerate(chain[1:], start=1):
            with open_checkpoint(path) as checkpoint:
                publisher.publish(checkpoint, step=step).wait()
    run = open_board(folder / "board").open_run("math")
    Compactor(run, threads=1).compact()
    with open_checkpoint(chain[6]) as checkpoint:
        write_anchor(run, HostWeights.load(checkpoint), 6)
    return Published(folder / "board", chain)


@pytest.fixture
def board(pristine: Published, tmp_path: Path) -> Published:
    shutil.copytree(pristine.board, tmp_path / "board")
    return Published(tmp_path / "board", pristine.chain)


def one(board: Published, pattern: str) -> Path:
    (path,) = (board.board / "math").glob(pattern)
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def fsck(stitch: Program, board: Published) -> dict:  # type: ignore[type-arg]
    """The report, after checking that the exit code agrees with it."""
    outcome = stitch("fsck", *board.args, "--json")
    report: dict = outcome.json  # type: ignore[type-arg]
    assert outcome.code == (exits.UNEQUAL if report["damaged"] else exits.OK), outcome.err
    return report


def reached(report: dict) -> list[tuple[int, int, bool, int | None]]:  # type: ignore[type-arg]
    return [(r["first"], r["last"], r["from_base"], r["from_anchor"]) for r in report["reached"]]


def test_a_sound_run_is_read_whole_and_left_as_it_is(stitch: Program, board: Published) -> None:
    before = {path: path.stat().st_mtime_ns for path in board.board.rglob("*")}
    report = fsck(stitch, board)
    assert (report["damaged"], report["unnamed"], report["lost"]) == ([], [], [])
    assert reached(report) == [(0, 5, True, None), (6, 9, True, 6)]
    assets = json.loads((board.board / "math/run.json").read_text())["assets"]
    # The schema, nine versions, three merged patches and an anchor, each a record and a blob.
    assert report["objects"] == 1 + 2 * (9 + 3 + 1) + len(assets)
    stored = [*board.board.glob("math/v/*/*.patch"), *board.board.glob("math/v/*/*.safetensors")]
    sizes = [path.stat().st_size for path in stored] + [asset["num_bytes"] for asset in assets]
    assert report["bytes"] == sum(sizes)
    assert {path: path.stat().st_mtime_ns for path in board.board.rglob("*")} == before
    text = stitch("fsck", *board.args).out
    assert "6 to 9" in text
    assert "base, anchor 6" in text


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("v/00000003/w*.patch", [(0, 2, True, None), (3, 3, False, None), (4, 5, True, None),
                                 (6, 9, True, 6)]),
        ("v/00000008/from-00000000-*.patch", [(0, 5, True, None), (6, 9, True, 6)]),
        ("v/00000006/anchor-*.safetensors", [(0, 9, True, None)]),
        ("assets/*/tokenizer.json", [(0, 5, True, None), (6, 9, True, 6)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_blob_is_named_and_its_routes_are_not_counted_on(
    stitch: Program,
    board: Published,
    pattern: str,
    expected: list[tuple[int, int, bool, int | None]],
    damage: str,
) -> None:
    path = one(board, pattern)
    if damage == "flipped":
        flip(path)
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    report = fsck(stitch, board)
    (found,) = report["damaged"]
    assert found["key"] == str(path.relative_to(board.board))
    assert path.name in found["problem"]
    assert reached(report) == expected
    assert f"damaged: {found['problem']}" in stitch("fsck", *board.args).out


@pytest.mark.parametrize("pattern", ["v/00000008/from-00000004.json", "v/00000006/anchor.json",
                                     "v/00000003/manifest.json", "schema-*.json.zst"])  # fmt: skip
def test_a_damaged_record_is_named(stitch: Program, board: Published, pattern: str) -> None:
    path = one(board, pattern)
    path.write_bytes(b"\0" * 60)
    report = fsck(stitch, board)
    assert str(path.relative_to(board.board)) in {entry["key"] for entry in report["damaged"]}


def test_a_broken_chain_of_digests_is_found(stitch: Program, board: Published) -> None:
    path = one(board, "v/00000005/manifest.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"digest_before": "0" * 32}))
    report = fsck(stitch, board)
    assert [entry["key"] for entry in report["damaged"]] == ["math/v/00000005/manifest.json"]
    assert "digest_before is 000" in report["damaged"][0]["problem"]
    assert (5, 5, False, None) in reached(report)


def test_what_is_said_to_be_reached_is_reached(
    stitch: Program, board: Published, tmp_path: Path
) -> None:
    for pattern in ("v/00000002/w*.patch", "v/00000008/w*.patch", "v/00000008/from-00000000-*"):
        flip(one(board, pattern))
    report = fsck(stitch, board)
    assert report["lost"] == [[2, 3]]
    assert reached(report) == [
        (0, 1, True, None), (2, 3, False, None), (4, 5, True, None), (6, 7, True, 6),
        (8, 9, True, None),
    ]  # fmt: skip
    for version in (1, 4, 7, 9):
        out = tmp_path / str(version)
        stitch.ok("checkout", version, "--out", out, *board.args)
        assert words_of(out) == words_of(board.chain[version])
    assert stitch("checkout", 3, "--out", tmp_path / "lost", *board.args).code != 0


def test_what_retention_removed_is_no_damage_and_strays_are_counted(
    stitch: Program, board: Published
) -> None:
    stitch.ok("gc", *board.args, "--apply", "--grace-s", 0, "--keep-versions", 2)
    (board.board / "math/v/00000009/w0-0.patch").write_bytes(b"of a writer that died")
    report = fsck(stitch, board)
    assert report["damaged"] == []
    assert report["removed"] == 6  # from the anchor, two lead to what is kept
    assert report["unnamed"] == ["math/v/00000009/w0-0.patch"]
    assert reached(report)[1:] == [(1, 5, False, None), (6, 7, False, 6), (8, 9, True, 6)]
    assert "retention removed 6 patches" in stitch("fsck", *board.args).out
