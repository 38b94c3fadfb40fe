"""A hub on loopback: repositories in memory, the routes that huggingface_hub uses, and faults on request.

Large files are redirected to another origin (`localhost` instead of 127.0.0.1), as the real hub does.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 2048  # bytes from which files are stored as LFS objects


@dataclass
class Repo:
    """A repository with several commits, and how the server treats it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: str = "open"  # `gated`, `denied` (gated, with a token without access)
    flipped: set[str] = field(default_factory=set)  # files sent with a flipped byte
    cut: set[str] = field(default_factory=set)  # files whose connection breaks in the middle
    short: set[str] = field(default_factory=set)  # files that end too early, without an error
    status: int = 0  # sent in place of the list of files

    def push(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch, and return it."""
        previous = self.commits.get(self.branches.get(branch, ""), {})
        content = {**previous, **files}
        digest = hashlib.sha1(repr([len(self.commits), branch, sorted(content.items())]).encode())
        commit = digest.hexdigest()
        self.commits[commit] = content
        self.branches[branch] = commit
        return commit

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class Hub:
    """The server. `requests` has (method, path) of each request."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.connections: list[socket.socket] = []
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name: str, files: Mapping[str, bytes] | Path, kind: str = "models") -> Repo:
        """Add a repository with the files of a folder or mapping."""
        if isinstance(files, Path):
            folder = files
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        repo = Repo()
        repo.push(files)
        self.repos[f"{kind}/{name}"] = repo
        return repo

    def env(self, home: Path) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with its cache below `home`."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def files(self) -> Counter[str]:
        """Return how often the content of each file was requested."""
        gets = [path for method, path in self.requests if method == "GET" and not path.startswith("/api/")]
        return Counter(path.rpartition("/")[2] for path in gets)

    def close(self) -> None:
        """Stop, and end open connections. A second call has no effect."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def setup(self) -> None:
        super().setup()
        self.hub.connections.append(self.connection)

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *args: Any) -> None:
        return

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if path.startswith("/blob/"):
            return self.send_content(path)
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            return self.send_listing(*match.groups())
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            folder, name, revision, file = match.groups()
            return self.send_file("datasets" if folder else "models", name, revision, file)
        return self.send(404, b"{}")

    def find(self, kind: str, name: str, revision: str) -> tuple[Repo, str] | None:
        """Return the repository and the commit of a revision; otherwise send the error."""
        repo = self.hub.repos.get(f"{kind}/{name}")
        if repo is None:
            self.fail(404 if "Authorization" in self.headers else 401, "RepoNotFound")
            return None
        if repo.status:
            self.send(repo.status, b"{}")
            return None
        commit = repo.commit_of(revision)
        if commit is None:
            self.fail(404, "RevisionNotFound")
            return None
        return repo, commit

    def send_listing(self, kind: str, name: str, listing: str | None, revision: str | None) -> None:
        found = self.find(kind, name, revision or "main")
        if found is None:
            return
        repo, commit = found
        files = repo.commits[commit]
        value: Any
        if listing == "tree":
            value = [entry(path, content) for path, content in files.items()]
        else:
            value = {
                "id": name,
                "sha": commit,
                "siblings": [{"rfilename": path} for path in files],
                "tags": [],
                "private": False,
                "gated": repo.access != "open" and "auto",
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
            }
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send_file(self, kind: str, name: str, revision: str, file: str) -> None:
        found = self.find(kind, name, revision)
        if found is None:
            return None
        repo, commit = found
        if repo.access != "open":
            return self.fail(403 if "Authorization" in self.headers else 401, "GatedRepo")
        content = repo.commits[commit].get(file)
        headers = {"X-Repo-Commit": commit}
        if content is None:
            return self.fail(404, "EntryNotFound", headers)
        facts = entry(file, content)
        if "lfs" not in facts:
            return self.send_bytes(repo, file, content, headers | {"ETag": f'"{facts["oid"]}"'})
        headers |= {"X-Linked-ETag": f'"{facts["lfs"]["oid"]}"', "X-Linked-Size": str(len(content))}
        headers["Location"] = f"http://localhost:{self.hub.port}/blob/{kind}/{name}/{commit}/{file}"
        return self.send(302, b"", headers)

    def send_content(self, path: str) -> None:
        _, _, kind, org, name, commit, file = path.split("/", 6)
        repo = self.hub.repos[f"{kind}/{org}/{name}"]
        self.send_bytes(repo, file, repo.commits[commit][file], {})

    def send_bytes(self, repo: Repo, file: str, content: bytes, headers: dict[str, str]) -> None:
        if file in repo.flipped:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if file in repo.short:
            content = content[:-1]
        start = 0
        if match := re.match(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if file in repo.cut and self.command == "GET":
            headers["Content-Length"] = str(len(body))
            self.send(206 if start else 200, body[: len(body) // 2], headers)
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        self.send(206 if start else 200, body, headers)

    def fail(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def entry(path: str, content: bytes) -> dict[str, Any]:
    """Return a file as the hub lists it."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    value: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if len(content) >= LARGE:
        sha256 = hashlib.sha256(content).hexdigest()
        value["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
        value["oid"] = hashlib.sha1(f"pointer to {sha256}".encode()).hexdigest()  # git stores a pointer
    return value
