"""Files and directories are written by streaming, reproducibly, and appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stitch.errors import CorruptCheckpointError, SchemaMismatchError, StoreFullError, UsageError
from stitch.tensors import (
    HostWeights,
    Words,
    open_checkpoint,
    read_all,
    write_checkpoint,
    write_safetensors,
)
from stitch.types import Schema, TensorSpec

SCHEMA = Schema.of(TensorSpec.of(f"t{i}", "U16", [1000]) for i in range(5))


def weights_of(value: int) -> HostWeights:
    weights = HostWeights.allocate(SCHEMA)
    for index in range(len(SCHEMA)):
        weights.words_at(index)[:] = value + index
    return weights


def value_in(path: Path) -> int:
    """The value that `weights_of` was given, after checking all words."""
    with open_checkpoint(path) as checkpoint:
        value = int(checkpoint.read("t0", 0, 1)[0])
        expected = weights_of(value)
        assert checkpoint.schema == SCHEMA
        for name in SCHEMA.index:
            assert (read_all(checkpoint, name) == expected.words(name)).all()
    return value


class FailingReader:
    """Raises while the k-th tensor is read."""

    def __init__(self, name: str) -> None:
        self.schema = SCHEMA
        self._name = name

    def read(self, name: str, start: int, stop: int) -> Words:
        if name == self._name:
            raise CorruptCheckpointError(f"cannot read {name}")
        return np.zeros(stop - start, np.uint16)


class EndlessReader:
    """A large tensor that exists only while it is read."""

    schema = Schema.of([TensorSpec.of("large", "U8", [300_000_000])])

    def read(self, name: str, start: int, stop: int) -> Words:
        return np.zeros(stop - start, np.uint8)


def test_the_output_may_be_the_input(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of(7))
    with open_checkpoint(path) as checkpoint:
        write_safetensors(path, checkpoint)
        assert read_all(checkpoint, "t1")[0] == 8
    assert value_in(path) == 7


def test_a_directory_may_be_rewritten_from_itself(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_checkpoint(folder, weights_of(7))
    (folder / "config.json").write_text("{}")
    with open_checkpoint(folder) as checkpoint:
        write_checkpoint(
            folder, checkpoint, max_shard_bytes=4000, assets_from=checkpoint, overwrite=True
        )
    assert value_in(folder) == 7
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", SCHEMA.index)
def test_a_failure_while_a_tensor_is_read_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of(7))
    with pytest.raises(CorruptCheckpointError, match=name):
        write_safetensors(path, FailingReader(name))
    assert value_in(path) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_failure_while_a_tensor_is_read_leaves_the_old_directory(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_checkpoint(folder, weights_of(7))
    with pytest.raises(CorruptCheckpointError):
        write_checkpoint(folder, FailingReader("t3"), max_shard_bytes=2000, overwrite=True)
    with pytest.raises(CorruptCheckpointError):
        write_checkpoint(tmp_path / "new", FailingReader("t3"))
    assert value_in(folder) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_writing_checkpoints import weights_of
from stitch.tensors import write_checkpoint, write_safetensors
target = Path(sys.argv[1])
if target.suffix:
    write_safetensors(target, weights_of(9))
else:
    write_checkpoint(target, weights_of(9), max_shard_bytes=4000, overwrite=True)
"""


@pytest.mark.parametrize(
    ("target", "failpoint", "value"),
    [
        ("t.safetensors", "tensors.file.written", 7),
        ("t.safetensors", "tensors.file.renamed", 9),
        ("m", "tensors.file.written:2", 7),
        ("m", "tensors.file.renamed:4", 7),
        ("m", "tensors.directory.written", 7),
        ("m", "tensors.directory.renamed", 9),
    ],
)
def test_a_killed_writer_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, target: str, failpoint: str, value: int
) -> None:
    path = tmp_path / target
    if path.suffix:
        write_safetensors(path, weights_of(7))
    else:
        write_checkpoint(path, weights_of(7))
    code = KILLED.format(tests=str(Path(__file__).parent))
    env = {**os.environ, "STITCH_FAILPOINT": failpoint}
    done = subprocess.run([sys.executable, "-c", code, path], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert value_in(path) == value


def test_equal_content_gives_equal_bytes_in_another_process(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_writing_checkpoints import weights_of
from stitch.tensors import write_safetensors
order = range(20) if sys.argv[2] == "up" else reversed(range(20))
write_safetensors(sys.argv[1], weights_of(5), metadata={{f"key{{i}}": str(i) for i in order}})
"""
    digests = set()
    for order in ("up", "down"):
        path = tmp_path / f"{order}.safetensors"
        env = {**os.environ, "PYTHONHASHSEED": "1" if order == "up" else "2"}
        subprocess.run([sys.executable, "-c", code, path, order], env=env, check=True)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_writing_takes_bounded_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    write_safetensors(tmp_path / "t.safetensors", EndlessReader())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000
    assert (tmp_path / "t.safetensors").stat().st_size > 300_000_000


def test_temporary_files_are_private_and_outputs_follow_the_umask(tmp_path: Path) -> None:
    seen: list[int] = []

    class WatchingReader(FailingReader):
        def read(self, name: str, start: int, stop: int) -> Words:
            (temp,) = tmp_path.glob(".t.safetensors.*.tmp")
            seen.append(stat.S_IMODE(temp.stat().st_mode))
            return np.zeros(stop - start, np.uint16)

    write_safetensors(tmp_path / "t.safetensors", WatchingReader(""))
    assert set(seen) == {0o600}
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "t.safetensors").stat().st_mode == plain.stat().st_mode
    write_checkpoint(tmp_path / "m", weights_of(1))
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "folder").stat().st_mode


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_planted_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dangling: bool
) -> None:
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_text("precious")
    monkeypatch.setattr("stitch.tensors.durable.secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".t.safetensors.guessed.tmp").symlink_to(victim)
    (tmp_path / ".m.guessed.tmp").symlink_to(victim)
    with pytest.raises(UsageError, match="File exists"):
        write_safetensors(tmp_path / "t.safetensors", weights_of(1))
    with pytest.raises(UsageError, match="File exists"):
        write_checkpoint(tmp_path / "m", weights_of(1))
    assert victim.exists() != dangling
    assert dangling or victim.read_text() == "precious"


def test_a_full_disk_is_named_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of(7))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("stitch.tensors.durable.os.fsync", full)
    with pytest.raises(StoreFullError, match=r"t\.safetensors: No space left"):
        write_safetensors(path, weights_of(9))
    monkeypatch.undo()
    assert value_in(path) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_unsuitable_targets_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        write_safetensors(tmp_path / "none" / "t.safetensors", weights_of(1))
    with pytest.raises(UsageError, match="No such file or directory"):
        write_checkpoint(tmp_path / "none" / "m", weights_of(1))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a directory"):
        write_checkpoint(tmp_path / "file", weights_of(1), overwrite=True)
    (tmp_path / "folder").mkdir()
    write_checkpoint(tmp_path / "folder", weights_of(1))
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(tmp_path / "folder", weights_of(2))
    assert value_in(tmp_path / "folder") == 1
    with pytest.raises(SchemaMismatchError, match="lacks"):
        write_safetensors(tmp_path / "t.safetensors", weights_of(1), names=["t1", "u"])


def test_only_the_asked_tensors_are_written(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", weights_of(1), names=["t3", "t1"], metadata={})
    with open_checkpoint(tmp_path / "t.safetensors") as checkpoint:
        assert list(checkpoint.schema.index) == ["t1", "t3"]
        assert checkpoint.metadata == {}


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", weights_of(3), max_shard_bytes=10)
    assert len(list((tmp_path / "m").glob("model-*-of-00005.safetensors"))) == 5
    assert value_in(tmp_path / "m") == 3


def test_progress_runs_over_all_shards(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    write_checkpoint(
        tmp_path / "m", weights_of(3), max_shard_bytes=4000, progress=lambda *r: reports.append(r)
    )
    assert reports == sorted(reports)
    assert reports[-1] == (SCHEMA.num_bytes, SCHEMA.num_bytes)


def test_where_directories_cannot_be_exchanged_they_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoExchange:
        def renameat2(self, *_: object) -> int:
            return -1

    monkeypatch.setattr("stitch.tensors.durable.ctypes.CDLL", lambda *_, **__: NoExchange())
    monkeypatch.setattr("stitch.tensors.durable.ctypes.get_errno", lambda: errno.EINVAL)
    write_checkpoint(tmp_path / "m", weights_of(1))
    write_checkpoint(tmp_path / "m", weights_of(2), overwrite=True)
    assert value_in(tmp_path / "m") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_link_to_a_directory_keeps_pointing_at_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "real", weights_of(1))
    (tmp_path / "link").symlink_to("real")
    write_checkpoint(tmp_path / "link", weights_of(2), overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert value_in(tmp_path / "real") == 2


def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    with open_checkpoint(tmp_path / "saved") as checkpoint:
        write_checkpoint(
            tmp_path / "ours", checkpoint, max_shard_bytes=4000, assets_from=tmp_path / "saved"
        )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
