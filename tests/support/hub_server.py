"""A small hub: an HTTP server that answers `huggingface_hub` as the public one does, with commits,
branches, ETags, redirects, ranges and errors, and remembers what it was asked for.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".parquet", ".bin")
"""Endings of files that stand behind a redirect, as on large-file storage."""


@dataclass
class Repo:
    """A repository: its commits, newest last, and its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False


class Hub:
    """The server. A repository's key is its id, with `datasets/` before that of a data set."""

    TOKEN = "hf_token_of_the_tests"

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path and range of each request."""
        self.cut: dict[str, int] = {}
        """File -> bytes after which the connection is closed, each time."""
        self.stalled: set[str] = set()
        """Files of which half is sent, and then nothing for as long as they are in here."""
        self.failing: int | None = None
        """Status of every answer."""
        self.lies: dict[str, str | None] = {}
        """Headers of every answer, in the place of the true ones; None: without it."""
        self.bodies: dict[str, bytes] = {}
        """File -> what is sent of it, under the headers of what it is."""
        self.limited: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next answers."""
        self.tree: Any = None
        """What is sent as the list of files."""
        self.next_page: Callable[[int], str | None] | None = None
        """Number of a page of a list -> the query of its next one."""
        self.endless = False
        """Whether what is sent as JSON begins with blanks for as long as anybody reads."""
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}/cdn"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        self.repos, self.asked, self.cut, self.failing = {}, [], {}, None
        self.stalled.clear()
        self.lies, self.bodies, self.limited = {}, {}, []
        self.tree = self.next_page = None
        self.endless = False

    def add(
        self,
        repo: str,
        files: Mapping[str, bytes | str] | Path,
        branch: str = "main",
        gated: bool = False,
    ) -> str:
        """A commit on a branch, with these files or those of a folder; returns its hash."""
        if isinstance(files, Path):
            found = [path for path in sorted(files.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(files)): path.read_bytes() for path in found}
        content = {name: x.encode() if isinstance(x, str) else x for name, x in files.items()}
        one = self.repos.setdefault(repo, Repo())
        seen = repr((repo, len(one.commits), sorted(content.items())))
        commit = hashlib.sha1(seen.encode()).hexdigest()
        one.commits[commit] = content
        one.refs[branch] = commit
        one.gated = gated
        return commit

    def fetched(self, suffix: str = "") -> list[str]:
        """Files whose contents were asked for, each as often as it was."""
        found = []
        for method, path, _ in self.asked:
            if method == "GET" and "/cdn/" in path:
                found.append(path.partition("?name=")[2])
            elif method == "GET" and "/resolve/" in path:
                found.append(path.partition("/resolve/")[2].partition("/")[2])
        return [name for name in found if name.endswith(suffix)]

    def wait_for(self, name: str, seconds: float) -> bool:
        """Whether the contents of a file are asked for within this time."""
        end = time.monotonic() + seconds
        while name not in self.fetched() and time.monotonic() < end:
            time.sleep(0.02)
        return name in self.fetched()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body waits 40 ms for the acknowledgement of its headers

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub = self.served
        hub.asked.append((self.command, unquote(self.path), self.headers.get("Range")))
        if hub.failing is not None:
            return self.refuse(hub.failing, "")
        if hub.limited:
            status, headers = hub.limited.pop(0)
            return self.refuse(status, "", **headers)
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "cdn":
            return self.send_file(bytes.fromhex(parts[1]), parse_qs(url.query)["name"][0], body)
        if parts[0] == "api":
            if parts[1] not in ("models", "datasets"):
                return self.refuse(404, "")
            return self.answer_api(parts[1], parts[2:], parse_qs(url.query))
        at = parts.index("resolve")
        repo = self.repo("/".join(parts[:at]))
        if repo is None:
            return self.refuse(401, "RepoNotFound")
        commit = repo.refs.get(parts[at + 1], parts[at + 1])
        name = "/".join(parts[at + 2 :])
        if commit not in repo.commits:
            return self.refuse(404, "RevisionNotFound")
        if repo.gated and self.headers.get("Authorization") != f"Bearer {hub.TOKEN}":
            return self.refuse(401, "GatedRepo", commit)
        if name not in repo.commits[commit]:
            return self.refuse(404, "EntryNotFound", commit)
        self.send_entry(repo.commits[commit][name], name, commit, body)

    def repo(self, key: str) -> Repo | None:
        return self.served.repos.get(key)

    def answer_api(self, kinds: str, parts: list[str], query: dict[str, list[str]]) -> None:
        prefix = "" if kinds == "models" else "datasets/"
        if not parts:
            author = query.get("author", ["?"])[0]
            keys = [key for key in self.served.repos if key.startswith(f"{prefix}{author}/")]
            return self.send_json([{"id": key.removeprefix(prefix)} for key in keys])
        name, rest = "/".join(parts[:2]), parts[2:]
        repo = self.repo(prefix + name)
        if repo is None:
            return self.refuse(401, "RepoNotFound")
        revision = rest[1] if rest else "main"
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self.refuse(404, "RevisionNotFound")
        files = repo.commits[commit]
        if rest[:1] == ["tree"]:
            tree = [_entry(path, content) for path, content in files.items()]
            page = int(query.get("cursor", ["0"])[0])
            following = None if self.served.next_page is None else self.served.next_page(page)
            return self.send_json(
                tree if self.served.tree is None else self.served.tree,
                None if following is None else f"{urlsplit(self.path).path}?{following}",
            )
        siblings = [{"rfilename": path} for path in files]
        self.send_json({"id": name, "sha": commit, "siblings": siblings, "private": False})

    def send_json(self, value: Any, following: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self.served.endless:
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(OSError):
                while self.served.endless:
                    self.wfile.write(b" " * 99)
                    time.sleep(0.01)
            self.close_connection = True
            return
        self.send_header("Content-Length", str(len(content)))
        if following is not None:
            self.send_header("Link", f'<{self.served.url}{following}>; rel="next"')
        self.end_headers()
        self.wfile.write(content)

    def send_header(self, keyword: str, value: str) -> None:
        lies = {key.lower(): lie for key, lie in self.served.lies.items()}
        lie = lies.get(keyword.lower(), value)
        if lie is not None:
            super().send_header(keyword, lie)

    def refuse(self, status: int, code: str, commit: str = "", **headers: str) -> None:
        self.send_response(status)
        headers |= {"X-Error-Code": code, "X-Repo-Commit": commit}
        for header, value in headers.items():
            if value:
                self.send_header(header, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_entry(self, content: bytes, name: str, commit: str, body: bool) -> None:
        if not name.endswith(LARGE):
            etag = git_hash(content)
            return self.send_content(content, name, body, {"ETag": etag, "X-Repo-Commit": commit})
        etag = hashlib.sha256(content).hexdigest()
        self.send_response(302)
        self.send_header("Location", f"{self.served.cdn}/{etag}?name={name}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, digest: bytes, name: str, body: bool) -> None:
        every = (c for repo in self.served.repos.values() for c in repo.commits.values())
        found = (content for files in every for path, content in files.items() if path == name)
        content = next(one for one in found if hashlib.sha256(one).digest() == digest)
        self.send_content(content, name, body, {"ETag": f'"{digest.hex()}"'})

    def send_content(
        self, content: bytes, name: str, body: bool, headers: Mapping[str, str]
    ) -> None:
        start, size = 0, len(content)
        wanted = self.headers.get("Range")
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(200 if wanted is None else 206)
        for header, value in headers.items():
            self.send_header(header, value)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        if not body:
            return
        content = self.served.bodies.get(name, content)
        if name in self.served.stalled:
            self.wfile.write(content[start : (start + size) // 2])
            while name in self.served.stalled:
                time.sleep(0.02)
            self.close_connection = True
            return
        cut = self.served.cut.get(name)
        if cut is None:
            self.wfile.write(content[start:])
            return
        self.wfile.write(content[start : start + cut])
        self.wfile.flush()
        self.close_connection = True


def git_hash(content: bytes) -> str:
    """The name of a file's contents in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = git_hash(content)
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": oid, "size": len(content)}
    if path.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry
