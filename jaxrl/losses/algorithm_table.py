"""What is known of each algorithm before anything runs: its loss and the defaults of its paper.

One entry an algorithm, and the only place that names them: `Config` takes its defaults from here,
`losses.policy` its formulas, `algorithms.methods` the roles that take part. An entry may also
stand in a module of the user's own, as in `algorithm=my_module.py:my_algorithm`.

In the formulas r is the ratio pi_theta / pi_old of a token, d = log r, s = exp(mean_t d), A the
advantage, |y| the completion's length in tokens; each is maximised.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxrl.errors import UserError, about, near, shown, unknown
from jaxrl.process.plugin import BoundFunction, bind_arguments, is_plugin, load_object

LearnsFrom = Literal["teacher", "data", "rewards"]
MixtureKind = Literal["arithmetic", "geometric"]
"""How the distributions of several teachers become one (`losses.head`)."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: the names of its parts, as `losses.policy.make_objective` takes them."""

    formula: str
    """What is maximised, and the paper's number."""
    term: str | Callable[..., Any]
    """A name of `losses.policy.TERMS`, or the user's own: a function (tokens, level) ->
    `losses.policy.TermOutput`, or a class that makes one, called with `settings`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The term's own numbers. `policy.*` changes those that it has a key for,
    `algorithm.arguments` any of the user's own."""
    ratio: str = "token"
    """A name of `losses.policy.RATIOS`."""
    aggregation: str = "sequence_mean_token_mean"
    """A name of `losses.policy.AGGREGATIONS`."""
    constant: float | None = None
    """What the aggregation sum_over_constant divides by, in tokens. None: `max_new_tokens`."""


@dataclass(frozen=True)
class SignalSpec:
    """What a teacher sends for each token (`distill.signal=own`), and the loss that the student
    computes of it."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(hash=False)
    """Name -> dtype and shape of what is sent for a token."""
    send: Callable[..., Any]
    """(logprobs, tokens) -> name -> [n, *shape], of the teacher's log-probs [n, V], nats, and the
    ids of the n tokens."""
    loss: Callable[..., Any]
    """(logprobs, tokens, sent) -> [n], nats, of the student's log-probs; it is differentiated."""

    def __post_init__(self) -> None:
        if not self.tensors:
            raise UserError("tensors: a signal has at least one")
        for name, form in self.tensors.items():
            if not (isinstance(form, tuple) and len(form) == 2 and isinstance(form[1], tuple)):
                raise UserError(
                    f"tensors: {name!r}: a dtype and a shape are needed, as in"
                    f' ("float32", (4,)), got {shown(form)}'
                )


@dataclass(frozen=True)
class AlgorithmSpec:
    """One algorithm, with the settings of its paper's loss and updates. A KL to the reference
    (`policy.kl_coef`) is no part of it: GRPO's paper trains with 0.04."""

    learns_from: LearnsFrom
    """A teacher that scores the student's samples, the data's completions, or rewards."""
    loss: PolicyLoss | None = None
    """Where it learns from rewards."""
    minibatches: int = 1
    """Optimizer updates per rollout batch. With one, every ratio pi_theta / pi_old is 1."""
    scale_by_std: bool = True
    """Whether the group advantage is divided by the standard deviation."""
    dynamic_sampling: bool = False
    """Whether groups without any difference in reward are left out and others are sampled."""
    overlong_share: float = 0.0
    """The last share of `max_new_tokens`, in which a penalty grows with the length."""
    method: object = field(default=None, compare=False)
    """How the loop runs it (`algorithms.methods.Method`). None: as all that learn from the same."""
    divergence: Callable[..., Any] | None = None
    """In place of the generalised JSD (`distill.jsd_beta`): a function (student, teacher) ->
    summands, log-probs and what each outcome adds, [..., V], which is differentiated; or a class,
    a `losses.divergence.Divergence` with a gradient of its own."""
    signal: SignalSpec | None = None
    """With `distill.signal=own`: what the teacher sends, and the loss in place of a divergence."""
    advantages: Callable[..., Any] | None = None
    """In place of `advantages.group_advantages`: a function (rewards, group_ids) -> [N], or with
    `token_advantages` [N, C], of the N rewarded completions, on the host. It may ask for more
    (`INPUTS`)."""
    token_advantages: bool = False
    """Whether `advantages` has one for each token of a completion."""
    reads_reference: bool = False
    """Whether the loss's term, or a metric, reads `Tokens.ref_logprobs`, whatever
    `policy.kl_coef`."""
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Name -> function of what is reported as `algorithm/NAME`, by what it asks for: (student,
    teacher) as a divergence; (tokens) -> [B, T], a value of each token that trains; or (`INPUTS`)
    -> a number, on the host."""

    def __post_init__(self) -> None:
        if self.learns_from not in get_args(LearnsFrom):
            raise unknown("learns_from", str(self.learns_from), get_args(LearnsFrom))
        if self.learns_from == "rewards" and self.loss is None and self.method is None:
            raise UserError("an algorithm that learns from rewards needs a loss or a method")
        if self.minibatches < 1:
            raise UserError(f"minibatches={self.minibatches}: a batch takes at least one update")
        if not 0 <= self.overlong_share <= 1:
            raise UserError(f"overlong_share={self.overlong_share:g} is a share: 0 to 1")
        rewarded = self.learns_from == "rewards"
        for name in ("advantages", "token_advantages", "reads_reference"):
            if getattr(self, name) and not rewarded:
                raise UserError(f"{name} is for an algorithm that learns from rewards")
        taught = self.divergence is not None or self.signal is not None
        if taught and self.learns_from == "data":
            raise UserError("divergence and signal are for what learns from a teacher, or rewards")
        if self.divergence is not None and self.signal is not None:
            raise UserError("signal has a loss in place of a divergence: leave one of them out")
        if self.token_advantages and self.advantages is None:
            raise UserError("token_advantages is about advantages, which is not set")
        for name, function in {
            "divergence": self.divergence,
            "advantages": self.advantages,
        }.items():
            if function is not None and not callable(function):
                raise UserError(f"{name} must be a function, this is {shown(function)}")
        for name, function in self.metrics.items():
            if re.fullmatch(r"\w+", name) is None or not callable(function):
                raise UserError(f"metrics: {name!r}: {shown(function)}: a name and a function")

    def bind(self, arguments: Mapping[str, Any]) -> AlgorithmSpec:
        """Returns the spec whose functions have these arguments, each those that it has parameters
        for.

        Raises:
            UserError: a signature does not fit, an argument is missing, or none has it.
        """
        known = set[str]()

        def bound(what: str, call: Any, *required: str, known_inputs: Sequence[str] = ()) -> Any:
            return bind_arguments(call, what, required, known_inputs or required, arguments, known)

        made: dict[str, Any] = {"metrics": {}}
        if self.divergence is not None:
            own = () if isinstance(self.divergence, type) else PAIR
            made["divergence"] = bound("divergence", self.divergence, *own)
        if self.signal is not None:
            own_signal = {
                name: bound(f"signal {name}", getattr(self.signal, name), *inputs)
                for name, inputs in (("send", SENT_OF), ("loss", (*SENT_OF, "sent")))
            }
            made["signal"] = replace(self.signal, **own_signal)
        if self.advantages is not None:
            asks = {"known_inputs": INPUTS}
            made["advantages"] = bound("advantages", self.advantages, *INPUTS[:2], **asks)
        for name, function in self.metrics.items():
            kinds = (PAIR, TOKENS, INPUTS)
            asked = parameters_of(function)
            kind = next((kind for kind in kinds if asked & {*kind}), INPUTS)
            need = kind if kind is not INPUTS else ()
            made["metrics"][name] = bound(f"metric {name}:", function, *need, known_inputs=kind)
        if self.loss is not None and not isinstance(self.loss.term, str):
            settings = parameters_of(self.loss.term) - {*TERM}  # checked by make_objective
            known |= settings
            given = {name: value for name, value in arguments.items() if name in settings}
            made["loss"] = replace(self.loss, settings={**self.loss.settings, **given})
        for name in arguments:
            if name not in known:
                has = f": {', '.join(sorted(known))}" if known else ""
                hint = near(name, known) or has
                raise UserError(f"algorithm.arguments: no function takes {name!r}{hint}")
        return replace(self, **made)

    def metrics_asking(self, inputs: tuple[str, ...]) -> dict[str, BoundFunction]:
        """Returns the metrics, of a bound spec, that ask for some of these."""
        bound = {k: one for k, one in self.metrics.items() if isinstance(one, BoundFunction)}
        return {name: one for name, one in bound.items() if {*one.inputs} & {*inputs}}

    def only_data(self, on_policy_fraction: float | None, seq_kd: bool | None) -> bool:
        """Returns whether every batch holds the data's completions, one for each prompt. False
        for a method of the user's own, of which nothing is known.

        Args:
            on_policy_fraction, seq_kd: the keys of `distill`.
        """
        off_policy = self.learns_from == "teacher" and on_policy_fraction == 0 and not seq_kd
        return self.method is None and (self.learns_from == "data" or off_policy)


OWN = "algorithm"
"""Begins the names of the metrics of an algorithm's own."""
PAIR = ("student", "teacher")
"""Log-probs, nats, [..., V] float32: what a divergence asks for."""
SENT_OF = ("logprobs", "tokens")
"""What the functions of a signal ask for."""
TOKENS = ("tokens",)
"""`losses.policy.Tokens`."""
TERM = ("tokens", "level")
"""What a term asks for, as in `losses.policy`."""
INPUTS = (
    *("rewards", "group_ids", "lengths", "truncated", "per_reward", "completions", "prompts"),
)
"""What functions on the host may ask for, of the N completions that have a reward, rewards and
groups first: task reward plus penalties, float64 [N]; the group of each, int [N]; tokens, int [N];
whether it was cut at max_new_tokens, bool [N]; name -> unweighted rewards [N] (NaN: none); lists of
`types.Completion` and `types.Prompt`."""


def parameters_of(function: Callable[..., Any]) -> set[str]:
    """Returns the names of a function's parameters, or of those that a class is made with; none
    where nothing tells."""
    try:
        return {*inspect.signature(function).parameters}
    except (TypeError, ValueError):  # `bind_arguments` says so
        return set()


def _clipped(formula: str, low: float, high: float, **parts: Any) -> PolicyLoss:
    return PolicyLoss(formula, "clipped", {"clip_low": low, "clip_high": high}, **parts)


_GRPO = _clipped("min(r A, clip(r) A), mean over sequences of token means; 2402.03300", 0.2, 0.2)
_GSPO = _clipped(
    "min(s A, clip(s) A), mean over sequences; 2507.18071", 3e-4, 4e-4, ratio="sequence"
)

# Updates per rollout batch: DeepSeekMath (2402.03300) makes a single one; the recipe of Dr. GRPO
# and GMPO trains on 1024 completions in 8 parts of 128; DAPO on 512 prompts x 16 in 16 parts;
# CISPO is compared with it in 16 rounds; GSPO, SAPO and LUSPO split each batch into 4.
ALGORITHMS: dict[str, AlgorithmSpec] = {
    "gkd": AlgorithmSpec("teacher"),
    "sft": AlgorithmSpec("data"),
    "grpo": AlgorithmSpec("rewards", _GRPO),
    "dr_grpo": AlgorithmSpec(
        "rewards",
        replace(
            _GRPO,
            formula="GRPO's with A = R - mean, sum over tokens / constant; 2503.20783",
            aggregation="sum_over_constant",
        ),
        minibatches=8,
        scale_by_std=False,
    ),
    "dapo": AlgorithmSpec(
        "rewards",
        _clipped(
            "GRPO's with a higher upper bound, mean over all tokens; 2503.14476",
            0.2,
            0.28,
            aggregation="token_mean",
        ),
        minibatches=16,
        dynamic_sampling=True,
        overlong_share=0.2,
    ),
    "gspo": AlgorithmSpec("rewards", _GSPO, minibatches=4),
    "gspo_token": AlgorithmSpec(
        "rewards",
        replace(
            _GSPO,
            formula="GSPO's with s_t = sg(s) pi_t / sg(pi_t), for advantages per token; 2507.18071",
            ratio="sequence_token",
        ),
        minibatches=4,
    ),
    "cispo": AlgorithmSpec(
        "rewards",
        PolicyLoss(
            "sg(min(r, ratio_cap)) A log pi, mean over all tokens; 2506.13585",
            "capped",
            {"ratio_cap": 5.0},
            aggregation="token_mean",
        ),
        minibatches=16,
    ),
    "sapo": AlgorithmSpec(
        "rewards",
        PolicyLoss(
            "sigmoid(tau (r - 1)) (4 / tau) A, mean over sequences of token means; 2511.20347",
            "soft",
            {"tau_positive": 1.0, "tau_negative": 1.05},
        ),
        minibatches=4,
    ),
    "gmpo": AlgorithmSpec(
        "rewards",
        PolicyLoss(
            "A exp(mean_t of d clipped on the side of sign(A)), mean over sequences; 2507.20673",
            "log_clipped",
            {"clip_log": 0.4},
            ratio="sequence",
        ),
        minibatches=8,
    ),
    "luspo": AlgorithmSpec(
        "rewards",
        _clipped(
            "|y| times GSPO's, mean over sequences; 2602.05261",
            2e-3,
            2.5e-3,
            ratio="sequence",
            aggregation="sum_over_constant",
            constant=1.0,
        ),
        minibatches=4,
    ),
}
DEFAULT = "gkd"

_PREFERENCES = (
    "learns from pairs of ranked answers, and jaxrl has no algorithm of the DPO family."
    " To learn the preferred answers use sft; to learn from a reward model set reward.model and"
    " an algorithm such as grpo"
)
_CRITIC = (
    "needs a critic, which jaxrl does not have; grpo, dapo and gspo have PPO's clipped objective"
    " with advantages from the group of a prompt"
)
_BASELINE = (
    "is not here; dr_grpo is the closest: the reward minus the mean of its group, no division by"
    " the standard deviation"
)
_PREFERRED = ("dpo", "ipo", "kto", "bco", "orpo", "simpo", "cpo", "online_dpo", "xpo", "nash_md")
_OTHERS = {
    **dict.fromkeys(_PREFERRED, _PREFERENCES),
    **dict.fromkeys(("ppo", "vapo", "gae", "a2c", "trpo"), _CRITIC),
    **dict.fromkeys(("rloo", "remax", "opo", "gpg", "reinforce"), _BASELINE),
    "gdpo": "is grpo here, with policy.reward_combination=normalize_then_sum",
    **dict.fromkeys(("opd", "on_policy_distillation", "distillation", "gold"), "is gkd here"),
    **dict.fromkeys(
        ("opsd", "sdft", "self_distillation"),
        "is gkd here, with teacher.model=policy and teacher.prompt (docs/self-distillation.md)",
    ),
}
"""Algorithms of other libraries -> the end of the sentence about them."""


def find_algorithm(name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> AlgorithmSpec:
    """Finds an entry of the table, or of a module (`path/to/file.py:NAME`, `package.module:NAME`).

    Args:
        arguments: of its functions.

    Raises:
        UserError: there is no such entry, or its functions do not take the arguments.
    """
    if name in ALGORITHMS:
        if arguments:
            raise UserError(
                f"algorithm.arguments: {', '.join(arguments)}: algorithm={name} has no functions of"
                " yours that take arguments; its numbers are the keys policy.* and distill.*"
            )
        return ALGORITHMS[name]
    if not is_plugin(name):
        plain = re.sub(r"[^a-z0-9+]+", "_", name.lower())
        if plain in ALGORITHMS:
            raise UserError(f"unknown algorithm {name!r}: write {plain}")
        kind = "reinforce" if plain.startswith("reinforce") else plain  # ++, _plus_plus_baseline
        if kind in _OTHERS:
            raise UserError(f"algorithm={name} {_OTHERS[kind]}")
        raise unknown("algorithm", name, ALGORITHMS)
    spec = load_object(name)
    if not isinstance(spec, AlgorithmSpec):
        raise UserError(
            f"{name} is of type {type(spec).__name__}; it must be a jaxrl.losses.algorithm_table."
            "AlgorithmSpec"
        )
    with about(name):
        return spec.bind(arguments)


def describe_algorithms() -> str:
    """Describes what the config's key `algorithm` takes."""
    of: dict[str, list[str]] = {}
    for name, spec in ALGORITHMS.items():
        of.setdefault(spec.learns_from, []).append(name)
    return (
        f"{', '.join(of['teacher'])}: distil a teacher on the student's own samples."
        f" {', '.join(of['data'])}: learn the data's completions, without a teacher."
        f" {', '.join(of['rewards'])}: learn from rewards. `path/to/file.py:NAME` or"
        " `package.module:NAME`: your own algorithm (docs/add-an-algorithm.md); a relative"
        " path starts at the folder of the file that names it, on the command line at the working"
        " directory. `algorithm.arguments={alpha: 0.1}` gives its functions arguments; in a file:"
        " `algorithm: {name: FILE.py:NAME, arguments: {alpha: 0.1}}`."
    )
