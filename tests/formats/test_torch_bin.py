"""Torch's `.bin` files: what torch wrote is read bit by bit, and nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.formats.torch_bin import TorchBinFolder, open_weights

REFERENCES = Path(__file__).parent.parent / "references"
EXPECTED = {
    name.removeprefix("formats/"): values
    for name, values in np.load(REFERENCES / "encoders.npz").items()
    if name.startswith("formats/")
}
NUMBERS = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool", "uint8")
FLOATS = b"ctorch\nFloatStorage\n"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copyfile(REFERENCES / "formats.bin", tmp_path / "pytorch_model.bin")
    return tmp_path


def archive(folder: Path, pickled: bytes, name: str = "pytorch_model.bin", **files: bytes) -> Path:
    """A file in torch's format around a pickle of our own, with one storage of four numbers."""
    with zipfile.ZipFile(folder / name, "w") as out:
        out.writestr("archive/data.pkl", pickled)
        for member, content in ({"data/0": np.arange(4, dtype="<f4").tobytes()} | files).items():
            out.writestr(f"archive/{member}", content)
    return folder


def tensor(
    key: str = "0", offset: int = 0, shape: tuple[Any, ...] = (2, 2), strides: Any = (2, 1)
) -> bytes:
    """Opcodes that leave {"w": tensor} on the stack, as torch pickles it, and stop."""

    def number(n: int) -> bytes:
        return b"I%d\n" % n

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(Vstorage\n" + FLOATS + b"V%s\nVcpu\nI4\ntQ" % key.encode()
    args = b"(" + storage + number(offset) + numbers(shape) + numbers(strides) + b"I00\n}t"
    return b"\x80\x02}Vw\n" + TENSOR + args + b"Rs."


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        TorchBinFolder(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_kind_of_tensor_is_what_torch_wrote(folder: Path, name: str) -> None:
    tensors, expected = TorchBinFolder(folder), EXPECTED[name]
    assert tensors.shape(name) == expected.shape
    whole = tensors.read(name, tuple(slice(0, n) for n in expected.shape))
    assert whole.dtype == jnp.dtype(name if name in NUMBERS else "float32")
    np.testing.assert_array_equal(whole.astype(expected.dtype), expected)
    box = tuple(slice(n // 3, n) for n in expected.shape)
    np.testing.assert_array_equal(tensors.read(name, box).astype(expected.dtype), expected[box])


def test_a_hand_made_archive_is_read(tmp_path: Path) -> None:
    """So that the refusals below are about what they change."""
    tensors = TorchBinFolder(archive(tmp_path, tensor(offset=1, shape=(2,), strides=(2,))))
    assert tensors.read("w", (slice(0, 2),)).tolist() == [1.0, 3.0]
    assert tensors.file("w") == tensors.file("absent") == tmp_path / "pytorch_model.bin"
    assert tensors.shape("absent") is None


@pytest.mark.parametrize(
    ("pickled", "told"),
    [
        (b"cos\nsystem\n(Vtouch owned\ntR.", "os.system"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "posix.system"),
        (b"cbuiltins\neval\n(V1\ntR.", "builtins.eval"),
        (b"cbuiltins\ngetattr\n(V1\ntR.", "builtins.getattr"),
        (b"ctorch\nload\n.", "torch.load"),
        (b"(Vx\nios\nsystem\n.", "os.system"),
        (pickle.dumps(Path("x")), "pathlib"),
        (b"ctorch._utils\n_rebuild_tensor_v2.__call__\n.", "_rebuild_tensor_v2.__call__"),
    ],
)
def test_any_other_name_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickled: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(archive(tmp_path, pickled))
    assert told in message and "safetensors" in message and "pytorch_model.bin" in message
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]


def doubled(levels: int) -> bytes:
    """Opcodes that leave a tuple of two equal tuples of two equal tuples, and so on."""
    return b"\x80\x02)" + b"".join(b"q\x00h\x00\x86" for _ in range(levels))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}" + doubled(200)[2:] + b"I1\ns.",
        b"\x80\x02}(" + doubled(200)[2:] + b"I1\nu.",
        b"\x80\x02(" + doubled(200)[2:] + b"I1\nd.",
        b"\x80\x04\x8f(" + doubled(200)[2:] + b"\x90.",
        b"ccollections\nOrderedDict\n((" + doubled(200)[2:] + b"I1\ntttR.",
        b"\x80\x02(Vstorage\n" + FLOATS + doubled(200)[2:] + b"tQ.",
        TENSOR + b"(" + tensor()[: tensor().index(b"tQ")][-60:] + b"I0\n" + doubled(200)[2:],
    ],
)
def test_keys_that_double_with_each_level_are_refused_at_once(
    tmp_path: Path, pickled: bytes
) -> None:
    """A tuple of a tuple twice, 200 deep, would take 2^200 steps to hash or to show."""
    assert "its pickle cannot be read" in refusal(archive(tmp_path, pickled))


@pytest.mark.parametrize(
    ("pickled", "told"),
    [
        (tensor(shape=(2, 3), strides=(3, 1)), "beyond its storage of 4"),
        (tensor(offset=3), "beyond its storage of 4"),
        (tensor(offset=-1), "whole numbers"),
        (tensor(strides=(2, -1)), "whole numbers"),
        (tensor(strides=(1,)), "strides"),
        (tensor(shape=(2**62,) * 200_000, strides=(0,) * 200_000), "more dims"),
        (tensor(shape=(2**64,), strides=(0,)), "larger numbers"),
        (tensor(shape=(0, 2**70), strides=(0, 0)), "larger numbers"),
        (tensor(key="7" * 100_000), "is not in the archive"),
        (b"c" + b"x" * 100_000 + b"\ny\n.", "which no tensor needs"),
        (tensor(key="7"), "storage '7' is not in the archive"),
        (tensor()[:-20], "cannot be read"),
        (TENSOR + b"(Vdata\nI0\n(t(tI00\n}tR.", "without a storage"),
        (TENSOR + b"}Vcode\nI1\nsb.", "cannot be read"),  # sets an attribute of the callable
        (tensor()[:-2] + b"}Vstrides\n(I-9\nI-9\ntsbs.", "no mapping"),  # ... of a tensor
        (FLOATS + b")R.", "cannot be read"),  # calls a storage's type
        (doubled(200) + b")R.", "neither a word nor a number"),  # calls a tuple
        (pickle.dumps([1, 2]), "list"),
    ],
)
def test_tensors_that_are_not_right_are_told(tmp_path: Path, pickled: bytes, told: str) -> None:
    assert told in refusal(archive(tmp_path, pickled))


def test_files_that_are_no_archive_of_torch_are_told(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    assert "torch before 1.6" in refusal(tmp_path) and "weights_only=True" in refusal(tmp_path)
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("word/document.xml", b"")
    assert "no single data.pkl" in refusal(tmp_path)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", tensor())
    assert "compressed" in refusal(tmp_path)
    archive(tmp_path, tensor(), byteorder=b"big")
    assert "big-endian" in refusal(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        open_weights(tmp_path)


def test_the_files_of_an_index_are_read_together(tmp_path: Path) -> None:
    archive(tmp_path, tensor(), "a.bin")
    archive(tmp_path, tensor().replace(b"Vw\n", b"Vv\n"), "b.bin", **{"data/0": b"\0" * 16})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "v": "b.bin"}}))
    tensors = open_weights(tmp_path)
    everything = (slice(0, 2), slice(0, 2))
    assert tensors.read("w", everything).tolist() == [[0, 1], [2, 3]]
    assert tensors.read("v", everything).tolist() == [[0, 0], [0, 0]]
    assert tensors.file("v") == tmp_path / "b.bin"
    (tmp_path / "b.bin").unlink()
    with pytest.raises(UserError, match=r"b\.bin is missing, but .*index\.json names it"):
        open_weights(tmp_path)


def many_digits(digits: int) -> bytes:
    """A tensor with a dim of so many digits, as the pickle opcode of long numbers has it."""
    number = (10 ** (digits - 1)).bit_length() // 8 + 1
    content = (256 ** (number - 1)).to_bytes(number, "little")
    long = b"\x8b" + number.to_bytes(4, "little") + content
    return tensor(shape=(), strides=()).replace(b"(t(t", b"(" + long + b"t(I0\nt", 1)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (many_digits(900_000), "larger numbers"),
        ({"byteorder": b"little" + bytes(10**7)}, "its numbers are little"),
        ({"byteorder": b"\xff"}, "-endian"),
    ],
)
def test_what_an_archive_announces_is_bounded(tmp_path: Path, damage: Any, told: str) -> None:
    made = archive(tmp_path, *([damage] if isinstance(damage, bytes) else [tensor()]), **(
        {} if isinstance(damage, bytes) else damage
    ))  # fmt: skip
    message = refusal(made)
    assert told in message and len(message) < 600


def test_a_compressed_byte_order_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as out:
        out.writestr("archive/data.pkl", tensor())
        out.writestr("archive/byteorder", bytes(10**8), zipfile.ZIP_DEFLATED)
    assert "byteorder is compressed" in refusal(tmp_path)


def test_offsets_and_names_that_cannot_be_are_told(tmp_path: Path) -> None:
    """Of the central directory, which stands at the end of a zip archive."""
    file = archive(tmp_path, tensor()) / "pytorch_model.bin"
    whole = file.read_bytes()
    at = whole.index(b"PK\x01\x02")
    for offset in (2**32 - 2, 2**31):
        content = bytearray(whole)
        content[at + 42 : at + 46] = offset.to_bytes(4, "little")
        file.write_bytes(content)
        refusal(tmp_path)
    end = whole.index(b"PK\x05\x06")
    content = bytearray(whole)  # the directory begins later than it does: offsets become negative
    start = int.from_bytes(whole[end + 16 : end + 20], "little")
    content[end + 16 : end + 20] = (start + 1000).to_bytes(4, "little")
    file.write_bytes(content)
    refusal(tmp_path)
    content = bytearray(whole)
    content[at + 8 : at + 10] = (0x800).to_bytes(2, "little")  # its name is said to be UTF-8
    content[at + 46] = 0xFF
    file.write_bytes(content)
    refusal(tmp_path)
    content = bytearray(whole)
    content[at + 8 : at + 10] = (1).to_bytes(2, "little")  # it is said to be encrypted
    file.write_bytes(content)
    refusal(tmp_path)


def test_an_archive_of_very_many_files_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as out:
        out.writestr("archive/data.pkl", tensor())
    file = tmp_path / "pytorch_model.bin"
    whole = file.read_bytes()
    at, end = whole.index(b"PK\x01\x02"), whole.index(b"PK\x05\x06")
    entry = whole[at:end]
    names = (entry.replace(b"data.pkl", b"%08d" % i) for i in range(70_000))
    directory = entry + b"".join(names)
    tail = bytearray(whole[end:])
    tail[12:16] = len(directory).to_bytes(4, "little")
    file.write_bytes(whole[:at] + directory + tail)
    assert "an archive of 70001 files" in refusal(tmp_path)


def test_a_pipe_is_no_file_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pytorch_model.bin")
    assert "there is no such file" in refusal(tmp_path)
    with pytest.raises(UserError, match="no weights here"):
        open_weights(tmp_path)
