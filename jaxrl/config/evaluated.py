"""Which keys of a config the evaluation of a checkpoint reads."""

MESH = "rollout=1"
"""Placement where none is asked for."""
READ = (
    *("seed", "mesh", "max_prompt_tokens", "max_new_tokens", "compile_cache", "data"),
    *("sampling.stop", "rollout", "eval", "environment"),
)
"""Keys, and sections, that an evaluation reads."""
UNREAD = (
    *("data.train", "data.weights", "data.shuffle", "eval.every", "eval.teacher"),
    *("rollout.merge", "environment.weight", "environment.credit", "environment.discount"),
)
"""Keys of those sections that only training reads."""
PLACEMENT = ("mesh", "rollout.parallel", "rollout.devices")
"""Keys that belong to the machine, and are not taken over from a run."""
SLOTS = ("batch_size", "group_size")
"""Keys of a run that stand for the slots where `rollout.slots` is null."""
