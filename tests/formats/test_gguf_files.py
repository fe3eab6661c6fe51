"""GGUF models in several files, and files that would take for ever to read."""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import TYPES, write_model
from hub_server import Hub
from references.tiny import batch

from jaxrl import load_model
from jaxrl.checkpoint.fingerprint import digest_model
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.errors import UserError
from jaxrl.formats import gguf as gguf_module
from jaxrl.formats.gguf import GgufFile, open_gguf
from jaxrl.formats.weights import gguf_parts

TEXT, ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "m.gguf", "llama")


def split(whole: Path, folder: Path, each: int = 6) -> list[Path]:
    """The model in files of so many tensors, as the library's writer splits it."""
    read = gguf.GGUFReader(whole)
    folder.mkdir(exist_ok=True)
    out = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=each)
    for key, field in read.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            out.add_key_value(key, field.contents(), field.types[0])
    for tensor in read.tensors:
        out.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return sorted(folder.glob("m-*.gguf"))


@pytest.mark.parametrize("part", [0, 1, -1])
def test_any_of_its_files_is_the_model(part: int, whole: Path, tmp_path: Path) -> None:
    files = split(whole, tmp_path / "split")
    assert len(files) > 2
    tokens, mask = batch(64)
    ours, right = (load_model(place).logits(tokens, mask) for place in (files[part], whole))
    np.testing.assert_array_equal(ours, right)
    source = resolve_model(files[part])
    assert source.config == resolve_model(whole).config
    assert source.tensors.file("model.norm.weight") in files


def test_a_folder_with_the_files_of_one_model_is_that_model(whole: Path, tmp_path: Path) -> None:
    files = split(whole, tmp_path / "split")
    assert resolve_model(tmp_path / "split").path == files[0]


def test_files_of_a_model_that_are_missing_or_of_another_are_named(
    whole: Path, tmp_path: Path
) -> None:
    files = split(whole, tmp_path / "split")
    renamed = tmp_path / "one.gguf"
    shutil.copy(files[0], renamed)
    with pytest.raises(UserError, match=f"is one of {len(files)} files of a model"):
        resolve_model(renamed)
    others = split(whole, tmp_path / "others", each=4)
    shutil.copy(others[0], files[1])
    with pytest.raises(UserError, match="-00002-of-.*: tensor .* is in .*-00001-of-.* too"):
        resolve_model(files[0])
    for missing in (files[1], files[0]):
        missing.unlink()
        with pytest.raises(UserError, match=f"{re.escape(str(missing))} is missing: the model"):
            resolve_model(files[2])


def test_a_change_of_any_file_is_noticed(whole: Path, tmp_path: Path) -> None:
    files = split(whole, tmp_path / "split")
    before, opened = digest_model(files[0]), open_gguf(files[0])
    assert open_gguf(files[0]) is opened
    content = bytearray(files[-1].read_bytes())
    content[-1] ^= 1
    files[-1].write_bytes(content)
    os.utime(files[-1], (1, 1))
    assert digest_model(files[0]) != before and open_gguf(files[0]) is not opened


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.gguf", ["a.gguf"]),
        ("a-00001-of-00001.gguf", ["a-00001-of-00001.gguf"]),
        ("a-00002-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]),
        ("x/a-00001-of-00002.gguf", ["x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf"]),
        ("a-00003-of-00002.gguf", ["a-00003-of-00002.gguf"]),
        ("a-1-of-2.gguf", ["a-1-of-2.gguf"]),
    ],
)
def test_names_of_parts(name: str, parts: list[str]) -> None:
    assert gguf_parts(name) == parts


def test_all_files_of_a_model_on_a_hub_are_fetched(whole: Path, hub: Hub, tmp_path: Path) -> None:
    files = split(whole, tmp_path / "split")
    hub.add("org/tiny", {f"q/{file.name}": file.read_bytes() for file in files})
    source = resolve_model(f"org/tiny/q/{files[1].name}")
    assert source.config == resolve_model(whole).config
    assert len(hub.fetched(".gguf")) == len(files)


# Files that are made to harm


def raw(path: Path, keys: list[bytes], tensors: bytes = b"", counts: Any = None) -> Path:
    """A file of these keys and values, as they stand in it."""
    n_tensors, n_keys = (0, len(keys)) if counts is None else counts
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys)
    path.write_bytes(head + b"".join(keys) + tensors + bytes(4096))
    return path


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def array(of: int, n: int, content: bytes) -> bytes:
    return struct.pack("<IQ", of, n) + content


MANY = 1 << 22
LLAMA = key("general.architecture", TEXT, text(b"llama"))
BOMBS = {
    "empty texts": (
        [key("x", ARRAY, array(TEXT, MANY + 1, bytes(8 * MANY)))],
        "4194305 elements",
        None,
    ),
    "two arrays": (
        [key(name, ARRAY, array(0, MANY - 9, bytes(MANY - 9))) for name in "ab"],
        "arrays of 8388590 elements; at most",
        None,
    ),
    "arrays within arrays": (
        [key("x", ARRAY, array(ARRAY, 1000, array(0, 0, b"") * 1000))],
        "not read: arrays within arrays",
        None,
    ),
    "keys": ([key("x", 0, b"0")], "100000 keys of metadata; at most", (0, 100_000)),
    "tensors": ([LLAMA], "100000 tensors; at most", (100_000, 1)),
    "a text of 2^63 bytes": (
        [key("x", ARRAY, array(TEXT, 2, struct.pack("<Q", 1 << 63)))],
        "truncated",
        None,
    ),
    "an architecture that is no UTF-8": (
        [key("general.architecture", TEXT, text(b"\xff\xfe"))],
        "general.architecture is no text in UTF-8",
        None,
    ),
    "a key that is no UTF-8": (
        [text(b"\xff") + struct.pack("<I", TEXT) + text(b"x")],
        "truncated, or no GGUF",
        None,
    ),
    "an architecture that is a number": (
        [key("general.architecture", 0, b"\1")],
        "1 is not supported",
        None,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_file_announces_is_bounded(name: str, tmp_path: Path) -> None:
    keys, told, counts = BOMBS[name]
    file = raw(tmp_path / "m.gguf", keys, counts=counts)
    began = time.monotonic()
    with pytest.raises(UserError, match=told) as error:
        resolve_model(file)
    assert time.monotonic() - began < 5 and len(str(error.value)) < 600


def test_as_many_elements_as_are_read_take_a_moment(tmp_path: Path) -> None:
    """The library's own reader would take half a minute."""
    n = gguf_module.MOST_ELEMENTS // 4
    file = raw(tmp_path / "m.gguf", [LLAMA, key("x", ARRAY, array(TEXT, n, text(b"ab") * n))])
    began = time.monotonic()
    opened = GgufFile(file)
    assert time.monotonic() - began < 10
    assert opened.meta("x") == ["ab"] * n


@pytest.mark.parametrize("kind", ["INT8", "UINT16", "FLOAT32", "BOOL", "INT64", "STRING"])
def test_arrays_are_what_the_library_reads(kind: str, tmp_path: Path) -> None:
    values: list[Any] = {
        "BOOL": [True, False],
        "STRING": ["", "ä", "b"],
        "FLOAT32": [0.5, -1.0],
    }.get(kind, [1, 2, 3])
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    out.add_key_value("x", values, ARRAY, gguf.GGUFValueType[kind])
    out.add_uint32("after", 7)
    out.add_tensor("t", np.ones(4, np.float32), raw_dtype=TYPES["F32"])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert ours.meta("x") == theirs.fields["x"].contents() == values
    assert ours.meta("after") == 7


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("llama.block_count", 10**7, "num_hidden_layers=10000000 must .* at most"),
        ("llama.block_count", 0, "num_hidden_layers=0 must .* at least 1"),
        ("llama.attention.head_count", 0, "num_attention_heads=0 must .* at least 1"),
        ("llama.embedding_length", "x", "as a config.json.*hidden_size='x' must"),
        ("llama.context_length", [1, 2], "max_position_embeddings=.* must"),
        ("llama.attention.head_count_kv", "x", "cannot be understood"),
        ("llama.feed_forward_length", 2**31 - 1, "mlp.gate_proj.weight has shape"),
        ("llama.rope.freq_base", "x", "rope_theta='x' must"),
        ("tokenizer.ggml.eos_token_id", 10**6, "eos_token_id=1000000 is no token"),
        ("tokenizer.ggml.eos_token_id", "x", "eos_token_id=.* is not a token id"),
    ],
)
def test_metadata_that_cannot_be_are_named(
    name: str, value: Any, told: str, whole: Path, tmp_path: Path
) -> None:
    read = gguf.GGUFReader(whole)
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    fields = {k: (f.contents(), f.types[0]) for k, f in read.fields.items() if "GGUF" not in k}
    del fields["general.architecture"]
    kinds = {int: gguf.GGUFValueType.UINT32, str: TEXT, list: ARRAY}
    fields[name] = value, kinds[type(value)]
    for k, (content, kind) in fields.items():
        sub = gguf.GGUFValueType.UINT32 if kind == ARRAY else None
        out.add_key_value(k, content, kind, sub)
    for tensor in read.tensors:
        out.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    began = time.monotonic()
    with pytest.raises(UserError, match=told) as error:
        resolve_model(tmp_path / "m.gguf")
    assert time.monotonic() - began < 5 and str(tmp_path) in str(error.value)


def test_a_pipe_is_no_file_of_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for attempt in (resolve_model, open_gguf, GgufFile):
        with pytest.raises(UserError, match="there is no such file"):
            attempt(tmp_path / "m.gguf")
