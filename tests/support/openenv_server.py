"""An OpenEnv server on the port that is its argument: a number is to be found."""

import os
import random
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str
    loud: bool = False


class Hint(Observation):
    hint: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
        self.number = random.Random(seed).randrange(10)
        return Hint(hint=f"0-9? (seed {seed})")

    def step(self, action, timeout_s=None, **others):
        if action.text == "raise":
            raise KeyError("no such thing")
        if action.text == "leave":
            os._exit(3)
        if action.text == "hang":
            time.sleep(1000)
        right = action.text == str(self.number)
        hint = "yes" if right else "more" if action.text < str(self.number) else "less"
        return Hint(hint=hint, reward=float(right), done=right)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
