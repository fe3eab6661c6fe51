"""What describes the programs of a run for compilation ahead of time: abstract arrays, each a
`jax.ShapeDtypeStruct` with a sharding over the devices of the target machine. Nothing is allocated,
and no weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.signals import Projection
from jaxrl.config.schema import Config
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import Layout, Params, abstract_params, param_shardings
from jaxrl.plan.plan_context import Setting
from jaxrl.plan.plan_inputs import Account, PlanInputs
from jaxrl.sharding.axes import ROWS, Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.teacher.local_teacher import score_program
from jaxrl.teacher.protocol import Options
from jaxrl.types import Sequences, TeacherSignal, TokenAlignment, signal_of


@dataclass(frozen=True)
class Program:
    """A jitted function of a role, with the abstract arguments of its largest call in a run."""

    role: str
    name: str
    jitted: Any
    args: tuple[Any, ...]
    phases: tuple[str, ...] = ()
    """Phases of the role in the plan (`plan.memory.Account`) that this program covers. () if the
    plan has no figure of its own for it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    beside: int = 0
    """Bytes that the role holds on a device meanwhile, apart from the arguments; without those of
    the arguments that the plan counts as the actor's."""
    calls: int = 1
    """Calls in a training step; 0 if none calls it."""
    otherwise: str = "eval"
    """What calls it where no step does: `eval`, evaluations; `start`, the start of a run; `waits`,
    a sample that waits for pages of the cache."""

    def lower(self) -> Any:
        """Traces it; returns a `jax.stages.Lowered`."""
        return self.jitted.lower(*self.args, **self.kwargs)

    def compile(self, options: Mapping[str, Any] | None = None) -> Any:
        """Compiles it for the target machine; returns a `jax.stages.Compiled`."""
        return self.lower().compile(compiler_options=options)

    def planned(self, account: Account) -> int | None:
        """Returns the bytes of its role on one device while it runs, as the plan has them; None
        where the plan does not count it apart, because a larger program of the role covers it."""
        more = [size for phase, size in account.phases().items() if phase in self.phases]
        return account.resident + max(more) if more else None

    def held(self, compiled: Any, total: int | None = None) -> int:
        """Returns the bytes that its role holds on one device while the compiled program runs.

        Args:
            total: arguments, results and temporaries as the compiler of a TPU reports them
                (`hlo.read_total`); its `memory_analysis` exceeds them where there are loops.
        """
        sizes = compiled.memory_analysis()
        # XLA does not count arguments that the program never reads, but they stay on the device.
        unread = max(0, local_bytes((self.args, self.kwargs)) - sizes.argument_size_in_bytes)
        if total is None:
            results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + results
        return int(total + unread + self.beside)


def shaped(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def local_bytes(tree: Any) -> int:
    """Returns the bytes on one device of a pytree of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    )


class AbstractRun:
    """A run as planned for a machine: its meshes, and the abstract arguments of its programs."""

    def __init__(
        self,
        config: Config,
        inputs: PlanInputs,
        axes: Mapping[str, Axes],
        devices: Sequence[Any],
    ):
        """
        Args:
            config: with the dtypes for that machine filled in (`Config.with_dtypes`).
            inputs, axes: models, placement and mesh axes of the plan.
            devices: of the machine; the placement refers to them by index.
        """
        self.config, self.student = config, inputs.student
        self.setting = Setting(config, inputs, axes)
        where = inputs.placement.roles
        self.meshes: dict[str, Mesh] = {
            role: role_mesh([devices[i] for i in where[role].devices], sizes)
            for role, sizes in axes.items()
        }

    def apart(self, *roles: str) -> bool:
        """Returns whether roles are in several processes, so that what one sends goes through the
        host."""
        if self.setting.inputs.together(*roles):
            return False
        devices = [d for role in roles for d in self.meshes[role].devices.flat]
        return self.config.launcher == "ray" or len({d.process_index for d in devices}) > 1

    def rows(self, role: str) -> NamedSharding:
        """Returns the sharding of the rows of a batch over the axes `data` and `fsdp` of a role's
        mesh."""
        return NamedSharding(self.meshes[role], PartitionSpec(ROWS))

    def everywhere(self, role: str) -> NamedSharding:
        return NamedSharding(self.meshes[role], PartitionSpec())

    def params(
        self, role: str, model: DecoderConfig, dtype: Any = None, layout: Layout | None = None
    ) -> Params:
        """Returns the weights of a model, in the dtype and layout of the role unless others are
        given."""
        dtype = self.config.roles[role].compute_dtype if dtype is None else dtype
        layout = layout or self.setting.layout(role)
        abstract = abstract_params(model, jnp.dtype(dtype), layout)
        shardings = param_shardings(model, self.meshes[role], layout)
        return jax.tree.map(lambda x, s: shaped(x.shape, x.dtype, s), abstract, shardings)

    def sequences(self, role: str, rows: int, group: int = 1) -> Sequences:
        m, at = self.setting, self.rows(role)
        width = m.prompts(role) + m.completions(role)
        return Sequences(
            shaped((rows, width), jnp.int32, at),
            shaped((rows, width), bool, at),
            shaped((rows, m.completions(role)), bool, at),
            group,
        )

    def signal(self, role: str, rows: int) -> TeacherSignal:
        """Returns the teacher's signal for so many rows, as abstract arrays on the mesh of a
        role."""
        c, m, at = self.config, self.setting, self.rows(role)
        if "teacher" not in self.meshes:  # the signal is read from disk
            width = 0 if m.teacher is None else m.teacher.d_model
            shapes = Options.of(c.distill, m.vocab).tensors(c.teacher.compute_dtype, width)
            arrays = {
                name: shaped((rows, m.new_tokens, *dims), jnp.dtype(dtype), at)
                for name, (dtype, dims) in shapes.items()
            }
            return signal_of(arrays)
        jitted, args = self.score(rows, self.teachers[-1])
        out = jax.eval_shape(jitted, *args)
        if m.aligned and role == "actor":
            out = replace(out, baseline=jax.ShapeDtypeStruct((rows, m.new_tokens), jnp.float32))
        if m.signal == "hidden":  # of several teachers: those of the widest, or of all
            width = max(m.teacher_widths) if c.mixture is None else sum(m.teacher_widths)
            shape = (rows, m.new_tokens, width)
            out = replace(out, hidden=jax.ShapeDtypeStruct(shape, out.hidden.dtype))
        found: TeacherSignal = jax.tree.map(lambda x: shaped(x.shape, x.dtype, at), out)
        return found

    def outcomes(self, role: str) -> Outcomes:
        """Returns those of the student's and the teacher's tokens, where these are others."""
        (_, teacher), *_ = self.teachers
        counts, at = (self.student.vocab_size, teacher.vocab_size), self.everywhere(role)
        return Outcomes(*(shaped((n,), jnp.int32, at) for n in counts))

    def scored(self, role: str, model: DecoderConfig, parts: int) -> tuple[int, int]:
        """Returns the rows of one of `parts` slices of the batch over all devices of a role, and
        the number of rows that share a prompt."""
        run, axes = self.setting.scored(role, model, parts), self.setting.axes[role]
        return run.rows * axes.rows, 1 if run.shared is None else run.shared[0]

    @property
    def teachers(self) -> list[tuple[str, DecoderConfig]]:
        """Returns the name and model of each teacher."""
        models = self.setting.inputs.teachers
        return list(zip(self.config.teachers or ("",), models, strict=True))

    @property
    def teacher_bytes(self) -> dict[str, int]:
        """Maps the name of each teacher to the bytes of its weights on one device."""
        return {name: local_bytes(self.params("teacher", model)) for name, model in self.teachers}

    def score(
        self, rows: int, teacher: tuple[str, DecoderConfig], group: int = 1, *, sends: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns a teacher's program and its arguments.

        Args:
            sends: it sends hidden states, of which a mixture is made.
        """
        c, m, role = self.config, self.setting, "teacher"
        _, model = teacher
        vocab = model.vocab_size if m.aligned else m.vocab
        projection = Projection.of(c, self.meshes[role], vocab)
        ids, at = None, self.rows(role)
        aligned: tuple[Any, ...] = ()
        if m.aligned:
            mine, theirs = (rows, m.new_tokens), (rows, m.completions(role))
            one, starts = shaped(mine, jnp.int32, at), shaped(theirs, bool, at)
            aligned = (TokenAlignment(one, one, one, starts), self.outcomes(role))
        if sends:
            distill = c.distill.model_copy(update={"signal": "hidden"})
            projection = replace(projection, distill=distill)
        elif c.distill.signal == "student_topk":
            ids = shaped((rows, m.new_tokens, c.distill.top_k), jnp.int32, self.rows(role))
        given = (self.params("teacher", model), self.sequences(role, rows, group), ids, *aligned)
        return score_program(model, projection), given
