"""Samples completions of prompts with a checkpoint, outside of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl.checkpoint.model_source import Model, resolve_model
from jaxrl.config.schema import Config, read_keys
from jaxrl.config.settings import EVALUATED_MESH, DataConfig
from jaxrl.data.chat_template import has_template, unread_arguments
from jaxrl.data.example import Example
from jaxrl.data.jsonl import JsonlFile
from jaxrl.data.prompt_encoder import Chat, PromptEncoder
from jaxrl.data.rows import check_role, listed
from jaxrl.data.tokenizer import PromptLike, as_messages, encode_prompt
from jaxrl.errors import UserError, about, short, shown, user_path
from jaxrl.models import parameters
from jaxrl.models.batching import bucket
from jaxrl.models.kernels import try_kernels
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.streams import to_stderr
from jaxrl.sampling.engine import NARROWEST, Engine, EngineStats
from jaxrl.sampling.partial_completion import RandomKey, SampleRequest
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import ensure_devices, role_mesh
from jaxrl.types import NO_INPUTS, Completion, TemplateInputs

MAX_SLOTS = 64
"""Completions decoded side by side, at most."""
ASKS = ("chat", "system_prompt", "chat_template_arguments")
"""Keys of `data` that say how a run asks its model."""
CACHE_BYTES = 2**31
"""Bytes of KV cache on a device, at most, beyond one slot for each."""


def load_for_sampling(name: str, devices: int, tensor: int, dtype: str) -> Model:
    """Loads the model, in the layout that sampling wants, on `devices`, of which `tensor` share a
    copy.

    Raises:
        UserError: there is no such model, or `tensor` does not divide `devices`.
    """
    for option, count in (("devices", devices), ("tensor", tensor)):
        if count < 1:
            raise UserError(f"--{option} {count} must be at least 1")
    if devices % tensor:
        raise UserError(f"--devices {devices} is not a multiple of --tensor {tensor}")
    source = resolve_model(name).with_weights()
    enable_compile_cache(Config.model_fields["compile_cache"].default)
    visible, mesh = ensure_devices(devices), None
    if devices > 1:
        axes = Axes(data=devices // tensor, tensor=tensor)
        mesh = role_mesh(visible.devices[:devices], axes)
    uses = [(dim, dtype, True) for dim in source.config.head_dims]
    for note in try_kernels(visible.devices[:devices], uses):
        to_stderr(note)
    return Model(source, source.load(mesh, dtype, "unstacked"), mesh)


def as_asked(
    model: Model,
    prompts: Sequence[PromptLike | Example],
    chat: bool | None = None,
    given: TemplateInputs = NO_INPUTS,
) -> tuple[list[PromptLike], list[TemplateInputs]]:
    """Returns the prompts as training asks the model, and what the chat template reads with each.

    A run's model is asked as `data.chat`, `data.system_prompt` and `data.chat_template_arguments`
    of its run say, with one way of rendering (`data.prompt_encoder`); few-shot rows are not added.

    Args:
        prompts: those of a file as rows, with their system messages, tools and arguments.
        chat: whether texts become a user's turn, except those that have the turns of the chat
            template already. None: as the run did; without a run they do not.
        given: for every prompt; the arguments come before the run's, those of a row before both.

    Raises:
        UserError: no prompts; a text with what has no place in it.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        example = prompts if isinstance(prompts, str) else "2+3="
        raise UserError(f"prompts={prompts!r}: give a list of prompts, as in [{example!r}]")
    tokenizer, data = model.tokenizer, _data_of_run(model)
    ways: dict[bool | None, Chat] = {None: data.chat if data else "raw", True: "auto", False: "raw"}
    if chat and not has_template(tokenizer):
        raise UserError(f"a chat: the tokenizer of {model.source.name!r} has no chat template")
    encode = None
    if tokenizer is not None:
        rules = data.system_prompt if data and has_template(tokenizer) else None
        own = {**(data.chat_template_arguments if data else {}), **given.arguments}
        encode = PromptEncoder(tokenizer, 0, 0, (), rules, own, ways[chat])
    asked, inputs = list[PromptLike](), list[TemplateInputs]()
    for number, prompt in enumerate(prompts):
        row = prompt if isinstance(prompt, Example) else None
        said: PromptLike = prompt.prompt if isinstance(prompt, Example) else prompt
        messages = as_messages(said)
        for message in messages or ():
            if not isinstance(message, Mapping):
                raise UserError(f"prompt {number}: {shown(message)} is no message of a chat")
            check_role(str(message.get("role")), f"prompt {number}")
        if encode is None or (messages is None and not isinstance(said, str)):
            asked.append(said)
            inputs.append(given)
            continue
        row = row or Example(said if isinstance(said, str) else tuple(messages or ()))
        read = encode.inputs_of(row)
        read = replace(read, tools=(*given.tools, *read.tools))
        whole = encode.prompt_of(row)
        if isinstance(whole, str):
            whole = str(said)
            lost = [
                name for name, value in (("tools", read.tools), ("system", row.system)) if value
            ]
            if not lost and (given.arguments or (row.inputs or NO_INPUTS).arguments):
                lost = ["chat template arguments"]
            if lost:
                way = "--chat (from Python chat=True) makes it a user's turn"
                if ways[chat] == "auto":
                    way = "it has the turns of a chat, or the model has no chat template"
                raise UserError(
                    f"the prompt {short(repr(whole))} is text, which has no place for"
                    f" {listed(lost)}: {way}"
                )
        asked.append(whole)
        inputs.append(read)
    return asked, inputs


def _data_of_run(model: Model) -> DataConfig | None:
    """Returns how the run that wrote a model asked it; None where no run did."""
    path = model.source.run_config
    data = None if path is None else read_keys(path).get("data")
    if not isinstance(data, dict):
        return None
    read = {name: data[name] for name in ASKS if name in data}
    base = {"student": {"model": model.source.name}, "algorithm": "sft", "mesh": EVALUATED_MESH}
    with about(f"{path}"):
        return Config.parse({**base, "data": {**read, "train": "arithmetic"}}).data


def sample_prompts(
    model: Model,
    prompts: Sequence[PromptLike],
    inputs: Sequence[TemplateInputs] | TemplateInputs = NO_INPUTS,
    *,
    n: int,
    sampling: SamplingParams,
    seed: int,
) -> tuple[list[list[Completion]], EngineStats]:
    """Samples n completions of each prompt (`as_asked`), as `jaxrl.generate` gives them; also
    returns what they took.

    Args:
        inputs: what the chat template reads with each prompt, or with all of them.
    """
    if n < 1:
        raise UserError(f"n={n}: must be at least 1")
    tokenizer = model.tokenizer
    each = [inputs] * len(prompts) if isinstance(inputs, TemplateInputs) else inputs
    pairs = list(zip(prompts, each, strict=True))
    tokens = [encode_prompt(tokenizer, prompt, given) for prompt, given in pairs]
    for note in dict.fromkeys(
        note
        for prompt, given in pairs
        if given.arguments and as_messages(prompt) is not None
        for note in unread_arguments(tokenizer, given)
    ):
        to_stderr(note)
    if not tokens:
        return [], EngineStats()
    engine = _engine(model, max(map(len, tokens)), sampling.max_new_tokens, len(tokens) * n)
    params = model.params
    if not isinstance(params["layers"], list):
        params = parameters.unstack(params)
    most = sampling.max_new_tokens
    requests = [
        SampleRequest(prompt, sampling, RandomKey(seed, prompt=i, sample=sample), most)
        for i, prompt in enumerate(tokens)
        for sample in range(n)
    ]
    done = engine.generate(params, requests)
    return [done[i * n : (i + 1) * n] for i in range(len(tokens))], engine.stats


def _engine(model: Model, longest: int, new_tokens: int, samples: int) -> Engine:
    """Makes an engine whose shapes are rounded up, so that another call like this one compiles
    nothing."""
    config, mesh = model.config, model.mesh
    if longest + new_tokens > config.max_positions:
        raise UserError(
            f"a prompt of {longest} tokens and max_new_tokens={new_tokens} exceed the model's"
            f" {config.max_positions} positions; shorten one of them"
        )
    prompt_width = bucket(longest, smallest=NARROWEST, most=config.max_positions - new_tokens)
    new_width = bucket(new_tokens, smallest=NARROWEST, most=config.max_positions - prompt_width)
    itemsize = model.params["norm"]["scale"].dtype.itemsize
    token_bytes = itemsize * config.kept_by_token
    state = 0 if config.delta is None else config.n_recurrent * config.delta.state_bytes(itemsize)
    devices = 1 if mesh is None else mesh.size
    room = devices * CACHE_BYTES // ((prompt_width + new_width) * token_bytes + state)
    return Engine(
        config.for_length(longest + new_tokens),
        mesh,
        slots=max(1, min(bucket(samples), MAX_SLOTS, room)),
        max_prompt_tokens=prompt_width,
        max_new_tokens=new_width,
        tokenizer=model.tokenizer,
    )


def read_prompts(texts: Sequence[str], path: str | None) -> list[Example]:
    """Reads the prompts: the texts, and the rows of a file with their system messages, tools and
    arguments for the chat template."""
    examples = [Example(text) for text in texts]
    if path is not None:
        file = JsonlFile(user_path(path), label="--prompts")
        examples += [file[i] for i in range(len(file))]
    if not examples:
        raise UserError("no prompt: give --prompt TEXT or --prompts FILE.jsonl")
    if any(row.document and not row.prompt for row in examples):
        raise UserError(
            f"--prompts {path}: a row has a `text` and no prompt: rename it to `prompt`"
        )
    return examples


def write_lines(option: str, path: Path, lines: Sequence[str]) -> None:
    """Writes the file that an option of a command names. Raises UserError."""
    try:
        path.write_text("".join(f"{x}\n" for x in lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from error
