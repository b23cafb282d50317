"""The safetensors reader and writer: every dtype as views, and nothing in a header believed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4linear.files import FormatError
from fp4linear.files.dtypes import BITS, RAW, raw_shape
from fp4linear.files.safetensors_file import SafetensorsFile
from fp4linear.files.saving import write_safetensors
from tests.checkpoints import Tensor, file_bytes, header_of, write_file

fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def one_of_each() -> dict[str, Tensor]:
    random = np.random.default_rng(1)
    return {dtype: (dtype, [3, 8], random.bytes(3 * 8 * bits // 8)) for dtype, bits in BITS.items()}


VALID = file_bytes(header_of(one_of_each()), b"".join(data for _, _, data in one_of_each().values()))


def touch_everything(file: SafetensorsFile) -> None:
    """Reads every byte of every tensor: what a lying header would turn into a read outside of the file."""
    for name, info in file.tensors.items():
        raw = file.array(name)
        assert raw.nbytes == info.nbytes
        assert raw.shape == raw_shape(info.dtype, info.shape)
        assert len(raw.tobytes()) == info.nbytes


def test_every_dtype_is_a_read_only_view(tmp_path: Path) -> None:
    tensors = one_of_each()
    file = SafetensorsFile(write_file(tmp_path / "all.safetensors", tensors))
    for name, (dtype, shape, data) in tensors.items():
        raw = file.array(name)
        assert raw.tobytes() == data
        assert raw.dtype == RAW[dtype]
        assert not raw.flags.writeable
        assert raw.base is not None
        assert file.tensors[name].shape == tuple(shape)
    assert file.array("F4").shape == (3, 4)


def test_metadata_of_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "null.safetensors"
    path.write_bytes(file_bytes({"__metadata__": None}))
    assert SafetensorsFile(path).metadata == {}


def test_scalars_empty_tensors_and_odd_offsets(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "one": ("U8", [1], b"\x07"),
        "scalar": ("F32", [], np.float32(2.5).tobytes()),  # at an odd offset
        "empty": ("BF16", [0, 4], b""),
    }
    file = SafetensorsFile(write_file(tmp_path / "odd.safetensors", tensors))
    assert file.array("scalar") == np.float32(2.5)
    assert file.array("scalar").shape == ()
    assert file.array("empty").shape == (0, 4)


def test_views_outlive_the_name(tmp_path: Path) -> None:
    path = write_file(tmp_path / "gone.safetensors", {"a": ("U8", [4], b"abcd")})
    raw = SafetensorsFile(path).array("a")
    path.unlink()
    assert raw.tobytes() == b"abcd"


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least 8"),
        (b"\x02\0\0", "at least 8"),
        (file_bytes({}, length=2**63), "expected at most"),
        (file_bytes({}, length=2**64 - 1), "expected at most"),
        (file_bytes({}, length=3), "truncated"),
        (file_bytes({}, length=0), "doesn't start with"),
        (file_bytes(b"[]"), "doesn't start with"),
        (file_bytes(b"{"), "can't be read"),
        (file_bytes(b'{"\xff": 1}'), "can't be read"),
        (file_bytes(b'{"\\ud800": 1}'), "can't be read"),
        (file_bytes(b'{"a":' * 100_000), "nested too deeply"),
        (file_bytes(b'{"a": NaN}'), "NaN"),
        (file_bytes(b'{"a": 1' + b"0" * 5000 + b"}"), "digits"),
        (file_bytes(b'{"a": 1, "a": 1}'), "twice"),
        (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_bytes({"__metadata__": []}), "__metadata__"),
        (file_bytes({"a": []}, b"1234"), "expected an object"),
        (file_bytes({"a": {}}, b"1234"), "expected dtype, shape and data_offsets"),
        (file_bytes({"a": ENTRY | {"dtype": "U9"}}, b"1234"), "'U9' is unknown"),
        (file_bytes({"a": ENTRY | {"dtype": 8}}, b"1234"), "unknown"),
        (file_bytes({"a": ENTRY | {"shape": 4}}, b"1234"), "shape 4"),
        (file_bytes({"a": ENTRY | {"shape": [4.0]}}, b"1234"), "integers"),
        (file_bytes({"a": ENTRY | {"shape": [True, 4]}}, b"1234"), "integers"),
        (file_bytes({"a": ENTRY | {"shape": [-2, -2]}}, b"1234"), "impossible"),
        (file_bytes({"a": ENTRY | {"shape": [0, 2**63]}}, b"1234"), "impossible"),
        (file_bytes({"a": ENTRY | {"shape": [1] * 99}}, b"1234"), "at most 32"),
        (file_bytes({"a": ENTRY | {"shape": [5]}}, b"1234"), "4 bytes, but U8 [5] needs 5"),
        (file_bytes({"a": ENTRY | {"dtype": "F4", "shape": [7]}}, b"1234"), "needs 3.5"),
        (file_bytes({"a": ENTRY | {"data_offsets": [0]}}, b"1234"), "two integers"),
        (file_bytes({"a": ENTRY | {"data_offsets": [0, "4"]}}, b"1234"), "two integers"),
        (file_bytes({"a": ENTRY | {"data_offsets": [-4, 0]}}, b"1234"), "0 <= begin <= end"),
        (file_bytes({"a": ENTRY | {"data_offsets": [4, 0]}}, b"1234"), "0 <= begin <= end"),
        (file_bytes({"a": ENTRY | {"data_offsets": [0, 2**62]}}, b"1234"), "outside"),
        (file_bytes({"a": ENTRY}, b"123"), "outside"),
        (file_bytes({"a": ENTRY}, b"12345"), "belong to none"),
        (file_bytes({"a": ENTRY | {"data_offsets": [1, 5]}}, b"12345"), "hole"),
        (file_bytes({"a": ENTRY, "b": ENTRY}, b"1234"), "overlaps"),
    ],
)
def test_damage_is_a_format_error_that_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(path))


@pytest.mark.parametrize("cut", range(0, len(VALID), 97))
def test_truncated_anywhere(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(VALID[:cut])
    with pytest.raises(FormatError):
        SafetensorsFile(path)


def check_as_the_official_reader(path: Path, content: bytes) -> None:
    """Refused with FormatError, or accepted with the bytes that the safetensors package finds."""
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except FormatError:
        return
    touch_everything(file)
    official = dict(safetensors.deserialize(content))
    assert set(official) == set(file.tensors)
    for name, info in file.tensors.items():
        assert file.array(name).tobytes() == bytes(official[name]["data"])
        assert list(info.shape) == list(official[name]["shape"])
        assert info.dtype == official[name]["dtype"]


@fuzz
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 9), st.binary(max_size=9)), max_size=4),
    cut=st.none() | st.integers(0, len(VALID)),
)
def test_fuzz_mutated_file(tmp_path: Path, edits: list[tuple[int, int, bytes]], cut: int | None) -> None:
    content = bytearray(VALID)
    for position, removed, added in edits:
        content[position : position + removed] = added
    check_as_the_official_reader(tmp_path / "mutated.safetensors", bytes(content[:cut]))


sizes = st.integers(-3, 40) | st.sampled_from([2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64 - 1, 10**30])
anything = st.recursive(
    st.none() | st.booleans() | sizes | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(BITS)) | anything,
        "shape": st.lists(sizes, max_size=3) | anything,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | anything,
    }
)


@fuzz
@given(
    header=st.dictionaries(st.text(max_size=3), entries | anything, max_size=3),
    data=st.binary(max_size=40),
    length=st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 300),
)
def test_fuzz_lying_header(tmp_path: Path, header: dict[str, object], data: bytes, length: int | None) -> None:
    check_as_the_official_reader(tmp_path / "lying.safetensors", file_bytes(header, data, length))


@fuzz
@given(
    specs=st.dictionaries(
        st.text(min_size=1, max_size=4).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    seed=st.integers(0, 2**32),
)
def test_written_files_are_read_alike(tmp_path: Path, specs: dict[str, tuple[str, list[int]]], seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = {}
    shapes = {}
    for name, (dtype, dims) in specs.items():
        shape = (*dims, 8)  # whole bytes for every dtype
        shapes[name] = (dtype, shape)
        raw = np.frombuffer(random.bytes(int(np.prod(shape)) * BITS[dtype] // 8), RAW[dtype])
        arrays[name] = np.asfortranarray(raw.reshape(raw_shape(dtype, shape)))  # strided on purpose
    path = tmp_path / "written.safetensors"
    order = list(arrays)
    random.shuffle(order)
    write_safetensors(path, shapes, ((name, arrays[name]) for name in order), {"key": "value"})
    content = path.read_bytes()
    check_as_the_official_reader(path, content)
    file = SafetensorsFile(path)
    assert file.metadata == {"key": "value"}
    assert set(file.tensors) == set(arrays)
    for name, info in file.tensors.items():
        assert file.array(name).tobytes() == arrays[name].tobytes()
        assert info.begin % max(BITS[info.dtype] // 8, 1) == 0


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="never came"):
        write_safetensors(path, {"a": ("U8", (1,))}, [])
    with pytest.raises(ValueError, match="expected uint8"):
        write_safetensors(path, {"a": ("U8", (1,))}, [("a", np.zeros(2, np.uint8))])
    with pytest.raises(ValueError, match="came twice"):
        write_safetensors(path, {"a": ("U8", (1,))}, [("a", np.zeros(1, np.uint8))] * 2)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_header_is_padded_json(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a": ("F32", ()), "b": ("U8", (1,))}, [("b", np.ones(1, np.uint8)), ("a", np.float32(3))])
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["a"]["data_offsets"] == [0, 4]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="can't be read"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(FormatError, match="can't be read"):
        SafetensorsFile(tmp_path)
