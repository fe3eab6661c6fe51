"""Chat templates of each shape, small enough that their texts can be written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.rows import Keys, to_example
from jaxrl.types import Prompt

FORMS = {
    "objects": "c.function.arguments | tojson",
    "both": "c.function.arguments if c.function.arguments is string"
    " else (c.function.arguments | tojson)",
    "texts": "c.function.arguments",
    "printed": "c.function.arguments | string",
    "items": "c.function.arguments.items() | list | tojson",
}
ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.role != 'assistant' %}{{ '\n' }}{% elif loop.last %}{{ '<|im_end|>' }}"
    "{% else %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It ends the last turn with another token than those before it, as gpt-oss does."""
MARKS = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m.role == 'assistant' %}"
    "{{ 'note\n' }}{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}",
)
"""It marks what is learned without the token that ends it, and not all of a turn."""
TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + ' ' + "
    "(ARGUMENTS) + '</tool_call>' }}{% endfor %}"
)
THINKS = (
    "{% for t in tools or [] %}{{ 'TOOL ' + (t | tojson) + '\n' }}{% endfor %}"
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}" + CALLS + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It shows the thoughts of the last turn only, as Qwen3's does."""
OPENS = THINKS.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
"""Its generation prompt opens the thoughts, as Qwen3.5's does."""
NO_THOUGHTS = CHATML.replace(
    "{{ '<|im_start|>assistant\n'", "{{ '<|im_start|>assistant\n<think>\n'"
)
"""Its generation prompt opens thoughts that no turn of its whole chats has, as DeepSeek R1's."""
ASK = {"role": "user", "content": "2+2?"}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {}}}


def tokenizer_of(template: str | None, arguments: str = "c.function.arguments | tojson") -> Any:
    """Bytes, with two line breaks as one token."""
    template = template and template.replace("ARGUMENTS", arguments)
    return tiny_tokenizer(template, (("Ċ", "Ċ"),), extra=("<think>", "</think>"))


def spelt(tokenizer: Any, tokens: Sequence[int] | None) -> str:
    return str(tokenizer.decode(list(tokens or ()), skip_special_tokens=False))


def encoded(tokenizer: Any, row: Mapping[str, Any], **more: Any) -> Prompt:
    keys = Keys(tools="tools", turns=more.pop("turns", "last"))
    prompt = PromptEncoder(tokenizer, 5000, 5000, **more).encode(to_example(row, keys, "row"), 0)
    assert prompt is not None
    return prompt


def called(arguments: object) -> dict[str, Any]:
    function = {"name": "w", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
