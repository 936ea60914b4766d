"""Changes and digests found in torch: what the kernels and the reference find, bit for bit."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_cases import changed, from_words, mixed_schema, random_weights, same_bits, schema_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.codec import (
    Bucket,
    DigestState,
    PatchEncoder,
    Slice,
    decode_parts,
    kernels,
    plan_buckets,
    reference,
    torch_changes,
    torch_digest,
)
from stitch.codec.changes import BucketChanges, find_changes
from stitch.codec.encodings import ENCODINGS
from stitch.errors import CorruptCheckpointError
from stitch.tensors import HostWeights, WeightReader
from stitch.tensors.device import DeviceWeights, host_bits
from stitch.types import Schema, TensorSpec

WORD_BYTES = (1, 2, 4, 8)
DTYPE_OF = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}


class HostOnly:
    """A WeightReader that hides where its words are."""

    def __init__(self, reader: WeightReader) -> None:
        self.schema, self.read = reader.schema, reader.read


def on_device(weights: HostWeights) -> DeviceWeights:
    return DeviceWeights.load(weights, "cpu")


def random_words(word_bytes: int, n: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return (
        np.random.default_rng(seed)
        .integers(0, 256, n * word_bytes, np.uint8)
        .view(f"<u{word_bytes}")
    )


def assert_same_changes(found: BucketChanges, wanted: BucketChanges) -> None:
    for name in ("positions", "old", "new"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    np.testing.assert_array_equal(np.array(found.gains), np.array(wanted.gains))
    for ours, theirs in ((found.old_slices, wanted.old_slices),
                         (found.new_slices, wanted.new_slices)):  # fmt: skip
        assert [words.tolist() for words in ours] == [words.tolist() for words in theirs]


def assert_found_alike(bucket: Bucket, old: HostWeights, new: HostWeights) -> BucketChanges:
    found = torch_changes.find_changes(bucket, on_device(old), on_device(new))
    assert_same_changes(found, find_changes(bucket, HostOnly(old), HostOnly(new)))
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_changes, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(torch_changes, "_GATHER_WORDS", 3)
    monkeypatch.setattr(torch_digest, "_CHUNK_WORDS", 5)


@pytest.mark.parametrize("density", [0.0, 0.004, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("max_elements", [1 << 23, 104])
def test_every_dtype_and_density_gives_the_changes_of_the_host_path(
    density: float, max_elements: int
) -> None:
    old = random_weights(mixed_schema(), 1)
    new = changed(old, density, 2)
    for bucket in plan_buckets(old.schema, max_elements):
        found = assert_found_alike(bucket, old, new)
        assert density > 0 or not found.num_changed


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("word_bytes", WORD_BYTES)
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_chunks_and_pieces_are_put_together_again(word_bytes: int, density: float) -> None:
    spec = TensorSpec.of("t", DTYPE_OF[word_bytes], (517,))
    old = random_weights(Schema.of([spec]), 3)
    new = changed(old, density, 4)
    assert_found_alike(Bucket(spec.dtype, (Slice(0, 0, 517),)), old, new)


@pytest.mark.parametrize("word_bytes", WORD_BYTES)
def test_slices_in_any_order_keep_their_places_and_gains(word_bytes: int) -> None:
    dtype = DTYPE_OF[word_bytes]
    old = random_weights(schema_of(a=(dtype, (83,)), b=(dtype, (5,)), c=(dtype, (64,))), 5)
    new = changed(old, 0.3, 6)
    pieces = (Slice(2, 8, 40), Slice(0, 72, 83), Slice(1, 0, 5), Slice(0, 16, 24))
    assert_found_alike(Bucket(dtype, pieces), old, new)


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 8])
def test_several_changes_inside_one_8_byte_word_count_once_for_the_digest(
    word_bytes: int, start: int
) -> None:
    words = random_words(word_bytes, 27)
    other = words.copy()
    other[start : start + 8 // word_bytes] ^= 1
    old = from_words({"t": (DTYPE_OF[word_bytes], words)})
    new = from_words({"t": (DTYPE_OF[word_bytes], other)})
    found = assert_found_alike(Bucket(DTYPE_OF[word_bytes], (Slice(0, 8, 27),)), old, new)
    assert found.num_changed == (8 // word_bytes if start == 8 else 0)


def test_what_differs_only_in_sign_of_zero_or_payload_of_nan_is_a_change() -> None:
    old = {"t": torch.tensor([0.0, float("nan"), 1.0, float("nan")])}
    new = {"t": old["t"].clone()}
    new["t"].view(torch.int32)[:2] += torch.tensor([-(2**31), 1], dtype=torch.int32)
    bucket = Bucket("F32", (Slice(0, 0, 4),))
    found = torch_changes.find_changes(bucket, DeviceWeights.of(old), DeviceWeights.of(new))
    assert found.positions.tolist() == [0, 1]


def test_the_words_of_live_tensors_of_any_layout_are_compared_in_logical_order() -> None:
    torch.manual_seed(0)
    old = {"t": torch.randn(24, 10).t(), "u": torch.randn(30)[1::2].to(torch.bfloat16)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["t"][3, 7] += 1
    devices = DeviceWeights.of(old), DeviceWeights.of(new)
    hosts = [HostWeights.load(weights) for weights in devices]
    for bucket in plan_buckets(devices[0].schema):
        found = torch_changes.find_changes(bucket, *devices)
        assert_same_changes(found, find_changes(bucket, *map(HostOnly, hosts)))
        assert found.positions.tolist() == ([3 * 24 + 7] if bucket.dtype == "F32" else [])


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_words_that_torch_cannot_reinterpret_in_place_are_compared(word_bytes: int) -> None:
    """Views that begin off an 8-byte boundary, and every second element of another tensor."""
    schema = schema_of(t=(DTYPE_OF[word_bytes], (100,)))
    a, b = (host_bits(random_words(word_bytes, 202, seed)) for seed in (1, 2))
    b[50:] = a[50:]
    for cut in (slice(1, 101), slice(0, 200, 2)):
        old, new = DeviceWeights(schema, [a[cut]]), DeviceWeights(schema, [b[cut]])
        bucket = Bucket(DTYPE_OF[word_bytes], (Slice(0, 8, 100),))
        found = torch_changes.find_changes(bucket, old, new)
        assert_same_changes(found, find_changes(bucket, HostOnly(old), HostOnly(new)))
        assert found.num_changed > 10
        lanes = torch_digest.sum_words(a[cut])
        assert tuple(map(int, lanes)) == reference.lanes(a[cut].contiguous().numpy().tobytes())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_small_bucket_gives_the_changes_of_the_host_path(data: st.DataObject) -> None:
    word_bytes = data.draw(st.sampled_from(WORD_BYTES))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    specs = [TensorSpec.of(f"t{i}", DTYPE_OF[word_bytes], (n,)) for i, n in enumerate(sizes)]
    old = random_weights(Schema.of(specs), data.draw(st.integers(0, 99)))
    new = HostWeights.load(old)
    pieces = []
    for tensor, n in enumerate(sizes):
        words = new.words_at(tensor)
        at = data.draw(st.lists(st.integers(0, n - 1), max_size=n))
        words[at] ^= words.dtype.type(data.draw(st.integers(1, 2 ** (8 * word_bytes) - 1)))
        start = 8 * data.draw(st.integers(0, (n - 1) // 8))
        stop = data.draw(st.sampled_from([n, *range(start + 8, n, 8)]))
        pieces.append(Slice(tensor, start, stop))
    bucket = Bucket(DTYPE_OF[word_bytes], tuple(data.draw(st.permutations(pieces))))
    assert_found_alike(bucket, old, new)


@pytest.mark.parametrize("word_bytes", WORD_BYTES)
@pytest.mark.parametrize("num_words", [0, 1, 2, 3, 5, 7, 8, 9, 31, 1001])
def test_lanes_are_those_of_the_reference_and_the_kernels(word_bytes: int, num_words: int) -> None:
    words = random_words(word_bytes, num_words, num_words)
    lanes = torch_digest.sum_words(host_bits(words))
    assert (lanes.dtype, lanes.shape) == (np.uint64, (2,))
    assert tuple(map(int, lanes)) == reference.lanes(words.tobytes())
    np.testing.assert_array_equal(lanes, kernels.sum_words(words))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("word_bytes", WORD_BYTES)
@pytest.mark.parametrize("first", [0, 1, 2**31 - 7, 2**32 - 7, 2**40])
def test_lanes_of_shards_begin_at_any_index_and_span_chunks(word_bytes: int, first: int) -> None:
    words = random_words(word_bytes, 333, 9)
    lanes = torch_digest.sum_words(host_bits(words), first)
    np.testing.assert_array_equal(lanes, kernels.sum_words(words, first))


@settings(max_examples=50, deadline=None)
@given(
    data=st.binary(max_size=200).map(lambda b: np.frombuffer(b, np.uint8).copy()),
    cut=st.integers(0, 24),
)
def test_lanes_of_any_bytes_are_the_references_and_add_up(
    data: np.ndarray,  # type: ignore[type-arg]
    cut: int,
) -> None:
    cut = min(8 * cut, data.size - data.size % 8)
    first = torch_digest.sum_words(host_bits(data[:cut]))
    rest = torch_digest.sum_words(host_bits(data[cut:]), cut // 8)
    assert tuple(map(int, first + rest)) == reference.lanes(data.tobytes())


@pytest.mark.parametrize("pattern", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_extreme_words_have_the_lanes_of_the_reference(pattern: int) -> None:
    words = np.full(300, pattern, np.uint64)
    lanes = torch_digest.sum_words(host_bits(words))
    assert tuple(map(int, lanes)) == reference.lanes(words.tobytes())


def test_a_version_has_one_digest_wherever_its_weights_are() -> None:
    weights = random_weights(mixed_schema(), 8)
    reports: list[tuple[int, int]] = []
    state = DigestState.of(on_device(weights), progress=lambda *done: reports.append(done))
    np.testing.assert_array_equal(state.lanes, DigestState.of(weights).lanes)
    specs = weights.schema.tensors
    data = [weights.words(spec.name).tobytes() for spec in specs]
    assert state.version_digest() == reference.version_digest(specs, data)
    assert reports[-1] == (weights.schema.num_bytes, weights.schema.num_bytes)


@pytest.mark.parametrize("encoding", ["auto", *ENCODINGS])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_patches_of_weights_on_a_device_are_those_of_weights_on_the_host(
    encoding: str, density: float
) -> None:
    old = random_weights(mixed_schema(), 11)
    new = changed(old, density, 12)
    made = []
    for ours, theirs in ((old, new), (on_device(old), on_device(new)), (old, on_device(new))):
        encoder = PatchEncoder(
            ours, theirs, encoding=encoding, threads=2, max_bucket_elements=256, max_part_bytes=2000
        )
        made.append((list(encoder.parts()), encoder.after.version_digest(), encoder.stats))
    assert made[0] == made[1] == made[2]
    update, digests = decode_parts(made[1][0], old, DigestState.of(old), digest_after=made[1][1])
    update.apply(old)
    assert same_bits(old, new)
    np.testing.assert_array_equal(digests.lanes, DigestState.of(new).lanes)


def test_only_what_changed_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    old = random_weights(mixed_schema(), 13)
    new = changed(old, 0.02, 14)
    wanted = list(PatchEncoder(old, new, encoding="gaps").parts())
    ours, theirs = on_device(old), on_device(new)

    def refuse(*_: object) -> None:
        raise AssertionError("whole spans were read from the device")

    monkeypatch.setattr(DeviceWeights, "read", refuse)
    assert list(PatchEncoder(ours, theirs, encoding="gaps").parts()) == wanted


def test_more_than_2_to_the_32_elements_are_reached_with_64_bit_indices() -> None:
    """Memory that is only promised: pages that nobody writes take no room."""
    n = 2**32 + 4096 + 3
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    words = torch.from_numpy(np.frombuffer(mmap.mmap(-1, n, flags=flags), np.uint8))
    schema = schema_of(t=("U8", (n,)))
    new = DeviceWeights(schema, [words])
    old = DeviceWeights(schema, [torch.zeros(1, dtype=torch.uint8).expand(n)])
    where = [2**31 + 9, 2**32 - 1, 2**32, n - 1]
    words[where] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    pieces = [Slice(0, 2**31, 2**31 + 64), Slice(0, 2**32 - 64, n)]
    bucket = Bucket("U8", tuple(pieces))
    found = torch_changes.find_changes(bucket, old, new)
    assert found.positions.tolist() == [9, 127, 128, 64 + n - 1 - (2**32 - 64)]
    assert found.new.tolist() == [1, 2, 3, 4]
    assert_same_changes(found, find_changes(bucket, HostOnly(old), HostOnly(new)))


def test_a_reader_that_gives_other_words_than_asked_for_is_refused() -> None:
    weights = on_device(random_weights(mixed_schema(), 15))

    class Short(DeviceWeights):
        def device_words(self, name: str, start: int, stop: int) -> torch.Tensor:
            return super().device_words(name, start, stop)[:-1]

    short = Short(weights.schema, [weights.device_words(s.name, 0, s.num_words)
                                   for s in weights.schema.tensors])  # fmt: skip
    bucket = plan_buckets(weights.schema)[0]
    with pytest.raises(CorruptCheckpointError, match="on the device gave"):
        torch_changes.find_changes(bucket, weights, short)


def test_the_codec_does_without_torch_until_weights_are_on_a_device() -> None:
    code = (
        "import sys; import stitch.codec as c; from stitch.codec import *; "
        "from stitch.codec import changes, digest, encode, decode; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
