"""TRL's GRPOTrainer with GSPO's ratio on `work.py`'s work. One JSON line.

    python trl_gspo.py [--what gspo-tail] --teacher FOLDER --prompts FILE

A step is the trainer's own, generation included; nothing is saved or reported.
"""

from __future__ import annotations

import argparse
from typing import Any

import datasets
import torch
import transformers
import trl
import work
from trl_distill import Clock, settings


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("--what", choices=("gspo", "gspo-tail"), default="gspo")
    told.add_argument("--teacher", required=True, help="the policy")
    told.add_argument("--prompts", required=True)
    told.add_argument("--repeats", type=int, default=3)
    arguments = told.parse_args()
    transformers.set_seed(0)
    clock = Clock()

    class Counted(trl.GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            out = super()._generate_single_turn(*args, **kwargs)
            clock.tokens.append(sum(map(len, out[0])))
            return out

    samples = work.GSPO[0] * work.GSPO[1]
    arguments.beta = 0.0  # no reference
    common = settings(arguments) | {
        "per_device_train_batch_size": samples,
        "learning_rate": 1e-6,
    }
    config = trl.GRPOConfig(
        num_generations=work.GSPO[1],
        max_completion_length=work.new_tokens(arguments.what),
        generation_kwargs={"min_new_tokens": work.new_tokens(arguments.what)},
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=work.GSPO_CLIP[0],
        epsilon_high=work.GSPO_CLIP[1],
        steps_per_generation=1,
        **common,
    )
    rows = [{"prompt": row["messages"]} for row in work.prompts(arguments.prompts)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.teacher, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.teacher, dtype=torch.float32
    )
    Counted(
        model=model,
        reward_funcs=work.digits,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    ).train()
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    print(work.line("TRL", arguments.what, **clock.found(arguments.what), versions=versions))


if __name__ == "__main__":
    main()
