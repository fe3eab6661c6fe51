"""Keys that do not go together: each message names keys with their values, and what it says to set
makes it go away.
"""

import re
from datetime import date
from pathlib import Path

import pytest

from jaxrl.config.schema import Config
from jaxrl.config.section import Section, value_and_default
from jaxrl.errors import UserError

SERVED = ["teacher.model=null", "teacher.address=h:1"]
SEVERAL = ["teacher.model=null", "teachers={'qwen2.5': {model: A}, b: {model: B}}"]
OWN = ["teacher.tokenizer=own"]
GSPO = ["algorithm=gspo", "teacher.model=null", "group_size=2", "reward.functions=[math]"]
BROKEN = [
    ["teacher.ca_file=x.pem"],
    ["teacher.model=null", "teacher.ca_file=x", "teachers={'qwen2.5': {address: 'http://h:1'}}"],
    ["algorithm=sft"],
    [*GSPO, "teacher.model=A"],
    [*GSPO, "teachers={a.b: A}"],
    ["sampling.temperature=0", "group_size=2"],
    ["teacher.model=policy", "student.lora.rank=4", "student.base_dtype=int8"],
    ["teacher.model=policy", "teacher.ema=0.5", "student.lora.rank=4"],
    ["environment.name=guess_number", "environment.turn_tokens=999", "distill.seq_kd=true"],
    ["algorithm=sft", "teacher.model=null", "reward.functions=[math]", "distill_weight=1"],
    ["rollout.cache_tokens=1"],
    ["rollout.merge=true"],
    ["profile.steps=5:9", "steps=6"],
    ["actor.minibatches=9", "batch_size=4"],
    ["policy.kl_coef=0.5"],
    ["policy.clip_low=0.1", "policy.entropy_coef=0.5", "policy.dynamic_sampling=refill"],
    ["policy.correction=icepop", "schedule=one_step_off", "reward.truncated=mask"],
    ["algorithm=sft", "teacher.model=null", "policy.dynamic_sampling=drop", "policy_weight=0"],
    ["algorithm=sft", "teacher.model=null", "distill.entropy_aware=true", "data.teacher_key=k"],
    [*GSPO, "policy_weight=0"],
    [*GSPO, "distill.entropy_aware=true"],
    ["environment.name=guess_number", "environment.credit=turn"],
    ["optimizer.name=adafactor", "optimizer.b1=0.5", "optimizer.b2=0.5", "optimizer.eps=1"],
    ["optimizer.name=sgd", "optimizer.weight_decay=1", "optimizer.b2=0.5", "optimizer.eps=1"],
    ["optimizer.name=lion", "optimizer.eps=1"],
    ["teacher.model=null"],
    ["algorithm=gspo", "teacher.model=null", "distill_weight=1"],
    [*GSPO, "distill_weight=1", "policy.opd_coef=1"],
    ["teacher.cache=x"],
    ["teacher.cache=x", "teacher.prompt='{prompt}\n\n\n\n\n'"],
    ["teacher.model=null", "teacher.cache=x", "distill.on_policy_fraction=0.5"],
    ["teacher.address=h:1"],
    [*SERVED, "teacher.prompt='{prompt}'"],
    [*SERVED, "teacher.api_model=m"],
    ["teacher.api=openai", "teacher.api_model=jaxrl"],
    ["teachers={a: A}"],
    [*SEVERAL, "teacher.cache=x"],
    [*SEVERAL, "distill.seq_kd=true", "distill.on_policy_fraction=0.5"],
    ["teacher.model=null", "teachers={'qwen2.5': {model: A, weight: 2}}", "data.teacher_key=k"],
    ["teacher.model=null", "teachers={'qwen2.5': {model: policy}, b: {model: B}}"],
    ["teacher.model=null", "teachers={a: {model: A}, b: {address: 'h:1'}}"],
    ["data.teacher_key=k", "distill.mixture=arithmetic"],
    ["distill.signal=sampled", "distill.jsd_beta=1", "sampling.top_k=5"],
    [*OWN, "data.completion_turns=all", "environment.name=guess_number"],
    [*OWN, "distill.signal=student_topk", "distill.lean=true", "sampling.top_p=0.5"],
    [*OWN, "distill.entropy_aware=true"],
    [*OWN, "teacher.model=policy"],
    ["teacher.ema=0.5"],
    ["teacher.max_prompt_tokens=9", "teacher.max_new_tokens=9"],
    [*GSPO, "policy.dynamic_sampling=refill", "schedule=one_step_off"],
    [*GSPO, "reward.functions=[]"],
    [*GSPO, "group_size=1"],
    [*GSPO, "sampling.top_k=5"],
    [*GSPO, "policy.advantages=similarity"],
    [*GSPO, "policy.reward_combination=normalize_then_sum", "environment.credit=turn"],
    [*GSPO, "reward.overlong_buffer=999"],
    [*GSPO, "distill.on_policy_fraction=0.5"],
    [*GSPO, "policy.bypass=true", "policy.correction=tis_token"],
    ["student.lora.alpha=3", "student.base_dtype=nf4"],
    ["eval.samples=2", "eval.temperature=0"],
    ["eval.temperature=0", "eval.top_p=0.5"],
    ["environment.arguments={n: 1}"],
    ["data.weights=[1, 2]"],
    [
        "distill.entropy_aware=true",
        "distill.entropy_top_k=9",
        "distill.signal=topk",
        "distill.top_k=4",
    ],
    ["distill.signal=sampled", "distill.jsd_beta=0.5"],
]
MESSAGE = re.compile(r"(?:([\w.-]+): )?(.+?): (.+): set (.+)")
GIVEN = re.compile(r"[\w.-]+=\S")
SETTING = re.compile(r"(?<![\w.=])([\w.]+=[^\s,)]+)")
NAME = re.compile(r"([\w.-]+)=")
WITHOUT_VALUE = re.compile(r"\w+\.\w+(?![\w.]*=)")


def broken(overrides: list[str]) -> list[str]:
    try:
        Config.load("builtin:quickstart", overrides)
    except UserError as error:
        lines = str(error).splitlines()
        return [line for line in lines if not line.startswith("from the built-in")]
    return []


@pytest.mark.parametrize("overrides", BROKEN, ids=" ".join)
def test_what_a_message_says_to_set_makes_it_go_away(overrides: list[str]) -> None:
    messages = broken(overrides)
    assert messages
    for message in messages:
        match = MESSAGE.fullmatch(message)
        assert match is not None and GIVEN.match(match[2]), message
        section = f"{match[1]}." if match[1] else ""
        names = NAME.findall(match[2])
        for way in re.split(r",? or ", match[4]):
            settings = [section + word for word in SETTING.findall(way)]
            if settings and not WITHOUT_VALUE.search(SETTING.sub("", way)):
                left = broken([*overrides, *settings])
                same = [x for x in left if NAME.findall(x)[: len(names)] == names]
                assert not any(match[3] in line for line in same), settings


@pytest.mark.parametrize("overrides", [["policy.kl_coef=0.5", "policy_weight=0"]])
def test_a_method_of_one_s_own_may_read_any_key(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "own.py").write_text(
        "from jaxrl.losses.algorithm_table import AlgorithmSpec\n"
        "own = AlgorithmSpec('teacher', method=object())\n"
    )
    assert len(broken(overrides)) == len(overrides)
    assert not broken([*overrides, f"algorithm={tmp_path / 'own.py'}:own"])


def test_values_that_no_file_could_hold_are_shown_too() -> None:
    """A Python program may give what is no JSON."""
    given = {"environment": {"arguments": {"since": date(2026, 1, 2)}}}
    with pytest.raises(UserError, match="no environment: set arguments={}, or environment.name"):
        Config.parse({"student": {"model": "a"}, "data": {"train": ["b"]}, **given})


@pytest.mark.parametrize("name", ["math-500", "gpt.4", "is-new", "constrained-decoding", "a_b"])
def test_names_of_the_user_s_are_in_the_path(name: str) -> None:
    assert broken([f"data.eval={{{name}: [], x: y}}"])[0].startswith(f"data.eval.{name}: ")
    assert broken([f"teachers={{{name}: {{weight: x}}}}"])[0].startswith(f"teachers.{name}.weight")


@pytest.mark.parametrize("name", ["a.", ".a", "a..b", "a/b", ""])
def test_names_that_make_no_key_are_refused(name: str) -> None:
    assert "may have letters" in broken([f"data.eval={{'{name}': x}}"])[0]


def test_every_rule_names_keys_that_there_are() -> None:
    """Those that hold too: a rule about a key that was renamed would raise once it is broken."""
    named = set()
    for overrides in ([], GSPO, SERVED, SEVERAL, OWN):
        config = Config.load(None, overrides)
        for section in (config, *(part for _, part in config if isinstance(part, Section))):
            for rule in section._rules():
                for path in rule[1].split() if len(rule) > 2 else ():
                    value_and_default(section, path)
                    named.add(path)
    assert {"teachers.qwen2.5.weight", "teacher.ca_file", "reward.overlong_buffer"} <= named
    assert len(named) > 60
