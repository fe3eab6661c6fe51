"""What a student with other tokens learns is the teacher's distribution of texts, where no token
begins a longer one that the text may go on with instead. Both models are tables of all texts, and
the loss is its expectation over all samples of the student."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizers import END, made
from cases import and_slow
from tiny_models import make_mesh
from tokenizers import Tokenizer, decoders, models

from jaxrl import Config
from jaxrl.algorithms.signals import Projection, distill_loss
from jaxrl.data.batch import make_rollout
from jaxrl.data.token_alignment import Aligner, ModelTokenizer
from jaxrl.losses.token_spans import align_to_student, aligned_signal
from jaxrl.types import Completion, Prompt, TrainBatch


def cut(*merges):
    """Tokens are characters and these pairs."""
    tokens = {token: i for i, token in enumerate([END, *"89thex", *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=tokens, merges=list(merges)))
    inner.decoder = decoders.Fuse()
    return made(inner)


SINGLE, PAIRS = cut(), cut(("8", "8"))
THREE, THE = cut(("8", "8"), ("88", "8")), cut(("h", "e"), ("t", "he"))
NEVER = -14.0
"""Log-prob that both give to what they do not say."""


class Table:
    """A model that says each text in the tokens that its tokenizer cuts it into."""

    def __init__(self, model, paths):
        self.model = model
        nodes = sorted({tuple(p[:k]) for p in paths for k in range(len(p))})
        self.size = len(nodes)
        width = max(map(len, paths))
        self.tokens, self.nodes = np.zeros((2, len(paths), width), np.int32)
        self.mask = np.zeros((len(paths), width), bool)
        for row, path in enumerate(paths):
            self.tokens[row, : len(path)], self.mask[row, : len(path)] = path, True
            self.nodes[row, : len(path)] = [nodes.index(tuple(path[:k])) for k in range(len(path))]

    def of_texts(self, shares):
        """[nodes, V] logits of a model that says each text with this probability."""
        found = np.zeros((self.size, self.model.vocab_size))
        for row, share in enumerate(shares):
            n = self.mask[row].sum()
            np.add.at(found, (self.nodes[row, :n], self.tokens[row, :n]), share)
        found /= found.sum(-1, keepdims=True)
        return np.log(found + np.exp(NEVER)).astype(np.float32)

    def logprobs(self, table):
        """[texts, width] of each token."""
        logs = jax.nn.log_softmax(table, -1)[self.nodes, self.tokens]
        return jnp.where(self.mask, logs, 0)


def model_tokenizer(tokenizer):
    return ModelTokenizer(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


class Lesson:
    def __init__(self, student, teacher, texts, shares, signal, beta):
        aligner = Aligner(model_tokenizer(student), model_tokenizer(teacher))
        ours = [[*aligner.student_tokens(t), aligner.student.end_id] for t in texts]
        self.student = Table(aligner.student, ours)
        self.shares = np.array(shares) / sum(shares)
        mesh = make_mesh(1, 1, 1)
        keys = ["teacher.tokenizer=own", f"distill.signal={signal}", f"distill.jsd_beta={beta}"]
        config = Config.load("builtin:quickstart", [*keys, "distill.top_k=4"])
        self.p = Projection.from_config(config, mesh, aligner.student.vocab_size)
        done = [Completion(tuple(o), *np.zeros((2, len(o)), np.float32), "stop") for o in ours]
        prompts = [Prompt(i, (1,), "p", teacher_tokens=(1,)) for i in range(len(ours))]
        limits = {"pad_id": 0, "max_prompt_tokens": 1, "max_new_tokens": 16, "row_multiple": 1}
        rollout = make_rollout(prompts, [[d] for d in done], policy_version=1, **limits)
        read = aligner.read(rollout, 1, 16)
        width = read.sequences.loss_mask.shape[1]
        each = aligner.align([d.tokens for d in done], 16)
        theirs = Table(aligner.teacher, [row.tokens for row in each])
        more = width - theirs.tokens.shape[1]
        hidden = theirs.of_texts(self.shares)[theirs.nodes]
        hidden = np.pad(hidden, [(0, 0), (0, more), (0, 0)])
        eye = np.eye(aligner.teacher.vocab_size, dtype=np.float32)
        tokens = read.sequences.tokens[:, -width:]
        how = {"signal": signal, "top_k": 4, "mesh": mesh}
        mask = read.sequences.loss_mask

        @jax.jit
        def send(hidden, tokens):
            found = aligned_signal(hidden, eye, tokens, aligner.outcomes, **how)
            found = jax.tree.map(
                lambda x: jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0), found
            )
            return align_to_student(found, read.alignment)

        sent = send(hidden, tokens)
        self.frozen = {"teacher_head": eye, "outcomes": aligner.outcomes}
        self.batch = TrainBatch(rollout.sequences, sent, rollout.logprobs)
        self.said = self.student.of_texts(self.shares) > NEVER + 1
        self.width = rollout.sequences.loss_mask.shape[1]

    def slope(self, table):
        """Of the expected loss, by the student's logits: that of each text, by its probability."""
        own = self.student.logprobs(table)
        more = [(0, 0), (0, self.width - own.shape[1])]
        batch = replace(self.batch, sampler_logprobs=jnp.pad(own, more))
        head = np.eye(self.student.model.vocab_size, dtype=np.float32)
        hidden = jnp.pad(table[self.student.nodes], [*more, (0, 0)])
        each = jax.grad(lambda h: distill_loss(self.p, h, head, batch, self.frozen)[0])(hidden)
        each = each[:, : own.shape[1]] * jnp.exp(own.sum(-1))[:, None, None]
        each = jnp.where(self.student.mask[..., None], each, 0)
        slope = jnp.zeros_like(table).at[self.student.nodes].add(each)
        # What is never sampled is no part of an expectation over samples.
        return slope if self.p.distill.signal != "sampled" else jnp.where(self.said, slope, 0)

    @partial(jax.jit, static_argnums=0)
    def learn(self, table, steps):
        """The table after so many steps of length 2, and what its model says: [texts]."""

        def step(_, table):
            return table - 2.0 * self.slope(table)

        table = jax.lax.fori_loop(0, steps, step, table)
        return table, jnp.exp(self.student.logprobs(table).sum(-1))


JOINED = {"88": 1, "889": 2, "x9": 1, "x": 3}
WORD = {"the": 3, "thex": 1, "9x": 2, "9": 1}
TRIPLE = {"888": 3, "8889": 1, "9": 2}
CASES = {
    "the teacher joins": (SINGLE, PAIRS, JOINED),
    "the student joins": (PAIRS, SINGLE, JOINED),
    "the teacher joins three": (SINGLE, THE, WORD),
    "the student joins three": (THE, SINGLE, WORD),
    "one joins two, the other three": (THREE, PAIRS, TRIPLE),
    "the other way": (PAIRS, THREE, TRIPLE),
}


BETAS = {"hidden": 0.0, "topk": 0.4, "sampled": 1.0}
BY_DEFAULT = [
    ("hidden", "the teacher joins three"),
    ("topk", "the student joins three"),
    ("sampled", "one joins two, the other three"),
]


@pytest.mark.parametrize(
    ("signal", "case"),
    and_slow(BY_DEFAULT, [pair for pair in product(BETAS, CASES) if pair not in BY_DEFAULT]),
)
def test_the_student_learns_the_teachers_texts(signal, case):
    student, teacher, shares = CASES[case]
    lesson = Lesson(student, teacher, [*shares], [*shares.values()], signal, BETAS[signal])
    best = lesson.student.of_texts(lesson.shares)
    moved = np.abs(lesson.learn(best, 1)[0] - best).max()
    start = lesson.student.of_texts(np.arange(1, len(shares) + 1))
    _, said = lesson.learn(start, 3000)
    assert moved / 2 < 3e-4
    np.testing.assert_allclose(said, lesson.shares, atol=0.01)
