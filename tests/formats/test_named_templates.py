"""Chat templates of several names stay with a model wherever it is written, and a chat with tools
is rendered by the one for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import TYPES
from hub_server import Hub
from pydantic import TypeAdapter
from runs import save_model
from tiny_tokenizer import CHATML, tiny_tokenizer
from transformers import AutoTokenizer

from jaxrl.checkpoint.fingerprint import digest_model
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.data.tokenizer import encode_prompt, load_tokenizer
from jaxrl.export import export
from jaxrl.formats import hf, peft, weights
from jaxrl.formats.hf import save_tokenizer
from jaxrl.models.lora import Lora
from jaxrl.teacher.protocol import Info
from jaxrl.types import TemplateInputs

WITH_TOOLS = "{{ 'TOOLS ' + (tools | length | string) + '\n' }}" + CHATML
BOTH = {"default": CHATML, "tool_use": WITH_TOOLS}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module", params=["files", "list", "one file"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two templates: in files of their own, as transformers 5 writes them, or in a
    list in tokenizer_config.json, as transformers 4 did."""
    folder = Path(save_model(tmp_path_factory.mktemp("model") / "it", 32, 1, 0))
    tiny_tokenizer(BOTH).save_pretrained(folder)  # type: ignore[arg-type]
    if request.param == "list":
        file = folder / "tokenizer_config.json"
        named = [{"name": name, "template": text} for name, text in BOTH.items()]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
        (folder / "chat_template.jinja").unlink()
        (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
        (folder / "additional_chat_templates").rmdir()
    if request.param == "one file":  # templates without a default one
        (folder / "chat_template.jinja").unlink()
        (folder / "additional_chat_templates" / "default.jinja").write_text(CHATML)
    return folder


def shown(place: Path, **options: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(place)
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False, **options))


def test_what_is_written_has_all_templates(model: Path, tmp_path: Path) -> None:
    source = resolve_model(model)
    exported = export(source, tmp_path / "out")
    config = source.config
    (name, *_) = peft.kernels(config, "attn/q")
    n_out, n_in = weights.tensor_shapes(config)[name]
    pair = np.ones((n_in, 2), np.float32), np.ones((2, n_out), np.float32)
    described = tmp_path / "described"
    hf.write_description(described, config, "float32", model)
    adapters = peft.write_adapters(
        tmp_path / "adapters",
        source.with_lora(Lora(2, 2.0, ("q_proj",))).config,
        str(model),
        dict.fromkeys(peft.kernels(config, "attn/q"), pair),
        model,
    )
    for place in (exported, described, adapters):
        assert shown(place, tools=[TOOL]) == shown(model, tools=[TOOL]) != shown(place)
        assert shown(place) == shown(model) == "<|im_start|>user\nx<|im_end|>\n"


def test_a_chat_with_tools_is_rendered_by_the_template_for_tools(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    for tools in ((), (TOOL,)):
        text = tokenizer.decode(encode_prompt(tokenizer, CHAT, TemplateInputs(tools)))
        assert text == shown(model, tools=list(tools) or None, add_generation_prompt=True)


def test_a_template_that_changes_is_another_model(model: Path, tmp_path: Path) -> None:
    copy = export(resolve_model(model), tmp_path / "out")
    before = digest_model(copy)
    file = next(
        copy / name
        for name in ("additional_chat_templates/tool_use.jinja", "tokenizer_config.json")
        if (copy / name).is_file()
    )
    file.write_text(file.read_text() + " ")
    assert digest_model(copy) != before


def test_templates_of_a_model_on_a_hub_are_fetched(model: Path, hub: Hub) -> None:
    files = {
        str(path.relative_to(model)): path.read_bytes()
        for path in model.rglob("*")
        if path.is_file()
    }
    hub.add("org/tiny", files)
    place = resolve_model("org/tiny").tokenizer_path
    assert place is not None and not hub.fetched(".safetensors")
    assert shown(place, tools=[TOOL]) == shown(model, tools=[TOOL])


@pytest.mark.parametrize("names", [("default", "tool_use"), ("tool_use",), ("default",)])
def test_templates_of_a_gguf_file_are_read(names: tuple[str, ...], tmp_path: Path) -> None:
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<|im_start|>", "<|im_end|>"]
    out.add_context_length(64)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types([1] * 257 + [3, 3])
    out.add_token_merges(["a b"])
    out.add_eos_token_id(258)
    if "default" in names:
        out.add_string("tokenizer.chat_template", CHATML)
    if "tool_use" in names:
        out.add_string("tokenizer.chat_template.tool_use", WITH_TOOLS)
    out.add_tensor("x", np.zeros(4, np.float32), raw_dtype=TYPES["F32"])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert tokenizer is not None
    right = {name: BOTH[name] for name in names}
    assert tokenizer.chat_template == (CHATML if names == ("default",) else right)
    (tmp_path / "hf").mkdir()
    save_tokenizer(tmp_path / "m.gguf", tmp_path / "hf")
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("templates", [None, CHATML, BOTH])
def test_a_served_teacher_says_all_of_its_templates(templates: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Info.model_fields["chat_template"].annotation)
    assert adapter.validate_json(json.dumps(templates)) == templates
