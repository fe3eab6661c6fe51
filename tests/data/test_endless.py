"""Rows of a user's code: read whole where they end, in their order where they do not."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from runs import CONSTANT, SHORT, numbers, save_model, save_pair, start, wait_for, weights
from tiny_tokenizer import tiny_tokenizer

import jaxrl
from jaxrl import Config, UserError
from jaxrl.checkpoint import store
from jaxrl.data import endless
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.source import open_source, source_of
from jaxrl.data.stream import PromptStream

OWN = Path(__file__).parents[1] / "support" / "own_data.py"
PLAIN = tiny_tokenizer(template=None, eos="<|endoftext|>")


def stream(source, **more):
    return PromptStream(source, PromptEncoder(PLAIN, 24, 8), 3, seed=0, **more)


def texts(found, *batches):
    return [prompt.text for index in batches for prompt in found.batch(index)]


@pytest.fixture
def few_are_whole(monkeypatch):
    """So that a stream begins soon."""
    monkeypatch.setattr(endless, "READ_WHOLE", 20)
    monkeypatch.setattr(endless, "KEPT", 8)


@pytest.mark.parametrize("name", ["LISTED", "listed", "few"])
def test_what_ends_is_data_as_any_other(name):
    source = open_source(f"{OWN}:{name}")
    assert len(source) == 7 and not stream(source).endless
    listed = open_source(f"{OWN}:LISTED")
    assert texts(stream(source), 0, 1, 5) == texts(stream(listed), 0, 1, 5)


@pytest.mark.parametrize("name", ["endless", "numbered", "ROWS"])
@pytest.mark.usefixtures("few_are_whole")
def test_rows_without_an_end_come_in_their_order_whenever_they_are_asked_for(name):
    """Also again, and by an object that is made later: as a run that resumes asks."""
    found = stream(open_source(f"{OWN}:{name}"))
    assert found.endless and found.dropped == 0
    first = texts(found, *range(30))
    assert [text[0] for text in first] == [str(n % 10) for n in range(90)]
    assert texts(found, 2, 29, 0) == first[6:9] + first[87:90] + first[:3]
    resumed = stream(open_source(f"{OWN}:{name}"))
    assert texts(resumed, 25, 26) == first[75:81]
    assert resumed.fingerprint == found.fingerprint


@pytest.mark.usefixtures("few_are_whole")
def test_a_function_that_takes_start_is_asked_for_the_row_where_a_run_goes_on(monkeypatch):
    asked = []

    def rows(start=0):
        asked.append(start)
        return ({"prompt": f"{n}+1="} for n in itertools.count(start))

    found = stream(source_of(rows))
    assert texts(found, 1000) == ["3000+1=", "3001+1=", "3002+1="] and asked == [0, 3000]


@pytest.mark.usefixtures("few_are_whole")
def test_rows_that_end_after_all_begin_again_and_an_iterator_is_read_once():
    def many():
        for n in range(25):
            yield {"prompt": f"{n}+1="}

    found = stream(source_of(many))
    assert texts(found, 8, 9) == [f"{n}+1=" for n in (24, 0, 1, 2, 3, 4)]
    once = stream(source_of(many()))
    assert texts(once, 7) == ["21+1=", "22+1=", "23+1="]
    with pytest.raises(UserError, match="an iterator can be read once: give a function"):
        once.batch(9)


@pytest.mark.usefixtures("few_are_whole")
def test_a_mixture_takes_them_by_its_weights(tmp_path):
    specs = [f"{OWN}:numbered", f"{OWN}:listed"]
    with pytest.raises(UserError, match="no end that is known: set data.weights"):
        stream(open_source(specs))
    mixed = texts(stream(open_source(specs), weights=[2, 1]), *range(20))
    alone = texts(stream(open_source(specs[0])), *range(20))
    listed = {row.prompt for row in open_source(specs[1])}
    assert [text for text in mixed if text not in listed] == [
        text for text in alone[:40] if text not in listed
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", r"data.train: .*breaks: row 1 \(.*own_data.py, line \d+\): KeyError"),
        ("asks", r"data.train: .*asks takes \(folder\): a function of rows has no arguments"),
        ("bare", "data.train: .*bare: row 0: a JSON object is needed, this is text"),
        ("absent", "has no absent"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(name, message):
    with pytest.raises(UserError, match=message):
        open_source(f"{OWN}:{name}")


def keys(folder, *more):
    given = [*SHORT, *CONSTANT, "algorithm=sft", "teacher.model=null", "mesh=actor+rollout=1"]
    given += ["data.eval=null", "checkpoint.every=1", f"data.train={OWN}:numbered"]
    return Config.load("builtin:quickstart", [*given, f"run_dir={folder}", *more])


@pytest.mark.usefixtures("shared_programs")
def test_a_run_on_them_goes_on_as_if_it_had_not_ended(tmp_path):
    student = f"student.model={save_model(tmp_path / 'student', 32, 1, 0)}"
    whole = jaxrl.train(keys(tmp_path / "whole", student, "steps=3"))
    jaxrl.train(keys(tmp_path / "parts", student, "steps=1"))
    parts = jaxrl.train(keys(tmp_path / "parts", student, "steps=3"))
    assert numbers(parts) == numbers(whole) and weights(parts.run_dir) == weights(whole.run_dir)


@pytest.mark.slow
def test_a_killed_run_on_them_goes_on_as_if_nothing_had_been(tmp_path):
    models, data = save_pair(tmp_path, layers=1), f"data.train={OWN}:endless"
    victim = start(models, tmp_path / "run", data)
    wait_for(tmp_path / "run" / "checkpoints" / "2" / store.MANIFEST, victim, 600)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    for folder in ("run", "whole"):
        assert start(models, tmp_path / folder, data).wait() == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
