"""The walks that models learn from arrive, the verifier refuses what is no walk, and both models
are made."""

from __future__ import annotations

import itertools
import random

import pytest
import walks
from walks import BUILDING

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.data.example import Example

QUESTION = "00-55="


def judged(completion, question=QUESTION):
    return walks.arrives(completion, Example(question, None, question, {}))


def test_the_shortest_ways_have_the_length_of_their_distance():
    for start, goal in itertools.permutations(BUILDING.doors, 2):
        way = list(BUILDING.walk(start, goal, random.Random(0)))
        assert len(way) == BUILDING.distances[goal][start] == BUILDING.distances[start][goal]
        assert judged(walks.written(way), f"{walks.written([start])}-{walks.written([goal])}=")


def test_a_detour_arrives():
    start, goal, draw = (0, 0), (5, 5), random.Random(0)
    way = list(BUILDING.walk(start, goal, draw, astray=0.5))
    assert len(way) > BUILDING.distances[goal][start]
    assert judged(walks.written(way))


@pytest.mark.parametrize("change", ["", "stops early", "half a room", "through a wall", "+"])
def test_what_is_no_walk_does_not_arrive(change):
    way = walks.written(BUILDING.walk((0, 0), (5, 5), random.Random(0)))
    assert judged(way)
    wrong = {
        "": "",
        "stops early": way[:-2],
        "half a room": way + "5",
        "through a wall": way[:2] + way[4:],
        "+": "+" + way[1:],
    }
    assert not judged(wrong[change])


def test_the_teachers_walks_begin_half_at_random_and_end_at_the_goal():
    draw, begun = random.Random(0), []
    for _ in range(200):
        row = walks.row((0, 0), (5, 5), draw, begun=8)
        question, strolled = row["prompt"].split("=")
        begun.append(len(strolled) // 2)
        assert judged(strolled + row["completion"]) and row["answer"] == question + "="
    assert set(begun) == {8}  # the goal is further away


@pytest.mark.usefixtures("shared_programs")
def test_the_models_are_made_with_their_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(walks, "FIRST_WALKS", 64)
    monkeypatch.setitem(walks.VERIFIERS, "walk", walks.arrives)
    small = walks.SIZES[walks.STUDENT] | {"n_layers": 1}  # both models are of the same programs
    monkeypatch.setattr(walks, "SIZES", dict.fromkeys(walks.SIZES, small))
    short = "steps=1 batch_size=8 eval.prompts=1 rollout.slots=1 max_prompt_tokens=30"
    short += " optimizer.learning_rate=2e-3 optimizer.lr_schedule=constant"
    recipes = {model: f"{recipe} {short}" for model, recipe in walks.RECIPES.items()}
    monkeypatch.setattr(walks, "RECIPES", recipes)
    walks.make()
    said = capsys.readouterr().out
    for model, sizes in walks.SIZES.items():
        made = resolve_model(str(model)).config
        assert (made.n_layers, made.d_model) == (sizes["n_layers"], sizes["d_model"])
        assert f"{model}: accuracy" in said
    assert len(walks.HELD_OUT.read_text().splitlines()) == walks.COUNTS[walks.HELD_OUT]
    made = walks.STUDENT.stat().st_mtime_ns
    walks.make()  # nothing, the second time
    assert walks.STUDENT.stat().st_mtime_ns == made
