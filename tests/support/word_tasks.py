"""Tasksets of `verifiers`: a word to say in up to three turns, and a sum to look up with a tool."""

import verifiers.v1 as vf

__all__ = ["WordEnv", "WordTaskset"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(task.word in trace.last_reply)


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for number, word in enumerate(("red", "blue")):
            prompt = f"Say the word number {number}."
            data = WordData(prompt=prompt, system_prompt="You are brief.", word=word)
            yield WordTask(data, self.config.task)


class WordEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class WordEnv(vf.Env[WordEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for left in (2, 1):
                if segment.terminated or task.data.word in segment.last_reply:
                    break
                if segment.last_reply == "raise":
                    raise KeyError("no such thing")
                segment = await interaction.turn(f"No. {left} left.")
