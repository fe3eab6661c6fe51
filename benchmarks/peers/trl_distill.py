r"""TRL's on-policy distillation on `work.py`'s work. One JSON line.

    python trl_distill.py gkd|distillation --teacher FOLDER --student FOLDER --prompts FILE \
        [--what distill-tail]

gkd: `trl.experimental.gkd.GKDTrainer` with lmbda=1. distillation: `trl.DistillationTrainer`. A step
is the trainer's own, generation included; nothing is saved or reported.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import datasets
import torch
import transformers
import trl
import work

WARM = 1


class Clock(transformers.TrainerCallback):
    """Seconds of each step, and the completion tokens that it was trained on."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begin)

    def found(self, what: str) -> dict[str, list[Any]]:
        """Of the steps after the warm-up."""
        tokens = [work.drawn_of(what, n) for n in self.tokens[WARM:]]
        return {"seconds": self.seconds[WARM:], "tokens": tokens}


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("trainer", choices=("gkd", "distillation"))
    told.add_argument("--what", choices=("distill", "distill-tail"), default="distill")
    told.add_argument("--teacher", required=True)
    told.add_argument("--student", required=True)
    told.add_argument("--prompts", required=True)
    told.add_argument("--repeats", type=int, default=3)
    told.add_argument("--beta", type=float, default=work.BETA)
    arguments = told.parse_args()
    transformers.set_seed(0)
    clock = Clock()
    make = gkd if arguments.trainer == "gkd" else distillation
    make(arguments, clock).train()
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    library = "TRL GKD" if arguments.trainer == "gkd" else "TRL Distillation"
    print(work.line(library, arguments.what, **clock.found(arguments.what), versions=versions))


def models(arguments: argparse.Namespace) -> dict[str, Any]:
    def load(folder: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.teacher, padding_side="left")
    return {
        "model": load(arguments.student),
        "teacher_model": load(arguments.teacher),
        "processing_class": tokenizer,
    }


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": work.BATCH,
        "max_steps": WARM + arguments.repeats,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "beta": arguments.beta,
        "temperature": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def gkd(arguments: argparse.Namespace, clock: Clock) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    roles = models(arguments)
    roles["model"].generation_config.eos_token_id = None
    rows = [
        {"messages": [*row["messages"], {"role": "assistant", "content": "-"}]}
        for row in work.prompts(arguments.prompts)
    ]

    class Counted(GKDTrainer):
        def generate_on_policy_outputs(self, *args: Any, **kwargs: Any) -> Any:
            out = super().generate_on_policy_outputs(*args, **kwargs)
            clock.tokens.append(int((out[2] != -100).sum()))
            return out

    config = GKDConfig(
        lmbda=1.0,
        max_new_tokens=work.new_tokens(arguments.what),
        max_length=512,
        **settings(arguments),
    )
    data = datasets.Dataset.from_list(rows)
    return Counted(args=config, train_dataset=data, callbacks=[clock], **roles)


def distillation(arguments: argparse.Namespace, clock: Clock) -> Any:
    class Counted(trl.DistillationTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            out = super()._generate_single_turn(*args, **kwargs)
            clock.tokens.append(sum(map(len, out)))
            return out

    new = work.new_tokens(arguments.what)
    config = trl.DistillationConfig(
        max_completion_length=new,
        generation_kwargs={"min_new_tokens": new},
        **settings(arguments),
    )
    rows = [{"prompt": row["messages"]} for row in work.prompts(arguments.prompts)]
    data = datasets.Dataset.from_list(rows)
    return Counted(args=config, train_dataset=data, callbacks=[clock], **models(arguments))


if __name__ == "__main__":
    main()
