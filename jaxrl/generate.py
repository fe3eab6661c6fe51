"""Samples completions of prompts from any checkpoint: `python -m jaxrl.generate MODEL --prompt
...`"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from jax.sharding import Mesh

from jaxrl.checkpoint.source import Model, resolve_model
from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.data.jsonl import JsonlFile
from jaxrl.data.tokenizer import PromptLike, encode_prompt
from jaxrl.errors import UserError
from jaxrl.models import decoder
from jaxrl.process.callable_module import make_callable
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.sampling.engine import Engine, EngineStats, bucket, power_of_two
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.mesh import ensure_devices, role_mesh
from jaxrl.sharding.placement import Axes
from jaxrl.types import Completion

MAX_SLOTS = 64
"""Completions decoded side by side, at most."""
CACHE_BYTES = 2**31
"""Bytes of KV cache on a device, at most, beyond one slot for each."""
DTYPES = ("float32", "bfloat16")


def generate(
    model: Model,
    prompts: Sequence[PromptLike],
    n: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
) -> list[list[Completion]]:
    """n completions of each prompt.

    The same arguments give the same completions; sample j of prompt i depends on (seed, i, j) and
    on what it reads, not on the other prompts.

    Args:
        prompts: text, token ids or chat messages, each. Text and stop strings need a tokenizer.
        max_new_tokens: most tokens of a completion, EOS included.
        temperature: divides the logits; 0 is greedy.
        top_p, top_k, min_p: truncation, off at 1, 0 and 0; see `SamplingParams`.
        stop: strings that end a completion; its text is cut before, its tokens after them.
        eos_ids: tokens that end a completion; None for the model's own, () for none.

    Returns:
        For each prompt, in order, a list of n `Completion`s: text, tokens, logprobs, finish_reason.
    """
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        eos_ids=_model_eos(model) if eos_ids is None else tuple(eos_ids),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    return sample(model, prompts, n=n, sampling=sampling, seed=seed)[0]


def sample(
    model: Model, prompts: Sequence[PromptLike], *, n: int, sampling: SamplingParams, seed: int
) -> tuple[list[list[Completion]], EngineStats]:
    """`generate`, with what it took."""
    if isinstance(prompts, str):
        raise UserError(f"prompts={prompts!r}: give a list of prompts, as in [{prompts!r}]")
    tokenizer = model.tokenizer
    tokens = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    if not tokens:
        return [], EngineStats()
    engine = _engine(model, max(map(len, tokens)), sampling.max_new_tokens, len(tokens) * n)
    params = model.params
    if not isinstance(params["layers"], list):
        params = decoder.unstack(params)
    return engine.generate(params, tokens, n=n, sampling=sampling, seed=seed), engine.stats


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse(argv)
    for option in ("devices", "tensor"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option} {getattr(arguments, option)} must be at least 1")
    if arguments.devices % arguments.tensor:
        raise UserError(
            f"--devices {arguments.devices} is not a multiple of --tensor {arguments.tensor}"
        )
    cli.check_writable("--out", arguments.out)
    prompts = _prompts(arguments)
    sampling = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        stop=tuple(arguments.stop),
    )
    model = _load(arguments)
    sampling = replace(sampling, eos_ids=_model_eos(model))
    n, seed = arguments.n, arguments.seed
    completions, stats = sample(model, prompts, n=n, sampling=sampling, seed=seed)
    if arguments.out is not None:
        _write(arguments.out, prompts, completions)
    else:
        _show(sys.stdout, prompts, completions)
    print(
        f"{stats.generated_tokens} tokens in {stats.seconds:.2f} s"
        f" = {stats.tokens_per_second:.1f} tokens/s, compilation included:"
        f" {stats.decode_steps} steps of {stats.slots} slots, {stats.prefill_rows} prompts"
    )


def _model_eos(model: Model) -> tuple[int, ...]:
    """The EOS ids of the checkpoint's config; its tokenizer's where there are none."""
    if model.config.eos_ids:
        return model.config.eos_ids
    own = getattr(model.tokenizer, "eos_token_id", None)
    return () if own is None else (own,)


def _engine(model: Model, longest: int, new_tokens: int, samples: int) -> Engine:
    """An engine whose shapes are rounded up, so that another call like this one compiles
    nothing."""
    config, mesh = model.config, model.mesh
    if longest + new_tokens > config.max_positions:
        raise UserError(
            f"a prompt of {longest} tokens and max_new_tokens={new_tokens} exceed the model's"
            f" {config.max_positions} positions; shorten one of them"
        )
    prompt_width = bucket(longest, config.max_positions - new_tokens)
    new_width = bucket(new_tokens, config.max_positions - prompt_width)
    itemsize = model.params["norm"]["scale"].dtype.itemsize
    token_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * itemsize
    devices = 1 if mesh is None else mesh.size
    room = devices * CACHE_BYTES // ((prompt_width + new_width) * token_bytes)
    return Engine(
        config,
        mesh,
        slots=max(1, min(power_of_two(samples), MAX_SLOTS, room)),
        max_prompt_tokens=prompt_width,
        max_new_tokens=new_width,
        tokenizer=model.tokenizer,
    )


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.generate", __doc__ or "")
    add = parser.add_argument
    add("model", metavar="MODEL", help="HF folder, .gguf file, run directory, builtin:teacher, ...")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    add("--prompts", metavar="FILE.jsonl", help="rows with `prompt` (text) or `messages` (a chat)")
    add("--chat", action="store_true", help="text prompts become a user's turn of a chat")
    add("--n", type=int, default=1, help="completions of each prompt (default 1)")
    add("--max-new-tokens", type=int, default=64, help="most tokens of a completion (default 64)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top-k", type=int, default=0, help="keep the k most probable tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, help="keep this share of the mass (default 1: all)")
    add("--min-p", type=float, default=0.0, help="keep this fraction of the best (default 0: all)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end there; may be repeated")
    add("--seed", type=int, default=0)
    add("--devices", type=int, default=1, help="devices to use; emulated where there are none")
    add("--tensor", type=int, default=1, help="devices that share one copy of the weights")
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    add("--out", metavar="FILE.jsonl", help="write the completions there instead of showing them")
    return parser


def _prompts(arguments: Namespace) -> list[PromptLike]:
    prompts: list[PromptLike] = list(arguments.prompt)
    if arguments.prompts is not None:
        rows = JsonlFile(arguments.prompts, label="--prompts")
        prompts += [rows[i].prompt for i in range(len(rows))]
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT or --prompts FILE.jsonl")
    if not arguments.chat:
        return prompts
    return [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]


def _load(arguments: Namespace) -> Model:
    """The model, in the layout that sampling wants."""
    source = resolve_model(arguments.model)
    enable_compile_cache(Config.model_fields["compile_cache"].default)
    visible = ensure_devices(arguments.devices)
    mesh: Mesh | None = None
    if arguments.devices > 1:
        axes = Axes(data=arguments.devices // arguments.tensor, tensor=arguments.tensor)
        mesh = role_mesh(visible.devices[: arguments.devices], axes)
    return Model(source, source.load(mesh, arguments.dtype, "unstacked"), mesh)


def _rows(
    prompts: Sequence[PromptLike], completions: Sequence[Sequence[Completion]]
) -> list[dict[str, Any]]:
    return [
        {
            "messages" if not isinstance(prompt, str) else "prompt": prompt,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.tokens),
            "logprob": float(completion.logprobs.sum()),
        }
        for prompt, several in zip(prompts, completions, strict=True)
        for completion in several
    ]


def _write(
    path: str, prompts: Sequence[PromptLike], completions: Sequence[Sequence[Completion]]
) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(prompts, completions)]
    try:
        Path(path).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error
    print(f"{len(lines)} completions in {path}")


def _show(
    out: TextIO, prompts: Sequence[PromptLike], completions: Sequence[Sequence[Completion]]
) -> None:
    for row in _rows(prompts, completions):
        prompt = row.get("prompt") or row["messages"][-1]["content"]
        out.write(f"prompt:     {prompt}\ncompletion: {row['completion']}\n")
        out.write(
            f"[{row['finish_reason']}, {row['tokens']} tokens, log-prob {row['logprob']:.2f}]\n\n"
        )


make_callable(__name__, generate)

if __name__ == "__main__":
    sys.exit(cli.run(main))
