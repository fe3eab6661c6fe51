"""Names of models and data sets on a hub.

| name | is |
|---|---|
| `ORG/NAME` | a model, of the branch `main` |
| `ORG/NAME@REVISION` | the same of a branch, a tag or a commit |
| `ORG/NAME/FILE.gguf` | one GGUF file of a repository |
| `hf:ORG/NAME:CONFIG:SPLIT` | a data set; a revision stands after its name |

`hub.pin` adds the commit that a revision is at the moment, as in `ORG/NAME@main@0123...`: whoever
has that name, in another process or after the branch has moved, gets the same files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl.errors import user_path

RUNS = "runs/"
"""How the paths of run directories begin, unless `run_dir` says otherwise."""
COMMIT = re.compile("[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_AT = r"(?:@(?P<revision>(?!/)(?:(?!\.\.)[^@:\s])+))?(?:@(?P<commit>[0-9a-f]{40}))?"
"""The revision becomes a path in the cache; git allows neither `..` nor a first slash in one."""
_MODEL = re.compile(rf"(?P<repo>{_PART}/{_PART})(?P<rest>(?:/{_PART})+\.gguf)?{_AT}")
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<n>\d{5})\.gguf")
_DATA = re.compile(rf"hf:(?P<repo>(?:{_PART}/)?{_PART}){_AT}(?P<rest>(?::[^:]*){{0,2}})")


@dataclass(frozen=True)
class HubName:
    """A model or a data set on a hub."""

    kind: Literal["model", "dataset"]
    repo: str
    revision: str | None = None
    """A branch, a tag or a commit; None: the branch `main`."""
    commit: str | None = None
    """What the revision is, where `pin` has found out."""
    rest: str = ""
    """`/FILE.gguf` of a model, `:CONFIG:SPLIT` of a data set."""

    def __str__(self) -> str:
        at = "".join(f"@{part}" for part in (self.revision, self.commit) if part is not None)
        return (
            f"hf:{self.repo}{at}{self.rest}"
            if self.kind == "dataset"
            else f"{self.repo}{self.rest}{at}"
        )

    @property
    def asked(self) -> HubName:
        """Returns the name as the user gives it: without what `pin` adds."""
        if self.commit is not None and self.revision == "main":
            return replace(self, revision=None, commit=None)
        return replace(self, commit=None)

    @property
    def sha(self) -> str | None:
        """Returns the commit, where the name says it."""
        if self.commit is None and self.revision and COMMIT.fullmatch(self.revision):
            return self.revision
        return self.commit


def model_name(text: str) -> HubName | None:
    """Returns the model on a hub that a text names, if any; a path that exists names none, nor does
    one below `runs/`, where runs are written."""
    match = _MODEL.fullmatch(text)
    path = text.startswith(RUNS) or user_path(text).exists()
    if match is None or match["repo"].endswith(".gguf") or path:
        return None
    return HubName("model", match["repo"], match["revision"], match["commit"], match["rest"] or "")


def gguf_parts(name: str) -> list[str]:
    """Returns the names of all files of a GGUF model of which one is named: itself, or those of
    `NAME-00001-of-00003.gguf`, whose number of files is bounded by what a name can say."""
    match = _SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match["part"]) <= int(match["n"]):
        return [name]
    n = match["n"]
    return [f"{match['stem']}-{part:05}-of-{n}.gguf" for part in range(1, int(n) + 1)]


def data_name(text: str) -> HubName | None:
    """Returns the data set on a hub that a text names; None where it has another form."""
    match = _DATA.fullmatch(text)
    if match is None:
        return None
    return HubName("dataset", match["repo"], match["revision"], match["commit"], match["rest"])
