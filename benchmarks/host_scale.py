"""What the host does for many slots and many tokens, without a device.

    python benchmarks/host_scale.py [--slots 512 2048 8192 65536] [--group 8] [--launch 64]

For each number of slots, 128 in each data shard: the seconds in which all are filled once, and the
milliseconds for each launch: its tokens are appended to their samples (`Slots.append`), slots are
looked at that could be given up (`Slots.shrink`), and the table is made of which slot reads which
prompt (`PromptRows.table`). Then a million tokens in completions of 1,024 with their log-probs,
packed and unpacked as they travel between processes (`runtime.serialization`), and with tuples of
ints in their place. Processor time, the best of five rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from jaxrl.runtime.serialization import pack, unpack
from jaxrl.sampling.partial_completion import PartialCompletion, RandomKey, SampleRequest
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sampling.slots import PromptRows, Slots
from jaxrl.types import Completion, TokenIds

PER_SHARD, PROMPT, LONGEST, ROUNDS = 128, 64, 2048, 5


def main() -> None:
    """Prints a line for each number of slots, and two for the tokens."""
    told = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told.add_argument("--slots", type=int, nargs="+", default=[512, 2048, 8192, 65536])
    told.add_argument("--group", type=int, default=8, help="completions of each prompt")
    told.add_argument("--launch", type=int, default=64, help="tokens of each slot in a launch")
    args = told.parse_args()
    print("   slots  seat all s  append ms  look ms  table ms")
    for slots in args.slots:
        rounds = [of_slots(slots, args.group, args.launch) for _ in range(ROUNDS)]
        seat, append, look, table = map(min, zip(*rounds, strict=True))
        print(f"{slots:8,}{seat:12.3f}{1e3 * append:11.1f}{1e3 * look:9.2f}{1e3 * table:10.1f}")
    sampled = million_tokens()
    tuples = [(tuple(c.tokens), c.logprobs, c.sampler_logprobs) for c in sampled]
    for name, value in (("as they travel", sampled), ("tokens in tuples", tuples)):
        packed = [pack(value)]
        write = min(seconds(partial(pack, value)) for _ in range(ROUNDS))
        read = min(seconds(partial(unpack, packed)) for _ in range(ROUNDS))
        print(f"1M tokens, {name}: pack {1e3 * write:.0f} ms, unpack {1e3 * read:.0f} ms")


def seconds(work: Callable[[], object]) -> float:
    """Measures the processor's time of one call, which work of others changes least."""
    started = time.process_time()
    work()
    return time.process_time() - started


def of_slots(slots: int, group: int, launch: int) -> list[float]:
    """Measures the seconds to seat all, append, look and make the table, once each."""
    shards, prompts = slots // PER_SHARD, -(-slots // group)
    prompt, sampling = list(range(PROMPT)), SamplingParams(LONGEST)
    keys = [RandomKey(0, prompt=i // group, sample=i % group) for i in range(slots)]
    samples = [
        PartialCompletion(i, key.prompt, SampleRequest(prompt, sampling, key, LONGEST))
        for i, key in enumerate(keys)
    ]
    seats = Slots(slots, shards, launch, None, samples)
    rows = PromptRows(shards, PER_SHARD, group, prompts)
    drawn = np.random.default_rng(0).integers(1, 1000, (launch, slots, 3), np.int32)

    def seat() -> None:
        while (slot := seats.vacant_slot()) is not None:
            seats.seat_next(slot)
        rows.admit(seats.prompts)

    return [
        seconds(seat),
        seconds(lambda: seats.append(drawn, (0,))),
        seconds(lambda: seats.shrink(lambda taken, held: None)),
        seconds(lambda: rows.table(seats.prompts, seats.starts)),
    ]


def million_tokens() -> list[Completion]:
    """Makes completions of 1,024 tokens each."""
    rng = np.random.default_rng(0)
    return [
        Completion(
            tokens=TokenIds(rng.integers(0, 150_000, 1024)),
            logprobs=rng.random(1024, np.float32),
            sampler_logprobs=rng.random(1024, np.float32),
            finish_reason="stop",
        )
        for _ in range(977)
    ]


if __name__ == "__main__":
    main()
