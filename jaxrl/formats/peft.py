"""Folders of adapters as PEFT writes and reads them: `adapter_config.json` and
`adapter_model.safetensors`, beside the tokenizer.

A pair is (A [in, r], B [r, out]); PEFT stores both transposed, as `lora_A` and `lora_B`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import get_args

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jaxrl.errors import UserError
from jaxrl.formats import hf, hub, weights
from jaxrl.formats.hub import model_name
from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.family import Family
from jaxrl.models.lora import TARGETS, Lora, Quantisation, add_shared_a, frozen_and_trained
from jaxrl.models.parameters import Params, abstract_params, init_params, param_shardings
from jaxrl.process.json_types import name_file_in_errors, read_json
from jaxrl.sharding.mesh import is_primary
from jaxrl.sharding.reshard import to_host

BASE_DIGEST = "jaxrl_base_weights"
"""Key of the header of the adapters' file: the digest of the base model's weights."""
QUANTISED = "jaxrl_base_dtype"
"""Key of `adapter_config.json` that PEFT does not have."""
CONFIG, WEIGHTS = hub.ADAPTER, hub.ADAPTER_WEIGHTS
_OFF = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"),
    *("layer_replication", "fan_in_fan_out", "lora_bias", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_bdlora", "use_qalora"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
"""Settings of PEFT with which an adapter is more than what `models.lora` computes."""
_FORMS: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""The same, and what they may be; others, as PiSSA's, change the base weights too."""

KNOWN = (
    *(*TARGETS, "qkv_proj", "gate_up_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
)
"""Names of projections in some family."""

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Adapter(weights.Derived):
    """Trained adapters, and the model that they belong to."""

    lora: Lora
    base: str
    """Name of the base model, in any form that `checkpoint.model_source.resolve_model` takes."""
    base_path: Path
    """Its folder or GGUF file."""
    tensors: weights.Tensors = field(repr=False, compare=False)
    """Of the base model."""
    pairs: Callable[[], Mapping[str, Pair]] = field(repr=False, compare=False)
    """Name of a kernel's tensor -> its pair, float32; read at the first call."""
    model: DecoderConfig
    """The base model."""
    quantised: Quantisation | None = None
    """How the kernels were held under these adapters."""

    def read(self, name: str, index: weights.Index) -> np.ndarray:
        """Returns a box of the base model's tensor with what the adapter adds, in float32; of a
        quantised kernel, what that stands for."""
        if self.quantised is not None and name in self._kernels:
            box = weights.rounded(self.tensors, self.quantised, name, index)
        else:
            box = self.tensors.read(name, index)
        pair = self.pairs().get(name)
        if pair is None:
            return box
        rows, columns = index
        a, b = pair[0][columns], pair[1][:, rows]
        return box.astype(np.float32) + np.float32(self.lora.scale) * (a @ b).T

    def lost_entries(self, name: str, merged: np.ndarray, dtype: str) -> tuple[int, int]:
        """Counts the entries of a kernel that its adapter changes, and those of them that are the
        base model's again once both are rounded to a dtype.

        Args:
            merged: the whole kernel, as `read` returns it.
            dtype: float32, float16 or bfloat16.
        """
        pair = self.pairs().get(name)
        if pair is None:
            return 0, 0
        added = np.float32(self.lora.scale) * (pair[0] @ pair[1]).T
        whole, base = (x.astype(np.dtype(dtype)) for x in (merged, merged - added))
        return int(np.count_nonzero(added)), int(np.count_nonzero((added != 0) & (whole == base)))

    @cached_property
    def _kernels(self) -> frozenset[str]:
        names = (kernels(self.model, path) for path in self.model.quantisable)
        return frozenset(chain(*names))


def read_settings(folder: Path) -> tuple[Lora, str, Quantisation | None]:
    """Reads `adapter_config.json`: the adapters, the name of the base model, and how
    its kernels were quantised under them.

    Raises:
        UserError: a variant of LoRA that is not computed here.
    """
    file = folder / CONFIG
    raw = read_json(file)
    with name_file_in_errors(file):
        if raw.get("peft_type") != "LORA":
            raise UserError(f"peft_type={raw.get('peft_type')!r} is not supported; supported: LORA")
        allowed: dict[str, tuple[object, ...]] = dict.fromkeys(_OFF, (False, [], {}))
        for key, plain in (allowed | _FORMS).items():
            if raw.get(key) not in (None, *plain):
                known = plain[0] if key in _FORMS else False if raw[key] is True else None
                raise UserError(f"{key}={raw[key]!r} is not supported; supported: {known!r}")
        rank, alpha, base = (raw.get(k) for k in ("r", "lora_alpha", "base_model_name_or_path"))
        if type(rank) is not int or rank < 1:
            raise UserError(f"r={rank!r} must be an integer of at least 1")
        if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            raise UserError(f"lora_alpha={alpha!r} must be a number above 0")
        if not isinstance(base, str) or not base:
            raise UserError(f"base_model_name_or_path={base!r} must name the model")
        name = model_name(base)
        if name is not None and raw.get("revision"):
            base = str(replace(name, revision=str(raw["revision"])))
        if raw.get("use_rslora"):  # scaled by 1 / sqrt(r)
            alpha *= rank**0.5
        modules = raw.get("target_modules")
        named = [t for t in KNOWN if t in modules] if isinstance(modules, list) else []
        held = raw.get(QUANTISED)
        if held not in (None, *get_args(Quantisation)):
            raise UserError(f"{QUANTISED}={held!r} must be one of {get_args(Quantisation)}")
        return Lora(rank, float(alpha), tuple(named or TARGETS)), base, held


def base_digest(folder: Path) -> str | None:
    """Returns the digest of the weights of the base model that a folder of adapters notes, if it
    does."""
    with suppress(OSError, SafetensorError), safe_open(folder / WEIGHTS, "numpy") as file:
        metadata: Mapping[str, str] = file.metadata() or {}
        return metadata.get(BASE_DIGEST)
    return None


def read_pairs(folder: Path, model: DecoderConfig, lora: Lora) -> tuple[Lora, dict[str, Pair]]:
    """Returns the pairs of a folder by the name of their kernel's tensor, and the adapters with the
    targets that the file has. Raises UserError for a file that does not fit the model."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"{folder}: {CONFIG} is there, and {WEIGHTS} is missing")
    tensors = hf.SafetensorsFolder(folder, (file,))
    found: dict[str, Pair] = {}
    kernel_shapes, unread, targets = weights.tensor_shapes(model), set(tensors.names), []
    for target, paths in model.targets.items():
        names = kernels(model, paths[0])
        if not unread.intersection(f"{_named(name)}.lora_A.weight" for name in names):
            continue
        targets.append(target)
        for name in names:
            n_out, n_in = kernel_shapes[name]
            shapes = {"lora_A": (lora.rank, n_in), "lora_B": (n_out, lora.rank)}
            expected = {f"{_named(name)}.{key}.weight": shape for key, shape in shapes.items()}
            weights.check_shapes(tensors, expected)
            a, b = (
                tensors.read(stored, (slice(0, rows), slice(0, columns))).astype(np.float32).T
                for stored, (rows, columns) in expected.items()
            )
            found[name] = a, b
            unread.difference_update(expected)
    raw = read_json(folder / CONFIG)
    keys = ("target_modules", "exclude_modules")
    lists = (raw[key] if isinstance(raw.get(key), list) else [] for key in keys)
    # the last words of module names, but of a regular expression
    wanted, unwanted = ({str(name).rpartition(".")[2] for name in names} for names in lists)
    for target in targets:  # PEFT would leave tensors out that the settings do not name
        if target in unwanted or (wanted & set(KNOWN) and target not in wanted):
            key = keys[target in unwanted]
            raise UserError(
                f"{folder / WEIGHTS} has tensors of {target}, which {key} in {CONFIG} leaves out:"
                " make them agree"
            )
    if unread:
        some = ", ".join(sorted(unread)[:3])
        raise UserError(
            f"{file}: {len(unread)} tensors belong to no projection of the model that an adapter is"
            f" read for ({', '.join(model.targets)}): {some}"
        )
    return Lora(lora.rank, lora.alpha, tuple(targets)), found


def kernels(model: DecoderConfig, path: str) -> tuple[str, ...]:
    """Returns names of the tensors of a projection's kernels, layer by layer, those of a layer's
    experts next to each other; none where the model has no such projection."""
    places = weights.places(model)
    found = (places.get(f"layers/{layer}/{path}/kernel") for layer in range(model.n_layers))
    return tuple(name for place in found if place is not None for name in place.names)


def pairs_of(model: DecoderConfig, adapters: Params) -> dict[str, Pair]:
    """Returns the pairs of a stacked tree of numpy arrays, in float32."""
    found: dict[str, Pair] = {}
    blocks = adapters["layers"] if model.cycle > 1 else (adapters["layers"],)
    for i, paths, names in _adapted(model):
        each = [add_shared_a(_group(blocks[i], path), path.rpartition("/")[2]) for path in paths]
        a, b = each[0]["lora_a"], np.concatenate([one["lora_b"] for one in each], -1)
        stacked = (x.astype(np.float32).reshape(-1, *x.shape[-2:]) for x in (a, b))
        found |= dict(zip(names, zip(*stacked, strict=True), strict=True))
    return found


def load_adapters(
    model: DecoderConfig,
    pairs: Mapping[str, Pair] | None,
    mesh: Mesh | None,
    dtype: DTypeLike,
    seed: int,
) -> Params:
    """Returns adapters in the stacked layout on `mesh`: those given, or the first ones of a run.

    Args:
        model: with its adapters.
        seed: of the first ones, which are the same on any mesh.
    """
    shardings = None if mesh is None else frozen_and_trained(param_shardings(model, mesh))[1]
    if pairs is None:
        made = jax.jit(
            lambda key: frozen_and_trained(init_params(model, key, dtype))[1],
            out_shardings=shardings,
        )
        return made(jax.random.key(seed % 2**32, impl="threefry2x32"))
    shapes = frozen_and_trained(abstract_params(model, dtype))[1]
    blocks: list[Params] = [{} for _ in range(model.cycle)]
    for i, paths, names in _adapted(model):
        each = [pairs[name] for name in names]
        a, b = (np.stack(x) for x in zip(*each, strict=True))
        ends = np.cumsum([model.quantisable[path][1] for path in paths])
        for path, own in zip(paths, np.split(b, ends[:-1], -1), strict=True):
            pair = {"lora_a": a, "lora_b": own} if path == paths[0] else {"lora_b": own}
            _group(blocks[i], path)[path.rpartition("/")[2]] = pair
    tree = {"layers": blocks[0] if model.cycle == 1 else tuple(blocks)}
    tree = jax.tree.map(
        lambda leaf, like: leaf.reshape(like.shape).astype(like.dtype), tree, shapes
    )
    if shardings is None:
        return jax.device_put(tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__),
        tree,
        shardings,
    )


def save(
    folder: str | os.PathLike[str],
    model: DecoderConfig,
    base: str,
    adapters: Params,
    tokenizer_from: hf.TokenizerFrom | None = None,
    base_digest: str | None = None,
) -> Path:
    """Writes a folder that PEFT loads; one that stands there is replaced, in one rename.

    Where several processes share the adapters' mesh, all must call and the first one writes.

    Args:
        model: with its adapters.
        base: name of the model that they belong to.
        adapters: stacked, on any mesh.
        base_digest: of that model's weights, to be noted.
    """
    first = jax.tree.leaves(adapters)[0]
    held = jax.tree.map(to_host, adapters)
    if is_primary(first.sharding.device_set):
        write_adapters(folder, model, base, pairs_of(model, held), tokenizer_from, base_digest)
    return Path(folder).resolve()


def write_adapters(
    folder: str | os.PathLike[str],
    model: DecoderConfig,
    base: str,
    pairs: Mapping[str, Pair],
    tokenizer_from: hf.TokenizerFrom | None = None,
    base_digest: str | None = None,
) -> Path:
    """Does what `save` does, for pairs."""
    tensors, within = {}, _within(base)
    for name, (a, b) in pairs.items():
        stored = _named(within + name.removeprefix(Family.within))
        tensors[f"{stored}.lora_A.weight"] = a.T
        tensors[f"{stored}.lora_B.weight"] = b.T
    with hf.replaced_folder(folder) as partial:
        write_settings(partial, model, base, within)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        noted = {} if base_digest is None else {BASE_DIGEST: base_digest}
        hf.write_safetensors(partial / WEIGHTS, shapes, tensors.__getitem__, "float32", noted)
        if tokenizer_from is not None:
            hf.save_tokenizer(tokenizer_from, partial)
    return Path(folder).resolve()


def write_settings(
    folder: Path, model: DecoderConfig, base: str, within: str = Family.within
) -> None:
    """Writes `adapter_config.json`; `within` is `Family.within` of what PEFT makes of the base."""
    lora, name = model.lora, model_name(base)
    assert lora is not None
    targets: list[str] | str = list(lora.targets)
    if within != Family.within:  # by their names alone, PEFT would adapt what sees images too
        targets = rf"{re.escape(within)}.*\.({'|'.join(targets)})"
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if name is None else f"{name.repo}{name.rest}",
        "revision": None if name is None else name.sha or name.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if model.quantised is not None:
        raw[QUANTISED] = model.quantised
    hf.write_json(folder / CONFIG, raw)


def _adapted(model: DecoderConfig) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """Yields for each block of stacked parameters its number and, of each adapted tensor that it
    has, the paths of its projections within a block and its names, layer by layer."""
    assert model.lora is not None
    places = weights.places(model, "stacked")
    for i, prefix in enumerate(weights.block_layers(model)):
        for name, paths in model.targets.items():
            place = places.get(f"{prefix}/{paths[0]}/kernel")
            if name in model.lora.targets and place is not None:
                yield i, paths, place.names


def _group(block: Params, path: str) -> Params:
    """Returns the part of a block that has the projection at this path; makes it if missing."""
    for name in path.split("/")[:-1]:
        block = block.setdefault(name, {})
    return block


def _named(kernel: str) -> str:
    return hf.PEFT + kernel.removesuffix(".weight")


def _within(base: str) -> str:
    """Returns how names of tensors begin in what PEFT makes of the base model."""
    with suppress(UserError):  # a GGUF file, a built-in model
        kind = read_json(hub.find_folder(base) / "config.json").get("model_type")
        return next((one.within for one in FAMILIES.values() if one.whole == kind), Family.within)
    return Family.within
