"""The models and data sets of a run that are on a hub: which commit of each it uses.

The names in its config get the commits that they are at the start, as in `ORG/NAME@main@0123...`.
So the workers of a run use the same files on every host, and so does the run when it resumes, whose
`config.yaml` has the names with the commits, though a branch has moved since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from jaxrl.config.builtin_configs import how_to_make
from jaxrl.config.paths import DATA, MODELS, changed
from jaxrl.config.schema import Config
from jaxrl.data.example import Split
from jaxrl.data.source import is_split_here, split_files
from jaxrl.errors import UserError, about
from jaxrl.formats import hub
from jaxrl.formats.hub import HubName, data_name, model_name
from jaxrl.process.json_types import JsonObject
from jaxrl.run.run_dir import recorded_config

MB = 1e6
SPLIT_OF: Mapping[str, Split] = {"data.eval": "eval"}
"""What a key's data are used for, where it is not training."""
SHOWN = 12
"""Characters of a commit in messages."""


def with_commits(config: Config, dry: bool = False) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with a commit in every name on a hub, and a message about each. The
    configs and tokenizers of its models are then in the hub's cache; weights and data need not be.

    Args:
        dry: leave the names of data that cannot be found as they are, for a plan without them.

    Raises:
        UserError: there is no such model or data set, or no access to it; the key is named.
    """
    recorded: dict[tuple[str, HubName], list[HubName]] = {}
    """Key and name without a commit -> the names with one in the run directory's config, in its
    order: of two teachers with one name, each has its own."""
    for each, name in _names(recorded_config(config), (*MODELS, *DATA)):
        if name.sha is not None:
            recorded.setdefault((each, _asked(name)), []).append(name)
    pins: dict[HubName, HubName] = {}
    notes: list[str] = []

    def pin(key: str, text: str) -> str:
        name = _on_hub(key, text)
        if name is None:
            return text
        asked = _asked(name)
        repo = replace(asked, rest="")
        known = recorded.get((key, asked))
        before = known.pop(0) if known else None
        try:
            if name.sha is not None:
                found = name
            elif before is not None:
                found = before
            else:
                if repo not in pins:  # once, so that all keys have the same commit of a branch
                    pins[repo] = hub.pin(name)
                found = replace(pins[repo], rest=name.rest)
            if found.kind == "model":  # fetches what describes it
                folder, size = hub.folder(found), hub.size_of_weights(found)
                here = folder.is_file() or hub.has_all_weights(found, folder)
            else:
                split, sizes = SPLIT_OF.get(key, "train"), hub.files(found)
                size = sum(sizes[file] for file in split_files(found, split))
                here = is_split_here(found, split)
        except UserError as error:
            if dry and key in DATA:  # whoever opens them says so, after the plan
                return text
            raise UserError(f"{key}: {error}") from error
        commit, fetch = (found.sha or "")[:SHOWN], "" if here else " to fetch"
        notes.append(f"{key}: {name.asked} is commit {commit}; {size / MB:.1f} MB{fetch}")
        return str(found)

    mapping: JsonObject = config.model_dump(mode="json")
    for key in _keys(config):
        mapping = changed(mapping, key, partial(pin, key))
    return Config.parse(mapping) if notes else config, tuple(dict.fromkeys(notes))


def fetch_models(config: Config) -> bool:
    """Fetches the weights of the models that are on a hub; returns whether there are such models.

    Raises:
        UserError: they cannot be fetched, or there are none; the key is named.
    """
    names = _names(config.model_dump(mode="json"), _keys(config))
    models = [(key, name) for key, name in names if name.kind == "model"]
    for key, name in models:
        with about(key):
            hub.fetch_weights(name)
    return bool(models)


def _keys(config: Config) -> list[str]:
    embeds = config.learns_from_rewards and config.policy.advantages == "similarity"
    return [key for key in (*MODELS, *DATA) if key != "grouper.model" or embeds]


def _names(mapping: JsonObject, keys: Iterable[str]) -> list[tuple[str, HubName]]:
    found: list[tuple[str, HubName]] = []

    def keep(key: str, text: str) -> str:
        if (name := _on_hub(key, text)) is not None:
            found.append((key, name))
        return text

    for key in keys:
        changed(mapping, key, partial(keep, key))
    return found


def _on_hub(key: str, text: str) -> HubName | None:
    if how_to_make(text):  # a run of ours, which is not here yet
        return None
    return model_name(text) if key in MODELS else data_name(text)


def _asked(name: HubName) -> HubName:
    """Returns the same for all forms of a name: without commit, without branch `main`."""
    return replace(name, revision=None if name.revision == "main" else name.revision, commit=None)
