"""Launcher `ray`: each pool is one or more processes, on the hosts of a Ray cluster.

The driver sends calls and receives reports. Results travel between processes through Ray's object
store; the driver receives only the results that it asks for. Ray starts processes and transports
bytes. The definition and order of calls, deadlines, and the reaction to failures are in this
package.

A call is sent once its inputs are there, so that the loss of a process is that of its own calls.
If one dies or is late, all processes of its pool are restarted, provided that the roles can be
rebuilt: a frozen model, or a sampler with the weights last sent to it. The calls that had not ended
are sent again, in order. Since every call is a function of its arguments and seeds, they give the
same results. A pool that trains cannot be rebuilt: the run then raises `RunLost` and returns to its
newest checkpoint. Ray's own restarts of actors and retries of tasks are off: it would repeat calls
in an order of its own, and without the weights that a role had.

In the order of a run:

    connect.py        the devices that a run would get; joins a cluster; its hosts
    local_cluster.py  a cluster of the run's own on this host: how it listens, is watched, and ends
    remote_calls.py   pools, calls to them, how arguments travel, and when each call is sent
    worker_group.py   new processes with their devices and roles; what the loop sees of them; the
                      thread that decides: reports, deadlines, losses

Ray is imported in this package only, and by `connect.join` first: what decides about tokens must
be set before.
"""

import os
from importlib.util import find_spec

from jaxrl.errors import UserError

# Ray reads these when it is imported. Devices are made visible per worker by its bundle, and an
# actor without one must not lose what its host has.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A thread that still calls Ray when the run has left its cluster must not start another.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# What Ray prints of deaths, the run says with the call, the host and the stacks.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")

if find_spec("ray") is None:
    raise UserError("a Ray cluster needs the package ray: pip install 'jaxrl[ray]'")
