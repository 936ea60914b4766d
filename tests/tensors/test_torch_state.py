"""Live torch tensors: bits in logical order, ties, names, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stitch.errors import SchemaMismatchError, UnsupportedDtypeError, UsageError
from stitch.tensors.reader import Words, word_dtype
from stitch.tensors.torch_state import (
    DTYPE_NAMES,
    aliases,
    copy_words,
    named_tensors,
    select,
    spec_of,
    words_of,
)
from stitch.types import Schema, TensorSpec


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def copied(spec: TensorSpec, tensor: object) -> Words:
    out = np.full(spec.num_words, 0xA5, word_dtype(spec))
    copy_words(spec, tensor, out)
    return out


def contiguous_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def schema_of(tensors: dict[str, torch.Tensor]) -> Schema:
    return Schema.of(spec_of(name, tensor) for name, tensor in tensors.items())


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "permuted": lambda t: t.permute(2, 0, 1),
    "sliced": lambda t: t[1:, ::2],
    "narrowed": lambda t: t.narrow(2, 1, 2),
    "expanded": lambda t: t[:, :1].expand(-1, 7, -1),
    "empty slice": lambda t: t[:0],
    "one element": lambda t: t[0, 0, :1],
    "size-1 dimension": lambda t: t[:1].transpose(0, 1),
    "odd strides of a size-1 dimension": lambda t: t[0].as_strided((1, 6), (977, 1)),
}


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_copied_in_logical_order_bit_for_bit(dtype: torch.dtype, layout: str) -> None:
    base = random_bits(dtype, 4, 6, 4)
    before = contiguous_bytes(base)
    tensor = LAYOUTS[layout](base)
    strides = tensor.stride()
    spec = spec_of("t", tensor)
    assert copied(spec, tensor).tobytes() == contiguous_bytes(tensor)
    assert tensor.stride() == strides
    assert contiguous_bytes(base) == before


def test_channels_last_is_copied_in_logical_order() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert copied(spec_of("t", tensor), tensor).tobytes() == contiguous_bytes(tensor)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 3), (1,)])
def test_scalars_and_empty_tensors_are_copied(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, *shape)
    if DTYPE_NAMES[dtype] == "F4" and not shape:
        with pytest.raises(UnsupportedDtypeError, match="at least one dimension"):
            spec_of("t", tensor)
        return
    assert copied(spec_of("t", tensor), tensor).tobytes() == contiguous_bytes(tensor)


def test_packed_f4_counts_logical_elements_in_the_shape_and_bytes_in_the_words() -> None:
    spec = spec_of("t", random_bits(torch.float4_e2m1fn_x2, 3, 5))
    assert (spec.dtype, spec.shape, spec.num_bytes, spec.num_words) == ("F4", (3, 10), 15, 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_payloads_signed_zeros_and_infinities_keep_their_bits(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int64)
    bits = (patterns << (8 * size - 16)) | 1 if size > 2 else patterns
    tensor = bits.to({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).view(dtype)
    for view in (tensor, tensor.reshape(2, -1).t()):
        assert copied(spec_of("t", view), view).tobytes() == contiguous_bytes(view)


def test_a_pending_conjugation_or_negation_is_carried_out() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    expected = np.array([1 - 2j, 3 + 4j], np.complex64)
    assert copied(spec_of("t", conjugate), conjugate).tobytes() == expected.tobytes()
    negative = conjugate.imag
    assert negative.is_neg()
    expected = np.array([-2, 4], np.float32)
    assert copied(spec_of("t", negative), negative).tobytes() == expected.tobytes()
    with pytest.raises(UsageError, match="pending"):
        words_of(conjugate)


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16])
def test_floats_are_rounded_to_the_served_dtype_as_torch_does_it(source: torch.dtype) -> None:
    tensor = torch.randn(50, 30, dtype=torch.float64).mul(1e3).to(source)
    for view in (tensor, tensor.t(), tensor[::3, ::2], tensor.requires_grad_()):
        spec = TensorSpec.of("t", "BF16", view.shape)
        assert copied(spec, view).tobytes() == contiguous_bytes(view.bfloat16())


def test_only_narrowing_between_floats_is_a_cast() -> None:
    half = TensorSpec.of("t", "F16", [2])
    assert copied(half, torch.tensor([1.0, 1e6])).tobytes() == np.float16([1, np.inf]).tobytes()
    for dtype, served in [
        (torch.bfloat16, "F32"),
        (torch.float16, "F32"),
        (torch.bfloat16, "F16"),
        (torch.int16, "BF16"),
        (torch.uint8, "BOOL"),
        (torch.int8, "U8"),
        (torch.float8_e4m3fn, "BF16"),
    ]:
        spec = TensorSpec.of("t", served, [2])
        with pytest.raises(SchemaMismatchError, match=f"wanted {served}"):
            copied(spec, torch.zeros(2, dtype=torch.uint8).to(dtype))


@pytest.mark.parametrize(
    ("got", "wanted"), [((), (1,)), ((1,), ()), ((2, 3), (3, 2)), ((6,), (2, 3))]
)
def test_as_many_elements_in_another_shape_are_refused(
    got: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    spec = TensorSpec.of("t", "F32", wanted)
    with pytest.raises(SchemaMismatchError, match="as many elements, another shape"):
        copied(spec, torch.zeros(got))


def test_the_output_must_fit() -> None:
    spec = TensorSpec.of("t", "F32", [3])
    for out in (np.zeros(4, np.uint32), np.zeros(3, np.uint16), np.zeros((3, 1), np.uint32)):
        with pytest.raises(UsageError, match="does not fit"):
            copy_words(spec, torch.zeros(3), out)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_words_in_place_are_the_tensors_own_memory(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, 3, 4)
    words = words_of(tensor)
    assert words.tobytes() == contiguous_bytes(tensor)
    words[:] = 0
    assert not any(contiguous_bytes(tensor))
    assert words_of(random_bits(dtype, 0, 4)).size == 0


def test_words_in_place_work_for_parameters_scalars_and_odd_size_1_strides() -> None:
    parameter = nn.Parameter(torch.ones(3))
    words_of(parameter)[1] = 0
    assert parameter.tolist() == [1, 0, 1]
    assert words_of(torch.tensor(1.0)).tolist() == [0x3F800000]
    odd = torch.ones(8).as_strided((1, 6), (977, 1))
    assert words_of(odd).size == 6


def test_words_in_place_of_a_strided_tensor_are_refused() -> None:
    with pytest.raises(UsageError, match=r"contiguous CPU tensor.*strides \(1, 2\)"):
        words_of(torch.zeros(3, 2).t())


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias_of_router", torch.zeros(3))
        self.register_buffer("rope", torch.zeros(5), persistent=False)


NAMES = ["bias_of_router", "embed.weight", "layer.bias", "layer.weight"]


def served(model: nn.Module, *, without: str = "head.weight") -> Schema:
    state = {name: value for name, value in model.state_dict().items() if name != without}
    return schema_of(state)


@pytest.mark.parametrize("without", ["head.weight", "embed.weight", "neither"])
def test_a_tied_model_serves_whichever_name_the_schema_lists(without: str) -> None:
    model = TiedModel()
    schema = served(model, without=without)
    chosen = {spec.name: tensor for spec, tensor in select(schema, model)}
    assert list(chosen) == list(schema.index)
    for source in (
        model.state_dict(),
        list(model.state_dict().items()),
        model.state_dict().items(),
    ):
        assert [spec.name for spec, _ in select(schema, source)] == list(schema.index)


def test_persistent_buffers_are_served_with_their_current_value_and_others_are_not() -> None:
    model = TiedModel()
    schema = served(model)
    assert list(schema.index) == NAMES
    model.bias_of_router += 3
    values = {spec.name: copied(spec, tensor) for spec, tensor in select(schema, model)}
    assert values["bias_of_router"].view(np.float32).tolist() == [3, 3, 3]


def test_wrapped_models_have_the_names_of_the_plain_one() -> None:
    model = TiedModel()
    schema = served(model)
    wrapper = nn.Module()
    wrapper.module = nn.Module()
    wrapper.module._orig_mod = model
    assert next(iter(wrapper.state_dict())).startswith("module._orig_mod.")
    assert [spec.name for spec, _ in select(schema, wrapper)] == NAMES
    assert sorted(name for name, _ in named_tensors(wrapper)) == sorted([*NAMES, "head.weight"])


def test_an_untied_head_that_the_schema_lacks_is_unknown() -> None:
    model = TiedModel()
    schema = served(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(SchemaMismatchError, match=r"1 unknown: head\.weight"):
        select(schema, model)


def test_equal_but_separate_views_and_empty_tensors_are_not_ties() -> None:
    base = torch.zeros(4, 4)
    pairs = [
        ("whole", base),
        ("again", base.detach()),
        ("transposed", base.t()),
        ("row", base[0]),
        ("other row", base[1]),
        ("other dtype", base.view(torch.int32)),
        ("empty", torch.zeros(0)),
        ("empty too", torch.zeros(0)),
        ("empty slice", base[:0]),
        ("copy", base.clone()),
        ("array", np.zeros(3)),
    ]
    assert aliases(pairs) == [frozenset({"whole", "again"})]


def test_a_tied_numpy_array_is_recognised() -> None:
    array = np.zeros((2, 2), np.float32)
    pairs = [("a", array), ("b", array[:]), ("c", array.T[:1]), ("d", array[:0]), ("e", array[:0])]
    assert aliases(pairs) == [frozenset({"a", "b"})]


def test_all_problems_are_listed_before_the_first_tensor_comes() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(1), "d": torch.zeros(1)}
    schema = schema_of({**state, "c": torch.zeros(1)})
    with pytest.raises(SchemaMismatchError, match="1 missing: c"):
        select(schema, state)
    reshaped = {**state, "a": torch.zeros(3, 2), "b": torch.zeros(()), "c": torch.zeros(1).int()}
    with pytest.raises(SchemaMismatchError, match=r"3 of another dtype or shape.*a: .*b: .*c: "):
        select(schema, reshaped)


def streamed(pairs: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from pairs.items()


def test_an_iterable_streams_and_reports_everything_at_its_end() -> None:
    state = {"module.a": torch.zeros(2, 3), "b": torch.zeros(1)}
    schema = schema_of({"a": torch.zeros(2, 3), "b": torch.zeros(1)})
    assert [spec.name for spec, _ in select(schema, streamed(state))] == ["a", "b"]
    wrong = {"a": torch.zeros(3, 2), "x": torch.zeros(1), "y": torch.zeros(1)}
    with pytest.raises(
        SchemaMismatchError, match=r"2 unknown: x, y; 1 missing: b; 1 of another dtype or shape: a"
    ):
        list(select(schema, streamed(wrong)))
    with pytest.raises(SchemaMismatchError, match="both stand for the tensor 'a'"):
        list(select(schema, streamed({**state, "a": torch.zeros(2, 3)})))


def test_an_iterable_is_consumed_one_tensor_at_a_time() -> None:
    alive: list[str] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            alive.append(name)
            yield name, torch.zeros(2)

    schema = schema_of({name: torch.zeros(2) for name in "abc"})
    first = next(select(schema, gathered()))
    assert (first[0].name, alive) == ("a", ["a"])


def test_memory_reused_between_items_of_an_iterable_is_not_taken_for_a_tie() -> None:
    buffer = torch.zeros(2)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate(["a", "typo"]):
            yield name, buffer.fill_(number)

    with pytest.raises(SchemaMismatchError, match=r"1 unknown: typo.*second names of tied weights"):
        list(select(schema_of({"a": buffer}), gathered()))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "must be a module"),
        (torch.zeros(2), "must be a module"),
        ("weights", "must be a module"),
        ([torch.zeros(2)], "pairs"),
        ([("a", torch.zeros(2), 1)], "pairs"),
        ([(1, torch.zeros(2))], "pairs"),
        ({"a": [1, 2]}, "'a' is not a tensor"),
        ({"a": None}, "'a' is not a tensor"),
    ],
)
def test_sources_that_hold_no_tensors_are_refused(source: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(named_tensors(source))
    with pytest.raises(UsageError, match=words):
        list(select(schema_of({"a": torch.zeros(2)}), source))


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapping(torch.Tensor):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.zeros(2).to_sparse(), "not a plain strided tensor"),
        (lambda: torch.zeros(2, 2).to_mkldnn(), "not a plain strided tensor"),
        (lambda: freed(torch.zeros(2)), "storage was freed"),
        (lambda: torch.zeros(2).as_subclass(Wrapping), "wraps others"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "cannot hold torch.complex128"),
    ],
)
def test_tensors_without_plain_data_are_refused(make: Any, words: str) -> None:
    tensor = make()
    for action in (
        lambda: spec_of("t", tensor),
        lambda: copied(TensorSpec.of("t", "F32", [2]), tensor),
        lambda: select(schema_of({"t": torch.zeros(2)}), {"t": tensor}),
    ):
        with pytest.raises(UsageError, match=f"'t'.*{words}"):
            action()


def test_a_sharded_tensor_is_refused_with_advice(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        sharded = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(UsageError, match=r"'t' is sharded over ranks.*full_tensor"):
            select(schema_of({"t": torch.zeros(4)}), {"t": sharded})
    finally:
        dist.destroy_process_group()


def test_two_freed_tensors_are_not_taken_for_a_tie() -> None:
    state = {"a": freed(torch.zeros(2)), "b": freed(torch.zeros(2))}
    assert aliases(list(state.items())) == []


def test_expert_stacks_keep_their_first_axis_first() -> None:
    stack = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    rows = copied(spec_of("t", stack), stack).view(np.float32).reshape(2, 12)
    assert rows[1].tolist() == stack[1].flatten().tolist()
