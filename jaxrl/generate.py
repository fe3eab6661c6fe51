"""Samples completions of prompts from any checkpoint: `jaxrl generate MODEL --prompt TEXT`."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrl.config import cli
from jaxrl.errors import UserError, counted

if TYPE_CHECKING:
    from jaxrl.checkpoint.model_source import Model
    from jaxrl.data.tokenizer import PromptLike
    from jaxrl.process.compilations import Compilations
    from jaxrl.process.json_types import JsonObject
    from jaxrl.run.python_objects import GivenModel
    from jaxrl.sampling.engine import EngineStats
    from jaxrl.types import Completion

DESCRIPTION = __doc__ or ""
"""Of the command; the module's own docstring becomes the function's."""

DTYPES = ("float32", "bfloat16")
LEAST_TOKENS = 50
"""Tokens from which on a speed is told."""


def generate(
    model: Model | GivenModel,
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
    tools: Sequence[JsonObject] = (),
    chat_template_arguments: JsonObject | None = None,
    chat: bool | None = None,
    chat_template: str | None = None,
) -> list[list[Completion]]:
    """Samples n completions of each prompt.

    The same arguments give the same completions; sample j of prompt i depends on (seed, i, j) and
    on what it reads, not on the other prompts.

    Args:
        model: what `jaxrl.load_model` returns; its names and a pair `(model, tokenizer)` of
            transformers are loaded for this call.
        prompts: text, token ids or chat messages, each. Text and stop strings need a tokenizer.
        max_new_tokens: most tokens of a completion, EOS included.
        temperature: divides the logits; 0 is greedy.
        top_p, top_k, min_p: truncation, off at 1, 0 and 0; see `SamplingParams`.
        stop: strings that end a completion; its text is cut before, its tokens after them. One that
            closes a tag of the text, such as `</answer>`, stays in it.
        eos_ids: tokens that end a completion; None for the model's own, () for none.
        tools: JSON schemas that the chat template shows in chats.
        chat_template_arguments: what it reads besides, as in `{"enable_thinking": False}`; they
            come before those of the model's run.
        chat: whether text prompts become a user's turn of a chat, as with `data.chat=auto`, or stay
            text. None: as in the run that made the model (its `data.chat`); of other models they
            stay text. Chats get the run's `data.system_prompt` where they have none.
        chat_template: in place of the model's own: a Jinja file, or the folder or GGUF file of a
            model whose template it is (`student.chat_template`).

    Returns:
        For each prompt, in order, a list of n `Completion`s: text, tokens, logprobs, finish_reason.
    """
    from jaxrl.checkpoint.model_source import Model, load_model
    from jaxrl.config.settings import check_arguments
    from jaxrl.data.tokenizer import end_ids
    from jaxrl.run.generation import as_asked, sample_prompts
    from jaxrl.run.python_objects import named
    from jaxrl.sampling.sampler import SamplingParams
    from jaxrl.types import TemplateInputs

    for can, what, given in (
        ("__index__", "a whole number", {"n": n, "max_new_tokens": max_new_tokens, "seed": seed}),
        ("__index__", "a whole number", {"top_k": top_k}),
        ("__float__", "a number", {"temperature": temperature, "top_p": top_p, "min_p": min_p}),
        ("__iter__", "a list", {"stop": stop, "eos_ids": eos_ids if eos_ids is not None else ()}),
    ):
        for argument, value in given.items():
            if not hasattr(value, can):
                raise UserError(f"{argument}={value!r}: must be {what}")
    if not isinstance(model, Model):
        with named(model) as name:
            model = load_model(name)
            model = model.with_chat_template(chat_template, "chat_template")
            _ = model.tokenizer  # reads its file, which may be gone afterwards
    elif chat_template is not None:
        model = model.with_chat_template(chat_template, "chat_template")
    if eos_ids is None:
        eos_ids = end_ids(model.config.eos_ids, model.tokenizer)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        eos_ids=tuple(eos_ids),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    inputs = TemplateInputs(tuple(tools), check_arguments(chat_template_arguments or {}))
    chat = True if chat is None and chat_template is not None else chat
    asked, each = as_asked(model, prompts, chat, inputs)
    groups = sample_prompts(model, asked, each, n=n, sampling=sampling, seed=seed)[0]
    return [[replace(one, tokens=tuple(one.tokens)) for one in group] for group in groups]


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse(argv)
    out = None if arguments.out is None else cli.check_writable("--out", arguments.out)
    from jaxrl.data.tokenizer import end_ids
    from jaxrl.process.compilations import compilations
    from jaxrl.run.generation import (
        as_asked,
        load_for_sampling,
        read_prompts,
        sample_prompts,
        write_lines,
    )
    from jaxrl.sampling.sampler import SamplingParams
    from jaxrl.types import TemplateInputs

    rows = read_prompts(arguments.prompt, arguments.prompts)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
    sampling = SamplingParams(
        **{name: getattr(arguments, name) for name in names}, stop=tuple(arguments.stop)
    )
    model = load_for_sampling(arguments.model, arguments.devices, arguments.tensor, arguments.dtype)
    model = model.with_chat_template(arguments.chat_template, "--chat-template")
    sampling = replace(sampling, eos_ids=end_ids(model.config.eos_ids, model.tokenizer))
    n, seed = arguments.n, arguments.seed
    shared = TemplateInputs(arguments=arguments.chat_template_arguments or {})
    chat = True if arguments.chat is None and arguments.chat_template else arguments.chat
    prompts, inputs = as_asked(model, rows, chat, shared)
    before = compilations()
    completions, stats = sample_prompts(model, prompts, inputs, n=n, sampling=sampling, seed=seed)
    lines = []
    for prompt, group in zip(prompts, completions, strict=True):
        for completion in group:
            row: JsonObject = {
                "prompt" if isinstance(prompt, str) else "messages": prompt,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.tokens),
                "logprob": float(completion.logprobs.sum()),
            }
            lines.append(json.dumps(row, ensure_ascii=False))
            if out is None:
                text = prompt if isinstance(prompt, str) else row["messages"][-1]["content"]
                size = counted(row["tokens"], "token")
                about = f"{row['finish_reason']}, {size}, log-prob {row['logprob']:.2f}"
                print(f"prompt:     {text}\ncompletion: {completion.text}\n[{about}]\n")
    if out is not None:
        write_lines("--out", out, lines)
        print(f"{counted(len(lines), 'completion')} in {out}")
    print(_took(stats, compilations().since(before)))


def _took(stats: EngineStats, compiled: Compilations) -> str:
    """Writes the seconds of sampling: all of it, the compiler's part, and the speed of decoding
    alone, from launches that compiled nothing, where these sampled enough tokens to tell it."""
    text = f"{counted(stats.generated_tokens, 'token')} in {stats.seconds:.2f} s"
    if compiled.programs:
        programs = counted(compiled.programs, "program")
        text += f", {compiled.seconds:.2f} s of it for the compilation of {programs}"
    if stats.steady_tokens < LEAST_TOKENS:
        return text
    speed = stats.steady_tokens / stats.steady_seconds
    return f"{text}; decoding: {speed:,.0f} tokens/s in {stats.slots} slots"


def _arguments(text: str) -> JsonObject:
    """Reads a mapping of YAML or JSON. Raises ArgumentTypeError."""
    import yaml

    from jaxrl.config.settings import check_arguments

    try:
        given = yaml.safe_load(text)
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise UserError(f"{text!r} is no mapping of names, as in {{enable_thinking: false}}")
        return check_arguments(given)
    except (yaml.YAMLError, UserError) as error:
        raise ArgumentTypeError(" ".join(str(error).split())) from None


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.generate", DESCRIPTION)
    add = parser.add_argument
    add("model", metavar="MODEL", help="HF folder, hub id, .gguf file, run directory, ...")
    parser.add_family()
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    add("--prompts", metavar="FILE.jsonl", help="rows, as those of data.train")
    add(
        "--chat",
        action=BooleanOptionalAction,
        default=None,
        help="text prompts become a user's turn of a chat, or stay text (default: as data.chat of"
        " the model's run says; of other models they stay text, unless --chat-template is given)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja file in place of the model's own template, or a model's folder",
    )
    add(
        "--chat-template-arguments",
        type=_arguments,
        metavar="MAPPING",
        help="for the chat template of every prompt, as in '{enable_thinking: false}'",
    )
    add("--n", type=int, default=1, help="completions of each prompt (default 1)")
    add("--max-new-tokens", type=int, default=64, help="most tokens of a completion (default 64)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top-k", type=int, default=0, help="keep the k most probable tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, help="keep this share of the mass (default 1: all)")
    add("--min-p", type=float, default=0.0, help="keep this fraction of the best (default 0: all)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end there; may be repeated")
    add("--seed", type=int, default=0)
    add("--devices", type=int, default=1, help="devices to use; emulated if there are none")
    add("--tensor", type=int, default=1, help="devices that share one copy of the weights")
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    add("--out", metavar="FILE.jsonl", help="write the completions there instead of showing them")
    return parser


cli.make_callable(__name__, generate)

if __name__ == "__main__":
    cli.exit_process(cli.run(main))
