"""transformers' `generate` and the divergence in plain PyTorch, on `work.py`'s work. One JSON line.

python torch_work.py sampler|heavy|jsd [--compile] --teacher FOLDER --prompts FILE
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
import transformers
import work


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("what", choices=("sampler", "heavy", "jsd"))
    told.add_argument("--compile", action="store_true")
    told.add_argument("--teacher")
    told.add_argument("--prompts")
    told.add_argument("--repeats", type=int, default=5)
    arguments = told.parse_args()
    transformers.set_seed(0)
    found = jsd(arguments) if arguments.what == "jsd" else generate(arguments)
    name = "torch compiled" if arguments.compile else "torch eager"
    library = name if arguments.what == "jsd" else "transformers"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(work.line(library, arguments.what, **found, versions=versions))


def generate(arguments: argparse.Namespace) -> dict:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.teacher, dtype=torch.float32
    ).eval()
    rows = work.prompts(arguments.prompts)

    def one(index: int, new: int) -> int:
        ids = torch.zeros(work.SAMPLER_BATCH, work.WIDTH, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.batch(rows, index, work.SAMPLER_BATCH)):
            ids[row, -len(prompt["ids"]) :] = torch.tensor(prompt["ids"])
            mask[row, -len(prompt["ids"]) :] = 1
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[:, work.WIDTH :].numel()

    def heavy(_: int) -> int:
        for index, longest in enumerate(work.heavy_batches()):
            one(index, longest)
        return sum(work.heavy_lengths())

    if arguments.what == "heavy":
        return work.timed(heavy, arguments.repeats)
    return work.timed(lambda i: one(i, work.NEW), arguments.repeats)


def divergence(
    hidden: torch.Tensor,
    head: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_head: torch.Tensor,
) -> torch.Tensor:
    """beta KL(P||M) + (1 - beta) KL(Q||M), M = beta P + (1 - beta) Q, mean over tokens."""
    q = F.log_softmax(hidden @ head.T, -1)
    p = F.log_softmax(teacher_hidden @ teacher_head.T, -1)
    m = torch.logaddexp(p, q) + torch.log(torch.tensor(0.5))  # beta 0.5
    total = F.kl_div(m, p, reduction="sum", log_target=True)
    total = total + F.kl_div(m, q, reduction="sum", log_target=True)
    return 0.5 * total / hidden.shape[0]


def jsd(arguments: argparse.Namespace) -> dict:
    tokens, width, vocab = work.JSD
    hidden, teacher_hidden = torch.randn(tokens, width), torch.randn(tokens, width)
    head, teacher_head = (torch.randn(vocab, width) * width**-0.5 for _ in range(2))
    hidden.requires_grad_(True)
    head.requires_grad_(True)
    loss = torch.compile(divergence) if arguments.compile else divergence

    def step(_: int) -> int:
        hidden.grad = head.grad = None
        loss(hidden, head, teacher_hidden, teacher_head).backward()
        return tokens

    return work.timed(step, arguments.repeats, warm=2)


if __name__ == "__main__":
    main()
