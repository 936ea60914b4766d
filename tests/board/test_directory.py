"""A directory board: the order of syncs, temporaries, modes and planted links."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from board_kit import NO_WAITS, heartbeat, new_run, publish

from stitch.board import open_board
from stitch.board.keys import TEMPORARY_FOLDER
from stitch.board.stores.directory import DirectoryStore, open_directory
from stitch.errors import StoreError, StoreFullError, StoreUnsuitableError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Writes, syncs and renames in the order in which they are done."""
    seen: list[tuple[str, str]] = []
    real_put, real_rename, real_sync = obstore.put, obstore.rename, os.fsync

    def put(store: object, key: str, *args: object, **kwargs: object) -> object:
        result = real_put(store, key, *args, **kwargs)
        seen.append(("write", key))
        return result

    def rename(store: object, source: str, target: str, *, overwrite: bool) -> None:
        real_rename(store, source, target, overwrite=overwrite)
        seen.append(("replace" if overwrite else "link", target))

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        seen.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(obstore, "rename", rename)
    monkeypatch.setattr(os, "fsync", sync)
    return seen


def test_bytes_are_synced_before_the_name_and_the_folder_after_it(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    store = open_directory(tmp_path / "board", create=True)
    root = store.root
    assert events == [("sync", str(tmp_path))]
    for mode, verb in (("create", "link"), ("overwrite", "replace")):
        events.clear()
        store.put("math/v/00000001/x.patch", b"x" * 1000, mode=mode)  # type: ignore[arg-type]
        folders = [
            ("sync", str(root)),
            ("sync", str(root / "math")),
            ("sync", str(root / "math/v")),
        ]
        if mode == "create":
            assert events[:3] == folders
            del events[:3]
        (write, temporary), (sync, synced), (name, key), (last, folder) = events
        assert (write, sync, name, last) == ("write", "sync", verb, "sync")
        assert synced == str(root / temporary)
        assert key == "math/v/00000001/x.patch"
        assert folder == str(root / "math/v/00000001")


def test_a_key_that_is_taken_is_durable_when_the_store_says_so(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    open_directory(tmp_path, create=True).put("a/b", b"x", mode="create")
    store = open_directory(tmp_path, create=True)
    events.clear()
    assert store.put("a/b", b"y", mode="create") is False
    assert events[0] == ("sync", str(tmp_path))
    assert events[-1] == ("sync", str(tmp_path / "a"))


def test_a_folder_that_another_process_made_is_synced_into_its_parent(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    store = open_directory(tmp_path, create=True)
    (tmp_path / "a" / "b").mkdir(parents=True)
    store.put("a/b/c", b"x", mode="create")
    assert ("sync", str(tmp_path)) in events
    assert ("sync", str(tmp_path / "a")) in events
    events.clear()
    store.put("a/b/d", b"x", mode="create")
    assert [path for verb, path in events if verb == "sync"][1:] == [str(tmp_path / "a" / "b")]
    shutil.rmtree(tmp_path / "a" / "b")
    events.clear()
    store.put("a/b/e", b"x", mode="create")
    assert events[0] == ("sync", str(tmp_path / "a"))


def test_all_that_a_version_rests_on_is_synced_before_its_manifest_is_linked(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    run = new_run(open_board(tmp_path))
    for version in (1, 2):
        events.clear()
        published = publish(run, version)
        folder = tmp_path / f"math/v/{version:08d}"
        linked = events.index(("link", f"math/v/{version:08d}/manifest.json"))
        blob = events.index(("link", f"math/v/{version:08d}/{published.blobs[0].name}"))
        assert ("sync", str(folder)) in events[blob:linked]
        assert ("sync", str(folder.parent)) in events[:linked]
        assert ("sync", str(folder)) in events[linked:]


def test_a_version_left_unsynced_by_a_killed_writer_is_synced_before_the_next_one(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    publish(new_run(open_board(tmp_path)), 1)
    other = open_board(tmp_path).open_run("math")
    events.clear()
    publish(other, 2)
    linked = events.index(("link", "math/v/00000002/manifest.json"))
    assert ("sync", str(tmp_path / "math/v/00000001")) in events[:linked]


def test_heartbeats_are_atomic_but_cost_no_sync(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    run = new_run(open_board(tmp_path))
    events.clear()
    run.put_heartbeat(heartbeat())
    assert [verb for verb, _ in events] == ["write", "replace"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_kernel_sees_sync_link_and_folder_sync_in_this_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = (
        "import sys; from pathlib import Path;"
        "from stitch.board.stores.directory import open_directory;"
        "open_directory(Path(sys.argv[1]), create=True).put('r/v/k', b'x', mode='create')"
    )
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", "trace=fsync,link,linkat,rename"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(tmp_path / "board")], capture_output=True
    )
    if not trace.exists() or b"ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    calls = trace.read_text()
    order = [
        calls.index(found.group())
        for pattern in (
            rf"fsync\(\d+<[^>]*/{re.escape(TEMPORARY_FOLDER)}/[0-9a-f]{{32}}>",
            r"link(at)?\([^\n]*/r/v/k\"",
            r"fsync\(\d+<[^>]*/board/r/v>",
        )
        for found in [re.search(pattern, calls)]
        if found is not None
    ]
    assert len(order) == 3
    assert order == sorted(order)


def temporaries(store: DirectoryStore) -> list[Path]:
    folder = store.root / TEMPORARY_FOLDER
    return sorted(folder.iterdir()) if folder.exists() else []


def test_temporary_names_are_unique_unguessable_and_never_left_behind(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    store = open_directory(tmp_path, create=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put("m/head.json", b"%d" % n, mode="overwrite"), range(64)))
    names = {key for verb, key in events if verb == "write"}
    assert len(names) == 64
    assert all(re.fullmatch(r"\.stitch-tmp/[0-9a-f]{32}", name) for name in names)
    assert int(store.get("m/head.json", max_bytes=9) or b"-1") in range(64)
    assert store.put("a/b", b"1", mode="create")
    assert not store.put("a/b", b"2", mode="create")
    assert temporaries(store) == []


def leave_temporary(store: DirectoryStore, name: str, age_s: float) -> Path:
    path = store.root / TEMPORARY_FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"left")
    now_s = time.time()
    os.utime(path, (now_s - age_s, now_s - age_s))
    return path


@pytest.mark.parametrize("clock_error_s", [0.0, 3600.0, -3600.0])
def test_old_temporaries_are_swept_and_young_ones_kept_whatever_this_hosts_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_error_s: float
) -> None:
    board = open_board(tmp_path)
    store = board.store
    assert isinstance(store, DirectoryStore)
    assert board.sweep_temporaries(0) == 0
    old = leave_temporary(store, "aa", age_s=1900)
    half_written = leave_temporary(store, "bb#1", age_s=1900)
    young = leave_temporary(store, "cc", age_s=30)
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + clock_error_s)
    assert board.sweep_temporaries(older_than_s=1800) == 2
    assert not old.exists()
    assert not half_written.exists()
    assert temporaries(store) == [young]


def test_a_temporary_that_is_swept_while_in_use_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_directory(tmp_path, create=True)
    real_rename = obstore.rename
    swept = []

    def rename(*args: object, **kwargs: object) -> None:
        if not swept:
            swept.append(store.sweep_temporaries(0))
        real_rename(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(obstore, "rename", rename)
    assert store.put("a/b", b"x", mode="create") is True
    assert swept == [1]
    assert store.get("a/b", max_bytes=9) == b"x"


def test_temporaries_are_not_runs_and_not_versions(tmp_path: Path) -> None:
    board = open_board(tmp_path)
    new_run(board)
    assert isinstance(board.store, DirectoryStore)
    leave_temporary(board.store, "run.json", age_s=0)
    assert board.runs() == ["math"]


def test_a_failing_sync_is_an_error_and_not_a_durable_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_directory(tmp_path, create=True)

    def refusing(code: int) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            raise OSError(code, "planned")

        return sync

    for code, kind in ((28, StoreFullError), (5, StoreError), (13, StoreUnsuitableError)):
        monkeypatch.setattr(os, "fsync", refusing(code))
        with pytest.raises(kind, match="cannot write a/b"):
            store.put("a/b", b"x", mode="create")
    monkeypatch.undo()
    assert store.head("a/b") is None
    assert temporaries(store) == []


def test_a_folder_sync_that_fails_after_the_link_is_made_up_for_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(open_board(tmp_path, patience=NO_WAITS))
    real_sync = os.fsync
    folder = str(tmp_path / "math/v/00000001")
    seen: list[str] = []

    def sync(descriptor: int) -> None:
        manifest = Path(folder, "manifest.json")
        if os.readlink(f"/proc/self/fd/{descriptor}") == folder and manifest.exists():
            seen.append("manifest")
            if len(seen) == 1:
                raise OSError(5, "planned")
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    publish(run, 1)
    assert len(seen) >= 2
    assert run.newest() == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_unsuitable(tmp_path: Path) -> None:
    store = open_directory(tmp_path, create=True)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreUnsuitableError, match="Permission denied"):
            store.put("a/b", b"x", mode="create")
    finally:
        tmp_path.chmod(0o700)


def test_a_file_where_a_folder_belongs_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    store = open_directory(tmp_path, create=True)
    (tmp_path / "math").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot write math/run\.json"):
        store.put("math/run.json", b"x", mode="create")
    assert str(tmp_path) not in str(StoreError)


def test_nothing_is_absent_while_the_directory_itself_is_gone(tmp_path: Path) -> None:
    root, aside = tmp_path / "board", tmp_path / "aside"
    store = open_directory(root, create=True)
    assert store.put("run/a", b"a", mode="create")
    assert store.get("run/b", max_bytes=9) is None
    root.rename(aside)
    for look in (lambda: store.get("run/b", max_bytes=9), lambda: store.head("run/b")):
        with pytest.raises(StoreError, match="the board's directory"):
            look()
    root.mkdir()  # what an unmounted file system leaves
    with pytest.raises(StoreError, match="unmounted"):
        store.head("run/b")
    root.rmdir()
    aside.rename(root)
    assert store.head("run/b") is None
    assert store.get("run/a", max_bytes=9) == b"a"


def test_a_directory_that_is_mounted_anew_is_looked_into_again(tmp_path: Path) -> None:
    root = tmp_path / "board"
    store = open_directory(root, create=True)
    root.rename(tmp_path / "aside")
    other = open_directory(root, create=True)
    assert other.put("run/a", b"a", mode="create")
    assert store.get("run/b", max_bytes=9) is None
    assert store.get("run/a", max_bytes=9) == b"a"
