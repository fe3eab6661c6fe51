"""An environment of Gymnasium whose observations and actions are texts."""

import gymnasium
from gymnasium.spaces import Text


class Hidden(gymnasium.Env):
    observation_space = action_space = Text(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = f"word{self.np_random.integers(10**6)}"
        return f"Say {self.word}", {}

    def step(self, action):
        right = action == self.word
        words = "Right" if right else f"It was {self.word}, not {action}"
        return words, 1 if right else -1, right, False, {}


gymnasium.register("Hidden-v0", Hidden)
