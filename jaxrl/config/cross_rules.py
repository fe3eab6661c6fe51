"""Conditions on keys of several sections; those on the keys of one are in its class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

from jaxrl.config.run_config import RunConfig
from jaxrl.config.section import POLICY, conflict

UNTRUNCATED = "sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"


def rules(c: RunConfig) -> Iterator[str]:
    """Yields an error message for each condition that the config breaks."""
    bad = partial(conflict, c)
    if c.teacher.ca_file is not None and not c.served:
        yield bad(
            "teacher.ca_file", "no teacher is served", "teacher.address, or teacher.ca_file=null"
        )
    for name, one in c.served.items():
        if c.teacher.ca_file and urlsplit(str(one.address)).scheme != "https":
            yield bad(
                f"teacher.ca_file {c.teacher_key(name, 'address')}",
                "the address has no TLS, so that all can read the token",
                "an address that begins with https://, or teacher.ca_file=null",
            )
    if c.learns_from_teacher:
        yield from _with_teacher(c)
    else:
        more = ", or distill_weight above 0" if c.learns_from_rewards else ""
        for key in ("teacher.model", "teacher.address", "teacher.cache", "teacher.prompt"):
            if getattr(c.teacher, key.removeprefix("teacher.")) is not None:
                yield bad(f"algorithm {key}", "it has no teacher", f"{key}=null{more}")
        if c.teachers:
            yield bad("algorithm teachers", "it has no teacher", f"teachers={{}}{more}")
    if c.spec.learns_from == "teacher" and c.sampling.temperature == 0 and c.group_size > 1:
        yield bad(
            "group_size sampling.temperature",
            "greedy completions of a prompt are all the same",
            "sampling.temperature above 0, or group_size=1",
        )
    if c.teacher.model == POLICY and c.student.base_dtype in ("int8", "nf4"):
        yield bad(
            "teacher.model student.base_dtype",
            "the teacher would hold floats, and not begin as the policy does",
            "student.base_dtype=bfloat16",
        )
    if c.environment.name is not None:
        yield from _with_environment(c)
    if c.learns_from_rewards:
        yield from _with_rewards(c)
    else:
        for key, given in (
            ("reward.functions", c.reward.functions),
            ("reward.model", c.reward.model),
            ("distill_weight", c.distill_weight),
        ):
            if given:
                way = f"{key} to its default, or an algorithm that does, such as gspo"
                yield bad(f"algorithm {key}", "it learns from no reward", way)
    longest = max(c.max_new_tokens, c.eval.max_new_tokens or 0)
    if (c.rollout.cache_tokens or longest) < longest:
        yield bad(
            "rollout.cache_tokens",
            "it does not hold the longest completion (max_new_tokens, eval.max_new_tokens)",
            f"it to {longest} at least, or to null",
        )
    if c.rollout.merge and not c.trains_adapters:
        yield bad("rollout.merge student.lora.rank", "there are no adapters to be added")
    if c.profile.range.stop > c.steps + 1:
        why, way = "it reaches beyond the last step", f"a stop of at most {c.steps + 1}"
        yield bad("profile.steps steps", why, way)
    sequences = c.batch_size * c.group_size
    if c.minibatches > sequences:
        yield bad(
            "actor.minibatches batch_size group_size",
            f"a batch has {sequences} sequences",
            f"actor.minibatches to {sequences} at most",
        )


def _with_teacher(c: RunConfig) -> Iterator[str]:
    bad, d = partial(conflict, c), c.distill
    model, cache = c.teacher.model, c.teacher.cache
    alone = "teacher.model" if model else "teacher.address" if c.teacher.address else None
    if (alone or cache) is None and not c.teachers:
        also = " distill_weight policy.opd_coef" if c.learns_from_rewards else ""
        yield bad(
            f"algorithm{also}",
            "it needs a teacher",
            "teacher.model (or teacher.address, teacher.cache, or teachers), or algorithm=sft to"
            " train without one",
        )
    share = 1.0 if c.learns_from_rewards else d.on_policy_fraction
    none = "the cache has no scores of the student's samples"
    if cache is not None and share == 1:
        yield bad(
            "teacher.cache distill.on_policy_fraction",
            f"{none}, and there are no other batches",
            "teacher.cache=null, or, with algorithm=gkd, distill.on_policy_fraction below 1",
        )
    if cache is not None and model is None and share > 0 and not c.teachers:
        yield bad(
            "teacher.cache teacher.model distill.on_policy_fraction",
            none,
            "distill.on_policy_fraction=0, or teacher.model to the one whose scores the cache has",
        )
    if c.teacher_follows and c.trains_adapters:
        yield bad(
            "teacher.model teacher.ema student.lora.rank",
            "the teacher follows all weights of the policy, and adapters are trained",
            "teacher.ema=1 (the policy before training), or student.lora.rank=null",
        )
    if c.teacher.cache is not None and c.teachers:
        yield bad("teacher.cache teachers", "a cache has the scores of one teacher")
    if alone is not None and c.teachers:
        yield bad(f"{alone} teachers", "these are two ways to name teachers")
    if 0 < len(c.served) < len(c.teachers):
        yield bad(
            "teachers",
            f"they are partly served ({', '.join(c.served)})",
            "a model for all of them, or for all of them an address (serve_teacher serves several)",
        )
    if c.served and c.teacher.prompt is not None and c.teachers:
        yield bad("teacher.prompt teachers", "served teachers read the student's prompts")
    by_logprobs = c.mixture == "arithmetic" and d.signal in ("student_topk", "sampled")
    combines = d.signal == "hidden" or (by_logprobs and not d.entropy_aware)
    if c.served and c.mixture is not None and not combines:
        yield bad(
            "distill.signal distill.entropy_aware",
            f"the {c.mixture} mixture of served teachers cannot be made of what each of them sends",
            "distill.signal=hidden, or data.teacher_key for a teacher a row",
        )
    if any(one.model == POLICY for one in c.teachers.values()):
        yield bad("teachers", "the policy is not one of several teachers", "teacher.model=policy")
    for key, given in (
        ("data.teacher_key", c.data.teacher_key),
        ("distill.mixture", d.mixture),
    ):
        if given is not None and not c.teachers:
            way = f"teachers, or {key}=null"
            yield bad(key, "it chooses among several teachers", way)
    weighted = [name for name, one in c.teachers.items() if one.weight is not None]
    if c.data.teacher_key is not None and weighted:
        yield bad(
            f"teachers.{weighted[0]}.weight data.teacher_key",
            "the weight applies to the mixture of all rows, and each row has one teacher",
        )
    if d.seq_kd and c.mixture is not None:
        yield bad(
            "distill.seq_kd distill.mixture teachers",
            "a mixture cannot be sampled from",
            "data.teacher_key and distill.mixture=null, or distill.seq_kd=false",
        )
    if d.seq_kd and c.teacher_follows:
        why = "it samples from a teacher that stays the same"
        yield bad("distill.seq_kd teacher.ema", why, "teacher.ema=1, or distill.seq_kd=false")
    if d.signal == "sampled" and (c.sampling.truncated or c.sampling.temperature != 1):
        why = "it is unbiased only for untruncated samples at temperature 1"
        yield bad("distill.signal", why, UNTRUNCATED)
    if c.teacher.tokenizer == "own":
        yield from _with_own_tokenizer(c)


def _with_own_tokenizer(c: RunConfig) -> Iterator[str]:
    bad, d, s = partial(conflict, c), c.distill, c.sampling
    aligns = "the text of completions is aligned, and {} is not one text"
    if c.data.completion_turns == "all":
        why = aligns.format("a completion of several turns")
        yield bad("teacher.tokenizer data.completion_turns", why)
    if c.environment.name is not None:
        yield bad("teacher.tokenizer environment.name", aligns.format("an episode"))
    if d.signal == "student_topk" or d.entropy_aware:
        why = "it needs the teacher's probabilities of the student's tokens"
        key = "distill.signal" if d.signal == "student_topk" else "distill.entropy_aware"
        yield bad(f"teacher.tokenizer {key}", why)
    if d.lean:
        why = "the loss needs all of the vocabulary at once"
        yield bad("teacher.tokenizer distill.lean", why)
    sampled = c.learns_from_rewards or d.on_policy_fraction > 0
    if sampled and (s.truncated or s.temperature != 1 or d.distill_temperature != 1):
        yield bad(
            "teacher.tokenizer",
            "a part of the divergence is estimated from the student's samples, which must be"
            " untruncated and at temperature 1",
            f"{UNTRUNCATED} distill.distill_temperature=1",
        )
    if d.signal == "sampled" and d.on_policy_fraction < 1 and not c.learns_from_rewards:
        yield bad(
            "teacher.tokenizer distill.signal distill.on_policy_fraction",
            "they learn from the student's samples alone",
        )
    if c.learns_from_rewards and c.policy.opd_coef > 0:
        yield bad(
            "teacher.tokenizer policy.opd_coef",
            "it reads the teacher's log-prob of each token of the student",
            "policy.opd_coef=0 (and distill_weight above 0), or teacher.tokenizer=student",
        )
    if c.teacher_gets_feedback:
        yield bad(
            "teacher.tokenizer teacher.prompt",
            "feedback and attempt are for a teacher with the student's tokenizer",
        )


def _with_environment(c: RunConfig) -> Iterator[str]:
    bad = partial(conflict, c)
    if (c.environment.turn_tokens or 0) > c.max_new_tokens:
        why = "a turn may be longer than the whole episode"
        yield bad("environment.turn_tokens max_new_tokens", why, "a lower turn_tokens")
    if c.distill.seq_kd:
        yield bad("distill.seq_kd environment.name", "the teacher's samples have no environment")


def _with_rewards(c: RunConfig) -> Iterator[str]:
    bad, p, d = partial(conflict, c), c.policy, c.distill
    if c.dynamic_sampling == "refill" and c.schedule != "serial":
        yield bad(
            "policy.dynamic_sampling schedule",
            "a batch is only complete once its rewards are known",
            "schedule=serial, or policy.dynamic_sampling=drop",
        )
    judged = c.reward.functions or c.reward.model
    if not judged and not (c.environment.name and c.environment.weight):
        yield bad(
            "algorithm",
            "it learns from rewards",
            "reward.functions, as in reward.functions=[math], or reward.model, or environment.name",
        )
    if c.environment.credit == "turn" and p.advantages == "similarity":
        why = "one compares turns, the other whole completions"
        yield bad("environment.credit policy.advantages", why)
    if p.reward_combination == "normalize_then_sum":
        for key, given in (
            ("policy.advantages", p.advantages == "similarity"),
            ("environment.credit", c.environment.credit == "turn"),
        ):
            if given:
                why = "both decide what a reward is compared with"
                yield bad(f"policy.reward_combination {key}", why)
    if c.group_size < 2:
        why = "it compares the completions of a prompt"
        yield bad("algorithm group_size", why, "group_size to at least 2")
    if c.sampling.truncated:
        yield bad(
            "algorithm",
            "it needs every token's probability under the policy that sampled",
            "sampling.temperature above 0, top_k=0, top_p=1 and min_p=0",
        )
    if (c.reward.overlong_buffer or 0) > c.max_new_tokens:
        why = "the penalty zone exceeds the longest completion"
        yield bad("reward.overlong_buffer max_new_tokens", why, "a smaller overlong_buffer")
    if p.advantages == "similarity" and c.grouper.model is None:
        yield bad(
            "policy.advantages grouper.model",
            "it needs an encoder",
            "grouper.model, as in grouper.model=sentence-transformers/all-MiniLM-L6-v2",
        )
    if d.on_policy_fraction < 1 or d.seq_kd:
        yield bad(
            "algorithm distill.on_policy_fraction distill.seq_kd",
            "it learns from its own samples",
            "distill.on_policy_fraction=1 and distill.seq_kd=false",
        )
    if p.opd_coef > 0 and d.signal != "sampled":
        why = "it reads the teacher's log-prob of the sampled token"
        yield bad("policy.opd_coef distill.signal", why, "distill.signal=sampled")
