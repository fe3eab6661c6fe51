"""Sources and the prompt stream: what is read, in which order, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from words import Words

from jaxrl.data.rows import Keys
from jaxrl.data.source import Source, is_missing, listed_rows, open_source
from jaxrl.data.stream import PromptEncoder, PromptStream, eval_set
from jaxrl.data.tasks import ARITHMETIC, parse_options
from jaxrl.data.tokenizer import decode_text, encode_completion, encode_prompt, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.formats.hf import save_tokenizer

TINY = tiny_tokenizer()
PLAIN = tiny_tokenizer(template=None, eos="<|endoftext|>")
EOS = TINY.eos_token_id
RG = "reasoning_gym/chain_sum:max_terms=2,max_digits=2"


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_file(path: Path, count: int) -> str:
    return write(path, *({"prompt": f"p{i}"} for i in range(count)))


def stream(
    spec: str | list[str], batch_size: int, seed: int = 0, shuffle: bool = True, longest: int = 1000
) -> PromptStream:
    encoder = PromptEncoder(PLAIN, longest, 8)
    return PromptStream(open_source(spec), encoder, batch_size, seed, shuffle)


def ids(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


# JSONL


def test_jsonl_reads_both_forms(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    spec = write(
        tmp_path / "x.jsonl",
        {"prompt": "2+2=", "completion": "4", "answer": 4, "level": "easy"},
        {"messages": [*chat, {"role": "assistant", "content": "hello"}], "prompt": None},
        {"messages": chat, "completion": "hey"},
    )
    first, second, third = (open_source(spec)[i] for i in range(3))
    assert (first.prompt, first.completion, first.answer) == ("2+2=", "4", "4")
    assert first.columns == {"level": "easy"}
    assert (second.prompt, second.completion) == (tuple(chat), "hello")
    assert (third.prompt, third.completion) == (tuple(chat), "hey")


def test_jsonl_bom_crlf_blank_lines_and_unicode(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": "eins\u2028zwei"}, {"prompt": "😀 ä"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + ("\r\n \r\n".join(lines) + "\r\n\n").encode())
    source = open_source(str(path))
    assert [source[i].prompt for i in range(len(source))] == [row["prompt"] for row in rows]


def test_jsonl_key_names(tmp_path):
    spec = write(tmp_path / "x.jsonl", {"question": "q", "gold": "g", "answer": "worked"})
    example = open_source(spec, keys=Keys(prompt="question", answer="gold"))[0]
    assert (example.prompt, example.answer) == ("q", "g")
    assert example.columns == {"answer": "worked"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": ', "not JSON"),
        ("[1]", "a JSON object is needed, this is a list"),
        ('{"body": "x", "id": 1}', "the row has `body`, `id`"),
        ('{"prompt": ""}', "`prompt` is empty"),
        ('{"prompt": 3}', "`prompt` must be text, it is a number"),
        ('{"prompt": "x", "answer": [1]}', "`answer` must be text or a number, it is a list"),
        ('{"prompt": "x", "messages": []}', "both `prompt` and `messages`"),
        ('{"messages": "x"}', "must be a list of messages, it is text"),
        ('{"messages": [{"role": "user"}]}', "must have the texts `role` and `content`"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no message before"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, line, told):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError) as error:
        open_source(str(path))
    assert str(error.value).startswith(f"data.train: {path}:3: ")
    assert told in str(error.value)


def test_jsonl_two_completions_are_refused(tmp_path):
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    spec = write(tmp_path / "x.jsonl", {"messages": chat, "completion": "z"})
    with pytest.raises(UserError, match="keep one"):
        open_source(spec)


def test_jsonl_empty_absent_and_not_utf8(tmp_path):
    empty, latin = tmp_path / "empty.jsonl", tmp_path / "latin.jsonl"
    empty.write_text("\n \n")
    latin.write_bytes('{"prompt": "ä"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"data\.eval: .*empty\.jsonl: no rows"):
        open_source(str(empty), split="eval")
    with pytest.raises(UserError, match=r"latin\.jsonl:1: not UTF-8"):
        open_source(str(latin))
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        open_source(str(tmp_path / "none.jsonl"))


# Sources


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("arithmetik", "did you mean arithmetic"),
        ("data.txt", "neither a .jsonl, .parquet, .json or .csv file, a folder or pattern"),
        ("openai/gsm8k", "(did you mean hf:openai/gsm8k?)"),
        ("openai/gsm8k:main:train", "(did you mean hf:openai/gsm8k:main:train?)"),
        ("arithmetic:digit=2", "did you mean digits"),
        ("arithmetic:digits=two", "digits='two'"),
        ("arithmetic:digits=0", "digits=0"),
        ("arithmetic:digits", "not key=value"),
        ("arithmetic:terms=2,terms=3", "given twice"),
        ("arithmetic:size=0", "size=0"),
        ("arithmetic/x", "write arithmetic"),
    ],
)
def test_unknown_sources_and_options(spec, told):
    with pytest.raises(UserError) as error:
        open_source(spec)
    assert str(error.value).startswith("data.train: ") and told in str(error.value)


def test_options():
    assert parse_options("a=1,b=true,c=x,d=+|-,e=0.5", "") == {
        "a": 1,
        "b": True,
        "c": "x",
        "d": ["+", "-"],
        "e": 0.5,
    }


def test_a_list_is_a_concatenation(tmp_path):
    spec = [prompts_file(tmp_path / "a.jsonl", 2), "arithmetic:size=3"]
    source = open_source(spec)
    assert len(source) == 5
    assert source[1].prompt == "p1"
    assert source[2] == open_source("arithmetic:size=3")[0]
    with pytest.raises(IndexError):
        source[5]


def test_arithmetic_splits_are_disjoint_and_pure():
    sources = [open_source("arithmetic:digits=1,terms=2,size=400", 0, s) for s in ("train", "eval")]
    train, held_out = ({source[i].prompt for i in range(400)} for source in sources)
    assert train and held_out and not train & held_out
    again = open_source("arithmetic:digits=1,terms=2,size=400", 0, "train")
    assert [again[i] for i in (7, 3)] == [sources[0][i] for i in (7, 3)]


def test_reasoning_gym_splits_are_disjoint_whatever_the_seeds():
    pytest.importorskip("reasoning_gym")
    train = open_source(RG + ",size=300", 3, "train")
    # Seeds 3 and 4 would give nearly the same rows: reasoning-gym seeds row i with seed + i.
    held_out = [open_source(RG + ",size=100", seed, "eval") for seed in (3, 4)]
    seen = {train[i].prompt for i in range(300)}
    asked = [{source[i].prompt for i in range(100)} for source in held_out]
    assert not seen & asked[0] and not seen & asked[1]
    assert asked[0] != asked[1]
    assert open_source(RG + ",size=300", 3)[123] == train[123]


def test_reasoning_gym_refusals(monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for spec, told in (
        ("reasoning_gym/chain_summ", "did you mean chain_sum"),
        ("reasoning_gym/chain_sum:max_term=2", "did you mean max_terms"),
        ("reasoning_gym/chain_sum:seed=2", "no option 'seed'"),
        ("reasoning_gym/chain_sum:max_terms=-2", "is refused"),
        ("reasoning_gym/word_ladder", "PYTHONHASHSEED=0"),
    ):
        with pytest.raises(UserError) as error:
            open_source(spec)
        assert told in str(error.value)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"extra `tasks`: pip install 'jaxrl\[tasks\]'"):
        open_source("reasoning_gym/chain_sum")


# The stream


def test_every_prompt_once_in_each_epoch_across_batch_borders(tmp_path):
    s = stream(prompts_file(tmp_path / "x.jsonl", 10), batch_size=4)
    texts = [prompt.text for i in range(5) for prompt in s.batch(i)]
    assert Counter(texts[:10]) == Counter(texts[10:]) == Counter(f"p{i}" for i in range(10))
    assert texts[:10] != texts[10:]


def test_a_batch_is_a_pure_function_of_seed_and_number(tmp_path):
    spec = prompts_file(tmp_path / "x.jsonl", 10)
    forwards, fresh = stream(spec, 4, seed=1), stream(spec, 4, seed=1)
    expected = [forwards.batch(i) for i in range(12)]
    assert [fresh.batch(i) for i in reversed(range(12))] == expected[::-1]
    assert [p.id for batch in expected for p in batch] == list(range(48))
    assert stream(spec, 4, seed=2).batch(0) != expected[0]


def test_without_shuffle_rows_stand_as_they_are(tmp_path):
    s = stream(prompts_file(tmp_path / "x.jsonl", 3), batch_size=5, shuffle=False)
    assert [p.text for p in s.batch(0)] == ["p0", "p1", "p2", "p0", "p1"]


def test_long_prompts_of_files_are_dropped_and_counted(tmp_path):
    rows = [{"prompt": "x" * n} for n in (1, 9, 5, 6, 5)]
    s = stream(write(tmp_path / "x.jsonl", *rows), 3, longest=5)
    assert (s.dropped, s.epoch_prompts) == (2, 3)
    assert sorted(p.text for p in s.batch(0)) == ["x", "xxxxx", "xxxxx"]
    with pytest.raises(UserError, match="all 1 prompts .* longer than max_prompt_tokens=5"):
        stream(write(tmp_path / "y.jsonl", {"prompt": "x" * 6}), 1, longest=5)
    many = [{"prompt": "x" * n} for n in (9, 7, *[8] * 199, 6)]
    for rows, words in (
        (many[:3], "the shortest has 7 tokens"),
        (many, "the shortest of 200 has 7"),
    ):
        with pytest.raises(UserError, match=f"raise it: {words}"):
            stream(write(tmp_path / "z.jsonl", *rows), 1, longest=5)


@pytest.mark.parametrize("limit", [1, 8, 1000])
@pytest.mark.parametrize("tokenizer", [PLAIN, tiny_tokenizer(CHATML)])
def test_of_an_empty_completion_the_end_is_learned(tmp_path, tokenizer, limit):
    spec = write(tmp_path / "x.jsonl", {"prompt": "hi", "completion": ""})
    rows = PromptStream(open_source(spec), PromptEncoder(tokenizer, 1000, limit), 1, seed=0)
    assert rows.long_completions() == 0
    assert rows.batch(0)[0].completion == (tokenizer.eos_token_id,)


def test_a_name_of_rows_and_a_path_from_home_are_no_missing_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", {"prompt": "x"})
    found = {name: is_missing(name) for name in ("~/*.jsonl", "~/b*.jsonl", "~/a.jsonl")}
    assert found == {"~/*.jsonl": False, "~/b*.jsonl": True, "~/a.jsonl": False}
    assert not is_missing("python:eval_data.gsm.jsonl")


def test_frames_of_polars_are_their_rows():
    class Frame:  # as of polars: `to_dict` takes no form
        columns = ("prompt",)

        def to_dict(self, *, as_series=True):
            raise AssertionError

        def to_dicts(self):
            return [{"prompt": "x"}]

    assert listed_rows(Frame(), "data") == [{"prompt": "x"}]


def test_long_prompts_of_tasks_give_way_to_the_next():
    source = Source([Words("a", "bbbb", "cccc", "d")])
    encoder = PromptEncoder(PLAIN, 3, 8)
    s = PromptStream(source, encoder, 4, seed=0, shuffle=False)
    assert [p.text for p in s.batch(0)] == ["a", "d", "d", "d"]
    assert s.dropped == 0
    too_long = PromptStream(Source([Words("aaaa", "bbbb")]), encoder, 1, seed=0)
    with pytest.raises(UserError, match="longer than max_prompt_tokens=3"):
        too_long.batch(0)


def test_a_mixture_is_shuffled_over_all_its_rows(tmp_path):
    spec = [prompts_file(tmp_path / "a.jsonl", 6), "arithmetic:size=6"]
    prompts = stream(spec, 12).batch(0)
    tasks = [prompt.columns.get("task") for prompt in prompts]
    assert Counter(tasks) == {None: 6, ARITHMETIC: 6}
    assert tasks != sorted(tasks, key=str)


def test_completions_are_required_where_they_are_learnt_from(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}]
    stream([write(tmp_path / "y.jsonl", rows[0]), "arithmetic"], 1).check_completions()
    with pytest.raises(UserError, match=r"x\.jsonl: 1 of 2 rows have no completion"):
        stream(write(tmp_path / "x.jsonl", *rows), 1).check_completions()


def test_eval_set_takes_parts_in_turn_and_no_task_prompt_twice(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "toolong"}]
    part = open_source(write(tmp_path / "x.jsonl", *rows), split="eval").parts[0]
    held_out = eval_set(Source([part, Words("w", "w", "v", "u")]), PromptEncoder(PLAIN, 3, 8), 9)
    assert [p.text for p in held_out.prompts] == ["a", "w", "a", "v", "u"]
    assert [p.id for p in held_out.prompts] == list(range(5))
    assert held_out.dropped == 2
    assert len(eval_set(Source([part]), PromptEncoder(PLAIN, 3, 8), 1).prompts) == 1


# Tokens


def test_text_prompts_are_wrapped_only_where_there_is_a_template(tmp_path):
    example = open_source(write(tmp_path / "x.jsonl", {"prompt": "hi", "completion": "yo"}))[0]
    sums = open_source("arithmetic")[0]
    wrapped = PromptEncoder(TINY, 100, 100).encode(example, 7)
    assert wrapped.tokens == ids(TINY, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert wrapped.completion == ids(TINY, "yo<|im_end|>")
    assert (wrapped.id, wrapped.text) == (7, "hi")
    raw = PromptEncoder(TINY, 100, 100, chat="raw").encode(example, 0)
    plain = PromptEncoder(PLAIN, 100, 100).encode(example, 0)
    assert (raw.tokens, raw.completion) == (ids(TINY, "hi"), (*ids(TINY, "yo"), EOS))
    assert (plain.tokens, plain.completion) == (ids(PLAIN, "hi"), ids(PLAIN, "yo<|endoftext|>"))
    assert PromptEncoder(TINY, 100, 100).encode(sums, 0).tokens == ids(TINY, sums.prompt)


def test_system_prompt_comes_first_unless_the_row_has_one(tmp_path):
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "b"}]
    rows = [{"prompt": "a"}, {"messages": own}]
    source = open_source(write(tmp_path / "x.jsonl", *rows))
    encoder = PromptEncoder(TINY, 100, 8, system_prompt="P")
    texts = [TINY.decode(encoder.encode(source[i], 0).tokens) for i in range(2)]
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    end = "<|im_start|>assistant\n"
    assert texts[0] == turn.format("system", "P") + turn.format("user", "a") + end
    assert texts[1] == turn.format("system", "S") + turn.format("user", "b") + end
    with pytest.raises(UserError, match=r"data\.system_prompt is set"):
        PromptEncoder(PLAIN, 100, 8, system_prompt="P")


def test_completions_are_cut_without_eos_and_kept_with_it(tmp_path):
    example = open_source(write(tmp_path / "x.jsonl", {"prompt": "a", "completion": "bcd"}))[0]
    lengths = {n: PromptEncoder(PLAIN, 9, n).encode(example, 0).completion for n in (2, 3, 4, 5)}
    bcd = ids(PLAIN, "bcd")
    eos = PLAIN.eos_token_id
    assert lengths == {2: bcd[:2], 3: bcd, 4: (*bcd, eos), 5: (*bcd, eos)}


def test_completion_where_a_token_spans_the_border():
    merging = tiny_tokenizer(template=None, merges=(("=", "4"),))
    eos = merging.eos_token_id
    assert len(merging("2=4")["input_ids"]) == 2
    assert encode_prompt(merging, "2=") == ids(merging, "2=")
    assert encode_completion(merging, "2=", "4", [eos]).completion == (*ids(merging, "4"), eos)


def test_completion_where_the_template_rewrites_the_prompt():
    strange = "{{ messages|length }}" + CHATML
    tokenizer = tiny_tokenizer(template=strange)
    messages = [{"role": "user", "content": "a"}]
    assert encode_completion(tokenizer, messages, "b", [EOS]).completion == (
        *ids(tokenizer, "b"),
        EOS,
    )


def test_eos_is_the_first_that_generation_would_stop_at():
    end, im_end = ids(TINY, "<|endoftext|><|im_end|>")
    messages = [{"role": "user", "content": "a"}]
    # The template's end of turn does not end a completion here: what does is added.
    assert encode_completion(TINY, messages, "b", [end]).completion == ids(
        TINY, "b<|im_end|>\n<|endoftext|>"
    )
    assert encode_completion(TINY, messages, "b", [end, im_end]).completion == ids(
        TINY, "b<|im_end|>"
    )
    with pytest.raises(UserError, match="need an EOS"):
        encode_completion(TINY, messages, "b", [])


def test_bos_is_put_before_text_and_eos_is_not_put_after():
    tokenizer = tiny_tokenizer(template=None, bos=True)
    bos, eos = ids(tokenizer, "<|endoftext|><|im_end|>")
    assert tuple(tokenizer("a")["input_ids"]) == (bos, *ids(tokenizer, "a"), eos)
    assert encode_prompt(tokenizer, "a") == (bos, *ids(tokenizer, "a"))
    assert encode_completion(tokenizer, "a", "b", [eos]).completion == (*ids(tokenizer, "b"), eos)


def test_prompt_forms_and_refusals():
    messages = [{"role": "user", "content": "a"}]
    assert encode_prompt(None, [5, 6]) == (5, 6)
    assert decode_text(TINY, encode_prompt(TINY, "ä 😀")) == "ä 😀"
    for tokenizer, prompt, told in (
        (None, "a", "no tokenizer"),
        (PLAIN, messages, "chat template"),
        (TINY, "", "no tokens"),
        (TINY, [], "no tokens"),
        (TINY, [1.5], "neither text"),
        (tiny_tokenizer("{{ raise_exception('users only') }}"), messages, "users only"),
    ):
        with pytest.raises(UserError, match=told):
            encode_prompt(tokenizer, prompt)


def test_errors_of_the_template_name_file_and_line(tmp_path):
    system = {"role": "system", "content": "a"}
    spec = write(tmp_path / "x.jsonl", {"prompt": "fine"}, {"messages": [system]})
    strict = tiny_tokenizer(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        + CHATML
    )
    with pytest.raises(UserError, match=r"data\.train: .*x\.jsonl:2: .*of system: user first"):
        PromptStream(open_source(spec), PromptEncoder(strict, 99, 9), 1, seed=0)


def test_a_wrong_type_in_the_tokenizers_config_is_found_as_it_is_read(tmp_path):
    tiny_tokenizer(CHATML).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    with pytest.raises(UserError, match="tokenizer: .*cannot be read: .*'int' and 'str'"):
        load_tokenizer(tmp_path)


def test_load_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    TINY.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == TINY.get_vocab()
    assert (loaded.eos_token_id, loaded.chat_template) == (EOS, CHATML)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer.json: not valid JSON"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no such file or folder"):
        load_tokenizer(tmp_path / "none")


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "qwen3_5"])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", None])
def test_a_text_has_the_tokens_of_tokenizer_json(tmp_path, family, kind):
    """Whatever class transformers has for the model, in its own folder and in those that are
    written of it: an export, and adapters, beside which stands no config.json."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12", "123", "<s>", "</s>"]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("Ġ", "Ġ"), ("1", "2")]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    bos = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    own, written = tmp_path / "own", tmp_path / "written"
    for place in (own, written):
        place.mkdir()
    inner.save(str(own / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None}
    said = special | {"chat_template": CHATML, "model_max_length": 99, "padding_side": "left"}
    named = {} if kind is None else {"tokenizer_class": kind}
    (own / "tokenizer_config.json").write_text(json.dumps(said | named))
    (own / "config.json").write_text(json.dumps({"model_type": family}))
    save_tokenizer(own, written)
    for loaded in map(load_tokenizer, (own, written)):
        text = "x =  3 + 12</s>1234"
        assert loaded(text)["input_ids"] == inner.encode(text).ids
        assert decode_text(loaded, inner.encode("x =  3").ids) == "x =  3"
        assert {key: getattr(loaded, key) for key in said} == said


@pytest.mark.parametrize("name", [".jsonl", "rows.jsonl", ".x.jsonl"])
def test_a_file_is_read_by_its_ending(tmp_path, name):
    assert open_source(write(tmp_path / name, {"prompt": "a"}, {"prompt": "b"}))[1].prompt == "b"


class Unending:
    """Rows by number, of which nobody knows how many there are."""

    def __getitem__(self, index):
        return {"prompt": str(index)}


@pytest.mark.parametrize(
    "rows", [Unending(), "rows", b"rows", 3, None], ids=lambda x: type(x).__name__
)
def test_what_is_no_list_of_rows_is_refused(rows):
    with pytest.raises(UserError, match="another iterable of rows"):
        listed_rows(rows, "data.train")
