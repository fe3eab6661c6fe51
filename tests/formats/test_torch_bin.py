"""Torch's `.bin` files: what torch wrote is read bit by bit, and nothing in them is run.

Most of it needs torch (extra `torch`)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl.formats.hf import TorchBinFolder, open_weights
from jaxrl.roles.grouper import embed

REFERENCES = Path(__file__).parent.parent / "references"
EXPECTED = {
    name.removeprefix("formats/"): values
    for name, values in np.load(REFERENCES / "encoders.npz").items()
    if name.startswith("formats/")
}
NUMBERS = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool", "uint8")
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra torch")
FLOATS = b"ctorch\nFloatStorage\n"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copyfile(REFERENCES / "formats.bin", tmp_path / "pytorch_model.bin")
    return tmp_path


def archive(folder: Path, pickled: bytes, name: str = "pytorch_model.bin", **files: bytes) -> Path:
    """A file in torch's format around a pickle of our own, with one storage of four numbers."""
    members = {"version": b"3\n", "data/0": np.arange(4, dtype="<f4").tobytes()} | files
    with zipfile.ZipFile(folder / name, "w") as out:
        out.writestr("archive/data.pkl", pickled)
        for member, content in members.items():
            out.writestr(f"archive/{member}", content)
    return folder


def word(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def number(n: int) -> bytes:
    return pickle.dumps(n, 2)[2:-1]


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    key: str = "0",
    offset: int = 0,
    shape: tuple[int, ...] = (2, 2),
    strides: tuple[int, ...] = (2, 1),
    name: str = "w",
) -> bytes:
    """Opcodes that leave {name: tensor} on the stack, as torch pickles it, and stop."""
    storage = b"(" + word("storage") + FLOATS + word(key) + word("cpu") + number(4) + b"tQ"
    ordered = b"ccollections\nOrderedDict\n)R"
    args = b"(" + storage + number(offset) + numbers(shape) + numbers(strides) + b"\x89" + ordered
    return b"\x80\x02}" + word(name) + TENSOR + args + b"tRs."


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        TorchBinFolder(folder)
    return str(caught.value)


@NEEDS_TORCH
@pytest.mark.parametrize("name", EXPECTED)
def test_every_kind_of_tensor_is_what_torch_wrote(folder: Path, name: str) -> None:
    tensors, expected = TorchBinFolder(folder), EXPECTED[name]
    assert tensors.shape(name) == expected.shape
    whole = tensors.read(name, tuple(slice(0, n) for n in expected.shape))
    assert whole.dtype == jnp.dtype(name if name in NUMBERS else "float32")
    np.testing.assert_array_equal(whole.astype(expected.dtype), expected)
    box = tuple(slice(n // 3, n) for n in expected.shape)
    np.testing.assert_array_equal(tensors.read(name, box).astype(expected.dtype), expected[box])


@NEEDS_TORCH
def test_a_hand_made_archive_is_read(tmp_path: Path) -> None:
    """So that the refusals below are about what they change."""
    tensors = TorchBinFolder(archive(tmp_path, tensor(offset=1, shape=(2,), strides=(2,))))
    assert tensors.read("w", (slice(0, 2),)).tolist() == [1.0, 3.0]
    assert tensors.file("w") == tensors.file("absent") == tmp_path / "pytorch_model.bin"
    assert tensors.shape("absent") is None


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("pickled", "told"),
    [
        (b"\x80\x02cos\nsystem\n(" + word("touch owned") + b"tR.", "os.system"),
        (b"\x80\x02cposix\nsystem\n(" + word("touch owned") + b"tR.", "posix.system"),
        (b"\x80\x02cbuiltins\neval\n(" + word("open('owned', 'w')") + b"tR.", "eval"),
        (b"\x80\x02cbuiltins\ngetattr\n.", "getattr"),
        (b"\x80\x02ctorch\nload\n.", "torch.load"),
        (b"(" + word("x") + b"ios\nsystem\n.", "operand"),
        (pickle.dumps(Path("x"), 2), "pathlib"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__call__\n.", "_rebuild_tensor_v2.__call__"),
    ],
)
def test_any_other_name_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickled: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(archive(tmp_path, pickled))
    assert told in message and "safetensors" in message and "pytorch_model.bin" in message
    assert "weights_only" not in message and len(message) < 500
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]


@NEEDS_TORCH
@pytest.mark.parametrize(
    "pickled",
    [
        tensor(shape=(2, 3), strides=(3, 1)),
        tensor(offset=3),
        tensor(offset=-1),
        tensor(strides=(2, -1)),
        tensor(strides=(1,)),
        tensor(shape=(2**62,) * 1000, strides=(0,) * 1000),
        tensor(shape=(2**64,), strides=(0,)),
        tensor(key="7" * 100_000),
        tensor()[:-20],
        TENSOR + b"}" + word("code") + number(1) + b"sb.",  # sets an attribute of the callable
        FLOATS + b")R.",  # calls a storage's type
        pickle.dumps([1, 2], 2),
    ],
)
def test_tensors_that_are_not_right_are_told(tmp_path: Path, pickled: bytes) -> None:
    message = refusal(archive(tmp_path, pickled))
    assert "pytorch_model.bin: " in message and len(message) < 500


@NEEDS_TORCH
def test_files_that_are_no_archive_of_torch_are_told(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    assert "plain tensors" in refusal(tmp_path)
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("word/document.xml", b"")
    assert "plain tensors" in refusal(tmp_path)
    whole = archive(tmp_path, tensor()) / "pytorch_model.bin"
    file.write_bytes(whole.read_bytes()[:-40])
    assert "plain tensors" in refusal(tmp_path)


@NEEDS_TORCH
def test_the_files_of_an_index_are_read_together(tmp_path: Path) -> None:
    archive(tmp_path, tensor(), "a.bin")
    archive(tmp_path, tensor(name="v"), "b.bin", **{"data/0": b"\0" * 16})
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


def test_a_pipe_is_no_file_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pytorch_model.bin")
    assert "there is no such file" in refusal(tmp_path)
    with pytest.raises(UserError, match="no weights here"):
        open_weights(tmp_path)


@NEEDS_TORCH
def test_an_encoder_embeds_the_same_from_what_torch_saved(tmp_path: Path) -> None:
    """In two files with an index, as bge-m3 is published."""
    import torch
    from safetensors.torch import load_file

    published, weight_map = REFERENCES / "tiny_bge", {}
    ignored = shutil.ignore_patterns("*.safetensors*")
    folder = shutil.copytree(published, tmp_path / "encoder", ignore=ignored)
    for i, file in enumerate(sorted(published.glob("*.safetensors"))):
        tensors = load_file(file)
        torch.save(tensors, folder / f"{i}.bin")
        weight_map |= dict.fromkeys(tensors, f"{i}.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    texts = ["one", "another text"]
    np.testing.assert_array_equal(embed(folder, texts), embed(published, texts))


def test_without_torch_the_extra_and_the_conversion_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    message = refusal(folder)
    assert "pip install 'jaxrl[torch]'" in message and "safetensors" in message


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        open_weights(tmp_path)
