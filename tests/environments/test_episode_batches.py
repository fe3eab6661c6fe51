"""A batch of episodes: prompts, replies, records, and what a resumed run gets again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.config import Config
from jaxrl.data.example import Example
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.thoughts import opening_of
from jaxrl.environments.episode_batches import EpisodeBatch, Episodes, pack_records, row_of
from jaxrl.errors import RunError, UserError
from jaxrl.sampling.partial_completion import Reply
from jaxrl.types import Prompt

HERE = Path(__file__).parent.parent / "support" / "episode_environments.py"
CHAT = tiny_tokenizer()
TEXT = tiny_tokenizer(template=None)


def made(
    name: str,
    tokenizer: Any = CHAT,
    run_dir: Path | None = None,
    max_prompt_tokens: int = 500,
    asks: bool = True,
    **given: Any,
) -> closing[Episodes]:
    config = Config.parse(
        {
            "student": {"model": "tiny"},
            "teacher": {"model": "tiny"},
            "data": {"train": ["arithmetic"]},
            "max_prompt_tokens": max_prompt_tokens,
            "environment": {"name": f"{HERE}:{name}", "workers": 1, "timeout": 5, **given},
        }
    )
    return closing(Episodes(config, tokenizer, run_dir=run_dir, asks=asks))


def prompts(*texts: str, tokenizer: Any = CHAT, **columns: object) -> list[Prompt]:
    encoder = PromptEncoder(tokenizer, 100, 100)
    examples = [Example(text, answer="7", columns=columns) for text in texts]
    found = [encoder.encode(example, 10 + i) for i, example in enumerate(examples)]
    return [prompt for prompt in found if prompt is not None]


def reply(batch: EpisodeBatch, place: tuple[int, int], text: str, length: int = 5) -> Reply:
    answer = batch.episode(*place).answer(text, eos=CHAT.eos_token_id, length=length)
    return answer.result(30)


def spelt(tokens: Sequence[int]) -> str:
    text: str = CHAT.decode(list(tokens), skip_special_tokens=False)
    return text


def test_what_an_episode_goes_through() -> None:
    with made("Echo", max_turns=3) as episodes:
        given = prompts("one", "two")
        begun, batch = episodes.begin(given, n=2, step=0)
        assert begun == given
        first = reply(batch, (0, 0), "a")
        assert first.text == "a" and first.reward is None and not first.cut
        assert spelt(first.tokens) == "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        assert reply(batch, (0, 1), "half") == Reply(
            tuple(CHAT("\n<|im_start|>user\nhalf<|im_end|>\n<|im_start|>assistant\n")["input_ids"]),
            "half",
            0.5,
            roles=("user",),
        )
        assert reply(batch, (0, 0), "done") == Reply(text="bye", reward=1.0)
        reply(batch, (0, 1), "b")
        last = reply(batch, (0, 1), "half")
        ended = Reply(text="half b half", reward=0.5, cut=True, roles=("user",))
        assert last == ended, "its third turn"
        room = episodes.config.max_new_tokens - len(first.tokens)
        assert reply(batch, (1, 0), "a", length=room - 1).tokens == first.tokens
        assert reply(batch, (1, 1), "a", length=room).cut
        batch.episode(1, 0).end()


def test_without_a_template_texts_follow_as_they_are() -> None:
    with made("Waits", tokenizer=TEXT) as episodes:
        (begun,), batch = episodes.begin(prompts("x", tokenizer=TEXT), n=1, step=0)
        assert TEXT.decode(begun.tokens) == begun.text == "begin x"
        assert TEXT.decode(reply(batch, (0, 0), "a").tokens) == "yes"


def test_the_prompt_is_the_environments() -> None:
    with made("Waits", max_prompt_tokens=60) as episodes:
        (begun,), _ = episodes.begin(prompts("x"), n=1, step=0)
        assert begun.text == "begin x" and "user\nbegin x<|im_end|>" in spelt(begun.tokens)
        assert begun.columns["messages"] == ({"role": "user", "content": "begin x"},)
        assert not begun.conversational  # `reset` returned a text
        long = prompts("y" * 60)
        with pytest.raises(UserError, match=r"prompt 10. has .* tokens, max_prompt_tokens=60"):
            episodes.begin(long, n=1, step=0)


def test_tools_are_shown_by_the_template() -> None:
    shows = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    with made("Tools", tokenizer=tiny_tokenizer(shows + CHATML)) as episodes:
        (begun,), batch = episodes.begin(prompts("x"), n=1, step=0)
        assert spelt(begun.tokens).startswith("[add][later]<|im_start|>user\nx")
        assert "<|im_start|>tool\n42<|im_end|>" in spelt(reply(batch, (0, 0), "add(41)").tokens)


def test_tools_that_nothing_shows_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shows = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    with made("Tools") as first:  # whose process serves the others too
        monkeypatch.setattr("jaxrl.environments.episode_batches.pool_of", lambda *_: first.pool)
        for tokenizer, expected in (
            (CHAT, "Tools: the model does not see its tools: the chat template has no place for"),
            (TEXT, "Tools: the model does not see its tools: text prompts have no place for them"),
            (tiny_tokenizer(shows + CHATML), ""),
        ):
            episodes = made("Tools", tokenizer=tokenizer).thing
            said: list[str] = []
            episodes.notify = said.append
            for step in range(2):
                episodes.begin(prompts("x", tokenizer=tokenizer), n=1, step=step)
            assert len(said) == bool(expected) and all(expected in line for line in said)


def test_a_turn_begins_in_the_thoughts_that_the_prompt_opens() -> None:
    """The turn may never close them; what it calls there is not called."""
    opens = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert opens != CHATML
    tokenizer = tiny_tokenizer(opens)
    with made("Tools", tokenizer=tokenizer) as episodes:
        (begun,), batch = episodes.begin(prompts("x", tokenizer=tokenizer), n=3, step=0)
        inside = opening_of(tokenizer, begun.tokens)
        assert inside == "<think>\n"
        assert reply(batch, (0, 0), inside + "I might say\nadd(40)").tokens == ()
        called = reply(batch, (0, 1), inside + "hm</think>add(40)")
        assert called.text == "41" and opening_of(tokenizer, called.tokens) == inside
        assert reply(batch, (0, 1), inside + "or\nadd(50)").tokens == (), "its second turn too"
        assert reply(batch, (0, 2), inside + "<tool_call>{}</tool_call></think>no").tokens == ()


def test_a_turn_that_tools_answer_called_them() -> None:
    with made("Tools", max_turns=2) as episodes:
        _, batch = episodes.begin(prompts("x"), n=2, step=0)
        first, last = (reply(batch, (0, 0), "add(40)") for _ in range(2))
        assert first.called and first.tokens and last.called and last.cut
        assert not reply(batch, (0, 1), "It is 41.").called


def test_a_row_has_its_columns() -> None:
    (chat,) = prompts("one", level=3)
    (text,) = prompts("one", tokenizer=TEXT, level=3)
    assert row_of(text) == {"prompt": "one", "answer": "7", "level": 3}
    messages = [{"role": "user", "content": "one"}]
    assert row_of(chat) == {
        "prompt": "one",
        "messages": messages,
        "answer": "7",
        "level": 3,
    }


def test_failures_are_replies_up_to_a_share_of_the_batch() -> None:
    with made("Echo", max_failures=0.5) as episodes:
        _, batch = episodes.begin(prompts("one", "two"), n=2, step=0)
        failed = reply(batch, (0, 0), "raise")
        assert failed.failure is not None and failed.failure.startswith("exception: Traceback")
        assert "KeyError: 'no such thing'" in failed.failure and not failed.tokens
        assert "exit code 3" in str(reply(batch, (0, 1), "exit").failure)
        assert reply(batch, (1, 0), "a").text == "a"
        with pytest.raises(RunError, match="3 of 4 episodes(.|\n)*max_failures=0.5(.|\n)*KeyError"):
            reply(batch, (1, 0), "raise")


TURNS = ["a", "b", "c", "d", "done"]


def play(episodes: Episodes, given: list[Prompt], turns: int, step: int = 3) -> list[list[Reply]]:
    """As an engine does: the model's turns depend on what it read."""
    begun, batch = episodes.begin(given, n=2, step=step, attempt=1)
    read: dict[tuple[int, int], str] = {}
    found: dict[tuple[int, int], list[Reply]] = {}
    for number in range(turns):
        places = [(p, s) for p in range(len(begun)) for s in range(2)]
        texts = {place: TURNS[number] + read.get(place, "") for place in places}
        if number == 4:
            texts = dict.fromkeys(places, "done")
        asked = {
            place: batch.episode(*place).answer(texts[place], eos=CHAT.eos_token_id, length=9)
            for place in places
        }
        for place, future in asked.items():
            one = future.result(30)
            found.setdefault(place, []).append(one)
            read[place] = one.text
    return list(found.values())


def new_turns(asked: list[str]) -> list[str]:
    return [text for text in asked if text.startswith(("d", "done"))]


def test_a_killed_run_gets_the_same_answers_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    given = prompts("one", "two", log=str(log))
    with made("Random", run_dir=tmp_path) as episodes:
        before = play(episodes, given, turns=3)
    asked = log.read_text().splitlines()
    assert len(asked) == 12 and len({one.text for row in before for one in row}) == 12
    path = tmp_path / "episodes" / "train-3.jsonl"
    with path.open("a") as file:
        file.write('{"place": [1, 10, 0, 3], "chain": "')  # killed in the middle of a line
    with made("Random", run_dir=tmp_path) as episodes:
        after = play(episodes, given, turns=5)
    assert [row[:3] for row in after] == before
    assert all(row[4].tokens == () and row[4].reward == 9 for row in after)
    again = log.read_text().splitlines()[12:]
    assert len(again) == 20 and sorted(again) == sorted([*asked, *new_turns(again)])
    with made("Random", run_dir=tmp_path) as episodes:
        assert play(episodes, given, turns=5) == after
        assert len(log.read_text().splitlines()) == 12 + len(again), "not asked"
        other = prompts("one", "three", log=str(log))
        changed = play(episodes, other, turns=5)
        assert changed[:2] == after[:2], "by prompt"
        assert [row[0].text for row in changed[2:]] != [row[0].text for row in after[2:]]


def test_a_replay_is_told_what_was_recorded_or_what_is_not(tmp_path: Path) -> None:
    """Whichever line is gone, torn or of another turn; no process starts, and the files stay."""
    given = prompts("one", "two", random_reset=True)
    with made("Random", run_dir=tmp_path) as episodes:
        before = play(episodes, given, turns=5)
    path = tmp_path / "episodes" / "train-3.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 + 4 * 5
    for number, line in enumerate(lines):
        attempt, prompt, sample, turn = json.loads(line)["place"]
        what = "what the environment offers"
        if attempt == 1:
            what = "the prompt" if turn < 0 else f"turn {turn + 1}"
            what += f" of sample {sample} of prompt {prompt}"
        gone = f"step 4 of .* cannot be replayed: .*train-3.jsonl has no line for {what}"
        other = line.replace('"chain": "', '"chain": "0')
        for damaged, error, told in (
            ("", UserError, gone),
            (line[: len(line) // 2], UserError, gone),
            ("[1]\n", UserError, gone),
            (other, RunError, rf"step 4 of .* differs: {what} is not the one .*, it is "),
        ):
            if damaged == other and attempt < 0:
                continue
            path.write_text("".join([*lines[:number], damaged, *lines[number + 1 :]]))
            content = path.read_bytes()
            with made("Random", run_dir=tmp_path, asks=False) as episodes:
                with pytest.raises(error, match=told):
                    play(episodes, given, turns=5)
                assert not episodes.pool.processes and path.read_bytes() == content
    path.write_text("".join(lines))
    with made("Random", run_dir=tmp_path, asks=False) as episodes:
        assert play(episodes, given, turns=5) == before


def test_records_of_steps_before_the_newest_checkpoint_are_packed(tmp_path: Path) -> None:
    """And read as before, with what a run that lost that checkpoint adds."""
    folder, given = tmp_path / "episodes", prompts("one", "two")
    with made("Random", run_dir=tmp_path) as episodes:
        before = play(episodes, given, turns=3)
    for name in ("train-4", "eval-2", "eval-4", "notes"):
        (folder / f"{name}.jsonl").touch()
    checkpoint = tmp_path / "checkpoints" / "4"
    checkpoint.mkdir(parents=True)
    pack_records(tmp_path)
    assert not [*folder.glob("*.gz")], "no manifest: it is being written"
    (checkpoint / "manifest.json").touch()
    for turns in (3, 4, 5):
        with made("Random", run_dir=tmp_path) as episodes:
            after = play(episodes, given, turns=turns)
            assert [row[: len(known)] for row, known in zip(after, before, strict=True)] == before
            before = after
        pack_records(tmp_path)
        names = ["eval-2.jsonl.gz", "eval-4.jsonl", "notes.jsonl", "train-3.jsonl.gz"]
        assert sorted(p.name for p in folder.iterdir()) == [*names, "train-4.jsonl"]
    with made("Random", run_dir=tmp_path, asks=False) as episodes:
        assert play(episodes, given, turns=5) == before


def test_a_recorded_failure_is_one_again(tmp_path: Path) -> None:
    for _ in range(2):
        with made("Echo", run_dir=tmp_path, max_failures=1) as episodes:
            _, batch = episodes.begin(prompts("one"), n=1, step=0)
            assert "KeyError" in str(reply(batch, (0, 0), "raise").failure)
    _, line = (tmp_path / "episodes" / "train-0.jsonl").read_text().splitlines()
    assert json.loads(line)["failure"][0] == "exception"


def test_a_recorded_prompt_is_one_again(tmp_path: Path) -> None:
    given, seen = prompts("one", random_reset=True), []
    for _ in range(2):
        with made("Random", run_dir=tmp_path) as episodes:
            (begun,), batch = episodes.begin(given, n=1, step=0)
            seen.append(begun.text)
            assert reply(batch, (0, 0), f"a{len(seen)}").failure is None
    assert seen[0] == seen[1] and seen[0].startswith("prompt ")


def test_a_disk_that_refuses_records_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "episodes").touch()
    notes: list[str] = []
    with made("Echo", run_dir=tmp_path) as episodes:
        episodes.notify = notes.append
        _, batch = episodes.begin(prompts("one", "two"), n=1, step=0)
        assert [reply(batch, (place, 0), "a").text for place in (0, 1)] == ["a", "a"]
    assert len(notes) == 1 and "cannot be written" in notes[0]


def test_failures_that_ended_a_run_are_asked_for_again(tmp_path: Path) -> None:
    with made("Echo", run_dir=tmp_path, max_failures=0.2) as episodes:
        _, batch = episodes.begin(prompts("one"), n=2, step=0)
        assert reply(batch, (0, 0), "a").text == "a"
        with pytest.raises(RunError, match="failed on 1 of 2 episodes"):
            reply(batch, (0, 1), "raise")
    (file,) = (tmp_path / "episodes").glob("*.jsonl")
    _, record = map(json.loads, file.read_text().splitlines())
    assert record["messages"][0]["content"] == "a"


def test_records_of_another_row_do_not_count(tmp_path: Path) -> None:
    """A column that was corrected between two processes, under the same prompt."""
    for door, told in ((1, "a"), (1, "a"), (2, "a")):
        with made("Echo", run_dir=tmp_path) as episodes:
            _, batch = episodes.begin(prompts("one", door=door), n=1, step=0)
            assert reply(batch, (0, 0), told).text == told
    (file,) = (tmp_path / "episodes").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 3
