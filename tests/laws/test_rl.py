"""Whole runs that learn from rewards: tiny models, through `train` and the command line."""

import json
import os
import signal
import time
from collections import defaultdict

import numpy as np
import pytest
from cases import and_slow
from runs import (
    CONSTANT,
    FUNCTIONS,
    GSPO,
    HERE,
    PENALISED,
    QUICK,
    SHORT,
    numbers,
    save_model,
    save_reward_model,
    weights,
)

from jaxrl import Config
from jaxrl.checkpoint import store
from jaxrl.config import cli
from jaxrl.process.interrupt import Interrupted
from jaxrl.roles.actor import Actor
from jaxrl.sampling.engine import Engine
from jaxrl.telemetry.metrics import find_metric, read_metrics
from jaxrl.train import main, train

pytestmark = pytest.mark.usefixtures("shared_programs")

GSPO = [
    *GSPO,
    "mesh=actor+rollout=1",
    "data.eval=null",
    "reference.dtype=float32",
    "optimizer.learning_rate=1e-3",
    *CONSTANT,
]
TAUGHT = [
    *("algorithm=dapo", "distill_weight=1", "distill.signal=student_topk", "distill.top_k=4"),
    *("actor.minibatches=1", "mesh=actor+rollout+teacher=1", "steps=1", "seed=3"),
]
"""Of runs that share theirs."""


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return f"student.model={save_model(tmp_path_factory.mktemp('models') / 'student', 32, 1, 0)}"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "teacher", 48, 1, seed=1)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("reward"))


def arguments(student, run_dir, *overrides):
    return [student, *SHORT, *GSPO, f"run_dir={run_dir}", *overrides]


def run(student, run_dir, *overrides):
    result = train(Config.load("builtin:quickstart", arguments(student, run_dir, *overrides)))
    for row in result.metrics[1:]:  # what is sampled is trained on, or left out for a reason
        for sampled, trained, kind in (
            ("completions/sampled", "completions/trained", "completions"),
            ("tokens/generated", "actor/tokens", "tokens"),
        ):
            left_out = sum(row[f"{kind}/{reason}"] for reason in ("replaced", "dropped", "masked"))
            assert row[sampled] == row[trained] + left_out, kind
    return result


def column(result, name):
    return [row[name] for row in result.metrics[1:]]


def samples(result):
    return [json.loads(line) for line in (result.run_dir / "samples.jsonl").open()]


@pytest.fixture(scope="module")
def plain(student, tmp_path_factory):
    """Two steps of gspo with a penalty towards the reference."""
    return run(student, tmp_path_factory.mktemp("plain") / "run", *PENALISED)


def test_a_run_tells_its_rewards(plain):
    rows = read_metrics(plain.run_dir)
    assert rows == plain.metrics and [row["step"] for row in rows] == [0, 1, 2]
    assert all(find_metric(name) is not None for row in rows for name in row)
    for row in rows[1:]:
        assert all(np.isfinite(value) for value in row.values())
        assert row["reward/mean"] == row["reward/length/mean"] and row["reward/std"] > 0
        assert row["reward/trained_mean"] == pytest.approx(row["reward/mean"])
        # Of gspo's four updates a batch, as many as divide six prompts.
        assert row["optimizer_step"] == 3 * row["step"]
        assert row["actor/skipped_updates"] == row["reward/none"] == 0
        assert row["policy/entropy"] > 0 and row["policy/old_kl_k3"] > 0
        assert all(row[f"time/{stage}_s"] > 0 for stage in ("reward", "reference", "update"))
    assert rows[1]["policy/mismatch_ess"] == pytest.approx(1, abs=1e-5)  # float32 on both sides
    assert rows[2]["policy/kl_k3"] > rows[1]["policy/kl_k3"] > 0


def test_rewards_of_samples_are_what_the_function_said(plain):
    shown = samples(plain)
    assert {sample["step"] for sample in shown} == {1, 2}
    assert all(sample["reward"] == len(sample["completion"]) for sample in shown)


OFF_POLICY = ["schedule=one_step_off", "steps=5", *PENALISED]


@pytest.fixture(scope="module")
def off_policy(student, tmp_path_factory):
    return run(student, tmp_path_factory.mktemp("off_policy") / "run", *OFF_POLICY)


def test_off_policy_the_gap_of_learner_and_sampler_is_told_and_corrected(off_policy):
    assert column(off_policy, "staleness") == [0, 1, 1, 1, 1]
    gap = column(off_policy, "policy/mismatch_k3")
    assert abs(gap[0]) < 1e-8 < gap[1]
    assert column(off_policy, "policy/mismatch_ess")[1] < 1
    assert column(off_policy, "policy/correction_weight")[1] != 1


def test_a_stopped_run_goes_on_bit_for_bit(student, off_policy, tmp_path, monkeypatch):
    """With a batch in flight, by Ctrl-C; the reference is what the student was, not what it has
    become.
    """
    whole, real = off_policy, Actor.update

    def stopped(self, *args, step, **kwargs):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return real(self, *args, step=step, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Actor, "update", stopped)
        with pytest.raises(Interrupted, match="saved at step"):
            run(student, tmp_path / "run", *OFF_POLICY)
    saved = store.newest(tmp_path / "run", print)
    assert 2 <= saved.step < 5 and saved.manifest.in_flight
    parts = run(student, tmp_path / "run", *OFF_POLICY)
    assert numbers(parts) == numbers(whole) and weights(parts.run_dir) == weights(whole.run_dir)
    assert samples(parts) == samples(whole)


def weighed(reward_model):
    return [
        *(f"reward.functions=[{FUNCTIONS}:length, format]", "reward.weights=[0.5, 2]"),
        *(f"reward.model={reward_model}", "reward.model_weight=3", "reward.dtype=float32"),
    ]


@pytest.mark.parametrize(
    "mesh",
    and_slow(
        [
            [
                *("mesh=actor+rollout+reference+reward=2", "actor.devices=0:1"),
                *("rollout.devices=0:1", "reference.devices=1:2", "reward.devices=1:2"),
            ]
        ],
        [
            [
                *("mesh=actor+rollout+reference+reward=2", "reference.devices=1:2"),
                "reward.devices=1:2",
            ],
            ["mesh=actor+rollout=2,reference+reward=1"],
        ],
    ),
)
def test_functions_and_a_reward_model_are_weighed(student, reward_model, tmp_path, mesh):
    """On a pool of their own, or on a slice of the actor's."""
    asked = [*weighed(reward_model), *mesh, "policy.reward_kl_coef=0.1", "logging.samples=24"]
    asked += PENALISED
    result = run(student, tmp_path / "run", *asked, "steps=1")
    (row,) = result.metrics[1:]
    parts = 0.5 * row["reward/length/mean"] + 2 * row["reward/format/mean"]
    expected = parts + 3 * row["reward/model/mean"]
    assert row["reward/mean"] == pytest.approx(expected, rel=1e-5)
    assert row["reward/model_cut"] == 0 and row["reward/kl"] == pytest.approx(0, abs=1e-4)
    assert row["memory/reward/peak_bytes"] > 0 and row["memory/reference/peak_bytes"] > 0
    told = np.mean([sample["reward"] for sample in samples(result)])
    assert told == pytest.approx(row["reward/mean"], rel=1e-5)
    for sample in samples(result):
        each = sample["rewards"]
        total = 0.5 * each["length"] + 2 * each["format"] + 3 * each["model"]
        assert sample["reward"] == pytest.approx(total, rel=1e-5)


def test_similar_completions_are_compared(student, reward_model, tmp_path):
    """All roles share the devices; the encoder is loaded at its first use, and that is told."""
    asked = ["policy.advantages=similarity", f"grouper.model={HERE / 'references' / 'tiny_bge'}"]
    asked += ["grouper.dtype=float32", "grouper.use=blend"]
    asked += ["mesh=actor+rollout+reference+reward+grouper=1", *PENALISED]
    asked += [f"reward.model={reward_model}", "reward.functions=[]", "reward.dtype=float32"]
    result = run(student, tmp_path / "run", *asked, "steps=1")
    (row,) = result.metrics[1:]
    assert 1 <= row["similarity/groups_per_prompt"] <= 4 and row["time/embed_s"] > 0
    split = [row.get(f"similarity/split_into_{k}", 0.0) for k in range(1, 5)]
    assert sum(split) == pytest.approx(1)
    mean = sum(k * share for k, share in enumerate(split, start=1))
    assert row["similarity/groups_per_prompt"] == pytest.approx(mean)
    assert "grouper: made on its first use, in " in (result.run_dir / "log.txt").read_text()


def test_rewards_and_a_teacher_together(student, teacher, tmp_path):
    """The teacher alone has a loss where no reward differs."""
    joint = [*TAUGHT, f"teacher.model={teacher}", "reward.functions=[format]"]
    joint += ["policy.dynamic_sampling=off", "reward.overlong_buffer=0"]
    (row,) = run(student, tmp_path / "run", *joint).metrics[1:]
    assert row["policy/degenerate_groups"] == 6 and row["reward/std"] == 0
    assert row["distill/divergence"] > 0.1 and row["actor/grad_norm"] > 0
    assert row["loss"] == pytest.approx(row["distill/divergence"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ["algorithm=grpo"],
        ["algorithm=dr_grpo"],
        ["algorithm=dapo", "reward.overlong_buffer=4"],
        ["algorithm=gspo_token", "policy.opd_coef=1", "distill.signal=sampled"],
        ["algorithm=cispo", "policy.bypass=true", "schedule=one_step_off"],
        ["algorithm=sapo", "policy.entropy_coef=0.01"],
        ["algorithm=gmpo", "policy.correction=icepop", "schedule=two_step_off"],
        ["algorithm=luspo"],
    ],
    ids=lambda asked: asked[0].partition("=")[2],
)
def test_every_algorithm_trains(student, teacher, tmp_path, asked):
    if any("opd" in word for word in asked):
        more = [f"teacher.model={teacher}", "distill.jsd_beta=1"]
        asked = [*asked, *more, "mesh=actor=2,rollout=2,teacher=2"]
    result = run(student, tmp_path / "run", *asked, "steps=3")
    assert all(np.isfinite(value) for row in result.metrics[1:] for value in row.values())
    assert column(result, "actor/grad_norm")[-1] > 0


FIRST = """return [
    float(len(c)) if prompt.startswith(("1", "2", "3", "4")) else 1.0
    for prompt, c in zip(prompts, completions)
]"""


@pytest.mark.parametrize("most", and_slow([4], [1]))
def test_prompts_that_teach_nothing_are_replaced_as_often_as_allowed(student, tmp_path, most):
    """By others that do; what is missing after the last time is filled with those that do not."""
    refilled = ["policy.dynamic_sampling=refill", f"policy.max_refills={most}", *PENALISED]
    asked = [*refilled, function(tmp_path, FIRST), "logging.samples=24"]
    asked.append("reward.overlong_buffer=1")  # what has a penalty is not dropped, as with dapo
    result = run(student, tmp_path / "run", *asked)
    for row in result.metrics[1:]:
        assert 1 <= row["policy/refills"] <= most and row["policy/prompts_replaced"] > 0
        full = row["completions/dropped"] == 0
        assert full or row["policy/refills"] == most
    shown = [sample for sample in samples(result) if sample["step"] == 2]
    assert sum(sample["learned"] for sample in shown) == result.metrics[2]["actor/tokens"]
    prompts = [sample["prompt"] for sample in shown]
    for prompt in prompts:  # advantages are against the others of the prompt
        own = [sample["advantage"] for sample in shown if sample["prompt"] == prompt]
        assert sum(own) == pytest.approx(0, abs=1e-5)
    assert len(set(prompts)) == 6 and all(prompts.count(prompt) == 4 for prompt in prompts)
    dull = {prompt for prompt in prompts if prompt[0] not in "1234"}
    told = {*prompts} - dull  # of the dull ones only the penalty for length may differ
    rewards = np.array([[s["reward"] for s in shown if s["prompt"] == p] for p in told])
    trained = rewards[rewards.min(1) < rewards.max(1)]
    assert result.metrics[2]["reward/trained_mean"] == pytest.approx(trained.mean())
    assert len(dull) <= result.metrics[2]["policy/degenerate_groups"]


def test_a_refilled_batch_is_distilled_at_the_tokens_the_policy_ranks_highest(
    student, teacher, tmp_path
):
    asked = [*TAUGHT, "policy.max_refills=1", f"teacher.model={teacher}"]
    (row,) = run(student, tmp_path / "run", *asked, function(tmp_path, FIRST)).metrics[1:]
    assert row["policy/refills"] == 1 and row["policy/prompts_replaced"] > 0
    assert row["distill/divergence"] > 0 and 0 < row["distill/student_tail_mass"] < 1
    assert row["tokens/dropped"] == row["tokens/masked"] == 0, "the teacher's share drops nothing"


FLAKY = """
from jaxrl.environments import Answer, Environment

class Flaky(Environment):
    def step(self, text, messages):
        if sum(map(ord, str(messages))) % 3 == 0:
            raise RuntimeError("no server")
        return Answer("", reward=float(sum(map(ord, text)) % 2), done=True)
"""


@pytest.mark.parametrize(
    ("sampling", "truncated"),
    and_slow([("refill", "mask")], [("refill", "keep"), ("drop", "mask"), ("off", "mask")]),
)
def test_figures_of_sampling_are_of_all_that_was_sampled(
    tmp_path, monkeypatch, sampling, truncated
):
    """Those that the engine sampled, also of prompts whose environment failed, and which were
    replaced."""
    seen, generate = defaultdict(lambda: defaultdict(list)), Engine.generate

    def counted(self, params, requests, **options):
        completions = generate(self, params, requests, **options)
        for request, completion in zip(requests, completions, strict=True):
            key = request.key
            seen[key.step][key.attempt, key.prompt].append(completion)
        return completions

    monkeypatch.setattr(Engine, "generate", counted)
    (tmp_path / "flaky.py").write_text(FLAKY)
    asked = ["algorithm=dapo", f"environment.name={tmp_path}/flaky.py:Flaky", "data.eval=null"]
    asked += ["environment.max_failures=1", f"policy.dynamic_sampling={sampling}", "steps=2"]
    asked += [f"reward.truncated={truncated}", "reward.overlong_buffer=0", "reward.functions=[]"]
    asked += ["policy.max_refills=2", "eval.every=0"]
    result = run("student.model=builtin:student", tmp_path / "run", *asked)
    for row in result.metrics[1:]:
        groups = list(seen[row["step"] - 1].values())
        all_of = [one for group in groups for one in group]
        failed = sum(one.failure is not None for one in all_of)
        assert failed > 0 and row["environment/failures"] == failed
        assert row["completions/sampled"] == len(all_of)
        assert row["tokens/generated"] == sum(int(one.sampled.sum()) for one in all_of)
        cut = [one.finish_reason == "length" for one in all_of]
        assert row["rollout/truncated_fraction"] == pytest.approx(np.mean(cut))
        lengths = [len(one.tokens) for one in all_of]
        assert row["rollout/completion_tokens_mean"] == pytest.approx(np.mean(lengths))
        unscored = sum(all(one.failure is not None for one in group) for group in groups)
        assert row["policy/unscored_groups"] == unscored
        assert row.get("policy/prompts_replaced", 0) == len(groups) - 6
        told = f"environment: {failed} of {len(all_of)} episodes failed"
        assert told in (result.run_dir / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo"])
def test_what_is_rewarded_is_learned(student, tmp_path, algorithm):
    """The share of one sign, which is rare at first, with one large update a batch."""
    asked = [f"algorithm={algorithm}", "steps=40", "batch_size=16", "optimizer.learning_rate=1e-2"]
    asked.append("actor.minibatches=1")
    signs = function(tmp_path, "return [c.count('=') / 8 for c in completions]")
    share = column(run(student, tmp_path / "run", *asked, signs), "reward/judge/mean")
    assert np.mean(share[:3]) < 0.3 and np.mean(share[-3:]) > 0.8


# Rewards that fail.


def function(folder, body):
    path = folder / "mine.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path.write_text(f"def judge(prompts, completions, **columns):\n{lines}\n")
    return f"reward.functions=[{path}:judge]"


SOMETIMES = """if any(prompt.startswith("1") for prompt in prompts):
    raise RuntimeError("the judge is out")
return [float(len(completion)) for completion in completions]"""


def test_what_a_function_fails_on_has_no_reward(student, tmp_path):
    """Told with the first traceback, and trained without."""
    asked = [function(tmp_path, SOMETIMES), "reward.max_failures=1", "steps=1", *PENALISED]
    result = run(student, tmp_path / "run", *asked)
    (row,) = result.metrics[1:]
    assert row["reward/judge/failures"] == row["reward/none"] > 0
    assert row["policy/unscored_groups"] == row["reward/none"] / 4
    told = (result.run_dir / "log.txt").read_text()
    assert "judge failed on" in told and "the judge is out" in told


def test_a_function_that_always_fails_ends_the_run(student, tmp_path, capsys):
    asked = [function(tmp_path, 'raise RuntimeError("the judge is out")'), "steps=2", *PENALISED]
    assert cli.run(main, [*QUICK, *arguments(student, tmp_path / "run", *asked)]) == 1
    told = capsys.readouterr().err
    assert "reward.max_failures allows" in told and "the judge is out" in told
    assert "jaxrl/run/loop.py" not in told


BAD = {
    "no such file": (["reward.functions=[/nowhere/judge.py:judge]"], "no file /nowhere/judge.py"),
    "no such function": ([f"reward.functions=[{FUNCTIONS}:lenght]"], "length"),
    "no such name": (["reward.functions=[mth]"], "math"),
    "a column that the data lacks": ([f"reward.functions=[{FUNCTIONS}:parts]"], "`parts`"),
    "no function": (["reward.functions=[]"], "set reward.functions"),
    "no group": (["group_size=1"], "at least 2"),
    "greedy": (["sampling.temperature=0"], "sampling.temperature above 0"),
    "truncated sampling": (["sampling.top_p=0.9"], "top_p=1"),
    "no encoder": (["policy.advantages=similarity"], "grouper.model"),
    "no such encoder": (
        ["policy.advantages=similarity", "grouper.model=/nowhere/bge"],
        "/nowhere/bge",
    ),
    "no such reward model": (["reward.model=/nowhere/rm"], "/nowhere/rm"),
    "a setting of another algorithm": (["policy.ratio_cap=5"], "clip_low and clip_high"),
    "a setting of another correction": (
        ["policy.correction=icepop", "policy.correction_cap=3"],
        "low and high",
    ),
    "tokens for a sequence's ratio": (
        [
            *("policy.opd_coef=1", "distill.signal=sampled", "distill.jsd_beta=1"),
            "teacher.model=STUDENT",
        ],
        "gspo_token",
    ),
    "twice corrected": (["policy.bypass=true", "policy.correction=tis_token"], "bypass=false"),
    "weights and functions": (["reward.weights=[1, 2]"], "2 numbers for the 1 functions"),
    "a teacher that nothing asks": (["teacher.model=builtin:teacher"], "distill_weight"),
    "a role twice": (["mesh=actor+rollout=2,reward+actor=2"], "actor"),
    "an unknown role": (["mesh=actor+rollout=2,reward+refrence=1"], "reference"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_a_line_and_nothing_is_written(student, tmp_path, capsys, case):
    asked, told = BAD[case]
    asked = [word.replace("STUDENT", student.partition("=")[2]) for word in asked]
    assert cli.run(main, [*QUICK, *arguments(student, tmp_path / "run", *asked)]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "Traceback" not in captured.err, captured.err
    assert len(captured.err.splitlines()) <= 5 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cache_in_pages_changes_a_run_by_rounding_alone(student, tmp_path):
    """Completions of up to two pages each, of which there are three for four completions; those of
    evaluations too. In the default suite the engine does so, in test_engine.py."""
    asked = ["max_new_tokens=66", "rollout.launch_tokens=66", "rollout.slots=4", "steps=1"]
    asked += ["batch_size=2", "group_size=2", "actor.minibatches=1", "data.eval=arithmetic:size=2"]
    asked += ["eval.prompts=2", "eval.samples=2", "eval.temperature=1"]
    pages = ["rollout.cache_tokens=192", "rollout.launch_tokens=64"]
    whole = run(student, tmp_path / "whole", *asked)
    paged = run(student, tmp_path / "paged", *asked, *pages)
    assert sum(row["rollout/sent_back"] for row in paged.metrics if row["step"]) > 0
    assert not any("rollout/sent_back" in row for row in whole.metrics)
    for one, other in zip(numbers(whole), numbers(paged), strict=True):
        for name in one.keys() - {"rollout/decode_steps"}:
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
