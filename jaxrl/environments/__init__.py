"""Environments: what answers the turns of a model, and the processes that run it."""

from jaxrl.environments.environment import Answer as Answer
from jaxrl.environments.environment import Environment as Environment
from jaxrl.environments.environment import Unavailable as Unavailable
