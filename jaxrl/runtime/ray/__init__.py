"""Launcher `ray`: each pool is one or more processes, on the hosts of a Ray cluster.

The driver sends calls and receives reports. Results travel between processes through Ray's object
store; the driver receives only the results that it asks for. Ray starts processes and transports
bytes. The definition and order of calls, deadlines, and the reaction to failures are in this
package.

If a process dies or is late, all processes of its pool are restarted, provided that the roles can
be rebuilt: a frozen model, or a sampler with the weights last sent to it. The calls that had not
run are sent again, in order. Since every call is a function of its arguments and seeds, they give
the same results. A pool that trains cannot be rebuilt: the run then raises `RunLost` and returns to
its newest checkpoint.

    connect.py  joins a cluster: its hosts, and which process goes where
    pool.py     the processes of a pool, and what they have reported
    calls.py    a call: its future, how its arguments travel, and when it is sent
    start.py    new processes with their devices and roles, bounded and verified
    watch.py    a process seen from outside: its node, its stacks, its death, its end
    supervise.py     the thread that decides: reports, deadlines, losses
    worker_group.py     the workers of a run, as the loop sees them

This is the only import of ray.
"""

import os

from jaxrl.errors import UserError

# Ray reads these when it is imported. Devices are made visible per worker by its bundle, and an
# actor without one must not lose what its host has.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A thread that still calls Ray when the run has left its cluster must not start another.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

try:
    import ray  # noqa: F401
except ImportError as missing:
    raise UserError(
        f"launcher=ray needs the package ray ({missing}): pip install 'jaxrl[ray]'"
    ) from missing
