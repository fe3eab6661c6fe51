"""The config of a run: one frozen class per section, a docstring under each key, and where the keys
of a run come from: a file, the quickstart or the plain defaults.

The keys of models and their devices are in `config.roles`, those of other sections in
`config.settings`. The class defaults suit models of one to several billion parameters on
accelerators; the built-in quickstart (``configs/quickstart.yaml``) sets its own. ``student.model``,
``data.train`` and, where the algorithm learns from a teacher, ``teacher.model`` have no default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, WrapValidator

from jaxrl.config import keys as config_keys
from jaxrl.config import paths as config_paths
from jaxrl.config import roles as role_sections
from jaxrl.config import settings, yaml_text
from jaxrl.config.builtin_configs import config_file
from jaxrl.config.section import (
    ASKED,
    FREE,
    REPORTED,
    ROLES,
    SAMPLED,
    Count,
    DType,
    Flag,
    Name,
    NonNegative,
    Positive,
    Quantisation,
    Section,
    check_user_names,
    numbers,
    refused,
    unless_between,
    unread,
)
from jaxrl.config.section import show_value as written
from jaxrl.errors import UserError, counted, near, shown, user_path
from jaxrl.losses import algorithm_table
from jaxrl.process.json_types import JsonObject
from jaxrl.process.plugin import anchor
from jaxrl.teacher.key_rules import KEYS, POLICY, Rule, run_rules

CONFIG_FILE = "config.yaml"
"""Name of the config in a run directory."""
BUILTIN = "builtin:quickstart"
QUICKSTART = config_file(BUILTIN)
OWN = ("student.model", "data.train")
"""Keys with which a run without a file is no longer the quickstart."""

Overrides = Sequence[str] | Mapping[str, object]
"""`key=value` strings, or a mapping of keys (dotted, or nested) to values."""


@dataclass(frozen=True)
class Base:
    """Where the keys of a run come from."""

    note: str
    """For the reader of a run."""
    mapping: JsonObject
    """All keys: those of the file, the quickstart or none, and those that were set."""
    unset: Mapping[str, object]
    """The quickstart's keys that were not set, with their values; empty for another base."""
    own: tuple[str, ...] = ()
    """The keys for which a run without a file is not the quickstart."""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors inside also say which of the values that they name nobody has set."""
        try:
            yield
        except UserError as error:
            if self.own and config_keys.MISSING in str(error):
                raise UserError(
                    f"{error}\nwith {' and '.join(self.own)} set and no --config the other keys"
                    f" have their defaults; --config {BUILTIN} takes the quickstart's"
                ) from error
            unset = {key: written(value) for key, value in self.unset.items()}
            named = []
            for key, value in unset.items():
                text = f"{key.rpartition('.')[2]}={value}"
                if re.search(rf"(?<!\w){re.escape(text)}(?![\w.])", str(error)) is not None:
                    named.append(f"{key}={value}")
            if not named:
                raise
            raise UserError(
                f"{error}\nfrom the built-in quickstart, because there is no --config:"
                f" {', '.join(named)}"
            ) from error


def read_keys(path: Path) -> JsonObject:
    """Returns the mapping in a YAML file; paths that exist beside the file are absolute."""
    return config_paths.beside(yaml_text.read_mapping(path), path.absolute().parent)


ASK_FOR_REWARDS = (
    *("reward.functions", "reward.model", "distill_weight", "policy_weight"),
    *("reward.overlong_buffer", "reward.truncated"),
    *(f"environment.{key}" for key in ("weight", "credit", "discount")),
    *(f"policy.{key}" for key in settings.PolicyConfig.model_fields if key != "router_replay"),
)
"""Keys that only algorithms read that learn from rewards; of one with a method of its own, what is
known are the first three."""


def _mesh_text(value: object) -> object:
    """Returns a mapping of roles to devices as the text that it stands for; `{actor:2}`, without a
    space, is YAML for a key `actor:2`."""
    if not isinstance(value, dict):
        return value
    return ",".join(str(r).replace(":", "=") if n is None else f"{r}={n}" for r, n in value.items())


class AlgorithmName(str):
    """The name of an algorithm, with the arguments of its functions."""

    arguments: Mapping[str, Any]

    def __new__(cls, name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> Self:
        made = super().__new__(cls, name)
        made.arguments = dict(arguments)
        return made

    def __eq__(self, other: object) -> bool:
        same = str.__eq__(self, other)
        return same is True and self.arguments == getattr(other, "arguments", {})

    __hash__ = str.__hash__


def _written(name: str) -> str | JsonObject:
    arguments = name.arguments if isinstance(name, AlgorithmName) else {}
    return {"name": str(name), "arguments": arguments} if arguments else str(name)


def _algorithm(value: Any, check: Callable[[Any], str]) -> AlgorithmName:
    name, arguments = value, getattr(value, "arguments", {})
    if isinstance(value, dict):
        name, arguments = value.get("name", algorithm_table.DEFAULT), value.get("arguments") or {}
        for key in value.keys() - {"name", "arguments"}:
            path = next(config_keys.leaf_paths(f"algorithm.{key}", value[key]))
            hint = config_keys.near_key(path, ["algorithm.name", "algorithm.arguments"])
            raise ValueError(f"no key {path}{hint}: an algorithm has a name and arguments")
        if not isinstance(arguments, dict) or not all(map(str.isidentifier, map(str, arguments))):
            raise ValueError(f"arguments={arguments!r}: a mapping of names is needed")
    name = anchor(check(name), config_paths.working_directory())
    made = AlgorithmName(name, numbers(arguments))
    algorithm_table.find_algorithm(name, made.arguments)
    return made


PROMPTS = refused("it decides which prompts each batch has, and how many completions")
SCHEDULED = refused("it decides which weights sample each batch")
DISTILLS = replace(ASKED, unless=unless_between(0, "with 0 there is no teacher in the run"))
MORE_STEPS = replace(
    REPORTED, unless=lambda before, now, _: "the run may only become longer" if now < before else ""
)


class _Parsed(type(Section)):  # type: ignore[misc]
    """Makes `Config(...)` raise the same errors as `Config.load`."""

    def __call__(cls, **mapping: object) -> Any:
        try:
            return cls.parse(mapping)
        except UserError as error:
            raise UserError(
                f"{error}\nConfig(...) takes every section as a mapping; Config.load(FILE,"
                ' overrides={"steps": 2}) takes a file or the quickstart, and sets some keys'
            ) from None


class Config(Section, metaclass=_Parsed):
    """A run: what is trained, on what, where and how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), FREE] = "run"
    """Name of the run and, without `run_dir`, of its folder under `runs/`."""
    run_dir: Annotated[Name | None, FREE] = None
    """Folder for everything that the run writes: checkpoints, metrics, samples, logs. null:
    `runs/NAME`."""
    resume: Annotated[Literal["auto", "never", "must"], FREE] = "auto"
    """auto: resume the run in `run_dir`, or start one where there is none. never: start a new run;
    refuse a `run_dir` that holds one. must: resume; refuse a `run_dir` without a run."""
    resume_changed: Annotated[bool | tuple[str, ...], FREE] = False
    """Resume although keys that change what is learned, such as the learning rate or the weights of
    rewards, or files that keys name have changed since the checkpoint; each change is reported and
    noted. A list of keys or sections (`[optimizer.learning_rate, reward]`) allows it for these
    alone. Which keys may change is in docs/checkpoints.md."""
    seed: Annotated[Count, refused("the order of the data and every sample follow from it")] = 0
    """Seed of the data's order, of every sample and of every other random choice."""
    deterministic: Annotated[Flag, REPORTED] = False
    """Use only kernels whose result does not depend on timing, and keep those that XLA chose by
    timing them in the run directory: a resumed run on a GPU then agrees bit for bit with one that
    was not interrupted, but is slower; on a CPU it always agrees. Sets
    `--xla_gpu_exclude_nondeterministic_ops=true` and the files of autotuning in XLA_FLAGS."""
    mesh: Annotated[str, BeforeValidator(_mesh_text), FREE] = "actor+rollout=1"
    """Devices of each role, as in `actor=2,rollout=2,teacher=4`; roles joined by `+` share devices.
    A role that the run needs and the mesh does not name joins the actor's pool. A mapping, such as
    `{actor: 2, rollout: 2}`, means the same."""
    launcher: Annotated[Literal["auto", "local", "ray"], FREE] = "auto"
    """Workers as threads of this process (local) or as Ray processes (ray). auto: ray where a
    cluster is named (`ray.address`, RAY_ADDRESS) or this host has too few accelerators."""
    algorithm: Annotated[
        str,
        Field(description=algorithm_table.describe_algorithms()),
        WrapValidator(_algorithm),
        PlainSerializer(_written),
        refused("another algorithm is another run"),
    ] = algorithm_table.DEFAULT
    policy_weight: Annotated[NonNegative, ASKED] = 1.0
    """Weight of the policy loss in algorithms that learn from rewards."""
    distill_weight: Annotated[NonNegative, DISTILLS] = 0.0
    """Weight of the divergence from a teacher that is added to the policy loss; above 0 a teacher
    is needed."""
    schedule: Annotated[
        Literal["serial", "one_step_off", "two_step_off", "streaming"],
        refused("it decides which weights sample each batch"),
    ] = "serial"
    """Number of batches by which the weights of the rollout lag behind those of the actor: serial
    0, one_step_off 1, two_step_off 2. With a lag, generating and training overlap. streaming: the
    rollout never waits for the longest completion of a batch: it begins the next ones meanwhile and
    takes new weights as they come, between two launches; no token is older than `staleness`."""
    staleness: Annotated[
        int, Field(ge=1, le=8), refused("it decides which weights sample each batch")
    ] = 1
    """Of schedule=streaming: most batches between the weights that sample a token and those that
    learn it."""
    steps: Annotated[Positive, MORE_STEPS] = 200
    """Batches to train on."""
    batch_size: Annotated[Positive, PROMPTS] = 32
    """Prompts per batch."""
    group_size: Annotated[Positive, PROMPTS] = 4
    """Completions per prompt."""
    max_prompt_tokens: Annotated[Positive, PROMPTS] = 512
    """Longest prompt, in tokens; longer prompts are dropped or cut (`data.long_prompts`), and
    counted."""
    max_new_tokens: Annotated[Positive, replace(SAMPLED, decides="data.train")] = 512
    """Longest completion, in tokens, including the end-of-sequence token; with an environment, the
    longest episode: all turns and all answers of the environment."""
    compile_cache: Annotated[Name | None, FREE] = "~/.cache/jaxrl/compile"
    """Folder of compiled programs that are kept between runs, unless JAX_COMPILATION_CACHE_DIR
    names one. null: none are kept."""
    student: role_sections.StudentConfig = Field(default={}, validate_default=True)
    teacher: role_sections.TeacherConfig = role_sections.TeacherConfig()
    teachers: Annotated[
        dict[str, role_sections.NamedTeacherConfig],
        BeforeValidator(check_user_names),
        refused("other teachers teach something else"),
    ] = {}
    """Several teachers by names of your choice, as in `{math: {model: A}, code: {model: B}}`, in
    place of `teacher.model`; `{math: A}` is short for a model alone. They take turns on the devices
    of the role teacher, or all of them are served, as in `{math: {address: host:8790/math}}`, with
    `api` and `api_model` as in `teacher`; the other keys of `teacher` apply to all of them.
    `data.teacher_key` and `distill.mixture` determine which rows learn from which teacher; in the
    mixture of all rows `weight` is the relative weight of a teacher (null: 1)."""
    data: settings.DataConfig = Field(default={}, validate_default=True)
    sampling: settings.SamplingConfig = settings.SamplingConfig()
    distill: settings.DistillConfig = settings.DistillConfig()
    optimizer: settings.OptimizerConfig = settings.OptimizerConfig()
    actor: role_sections.ActorConfig = role_sections.ActorConfig()
    rollout: role_sections.RolloutConfig = role_sections.RolloutConfig()
    reference: role_sections.ReferenceConfig = role_sections.ReferenceConfig()
    reward: role_sections.RewardConfig = role_sections.RewardConfig()
    environment: settings.EnvironmentConfig = settings.EnvironmentConfig()
    grouper: role_sections.GrouperConfig = role_sections.GrouperConfig()
    policy: settings.PolicyConfig = settings.PolicyConfig()
    offload: settings.OffloadConfig = settings.OffloadConfig()
    eval: settings.EvalConfig = settings.EvalConfig()
    checkpoint: settings.CheckpointConfig = settings.CheckpointConfig()
    deadlines: settings.DeadlinesConfig = settings.DeadlinesConfig()
    ray: settings.RayConfig = settings.RayConfig()
    logging: settings.LoggingConfig = settings.LoggingConfig()
    profile: settings.ProfileConfig = settings.ProfileConfig()

    def _rules(self) -> Iterator[Rule]:
        return _run_rules(self)

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Overrides = ()) -> Self:
        """Returns the config of a YAML file, with some keys overridden.

        Args:
            path: the file. None: the built-in quickstart or, where `student.model` or `data.train`
                is among the overrides, the defaults. `builtin:NAME`: one that comes with jaxrl
                (`config.builtin_configs`).
            overrides: `["steps=10", "optimizer.learning_rate=1e-5"]`, or `{"steps": 10,
                "optimizer.learning_rate": 1e-5}`.

        Raises:
            UserError: for any mistake that the user can correct; a few lines at most.
        """
        return cls.load_base(path, overrides)[0]

    @classmethod
    def of(
        cls,
        given: Self | str | Path | Mapping[str, object] | None,
        overrides: Overrides = (),
        change: Callable[[JsonObject], JsonObject] = lambda mapping: mapping,
    ) -> Self:
        """Returns a config as it is, and loads any other: a file, the keys of a run as on its
        command line (dotted or nested), or None for the quickstart.

        Args:
            overrides: keys that are set otherwise, as in `load`.
            change: what else becomes of the mapping of all keys.

        Raises:
            UserError: bad input.
        """
        own: JsonObject = {}
        if overrides:
            own = dict(yaml_text.assignments(overrides, config_keys.mappings(cls)))
        if isinstance(given, cls):
            mapping, here = given.model_dump(mode="json"), config_paths.working_directory()
            changed = change(yaml_text.assign(mapping, own) if own else mapping)
            changed = config_paths.beside(changed, here, config_paths.CODE)
            return given if changed == mapping else cls.parse(changed)
        if given is None or isinstance(given, Mapping):
            flat = yaml_text.assignments(given or {}, config_keys.mappings(cls))
            return cls.load_base(None, {**dict(flat), **own}, change)[0]
        if isinstance(given, str | Path):
            return cls.load_base(given, own, change)[0]
        raise UserError(
            f"a run is given by a Config, a YAML file or a mapping of keys, not {shown(given)}"
        )

    @classmethod
    def load_base(
        cls,
        path: str | Path | None = None,
        overrides: Overrides = (),
        change: Callable[[JsonObject], JsonObject] = lambda mapping: mapping,
    ) -> tuple[Self, Base]:
        """Does what `load` does, and also returns where the keys come from."""
        if isinstance(overrides, str):
            raise UserError(
                f"overrides is a list of key=value strings, or a mapping, got {overrides!r}"
            )
        given = dict(yaml_text.assignments(overrides, config_keys.mappings(cls)))
        own = tuple(key for key in OWN if key in given) if path is None else ()
        start: JsonObject = {}
        if own:
            note = f"no file and {' and '.join(own)} set, so the defaults"
        elif path is None or str(path) == BUILTIN:
            start, note = read_keys(QUICKSTART), "the built-in quickstart"
        else:
            start, note = read_keys(config_file(path)), str(path)
        if given:
            note += f", with {counted(len(given), 'key')} set otherwise"
        quickstart = dict(yaml_text.assignments(start)) if path is None else {}
        unset = {key: value for key, value in quickstart.items() if key not in given}
        base = Base(f"config: {note}", yaml_text.assign(start, given), unset, own)
        with base.explained():
            # So that a run can be resumed from any folder.
            here = config_paths.working_directory()
            mapping = config_paths.beside(base.mapping, here, config_paths.CODE)
            return cls.parse(change(mapping)), base

    @classmethod
    def parse(cls, mapping: JsonObject) -> Self:
        """Returns the config that nested dicts describe; raises ``UserError`` naming the key."""
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise UserError(config_keys.explain(cls, error)) from None
        except UnicodeEncodeError as error:  # a validator of pydantic's reads texts as UTF-8
            half = ascii(error.object[error.start])[1:-1]
            raise UserError(
                f"{ascii(error.object)[:80]}: {half} is half of a surrogate pair, not text"
            ) from None

    def dump(self) -> str:
        """Returns YAML of every key with its value; ``load`` reads it back to an equal config."""
        return yaml_text.dump_mapping(self.model_dump(mode="json"))

    @property
    def run_path(self) -> Path:
        """Returns the folder of the run."""
        return user_path(Path("runs", self.name) if self.run_dir is None else self.run_dir)

    @cached_property
    def roles(self) -> dict[str, role_sections.RoleConfig]:
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
        return tuple(r for r, s in sections if isinstance(s, role_sections.FrozenConfig) and s.lazy)

    @cached_property
    def spec(self) -> algorithm_table.AlgorithmSpec:
        """Returns the algorithm's entry in the table of algorithms."""
        own = self.algorithm.arguments if isinstance(self.algorithm, AlgorithmName) else {}
        return algorithm_table.find_algorithm(self.algorithm, own)

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
    def served(self) -> dict[str, role_sections.TeacherConfig | role_sections.NamedTeacherConfig]:
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
    def mixture(self) -> algorithm_table.MixtureKind | None:
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
        late = {"feedback", "attempt"} & set(
            role_sections.template_names(self.teacher.prompt or "")
        )
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
    def loss_reads_reference(self) -> bool:
        """Returns whether the loss reads the log-probs of the reference."""
        reads = self.policy.kl_coef > 0 or self.spec.reads_reference
        return self.learns_from_rewards and reads

    @property
    def needs_reference(self) -> bool:
        penalised = self.learns_from_rewards and self.policy.reward_kl_coef > 0
        return self.loss_reads_reference or penalised

    @property
    def token_advantages(self) -> bool:
        """Returns whether the tokens of a completion have advantages of their own, before any
        teacher's."""
        by_turn = self.environment.name is not None and self.environment.credit == "turn"
        return by_turn or self.spec.token_advantages

    @cached_property
    def minibatches(self) -> int:
        """Returns the number of optimizer updates per pass over a batch. If `actor.minibatches` is
        null: the algorithm's number, or the next smaller one that divides `batch_size`."""
        if self.actor.minibatches is not None:
            return self.actor.minibatches
        own = range(self.spec.minibatches, 0, -1)
        return next(n for n in own if self.batch_size % n == 0)

    @property
    def streams(self) -> bool:
        """Returns whether the rollout begins a batch before those ahead of it have ended."""
        return self.schedule == "streaming"

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.actor.epochs_per_batch

    @cached_property
    def parts(self) -> int:
        """Returns in how many parts a batch is sampled, scored and trained, each as soon as its
        completions have ended: its minibatches where batches are streamed, else 1."""
        return self.minibatches if self.streams and self.waits_for_batch is None else 1

    def slices(self, role: str) -> int:
        """Returns the number of slices in which a role scores a batch, the same of each part."""
        asked = getattr(self.roles[role], "num_microbatches", 1)
        return -(-asked // self.parts) * self.parts

    @property
    def waits_for_batch(self) -> str | None:
        """Names what needs a whole batch before its first minibatch; None: nothing does."""
        p, d = self.policy, self.distill
        others = d.seq_kd or d.on_policy_fraction < 1
        for needed, why in (
            (self.spec.method is not None, "the algorithm's own method"),
            (
                self.only_data or (not self.learns_from_rewards and others),
                "what it does not sample",
            ),
            (self.teacher_follows, "teacher.model=policy"),
            (bool(self.teachers), "teachers"),
            (
                self.learns_from_teacher and d.signal == "student_topk",
                "distill.signal=student_topk",
            ),
            (self.batch_size % self.minibatches, "minibatches that do not divide batch_size"),
            (self.actor.epochs_per_batch > 1, "actor.epochs_per_batch"),
            (self.dynamic_sampling != "off", "policy.dynamic_sampling"),
            (p.advantages == "similarity", "policy.advantages=similarity"),
            (p.reward_combination == "normalize_then_sum", "policy.reward_combination"),
            (self.spec.advantages is not None, "the algorithm's own advantages"),
            (
                bool(self.spec.metrics_asking(algorithm_table.INPUTS)),
                "a metric of the algorithm's own",
            ),
        ):
            if needed:
                return why
        return None

    @property
    def correction(self) -> tuple[str, ...]:
        """Returns the names of the off-policy corrections."""
        if self.policy.correction is not None:
            return self.policy.correction
        lags = self.schedule != "serial" and not self.policy.bypass
        return ("tis_token",) if lags else ("none",)

    @property
    def rewards(self) -> role_sections.RewardConfig:
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


def _run_rules(c: Config) -> Iterator[Rule]:
    yield from run_rules(c)
    yield (
        c.staleness != 1 and not c.streams,
        "staleness schedule",
        "the lag of another schedule is fixed",
        "schedule=streaming, or staleness=1",
    )
    d, own = c.distill, c.spec.signal is not None
    yield (
        c.learns_from_teacher and own != (d.signal == "own"),
        "algorithm distill.signal",
        "the algorithm has its own signal" if own else "the algorithm has no `signal`",
        "distill.signal=own" if own else "distill.signal=hidden, or an algorithm with a signal",
    )
    if own and c.learns_from_teacher:
        more = "an algorithm without a signal"
        of_signals = [f"distill.{key}" for key in ("jsd_beta", "lean", "entropy_aware", "mixture")]
        of_signals += [f"teacher.{key}" for key in ("address", "cache", "tokenizer")]
        why = "it has its own signal and loss"
        yield from unread(c, (*of_signals, "teachers"), "algorithm", why, more)
    if c.spec.divergence is not None:
        more = "an algorithm without one"
        yield from unread(c, ["distill.jsd_beta"], "algorithm", "it has its own divergence", more)
        why = "the algorithm's divergence needs the teacher's distribution, not one sampled token's"
        alone = c.distill.signal == "sampled" and c.learns_from_teacher
        yield alone, "algorithm distill.signal", why, "distill.signal=hidden, or topk"
    if not c.learns_from_teacher:
        more = "distill_weight above 0" if c.learns_from_rewards else "an algorithm that has one"
        yield from unread(c, KEYS, "algorithm", "it has no teacher", more)
    yield (
        c.spec.learns_from == "teacher" and c.sampling.temperature == 0 and c.group_size > 1,
        "group_size sampling.temperature",
        "greedy completions of a prompt are all the same",
        "sampling.temperature above 0, or group_size=1",
    )
    allowed = c.resume_changed if isinstance(c.resume_changed, tuple) else ()
    paths = [key.path for key in config_keys.keys(type(c))]
    sections = [group.path for group in config_keys.groups(type(c)) if group.path]
    for word in allowed:
        named = config_keys.under(word, paths) or any(
            config_keys.under(path, [word]) for path in paths
        )
        hint = near(word, [*sections, *paths])
        yield not named, f"resume_changed names {word!r}{hint}, which is no key or section"
    longer = c.environment.name is not None and (c.environment.turn_tokens or 0) > c.max_new_tokens
    why = "a turn may be longer than the whole episode"
    yield longer, "environment.turn_tokens max_new_tokens", why, "a lower turn_tokens"
    if c.learns_from_rewards:
        yield from _reward_rules(c)
    else:
        keys = ASK_FOR_REWARDS if c.spec.method is None else ASK_FOR_REWARDS[:3]
        more = "an algorithm that does, such as gspo"
        yield from unread(c, keys, "algorithm", "it learns from no reward", more)
    longest = max(c.max_new_tokens, c.eval.max_new_tokens or 0)
    yield (
        (c.rollout.cache_tokens or longest) < longest,
        "rollout.cache_tokens",
        "it does not hold the longest completion (max_new_tokens, eval.max_new_tokens)",
        f"it to {longest} at least, or to null",
    )
    merges = c.rollout.merge and not c.trains_adapters
    yield merges, "rollout.merge student.lora.rank", "there are no adapters to be added"
    why, way = "it reaches beyond the last step", f"a stop of at most {c.steps + 1}"
    yield c.profile.range.stop > c.steps + 1, "profile.steps steps", why, way
    yield (
        c.minibatches > c.batch_rows,
        "actor.minibatches batch_size" + ("" if c.only_data else " group_size"),
        f"a batch has {c.batch_rows} sequences",
        f"actor.minibatches to {c.batch_rows} at most",
    )


def _reward_rules(c: Config) -> Iterator[Rule]:
    p, d = c.policy, c.distill
    similar, by_turn = p.advantages == "similarity", c.environment.credit == "turn"
    yield (
        c.dynamic_sampling == "refill" and c.schedule != "serial",
        "policy.dynamic_sampling schedule",
        "a batch is only complete once its rewards are known",
        "schedule=serial, or policy.dynamic_sampling=drop",
    )
    judged = c.reward.functions or c.reward.model or (c.environment.name and c.environment.weight)
    yield (
        not judged,
        "algorithm",
        "it learns from rewards",
        "reward.functions, as in reward.functions=[math], or reward.model, or environment.name",
    )
    why = "one compares turns, the other whole completions"
    yield similar and by_turn, "environment.credit policy.advantages", why
    if c.spec.advantages is not None:
        keys = ("policy.advantages", "policy.scale_by_std", "policy.reward_combination")
        more = "an algorithm without them"
        why = "it has its own advantages"
        yield from unread(c, (*keys, "environment.credit"), "algorithm", why, more)
    for key, given in (("policy.advantages", similar), ("environment.credit", by_turn)):
        two = given and p.reward_combination == "normalize_then_sum"
        why = "both decide what a reward is compared with"
        yield two, f"policy.reward_combination {key}", why
    weights = c.policy_weight, c.distill_weight, p.kl_coef, p.entropy_coef
    why = "no term of the loss has a weight"
    yield not any(weights), "policy_weight distill_weight", why, "policy_weight=1"
    why = "it compares the completions of a prompt"
    yield c.group_size < 2, "algorithm group_size", why, "group_size to at least 2"
    yield (
        c.sampling.truncated,
        "algorithm",
        "it needs every token's probability under the policy that sampled",
        "sampling.temperature above 0, top_k=0, top_p=1 and min_p=0",
    )
    beyond, key = (c.reward.overlong_buffer or 0) > c.max_new_tokens, "reward.overlong_buffer"
    why = "the penalty zone exceeds the longest completion"
    yield beyond, f"{key} max_new_tokens", why, "a smaller overlong_buffer"
    yield (
        similar and c.grouper.model is None,
        "policy.advantages grouper.model",
        "it needs an encoder",
        "grouper.model, as in grouper.model=sentence-transformers/all-MiniLM-L6-v2",
    )
    yield (
        d.on_policy_fraction < 1 or d.seq_kd,
        "algorithm distill.on_policy_fraction distill.seq_kd",
        "it learns from its own samples",
        "distill.on_policy_fraction=1 and distill.seq_kd=false",
    )
    why = "it reads the teacher's log-prob of the sampled token"
    sampled = p.opd_coef > 0 and d.signal != "sampled"
    yield sampled, "policy.opd_coef distill.signal", why, "distill.signal=sampled"
