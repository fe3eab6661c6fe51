"""Scores on disk are those of the live teacher, and a run that reads them is the same run."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow, needs_ray
from runs import CONSTANT, MESH, SHORT, save_model, start, weights
from safetensors.numpy import load_file, save_file
from tiny_models import make_mesh, tiny_config, tiny_model
from tiny_tokenizer import tiny_tokenizer

from jaxrl import Config, train
from jaxrl.algorithms.methods import is_on_policy
from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.model_source import longest_sequence
from jaxrl.config import cli
from jaxrl.config.settings import DistillConfig
from jaxrl.data.batch import DATA, make_rollout
from jaxrl.errors import RunError, UserError
from jaxrl.models import parameters
from jaxrl.roles.actor import Actor
from jaxrl.run.attempt import prepare_run
from jaxrl.run.run_dir import Lock
from jaxrl.score.__main__ import _parser, config_of, main
from jaxrl.score.score_data import Scoring, open_folder, storage_error, store_scores
from jaxrl.teacher import cache as cache_module
from jaxrl.teacher.cache import (
    CHECKSUMS,
    FORMAT,
    HEAD,
    MANIFEST,
    CachedTeacher,
    ScoreCache,
    ScoredRow,
    ScoreManifest,
    ScoreWriter,
    check_cache,
    dequantised,
    in_storage,
    quantised,
    shard_files,
    write_manifest,
)
from jaxrl.teacher.kinds import StoredScores
from jaxrl.teacher.local_teacher import Scorer
from jaxrl.teacher.protocol import Options
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.types import (
    Completion,
    HiddenSignal,
    Prompt,
    Rollout,
    SampledSignal,
    TeacherSignal,
    TopKSignal,
    Trained,
)

pytestmark = pytest.mark.usefixtures("shared_programs")

V, K = 64, 4
DISTILLS = {
    "hidden": DistillConfig(signal="hidden", chunk_tokens=16),
    "topk": DistillConfig(
        signal="topk",
        top_k=K,
        distill_temperature=2.0,
        chunk_tokens=16,
        entropy_aware=True,
        entropy_top_k=3,
    ),
    "sampled": DistillConfig(signal="sampled", jsd_beta=1.0, chunk_tokens=16),
}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return tiny_model("llama", make_mesh(1, 1, 1))


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Seven rows of several lengths, and one of padding."""
    random = np.random.default_rng(3)
    draw = lambda n: tuple(random.integers(3, V, n).tolist())  # noqa: E731
    prompts, groups = [], []
    for i, (p, c) in enumerate(((5, 7), (2, 1), (3, 5), (4, 6), (1, 3), (6, 2), (9, 11))):
        tokens = draw(c)
        prompts.append(Prompt(i, draw(p), "", tokens))
        logprobs = -random.random(c).astype(np.float32)
        groups.append([Completion(tokens, logprobs, logprobs - 1, "length" if c == 5 else "stop")])
    return make_rollout(
        prompts,
        groups,
        policy_version=DATA,
        pad_id=0,
        max_prompt_tokens=16,
        max_new_tokens=16,
        row_multiple=4,
    )


def manifest(tiny: Any, distill: DistillConfig, **changed: Any) -> ScoreManifest:
    about: dict[str, Any] = {"format": FORMAT, "model": "tiny", "digest": "d", "dtype": "float32"}
    about |= {"stored": "float32", "options": Options.of(distill, V), "samples": 0}
    return ScoreManifest(**about | changed)


def stored(
    folder: Path, tiny: Any, rollout: Rollout, signal: TeacherSignal, about: ScoreManifest
) -> ScoreCache:
    """A folder with the rows of a batch, in two shards."""
    model, params = tiny
    folder.mkdir()
    tokenizer = save_model(folder / "words", 32, 1, seed=0)
    head = np.asarray(parameters.head(params))
    write_manifest(folder, about, model, Path(tokenizer), head)
    writer = ScoreWriter(folder)
    arrays = in_storage(signal, about.stored)
    for i, completion in enumerate(rollout.completions):
        tensors = {name: x[i, : len(completion.tokens)] for name, x in arrays.items()}
        writer.add([ScoredRow(rollout.prompts[i].tokens, completion.tokens, tensors)])
        if i == 2:
            writer.flush()
    writer.flush()
    assert len(shard_files(folder)) == 2
    return ScoreCache(folder)


def config(distill: DistillConfig, dtype: str = "float32") -> Config:
    base = Config.load("builtin:quickstart", [f"teacher.dtype={dtype}"])
    return base.model_copy(update={"distill": distill})


@pytest.mark.parametrize("signal", and_slow(["topk"], ["hidden", "sampled"]))  # as runs below
def test_what_is_read_is_bit_for_bit_what_the_scorer_says(
    signal: str, tiny: Any, rollout: Rollout, tmp_path: Path
) -> None:
    distill = DISTILLS[signal]
    live = Scorer(*tiny, Projection(distill, make_mesh(1, 1, 1), V)).score(rollout)
    live = jax.tree.map(np.asarray, live)
    cache = stored(tmp_path / "c", tiny, rollout, live, manifest(tiny, distill))
    teacher = CachedTeacher(config(distill), cache, V)
    found = teacher.score(rollout)
    assert found is not None
    assert type(found) is type(live)
    for field in fields(live):
        mine, other = getattr(found, field.name), getattr(live, field.name)
        assert (mine is None) == (other is None), field.name
        if other is not None:
            np.testing.assert_array_equal(mine, other, strict=True, err_msg=field.name)
    parts = [teacher.score(rollout, part, 3) for part in range(3)]
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    jax.tree.map(np.testing.assert_array_equal, joined, found)
    np.testing.assert_array_equal(cache.head(40), np.asarray(parameters.head(tiny[1]))[:40])


def test_rows_are_found_whatever_batch_they_are_in_and_no_others(
    tiny: Any, rollout: Rollout, tmp_path: Path
) -> None:
    distill = DISTILLS["sampled"]
    live = SampledSignal(token_logprobs=-np.random.default_rng(0).random((8, 16), np.float32))
    cache = stored(tmp_path / "c", tiny, rollout, live, manifest(tiny, distill))
    teacher = CachedTeacher(config(distill), cache, V)
    order = [6, 0, 3]
    other = make_rollout(
        [rollout.prompts[i] for i in order],
        [[rollout.completions[i]] for i in order],
        policy_version=DATA,
        pad_id=1,
        max_prompt_tokens=64,
        max_new_tokens=64,
    )
    read = teacher.score(other)
    assert read is not None
    for row, i in enumerate(order):
        n = len(rollout.completions[i].tokens)
        np.testing.assert_array_equal(read.token_logprobs[row, :n], live.token_logprobs[i, :n])
        assert not read.token_logprobs[row, n:].any()
    changed = replace(rollout.prompts[0], tokens=(*rollout.prompts[0].tokens, 9))
    pairs = [
        (p.tokens, c.tokens) for p, c in zip(rollout.prompts, rollout.completions, strict=True)
    ]
    # A prompt's last token is no completion's first.
    moved = pairs[0][0][:-1], (pairs[0][0][-1], *pairs[0][1])
    others = [(changed.tokens, pairs[0][1]), moved]
    found = [cache.has(cache.manifest.key(*pair)) for pair in (*pairs, *others)]
    assert found == [True] * 7 + [False] * 2
    with pytest.raises(UserError, match="no scores of 1 of the 1 completions"):
        teacher.score(
            make_rollout(
                [changed],
                [[rollout.completions[0]]],
                policy_version=DATA,
                pad_id=0,
                max_prompt_tokens=16,
                max_new_tokens=16,
            )
        )


def test_int8_is_off_by_half_a_step_of_each_tokens_own_scale() -> None:
    random = np.random.default_rng(0)
    sizes = 10.0 ** random.integers(-3, 4, (5, 7, 1))
    hidden = (random.normal(size=(5, 7, 32)) * sizes).astype(np.float32)
    hidden[0, 0] = 0
    values, scale = quantised(hidden)
    most = np.abs(hidden).max(-1)
    off = np.abs(dequantised(values, scale) - hidden).max(-1)
    assert (off <= most / 127 / 2 * (1 + 1e-5)).all() and off.max() > 0
    again, same = quantised(dequantised(values, scale))
    np.testing.assert_array_equal(again, values)
    np.testing.assert_allclose(same, scale, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_error_of_storage_is_the_kl_of_the_two_distributions(softcap: float | None) -> None:
    random = np.random.default_rng(1)
    hidden, head = random.normal(size=(20, 32)), random.normal(size=(V, 32))
    hidden, head = hidden.astype(np.float32), head.astype(np.float32)
    temperature = 2.0
    distill = DistillConfig(distill_temperature=temperature, chunk_tokens=8)
    found = storage_error(hidden, "int8", head, distill, softcap)

    def log_p(x: np.ndarray) -> np.ndarray:
        logits = x.astype(np.float64) @ head.T.astype(np.float64)
        logits = (logits if softcap is None else softcap * np.tanh(logits / softcap)) / temperature
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    p, q = log_p(hidden), log_p(dequantised(*quantised(hidden)))
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert found.tokens == 20
    assert found.mean == pytest.approx(kl.mean(), rel=0.02, abs=1e-7)
    assert found.most == pytest.approx(kl.max(), rel=0.02, abs=1e-7)
    assert storage_error(hidden, "float32", head, distill, softcap).most == 0
    # bfloat16 has 8 bits for each number, int8 for a token's largest alone.
    assert 0 < storage_error(hidden, "bfloat16", head, distill, softcap).mean < found.mean


def test_of_a_shard_that_the_disk_refuses_nothing_stays(tmp_path: Path) -> None:
    writer = ScoreWriter(tmp_path)
    tensors = {"token_logprobs": np.zeros(1000, np.float32)}
    row = ScoredRow((1, 2), (3,) * 1000, tensors)
    writer.add([row])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError) as refused:
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
    again = ScoreWriter(tmp_path, shard_bytes=7000)
    for _ in range(3):
        again.add([row])
    again.flush()
    assert [path.name[:11] for path in shard_files(tmp_path)] == ["shard-00000", "shard-00001"]


# Whole commands and runs.


def write_data(path: Path, rows: int, first: int = 0) -> Path:
    lines = [
        json.dumps({"prompt": f"{i} and {i * 7 % 5}:", "completion": "x" * (i % 6) + str(i)})
        for i in range(first, first + rows)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    save_model(folder / "student", 32, 1, seed=0)
    save_model(folder / "teacher", 48, 1, seed=1, rows=272)
    write_data(folder / "d.jsonl", 13)
    return folder


OFF = ["distill.on_policy_fraction=0", "eval.every=0", "group_size=1", "steps=4", *CONSTANT]
OFF += ["rollout.launch_tokens=8"]  # one launch: one program of it


def keys(desk: Path, *overrides: str) -> list[str]:
    base = [f"student.model={desk / 'student'}", f"data.train={desk / 'd.jsonl'}", "data.eval=null"]
    return [*SHORT, *OFF, *base, *overrides]


def scored(desk: Path, out: Path, *words: str, source: Path | None = None) -> ScoreCache:
    data = ["--teacher", str(desk / "teacher"), "--data", str(source or desk / "d.jsonl")]
    own = ["max_prompt_tokens=24", "max_new_tokens=8", "batch_size=6", "compile_cache=null"]
    student = f"student.model={desk / 'student'}"
    arguments = _parser().parse([*data, "--out", str(out), *own, student, *words])
    return store_scores(config_of(arguments), out, arguments.dtype)


def run(desk: Path, folder: Path, *overrides: str) -> bytes:
    """The trained weights."""
    trained = train(Config.load("builtin:quickstart", keys(desk, f"run_dir={folder}", *overrides)))
    return weights(trained.run_dir)


@pytest.fixture(scope="module")
def caches(desk: Path) -> dict[str, Path]:
    made: dict[str, tuple[str, ...]] = {
        "hidden": (),
        "topk": ("--signal", "topk", "distill.top_k=8"),
        "int8": ("--dtype", "int8"),
        "samples": ("--samples", "2"),
    }
    for name, words in made.items():
        scored(desk, desk / name, *words)
    return {name: desk / name for name in made}


def live(desk: Path) -> str:
    return f"teacher.model={desk / 'teacher'}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """The batches that a live teacher has scored."""
    batches: list[Rollout] = []
    whole = Scorer.score

    def spy(self: Scorer, rollout: Rollout, *args: int) -> TeacherSignal | None:
        batches.append(rollout)
        return whole(self, rollout, *args)

    monkeypatch.setattr(Scorer, "score", spy)
    return batches


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that each update is of: the rows, what the teacher says of them, and what of it stays.
    Instead of the update, which the first test compares too: equal arrays make equal weights."""
    taken: list[Any] = []

    def update(self: Actor, rollout: Rollout, scores: Any, step: int) -> Trained:
        given = rollout.sequences, rollout.sampler_logprobs, scores["teacher"], self._frozen
        sequences, logprobs, parts, frozen = jax.tree.map(np.array, given)
        taken.append((sequences, logprobs, jax.tree.map(lambda *x: np.concatenate(x), *parts)))
        taken.append(frozen)
        self.version += 1
        learned = np.asarray(sequences.loss_mask).sum(-1)
        return Trained({"loss": 0.0, "actor/tokens": float(learned.sum())}, {}, learned)

    monkeypatch.setattr(Actor, "update", update)
    return taken


def assert_halves_are_equal(taken: list[Any], updates: int) -> None:
    half = 2 * updates
    assert len(taken) == 2 * half
    for mine, other in zip(taken[:half], taken[half:], strict=True):
        jax.tree.map(partial(np.testing.assert_array_equal, strict=True), mine, other)


def test_a_run_from_disk_has_the_weights_of_one_with_the_live_teacher(
    desk: Path, tmp_path: Path, asked: list[Rollout]
) -> None:
    """Interrupted and resumed besides, and with a schedule of its own, which changes nothing."""
    dtype = "teacher.dtype=bfloat16"
    cache = scored(desk, tmp_path / "c", dtype)
    assert cache.manifest.stored == "bfloat16" and cache.manifest.error is None
    assert len(cache) == 13 and len(asked) == 3
    expected = run(desk, tmp_path / "live", live(desk), dtype, MESH)
    assert len(asked) == 7
    for scored_batch, batch in zip(asked[:3], asked[3:6], strict=True):  # the first epoch
        jax.tree.map(np.testing.assert_array_equal, scored_batch.sequences, batch.sequences)
    read = ["teacher.model=null", f"teacher.cache={tmp_path / 'c'}", dtype]
    read += ["mesh=actor=1,rollout=1", "schedule=one_step_off", "teacher.num_microbatches=2"]
    first = run(desk, tmp_path / "read", *read, "checkpoint.every=2", "steps=2")
    assert first != run(desk, tmp_path / "read", *read, "checkpoint.every=2") == expected
    assert len(asked) == 7
    plan = (tmp_path / "read" / "plan.txt").read_text()
    assert "teacher: no devices here, its scores are read from" in plan


def test_a_mixed_run_asks_the_live_teacher_about_the_students_samples_only(
    desk: Path, caches: dict[str, Path], tmp_path: Path, asked: list[Rollout], fed: list[Any]
) -> None:
    mixed = ["distill.on_policy_fraction=0.5", MESH, live(desk)]
    run(desk, tmp_path / "live", *mixed)
    asked.clear()
    run(desk, tmp_path / "read", *mixed, f"teacher.cache={caches['hidden']}")
    assert_halves_are_equal(fed, updates=4)
    coin = Config.load(None, keys(desk, *mixed))
    wanted = [i for i in range(4) if is_on_policy(coin, i)]
    assert 0 < len(wanted) < 4 and [rollout.policy_version for rollout in asked] == wanted
    computed = ["teacher/padding" in row for row in read_metrics(tmp_path / "read")[1:]]
    assert computed == [i in wanted for i in range(4)]


@pytest.mark.ray
@pytest.mark.slow
def test_processes_read_what_threads_read(desk: Path, tmp_path: Path) -> None:
    needs_ray()
    scored(desk, tmp_path / "c")
    mixed = [MESH, "distill.on_policy_fraction=0.5", f"teacher.cache={tmp_path / 'c'}", live(desk)]
    expected = run(desk, tmp_path / "local", *mixed)
    process = start(keys(desk), tmp_path / "ray", *OFF, *mixed, "launcher=ray")
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert weights(tmp_path / "ray") == expected


def test_the_teachers_samples_are_read_like_those_of_the_live_one(
    desk: Path, tmp_path: Path, fed: list[Any]
) -> None:
    """In the first epoch; in later ones the live teacher samples anew."""
    kind = ["distill.signal=sampled", "distill.jsd_beta=1", "distill.seq_kd=true", "group_size=2"]
    cache = scored(desk, tmp_path / "c", "--samples", "2", "--signal", "sampled")
    assert len(cache) == 26 and cache.manifest.samples == 2
    run(desk, tmp_path / "live", live(desk), *kind, "steps=2", MESH)
    read = ["teacher.model=null", f"teacher.cache={tmp_path / 'c'}", "mesh=actor=1,rollout=1"]
    run(desk, tmp_path / "read", *kind, "steps=2", *read)
    assert_halves_are_equal(fed, updates=2)
    for name, sampled in (("live", True), ("read", False)):
        for row in read_metrics(tmp_path / name)[1:]:
            assert (row["tokens/generated"] > 0) == sampled


class Killed(BaseException):
    """Nothing catches it."""


def test_what_is_interrupted_or_killed_resumes_and_scores_no_row_twice(
    desk: Path, caches: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = ScoreCache(caches["hidden"]), tmp_path / "c"
    out.mkdir()
    for name in (HEAD, MANIFEST):  # one that was killed before it had either
        (out / f".{name}.partial").write_bytes(b"half")
    asked: list[int] = []
    scores = Scoring.scored

    def stopping(at: int, how: BaseException) -> Callable[..., Any]:
        def scored_or_not(self: Scoring, teacher: Any, index: int) -> Any:
            if index == at:
                raise how
            asked.append(index)
            return scores(self, teacher, index)

        return scored_or_not

    monkeypatch.setattr(Scoring, "scored", stopping(1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt, match="6 of 13 rows are stored"):
        scored(desk, out)
    monkeypatch.setattr(Scoring, "scored", stopping(2, Killed()))
    with pytest.raises(Killed):  # the rows of batch 1 were in memory
        scored(desk, out)
    (out / ".shard-00001.safetensors.partial").write_bytes(b"half")
    monkeypatch.setattr(Scoring, "scored", stopping(-1, Killed()))
    done = scored(desk, out)
    assert asked == [0, 1, 1, 2] and len(done) == len(whole) == 13
    assert not list(out.glob(".*"))
    scored(desk, out)
    assert len(asked) == 4
    write_data(tmp_path / "more.jsonl", 15)
    assert len(scored(desk, out, source=tmp_path / "more.jsonl")) == 15


def test_a_full_disk_ends_the_command_with_its_error(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_save", full)
        with pytest.raises(RunError, match="No space left on device .* the same command resumes"):
            scored(desk, tmp_path / "c")
    assert len(scored(desk, tmp_path / "c")) == 13


def test_the_size_is_told_before_and_compared_with_the_disk(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = scored(desk, tmp_path / "c", "--dtype", "int8")
    told = capsys.readouterr().out
    tokens = int(sum(cache._index.length))
    assert f"13 rows to score, 0 stored already; {tokens} tokens of 52 bytes" in told
    assert cache.manifest.error is not None and f"int8: {cache.manifest.error}" in told
    size = sum(path.stat().st_size for path in (tmp_path / "c").glob("shard*"))
    assert tokens * 52 < size < tokens * 52 + 13 * 40 + 1000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"GB to write, 1e-06 GB free: make room"):
        scored(desk, tmp_path / "d")


# What is refused.


TOPK = ("distill.signal=topk", "distill.top_k=8")
REFUSED: dict[str, tuple[str, Sequence[str], tuple[str, ...]]] = {
    "signal": ("hidden", TOPK, ("distill.signal=hidden", "distill.signal=topk")),
    "top_k": ("topk", ("distill.signal=topk", "distill.top_k=4"), ("top_k=8", "top_k=4")),
    "temperature": ("topk", (*TOPK, "distill.distill_temperature=2"), ("=1.0", "=2.0")),
    "entropy": (
        "topk",
        (*TOPK, "distill.entropy_aware=true", "distill.entropy_top_k=4"),
        ("without distill.entropy_aware=true",),
    ),
    "seq_kd": ("hidden", ("distill.seq_kd=true",), ("the data's completions", "seq_kd=false")),
    "data": ("samples", (), ("the teacher's samples", "seq_kd=true")),
    "samples' length": (
        "samples",
        ("distill.seq_kd=true", "group_size=2", "max_new_tokens=9"),
        ("max_new_tokens=8", "max_new_tokens=9"),
    ),
    "sampling": (
        "samples",
        ("distill.seq_kd=true", "group_size=2", "sampling.top_p=0.5"),
        ("sampling.top_p=1.0", "sampling.top_p=0.5"),
    ),
    "group": ("samples", ("distill.seq_kd=true", "group_size=3"), ("2 samples", "--samples 3")),
    "rows": ("hidden", ("data.train=more.jsonl",), ("2 of the 15 rows", "--out")),
    "lengths": ("hidden", ("max_new_tokens=3",), ("of the 13 rows", "max_new_tokens")),
    "nowhere": ("gone", (), ("there is no such folder", "jaxrl.score")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scores_that_do_not_fit_the_run_are_refused_before_it(
    case: str,
    desk: Path,
    caches: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, changed, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "more.jsonl", 15)
    read = [f"teacher.cache={caches.get(name, 'gone')}", "run_dir=run", "mesh=actor=1,rollout=1"]
    given = Config.load(None, keys(desk, *read, "steps=9", *changed))
    with pytest.raises(UserError) as error:
        prepare_run(given)
    assert all(word in str(error.value) for word in ("teacher.cache=", *words)), error.value


def test_a_stored_sample_begins_in_the_thoughts_that_its_prompt_opens() -> None:
    """As one that is sampled: what judges it sees that they are never closed."""
    tokenizer, nothing = tiny_tokenizer(), np.zeros(1, np.float32)
    prompts = [Prompt(i, tuple(tokenizer.encode(x)), x) for i, x in enumerate(("1<think>\n", "1"))]
    stored = Completion(tuple(tokenizer.encode("4")), nothing, nothing, "stop")
    scores = SimpleNamespace(
        cache=SimpleNamespace(samples=lambda prompts, n: [[stored] * n for _ in prompts]),
        config=SimpleNamespace(distill=SimpleNamespace(seq_kd=True), group_size=2),
    )
    samples = StoredScores.stored_samples(scores, tokenizer)  # type: ignore[arg-type]
    found = [[one.whole_text for one in group] for group in samples(prompts)]
    assert found == [["<think>\n4"] * 2, ["4"] * 2]


def test_samples_whose_keys_an_older_jaxrl_did_not_note_are_read_as_far_as_they_fit(
    desk: Path, caches: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(caches["samples"], tmp_path / "old"))
    noted = json.loads((folder / MANIFEST).read_text())
    del noted["sampling"], noted["longest"]
    (folder / MANIFEST).write_text(json.dumps(noted))
    read = ["distill.seq_kd=true", "group_size=2", "mesh=actor=1,rollout=1"]
    read += [f"teacher.cache={folder}", "sampling.temperature=0.5"]
    job, _ = prepare_run(Config.load(None, keys(desk, *read)))
    (note,) = [note for note in job.data_notes() if "teacher.cache=" in note]
    assert "an older jaxrl did not note sampling.temperature" in note
    longest = ScoreCache(folder).longest_row
    words = f"scored with max_new_tokens={longest}, and this run has max_new_tokens={longest - 1}"
    with pytest.raises(UserError, match=words):
        prepare_run(Config.load(None, keys(desk, *read, f"max_new_tokens={longest - 1}")))
    with pytest.raises(UserError, match="holds scores with sampling.temperature=\\?, not 1.0"):
        scored(desk, folder, "--samples", "2")


@pytest.mark.parametrize(("other", "fits"), [(64, True), (8, False)])
def test_scores_of_a_model_that_depends_on_the_length_are_read_at_the_same_one(
    tiny: Any, rollout: Rollout, tmp_path: Path, other: int, fits: bool
) -> None:
    model = tiny_config("phi3_longrope")
    signal = SampledSignal(token_logprobs=np.zeros((8, 16), np.float32))
    about = manifest(tiny, DISTILLS["sampled"], longest=24)
    folder = tmp_path / "c"
    cache = stored(folder, (model, tiny[1]), rollout, signal, about)
    facts = config(DISTILLS["sampled"]), cache, None, V, (2,)
    asked = about.model_copy(update={"longest": other})
    if fits:
        open_folder(folder, asked, model)
        assert "did not note" not in check_cache(*facts, other, ())
        return
    with pytest.raises(UserError, match=f"longest sequence=24, not {other}"):
        open_folder(folder, asked, model)
    with pytest.raises(UserError, match=f"sequence=24, and this run has longest sequence={other}"):
        check_cache(*facts, other, ())


def test_rows_that_no_batch_of_the_run_reads_may_be_missing(
    desk: Path, caches: dict[str, Path], tmp_path: Path
) -> None:
    write_data(tmp_path / "more.jsonl", 15)
    read = [f"teacher.cache={caches['int8']}", "mesh=actor=1,rollout=1", "data.shuffle=false"]
    read += [f"data.train={tmp_path / 'more.jsonl'}"]
    job, plan = prepare_run(Config.load(None, keys(desk, *read, "steps=2")))
    assert "teacher" not in plan.axes and "teacher" in plan.runs
    (note,) = [note for note in job.data_notes() if "teacher.cache=" in note]
    assert "hidden in int8" in note and "nats a token on average" in note
    head = [e for e in plan.accounts["actor"].entries if "LM head" in e.name]
    assert head


def test_another_teacher_beside_the_cache_is_refused(desk: Path, caches: dict[str, Path]) -> None:
    mixed = ["distill.on_policy_fraction=0.5", f"teacher.cache={caches['hidden']}"]
    other = f"teacher.model={desk / 'student'}"
    with pytest.raises(UserError, match="whose files are not those of teacher.model="):
        prepare_run(Config.load(None, keys(desk, *mixed, other, "mesh=actor+rollout=1")))


def test_a_model_beside_the_cache_computes_in_the_dtype_of_the_plan(
    desk: Path, caches: dict[str, Path]
) -> None:
    mixed = ["distill.on_policy_fraction=0.5", f"teacher.cache={caches['hidden']}", live(desk)]
    mixed += ["mesh=actor+rollout+teacher=1", "teacher.dtype=null"]
    job, plan = prepare_run(Config.load(None, keys(desk, *mixed)))
    assert isinstance(job.teacher, StoredScores) and job.teacher.beside is not None
    assert job.teacher.config is job.teacher.beside.config is plan.config
    assert plan.config.teacher.compute_dtype == "float32"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["distill.on_policy_fraction=1"], "no scores of the student's samples"),
        (["distill.on_policy_fraction=0.5"], "on_policy_fraction=0, or teacher.model"),
        (["teacher.address=localhost:1"], "a cache is used alone"),
        (["algorithm=sft"], "set teacher.cache=null"),
        (
            ["algorithm=gspo", "reward.functions=[math]", "distill_weight=1", "group_size=2"],
            "no scores of the student's samples",
        ),
    ],
)
def test_keys_that_leave_a_cache_unread_are_refused(
    changed: list[str], words: str, desk: Path
) -> None:
    with pytest.raises(UserError, match=words):
        Config.load(None, keys(desk, "teacher.cache=c", *changed))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dtype", "int8", "--signal", "topk"], "--dtype int8 is of hidden states"),
        (["--signal", "topk", "distill.signal=hidden"], "an option asks for distill.signal=topk"),
        (["--signal", "sampled"], "samples whose log-probs are known"),
        (["--samples", "0"], "group_size"),
        (["--out", "other"], "holds notes.txt and no manifest.json"),
        (["--out", "whole", "--signal", "topk"], "holds scores with distill.signal=hidden"),
        (["--out", "whole", "--dtype", "int8"], "holds scores with --dtype=float32"),
        (["--out", "whole", "--teacher", "student"], "not those of student"),
        (["--out", "samples", "--samples", "3"], "with --samples=2, not 3"),
        (["--out", "samples", "--samples", "2", "max_new_tokens=9"], "max_new_tokens=8, not 9"),
        (
            ["--out", "samples", "--samples", "2", "sampling.temperature=3"],
            "with sampling.temperature=1.0, not 3.0",
        ),
        (["--out", "old"], "format 0, this one reads 1"),
        (["max_new_token=2"], "max_new_tokens"),
        (["--out", "busy"], "--out busy is in use by pid"),
    ],
)
def test_a_command_that_cannot_be_ends_with_2(
    words: list[str],
    told: str,
    desk: Path,
    caches: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("student", "teacher"):
        Path(name).symlink_to(desk / name)
    Path("whole").symlink_to(caches["hidden"])
    Path("samples").symlink_to(caches["samples"])
    Path("other").mkdir()
    Path("other/notes.txt").write_text("mine")
    shutil.copytree(caches["hidden"], "old")
    text = Path("old", MANIFEST).read_text()
    Path("old", MANIFEST).write_text(text.replace('"format": 1', '"format": 0'))
    Path("busy").mkdir()
    lock = Lock(Path("busy"))
    before = sorted(tmp_path.rglob("*"))
    data = ["--data", str(desk / "d.jsonl"), "--out", "c", "--teacher", "teacher"]
    own = ["max_prompt_tokens=24", "max_new_tokens=8", "batch_size=6", "compile_cache=null"]
    assert cli.run(main, [*data, *own, "student.model=student", *words]) == cli.EXIT_BAD_INPUT
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    lock.close()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The command sets handlers of signals."""
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_damaged_shard_is_named(caches: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(caches["hidden"], tmp_path / "c"))
    (shard,) = shard_files(folder)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="shard-00000.safetensors: truncated or damaged"):
        len(ScoreCache(folder))


def stored_again(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Writes a whole file with other contents in the place of one."""
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def longer(tensors: dict[str, np.ndarray]) -> None:
    tensors["lengths"] = tensors["lengths"] + 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "another value": lambda path: stored_again(path, lambda t: t["tail_logprob"].__imul__(2)),
    "another key": lambda path: stored_again(path, lambda t: t["keys"].__ixor__(1)),
    "no tensor": lambda path: stored_again(path, lambda t: t.pop("topk_ids")),
    "other lengths": lambda path: stored_again(path, longer),
    "another dtype": lambda path: stored_again(
        path, lambda t: t.update(topk_ids=t["topk_ids"].view(np.float32))
    ),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.with_name("shard-00007.safetensors").write_bytes(
        path.read_bytes()
    ),
}


@pytest.mark.parametrize("checksums", [True, False])
def test_no_damaged_score_is_read(
    tiny: Any, rollout: Rollout, tmp_path: Path, checksums: bool
) -> None:
    """At the start, and while the run reads; of an older jaxrl's folder what its form tells."""
    distill = DistillConfig(signal="topk", top_k=3, jsd_beta=0.5)
    first = np.asarray(rollout.sequences.loss_mask).shape
    ids, probs = np.zeros((*first, 3), np.int32), np.zeros((*first, 3), np.float32)
    signal = TopKSignal(ids, probs, np.ones(first, np.float32))
    names, folder = ("topk_ids", "topk_logprobs", "tail_logprob"), tmp_path / "s"
    whole = stored(folder, tiny, rollout, signal, manifest(tiny, distill))
    if not checksums:
        (folder / CHECKSUMS).unlink()
    right = ScoreCache(folder).signal(rollout.sequences, names, "float32")
    for name, damage in DAMAGES.items():
        if not checksums and name in ("another value", "another key", "another file"):
            continue
        kept = name in ("another key", "another file")  # what was opened is not read again
        for begun in (False, True)[: 2 - kept]:
            at = Path(shutil.copytree(folder, tmp_path / f"{name} {begun}"))
            shard, cache = shard_files(at)[0], ScoreCache(at)
            if begun:
                cache.signal(rollout.sequences, names, "float32")
            damage(shard)
            with pytest.raises(UserError, match=r"shard-0000\d.safetensors"):
                (cache if begun else ScoreCache(at)).signal(rollout.sequences, names, "float32")
    if checksums:
        assert len(whole.digests) == 3
        again = ScoreCache(Path(shutil.copytree(folder, tmp_path / "again")))
        again.signal(rollout.sequences, names, "float32")
        os.utime(shard_files(again.path)[0])  # the same contents
        np.testing.assert_array_equal(
            again.signal(rollout.sequences, names, "float32").tail_logprob, right.tail_logprob
        )
    else:
        ScoreWriter(folder)  # notes those of what is there
        assert ScoreCache(folder).digests == whole.digests


def test_bfloat16_lies_on_disk_as_it_is(tiny: Any, rollout: Rollout, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(8, 16, tiny[0].d_model)).astype(jnp.bfloat16)
    about = manifest(tiny, DISTILLS["hidden"], dtype="bfloat16", stored="bfloat16")
    cache = stored(tmp_path / "c", tiny, rollout, HiddenSignal(hidden=values), about)
    found = CachedTeacher(config(DISTILLS["hidden"], "bfloat16"), cache, V).score(rollout)
    assert found is not None and found.hidden.dtype == jnp.bfloat16
    real = rollout.sequences.loss_mask
    np.testing.assert_array_equal(found.hidden[real], values[real])


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("teachers={a: builtin:teacher}", "teachers=a: scores are stored of one teacher"),
        ("teacher.model=policy", "teacher.model=policy: scores are stored of a model that stays"),
        ("teacher.prompt={prompt}!", "teacher.prompt={prompt}!: scores are stored of a model"),
    ],
)
def test_only_one_model_with_the_student_s_prompts_is_scored(key, error):
    keys = ["student.model=builtin:student", "data.train=d.jsonl", key]
    teacher = [] if "teacher.prompt" not in key else ["--teacher", "builtin:teacher"]
    with pytest.raises(UserError, match=re.escape(error)):
        config_of(_parser().parse(["--out", "s", *teacher, *keys]))


def test_a_config_that_a_run_accepts_is_scored_whatever_scores_do_not_depend_on(tmp_path):
    run = {
        "student": {"model": "builtin:student"},
        "teacher": {"model": "builtin:teacher"},
        "data": {"train": "arithmetic:size=64", "eval": "arithmetic:size=8"},
        "distill": {"on_policy_fraction": 0.5},
        "steps": 5,
        "batch_size": 4,
        "actor": {"minibatches": 8},
        "profile": {"steps": "2:3"},
        "schedule": "one_step_off",
        "eval": {"max_new_tokens": 700},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run))
    accepted = Config.load(file)
    words = ["--config", str(file), "--out", "s", "--samples", "2", "seed=3"]
    config = config_of(_parser().parse(words))
    assert (config.batch_size, config.group_size, config.seed, config.steps) == (4, 2, 3, 5)
    assert longest_sequence(config, teacher=True) == longest_sequence(accepted, teacher=True)
    assert config.data.train == accepted.data.train and config.data.eval is None
    with pytest.raises(UserError, match="batch_sizes"):
        config_of(_parser().parse([*words, "batch_sizes=3"]))
