"""What the keys of each kind of teacher allow.

The config asks here while it is read: this module stands below it, and knows its sections by their
keys alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

POLICY = "policy"
"""The `teacher.model` of self-distillation."""
KEYS = (
    *("teacher.model", "teacher.address", "teacher.cache", "teacher.prompt", "teachers"),
    *("data.teacher_key", "distill.mixture", "distill.entropy_aware", "distill.seq_kd"),
)
"""Keys that ask something of a teacher."""
UNTRUNCATED = "sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"
"""Settings of untruncated samples at temperature 1."""
Rule = tuple[object, str] | tuple[object, str, str] | tuple[object, str, str, str]
"""(whether it is broken, the keys of `config.section.conflict`, why, what to set), or (whether it
is broken, the message)."""


def section_rules(t: Any) -> Iterator[Rule]:
    """Yields the rules about the keys of one `TeacherConfig`."""
    own = t.tokenizer == "own"
    yield t.cache and t.address, "cache address", "a cache is used alone, or with model"
    yield t.cache and t.prompt, "cache prompt", "the cache has scores of the student's prompts"
    model = t.cache and t.model == POLICY
    yield model, "cache model", "the cache has the scores of another model"
    why = "it averages the weights of the policy"
    yield t.ema > 0 and t.model != POLICY, "ema", why, f"model={POLICY}, or ema=0"
    key, why = "max_prompt_tokens", "it limits the prompts that teacher.prompt makes"
    yield t.max_prompt_tokens and not (t.prompt or own), key, why, f"prompt, or {key}=null"
    key, why = "max_new_tokens", "it limits completions in the tokens of another tokenizer"
    yield t.max_new_tokens and not own, key, why, f"tokenizer=own, or {key}=null"
    yield (
        own and (t.model in (None, POLICY) or t.cache),
        "tokenizer model cache",
        f"own is for a teacher of the run other than {POLICY}",
        "tokenizer=student, or model and no cache",
    )
    yield (
        t.chat_template and t.model in (None, POLICY),
        "chat_template model",
        f"it is for a teacher of the run other than {POLICY}",
        "chat_template=null (student.chat_template is the policy's), or model",
    )
    why = "the teacher there reads the student's prompts"
    yield t.address and t.prompt, "address prompt", why, "prompt=null, or model in place of address"
    yield from server_rules(t)


def server_rules(t: Any) -> Iterator[Rule]:
    """Yields the rules about the keys that say where a teacher is served, of a `TeacherConfig` or a
    `NamedTeacherConfig`."""
    for key, default in (("api", "jaxrl"), ("api_model", None)):
        unread = t.address is None and getattr(t, key) != default
        yield unread, key, "it needs a server", f"address, or leave {key} out"
    if t.address is not None:
        yield t.model, "model address", "these are two teachers"
        yield t.api == "jaxrl" and t.api_model, "api_model api", "it is for api=openai"
        url = t.address if "://" in t.address else f"http://{t.address}"
        form = "http://host:port/v1" if t.api == "openai" else "host:port, or https://host:port"
        fits = _is_server(url) and (t.api != "openai" or url == t.address)
        yield not fits, f"address={t.address} is no server's address: write {form}"


def _is_server(url: str) -> bool:
    """Returns whether this is http(s)://host:port, perhaps with a path, and nothing else."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        place = urlsplit(url)
        given = place.port is not None or "/v1" in place.path
    except ValueError:
        return False
    plain = not (place.query or place.fragment or place.username or place.password)
    return place.scheme in ("http", "https") and bool(place.hostname) and given and plain


def run_rules(c: Any) -> Iterator[Rule]:
    """Yields the rules about keys of several sections of a `Config`."""
    way = "teacher.address, or teacher.ca_file=null"
    yield c.teacher.ca_file and not c.served, "teacher.ca_file", "no teacher is served", way
    for name, served in c.served.items():
        yield (
            c.teacher.ca_file and urlsplit(str(served.address)).scheme != "https",
            f"teacher.ca_file {c.teacher_key(name, 'address')}",
            "the address has no TLS, so that all can read the token",
            "an address that begins with https://, or teacher.ca_file=null",
        )
    yield (
        c.teacher.model == POLICY and c.quantised,
        "teacher.model student.base_dtype",
        "the teacher would hold floats, and not begin as the policy does",
        "student.base_dtype=bfloat16",
    )
    samples = c.distill.seq_kd and c.environment.name
    yield samples, "distill.seq_kd environment.name", "the teacher's samples have no environment"
    if c.learns_from_teacher:
        for kind in (_named, _stored, _policy, _several, _signal, _own_tokenizer):
            yield from kind(c)


def _named(c: Any) -> Iterator[Rule]:
    t, asked = c.teacher, list[str]()
    if c.learns_from_rewards:
        weights = (("distill_weight", c.distill_weight), ("policy.opd_coef", c.policy.opd_coef))
        asked = [key for key, weight in weights if weight > 0]
    without = " and ".join(f"{key}=0" for key in asked) or "algorithm=sft"
    yield (
        not (t.model or t.address or t.cache or c.teachers),
        " ".join(asked) or "algorithm",
        "it needs a teacher" if len(asked) < 2 else "they need a teacher",
        f"teacher.model (or teacher.address, teacher.cache, or teachers), or {without} to train"
        " without one",
    )


def _stored(c: Any) -> Iterator[Rule]:
    share = 1.0 if c.learns_from_rewards else c.distill.on_policy_fraction
    none = "the cache has no scores of the student's samples"
    yield (
        c.teacher.cache and share == 1,
        "teacher.cache distill.on_policy_fraction",
        f"{none}, and there are no other batches",
        "teacher.cache=null, or, with algorithm=gkd, distill.on_policy_fraction below 1",
    )
    yield (
        c.teacher.cache and not c.teacher.model and share > 0 and not c.teachers,
        "teacher.cache teacher.model distill.on_policy_fraction",
        none,
        "distill.on_policy_fraction=0, or teacher.model to the one whose scores the cache has",
    )
    several = c.teacher.cache and c.teachers
    yield several, "teacher.cache teachers", "a cache has the scores of one teacher"


def _policy(c: Any) -> Iterator[Rule]:
    yield (
        c.teacher_follows and c.trains_adapters,
        "teacher.model teacher.ema student.lora.rank",
        "the teacher follows all weights of the policy, and adapters are trained",
        "teacher.ema=1 (the policy before training), or student.lora.rank=null",
    )
    why = "it samples from a teacher that stays the same"
    moves, way = c.distill.seq_kd and c.teacher_follows, "teacher.ema=1, or distill.seq_kd=false"
    yield moves, "distill.seq_kd teacher.ema", why, way


def _several(c: Any) -> Iterator[Rule]:
    d, t = c.distill, c.teacher
    alone = "teacher.model" if t.model else "teacher.address"
    two = (t.model or t.address) and c.teachers
    yield two, f"{alone} teachers", "these are two ways to name teachers"
    yield (
        0 < len(c.served) < len(c.teachers),
        "teachers",
        f"they are partly served ({', '.join(c.served)})",
        "a model for all of them, or for all of them an address (serve_teacher serves several)",
    )
    prompts = c.served and t.prompt and c.teachers
    yield prompts, "teacher.prompt teachers", "served teachers read the student's prompts"
    by_logprobs = c.mixture == "arithmetic" and d.signal in ("student_topk", "sampled")
    combines = d.signal == "hidden" or (by_logprobs and not d.entropy_aware)
    yield (
        c.served and c.mixture and not combines,
        "distill.signal distill.entropy_aware",
        f"the {c.mixture} mixture of served teachers cannot be made of what each of them sends",
        "distill.signal=hidden, or data.teacher_key for a teacher a row",
    )
    for name, teacher in c.teachers.items():
        yield (
            teacher.model == POLICY,
            f"teachers.{name}.model",
            "the policy is not one of several teachers",
            "another model there, or teacher.model=policy and teachers={}",
        )
        yield (
            c.data.teacher_key and teacher.weight,
            f"teachers.{name}.weight data.teacher_key",
            "the weight applies to the mixture of all rows, and each row has one teacher",
        )
    for key, given in (("data.teacher_key", c.data.teacher_key), ("distill.mixture", d.mixture)):
        why = "it chooses among several teachers"
        yield given is not None and not c.teachers, key, why, f"teachers, or {key}=null"
    yield (
        d.seq_kd and c.mixture,
        "distill.seq_kd distill.mixture teachers",
        "a mixture cannot be sampled from",
        "data.teacher_key and distill.mixture=null, or distill.seq_kd=false",
    )


def _signal(c: Any) -> Iterator[Rule]:
    biased = c.sampling.truncated or c.sampling.temperature != 1
    why = "it is unbiased only for untruncated samples at temperature 1"
    yield c.distill.signal == "sampled" and biased, "distill.signal", why, UNTRUNCATED


def _own_tokenizer(c: Any) -> Iterator[Rule]:
    if c.teacher.tokenizer != "own":
        return
    d, s = c.distill, c.sampling
    aligns = "the text of completions is aligned, and {} is not one text"
    yield (
        c.data.completion_turns == "all",
        "teacher.tokenizer data.completion_turns",
        aligns.format("a completion of several turns"),
    )
    episode = "teacher.tokenizer environment.name"
    yield c.environment.name, episode, aligns.format("an episode")
    why = "it needs the teacher's probabilities of the student's tokens"
    yield d.signal == "student_topk", "distill.signal teacher.tokenizer", why
    yield d.entropy_aware, "distill.entropy_aware teacher.tokenizer", why
    whole = "the loss needs all of the vocabulary at once"
    yield d.lean, "distill.lean teacher.tokenizer", whole
    sampled = c.learns_from_rewards or d.on_policy_fraction > 0
    yield (
        sampled and (s.truncated or s.temperature != 1 or d.distill_temperature != 1),
        "teacher.tokenizer",
        "a part of the divergence is estimated from the student's samples, which must be"
        " untruncated and at temperature 1",
        f"{UNTRUNCATED} distill.distill_temperature=1",
    )
    yield (
        d.signal == "sampled" and d.on_policy_fraction < 1 and not c.learns_from_rewards,
        "teacher.tokenizer distill.signal distill.on_policy_fraction",
        "they learn from the student's samples alone",
    )
    yield (
        c.learns_from_rewards and c.policy.opd_coef > 0,
        "policy.opd_coef teacher.tokenizer",
        "it reads the teacher's log-prob of each token of the student",
        "policy.opd_coef=0 (and distill_weight above 0), or teacher.tokenizer=student",
    )
    yield (
        c.teacher_gets_feedback,
        "teacher.tokenizer teacher.prompt",
        "feedback and attempt are for a teacher with the student's tokenizer",
    )
