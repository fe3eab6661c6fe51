"""All keys of a run: those of its own, its sections, and the conditions on keys of several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from jaxrl.config.paths import working_directory
from jaxrl.config.roles import (
    ActorConfig,
    FrozenConfig,
    GrouperConfig,
    NamedTeacherConfig,
    ReferenceConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    StudentConfig,
    TeacherConfig,
    template_names,
)
from jaxrl.config.section import (
    POLICY,
    ROLES,
    Count,
    DType,
    Flag,
    Name,
    NonNegative,
    Positive,
    Quantisation,
    Section,
    check_user_names,
    conflict,
    unread,
)
from jaxrl.config.settings import (
    CheckpointConfig,
    DataConfig,
    DeadlinesConfig,
    DistillConfig,
    EnvironmentConfig,
    EvalConfig,
    LoggingConfig,
    OffloadConfig,
    OptimizerConfig,
    PolicyConfig,
    ProfileConfig,
    RayConfig,
    SamplingConfig,
)
from jaxrl.errors import user_path
from jaxrl.losses import algorithm_table
from jaxrl.losses.algorithm_table import AlgorithmSpec, MixtureKind, find_algorithm
from jaxrl.process.plugin import anchored

UNTRUNCATED = "sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"
"""Settings of untruncated samples at temperature 1."""


ASK_A_TEACHER = (
    *("teacher.model", "teacher.address", "teacher.cache", "teacher.prompt", "teachers"),
    *("data.teacher_key", "distill.mixture", "distill.entropy_aware", "distill.seq_kd"),
)
"""Keys that ask something of a teacher."""
ASK_FOR_REWARDS = (
    *("reward.functions", "reward.model", "distill_weight", "policy_weight"),
    *("reward.overlong_buffer", "reward.truncated"),
    *(f"environment.{key}" for key in ("weight", "credit", "discount")),
    *(f"policy.{key}" for key in PolicyConfig.model_fields if key != "router_replay"),
)
"""Keys that only algorithms read that learn from rewards; of one with a method of its own, what is
known are the first three."""


def _mesh_text(value: object) -> object:
    """Returns a mapping of roles to devices as the text that it stands for; `{actor:2}`, without a
    space, is YAML for a key `actor:2`."""
    if not isinstance(value, dict):
        return value
    return ",".join(str(r).replace(":", "=") if n is None else f"{r}={n}" for r, n in value.items())


def _algorithm(value: str) -> str:
    name = anchored(value, working_directory())
    find_algorithm(name)
    return name


class RunConfig(Section):
    """The keys of a run, and what follows from several of them."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and, without `run_dir`, of its folder under `runs/`."""
    run_dir: Name | None = None
    """Folder for everything that the run writes: checkpoints, metrics, samples, logs. null:
    `runs/NAME`."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume the run in `run_dir`, or start one where there is none. never: start a new run;
    refuse a `run_dir` that holds one. must: resume; refuse a `run_dir` without a run."""
    resume_changed: bool | tuple[str, ...] = False
    """Resume even where files of a model, a reward function or data have changed since the
    checkpoint; each change is reported. A list of keys (`[data.train, reward.functions]`) allows
    it for what these name alone."""
    seed: Count = 0
    """Seed of the data's order, of every sample and of every other random choice."""
    deterministic: Flag = False
    """Use only kernels whose result does not depend on timing, and keep those that XLA chose by
    timing them in the run directory: a resumed run on a GPU then agrees bit for bit with one that
    was not interrupted, but is slower; on a CPU it always agrees. Sets
    `--xla_gpu_exclude_nondeterministic_ops=true` and the files of autotuning in XLA_FLAGS."""
    mesh: Annotated[str, BeforeValidator(_mesh_text)] = "actor+rollout=1"
    """Devices of each role, as in `actor=2,rollout=2,teacher=4`; roles joined by `+` share devices.
    A role that the run needs and the mesh does not name joins the actor's pool. A mapping, such as
    `{actor: 2, rollout: 2}`, means the same."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """Workers as threads of this process (local) or as Ray processes (ray). auto: ray where a
    cluster is named (`ray.address`, RAY_ADDRESS) or this host has too few accelerators."""
    algorithm: Annotated[
        str, Field(description=algorithm_table.describe_algorithms()), AfterValidator(_algorithm)
    ] = algorithm_table.DEFAULT
    policy_weight: NonNegative = 1.0
    """Weight of the policy loss in algorithms that learn from rewards."""
    distill_weight: NonNegative = 0.0
    """Weight of the divergence from a teacher that is added to the policy loss; above 0 a teacher
    is needed."""
    schedule: Literal["serial", "one_step_off", "two_step_off"] = "serial"
    """Number of batches by which the weights of the rollout lag behind those of the actor: serial
    0, one_step_off 1, two_step_off 2. With a lag, generating and training overlap."""
    steps: Positive = 200
    """Batches to train on."""
    batch_size: Positive = 32
    """Prompts per batch."""
    group_size: Positive = 4
    """Completions per prompt."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens; longer prompts are dropped or cut (`data.long_prompts`), and
    counted."""
    max_new_tokens: Positive = 512
    """Longest completion, in tokens, including the end-of-sequence token; with an environment, the
    longest episode: all turns and all answers of the environment."""
    compile_cache: Name | None = "~/.cache/jaxrl/compile"
    """Folder of compiled programs that are kept between runs, unless JAX_COMPILATION_CACHE_DIR
    names one. null: none are kept."""
    student: StudentConfig = Field(default={}, validate_default=True)
    teacher: TeacherConfig = TeacherConfig()
    teachers: Annotated[dict[str, NamedTeacherConfig], BeforeValidator(check_user_names)] = {}
    """Several teachers by names of your choice, as in `{math: {model: A}, code: {model: B}}`, in
    place of `teacher.model`; `{math: A}` is short for a model alone. They take turns on the devices
    of the role teacher, or all of them are served, as in `{math: {address: host:8790/math}}`, with
    `api` and `api_model` as in `teacher`; the other keys of `teacher` apply to all of them.
    `data.teacher_key` and `distill.mixture` determine which rows learn from which teacher; in the
    mixture of all rows `weight` is the relative weight of a teacher (null: 1)."""
    data: DataConfig = Field(default={}, validate_default=True)
    sampling: SamplingConfig = SamplingConfig()
    distill: DistillConfig = DistillConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = ReferenceConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    grouper: GrouperConfig = GrouperConfig()
    policy: PolicyConfig = PolicyConfig()
    offload: OffloadConfig = OffloadConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    ray: RayConfig = RayConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()

    def _rules(self) -> Iterator[str]:
        return _broken_rules(self)

    @property
    def run_path(self) -> Path:
        """Returns the folder of the run."""
        return user_path(Path("runs", self.name) if self.run_dir is None else self.run_dir)

    @cached_property
    def roles(self) -> dict[str, RoleConfig]:
        """Returns a mapping from each role to its section."""
        return {role: getattr(self, role) for role in ROLES}

    def with_dtypes(self, own: DType) -> Self:
        """Returns a copy in which `own`, the dtype for the devices at hand, replaces every role's
        null dtype."""
        unset = {role: section for role, section in self.roles.items() if section.dtype is None}
        filled = {role: s.model_copy(update={"dtype": own}) for role, s in unset.items()}
        return self.model_copy(update=filled)

    @cached_property
    def lazy(self) -> tuple[str, ...]:
        """Roles that are loaded at their first use."""
        sections = self.roles.items()
        return tuple(r for r, s in sections if isinstance(s, FrozenConfig) and s.lazy)

    @cached_property
    def spec(self) -> AlgorithmSpec:
        """Returns the algorithm's entry in the table of algorithms."""
        return find_algorithm(self.algorithm)

    @property
    def only_data(self) -> bool:
        """Returns whether every training batch holds completions of the data, one a prompt."""
        return self.spec.only_data(self.distill.on_policy_fraction, self.distill.seq_kd)

    @property
    def batch_rows(self) -> int:
        """Returns the rows of the largest training batch, one for each completion."""
        return self.batch_size * (1 if self.only_data else self.group_size)

    @property
    def slots(self) -> int:
        """Returns how many sequences are decoded at once."""
        return self.rollout.slots or self.batch_size * self.group_size

    @cached_property
    def learns_from_rewards(self) -> bool:
        return self.spec.learns_from == "rewards"

    @cached_property
    def learns_from_teacher(self) -> bool:
        """Returns whether a teacher scores the completions."""
        if self.spec.learns_from == "teacher":
            return True
        return self.learns_from_rewards and (self.distill_weight > 0 or self.policy.opd_coef > 0)

    @cached_property
    def teacher_models(self) -> dict[str, str]:
        """Returns a mapping from the name of each teacher that runs here to its model; the name is
        `teacher` where it is the only one."""
        if self.teacher_model is not None:
            return {"teacher": self.teacher_model}
        return {name: one.model for name, one in self.teachers.items() if one.model is not None}

    @cached_property
    def served(self) -> dict[str, TeacherConfig | NamedTeacherConfig]:
        """Returns a mapping from the name of each teacher that is served outside the run to its
        section; the name is `teacher` where it is the only one."""
        if not self.teachers:
            return {} if self.teacher.address is None else {"teacher": self.teacher}
        return {name: one for name, one in self.teachers.items() if one.address is not None}

    def teacher_key(self, name: str, key: str = "model") -> str:
        """Returns the config key of the teacher that has this name in `teacher_models` or
        `served`."""
        return f"teachers.{name}.{key}" if self.teachers else f"teacher.{key}"

    @cached_property
    def mixture(self) -> MixtureKind | None:
        """Returns how several teachers are combined into one; None where each row has one
        teacher."""
        if self.distill.mixture is not None or self.data.teacher_key is not None:
            return self.distill.mixture
        return "arithmetic" if len(self.teachers) > 1 else None

    @property
    def evaluates_teacher(self) -> bool:
        """Returns whether a teacher on devices of the run is evaluated, if the data allow it: a
        mixture only scores, and a teacher plays no episodes."""
        return self.eval.teacher and self.mixture is None and self.environment.name is None

    @cached_property
    def teacher_model(self) -> str | None:
        """Returns the model whose weights the teacher has at the start of a run."""
        own = self.teacher.model == POLICY
        return self.student.model if own else self.teacher.model

    @property
    def trains_adapters(self) -> bool:
        """Returns whether adapters are trained instead of all weights."""
        return self.student.lora.rank is not None

    @property
    def base_dtype(self) -> DType:
        """Returns the dtype of the actor's frozen base weights, except for those that are
        quantised."""
        dtype = self.student.base_dtype
        if dtype == "float32" or dtype == "bfloat16":
            return dtype
        return self.actor.compute_dtype

    @property
    def quantised(self) -> Quantisation | None:
        """Returns how the kernels under adapters are held; None if like all other weights."""
        dtype = self.student.base_dtype
        return dtype if dtype == "int8" or dtype == "nf4" else None

    @cached_property
    def teacher_follows(self) -> bool:
        """Returns whether the teacher's weights come from the actor: the policy, or its moving
        average."""
        own = self.teacher.model == POLICY and self.teacher.ema < 1
        return self.learns_from_teacher and own

    @cached_property
    def teacher_gets_feedback(self) -> bool:
        """Returns whether `teacher.prompt` tells the teacher about the completion that it scores,
        so that it scores after the reward functions."""
        late = {"feedback", "attempt"} & set(template_names(self.teacher.prompt or ""))
        return self.learns_from_rewards and bool(late)

    @property
    def keeps_ema(self) -> bool:
        """Returns whether the actor keeps a moving average of the policy's weights, in float32."""
        return self.teacher_follows and self.teacher.ema > 0

    @property
    def offloads_follower(self) -> bool:
        """Returns whether the weights of a teacher that follows the policy are offloaded while it
        is idle: they are where the weights that it may share with the actor are."""
        return self.offload.optimizer if self.keeps_ema else self.offload.params

    @cached_property
    def teacher_prompt_tokens(self) -> int:
        """Returns the length of the longest prompt that the teacher reads, in its tokens."""
        more = 2 if self.teacher.tokenizer == "own" else 1
        return self.teacher.max_prompt_tokens or more * self.max_prompt_tokens

    @property
    def teacher_new_tokens(self) -> int:
        """Returns the length of the longest completion that the teacher reads or samples, in its
        tokens."""
        more = 2 if self.teacher.tokenizer == "own" else 1
        return self.teacher.max_new_tokens or more * self.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        penalised = self.policy.kl_coef > 0 or self.policy.reward_kl_coef > 0
        return self.learns_from_rewards and penalised

    @cached_property
    def minibatches(self) -> int:
        """Returns the number of optimizer updates per pass over a batch. If `actor.minibatches` is
        null: the algorithm's number, or the next smaller one that divides `batch_size`."""
        if self.actor.minibatches is not None:
            return self.actor.minibatches
        own = range(self.spec.minibatches, 0, -1)
        return next(n for n in own if self.batch_size % n == 0)

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.actor.epochs_per_batch

    @property
    def correction(self) -> tuple[str, ...]:
        """Returns the names of the off-policy corrections."""
        if self.policy.correction is not None:
            return self.policy.correction
        lags = self.schedule != "serial" and not self.policy.bypass
        return ("tis_token",) if lags else ("none",)

    @property
    def rewards(self) -> RewardConfig:
        """Returns `reward`, with the algorithm's penalty for long completions where the config sets
        none."""
        if self.reward.overlong_buffer is not None:
            return self.reward
        own = int(self.max_new_tokens * self.spec.overlong_share)
        return self.reward.model_copy(update={"overlong_buffer": own})

    @property
    def dynamic_sampling(self) -> str:
        """Returns `off`, `drop` or `refill`."""
        asked = self.policy.dynamic_sampling
        if asked is not None or not self.spec.dynamic_sampling:
            return asked or "off"
        return "refill" if self.schedule == "serial" else "drop"


def _broken_rules(c: RunConfig) -> Iterator[str]:
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
        more = "distill_weight above 0" if c.learns_from_rewards else "an algorithm that has one"
        yield from unread(c, ASK_A_TEACHER, "algorithm", "it has no teacher", more)
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
    if (c.environment.turn_tokens or 0) > c.max_new_tokens and c.environment.name is not None:
        why = "a turn may be longer than the whole episode"
        yield bad("environment.turn_tokens max_new_tokens", why, "a lower turn_tokens")
    if c.distill.seq_kd and c.environment.name is not None:
        yield bad("distill.seq_kd environment.name", "the teacher's samples have no environment")
    if c.learns_from_rewards:
        yield from _with_rewards(c)
    else:
        keys = ASK_FOR_REWARDS if c.spec.method is None else ASK_FOR_REWARDS[:3]
        more = "an algorithm that does, such as gspo"
        yield from unread(c, keys, "algorithm", "it learns from no reward", more)
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
    if c.minibatches > c.batch_rows:
        yield bad(
            "actor.minibatches batch_size" + " group_size" * (not c.only_data),
            f"a batch has {c.batch_rows} sequences",
            f"actor.minibatches to {c.batch_rows} at most",
        )


def _with_teacher(c: RunConfig) -> Iterator[str]:
    bad, d = partial(conflict, c), c.distill
    model, cache = c.teacher.model, c.teacher.cache
    alone = "teacher.model" if model else "teacher.address" if c.teacher.address else None
    if (alone or cache) is None and not c.teachers:
        weights = (("distill_weight", c.distill_weight), ("policy.opd_coef", c.policy.opd_coef))
        asked = [key for key, weight in weights if weight > 0] if c.learns_from_rewards else []
        without = " and ".join(f"{key}=0" for key in asked) or "algorithm=sft"
        yield bad(
            " ".join(asked) or "algorithm",
            "it needs a teacher" if len(asked) < 2 else "they need a teacher",
            "teacher.model (or teacher.address, teacher.cache, or teachers), or"
            f" {without} to train without one",
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
    for name, one in c.teachers.items():
        if one.model == POLICY:
            yield bad(
                f"teachers.{name}.model",
                "the policy is not one of several teachers",
                "another model there, or teacher.model=policy and teachers={}",
            )
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
    needs = {"signal": d.signal == "student_topk", "entropy_aware": d.entropy_aware}
    for key in (key for key, asked in needs.items() if asked):
        why = "it needs the teacher's probabilities of the student's tokens"
        yield bad(f"distill.{key} teacher.tokenizer", why)
    if d.lean:
        why = "the loss needs all of the vocabulary at once"
        yield bad("distill.lean teacher.tokenizer", why)
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
            "policy.opd_coef teacher.tokenizer",
            "it reads the teacher's log-prob of each token of the student",
            "policy.opd_coef=0 (and distill_weight above 0), or teacher.tokenizer=student",
        )
    if c.teacher_gets_feedback:
        yield bad(
            "teacher.tokenizer teacher.prompt",
            "feedback and attempt are for a teacher with the student's tokenizer",
        )


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
    if not any((c.policy_weight, c.distill_weight, p.kl_coef, p.entropy_coef)):
        why = "no term of the loss has a weight"
        yield bad("policy_weight distill_weight", why, "policy_weight=1")
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
