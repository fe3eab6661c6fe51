"""Runs of one process share programs where all that these are made of is the same: the actor's, the
reference's, the choice of the policy's top tokens and the merging of adapters.

A run traces and lowers its programs anew, which takes most of a tiny run's time, and several tests
repeat a run with another folder. A program is a pure function of the config, the model, the mesh
and the loss: of the config, what says where and how often something is written or evaluated does
not count, nor which rows are read, nor what rewards completions, nor who else is on the devices,
nor how many steps there are, where the learning rate is the same in all: it is constant once it
has risen, and a run is longer than the rise. The loss is compared by
its code and by what it closes over; what cannot be compared is like nothing else. A file whose
tests patch what is traced must not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import pytest

from jaxrl.config.schema import Config
from jaxrl.roles import actor, reference, rollout
from jaxrl.roles.update import ActorPrograms

UNREAD: dict[str, Any] = {
    **dict.fromkeys(("run_dir", "name", "resume", "checkpoint", "logging", "compile_cache"), True),
    **dict.fromkeys(("deadlines", "eval", "mesh", "offload", "reference", "reward"), True),
    **dict.fromkeys(("grouper", "profile", "schedule", "launcher", "ray"), True),
    "student": {"model"},
    "distill": {"on_policy_fraction", "seq_kd"},
    "rollout": {"merge", "cache_tokens"},
    "data": {"train", "eval"},
    "policy": {"max_refills", "dynamic_sampling", "advantages", "reward_kl_coef"},
    "teacher": {"prompt", "max_prompt_tokens", "num_microbatches", "cache"},
    "teachers": {"__all__": {"model", "address"}},  # their names are read
}
"""Keys of a config, and of its sections, that no program of an actor reads; its mesh and what the
student's folder says of the model are given beside the config."""
MADE_BY = (
    (reference, "reference_program"),
    (rollout, "topk_program"),
    (rollout, "merge_adapters_program"),
)
"""What makes the programs of other roles, of arguments that all their content is in."""
AT_MOST = 12
"""Programs that are kept, the oldest of which makes room."""


@contextmanager
def kept_programs() -> Iterator[None]:
    """Within it, actors of equal programs have the same ones."""
    kept: dict[Any, ActorPrograms] = {}

    def make(*given: Any) -> ActorPrograms:
        wanted = content(given)
        if wanted not in kept:
            if len(kept) == AT_MOST:
                del kept[next(iter(kept))]
            kept[wanted] = ActorPrograms(*given)
        return kept[wanted]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "ActorPrograms", make)
        for module, name in MADE_BY:
            patch.setattr(module, name, lru_cache(AT_MOST)(getattr(module, name)))
        yield


class Itself:
    """Equal to nothing but the same object, which it keeps alive."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def content(x: Any) -> Any:
    """What can be hashed, and is equal where two programs made of such values are."""
    if isinstance(x, Config):
        rises, steady = x.optimizer.warmup_steps, x.optimizer.lr_schedule == "constant"
        unread = UNREAD | ({"steps": True} if steady and rises < x.steps else {})
        # All that a loss asks of the schedule.
        return Config, x.correction, x.model_dump_json(exclude=unread)
    if isinstance(x, FunctionType):
        x = unwrap(x)  # of the checks of its shapes, which are new objects for each function
        cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
        rest = cells, x.__defaults__, x.__kwdefaults__
        return x.__module__, x.__qualname__, x.__code__, content(rest)
    if isinstance(x, partial):
        return partial, content((x.func, x.args, x.keywords))
    if isinstance(x, tuple | list):
        return type(x), tuple(map(content, x))
    if isinstance(x, dict):
        return dict, tuple((name, content(value)) for name, value in x.items())
    try:
        hash(x)
    except TypeError:
        return Itself(x)
    return x
