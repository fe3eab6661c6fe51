"""Makes the models of the quickstart, and a student with experts, and puts them into the package.

All learn three-term sums from worked solutions (`algorithm: sft`), from random weights: the
teacher until it solves nearly all, the students only until they know the form of a solution.

    python -m jaxrl.scripts.make_quickstart            # all; a quarter of an hour on two cores
    python -m jaxrl.scripts.make_quickstart student    # one of them
    python -m jaxrl.scripts.make_quickstart tokenizer  # only the tokenizer of teacher and student
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxrl
from jaxrl import Config, train
from jaxrl.config import cli
from jaxrl.errors import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from jaxrl.models.config import DecoderConfig

ASSETS = Path(jaxrl.__file__).parent / "assets"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = "0123456789+-*/=() ?\n"
SHAPES: dict[str, dict[str, Any]] = {
    "teacher": {"n_layers": 3},
    "student": {"n_layers": 2},
    "student_moe": {
        "n_layers": 2,
        "family": "qwen3_moe",
        "d_model": 64,
        "head_dim": 16,
        "d_ff": 96,
        "experts": {"count": 8, "chosen": 2, "normalised": True, "dense_width": 192},
    },
}
RECIPE = """
algorithm=sft teacher.model=null mesh=actor+rollout=1 batch_size=128 group_size=1
max_prompt_tokens=9 max_new_tokens=10
data.eval=arithmetic optimizer.learning_rate=2e-3 optimizer.warmup_steps=30 optimizer.b2=0.95
actor.remat=none actor.micro_batch_tokens=null logging.samples=1 logging.every=50
"""
STAGES = {
    "teacher": """
steps=2000 optimizer.lr_schedule=linear eval.every=500
data.train=[arithmetic:terms=2,arithmetic:digits=1,arithmetic:size=1000000]
""",
    "student": """
steps=480 optimizer.lr_schedule=constant eval.every=60
data.train=['arithmetic:terms=2,size=9000','arithmetic:digits=1,size=9000','arithmetic:size=9000']
""",
}
STAGES["student_moe"] = STAGES["student"]
"""The sources of a list are mixed by their sizes: the teacher sees three-term sums of two digits,
the students for two thirds easier ones."""
NAMES = (*SHAPES, "tokenizer")


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Returns one token per character, 24 in all; adds no BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def write_tokenizer(folder: Path) -> None:
    """Writes `character_tokenizer` into a folder."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{folder}: {len(tokenizer)} tokens")


def small_model(tokenizer: PreTrainedTokenizerBase, **shape: Any) -> DecoderConfig:
    """Returns a model of less than a million weights for the tokens of a tokenizer.

    Args:
        shape: fields of `DecoderConfig`; `experts` as those of `Experts`.
    """
    from jaxrl.models.config import DecoderConfig
    from jaxrl.models.experts import Experts

    if "experts" in shape:
        shape = shape | {"experts": Experts(**shape["experts"])}
    usual: dict[str, Any] = {"family": "llama", "d_model": 128, "head_dim": 32, "d_ff": 352}
    return DecoderConfig(
        **usual | shape,
        vocab_size=len(tokenizer),
        n_heads=4,
        n_kv_heads=4,
        tie_embeddings=True,
        max_positions=128,
        eos_ids=(tokenizer.eos_token_id,),
        bos_id=tokenizer.bos_token_id,
        pad_id=tokenizer.pad_token_id,
    )


def make(name: str) -> None:
    """Trains one model and replaces its folder in the package."""
    import jax

    from jaxrl.checkpoint.model_source import FINAL
    from jaxrl.formats.hf import save_hf
    from jaxrl.models.parameters import init_params

    target = ASSETS / name
    with tempfile.TemporaryDirectory() as folder:
        start, run = Path(folder) / "start", Path(folder) / "run"
        tokenizer = character_tokenizer()
        config = small_model(tokenizer, **SHAPES[name])
        save_hf(start, config, init_params(config, jax.random.key(0)), dtype="float32")
        write_tokenizer(start)
        overrides = [
            f"student.model={start}",
            f"run_dir={run}",
            *RECIPE.split(),
            *STAGES[name].split(),
        ]
        result = train(Config.load("builtin:quickstart", overrides))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run / FINAL, target)
        print(f"{target}: accuracy {result.final_eval:.1%}")


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_quickstart", __doc__ or "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse(argv).names
    for name in names:
        if name not in NAMES:
            raise unknown("model", name, NAMES)
    for name in names or SHAPES:
        if name != "tokenizer":
            make(name)
            continue
        for model in ("teacher", "student"):
            write_tokenizer(ASSETS / model)


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
