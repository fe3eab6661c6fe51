"""Calls the functions of a user's own algorithm on small arrays, as a run will: what they take,
return and cannot be traced with is then known before a model is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.methods import objective_of
from jaxrl.algorithms.sampled_batch import as_floats
from jaxrl.config.schema import Config
from jaxrl.errors import user_input
from jaxrl.losses.algorithm_table import INPUTS, PAIR, TOKENS, SignalSpec
from jaxrl.losses.divergence import MIN, SummedDivergence, make_divergence
from jaxrl.losses.policy import RATIOS, Objective, TermOutput, Tokens, policy_loss
from jaxrl.process.json_types import Keywords
from jaxrl.process.plugin import BoundFunction
from jaxrl.types import Array

LARGEST_GAP = 1e-2
"""Between the gradient of a divergence as its class says it, and that of its value."""


def check_own_parts(config: Config) -> None:
    """Tries what an algorithm has of its own: divergence, advantages, term and metrics.

    Raises:
        UserError: one fails, or returns another shape or what is not finite; the text names its
            file and line.
    """
    spec = config.spec
    if isinstance(spec.divergence, BoundFunction):
        _try_divergence(spec.divergence)
    if spec.signal is not None:
        _try_signal(spec.signal)
    for metric in spec.metrics_asking(PAIR).values():
        _try_divergence(metric)
    traced = spec.metrics_asking(TOKENS)
    if spec.loss is not None and (traced or not isinstance(spec.loss.term, str)):
        _try_term(config, traced)
    if isinstance(spec.advantages, BoundFunction):
        of_tokens = (max(LENGTHS),) if spec.token_advantages else ()
        _try_on_host(spec.advantages, (len(REWARDS), *of_tokens))
    for metric in spec.metrics_asking(INPUTS).values():
        _try_on_host(metric, ())


def _try_divergence(function: BoundFunction) -> None:
    z = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    z[..., -1] = MIN  # as padding of the vocabulary has it
    student, teacher = jax.nn.log_softmax(jnp.asarray(z))
    divergence = make_divergence(function)

    def value(z: Array) -> tuple[Array, Array]:
        return divergence.value(jax.nn.log_softmax(z), teacher, lambda x: x.sum(-1))

    found, centre = jax.jit(value)(z[0])
    as_floats(function, found, (3,))
    slope = as_floats(function, jax.jit(divergence.gradient)(student, teacher, centre), (3, 7))
    if not isinstance(divergence, SummedDivergence):
        expected = jax.grad(lambda z: value(z)[0].sum())(jnp.asarray(z[0]))
        gap = float(np.abs(slope - np.asarray(expected)).max())
        if not gap < LARGEST_GAP * (1 + float(np.abs(slope).max())):
            raise function.wrong(
                f"has a gradient that differs by {gap:.2g} from that of its value in the logits"
            )
        return
    apart = function(student=student[:, :4], teacher=teacher[:, :4])
    together = function(student=student, teacher=teacher)[:, :4]
    if not np.allclose(apart, together, rtol=1e-4, atol=1e-5):
        raise function.wrong(
            "returns for a token of the vocabulary what depends on others: the vocabulary may be"
            " spread over devices, so return summands, or write a class with a gradient"
        )


def _try_signal(signal: SignalSpec) -> None:
    z = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    student, teacher = jax.nn.log_softmax(jnp.asarray(z))
    tokens, send, loss = jnp.array([0, 3, 6]), signal.send, signal.loss
    assert isinstance(send, BoundFunction) and isinstance(loss, BoundFunction)
    sent = jax.jit(lambda x: send(logprobs=x, tokens=tokens))(teacher)
    found = {name: (x.dtype.name, x.shape[1:]) for name, x in sent.items()}
    expected = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in signal.tensors.items()}
    if found != expected:
        raise send.wrong(f"returns {found} for a token, and `tensors` of the signal are {expected}")

    def value(student: Array) -> Array:
        return loss(logprobs=student, tokens=tokens, sent=sent)

    as_floats(loss, jax.jit(value)(student), (3,))
    slope = jax.jit(jax.grad(lambda student: value(student).sum()))(student)
    as_floats(loss, slope, (3, 7))


def _try_term(config: Config, metrics: Mapping[str, BoundFunction]) -> None:
    with user_input("policy"):
        objective = objective_of(config)
    own = getattr(objective.term, "__self__", None)  # a built-in term is no method
    shape = (2, 3)
    draw = np.random.default_rng(0)
    numbers = [draw.normal(-1, 0.3, shape).astype(np.float32) for _ in range(3)]
    mask = np.array([[True, True, True], [True, False, False]])
    seen: Keywords = {"entropy": -numbers[0]}
    seen |= {"ref_logprobs": numbers[2]} if config.loss_reads_reference else {}
    advantages = np.array([1, -1], np.float32)
    if isinstance(own, BoundFunction):
        tokens = Tokens(numbers[0], numbers[0] - numbers[1], np.ones(shape), mask, **seen)
        output = jax.eval_shape(partial(_output, own, objective), tokens)
        for name, x in zip(TermOutput._fields, output, strict=True):
            if x.shape != shape:
                raise own.wrong(f"returns {name} of shape {x.shape} for tokens of shape {shape}")

    def loss(logprobs: Array) -> tuple[Array, Any]:
        given = (numbers[1], advantages, mask)
        total, count, more = policy_loss(objective, logprobs, *given, own_metrics=metrics, **seen)
        return total / count, more

    (value, _), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(numbers[0])
    if isinstance(own, BoundFunction):
        as_floats(own, value, ())
        as_floats(own, slope, shape)


def _output(own: BoundFunction, objective: Objective, tokens: Tokens) -> TermOutput:
    output = objective.term(tokens, RATIOS[objective.ratio])
    if not isinstance(output, TermOutput):
        raise own.wrong(f"returns {type(output).__name__}: it must return a TermOutput")
    return output


REWARDS = (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)
"""Of a group with a difference, one in which nothing succeeds, and one in which all does."""
GROUPS = (0, 0, 1, 1, 2, 2)
LENGTHS = (3, 1, 2, 3, 1, 3)


def _try_on_host(function: BoundFunction, shape: tuple[int, ...]) -> None:
    known: dict[str, Callable[[], np.ndarray]] = {
        "rewards": lambda: np.array(REWARDS),
        "group_ids": lambda: np.array(GROUPS, np.int32),
        "lengths": lambda: np.array(LENGTHS),
        "truncated": lambda: np.array(LENGTHS) == max(LENGTHS),
    }
    if {*function.inputs} <= known.keys():  # what else it asks for is known in a run alone
        as_floats(function, function(**{name: make() for name, make in known.items()}), shape)
