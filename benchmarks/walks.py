"""A task on which errors compound and can be mended: walks through a building, written as text.

The building is a square of rooms with doors between some of them, always the same. The prompt
`54-51=` asks for a way from room 54 to room 51, and a completion names every room that is entered:
`4443424151`. It is right where each room has a door to the one before and the last one is the goal,
whatever the detours (`data.verifier=walk`, once `make` has been called). Whoever has learnt
shortest ways alone has not seen where an error leads, and a teacher that has can say how to go on
(DAgger, Ross et al. 2011, arXiv 1011.0686).

    python benchmarks/walks.py          # models and data, into runs/walks; minutes on two cores
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxrl import Config, train
from jaxrl.checkpoint.model_source import FINAL, resolve_model
from jaxrl.formats.hf import save_hf
from jaxrl.models.parameters import init_params
from jaxrl.rewards.verifiers import VERIFIERS, Judged

FOLDER = Path("runs/walks")
TEACHER, STUDENT = FOLDER / "teacher", FOLDER / "student"
LABELLED, HELD_OUT = FOLDER / "labelled.jsonl", FOLDER / "held_out.jsonl"
COUNTS = {LABELLED: 512, HELD_OUT: 256}
FAR = 4
"""Rooms that a walk of these files enters at least."""
FIRST_WALKS = 120_000
"""Walks that the teacher learns from."""
SIZES: dict[Path, dict[str, int]] = {
    TEACHER: {"n_layers": 3, "d_model": 128, "head_dim": 32, "d_ff": 352},
    STUDENT: {"n_layers": 2, "d_model": 64, "head_dim": 16, "d_ff": 176},
}
KEYS = (
    *("mesh=actor+rollout+teacher=1", "group_size=1", "batch_size=64"),
    *("max_prompt_tokens=6", "max_new_tokens=48", "rollout.launch_tokens=12"),
    *(f"data.train={LABELLED}", f"data.eval={HELD_OUT}", "data.verifier=walk", "eval.prompts=256"),
    *(f"student.model={STUDENT}", f"teacher.model={TEACHER}"),
)
"""Of every run on the task."""
SFT = (
    "algorithm=sft",
    "teacher.model=null",
    "mesh=actor+rollout=1",
    "eval.every=0",
    "checkpoint.every=0",
)
RECIPES = {
    TEACHER: "steps=600 batch_size=128 max_prompt_tokens=30 optimizer.learning_rate=2e-3",
    STUDENT: "steps=400 optimizer.learning_rate=3e-3 optimizer.lr_schedule=constant",
}

Room = tuple[int, int]
"""Row and column."""


@dataclass(frozen=True)
class Building:
    """A square of rooms, all of which can be reached."""

    side: int = 6
    """Rooms along a side, at most 10: one digit each for row and column."""
    loops: float = 0.1
    """Share of the walls of a maze without loops that get a door all the same."""

    @cached_property
    def doors(self) -> dict[Room, list[Room]]:
        """Room -> the rooms next to it that have a door to it."""
        draw, size = random.Random(0), range(self.side)
        doors: dict[Room, list[Room]] = {(row, column): [] for row in size for column in size}

        def open_door(one: Room, other: Room) -> None:
            doors[one].append(other)
            doors[other].append(one)

        way, seen = [(0, 0)], {(0, 0)}
        while way:
            new = [room for room in beside(way[-1]) if room in doors and room not in seen]
            if new:
                way.append(draw.choice(new))
                seen.add(way[-1])
                open_door(*way[-2:])
            else:
                way.pop()
        for one in doors:
            for other in beside(one):
                wall = other in doors and one < other and other not in doors[one]
                if wall and draw.random() < self.loops:
                    open_door(one, other)
        return doors

    @cached_property
    def distances(self) -> dict[Room, dict[Room, int]]:
        """Goal -> room -> rooms to enter on a shortest way."""
        found = {}
        for goal in self.doors:
            steps, ring = {goal: 0}, [goal]
            for room in ring:  # grows while it is read: breadth first
                for new in self.doors[room]:
                    if new not in steps:
                        steps[new] = steps[room] + 1
                        ring.append(new)
            found[goal] = steps
        return found

    def walk(
        self, start: Room, goal: Room, draw: random.Random, astray: float = 0.0
    ) -> Iterator[Room]:
        """The rooms that are entered. At each door the walk takes any door with the chance
        `astray`, else one of those that lead to the goal on a shortest way."""
        steps, room = self.distances[goal], start
        while room != goal:
            near = self.doors[room]
            if not astray or draw.random() >= astray:
                near = [new for new in near if steps[new] < steps[room]]
            room = draw.choice(near)
            yield room


BUILDING = Building()


def beside(room: Room) -> list[Room]:
    row, column = room
    return [(row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)]


def written(rooms: Iterable[Room]) -> str:
    return "".join(f"{row}{column}" for row, column in rooms)


def arrives(completion: str, prompt: Judged) -> float:
    """1 where a completion is a walk of the building from the start to the goal of the answer,
    which is the question."""
    start, goal = ((int(room[0]), int(room[1])) for room in str(prompt.answer)[:-1].split("-"))
    if len(completion) % 2 or not (completion.isascii() and completion.isdigit()):
        return 0.0
    pairs = zip(completion[::2], completion[1::2], strict=True)
    way = [start, *((int(row), int(column)) for row, column in pairs)]
    legal = all(new in BUILDING.doors[room] for room, new in zip(way, way[1:], strict=False))
    return float(legal and way[-1] == goal)


def row(start: Room, goal: Room, draw: random.Random, begun: int = 0) -> dict[str, str]:
    """A shortest way to the goal, once at most `begun` rooms have been entered half at random:
    these belong to the prompt."""
    strolled: list[Room] = []
    for _, room in zip(range(begun), BUILDING.walk(start, goal, draw, astray=0.5), strict=False):
        if room != goal:
            strolled.append(room)
    question = f"{written([start])}-{written([goal])}="
    way = BUILDING.walk(strolled[-1] if strolled else start, goal, draw)
    return {
        "prompt": question + written(strolled),
        "completion": written(way),
        "answer": question,
    }


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


def make() -> None:
    """Adds the verifier; writes the files and trains the teacher and the student's first weights,
    where they are not there yet: minutes on two cores.

    The teacher learns ways from everywhere to everywhere, also from where half random walks have
    led. The student learns some of the shortest ways, of pairs of rooms that are not held out.
    """
    VERIFIERS["walk"] = arrives
    if STUDENT.exists():  # it is the last
        return
    apart = list(itertools.permutations(BUILDING.doors, 2))
    far = [pair for pair in apart if BUILDING.distances[pair[1]][pair[0]] >= FAR]
    draw = random.Random(0)
    draw.shuffle(far)
    for path, count in COUNTS.items():
        write(path, [row(*far.pop(), draw) for _ in range(count)])
    if not TEACHER.exists():
        fit(TEACHER, first_walks(apart))
    fit(STUDENT)


def first_walks(apart: list[tuple[Room, Room]]) -> Iterator[dict[str, str]]:
    draw = random.Random(7)
    for _ in range(FIRST_WALKS):
        yield row(*draw.choice(apart), draw, begun=draw.choice((0, 0, 1, 2, 4, 8, 12)))


def fit(model: Path, first: Iterable[dict[str, str]] | None = None) -> None:
    """Trains a model from random weights, by the completions of `first` or else of LABELLED."""
    base = resolve_model("builtin:teacher")
    sizes: dict[str, Any] = SIZES[model]
    config = replace(base.config, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        start, data = Path(folder) / "start", LABELLED
        save_hf(start, config, init_params(config, jax.random.key(0)), dtype="float32")
        for file in base.path.glob("tokenizer*.json"):
            shutil.copy(file, start)
        if first is not None:
            data = Path(folder) / "data.jsonl"
            write(data, first)
        own = [f"student.model={start}", f"run_dir={folder}/run", f"data.train={data}"]
        keys = [*KEYS, *SFT, *RECIPES[model].split(), *own, "optimizer.warmup_steps=30"]
        result = train(Config.load("builtin:quickstart", keys))
        copied = Path(shutil.copytree(Path(folder) / "run" / FINAL, f"{model}.part"))
        copied.rename(model)  # a model that is there is whole
        print(f"{model}: accuracy {result.final_eval:.1%}", flush=True)


if __name__ == "__main__":
    make()
