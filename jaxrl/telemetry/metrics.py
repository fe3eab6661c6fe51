"""The numbers of a run: the one table of their names, and the writers of its two JSON files.

    python -m jaxrl.telemetry.metrics > docs/metrics.md

``metrics.jsonl`` holds one JSON object a step. The row of ``step: 0`` carries the first evaluation.
A value that is not finite is written as null, for JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self, SupportsFloat

from jaxrl.config import cli
from jaxrl.errors import UserError, near, user_path
from jaxrl.process import atomic_files
from jaxrl.process.json_types import JsonObject, parse_json
from jaxrl.process.streams import to_stderr
from jaxrl.telemetry.lines import LineFile

if TYPE_CHECKING:
    from jaxrl.types import Completion, Prompt

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Metric:
    """What a name in ``metrics.jsonl`` means."""

    unit: str
    meaning: str


PLACEHOLDERS = {
    "reward": r"\w+",
    "role": "actor|rollout|teacher|reference|reward|grouper",
    "k": "[1-9][0-9]*",
    "set": "[A-Za-z0-9_.-]+",
    "teacher": "[A-Za-z0-9_.-]+",
}
"""What may stand for the variable part of a name in ``METRICS``."""


def _evaluation(prefix: str, where: str) -> dict[str, Metric]:
    """Makes the rows for evaluations on one set of held-out prompts, or on all of them."""
    rates = {}
    for name, meaning in (
        (f"{prefix}/accuracy", f"mean verifier score on {where} (mean@k)"),
        (
            f"{prefix}/pass@{{k}}",
            f"chance that at least one of k samples is right, on {where}; over the prompts whose"
            f" samples are all judged",
        ),
    ):
        rates[name] = Metric("fraction", meaning)
        for end, word in (("low", "lower"), ("high", "upper")):
            interval = f"{word} end of the 95% interval of `{name}`"
            rates[f"{name}_{end}"] = Metric("fraction", interval)
    return {
        **rates,
        f"{prefix}/unjudged": Metric("completions", f"that could not be judged, on {where}"),
        f"{prefix}/mean_completion_tokens": Metric("tokens", f"mean completion length on {where}"),
        f"{prefix}/truncated_fraction": Metric(
            "fraction", f"completions cut by a limit of tokens or turns, on {where}"
        ),
        f"{prefix}/environment_reward": Metric(
            "reward",
            f"mean sum of an episode's rewards by its environment, 0 without any, on {where}",
        ),
        f"{prefix}/environment_failures": Metric(
            "episodes", f"episodes whose environment failed; they are not judged, on {where}"
        ),
    }


METRICS: dict[str, Metric] = {
    "step": Metric("batches", "batches trained on so far; 0 is the row before training"),
    "policy_version": Metric("batches", "version of the weights that sampled this batch"),
    "optimizer_step": Metric("updates", "optimizer updates so far, skipped ones not counted"),
    "staleness": Metric(
        "batches", "versions by which the weights that sampled lag behind those that train"
    ),
    "loss": Metric("nats/token", "the loss that the optimizer minimises, all terms included"),
    "distill/divergence": Metric("nats/token", "mean divergence of student and teacher"),
    "distill/{teacher}/divergence": Metric(
        "nats/token",
        "mean divergence from one of several teachers, at the tokens that learn from it (for the"
        " signal sampled, its estimate log student - log teacher); with data.teacher_key",
    ),
    "distill/{teacher}/tokens": Metric(
        "tokens", "tokens that learn from one of several teachers, times its weight in a mixture"
    ),
    "distill/top1_agreement": Metric("fraction", "tokens where both models' top-1 is the same"),
    "distill/student_entropy": Metric("nats/token", "mean entropy of the student's next token"),
    "distill/teacher_entropy": Metric("nats/token", "mean entropy of the teacher's next token"),
    "distill/teacher_tail_mass": Metric("fraction", "teacher's probability outside the top k"),
    "distill/student_tail_mass": Metric("fraction", "student's probability outside the top k"),
    "distill/reverse_kl_k1": Metric(
        "nats/token", "log student - log teacher of sampled tokens (or spans), within 20 nats"
    ),
    "distill/ratio_capped": Metric(
        "fraction", "tokens (or spans) whose importance ratio was capped"
    ),
    "distill/gap_clamped": Metric(
        "fraction",
        "sampled tokens (or spans) whose log-prob differs from the teacher's by over 20 nats,"
        " clamped to 20",
    ),
    "distill/aligned_bytes": Metric(
        "fraction", "bytes of completions in spans that both tokenizers have, and that are learned"
    ),
    "distill/exact_bytes": Metric(
        "fraction", "bytes where both tokenizers have the same token, learned without sampling"
    ),
    "distill/entropy_aware": Metric("nats/token", "the entropy-aware term, as it enters the loss"),
    "distill/entropy_gate": Metric("fraction", "tokens where the entropy-aware term acts"),
    "reward/mean": Metric("reward", "mean weighted reward of sampled completions that have one"),
    "reward/std": Metric("reward", "standard deviation of the same rewards"),
    "completions/sampled": Metric(
        "completions", "sampled for this batch, also those that are not in it; 0 where data are"
    ),
    "completions/trained": Metric(
        "completions", "that the loss learns; with rewards, the policy loss"
    ),
    "completions/replaced": Metric(
        "completions", "of `policy/prompts_replaced`: sampled for the batch, but not in it"
    ),
    "completions/dropped": Metric(
        "completions", "in the batch, of prompts that teach nothing; left out by dynamic sampling"
    ),
    "completions/masked": Metric(
        "completions", "of the others in the batch, left out by `reward.truncated=mask`"
    ),
    "reward/trained_mean": Metric(
        "reward",
        "mean over the completions in the policy loss (without those that dynamic sampling and"
        " masks leave out), after the KL penalty",
    ),
    "reward/none": Metric("completions", "without a reward: not judged, or a function failed"),
    "reward/kl": Metric("nats", "mean KL(policy||reference) of a completion, unweighted"),
    "reward/model_cut": Metric("completions", "texts whose beginning was cut for the reward model"),
    "reward/{reward}/mean": Metric("reward", "mean of one reward, unweighted"),
    "reward/{reward}/failures": Metric("completions", "its function raised, or its process ended"),
    "reward/{reward}/timeouts": Metric("completions", "its function exceeded its timeout"),
    "reward/{reward}/unjudged": Metric(
        "completions", "its function returned None: no answer, or none that it can read"
    ),
    "policy/ratio": Metric(
        "1", "mean importance ratio over tokens, at the objective's level: `policy.ratio`"
    ),
    "policy/clip_fraction": Metric("fraction", "tokens whose term is held at a bound of the ratio"),
    "policy/clip_low_fraction": Metric("fraction", "tokens held at the lower bound"),
    "policy/clip_high_fraction": Metric("fraction", "tokens held at the upper bound"),
    "policy/clip_fraction_sequences": Metric("fraction", "sequences with a clipped token"),
    "policy/old_kl_k3": Metric("nats/token", "KL(policy at the batch's start||policy), k3"),
    "policy/kl_k1": Metric("nats/token", "KL(policy||reference), k1"),
    "policy/kl_k2": Metric("nats/token", "KL(policy||reference), k2"),
    "policy/kl_k3": Metric("nats/token", "KL(policy||reference), k3"),
    "policy/entropy": Metric("nats/token", "mean entropy of the policy's next token"),
    "policy/experts_load": Metric(
        "1", "tokens at a layer's busiest expert, relative to a uniform load; mean over layers"
    ),
    "policy/experts_balance": Metric(
        "1",
        "load-balancing loss over a minibatch (a mean over micro-batches if"
        " `student.router_aux_loss_coef` is 0); k for a uniform load",
    ),
    "policy/experts_entropy": Metric("nats/token", "mean entropy of the routers of experts"),
    "policy/opd_clamped": Metric(
        "fraction",
        "tokens whose log-prob differs from the teacher's by over 20 nats, clamped to 20",
    ),
    "policy/mismatch_k3": Metric("nats/token", "KL(policy that sampled||policy at the start), k3"),
    "policy/mismatch_chi2": Metric(
        "1", "E[rho^2] - 1, rho = policy at the start / policy that sampled"
    ),
    "policy/mismatch_ess": Metric("fraction", "effective sample size by the ratio rho, per token"),
    "policy/mismatch_max_log_ratio": Metric("nats", "largest absolute log rho of a token"),
    "policy/correction_weight": Metric("1", "mean weight of the off-policy correction"),
    "policy/correction_dropped": Metric("fraction", "tokens that the correction leaves out"),
    "policy/degenerate_groups": Metric(
        "prompts", "sampled prompts with a reward in which every advantage is 0, penalties left out"
    ),
    "policy/refills": Metric("times", "times that more prompts were sampled for the batch"),
    "policy/prompts_replaced": Metric(
        "prompts", "sampled prompts that are not in the batch: those sampled are batch_size more"
    ),
    "policy/unscored_groups": Metric(
        "prompts",
        "sampled prompts without any rewarded completion: none could be judged, or a function"
        " failed",
    ),
    "similarity/groups_per_prompt": Metric("groups", "mean number of clusters of a prompt"),
    "similarity/singleton_fraction": Metric("fraction", "completions alone in their cluster"),
    "similarity/silhouette": Metric("1", "mean silhouette of the prompts that are split"),
    "similarity/unfinished_thoughts": Metric("fraction", "completions without an answer to embed"),
    "similarity/split_into_{k}": Metric("fraction", "prompts that fall into k clusters"),
    "sft/loss": Metric("nats/token", "mean negative log-likelihood of the data's completions"),
    "actor/grad_norm": Metric("norm", "gradient norm before clipping, mean over updates"),
    "actor/learning_rate": Metric("1", "learning rate of the last update, made or skipped"),
    "actor/skipped_updates": Metric("updates", "updates skipped in this step, gradient not finite"),
    "actor/empty_updates": Metric("updates", "updates skipped in this step, no token to train on"),
    "actor/tokens": Metric("tokens", "completion tokens trained in one pass over the batch"),
    "actor/padding": Metric("fraction", "padding among the tokens that updates compute"),
    "teacher/padding": Metric("fraction", "padding among the tokens that the teacher computes"),
    "teacher/prompt_tokens_mean": Metric("tokens", "mean length of prompts of `teacher.prompt`"),
    "teacher/feedback_cut": Metric(
        "completions", "completions whose feedback or text was too long for the teacher's prompt"
    ),
    "reference/padding": Metric("fraction", "padding among the tokens that the reference computes"),
    "rollout/completion_tokens_mean": Metric(
        "tokens", "mean length of a sampled completion, EOS and environments' answers included"
    ),
    "rollout/truncated_fraction": Metric(
        "fraction",
        "sampled completions cut at max_new_tokens; episodes also at environment.max_turns or"
        " turn_tokens",
    ),
    "environment/turns_mean": Metric("turns", "the policy's turns in an episode"),
    "environment/answer_tokens_mean": Metric(
        "tokens", "mean number of the environment's tokens in an episode"
    ),
    "environment/failures": Metric(
        "episodes",
        "episodes without a reward: their environment raised, ended or gave an invalid answer",
    ),
    "environment/timeouts": Metric(
        "episodes",
        "episodes without a reward, because their environment exceeded environment.timeout",
    ),
    "rollout/decode_steps": Metric("steps", "decode steps that the batch took"),
    "rollout/sent_back": Metric(
        "completions",
        "preemptions of completions because rollout.cache_tokens was used up; their tokens are"
        " prefilled again later. If there are many, raise it, or lower rollout.slots",
    ),
    "tokens/generated": Metric(
        "tokens", "completion tokens sampled for this batch, without those of environments"
    ),
    "tokens/replaced": Metric("tokens", "of `tokens/generated`, in `completions/replaced`"),
    "tokens/dropped": Metric(
        "tokens",
        "of `tokens/generated`, in `completions/dropped`; 0 where a divergence learns these",
    ),
    "tokens/masked": Metric("tokens", "likewise in `completions/masked`"),
    "tokens/per_second": Metric("tokens/s", "actor/tokens over time/step_s"),
    "time/step_s": Metric("s", "from the end of the previous update to the end of this one"),
    "time/environment_s": Metric("s", "part of rollout_s in which all slots waited for answers"),
    "time/rollout_s": Metric("s", "generating the batch"),
    "time/score_s": Metric("s", "scoring by the teacher"),
    "time/reference_s": Metric("s", "log-probs under the reference"),
    "time/reward_s": Metric("s", "computing all rewards of the batch"),
    "time/embed_s": Metric("s", "embedding the completions, loading the encoder included"),
    "time/update_s": Metric("s", "forward, backward and optimizer, all updates of the batch"),
    "time/weight_sync_s": Metric("s", "sending new weights to the rollout"),
    "time/teacher_sync_s": Metric("s", "sending the policy or its moving average to the teacher"),
    "time/evaluate_s": Metric("s", "evaluation"),
    "weights/sync_bytes": Metric("bytes", "bytes copied in the weight sync, without shared arrays"),
    "weights/sync_gbps": Metric("GB/s", "sync_bytes over time/weight_sync_s, GB = 1e9 bytes"),
    "weights/damaged_arrays": Metric(
        "count", "arrays that arrived with another checksum and were read again"
    ),
    "weights/teacher_sync_bytes": Metric("bytes", "copied to the teacher, without shared arrays"),
    "time/checkpoint_s": Metric("s", "writing the newest checkpoint, in parallel with training"),
    "checkpoint/step": Metric("batches", "step of the newest finished checkpoint"),
    "checkpoint/bytes": Metric("bytes", "size of the newest finished checkpoint"),
    **_evaluation("eval", "the held-out prompts (of several sets the mean, of counts the sum)"),
    **_evaluation("eval/{set}", "the held-out set of that name, where `data.eval` names several"),
    "teacher/accuracy": Metric("fraction", "the teacher's accuracy on the same prompts, step 0"),
    "offload/to_host_bytes": Metric("bytes", "bytes moved to pinned host memory during the step"),
    "offload/to_device_bytes": Metric("bytes", "bytes moved back to the devices during the step"),
    "time/offload_s": Metric("s", "time that calls waited for these transfers, without overlap"),
    "data/epoch": Metric("passes", "passes over the training data, with a fraction"),
    "compile/programs": Metric(
        "programs",
        "programs that the processes of the run compiled since the previous row, or read from the"
        " compilation cache: none after the first steps, except for new lengths",
    ),
    "time/compile_s": Metric("s", "the time that took, summed over threads and processes"),
    "memory/{role}/peak_bytes": Metric(
        "bytes",
        "peak memory so far of the role's fullest device, all roles there together, as the device"
        " reports it, or by the ledger (docs/hybrid.md) if it reports none (CPU)",
    ),
    "memory/{role}/planned": Metric(
        "flag", "1 if peak_bytes is the planned value, since nothing was measured"
    ),
}
"""Every name that may stand in a row; ``{...}`` stands for what ``PLACEHOLDERS`` says."""
_PATTERNS = tuple(
    (
        re.compile(re.sub(r"\\{(\w+)\\}", lambda m: f"({PLACEHOLDERS[m[1]]})", re.escape(name))),
        metric,
    )
    for name, metric in METRICS.items()
    if "{" in name
)

_WHOLE = ("programs", "batches", "updates", "steps", "bytes", "completions", "flag")
"""Units that are counts: written without a decimal point."""

Value = SupportsFloat | None
Row = dict[str, int | float | None]


def find_metric(name: str) -> Metric | None:
    """Finds a name in the table; None where it is not there."""
    if name in METRICS and "{" not in name:
        return METRICS[name]
    matches = (metric for pattern, metric in _PATTERNS if pattern.fullmatch(name))
    return next(matches, None)


def _row(step: int, metrics: Mapping[str, Value]) -> Row:
    """Returns a row of Python numbers, of jax and numpy scalars too; null where not finite."""
    if metrics.get("step", step) != step:
        raise ValueError(f"row of step {step} carries step={metrics['step']}")
    row: Row = {"step": step}
    for name, value in metrics.items():
        metric = find_metric(name)
        if metric is None:
            hint = near(name, METRICS)
            raise ValueError(f"metric {name!r} is not documented in METRICS{hint}")
        number = math.nan if value is None else float(value)
        whole = isinstance(value, int) or (metric.unit in _WHOLE and number.is_integer())
        number = value if isinstance(value, int) else number  # which float32 may not hold
        row[name] = int(number) if whole else number if math.isfinite(number) else None
    return row


class JsonLines(LineFile):
    """A file of JSON objects, one a line, each with a ``step`` that never falls."""

    def __init__(
        self, path: str | Path, after: int | None = None, notify: Callable[[str], None] = to_stderr
    ) -> None:
        """
        Args:
            after: continue after the file's rows up to this step; later ones and a torn last line
                are cut, and a damaged file is moved aside. None: a new file.
            notify: takes what a user should know of the file.
        """
        self.first: Row | None = None
        """The first row of the run, as in the file; None where there is none yet."""
        self.last: Row | None = None
        self._step = -1 if after is None else after
        """The step that the next row of metrics must exceed."""
        super().__init__(path, notify, None if after is None else self._keep)

    def _keep(self, file: IO[bytes]) -> int:
        """Returns the bytes of the rows to keep; one line at a time is in memory.

        A file with damage among them is moved aside whole; the rows before it are copied back.
        """
        size, last = 0, -1
        for number, line in enumerate(file, start=1):
            try:
                row = _parse(self._path, number, line)
            except UserError as error:
                killed = line.startswith(b"{") and not line.endswith(b"\n")  # while it was written
                if last < self._step and not killed:
                    aside = atomic_files.move_aside(self._path)
                    shutil.copyfile(aside, self._path)
                    self._notify(
                        f"{error}; that file is now {aside}, and {self._path.name} has the"
                        f" {number - 1} rows before"
                    )
                break
            if row["step"] > self._step or not line.endswith(b"\n"):
                break
            self.first, self.last, last = self.first or row, row, row["step"]
            size += len(line)
        return size


def held_out_reward(row: Mapping[str, Any], prefix: str = "eval/") -> float | None:
    """Returns the reward that an environment gave held-out episodes, where it says something: it is
    not 0, as it is of an environment without rewards, or nothing else judges them."""
    reward: float | None = row.get(f"{prefix}environment_reward")
    return reward if reward or f"{prefix}accuracy" not in row else None


class MetricsWriter(JsonLines):
    """Appends rows to ``metrics.jsonl``, each at once; steps rise, names stand in ``METRICS``. Of
    the rows only the first and the last stay in memory. One thread writes."""

    def write(self, step: int, metrics: Mapping[str, Value]) -> Row:
        """Writes and returns the row of one step."""
        row = _row(step, metrics)
        if step <= self._step:
            raise ValueError(f"step {step} after step {self._step}: steps must rise")
        self._step = step
        self.first, self.last = self.first or row, row
        self.append([json.dumps(row, allow_nan=False)])
        return row

    def amend(self, step: int, metrics: Mapping[str, Value]) -> Row:
        """Adds to the newest row, which must be of ``step``; returns all of it."""
        old = self.last
        assert old is not None and old["step"] == step, f"the newest row is not of step {step}"
        self.last = old | _row(step, metrics)
        if self.first is old:
            self.first = self.last
        self.replace_last(*(json.dumps(row, allow_nan=False) for row in (old, self.last)))
        return self.last


def _parse(path: Path, number: int, line: str | bytes) -> JsonObject:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise UserError(f"{path}, line {number}: no object with a step")
    return row


def read_metrics(run: str | Path) -> list[JsonObject]:
    """Returns the rows of a run, but for a torn last line.

    Args:
        run: a run directory or its ``metrics.jsonl``.
    """
    path = user_path(run)
    path = path / METRICS_FILE if path.is_dir() else path
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file")
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            # Every whole line ends with a newline; what follows the last one is torn (or empty).
            whole = (line for line in file if line.endswith("\n"))
            return [_parse(path, number, line) for number, line in enumerate(whole, start=1)]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: no {METRICS_FILE} of a run") from error


@dataclass(frozen=True)
class Sample:
    """One completion as ``samples.jsonl`` and the console show it."""

    step: int
    """Batches trained when it was shown; 0 is before training."""
    split: Literal["train", "data", "eval"]
    """`data`: trained on as the data or a store of samples has it; the policy or a teacher sampled
    it nowhere in this run."""
    prompt: str
    completion: str
    finish_reason: str
    """`stop` or `length`."""
    tokens: int
    """Length of the completion, EOS included."""
    policy_version: int
    """Batches trained into the weights that sampled it; -1: from the data or the teacher."""
    answer: str | None = None
    """What the verifier compares with."""
    score: float | None = None
    """The verifier's score in [0, 1]; null where nothing judged it."""
    reward: float | None = None
    """What the completion was rewarded with, where the algorithm learns from rewards; else, of an
    episode, the sum of its turns' rewards."""
    agreement: float | None = None
    """Share of its tokens where student and teacher had the same most probable token when it was
    trained on; null where nobody counted."""
    turns: tuple[JsonObject, ...] | None = None
    """Of an episode each turn's role, content and reward; null for a completion of one turn."""
    failure: str | None = None
    """Why an episode's environment could not go on."""

    @property
    def judged(self) -> str:
        """Returns the reward that it was trained with, else the verifier's score, or ''."""
        if self.reward is not None:
            return f"reward {self.reward:.2g}"
        return "" if self.score is None else f"score {self.score:.2g}"

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        completion: Completion,
        *,
        step: int,
        split: Literal["train", "data", "eval"],
        policy_version: int,
        score: float | None = None,
        reward: float | None = None,
    ) -> Self:
        turns = completion.turns
        given = [turn.reward for turn in turns if turn.reward is not None]
        shown = [{"role": t.role, "content": t.text, "reward": t.reward} for t in turns]
        return cls(
            step=step,
            split=split,
            prompt=prompt.text,
            completion="\n".join(f"[{t.role}] {t.text}" for t in turns) or completion.text,
            finish_reason=completion.finish_reason,
            tokens=len(completion.tokens),
            policy_version=policy_version,
            answer=prompt.answer,
            score=score,
            reward=sum(given) if reward is None and given else reward,
            turns=tuple(shown) or None,
            failure=completion.failure,
        )


def write_samples(file: JsonLines, samples: Sequence[Sample]) -> None:
    """Appends completions to ``samples.jsonl``, a line each, all of them at once."""
    rows = [dataclasses.asdict(sample) for sample in samples]
    for row in rows:  # null, as in metrics
        row |= {n: None for n, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    file.append([json.dumps(row, ensure_ascii=False) for row in rows])


def metrics_page() -> str:
    """Returns the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every name that a row of `metrics.jsonl` may have, and with it TensorBoard, wandb and",
        "mlflow (which writes `@` as `_at_`). Made from the table in",
        "[jaxrl/telemetry/metrics.py](../jaxrl/telemetry/metrics.py) by",
        "`python -m jaxrl.telemetry.metrics > docs/metrics.md`.",
        "",
        "A row has the names that its step measured. `null` is a value that was not finite.",
        "`{role}` is a role of the run, `{set}` a name in `data.eval`, `{k}` a number of samples:",
        "the powers of two up to `eval.samples`, and `eval.samples` itself.",
        "",
        "What is sampled for a batch may not all be in it (`policy.dynamic_sampling=refill`), and",
        "the loss may leave out a part of the batch. `rollout/`, `environment/`, `reward/`,",
        "`policy/..._groups` and `tokens/generated` are of everything that was sampled;",
        "`reward/kl`, `reward/trained_mean`, `similarity/`, `distill/`, `actor/` and the rest of",
        "`policy/` are of the batch. With rewards, what was sampled is trained on or left out for",
        "one of three reasons:",
        "",
        "    completions/sampled = trained + replaced + dropped + masked   (all of completions/)",
        "    tokens/generated = actor/tokens + replaced + dropped + masked (all of tokens/)",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items()
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    cli.Parser("jaxrl.telemetry.metrics", "Prints the page docs/metrics.md.").parse(argv)
    print(metrics_page(), end="")


if __name__ == "__main__":
    sys.exit(cli.run(main))
