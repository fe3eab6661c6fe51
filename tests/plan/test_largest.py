"""The search for the largest value that fits, and for the first of ordered values, over runs whose
bytes are made up: no program is walked."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import Target
from jaxrl.plan import search
from jaxrl.plan.plan_inputs import PlanInputs, PoolPeak, Setting
from jaxrl.plan.search import STEPS, Candidate, first_fitting
from jaxrl.sharding.placement import place

ROLES = ("actor", "rollout", "teacher")
MODEL = DecoderConfig("qwen2", 96, 48, 3, 4, 2, 16, 64)
LIMIT = 10**9
Size = Callable[[int], float]
SIZES: dict[str, Size] = {
    "small": lambda n: 1e6,
    "constant": lambda n: 9.9e8,
    "line": lambda n: 1e8 + 3e5 * n,
    "steep": lambda n: 2e8 + 1e7 * n,
    "late": lambda n: max(5e8, 1e6 * n),  # another program is the fullest from some value on
    "square": lambda n: 1e8 + 3e3 * n * n,
    "steps": lambda n: 1e8 + 4e6 * 2 ** math.ceil(math.log2(n)),  # as buckets
    "waves": lambda n: 1e8 + 1e6 * n + 3e7 * (n % 7),  # as micro-batches that fill up
    "not to be numbered": lambda n: 1e8 if n < 700 else math.inf,
}
MOST = 1 << 16


def candidate(sizes: list[Size], monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> Candidate:
    def peak(setting: Setting, index: int) -> PoolPeak:
        asked.append(setting.config.batch_size)
        size = sizes[index](setting.config.batch_size)
        if size == math.inf:
            raise UserError("an array of more numbers than jax can index")
        return PoolPeak(setting.inputs.placement.pools[index], round(size), "", LIMIT)

    monkeypatch.setattr(search, "pool_peak", peak)
    raw: dict[str, object] = {
        "mesh": "actor=1,rollout=1,teacher=1",
        "batch_size": 4,
        "student": {"model": "s"},
    }
    raw |= {"teacher": {"model": "t"}, "data": {"train": "arithmetic"}}
    config = Config.parse(raw).with_dtypes("bfloat16")
    placement, target = place(config.mesh, ROLES), Target("gpu", (9, 0))
    limits = (LIMIT,) * 3
    return Candidate(config, PlanInputs(placement, ROLES, MODEL, MODEL, target, limits=limits))


@pytest.mark.parametrize("second", SIZES)
@pytest.mark.parametrize("first", SIZES)
def test_the_largest_value_fits_and_few_are_tried(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, asked = [SIZES[first], SIZES[second], SIZES["small"]], list[int]()
    found = candidate(sizes, monkeypatch, asked).largest("batch_size", MOST)

    def fits(n: int) -> bool:
        return all(size(n) <= LIMIT for size in sizes)

    assert fits(found) and len(set(asked)) <= 20
    beyond = found + max(1, found // STEPS) + 1
    if beyond <= MOST and "waves" not in (first, second):  # which a larger value may fit into
        # Half a step more: that much is left where a line through two values ends the search.
        assert not fits(math.ceil(beyond * (1 + 1 / STEPS)))


@pytest.mark.parametrize("values", [[], [8], [8, 4, 2, 1], list(range(100, 0, -1))], ids=len)
def test_the_first_of_ordered_values_that_fits_is_found(
    values: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = candidate([SIZES["small"]] * 3, monkeypatch, [])
    tried = [run.change("batch_size", value) for value in values]
    for limit in range(max([0, *values]) + 2):
        asked = list[int]()

        def fits(each: Candidate, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(each.config.batch_size)
            return each.config.batch_size <= limit

        found = first_fitting(tried, fits)
        expected = next((value for value in values if value <= limit), None)
        assert (found and found.config.batch_size) == expected
        assert len(asked) <= 2 + math.ceil(math.log2(max(len(values), 1)))
