"""A chat template in place of the model's own: read, applied, kept with the model, noticed."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
from tiny_tokenizer import CHATML

import jaxrl
from jaxrl.checkpoint.model_source import resolve_model, resolve_student
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import load_tokenizer, read_chat_template
from jaxrl.errors import UserError
from jaxrl.formats.hf import TokenizerFiles, save_tokenizer
from jaxrl.run import generation
from jaxrl.run.evaluation import prepare_evaluation
from jaxrl.run.job import dependencies, make_job

LOUD = "{% for m in messages %}{{ m.content }}{{ '==' if m.role == 'user' }}{% endfor %}"
ASK = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The template lies in the folder of the config file, which another directory reads."""
    (tmp_path / "loud.jinja").write_text(LOUD)
    rows = [{"messages": [*ASK, {"role": "assistant", "content": "4"}]}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(
        "algorithm: sft\nbatch_size: 2\nmax_prompt_tokens: 64\nmax_new_tokens: 32\n"
        "student: {model: builtin:student, chat_template: loud.jinja}\n"
        "data: {train: rows.jsonl, eval: rows.jsonl, verifier: exact}\n"
    )
    return Config.load(tmp_path / "run.yaml")


def test_a_run_renders_with_it_and_exports_it(config: Config, tmp_path: Path) -> None:
    job = make_job(config)
    (prompt, *_) = job.train.batch(0)
    assert job.tokenizer.decode(prompt.tokens) == "2+2?=="
    assert job.tokenizer_files is not None
    (tmp_path / "saved").mkdir()
    save_tokenizer(job.tokenizer_files, tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved is not None and saved.chat_template == LOUD
    assert pickle.loads(pickle.dumps(job.student)).tokenizer().chat_template == LOUD


def test_a_template_that_changes_is_noticed(config: Config, tmp_path: Path) -> None:
    before = dependencies(make_job(config))
    (key,) = [key for key in before if key.startswith("student.chat_template=")]
    (tmp_path / "loud.jinja").write_text(LOUD.replace("=='", "='"))
    after = dependencies(make_job(config))
    assert {name for name in before if before[name] != after[name]} >= {key}


def test_an_evaluation_renders_with_it(config: Config, tmp_path: Path) -> None:
    """Of another model by its key; a model that a run wrote has it in its folder, and the file may
    be gone."""
    key = f"student.chat_template={tmp_path / 'loud.jinja'}"
    asked = [f"data.eval={tmp_path / 'rows.jsonl'}", "data.verifier=exact", key]
    asked += ["max_prompt_tokens=64", "max_new_tokens=32"]
    found = prepare_evaluation(resolve_model("builtin:student"), None, asked, None)
    assert found.tokenizer.chat_template == LOUD
    run = tmp_path / "run"
    source = resolve_student(config)
    shutil.copytree(source.path, run / "final")
    files = source.tokenizer_files()
    assert files is not None
    save_tokenizer(files, run / "final")
    (run / "config.yaml").write_text(config.dump())
    (tmp_path / "loud.jinja").unlink()
    assert prepare_evaluation(resolve_model(run), None, [], None).tokenizer.chat_template == LOUD


class Asked(Exception):
    """Ends a call of generate before it samples."""


def test_texts_are_a_users_turn_where_a_template_is_given(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command and from Python; unless the call says that they stay text."""

    def asked(model: object, prompts: object, *more: object, **options: object) -> None:
        raise Asked(prompts)

    monkeypatch.setattr(generation, "sample_prompts", asked)
    template = str(tmp_path / "loud.jinja")
    found = []
    for chat in (None, True, False):
        words = [] if chat is None else ["--chat" if chat else "--no-chat"]
        words = ["builtin:student", "--prompt", "1+1=", "--chat-template", template, *words]
        calls = (
            lambda words=words: jaxrl.generate.main(words),
            lambda chat=chat: jaxrl.generate(
                "builtin:student", ["1+1="], chat=chat, chat_template=template
            ),
        )
        for call in calls:
            with pytest.raises(Asked) as end:
                call()
            found.append(end.value.args[0])
    assert found[0] == found[1] == found[2] == found[3] != found[4] == found[5] == ["1+1="]


def test_one_template_takes_the_place_of_all() -> None:
    config = json.dumps({"chat_template": CHATML, "eos_token": "x"}).encode()
    names = ("tokenizer.json", "chat_template.json", "additional_chat_templates/tool_use.jinja")
    files = TokenizerFiles({**dict.fromkeys(names, b"{}"), "tokenizer_config.json": config})
    kept = files.with_template(LOUD).contents
    assert kept.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert json.loads(kept["tokenizer_config.json"]) == {"eos_token": "x"}
    assert kept["chat_template.jinja"].decode() == LOUD


def test_a_folder_stands_for_the_template_of_its_model(config: Config, tmp_path: Path) -> None:
    files = resolve_student(config).tokenizer_files()
    assert files is not None
    (tmp_path / "other").mkdir()
    save_tokenizer(files, tmp_path / "other")
    assert read_chat_template(str(tmp_path / "other")) == LOUD


def test_what_is_no_template_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, why in {
        "gone.jinja": "cannot be read: No such file",
        "empty": "the model there has no chat template",
        "broken.jinja": "line 2: no chat template",
        "binary": "not UTF-8",
    }.items():
        given = Config.of(config, {"student.chat_template": str(tmp_path / name)})
        with pytest.raises(UserError, match=f"student.chat_template.*{name}.*{why}"):
            resolve_student(given)
    with pytest.raises(UserError, match="chat_template=x.jinja.*other than policy"):
        Config.of(config, {"teacher.chat_template": "x.jinja"})
