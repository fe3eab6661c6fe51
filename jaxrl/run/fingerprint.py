"""What a run depends on beside its config: weights, data, reward functions, environment, by name
and digest. A checkpoint notes them, so that a run that resumes notices what has changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from jaxrl.checkpoint.digest import digest_file, digest_model
from jaxrl.environments import environment_source as environments
from jaxrl.formats.places import find_folder
from jaxrl.rewards.callables import PREFIX
from jaxrl.rewards.functions import find
from jaxrl.run.job import Job
from jaxrl.teacher.cache import MANIFEST
from jaxrl.teacher.protocol import Info


def dependencies(job: Job) -> dict[str, str]:
    """Maps each key and value of the config to the digest of what they name."""
    config = job.config
    weights = config.needs_reference or config.trains_adapters
    student = job.student.path if weights else job.student.tokenizer_path
    found = {"data.train": job.train.fingerprint}
    if student is not None:
        found[f"student.model={config.student.model}"] = digest_model(student, weights)
    if job.student.adapter is not None:
        base = job.student.adapter
        found[f"base model {base.base}"] = digest_model(base.base_path)
    for name, teacher in {} if config.teacher_follows else job.teachers.items():
        model = config.teacher_models[name]
        found[f"{config.teacher_key(name)}={model}"] = digest_model(teacher.path)
        if teacher.adapter is not None:
            found[f"base model {teacher.adapter.base}"] = digest_model(teacher.adapter.base_path)
    for name, info in job.served.items():
        if isinstance(info, Info):  # completions servers have no fingerprint
            found[config.teacher_key(name, "address")] = info.fingerprint
    if job.cache is not None:
        found[f"teacher.cache={config.teacher.cache}"] = digest_file(job.cache.path / MANIFEST)
    for one in job.held_out:
        prompts = repr([(prompt.text, prompt.answer) for prompt in one.prompts])
        name = f"data.eval.{one.name}" if one.name else "data.eval"
        found[name] = hashlib.sha256(prompts.encode()).hexdigest()
    if config.environment.name is not None:
        environment = environments.find(config.environment.name)
        path = Path(environment.place) if environment.digest else _module_file(environment.place)
        if path is not None:
            found[f"environment.name={config.environment.name}"] = digest_file(path)
    return found | (_of_rewards(job) if config.learns_from_rewards else {})


def _of_rewards(job: Job) -> dict[str, str]:
    config, found = job.config, {}
    for text in config.reward.functions:
        if text.startswith(PREFIX):  # of a Python program: the config has its digest
            continue
        source = find(text)
        path = Path(source.place) if source.option == "file" else _module_file(source.place)
        if source.option in ("file", "module") and path is not None:
            found[f"reward.functions={text}"] = digest_file(path)
    if config.reward.model is not None:
        found[f"reward.model={config.reward.model}"] = digest_model(
            find_folder(config.reward.model)
        )
    if config.grouper.model is not None and config.policy.advantages == "similarity":
        found[f"grouper.model={config.grouper.model}"] = digest_model(
            find_folder(config.grouper.model)
        )
    return found


def _module_file(module: str) -> Path | None:
    """Finds the file of a module without importing it or its packages."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin)
    folder = Path(spec.origin).parent.joinpath(*rest)
    files = (folder.with_suffix(".py"), folder / "__init__.py")
    return next((file for file in files if file.is_file()), None)
