"""Launcher `ray`: each pool is one or more processes, on the hosts of a Ray cluster.

The driver sends orders and gets reports; results go from process to process through the object
store, and only what the driver itself asks for comes to it. Ray starts processes and carries bytes;
what a call is, in which order calls run, who is late and what is done about it is decided here.

A process that dies or is late is made anew, with all of its pool, where its roles can be: a frozen
model, or a sampler with the weights last sent to it. What had not run is sent again, in order, and
since every call is a function of its arguments and seeds, it gives the same. A pool that trains
cannot: `RunLost` then takes the run back to its newest checkpoint.

    connect.py  joins a cluster: its hosts, and which process goes where
    pool.py     the processes of a pool, and what they have reported
    process.py  one of them, as Ray starts it
    calls.py    a call: its future, and how its arguments travel
    start.py    new processes with their devices and roles, bounded and verified
    watch.py    a process seen from outside: its node, its stacks, its death, its end
    send.py     the calls that have not ended, and when each is sent
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

try:
    import ray  # noqa: F401
except ImportError as missing:
    raise UserError(
        f"launcher=ray needs the package ray ({missing}): pip install 'jaxrl[ray]'"
    ) from missing
