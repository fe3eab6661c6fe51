"""The same work in torch and transformers, for `gpu.py`. A JSON line for each measurement.

    python benchmarks/gpu_torch.py JSON

JSON: `config` (as of `config.json`), `device`, `batches`, `contexts`, `new`, `update` (sequences,
their tokens, tokens of a micro-batch) and `seconds` to repeat each for. Sampling is `generate` with
a static cache; its seconds are those of `new` tokens, with those of one token, prefill included,
taken off. The training step is cross-entropy on all tokens, without a teacher: float32 weights
under autocast, recomputed blocks, fused AdamW.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial


def main() -> None:
    given = json.loads(sys.argv[1])
    try:
        import torch
        import transformers
    except ImportError as error:
        write("torch", error=f"torch is not measured: {error}")
        return
    if given["device"] == "cuda" and not torch.cuda.is_available():
        write("torch", error="torch is not measured: this torch finds no CUDA device")
        return
    config = transformers.AutoConfig.for_model(**given["config"])
    for batch in given["batches"]:
        context = given["contexts"][0]
        guarded(f"generate x {batch}, context {context}", partial(generate, given, config, batch))
    rows, width, _ = given["update"]
    guarded(f"training step, {rows} x {width}, cross-entropy", partial(train, given, config))


def guarded(name: str, find: Callable[[], dict]) -> None:
    try:
        write(name, **find())
    except Exception as error:  # out of memory; a kernel that does not exist
        lines = str(error).strip().splitlines()
        write(name, error=f"{type(error).__name__}: {lines[0] if lines else ''}"[:400])


def write(name: str, **found: object) -> None:
    print(json.dumps({"name": name, **found}), flush=True)


def model_of(given: dict, config: object, dtype: object) -> object:
    import torch
    import transformers

    with torch.device(given["device"]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(given["device"])


def timed(given: dict, call: Callable[[], object]) -> float:
    """Median of calls after two that compile and allocate."""
    import torch

    cuda = given["device"] == "cuda"
    found: list[float] = []
    for i in range(1000):
        begin = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        if i > 1:
            found.append(time.perf_counter() - begin)
        if len(found) >= 3 and sum(found) > given["seconds"]:
            break
    return statistics.median(found)


def peak(given: dict) -> dict:
    """Most bytes since the last question."""
    import torch

    if given["device"] != "cuda":
        return {}
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"device": found}


def generate(given: dict, config: object, batch: int) -> dict:
    import torch

    cuda, new = given["device"] == "cuda", given["new"]
    model = model_of(given, config, torch.bfloat16 if cuda else torch.float32).eval()
    width = given["contexts"][0] - new
    ids = torch.randint(0, config.vocab_size, (batch, width), device=given["device"])

    def run(tokens: int) -> float:
        def call() -> None:
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                cache_implementation="static",
            )

        return timed(given, call)

    with torch.inference_mode():
        seconds = run(new) - run(1)
    if seconds <= 0:
        return {"error": "too few tokens to tell decoding from prefill"}
    tokens = batch * (new - 1)
    return {"value": tokens / seconds, "unit": "tokens/s", "seconds": seconds, **peak(given)}


def train(given: dict, config: object) -> dict:
    import torch

    device, cuda = given["device"], given["device"] == "cuda"
    rows, width, budget = given["update"]
    model = model_of(given, config, torch.float32).train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    ids = torch.randint(0, config.vocab_size, (rows, width), device=device)
    parts = ids.split(max(1, budget // width))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in parts:
            with torch.autocast(device, torch.bfloat16, enabled=cuda):
                loss = model(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
        optimizer.step()

    seconds = timed(given, step)
    return {"value": rows * width / seconds, "unit": "tokens/s", "seconds": seconds, **peak(given)}


if __name__ == "__main__":
    main()
