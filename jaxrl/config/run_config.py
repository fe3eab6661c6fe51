"""All keys of a run: those of its own, and its sections."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

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
    check_names,
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


def _mesh_text(value: object) -> object:
    """Returns a mapping of roles to devices as the text that it stands for; `{actor:2}`, without a
    space, is YAML for a key `actor:2`."""
    if not isinstance(value, dict):
        return value
    return ",".join(str(r).replace(":", "=") if n is None else f"{r}={n}" for r, n in value.items())


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
    resume_changed: bool = False
    """Resume even where files of a model, a reward function or data have changed since the
    checkpoint; each change is reported."""
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
    algorithm: Annotated[str, Field(description=algorithm_table.described())] = (
        algorithm_table.DEFAULT
    )
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
    teachers: Annotated[dict[str, NamedTeacherConfig], BeforeValidator(check_names)] = {}
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

    @property
    def run_path(self) -> Path:
        """Returns the folder of the run."""
        path = Path("runs") / self.name if self.run_dir is None else Path(self.run_dir)
        user_path(path)  # refuses a name that no folder can have
        return path

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

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, value: str) -> str:
        name = anchored(value, working_directory())
        find_algorithm(name)
        return name

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
