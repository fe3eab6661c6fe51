"""A tokenizer against the model that reads its tokens: tokens without a row, and end tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import GSPO, save_model, save_reward_model
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl import load_model
from jaxrl.checkpoint.model_source import completion_ends, resolve_model
from jaxrl.config.schema import Config
from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.thoughts import opening_of
from jaxrl.data.tokenizer import check_eos, encode_prompt
from jaxrl.errors import UserError
from jaxrl.export import export
from jaxrl.roles.reward import score
from jaxrl.run.evaluation import prepare_evaluation
from jaxrl.run.job import make_job

NEW = "<new>"
SFT = ["algorithm=sft", "teacher.model=null"]
ENVIRONMENTS = Path(__file__).parent.parent / "support" / "episode_environments.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 259 rows, one for each token of `tiny_tokenizer`."""
    return Path(save_model(tmp_path_factory.mktemp("made") / "it", 32, 1, 0, rows=259))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The model with a tokenizer of one token more than it has rows: 259 `<new>`."""
    place = Path(shutil.copytree(made, tmp_path / "model"))
    tiny_tokenizer(CHATML, extra=(NEW,)).save_pretrained(place)
    return place


def config_of(model: Path, train: Path | str, *overrides: str) -> Config:
    keys = [f"student.model={model}", f"data.train={train}", "batch_size=2", "group_size=2"]
    keys += ["max_prompt_tokens=200", "max_new_tokens=64", "data.eval=null"]
    return Config.load("builtin:quickstart", [*keys, *overrides])


def rows(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


PLAIN = {"prompt": "a", "completion": "b", "answer": "c"}
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": NEW},
    {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
    ("row", "overrides", "told"),
    [
        ({"prompt": f"x {NEW}"}, SFT, "the prompt"),
        ({"prompt": f"x {NEW}"}, GSPO, "the prompt"),
        ({"prompt": f"x {NEW}"}, [*SFT, "student.lora.rank=2"], "the prompt"),
        ({"completion": f"{NEW} x"}, SFT, "the completion"),
        ({"completion": f"{NEW} x"}, [*SFT, "data.chat=raw"], "the completion"),
        ({"messages": TURNS, "prompt": None}, SFT, "the prompt"),
        (
            {"messages": TURNS, "prompt": None},
            [*SFT, "data.completion_turns=all"],
            "the completion",
        ),
    ],
)
def test_a_row_with_a_token_that_has_no_row_in_the_embedding_is_named(
    row: dict[str, Any], overrides: list[str], told: str, folder: Path, tmp_path: Path
) -> None:
    """The last row of the file, which the first step does not reach."""
    last = {key: value for key, value in (PLAIN | row).items() if value is not None}
    if "messages" in last:
        del last["completion"]
    file = rows(tmp_path, *[PLAIN] * 5, last)
    with pytest.raises(UserError, match=f"rows.jsonl:6: {told} has tokens .* 259 '<new>'"):
        make_job(config_of(folder, file, *overrides))


def test_unused_tokens_without_a_row_are_a_line(folder: Path, tmp_path: Path) -> None:
    job = make_job(config_of(folder, rows(tmp_path, *[PLAIN] * 3), *SFT))
    (note,) = [note for note in job.data_notes() if "rows (vocab_size)" in note]
    assert "1 tokens of its tokenizer lie beyond (the first is 259 '<new>')" in note


def test_a_template_or_a_system_prompt_that_uses_one_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    file = rows(tmp_path, *[PLAIN] * 3)
    with pytest.raises(UserError, match="rows.jsonl:1: the prompt has tokens"):
        make_job(config_of(folder, file, *SFT, f"data.system_prompt='{NEW}'"))
    tiny_tokenizer(CHATML.replace("assistant", NEW), extra=(NEW,)).save_pretrained(folder)
    with pytest.raises(UserError, match="rows.jsonl:1: the prompt has tokens"):
        make_job(config_of(folder, file, *SFT))


def test_held_out_rows_are_checked(folder: Path, tmp_path: Path) -> None:
    file = rows(tmp_path, PLAIN, PLAIN | {"prompt": NEW})
    with pytest.raises(UserError, match="data.eval: .*rows.jsonl:2: the prompt has tokens"):
        make_job(config_of(folder, "arithmetic", *GSPO, f"data.eval={file}"))
    source = resolve_model(folder)
    given = [f"data.eval={file}", "max_prompt_tokens=64", "max_new_tokens=8"]
    with pytest.raises(UserError, match="data.eval: .*rows.jsonl:2: the prompt has tokens"):
        prepare_evaluation(source, None, given, None)


def test_texts_of_the_run_itself_may_have_no_such_token_at_all(
    folder: Path, tmp_path: Path
) -> None:
    """An environment may say it in the middle of the run, and so may a prompt about an attempt."""
    file = rows(tmp_path, *[PLAIN] * 3)
    environment = [f"environment.name={ENVIRONMENTS}:Echo", "algorithm=gspo", "teacher.model=null"]
    with pytest.raises(UserError, match="which 1 tokens of its tokenizer lie beyond: 259 '<new>'"):
        make_job(config_of(folder, file, *environment))
    with pytest.raises(
        UserError,
        match=r"259 embedding rows \(vocab_size\), which 1 tokens of its tokenizer lie beyond: 259",
    ):
        make_job(
            config_of(folder, file, "teacher.model=policy", "teacher.prompt={prompt} {answer}")
        )


def test_an_end_token_without_a_row_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny_tokenizer(CHATML, extra=(NEW,), eos=NEW).save_pretrained(folder)
    with pytest.raises(UserError, match="its end of sequence has tokens .* 259 '<new>'"):
        make_job(config_of(folder, rows(tmp_path, PLAIN), *SFT))


def test_a_reward_model_s_tokenizer_has_rows_for_all(tmp_path: Path) -> None:
    folder = Path(save_reward_model(tmp_path))
    more = tuple(f"<{i}>" for i in range(50))
    tiny_tokenizer(CHATML, extra=more).save_pretrained(folder)
    with pytest.raises(UserError, match="reward model .* has 300 embedding rows .* 9 tokens"):
        score(folder, ["a"])


def test_ids_beyond_the_rows_are_refused_from_python(made: Path) -> None:
    model = load_model(made)
    for wrong in (259, -1):
        with pytest.raises(UserError, match="the model's are 0 to 258"):
            model.logits([[1, wrong]], [[True, True]])
    assert model.logits([[1, -1]], [[True, False]]).shape == (1, 2, 259)


# End tokens

END, TURN_END = 256, 258
"""<|endoftext|> and <|im_end|>, which is the tokenizer's own."""


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (END, None, (END, TURN_END)),
        (TURN_END, None, (TURN_END,)),
        (None, None, (TURN_END,)),
        (None, [END], (END, TURN_END)),
        ([END, 7], 9, (END, 7, 9, TURN_END)),
        (END, [TURN_END, END], (END, TURN_END)),
        ([], None, (TURN_END,)),
    ],
)
def test_completions_end_at_the_tokens_of_both_configs_and_of_the_tokenizer(
    config: Any, generation: Any, ends: tuple[int, ...], made: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "model"))
    tiny_tokenizer(CHATML).save_pretrained(folder)
    for name, ids in (("config.json", config), ("generation_config.json", generation)):
        raw = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(raw | {"eos_token_id": ids}))
    source = resolve_model(folder)
    assert completion_ends(source, source.tokenizer()) == ends
    model = load_model(folder)
    assert tokenizers.end_ids(model.config.eos_ids, model.tokenizer) == ends
    exported = export(source, tmp_path / "out", dtype="float32")
    for name in ("config.json", "generation_config.json"):
        stated = json.loads((exported / name).read_text())["eos_token_id"]
        assert stated == (list(ends) if len(ends) > 1 else ends[0])
    job = make_job(config_of(folder, rows(tmp_path, {"prompt": "hi", "completion": "yo"}), *SFT))
    assert job.eos_ids == job.student.config.eos_ids == ends
    assert job.tokenizer.decode(job.train.batch(0)[0].completion) == "yo<|im_end|>"
    again, given = job.student.__reduce__()
    assert again(*given).config.eos_ids == ends  # as in another process, which exports
    stated = "256 '<|endoftext|>'" if config == END else None
    notes = [note for note in job.data_notes() if "each of them ends one" in note]
    differ = TURN_END not in resolve_model(folder).config.eos_ids and (config or generation)
    assert bool(notes) == bool(differ), notes
    assert stated is None or not notes or stated in notes[0]


@pytest.mark.parametrize(
    ("student", "teacher", "ours", "theirs", "told"),
    [
        (1, 1, {2}, {2}, None),
        (1, 2, {1, 2}, {1, 2}, None),
        (1, 2, {2}, {1}, None),
        (1, 1, set(), {1}, None),
        (None, 1, {1}, set(), None),
        (1, 2, set(), set(), "tokenizers have different EOS ids: student 1, teacher 2"),
        (1, 1, {1}, {1, 2}, r"student \[1\], teacher \[1, 2\]"),
        (1, 1, set(), {1, 2}, r"student \[1\], teacher \[1, 2\]"),
    ],
)
def test_student_and_teacher_end_at_the_same_tokens(
    student: int | None, teacher: int | None, ours: set[int], theirs: set[int], told: str | None
) -> None:
    if told is None:
        check_eos(student, teacher, ours, theirs)
        return
    with pytest.raises(UserError, match=told):
        check_eos(student, teacher, ours, theirs)


@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ],
)
def test_a_prompt_says_whether_completions_begin_in_thoughts(end: str, opened: bool) -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", repr(end))
    for tags in ((), ("<think>", "</think>")):  # as text, and as special tokens
        tokenizer = tiny_tokenizer(template, extra=tags)
        tokens = encode_prompt(tokenizer, [{"role": "user", "content": "<think> about 2+2"}])
        assert bool(opening_of(tokenizer, tokens)) is opened


@pytest.mark.parametrize("keys", [[], ["data.chat=raw"], ["data.completion_turns=all"]])
@pytest.mark.parametrize("kind", ["text", "messages", "chat"])
def test_completions_that_are_cut_are_counted_at_the_start(
    folder: Path, kind: str, keys: list[str], tmp_path: Path
) -> None:
    """Of every length around the limit: what the batches hold without an end is what is counted."""
    lengths = [1, 20, *range(58, 68), 160, 163, 170, 900]
    answers = [{"role": "assistant", "content": "b" * length} for length in lengths]
    question = {"role": "user", "content": "a"}
    made_rows: list[dict[str, Any]] = {
        "text": [{"prompt": "a", "completion": answer["content"]} for answer in answers],
        "messages": [{"prompt": [question], "completion": [answer]} for answer in answers],
        "chat": [{"messages": [question, answer, question, answer]} for answer in answers],
    }[kind]
    job = make_job(config_of(folder, rows(tmp_path, *made_rows), *SFT, *keys, "batch_size=16"))
    completions = [prompt.completion or () for _, prompt in job.train.rows(range(9))]
    ends = [sum(token in job.eos_ids for token in completion) for completion in completions]
    cut = sum(count < max(ends) for count in ends)
    assert 0 < cut < len(ends)
    assert f"; {cut} completions are longer than max_new_tokens=64: cut" in job.data_notes()[0]


def test_completions_that_nothing_learns_or_that_fit_are_not_counted(
    folder: Path, tmp_path: Path
) -> None:
    long = {"prompt": "a", "completion": "b" * 500, "answer": "c"}
    for overrides, row in ((GSPO, long), (SFT, PLAIN)):
        job = make_job(config_of(folder, rows(tmp_path, row, row), *overrides))
        assert "completions" not in job.data_notes()[0]


def test_completions_are_checked_where_something_reads_them(folder: Path, tmp_path: Path) -> None:
    """The template shows no calls, which matters to what learns them alone."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [{"role": "user", "content": "a"}, called], "answer": "c"}
    file = rows(tmp_path, row, row)
    job = make_job(config_of(folder, file, *GSPO, f"data.eval={file}"))
    assert not [note for note in job.data_notes() if "tool_calls" in note]
    assert len(job.held_out[0].prompts) == 2
    with pytest.raises(UserError, match="does not render `tool_calls`"):
        make_job(config_of(folder, file, *SFT))


def test_a_chat_that_does_not_end_with_the_assistant_is_named(folder: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = {"messages": [*turns, turns[0]]}
    with pytest.raises(UserError) as error:
        make_job(config_of(folder, rows(tmp_path, {"messages": turns}, asked, asked), *SFT))
    text = str(error.value)
    assert "2 of 3 rows have no completion" in text and "rows.jsonl:2, whose last message" in text
    assert "the role 'user'; algorithm=sft learns nothing else" in text
    assert "distill." not in text


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("template", [True, False])
def test_tools_that_no_prompt_shows_are_a_line(
    folder: Path, tmp_path: Path, template: bool
) -> None:
    if not template:
        (folder / "chat_template.jinja").unlink()
    file = rows(tmp_path, PLAIN, {**PLAIN, "tools": [TOOL]}, PLAIN)
    chat = "data.chat=raw" if template else "data.chat=auto"
    job = make_job(config_of(folder, file, *SFT, "data.tools_key=tools", chat))
    named, note = (note for note in reversed(job.data_notes()) if "`tools`" in note)
    assert named == "data.train: read for the chat template: `tools` (data.tools_key)"
    assert "rows.jsonl:2: its prompt is text, which shows no `tools`" in note
    assert ("data.chat=raw" in note) == template
    for keys in (["data.tools_key=null", chat], ["data.tools_key=tools", "data.chat=auto"]):
        if template or keys[0].endswith("null"):
            job = make_job(config_of(folder, file, *SFT, *keys))
            assert not [note for note in job.data_notes() if "prompt is text" in note]
