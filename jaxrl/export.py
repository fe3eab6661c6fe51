"""Writes any checkpoint (run directory, GGUF file, HF folder) as a Hugging Face folder.

The folder holds config.json, generation_config.json, safetensors, and the source's tokenizer with
its chat template; transformers loads it. --layers K keeps K evenly spaced layers, always the first
and the last: a shallower student of the same tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl.config import cli
from jaxrl.errors import UserError, user_path
from jaxrl.process.streams import to_stderr

if TYPE_CHECKING:
    import numpy as np

    from jaxrl.checkpoint.model_source import ModelSource


MUCH_LOST = 0.1
"""Share of the entries that adapters change, beyond which an export says that rounding loses them.
"""
DESCRIPTION = __doc__ or ""
"""Of the command; the module's own docstring becomes the function's."""


def export(
    source: ModelSource | str | Path,
    destination: str | Path,
    *,
    dtype: str = "bfloat16",
    force: bool = False,
    adapters: bool = False,
) -> Path:
    """Writes `source` to the folder `destination`, one tensor in host memory at a time.

    Args:
        source: what `resolve_model` returns, or any name that `load_model` takes:
            a run directory, a checkpoint, a Hugging Face folder, a hub id, a `.gguf` file.
        dtype: of the stored weights: float32, float16 or bfloat16.
        force: replace a model folder that stands at `destination`.
        adapters: write only the adapters of the source, in float32, as a folder that PEFT loads;
            a message says what to do where it cannot load their base model.

    Returns:
        The folder.

    Raises:
        UserError: a tensor is missing or misshapen, or the destination must not be overwritten.
    """
    from jaxrl.checkpoint.model_source import ModelSource, resolve_model

    if not isinstance(source, ModelSource):
        source = resolve_model(source)
    place = user_path(destination)
    _check_destination(place, force)
    try:
        return _write(source, place, dtype, adapters)
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror or error}") from error


def _write(source: ModelSource, destination: Path, dtype: str, adapters: bool) -> Path:
    from jaxrl.checkpoint.fingerprint import digest_weights
    from jaxrl.data.tokenizer import end_ids, load_tokenizer
    from jaxrl.formats import hf, peft, weights
    from jaxrl.formats.hub import model_name

    if adapters:
        if source.adapter is None:
            raise UserError(f"model {source.name!r} has no adapters: leave out --format peft")
        own = source.adapter
        model = replace(source.config, lora=own.lora, quantised=own.quantised)
        pairs, base = source.adapter.pairs(), source.base_name
        digest = None if model_name(base) else digest_weights(own.base_path)
        folder = peft.write_adapters(destination, model, base, pairs, source.tokenizer_path, digest)
        if model_name(base) is None and not (user_path(base) / "config.json").is_file():
            to_stderr(
                f"{destination}: its base model {base} is none that PEFT can load. To load the"
                f" adapters there, write the base as a folder (jaxrl export {base} BASE) and put"
                f" the path of BASE into base_model_name_or_path of {destination}/{peft.CONFIG}"
            )
        return folder
    if source.tokenizer_path is not None:  # others stop where a run of it does
        try:
            tokenizer = load_tokenizer(source.tokenizer_path)
        except UserError as error:
            to_stderr(f"{error}: the end tokens are those of the config alone")
        else:
            ids = end_ids(source.config.eos_ids, tokenizer)
            source = source.ending_at(tuple(i for i in ids if i < source.config.vocab_size))
    shapes = weights.tensor_shapes(source.config)
    weights.check_shapes(source.tensors, shapes)

    changed = lost = 0

    def read(name: str) -> np.ndarray:
        nonlocal changed, lost
        array = source.tensors.read(name, tuple(slice(0, n) for n in shapes[name]))
        if source.adapter is not None and dtype != "float32":
            counts = source.adapter.lost_entries(name, array, dtype)
            changed, lost = changed + counts[0], lost + counts[1]
        return array

    folder = hf.write_folder(
        destination, source.config, read, dtype=dtype, tokenizer_from=source.tokenizer_path
    )
    if lost > MUCH_LOST * changed:
        to_stderr(
            f"{destination}: of the weights that the adapters change, {lost / changed:.0%} are the"
            f" base model's again, rounded to {dtype}: --dtype float32 keeps the changes, and"
            " --format peft writes the adapters alone"
        )
    return folder


def evenly_spaced(n_layers: int, k: int) -> tuple[int, ...]:
    """Returns k of n layers, evenly spaced (halves round up), the first and the last among them."""
    if not 2 <= k <= n_layers:
        raise UserError(f"--layers {k}: the model has {n_layers} layers; keep 2 to {n_layers}")
    return tuple((2 * i * (n_layers - 1) + k - 1) // (2 * (k - 1)) for i in range(k))


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.export", DESCRIPTION)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="HF folder, hub id, .gguf file, run directory, builtin:teacher or package:NAME",
    )
    add("dest", metavar="DEST", help="folder to write")
    parser.add_family()
    add("--layers", type=int, metavar="K", help="keep K evenly spaced layers")
    add("--keep", metavar="0,3,6", help="keep exactly these layers, in this order")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="default bfloat16")
    add("--force", action="store_true", help="replace an existing model folder at DEST")
    add(
        "--format",
        default="hf",
        choices=("hf", "peft"),
        help="hf: the whole model, adapters merged (default); peft: its adapters alone, in float32",
    )
    arguments = parser.parse(argv)
    from jaxrl.checkpoint.model_source import resolve_model

    adapters = arguments.format == "peft"
    for name, given in (("--dtype", arguments.dtype), ("--layers", arguments.layers)):
        if adapters and given is not None:
            raise UserError(
                f"--format peft writes all adapters in float32: leave out {name} {given}"
            )
    source = resolve_model(arguments.source).with_weights()
    keep = None
    if arguments.layers is not None:
        if arguments.keep is not None:
            raise UserError("--layers and --keep both say which layers to keep; give one of them")
        keep = evenly_spaced(source.config.n_layers, arguments.layers)
    elif arguments.keep is not None:
        try:
            keep = tuple(int(i) for i in arguments.keep.split(","))
        except ValueError:
            raise UserError(
                f"--keep {arguments.keep}: give layer numbers with commas, as in 0,3,6"
            ) from None
    if keep is not None:
        print(f"keeping layers {','.join(map(str, keep))} of {source.config.n_layers}")
        source = source.keep_layers(keep)
    dtype = arguments.dtype or "bfloat16"
    folder = export(source, arguments.dest, dtype=dtype, force=arguments.force, adapters=adapters)
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    tokenizer = "with its tokenizer" if source.tokenizer_path else "without a tokenizer"
    if adapters and source.adapter is not None:
        lora, base = source.adapter.lora, source.adapter.base
        print(
            f"wrote {folder}: adapters of rank {lora.rank} of {base}, {tokenizer},"
            f" {megabytes:.1f} MB"
        )
        return
    print(
        f"wrote {folder}: {source.config.family}, {source.config.n_params:,} parameters,"
        f" {dtype}, {tokenizer}, {megabytes:.1f} MB"
    )


def _check_destination(destination: Path, force: bool) -> None:
    """Refuses to overwrite, and even with `force` to delete a folder that holds no model."""
    if destination.exists() and not destination.is_dir():
        raise UserError(f"{destination} is a file; give a folder to write")
    parents = destination.absolute().parents
    above = next((place for place in parents if place.exists()), destination)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"{destination} cannot be made: nothing can be written in {above}")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not any((destination / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{destination} is not empty and contains no model; it is not changed")
    if not force:
        raise UserError(f"{destination} is not empty; --force replaces it")


cli.make_callable(__name__, export)

if __name__ == "__main__":
    cli.exit_process(cli.run(main))
