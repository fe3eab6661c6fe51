"""Laws of self-distillation: the policy before training, the current policy or its moving average
as the teacher, with a prompt of its own."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from cases import and_slow
from runs import AS_TRAINED, CONSTANT, SHORT, losses, numbers, save_model, weights
from tiny_models import make_mesh, tiny_model

from jaxrl import Config
from jaxrl.algorithms.signals import Projection
from jaxrl.config.settings import DistillConfig
from jaxrl.data.batch import as_the_teacher_reads, make_rollout
from jaxrl.data.tasks import correction
from jaxrl.errors import UserError
from jaxrl.models.decoder import forward, token_logits
from jaxrl.teacher.local_teacher import Scorer
from jaxrl.train import train
from jaxrl.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("shared_programs")
POLICY = "teacher.model=policy"
HINT = ["teacher.prompt={answer};{prompt}", "teacher.max_prompt_tokens=12"]
ALONE = [
    "mesh=actor+rollout+teacher=1",
    "data.eval=null",
    "optimizer.learning_rate=0.01",
    *CONSTANT,
]
AVERAGED = [POLICY, "teacher.ema=0.5", *HINT, "actor.minibatches=2", "distill.jsd_beta=0.5"]
LAGGING = ["schedule=two_step_off", "steps=5", "checkpoint.every=2"]
VOCABULARY = 264


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "student", 32, 1, 0, rows=VOCABULARY)


def run(student, run_dir, *overrides):
    given = [f"student.model={student}", *SHORT, *ALONE, f"run_dir={run_dir}", *overrides]
    return train(Config.load("builtin:quickstart", given))


def test_the_version_before_training_is_an_ordinary_teacher(student, tmp_path):
    """With ema=1 and the student's own prompt: every number and weight, and no divergence at the
    start."""
    asked = ["data.eval=arithmetic", *AS_TRAINED, "eval.teacher=true"]
    asked += ["distill.signal=topk", "distill.top_k=8"]
    plain = run(student, tmp_path / "plain", f"teacher.model={student}", *asked)
    own = run(student, tmp_path / "own", POLICY, "teacher.ema=1", "teacher.prompt={prompt}", *asked)
    lengths = [row.pop("teacher/prompt_tokens_mean") for row in own.metrics[1:]]
    assert all(5 < length < 10 for length in lengths)
    assert numbers(own) == numbers(plain)
    assert weights(own.run_dir) == weights(plain.run_dir)
    assert abs(losses(own)[0]) < 1e-6 < losses(own)[1]


@pytest.fixture(scope="module")
def averaged(student, tmp_path_factory):
    """Five steps with a moving average."""
    return run(student, tmp_path_factory.mktemp("averaged") / "run", *AVERAGED, *LAGGING)


@pytest.mark.slow
def test_the_head_in_the_loss_is_that_of_the_version_that_scored(student, averaged, tmp_path):
    """Hidden states with the actor's copy of the head against log-probs of every token, which need
    no head: the same divergence under a lag, with several updates for each batch. In the default
    suite test_actor.py looks at the head that an update is given."""
    assert averaged.metrics[4]["policy_version"] == 1
    every = ["distill.signal=topk", f"distill.top_k={VOCABULARY}", "steps=4"]
    topk = run(student, tmp_path / "topk", *AVERAGED, *LAGGING, *every)
    assert losses(averaged)[:4] == pytest.approx(losses(topk), rel=1e-4)
    assert min(losses(topk)) > 0.01


def test_the_current_policy_with_its_own_prompt_teaches_nothing(student, tmp_path):
    """The teacher is the policy after the batch before: with one update for each batch it is the
    learner itself, and the divergence stays 0."""
    asked = [POLICY, "distill.signal=topk", "distill.top_k=8", "schedule=two_step_off"]
    same = run(student, tmp_path / "run", *asked, "actor.minibatches=1", "steps=3")
    assert np.abs(losses(same)).max() < 1e-6


def test_a_run_with_a_moving_average_resumes_bit_for_bit(student, averaged, tmp_path):
    asked, whole, left = [*AVERAGED, *LAGGING], averaged, tmp_path / "left"
    shutil.copytree(whole.run_dir, left)
    shutil.rmtree(left / "final")
    for step in (4, 5):
        shutil.rmtree(left / "checkpoints" / str(step))
    with pytest.raises(UserError, match=r"teacher\.ema: 0\.5 there, 0\.9 now"):
        run(student, left, *asked, "teacher.ema=0.9")
    resumed = run(student, left, *asked)
    assert resumed.metrics[-1]["step"] == 5
    assert numbers(resumed) == numbers(whole)
    assert weights(resumed.run_dir) == weights(whole.run_dir)


CURRENT = [POLICY, *HINT, "distill.signal=topk", "distill.top_k=8"]


@pytest.mark.parametrize(
    ("asked", "offloaded"), [(CURRENT, "params"), (AVERAGED, "optimizer")], ids=["0", "0.5"]
)
def test_what_the_teacher_shares_with_the_actor_is_offloaded_with_it(
    student, tmp_path, asked, offloaded
):
    """In one pool, where actor and teacher may hold the same arrays: no bit changes."""
    plain = run(student, tmp_path / "plain", *asked)
    moved = run(student, tmp_path / "moved", *asked, f"offload.{offloaded}=true")
    assert plain.metrics[1]["weights/teacher_sync_bytes"] == 0
    assert moved.metrics[2]["offload/to_host_bytes"] > 0
    assert weights(moved.run_dir) == weights(plain.run_dir)
    assert losses(moved) == losses(plain)


def prompted(vocab, seed=0):
    """Three prompts with two completions each, and for each prompt another one of the teacher."""
    rng = np.random.default_rng(seed)

    def tokens(n):
        return tuple(rng.integers(0, vocab, n).tolist())

    prompts = [Prompt(i, tokens(n), "", teacher_tokens=tokens(m)) for i, (n, m) in LENGTHS.items()]
    none = np.zeros(0, np.float32)
    completions = [
        [Completion(tokens(n), none, none, "stop") for n in rng.integers(1, 7, 2)] for _ in prompts
    ]
    return make_rollout(
        prompts, completions, policy_version=0, pad_id=0, max_prompt_tokens=9, max_new_tokens=8
    )


LENGTHS = {0: (3, 20), 1: (9, 1), 2: (1, 33)}
"""Prompt -> tokens of the student's and of the teacher's."""


@pytest.mark.parametrize("axes", and_slow([(1, 1, 1, 2)], [((2, 1, 1),)]), ids=str)
def test_the_teacher_scores_its_own_prompt_with_the_same_completion(axes):
    """Log-probs of each completion's tokens, by a plain forward pass over one row at a time."""
    config, params = tiny_model("qwen2", mesh := make_mesh(*axes))
    rollout = prompted(config.vocab_size)
    distill = DistillConfig(signal="sampled", jsd_beta=1.0)
    projection = Projection(distill, mesh, config.vocab_size)
    teacher = Scorer(config, params, projection, max_prompt_tokens=40)
    parts = [teacher.score(rollout, part, 2) for part in range(2)]
    scored = np.concatenate([np.asarray(part.token_logprobs) for part in parts if part])
    _, alone = tiny_model("qwen2")

    @jax.jit
    def plain(params, tokens, mask):
        return jax.nn.log_softmax(
            token_logits(config, params, forward(config, params, tokens, mask))
        )

    for row, (prompt, completion) in enumerate(
        zip(rollout.prompts, rollout.completions, strict=True)
    ):
        one = [*prompt.teacher_tokens, *completion.tokens]
        tokens = np.zeros((1, 48), np.int32)  # one width for all rows: one program
        tokens[0, : len(one)] = one
        logprobs = np.asarray(plain(alone, tokens, np.arange(48)[None] < len(one)))[0]
        start = len(prompt.teacher_tokens)
        expected = [float(logprobs[start + j - 1, t]) for j, t in enumerate(completion.tokens)]
        np.testing.assert_allclose(scored[row, : len(expected)], expected, atol=2e-5)
        assert not scored[row, len(expected) :].any()


def test_the_teachers_rows_keep_completions_and_masks():
    rollout = prompted(50)
    seen = as_the_teacher_reads(rollout, 40)
    own, c = rollout.sequences, rollout.sequences.loss_mask.shape[1]
    np.testing.assert_array_equal(seen.sequences.tokens[:, -c:], own.tokens[:, -c:])
    np.testing.assert_array_equal(seen.sequences.loss_mask, own.loss_mask)
    for row, prompt in enumerate(rollout.prompts):
        mask = seen.sequences.mask[row, :-c]
        assert tuple(seen.sequences.tokens[row, :-c][mask]) == prompt.teacher_tokens
        assert mask[-len(prompt.teacher_tokens) :].all()  # left-padded


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["teacher.model=x", "teacher.ema=0.5"], "ema=0.5: it averages the weights of the policy"),
        ([POLICY, "teacher.max_prompt_tokens=9"], "set prompt, or max_prompt_tokens=null"),
        (
            ["teacher.address=h:1", "teacher.prompt={prompt}"],
            "the teacher there reads the student's prompts",
        ),
        ([POLICY, "teacher.prompt={prompt"], "expected '}' before end of string"),
        ([POLICY, r"teacher.prompt=\boxed{}"], "names no field: write {NAME}"),
        (
            [POLICY, "distill.seq_kd=true", "distill.on_policy_fraction=0"],
            "samples from a teacher that stays the same: set teacher.ema=1",
        ),
        (
            ["teacher.model=null", "teacher.prompt={prompt}", "algorithm=sft"],
            "it has no teacher: set teacher.prompt=null",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides, error):
    with pytest.raises(UserError) as refused:
        Config.load(None, ["student.model=s", "data.train=arithmetic", *overrides])
    assert error in str(refused.value)


def test_a_template_that_names_no_column_is_refused_before_a_weight_is_read(student, tmp_path):
    with pytest.raises(UserError, match=r"teacher\.prompt names \{anser\} \(did you mean answer"):
        run(student, tmp_path / "run", POLICY, "teacher.prompt={anser}{prompt}")
    assert not (tmp_path / "run").exists()


def test_rows_whose_hint_is_too_long_are_left_out_and_counted(student, tmp_path, capsys):
    data = tmp_path / "train.jsonl"
    hints = ["x" * n for n in (1, 1, 1, 1, 2, 3, 30, 40)]
    rows = (json.dumps({"prompt": "98+76-54=", "hint": hint}) + "\n" for hint in hints)
    data.write_text("".join(rows))
    asked = [f"data.train={data}", "teacher.prompt={hint}{prompt}", "teacher.max_prompt_tokens=12"]
    asked += ["steps=1", "distill.signal=topk", "distill.top_k=8"]
    result = run(student, tmp_path / "run", POLICY, *asked)
    note = "data.train: 6 prompts; 2 are longer than max_prompt_tokens=24, or for the teacher 12"
    assert note in capsys.readouterr().out
    assert result.metrics[1]["teacher/prompt_tokens_mean"] == 10.5


REWARDED = ["algorithm=gspo", "reward.functions=[auto]", "reward.workers=1", "group_size=2"]
REWARDED += ["distill_weight=1", "logging.samples=99", "steps=1"]


FEEDBACK_ALONE = [
    *REWARDED,
    POLICY,
    "policy_weight=0",
    "actor.minibatches=1",
    "distill.signal=topk",
]
"""Of runs that share their programs."""
TOLD = ["teacher.prompt={feedback};{attempt}\n{prompt}", "teacher.max_prompt_tokens=99"]


def assert_told_of_each_attempt(result):
    """The prompts of the teacher have the verifier's correction of the very completion that it
    scores."""
    lines = (result.run_dir / "samples.jsonl").read_text().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["split"] == "train"]
    assert len(samples) == 12 and len({sample["completion"] for sample in samples}) > 6
    texts = [
        f"{correction(sample['prompt'], sample['completion'])};{sample['completion']}\n"
        + sample["prompt"]
        for sample in samples
    ]
    assert not any(text.startswith(";") for text in texts)  # a random model solves none
    row = result.metrics[1]
    mean = np.mean([len(text.encode()) for text in texts])
    assert row["teacher/prompt_tokens_mean"] == pytest.approx(mean)
    assert row["teacher/feedback_cut"] == 0
    assert row["distill/divergence"] > 0.01


def test_a_teacher_is_told_what_was_wrong_with_each_attempt_at_prompts_that_came_later(
    student, tmp_path
):
    refilled = ["policy.dynamic_sampling=refill", "policy.max_refills=1"]
    assert_told_of_each_attempt(run(student, tmp_path / "run", *FEEDBACK_ALONE, *TOLD, *refilled))


def test_feedback_changes_what_the_teacher_says_and_the_policy_learns_it(student, tmp_path):
    """With the feedback the divergence of the same policy is not 0, without it it is."""
    told = run(student, tmp_path / "told", *FEEDBACK_ALONE, *TOLD)
    assert_told_of_each_attempt(told)
    own = ["teacher.prompt={prompt}", "teacher.max_prompt_tokens=99"]
    without = run(student, tmp_path / "without", *FEEDBACK_ALONE, *own).metrics[1]
    assert abs(without["distill/divergence"]) < 1e-6
    assert without["reward/mean"] == told.metrics[1]["reward/mean"]
