"""Conditions on keys of several sections; those on the keys of one are in its class."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from jaxrl.config.run_config import RunConfig
from jaxrl.config.section import POLICY


def rules(c: RunConfig) -> Iterator[str]:
    """Yields an error message for each condition that the config breaks."""
    yield from _with_ca_file(c)
    if c.learns_from_teacher:
        yield from _with_teacher(c)
    else:
        more = ", or distill_weight above 0" if c.learns_from_rewards else ""
        for key in ("model", "address", "cache", "prompt"):
            given = getattr(c.teacher, key)
            if given is not None:
                yield (
                    f"algorithm={c.algorithm} has no teacher: set teacher.{key}=null{more} (got"
                    f" {given})"
                )
        if c.teachers:
            names = ", ".join(c.teachers)
            yield f"algorithm={c.algorithm} has no teacher: leave teachers out{more} (got {names})"
    if c.spec.learns_from == "teacher" and c.sampling.temperature == 0 and c.group_size > 1:
        yield (
            f"group_size={c.group_size} greedy completions of a prompt are all the same: set"
            " sampling.temperature above 0, or group_size=1"
        )
    if c.teacher.model == POLICY and c.student.base_dtype in ("int8", "nf4"):
        yield (
            f"teacher.model={POLICY} with student.base_dtype={c.student.base_dtype}: the teacher"
            " would hold floats, and not begin as the policy does: set base_dtype=bfloat16"
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
                yield (
                    f"algorithm={c.algorithm} learns from no reward: leave {key} out, or choose an"
                    " algorithm that does, such as gspo"
                )
    longest = max(c.max_new_tokens, c.eval.max_new_tokens or 0)
    if (c.rollout.cache_tokens or longest) < longest:
        yield (
            f"rollout.cache_tokens={c.rollout.cache_tokens} does not hold the longest completion,"
            f" of {longest} tokens (max_new_tokens, eval.max_new_tokens): raise it to {longest} at"
            " least, or set it to null"
        )
    if c.rollout.merge and not c.trains_adapters:
        yield (
            "rollout.merge=true adds adapters to the weights, and student.lora.rank=null has none:"
            " set rollout.merge=false"
        )
    if c.profile.range.stop > c.steps + 1:
        yield (
            f"profile.steps={c.profile.steps} reaches beyond steps={c.steps}: stop is at most"
            f" {c.steps + 1}"
        )
    sequences = c.batch_size * c.group_size
    if c.minibatches > sequences:
        yield (
            f"actor.minibatches={c.minibatches} exceeds the {sequences} sequences of a batch"
            f" (batch_size={c.batch_size} x group_size={c.group_size})"
        )


def _with_ca_file(c: RunConfig) -> Iterator[str]:
    ca_file = c.teacher.ca_file
    if ca_file is not None and not c.served:
        yield (
            f"teacher.ca_file={ca_file} is for the certificate of a served teacher: set"
            " teacher.address, or teacher.ca_file=null"
        )
    for name, one in c.served.items():
        if ca_file and urlsplit(str(one.address)).scheme != "https":
            yield (
                f"teacher.ca_file={ca_file} is for https, and"
                f" {c.teacher_key(name, 'address')}={one.address} has no TLS, so that all can read"
                " the token: begin the address with https://, or set teacher.ca_file=null"
            )


def _with_teacher(c: RunConfig) -> Iterator[str]:
    why = " with distill_weight or policy.opd_coef" if c.learns_from_rewards else ""
    model, cache = c.teacher.model, c.teacher.cache
    alone = model or c.teacher.address
    if (alone or cache) is None and not c.teachers:
        yield (
            f"algorithm={c.algorithm}{why} needs a teacher: set teacher.model (or teacher.address,"
            " teacher.cache, or teachers), or algorithm=sft to train without one"
        )
    share = 1.0 if c.learns_from_rewards else c.distill.on_policy_fraction
    none = f"teacher.cache={cache} has no scores of the student's samples"
    if cache is not None and share == 1:
        yield (
            f"{none}, and there are no other batches: set teacher.cache=null, or, with"
            " algorithm=gkd, distill.on_policy_fraction below 1"
        )
    if cache is not None and model is None and share > 0 and not c.teachers:
        yield (
            f"{none}, which distill.on_policy_fraction={share:g} of the batches hold: set it to 0,"
            " or teacher.model to the model whose scores the cache has"
        )
    if c.teacher_follows and c.trains_adapters:
        yield (
            "teacher.model=policy with teacher.ema below 1 follows all weights of the policy, and"
            " student.lora trains adapters: set teacher.ema=1 (the policy before training), or"
            " student.lora.rank=null"
        )
    yield from _with_teachers(c, alone)
    if c.teacher.tokenizer == "own":
        yield from _with_own_tokenizer(c)
    if c.teacher_follows and c.distill.seq_kd:
        yield (
            "distill.seq_kd samples from a teacher that stays the same: set teacher.ema=1, or"
            " distill.seq_kd=false"
        )
    plain = not c.sampling.truncated and c.sampling.temperature == 1
    if c.distill.signal == "sampled" and not plain:
        yield (
            "distill.signal=sampled is unbiased only for untruncated samples at temperature 1: set"
            " sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"
        )


def _with_own_tokenizer(c: RunConfig) -> Iterator[str]:
    d, s = c.distill, c.sampling
    if c.data.completion_turns == "all":
        yield (
            "teacher.tokenizer=own aligns the text of completions, and a completion of several"
            " turns is not one text: set data.completion_turns=last, or teacher.tokenizer=student"
        )
    if d.signal == "student_topk":
        yield (
            "distill.signal=student_topk needs the probabilities of the student's tokens, and a"
            " teacher with teacher.tokenizer=own has others: set hidden, topk or sampled"
        )
    if d.entropy_aware:
        yield (
            "distill.entropy_aware=true reads the teacher's probabilities of the student's tokens:"
            " set it to false, or teacher.tokenizer=student"
        )
    if d.lean:
        yield (
            "distill.lean=true computes the loss in parts of the vocabulary, and a teacher with"
            " teacher.tokenizer=own needs all of it at once: set it to false"
        )
    sampled = c.learns_from_rewards or d.on_policy_fraction > 0
    if sampled and (s.truncated or s.temperature != 1 or d.distill_temperature != 1):
        yield (
            "teacher.tokenizer=own estimates a part of the divergence from the student's samples,"
            " which must be untruncated and at temperature 1: set sampling.temperature=1"
            " sampling.top_k=0 sampling.top_p=1 sampling.min_p=0 distill.distill_temperature=1"
        )
    if d.signal == "sampled" and d.on_policy_fraction < 1 and not c.learns_from_rewards:
        yield (
            "distill.signal=sampled with teacher.tokenizer=own learns from the student's samples"
            f" alone: set distill.on_policy_fraction=1 (got {d.on_policy_fraction:g})"
        )
    if c.learns_from_rewards and c.policy.opd_coef > 0:
        yield (
            f"policy.opd_coef={c.policy.opd_coef:g} reads the teacher's log-prob of each token: set"
            " it to 0 (and distill_weight above 0), or teacher.tokenizer=student"
        )
    if c.teacher_gets_feedback:
        yield (
            "teacher.prompt names feedback or attempt, which are for a teacher with the student's"
            " tokenizer: leave them out, or set teacher.tokenizer=student"
        )


def _with_teachers(c: RunConfig, alone: str | None) -> Iterator[str]:
    key, mixture, names = c.data.teacher_key, c.distill.mixture, ", ".join(c.teachers)
    if c.teacher.cache is not None and c.teachers:
        yield (
            f"teacher.cache={c.teacher.cache} has the scores of one teacher, and teachers={names}"
            " are several: set teacher.cache to null, or leave teachers out"
        )
    if alone is not None and c.teachers:
        yield (
            f"teacher={alone} and teachers={names} are two ways to name teachers: set teacher.model"
            " and teacher.address to null, or leave teachers out"
        )
    if 0 < len(c.served) < len(c.teachers):
        yield (
            f"teachers={names} are partly served ({', '.join(c.served)}): give all of them a model,"
            " or all of them an address (jaxrl.serve_teacher serves several)"
        )
    if c.served and c.teacher.prompt is not None:
        yield (
            f"teacher.prompt needs teachers of the run, and {', '.join(c.served)} read the"
            " student's prompts: set teacher.prompt to null"
        )
    d = c.distill
    by_logprobs = c.mixture == "arithmetic" and d.signal in ("student_topk", "sampled")
    combines = d.signal == "hidden" or (by_logprobs and not d.entropy_aware)
    if c.served and c.mixture is not None and not combines:
        more = " with entropy_aware" * d.entropy_aware
        yield (
            f"distill.signal={d.signal}{more}: the {c.mixture} mixture of served teachers cannot be"
            " made of what each of them sends: set distill.signal=hidden, or data.teacher_key for a"
            " teacher a row"
        )
    own = [name for name, one in c.teachers.items() if one.model == POLICY]
    if own:
        yield (
            f"teachers.{own[0]}.model={POLICY}: the policy is no one of several teachers: set"
            " teacher.model=policy and leave teachers out"
        )
    for name, given in (("data.teacher_key", key), ("distill.mixture", mixture)):
        if given is not None and not c.teachers:
            yield f"{name}={given} chooses among several teachers: set teachers, or {name}=null"
    weighted = [name for name, one in c.teachers.items() if one.weight is not None]
    if key is not None and weighted:
        yield (
            f"teachers.{weighted[0]}.weight applies to the mixture of all rows, but"
            f" data.teacher_key={key} gives each row its own: set one of them to null"
        )
    if c.mixture is not None and c.distill.seq_kd:
        yield (
            f"distill.seq_kd=true samples from one teacher, and the {c.mixture} mixture of {names}"
            " cannot be sampled from: set data.teacher_key and distill.mixture=null, or"
            " seq_kd=false"
        )


def _with_environment(c: RunConfig) -> Iterator[str]:
    turn = c.environment.turn_tokens
    if (turn or 0) > c.max_new_tokens:
        yield (
            f"environment.turn_tokens={turn} exceeds max_new_tokens={c.max_new_tokens}, which"
            " limits the whole episode: raise that, or lower turn_tokens"
        )
    if c.distill.seq_kd:
        yield (
            "distill.seq_kd=true samples from the teacher, which has no environment: set"
            " seq_kd=false, or environment.name=null"
        )
    if c.teacher.tokenizer == "own":
        yield (
            "teacher.tokenizer=own aligns the text of completions, and an episode"
            f" (environment.name={c.environment.name}) is not one text: give student and teacher"
            " one tokenizer, or set environment.name=null"
        )


def _with_rewards(c: RunConfig) -> Iterator[str]:
    if c.dynamic_sampling == "refill" and c.schedule != "serial":
        yield (
            f"policy.dynamic_sampling=refill with schedule={c.schedule}: a batch is only complete"
            " once its rewards are known; set schedule=serial, or policy.dynamic_sampling=drop"
        )
    if (
        not c.reward.functions
        and c.reward.model is None
        and not (c.environment.name and c.environment.weight)
    ):
        yield (
            f"algorithm={c.algorithm} learns from rewards: set reward.functions, as in"
            " reward.functions=[math], or reward.model, or environment.name"
        )
    if c.environment.credit == "turn" and c.policy.advantages == "similarity":
        yield (
            "environment.credit=turn compares turns, and policy.advantages=similarity whole"
            " completions: set one of them to its default"
        )
    if c.policy.reward_combination == "normalize_then_sum":
        others = {
            "policy.advantages=similarity": c.policy.advantages == "similarity",
            "environment.credit=turn": c.environment.credit == "turn",
        }
        for key in (key for key, on in others.items() if on):
            yield (
                f"policy.reward_combination=normalize_then_sum and {key} both decide what a reward"
                " is compared with: set one of them to its default"
            )
    if c.group_size < 2:
        yield (
            f"group_size={c.group_size}: algorithm={c.algorithm} compares the completions of a"
            " prompt; it needs at least 2"
        )
    if c.sampling.truncated:
        yield (
            f"algorithm={c.algorithm} needs every token's probability under the policy that"
            " sampled: set sampling.temperature above 0, top_k=0, top_p=1 and min_p=0"
        )
    if (c.reward.overlong_buffer or 0) > c.max_new_tokens:
        yield (
            f"reward.overlong_buffer={c.reward.overlong_buffer} exceeds"
            f" max_new_tokens={c.max_new_tokens}"
        )
    if c.policy.advantages == "similarity" and c.grouper.model is None:
        yield (
            "policy.advantages=similarity needs an encoder: set grouper.model, as in"
            " grouper.model=sentence-transformers/all-MiniLM-L6-v2"
        )
    if c.distill.on_policy_fraction < 1 or c.distill.seq_kd:
        yield (
            f"algorithm={c.algorithm} learns from its own samples: set distill.on_policy_fraction=1"
            " and distill.seq_kd=false"
        )
    if c.policy.opd_coef > 0 and c.distill.signal != "sampled":
        yield (
            f"policy.opd_coef={c.policy.opd_coef:g} reads the teacher's log-prob of the sampled"
            f" token: set distill.signal=sampled (got {c.distill.signal})"
        )
