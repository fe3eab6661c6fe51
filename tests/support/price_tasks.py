"""A taskset of `verifiers` with tools: the price of two things, which a tool knows."""

import verifiers.v1 as vf

__all__ = ["PriceTaskset"]


class Shop(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def price(self, item: str) -> str:
        """The price of an item."""
        return str({"pen": 2, "book": 9}[item])


class PriceTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float("11" in trace.last_reply)


class PriceTaskset(vf.Taskset[PriceTask, vf.TasksetConfig]):
    def load(self):
        yield PriceTask(vf.TaskData(prompt="What do a pen and a book cost?"), self.config.task)


if __name__ == "__main__":
    Shop.run()
