"""Several teachers: a row learns from its own as if there were no other, and a mixture is one
teacher, whatever the devices, the parts and offloading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import and_slow
from dense_losses import log_softmax
from runs import CONSTANT, SHORT, save_model
from safetensors.numpy import load_file
from tiny_models import make_mesh, tiny_model

from jaxrl import Config
from jaxrl.algorithms.signals import Projection, teacher_weights
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.data.batch import make_rollout
from jaxrl.errors import UserError
from jaxrl.models.parameters import head
from jaxrl.roles.run_shapes import generates
from jaxrl.run.job import make_job
from jaxrl.run.launch import make_teacher
from jaxrl.sharding.reshard import to_host
from jaxrl.teacher.local_teacher import RoutedTeachers, Scorer
from jaxrl.train import train
from jaxrl.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("shared_programs")

NAMES = ("math", "code", "chat")
WEIGHTS = {"math": 0.5, "chat": 1.5}
ROWS = ("math", "chat", "math", "code", "chat")
FAMILIES = {"math": "qwen2", "code": "qwen2", "chat": "llama"}
"""With weights of their own; the two of one family share a program."""
SIGNALS = ("hidden", "topk", "student_topk", "sampled")
VOCAB = 30
CAPS = {"chat": 1.5}
"""`final_softcap` of those that have one."""
SGD = ["optimizer.name=sgd", "optimizer.learning_rate=0.1", *CONSTANT]
"""Adam would blow rounding up where a gradient is almost 0."""
ALONE, APART = "mesh=actor+rollout+teacher=1", "mesh=actor+rollout=1,teacher=1"


def batch(columns, group=2):
    """A rollout whose prompts have these values in the column `kind`; the last row is padding."""
    draw = np.random.default_rng(0)
    prompts, completions = [], []
    for number, kind in enumerate(columns):
        tokens = tuple(int(t) for t in draw.integers(1, VOCAB, 2 + number))
        prompts.append(Prompt(number, tokens, f"p{number}", columns={"kind": kind}))
        lengths = draw.integers(1, 7, group)
        drawn = [tuple(int(t) for t in draw.integers(1, VOCAB, n)) for n in lengths]
        completions.append(
            [Completion(t, np.zeros(len(t)), np.zeros(len(t)), "stop") for t in drawn]
        )
    limits = {"pad_id": 0, "max_prompt_tokens": 16, "max_new_tokens": 8, "row_multiple": 4}
    rollout = make_rollout(prompts, completions, policy_version=0, **limits)
    shape = (*rollout.sequences.loss_mask.shape, 3)
    ids = np.argsort(draw.random((*shape[:2], VOCAB)), -1)[..., :3].astype(np.int32)
    return replace(rollout, student_topk=ids)


def config(signal, *overrides):
    teachers = {name: {"model": "builtin:teacher"} for name in NAMES}
    asked = [f"teachers={json.dumps(teachers)}", "teacher.model=null", f"distill.signal={signal}"]
    more = ["distill.top_k=3", "distill.entropy_top_k=3", "distill.chunk_tokens=7"]
    more += ["distill.jsd_beta=1"] if signal == "sampled" else []
    return Config.load("builtin:quickstart", [*asked, *more, *overrides])


def role(made, mesh, families=FAMILIES):
    """The role of a run, a scorer of each teacher alone, and one that sends its hidden states."""
    projection = Projection.from_config(made, mesh, VOCAB)
    named = enumerate(families.items())
    models = {name: tiny_model(family, mesh, seed=i) for i, (name, family) in named}
    models = {
        name: (replace(model, final_softcap=CAPS.get(name)), params)
        for name, (model, params) in models.items()
    }
    alone = Projection(made.distill, mesh, VOCAB)
    hidden = Projection(made.distill.model_copy(update={"signal": "hidden"}), mesh, VOCAB)
    each = alone if made.mixture is None else hidden
    together = RoutedTeachers(made, projection, max(model.d_model for model, _ in models.values()))
    for name, model in models.items():
        together.add(name, Scorer(*model, each))
    scorers = [
        {name: Scorer(*model, how) for name, model in models.items()} for how in (alone, hidden)
    ]
    return together, *scorers


def scored(teacher, rollout, parts=1):
    """Field -> its values for all rows."""
    found = filter(None, [teacher.score(rollout, part, parts) for part in range(parts)])
    given = [{k: to_host(x) for k, x in vars(part).items() if x is not None} for part in found]
    return {name: np.concatenate([part[name] for part in given]) for name in given[0]}


@pytest.mark.parametrize(
    ("signal", "axes", "parts"),
    and_slow(
        [("hidden", (2, 2, 1), 2)],
        [("student_topk", (1, 1, 1), 2), ("topk", (1, 2, 2), 1), ("sampled", (2, 1, 1), 1)],
    ),
)
def test_a_row_gets_what_its_own_teacher_says_alone(signal, axes, parts):
    made = config(signal, "data.teacher_key=kind", "distill.entropy_aware=true")
    rollout = batch(ROWS)
    together, alone, _ = role(made, make_mesh(*axes))
    found = scored(together, rollout, parts)
    for name, scorer in alone.items():
        mine = [prompt.columns["kind"] == name for prompt in rollout.prompts]
        seen = rollout.sequences.loss_mask.copy()
        seen[: len(mine)] &= np.array(mine)[:, None]
        wanted = scored(scorer, rollout, parts)
        assert set(found) == set(wanted) and seen.any()
        for field, value in wanted.items():
            got = found[field][..., : value.shape[-1]] if field == "hidden" else found[field]
            np.testing.assert_allclose(got[seen], value[seen], atol=3e-5, err_msg=field)


@pytest.mark.parametrize("mixture", [[], ["distill.mixture=arithmetic"]])
def test_a_part_of_padding_alone_has_a_signal(mixture):
    """The last of six parts has the two rows that pad the batch."""
    made = config("hidden", "data.teacher_key=kind", *mixture)
    together, alone, _ = role(made, make_mesh(1, 1, 1))
    parts = [together.score(batch(ROWS), part, 6) for part in range(6)]
    widths = [scorer.model.d_model for scorer in alone.values()]
    width = sum(widths) if mixture else max(widths)
    assert [(len(part.hidden), part.hidden.shape[-1]) for part in parts] == [(2, width)] * 6
    assert not parts[-1].hidden.any() and parts[0].hidden.any()


@pytest.mark.parametrize(
    ("kind", "signal", "axes", "parts"),
    and_slow(
        [
            ("arithmetic", "topk", (1, 1, 1), 1),
            ("geometric", "sampled", (1, 1, 1), 1),
        ],
        [
            ("arithmetic", "topk", (1, 2, 2), 1),
            *(("geometric", "student_topk", axes, 1) for axes in ((1, 1, 1), (2, 1, 1))),
            ("arithmetic", "sampled", (1, 1, 1), 2),
        ],
    ),
)
def test_a_mixture_s_signal_is_that_of_the_mixed_distribution(kind, signal, axes, parts):
    """Whose log-probs are computed here from each teacher's hidden states."""
    made = config(signal, "data.teacher_key=kind", f"distill.mixture={kind}")
    rollout = batch(("code", WEIGHTS, WEIGHTS, {"chat": 2, "math": None}))
    mesh = make_mesh(*axes)
    together, _, senders = role(made, mesh)
    found, shares = scored(together, rollout, parts), teacher_weights(made, rollout)
    np.testing.assert_allclose(shares[2:4], [[0.25, 0, 0.75]] * 2)
    logs = []
    for name, one in senders.items():
        logits = scored(one, rollout)["hidden"] @ np.asarray(head(one.params))[:VOCAB].T
        cap = CAPS.get(name)
        logs.append(log_softmax(logits if cap is None else cap * np.tanh(logits / cap)))
    logs, each = np.stack(logs, -1).astype(np.float64), shares[:, None, None]
    wanted = np.log(
        (np.exp(logs) * each).sum(-1) if kind == "arithmetic" else np.exp((logs * each).sum(-1))
    )
    wanted -= np.log(np.exp(wanted).sum(-1, keepdims=True))
    seen = rollout.sequences.loss_mask
    if signal == "sampled":
        ids = rollout.sequences.tokens[:, -seen.shape[1] :, None]
    else:
        ids = found["topk_ids"]
    sent = found["token_logprobs"][..., None] if signal == "sampled" else found["topk_logprobs"]
    np.testing.assert_allclose(sent[seen], np.take_along_axis(wanted, ids, -1)[seen], atol=3e-5)
    if signal == "topk":
        np.testing.assert_allclose(sent[seen], -np.sort(-wanted[seen], -1)[..., :3], atol=3e-5)
    if signal == "student_topk":
        np.testing.assert_array_equal(ids, rollout.student_topk)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    rows = [{"prompt": f"{i} + {i}", "kind": NAMES[i % 2], "answer": "1"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "student": save_model(folder / "student", 32, 1, 0),
        "math": save_model(folder / "math", 48, 1, 1),
        "code": save_model(folder / "code", 32, 1, 2, rows=270),
        "rows": str(folder / "rows.jsonl"),
    }


def run(models, run_dir, *overrides):
    keys = [f"student.model={models['student']}", f"data.train={models['rows']}", "data.eval=null"]
    plain = [*SHORT, ALONE, "actor.dtype=float32", "rollout.dtype=float32", f"run_dir={run_dir}"]
    plain += ["teacher.model=null", "rollout.launch_tokens=8", *SGD]  # one launch: one program
    result = train(Config.load("builtin:quickstart", [*keys, *plain, *overrides]))
    return result, load_file(run_dir / "final" / "model.safetensors")


def totals(result):
    return [row["loss"] for row in result.metrics[1:]]


def teachers(models, **named):
    return f"teachers={json.dumps({name: {'model': models[of]} for name, of in named.items()})}"


LEARNT = {
    "hidden": (["data.teacher_key=kind"], ["distill.jsd_beta=1"]),
    "sampled": ([], ["distill.jsd_beta=1"]),
}
"""Of a signal: how several teachers are learnt from, for each row its own or a mixture, and what
one alone is learnt by too."""


@pytest.fixture(scope="module")
def two_names(models, tmp_path_factory):
    """Of a signal: a run with one teacher, one with two names of it, and the tokens and the places
    of each program's rows in the second, by batch."""
    done = {}

    def get(signal):
        if signal in done:
            return done[signal]
        how, keys = LEARNT[signal]
        keys = [f"distill.signal={signal}", "teacher.num_microbatches=2", *keys]
        folder = tmp_path_factory.mktemp(signal)
        alone = run(models, folder / "alone", f"teacher.model={models['math']}", *keys)
        computed, batches, part, score = {}, [], Scorer.run, RoutedTeachers.score

        def of_a_batch(role, rollout, *which, **more):
            batches.append(rollout.policy_version)
            return score(role, rollout, *which, **more)

        def recorded(scorer, given):
            sequences = given.sequences
            prompt = sequences.tokens.shape[1] - sequences.loss_mask.shape[1]
            before, after = np.split(sequences.mask, [prompt], 1)
            held = before[:: sequences.group].sum() + after.sum()
            computed.setdefault(batches[-1], []).append((held, sequences.capacity[0]))
            return part(scorer, given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RoutedTeachers, "score", of_a_batch)
            patch.setattr(Scorer, "run", recorded)
            both = run(models, folder / "both", teachers(models, math="math", code="math"),
                       *how, *keys)  # fmt: skip
        done[signal] = alone, both, computed
        return done[signal]

    return get


@pytest.mark.parametrize("signal", and_slow(["hidden"], ["sampled"]))
def test_two_names_of_one_teacher_teach_as_it_does_alone(two_names, signal):
    (alone, wanted), (both, found), _ = two_names(signal)
    np.testing.assert_allclose(totals(both), totals(alone), rtol=2e-4)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)
    row = both.metrics[1]
    tokens = [row[f"distill/{name}/tokens"] for name in ("math", "code")]
    assert sum(tokens) == pytest.approx(row["actor/tokens"]) and min(tokens) > 0
    if signal == "hidden":
        each = [row[f"distill/{name}/divergence"] for name in ("math", "code")]
        mean = np.average(each, weights=tokens)
        assert mean == pytest.approx(row["distill/divergence"], rel=1e-5)


@pytest.mark.parametrize("signal", and_slow(["hidden"], ["sampled"]))
def test_padding_is_that_of_all_that_the_teachers_compute(two_names, signal):
    """Each its own rows, or all, in each of two parts."""
    _, (both, _), computed = two_names(signal)
    for version, row in enumerate(both.metrics[1:]):
        real, places = np.sum(computed[version], 0)
        assert len(computed[version]) > 3
        assert row["teacher/padding"] == pytest.approx(1 - real / places)


OWN = """
from jaxrl.algorithms.methods import METHODS, Method, gkd_loss
from jaxrl.losses.algorithm_table import AlgorithmSpec
from jaxrl.sharding.reshard import join_parts
from jaxrl.types import TrainBatch


def prepare(config):
    return lambda rollout, scores: (
        TrainBatch(rollout.sequences, join_parts(scores["teacher"])), {}
    )


method = Method(
    METHODS["teacher"].samples_policy,
    METHODS["teacher"].completions,
    lambda config: ("teacher",),
    prepare,
    gkd_loss,
)
own = AlgorithmSpec("teacher", method=method)
"""


@pytest.fixture(scope="module")
def apart(models, tmp_path_factory):
    """A run whose teachers have a device of their own, by how it chooses a row's teacher."""
    done = {}

    def get(*how):
        if how not in done:
            keys = [teachers(models, math="math", code="code"), *how, APART]
            done[how] = run(models, tmp_path_factory.mktemp("apart"), *keys)
        return done[how]

    return get


@pytest.mark.slow
def test_an_algorithm_of_one_s_own_learns_from_several_teachers(models, tmp_path, apart):
    """Its `prepare` knows nothing of them, as that of the built-in one. In the default suite one's
    own algorithm has one teacher."""
    (tmp_path / "own.py").write_text(OWN)
    keys = [teachers(models, math="math", code="code"), "data.teacher_key=kind", "steps=1", APART]
    built_in, _ = apart("data.teacher_key=kind")
    own, _ = run(models, tmp_path / "own", *keys, f"algorithm={tmp_path}/own.py:own")
    named = {name for name in built_in.metrics[1] if name.startswith("distill/")}
    assert {"distill/math/tokens", "distill/code/divergence"} <= named
    for name in named:
        assert own.metrics[1][name] == built_in.metrics[1][name], name


@pytest.mark.parametrize(
    ("how", "devices"),
    and_slow(
        [],
        [
            *((["data.teacher_key=kind"], devices) for devices in (1, 2)),
            (["distill.signal=topk", "distill.top_k=8"], 2),
        ],
    ),
)
def test_offloading_and_sharing_devices_change_nothing(models, tmp_path, apart, how, devices):
    """The teachers take turns on the devices, with vocabularies and widths of their own. In the
    default suite so do those of the next test, and served ones."""
    keys = [teachers(models, math="math", code="code"), *how]
    plain, wanted = apart(*how)
    turns = [f"mesh=actor+rollout+teacher={devices}"]
    turns += ["offload.frozen=true", "offload.params=true"]
    together, found = run(models, tmp_path / "together", *keys, *turns)
    np.testing.assert_allclose(totals(together), totals(plain), rtol=2e-4)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=5e-5, err_msg=name)


def test_where_they_are_offloaded_one_at_a_time_is_loaded(models, monkeypatch):
    """The earlier one's weights have left the devices when the next one's are read."""
    keys = [f"student.model={models['student']}", f"data.train={models['rows']}", "data.eval=null"]
    keys += [teachers(models, math="math", code="code"), "data.teacher_key=kind"]
    keys += ["teacher.model=null", "offload.frozen=true", "teacher.dtype=float32"]
    job = make_job(Config.load("builtin:quickstart", keys))
    mesh, load, loaded, gone = make_mesh(1, 1, 1), ModelSource.load, [], []

    def recorded(source, *how):
        gone.append(all(array.is_deleted() for array in loaded))
        params = load(source, *how)
        loaded.extend(jax.tree.leaves(params))
        return params

    monkeypatch.setattr(ModelSource, "load", recorded)
    role = make_teacher(job.for_workers({}, Path()), {"teacher": mesh})
    assert gone == [True, True] and len(loaded) > 2 and not loaded[-1].is_deleted()
    prompts = job.train.batch(0)[:2]
    ends = [[Completion((1, 2), np.zeros(2), np.zeros(2), "stop")] for _ in prompts]
    limits = {"pad_id": 0, "max_prompt_tokens": 24, "max_new_tokens": 8}
    assert role.score(make_rollout(prompts, ends, policy_version=0, **limits)).hidden.any()


def test_each_prompt_is_sampled_by_its_own_teacher(models, tmp_path):
    """For seq_kd and for the teachers' own accuracy, which two names of one model do not change."""
    keys = ["distill.seq_kd=true", "distill.on_policy_fraction=0", "eval.teacher=true"]
    keys += ["distill.jsd_beta=1", "teacher.num_microbatches=2"]  # programs of the first runs here
    keys += ["eval.prompts=6", "eval.samples=2", "eval.temperature=1"]
    held = [f"data.eval={models['rows']}", "data.verifier=exact"]
    alone, wanted = run(models, tmp_path / "alone", f"teacher.model={models['math']}", *keys, *held)
    same = [teachers(models, math="math", code="math"), "data.teacher_key=kind"]
    both, found = run(models, tmp_path / "both", *same, *keys, *held)
    assert both.metrics[0]["teacher/accuracy"] == alone.metrics[0]["teacher/accuracy"]
    np.testing.assert_allclose(totals(both), totals(alone), rtol=2e-4)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)


def test_what_does_not_fit_is_refused_before_anything_is_loaded(models, tmp_path):
    def refused(*overrides):
        keys = [f"student.model={models['student']}", f"data.train={models['rows']}"]
        both = teachers(models, math="math", code="code")
        with pytest.raises(UserError) as error:
            make_job(
                Config.load("builtin:quickstart", [*keys, "teacher.model=null", both, *overrides])
            )
        return str(error.value)

    only = teachers(models, math="math", chat="code")
    assert "rows.jsonl:2 has 'code' there" in refused("data.teacher_key=kind", only)
    assert "no such field" in refused("data.teacher_key=domain")
    assert "are two ways" in refused("teacher.model=builtin:teacher")
    assert "cannot be sampled" in refused("distill.seq_kd=true", "distill.on_policy_fraction=0")
    assert "choose" not in refused("data.teacher_key=kind", "teachers.math.weight=2")
    assert "set teachers" in refused(
        "teachers={}", "teacher.model=builtin:teacher", "data.teacher_key=kind"
    )
    called = teachers(models, teacher="math", code="code")  # a name like any other
    long = ["teacher.prompt={prompt}", "teacher.max_prompt_tokens=99999"]
    assert "; teachers.teacher.model has " in refused(called, *long)
    other = save_model(tmp_path / "other", 32, 1, 3, eos=7)
    assert refused(f"teachers={json.dumps({'math': models['math'], 'code': other})}").startswith(
        "teachers.code: "
    )
    rows = tmp_path / "weights.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1", "kind": {"math": -1}}\n')
    text = refused(f"data.train={rows}", "data.teacher_key=kind", "distill.mixture=arithmetic")
    assert "{'math': -1}" in text and "at least 0" in text


def test_the_accuracy_of_what_samples_no_such_completions_is_not_measured(models, tmp_path):
    """Of a mixture, and of a teacher beside episodes: it is asked for, of rows that have answers,
    and a note says why there is none; nor of rows without a teacher."""
    keys = [f"student.model={models['student']}", f"data.train={models['rows']}"]
    keys += [f"data.eval={models['rows']}", "data.verifier=exact", "eval.teacher=true"]
    keys += ["teacher.model=null", "distill.signal=sampled", "distill.jsd_beta=1"]

    def job(**named):
        both = [teachers(models, **named)]
        return make_job(Config.load("builtin:quickstart", [*keys, *both, "max_prompt_tokens=24"]))

    mixed = job(math="math", code="code")
    assert not mixed.evaluates_teacher and not mixed.teacher_samples
    assert any("arithmetic mixture only scores" in note for note in mixed.notes)
    keys.append("data.teacher_key=kind")
    assert (routed := job(math="math", code="code")).evaluates_teacher and routed.teacher_samples
    assert not any("only scores" in note for note in routed.notes)
    (tmp_path / "none.jsonl").write_text('{"prompt": "1 + 1", "answer": "2", "kind": "art"}\n')
    keys.append(f"data.eval={tmp_path / 'none.jsonl'}")
    without = job(math="math", code="code")
    assert not without.evaluates_teacher
    keys[-1] = f"data.eval={models['rows']}"
    keys.append("environment.name=calculator")
    plays = job(math="math", code="code")
    assert not plays.evaluates_teacher and not plays.teacher_samples
    assert any("plays no episodes: its own accuracy is not" in note for note in plays.notes)
    for one in (mixed, routed, without, plays):
        assert generates(one.config, "teacher") == one.teacher_samples, "as planned"
