"""Any checkpoint by its name: where it is, what it is, its weights, its tokenizer, its logits."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Bool, Float, Int

from jaxrl.checkpoint import store
from jaxrl.checkpoint.fingerprint import BASE_WEIGHTS, digest_weights
from jaxrl.checkpoint.writer import load_arrays
from jaxrl.config import yaml_text
from jaxrl.config.builtin_configs import how_to_make
from jaxrl.config.paths import working_directory
from jaxrl.config.schema import Config
from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.chat_template import dated, with_end_ids
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError, about, user_path
from jaxrl.formats import hf, hub, peft, weights
from jaxrl.formats.hub import Unfetched, model_name, open_tensors, package_folder
from jaxrl.formats.weights import gguf_parts
from jaxrl.losses.head import logprobs_from_hidden
from jaxrl.models import decoder, families, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import Lora, Quantisation, frozen_and_trained
from jaxrl.models.parameters import Layout, Params, abstract_params
from jaxrl.process.json_types import JsonObject, Keywords
from jaxrl.process.plugin import anchor
from jaxrl.sharding.axes import ROWS, row_shards
from jaxrl.teacher.key_rules import POLICY
from jaxrl.types import Array

BUILTIN = ("teacher", "student", "student_moe")
"""Checkpoints in the package, as `builtin:NAME`."""
FINAL = "final"
"""Folder of a run directory that holds the trained model."""


def chat_date_of(config: JsonObject) -> str | None:
    """Returns `data.chat_date` of the config that a run wrote."""
    data = config.get("data")
    return data.get("chat_date") if isinstance(data, dict) else None


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint that was found and understood, of which no weight has been read."""

    name: str
    """As the user gave it; with its commit where it is on a hub."""
    path: Path
    """The folder or the GGUF file."""
    config: DecoderConfig
    tensors: weights.Tensors = field(repr=False, compare=False)
    tokenizer_path: Path | None
    """A folder or a GGUF file; None where the checkpoint has no tokenizer."""
    adapter: peft.Adapter | None = None
    """Of a folder or a checkpoint of adapters; `tensors` then are the merged weights, or those of
    the base where `config.lora` says that the adapters are trained further."""
    chat_template: str | None = field(default=None, repr=False)
    """In place of the checkpoint's own."""

    def __reduce__(self) -> tuple[Callable[..., ModelSource], tuple[object, ...]]:
        """Lets another process find it by its name again: no open file travels."""
        assert not isinstance(self.tensors, weights.KeptLayers), "a cut model has no name"
        config = self.config
        given = (config.lora, config.quantised, config.sequence_length, config.eos_ids)
        more = self.chat_template, families.source_of(config.family)
        return _resolve_again, (self.name, *given, *more)

    def with_weights(self) -> ModelSource:
        """Returns the same model once its weights are here: those of a model on a hub are fetched,
        and its config is held against them."""
        tensors = self.tensors if self.adapter is None else self.adapter.tensors
        if not isinstance(tensors, Unfetched):
            return self
        _ = tensors.tensors
        again, given = self.__reduce__()
        return again(*given)

    def ending_at(self, ids: tuple[int, ...]) -> ModelSource:
        """Returns the same model whose completions end at any of these tokens."""
        return replace(self, config=replace(self.config, eos_ids=ids))

    def tokenizer(self, chat_date: str | None = None) -> Tokenizer:
        """Returns the transformers tokenizer, or None if the checkpoint has none."""
        loaded = tokenizer_of(self.tokenizer_path, self.config, chat_date)
        if loaded is not None and self.chat_template is not None:
            loaded.chat_template = self.chat_template
        return loaded

    def tokenizer_files(self) -> hf.TokenizerFiles | None:
        """Reads the files of the tokenizer, with the chat template that it has here."""
        if self.tokenizer_path is None:
            return None
        files = hf.TokenizerFiles.read(self.tokenizer_path)
        return files if self.chat_template is None else files.with_template(self.chat_template)

    def with_chat_template(self, name: str | None, key: str) -> ModelSource:
        """Returns the same model with the chat template of a file or of another model.

        Args:
            name: as `read_chat_template` takes it; None: with the template that it has.
            key: of the config, for errors.

        Raises:
            UserError: as `read_chat_template`; or the model has no tokenizer.
        """
        if name is None:
            return self
        if self.tokenizer_path is None:
            raise UserError(f"{key}={name}: the model {self.name!r} has no tokenizer")
        with about(key):
            return replace(self, chat_template=tokenizers.read_chat_template(name))

    @property
    def run_config(self) -> Path | None:
        """Returns the config of the run that wrote this model; None where no run did."""
        place = self.path.resolve()
        folder = place.parent if place.name == FINAL else place
        if folder == place and not (place / store.MANIFEST).is_file():
            return None
        return folder / store.CONFIG if (folder / store.CONFIG).is_file() else None

    def for_length(self, tokens: int) -> ModelSource:
        """Returns the same model for sequences of at most so many tokens
        (`DecoderConfig.for_length`)."""
        return replace(self, config=self.config.for_length(tokens))

    def load(
        self, mesh: Mesh | None = None, dtype: DTypeLike = jnp.float32, layout: Layout = "stacked"
    ) -> Params:
        """Returns parameters without adapters; each device reads its slices."""
        if weights.held_against(self.config, self.tensors) != self.config:
            raise UserError(
                f"model {self.name!r}: lm_head.weight is not the embedding, but config.json says"
                " tie_word_embeddings=true. The weights are here now: start again, and its own"
                " head is used"
            )
        return weights.load_params(self.tensors, self.config.base, mesh, dtype, layout)

    def load_adapters(self, mesh: Mesh | None, dtype: DTypeLike, seed: int) -> Params:
        """Returns the stacked adapters of `config.lora`: the checkpoint's, or new ones."""
        pairs = None if self.adapter is None else self.adapter.pairs()
        return peft.load_adapters(self.config, pairs, mesh, dtype, seed)

    def with_lora(self, lora: Lora, quantised: Quantisation | None = None) -> ModelSource:
        """Returns the same model with adapters to train, over kernels that are quantised or not.
        Raises UserError where it has others."""
        config = replace(self.config, lora=lora, quantised=quantised)
        if self.adapter is None:
            return replace(self, config=config)
        if self.adapter.quantised != quantised:
            under, asked = self.adapter.quantised, quantised or "null"
            raise UserError(
                f"student.model: {self.name}: its adapters were trained over {under or 'floats'},"
                f" and student.base_dtype={asked}: set student.base_dtype={under or 'null'}"
            )
        lora, own = config.lora or lora, self.adapter.lora
        same = (own.rank, set(own.targets)) == (lora.rank, set(lora.targets))
        if not same or not math.isclose(own.alpha, lora.alpha, rel_tol=1e-4):
            raise UserError(
                f"model {self.name!r} has adapters of rank {own.rank}, alpha {own.alpha:g} at"
                f" {', '.join(own.targets)}, and student.lora asks for rank {lora.rank}, alpha"
                f" {lora.alpha:g} at {', '.join(lora.targets)}: set the same, or"
                " student.lora.rank=null to train all weights of the merged model"
            )
        adapter = replace(self.adapter, quantised=quantised)
        config = replace(config, lora=own)
        return replace(self, config=config, tensors=adapter.tensors, adapter=adapter)

    @property
    def start(self) -> ModelSource:
        """Returns the model before training, without adapters of its own."""
        if self.adapter is None:
            return replace(self, config=self.config.base)
        return replace(self, config=self.config.plain, tensors=self.adapter)

    @property
    def base_name(self) -> str:
        """Returns the name of the model without its adapters; of one that is here, the folder or
        file that its weights are read from."""
        name, place = self.name, self.path
        if self.adapter is not None:
            name, place = self.adapter.base, self.adapter.base_path
        return str(place.resolve()) if user_path(name).exists() else name

    @property
    def base_path(self) -> Path:
        """Returns the folder or file of the model without its adapters."""
        return self.path if self.adapter is None else self.adapter.base_path

    def load_head(self, mesh: Mesh | None = None, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns the LM head [V, D] alone, rows over `tensor` and D over `fsdp`."""
        return weights.load_head(self.tensors, self.config, mesh, dtype)

    def keep_layers(self, keep: tuple[int, ...]) -> ModelSource:
        """Returns the same model with only some of its layers, in the given order."""
        wrong = [i for i in keep if not 0 <= i < self.config.n_layers]
        if wrong or not keep:
            raise UserError(
                f"model {self.name!r} has layers 0 to {self.config.n_layers - 1};"
                f" cannot keep {wrong or 'none'}"
            )
        config = self.config.with_layers(keep)
        with about(f"layers {', '.join(map(str, keep))} of model {self.name!r}"):
            if DecoderConfig.from_hf(config.to_hf("float32")) != config:
                raise UserError("no config.json says what a model of them is")
        kept = weights.KeptLayers(self.tensors, tuple(keep))
        return replace(self, config=config, tensors=kept, adapter=None)


def resolve_model(path: str | os.PathLike[str]) -> ModelSource:
    """Finds a checkpoint by its name, and checks the list of its tensors against its config.

    Args:
        path: a Hugging Face folder, a folder of adapters (PEFT), a `.gguf` file, a run directory
            (its `final` folder or else its newest checkpoint), a checkpoint
            `RUN/checkpoints/STEP`, `builtin:teacher`, `builtin:student`, `package:NAME` for the
            GGUF file inside an installed Python package, or a name on a hub (`formats.hub`), of
            which only config and tokenizer are fetched: the weights follow when they are loaded
            (those of adapters come at once, as what they adapt stands in no other file).

    Raises:
        UserError: nothing there, or nothing that can be loaded.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(
            "a model is given by its name here (a folder, a file, a run, one on the hub), a text or"
            f" a path, not as {type(path).__name__}"
        )
    if (how := how_to_make(path)) and not user_path(path).exists():
        raise UserError(f"model {os.fspath(path)!r}: there is no such file or folder{how}")
    name = os.fspath(path)
    on_hub = model_name(name)
    if on_hub is not None:
        on_hub = hub.pin(on_hub)
        name = str(on_hub)
    place = _locate(name)
    for run in place.resolve().parents[:2]:
        families.use_family_of(run)
    if place.suffix == ".gguf":
        from jaxrl.formats.gguf import open_gguf

        file = open_gguf(place)
        weights.check_shapes(file, weights.tensor_shapes(file.config))
        file.check_all_read()
        return ModelSource(name, place, file.config, file, place)
    if (place / store.MANIFEST).exists():
        store.verify(store.read(place))
        described = place / store.MODEL
        if (described / peft.CONFIG).is_file():
            return _adapted(name, place, described)
        config = hf.read_config(described)
        tokenizer = described if hf.has_tokenizer(described) else None
        return ModelSource(name, place, config, SavedTensors(place, config), tokenizer)
    if (place / peft.CONFIG).is_file():
        place = place if on_hub is None else hub.fetch_weights(on_hub)
        return _adapted(name, place, place)
    config = hf.read_config(place)
    tokenizer = place if hf.has_tokenizer(place) else None

    def read(folder: Path) -> weights.Tensors:
        files = hf.SafetensorsFolder(folder)
        tensors = weights.name_experts(files, config)
        weights.check_all_read(files.names, config, tensors)
        return tensors

    tensors = open_tensors(name, place, read, weights.tensor_shapes(config))
    if not isinstance(tensors, Unfetched):
        config = weights.held_against(config, tensors)
        weights.check_shapes(tensors, weights.tensor_shapes(config))
    return ModelSource(name, place, config, tensors, tokenizer)


def lora_of(config: Config) -> Lora | None:
    """Returns `student.lora`."""
    c = config.student.lora
    rank, alpha, targets, init = c.rank, c.alpha, c.targets, c.init
    return (
        None if rank is None else Lora(rank, 2.0 * rank if alpha is None else alpha, targets, init)
    )


def resolve_student(config: Config) -> ModelSource:
    """Returns `student.model`, with the adapters of `student.lora`."""
    found, lora = resolve_model(config.student.model), lora_of(config)
    found = found.with_chat_template(config.student.chat_template, "student.chat_template")
    return found if lora is None else found.with_lora(lora, config.quantised)


def _resolve_again(
    name: str,
    lora: Lora | None,
    quantised: Quantisation | None,
    length: int | None,
    eos_ids: tuple[int, ...],
    chat_template: str | None,
    family: str | None,
) -> ModelSource:
    if family is not None:
        families.use_family(family)
    found = resolve_model(name)
    config = replace(found.config, sequence_length=length, eos_ids=eos_ids)
    found = replace(found, config=config, chat_template=chat_template)
    return found if lora is None else found.with_lora(lora, quantised)


def _adapted(name: str, place: Path, described: Path) -> ModelSource:
    """Finds adapters, in a folder that PEFT reads or a checkpoint of a run (`place`), and their
    base model; their config and tokenizer are in the folder `described`."""
    lora, base_name, quantised = peft.read_settings(described)
    under = _locate(base_name)
    if any((folder / peft.CONFIG).is_file() for folder in (under, under / store.MODEL)):
        raise UserError(
            f"model {name!r}: its base model {base_name!r} has adapters itself: export that one as"
            " a whole model first"
        )
    base = resolve_model(base_name)
    if place == described:
        trained_on = peft.base_digest(place)
    else:
        trained_on = store.read(place).manifest.depends.get(BASE_WEIGHTS)
    here = trained_on is not None and not isinstance(base.tensors, Unfetched)
    if here and digest_weights(base.path) != trained_on:
        raise UserError(
            f"model {name!r}: the weights of its base model {base_name!r} ({base.path}) are not"
            " those that its adapters were trained on: something there has changed since. Put them"
            " back"
        )
    pairs: Callable[[], Mapping[str, peft.Pair]]
    if place == described:
        lora, found = peft.read_pairs(place, base.config, lora)
        pairs = partial(dict, found)
    config = replace(base.config, lora=lora)
    if place != described:
        lock, read = threading.Lock(), cache(partial(saved_adapters, place, config))

        def pairs() -> Mapping[str, peft.Pair]:
            with lock:  # at its first call only, also where two workers call it
                return read()

    adapter = peft.Adapter(lora, base_name, base.path, base.tensors, pairs, config, quantised)
    tokenizer = described if hf.has_tokenizer(described) else base.tokenizer_path
    return ModelSource(name, place, base.config, adapter, tokenizer, adapter=adapter)


def _locate(name: str) -> Path:
    kind, colon, rest = name.partition(":")
    if colon and kind == "builtin":
        if rest not in BUILTIN:
            raise UserError(
                f"model {name!r}: no such built-in model; there are"
                f" {', '.join(f'builtin:{b}' for b in BUILTIN)}"
            )
        return Path(__file__).parent.parent / "assets" / rest
    if colon and kind == "package":
        folder = package_folder(name, rest)
        files = _gguf_files(folder.rglob("*.gguf"))
        if len(files) != 1:
            raise UserError(f"model {name!r}: {folder} holds {len(files)} .gguf files, not one")
        return files[0]
    on_hub = model_name(name)
    if on_hub is not None:
        return hub.folder(on_hub)
    place = user_path(name)
    if not place.exists():
        raise UserError(
            f"model {name!r}: there is no such file or folder; give a Hugging Face folder,"
            " a .gguf file, a run directory, builtin:teacher, builtin:student, package:NAME, or the"
            " name of a model on the hub, as in ORG/NAME"
        )
    if place.is_file() and place.suffix != ".gguf":
        raise UserError(f"model {name!r} is a file, but not a .gguf; give the folder it is in")
    described = ("config.json", peft.CONFIG)
    # What reads a .gguf says of a pipe that it is no file.
    whole = not place.is_dir() or any((place / f).exists() for f in (*described, store.MANIFEST))
    if whole or any((place / FINAL / file).exists() for file in described):
        return place if whole else place / FINAL
    if checkpoints := store.folders(place):
        return checkpoints[0]
    if (place / "config.yaml").exists():
        raise UserError(
            f"model {name!r} is a run directory with neither a {FINAL} folder nor a checkpoint:"
            " the run has saved nothing yet"
        )
    files = _gguf_files(place.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    raise UserError(
        f"model {name!r}: no config.json in this folder, and no {FINAL} folder of a run;"
        f" it holds {len(files)} .gguf files"
    )


def _gguf_files(found: Iterable[Path]) -> list[Path]:
    """Returns the GGUF files; of a model in several, the first."""
    return sorted(file for file in found if gguf_parts(file.name)[0] == file.name)


class SavedTensors:
    """The parameters of a checkpoint: all come to the host, in float32, when the first of them is
    read. The optimizer's state is not read."""

    def __init__(self, folder: Path, config: DecoderConfig):
        self._folder, self._config = folder, config
        self._shapes = weights.tensor_shapes(config)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, index: weights.Index) -> np.ndarray:
        return self._read(name)[index]

    def file(self, name: str) -> Path:
        return self._folder / store.ACTOR

    @cached_property
    def _read(self) -> Callable[[str], np.ndarray]:
        return weights.hf_tensors(self._config, _saved(self._folder, abstract_params(self._config)))


def saved_adapters(folder: Path, config: DecoderConfig) -> dict[str, peft.Pair]:
    """Reads the adapters of a checkpoint to the host. `config` has its adapters."""
    _, adapters = frozen_and_trained(abstract_params(config))
    return peft.pairs_of(config, jax.tree.map(np.asarray, _saved(folder, adapters)))


def _saved(folder: Path, abstract: Params) -> Params:
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    wanted = jax.tree.map(lambda leaf: leaf.update(sharding=host), abstract)
    return load_arrays(folder / store.ACTOR, {"params": wanted})["params"]


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint: its config, its parameters, its tokenizer."""

    source: ModelSource
    params: Params = field(repr=False)
    """Stacked layout."""
    mesh: Mesh | None = None

    @property
    def config(self) -> DecoderConfig:
        return self.source.config

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Returns the transformers tokenizer, whose chat template shows the date of the model's
        run, if a run made it; None where the checkpoint has none."""
        run = self.source.run_config
        day = None if run is None else chat_date_of(yaml_text.read_mapping(run))
        return self.source.tokenizer(day)

    def with_chat_template(self, name: str | None, key: str) -> Model:
        """Returns the same model with another template (`ModelSource.with_chat_template`)."""
        source = self.source.with_chat_template(name, key)
        return self if name is None else replace(self, source=source)

    def logits(
        self, tokens: Int[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"]
    ) -> Float[jax.Array, "B T V"]:
        """Returns next-token logits [B, T, V] float32; padding may be on either side."""
        tokens, mask, n = self._rows(tokens, mask)
        return _logits(self.config, self.mesh, self.params, tokens, mask)[:n]

    def logprobs(
        self,
        tokens: Int[ArrayLike, "B T"],
        mask: Bool[ArrayLike, "B T"],
        temperature: float = 1.0,
    ) -> Float[jax.Array, "B T"]:
        """Returns the log-probability [B, T] of each token given the ones before it, nats, float32.

        0 at padding and at each row's first valid token, which nothing predicts.
        """
        if temperature <= 0:
            raise UserError(f"temperature={temperature} must be above 0")
        tokens, mask, n = self._rows(tokens, mask)
        return _logprobs(self.config, self.mesh, self.params, tokens, mask, temperature)[:n]

    def _rows(self, tokens: Array, mask: Array) -> tuple[jax.Array, jax.Array, int]:
        """Returns arrays on the mesh, masked rows added until its devices divide them; and B."""
        tokens, mask = np.asarray(tokens, np.int32), np.asarray(mask, bool)
        if tokens.ndim != 2 or tokens.shape != mask.shape:
            raise UserError(
                f"tokens and mask must be [B, T] alike, not {tokens.shape} and {mask.shape}"
            )
        n, rows, read = tokens.shape[0], self.config.vocab_size, tokens[mask]
        if read.size and not 0 <= read.min() <= read.max() < rows:
            raise UserError(
                f"tokens from {read.min()} to {read.max()}; the model's are 0 to {rows - 1}"
            )
        if self.mesh is None:
            return jnp.asarray(tokens), jnp.asarray(mask), n
        extra = -n % row_shards(self.mesh.shape)
        sharding = NamedSharding(self.mesh, PartitionSpec(ROWS, None))
        padded = (np.pad(x, ((0, extra), (0, 0))) for x in (tokens, mask))
        tokens, mask = (jax.device_put(x, sharding) for x in padded)
        return tokens, mask, n


def load_model(
    path: str | os.PathLike[str],
    mesh: Mesh | None = None,
    dtype: str = "float32",
    family: str | None = None,
) -> Model:
    """Loads a checkpoint by any name that `resolve_model` knows, sharded over `mesh`.

    Args:
        family: `path/to/file.py:NAME` of a model family of your own; the run folder of a model
            keeps its own.
    """
    if family is not None:
        families.use_family(anchor(family, working_directory()))
    source = resolve_model(path).with_weights()
    return Model(source, source.load(mesh, dtype), mesh)


@partial(jax.jit, static_argnums=(0, 1))
def _logits(
    config: DecoderConfig, mesh: Mesh | None, params: Params, tokens: jax.Array, mask: jax.Array
) -> jax.Array:
    hidden = decoder.forward(config, params, tokens, mask, mesh=mesh)
    return decoder.token_logits(config, params, hidden)


@partial(jax.jit, static_argnums=(0, 1))
def _logprobs(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: Params,
    tokens: jax.Array,
    mask: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    hidden = decoder.forward(config, params, tokens, mask, mesh=mesh)
    t = jnp.arange(tokens.shape[1])[None]
    last = jax.lax.cummax(jnp.where(mask, t, -1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    states = jnp.take_along_axis(hidden, jnp.maximum(before, 0)[..., None], axis=1)
    head = parameters.head(params)
    options: Keywords = {"mesh": mesh, "softcap": config.final_softcap}
    values = logprobs_from_hidden(states, head, tokens, temperature=temperature, **options)
    return jnp.where(mask & (before >= 0), values, 0.0)


def tokenizer_of(
    path: Path | None, config: DecoderConfig, chat_date: str | None = None
) -> Tokenizer:
    """Returns the transformers tokenizer of a checkpoint; None without a path to one."""
    if path is None:
        return None
    return dated(with_end_ids(tokenizers.load_tokenizer(path), config.eos_ids), chat_date)


def completion_ends(source: ModelSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a completion: those of the model's config and generation config,
    and its tokenizer's own.

    Raises:
        UserError: there are none, or the tokenizer's own has no row in the embedding.
    """
    ids, rows = tokenizers.end_ids(source.config.eos_ids, tokenizer), source.config.vocab_size
    if not ids:
        raise UserError(
            f"model {source.name!r} names no end-of-sequence token: set eos_token_id in its"
            " config.json or generation_config.json"
        )
    if max(ids) >= rows:
        tokenizers.check_rows(tokenizer, rows, ids, f"model {source.name!r}: its end of sequence")
    return ids


def longest_sequence(config: Config, teacher: bool = False) -> int:
    """Computes the number of tokens of the longest sequence of a run and its evaluations; with
    `teacher`, of those that the teacher reads. A policy that teaches itself reads both."""
    own = config.max_prompt_tokens + max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    new = max(config.teacher_new_tokens, config.eval.max_new_tokens or 0)
    read = config.teacher_prompt_tokens + new
    if config.teacher.model == POLICY:
        return max(own, read)
    return read if teacher else own


def check_positions(
    config: Config, new_tokens: int, decoder: DecoderConfig, model: str, teacher: bool = False
) -> None:
    """Raises UserError where the longest sequence exceeds the positions of a model.

    Args:
        teacher: the model reads the teacher's prompts.
    """
    others = teacher and config.teacher.tokenizer == "own"
    own = others or (teacher and config.teacher.max_prompt_tokens is not None)
    key = "teacher.max_prompt_tokens" if own else "max_prompt_tokens"
    new = "teacher.max_new_tokens" if others else "max_new_tokens"
    prompt = config.teacher_prompt_tokens if teacher else config.max_prompt_tokens
    width = prompt + new_tokens
    twice = " (by default they are twice the student's)" if others else ""
    if width > decoder.max_positions:
        raise UserError(
            f"{key}={prompt} and {new}={new_tokens} make"
            f" {width} positions; {model} has {decoder.max_positions}: lower one of them{twice}"
        )
