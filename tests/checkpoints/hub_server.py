"""A local Hugging Face hub: the part of its protocol that fetching and pushing models needs.

Small files come from the hub itself. Weights are in large file storage, which is another server:
the hub redirects to it with size and sha256. Faults are injected through attributes of `Hub`.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".npz", ".bin", ".pth", ".h5", ".msgpack", ".onnx")
TOKEN = "hf_open_sesame"
NAME = "(?P<name>[^/]+(/[^/]+)?)"


@dataclass
class Repository:
    """Commits by hash, each a mapping of files, and branches."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        commit = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def find(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


class Hub:
    """`with Hub() as hub:` serves `hub.repositories` at `hub.url`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}  # large files that no commit has yet, by sha256
        self.requests: list[str] = []  # "GET /owner/name/resolve/main/config.json"
        self.break_after: dict[str, list[int]] = {}  # by file: bytes until each coming break
        self.reset = False  # whether a break is a reset, or looks like an end
        self.damaged: set[str] = set()  # files whose bytes are not those of their checksum
        self.status: int | None = None  # the answer to everything
        self.leaked_token = False  # whether the storage, a stranger, was shown the token

    def __enter__(self) -> "Hub":
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        self.url, self.storage = (f"http://127.0.0.1:{s.server_port}" for s in self.servers)
        self.threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            for server in self.servers
        ]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def add(self, name: str, files: dict[str, bytes], **traits: bool) -> Repository:
        repository = self.repositories[name] = Repository(**traits)
        repository.commit(files)
        return repository

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)


def describe(name: str, content: bytes) -> dict:
    large = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    details = {"size": len(content), "blobId": git_hash(content)}
    return {**details, "lfs": {**large, "pointerSize": 134}} if name.endswith(LARGE) else details


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubError(Exception):
    """An error response: status and error code of the hub."""


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    # fmt: off
    ROUTES = (
        ("GET", rf"/api/models/{NAME}", "info"),
        ("GET", rf"/api/models/{NAME}/revision/(?P<revision>.+)", "info"),
        ("GET", rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)", "tree"),
        ("GET|HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
        ("GET", r"/storage/(?P<sha256>\w+)/(?P<file>.+)", "large_file"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", rf"/api/models/{NAME}/preupload/(?P<revision>.+)", "preupload"),
        ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/storage/(?P<sha256>\w+)", "upload"),
        ("POST", rf"/api/models/{NAME}/commit/(?P<revision>.+)", "commit"),
    )
    # fmt: on

    def route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.body = self.read_body()
        try:
            if self.hub.status is not None:
                raise HubError(self.hub.status)
            for commands, pattern, method in self.ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in commands.split("|"):
                    return getattr(self, method)(**match.groupdict())
            raise HubError(404)
        except HubError as error:
            status, code = (*error.args, "")[:2]
            headers = {"X-Error-Code": code, "X-Error-Message": f"refused: {code or status}"}
            self.answer(status, headers=headers if code else {})

    do_GET = do_HEAD = do_POST = do_PUT = route  # noqa: N815

    def info(self, name: str, revision: str = "main") -> None:
        repository, commit = self.find(name, revision)
        siblings = [
            {"rfilename": file, **(describe(file, content) if "blobs=" in self.path else {})}
            for file, content in repository.commits[commit].items()
        ]
        answer = {"id": name, "sha": commit, "private": repository.private, "siblings": siblings}
        self.answer_json(answer)

    def tree(self, name: str, revision: str) -> None:
        repository, commit = self.find(name, revision)
        entries = []
        for file, content in repository.commits[commit].items():
            info = describe(file, content)
            entry = {"type": "file", "path": file, "size": info["size"], "oid": info["blobId"]}
            if "lfs" in info:
                entry["lfs"] = {**info["lfs"], "oid": info["lfs"]["sha256"]}
            entries.append(entry)
        self.answer_json(entries)

    def resolve(self, name: str, revision: str, file: str) -> None:
        repository, commit = self.find(name, revision)
        if repository.gated and not self.is_known():
            raise HubError(401, "GatedRepo")
        content = repository.commits[commit].get(file)
        if content is None:
            raise HubError(404, "EntryNotFound")
        info = describe(file, content)
        if "lfs" not in info:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{info["blobId"]}"'}
            return self.answer_file(file, content, headers)
        sha256 = info["lfs"]["sha256"]
        self.hub.uploads[sha256] = content
        self.answer(
            302,
            headers={
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.storage}/storage/{sha256}/{file}",
            },
        )

    def large_file(self, sha256: str, file: str) -> None:
        self.hub.leaked_token |= "Authorization" in self.headers
        self.answer_file(file, self.hub.uploads[sha256], {"ETag": '"of-the-storage"'})

    def create(self) -> None:
        if not self.is_known():
            raise HubError(401)
        wanted = json.loads(self.body)
        name = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        answer = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            return self.answer(409, json.dumps(answer).encode())
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.hub.add(name, {".gitattributes": b""}, private=private)
        self.answer_json(answer)

    def validate(self) -> None:
        self.answer_json({"warnings": [], "errors": []})

    def preupload(self, name: str, revision: str) -> None:
        files = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {file: "lfs" if file.endswith(LARGE) else "regular" for file in files}
        answer = [{"path": f, "uploadMode": modes[f], "shouldIgnore": False} for f in files]
        self.answer_json({"files": answer})

    def batch(self, name: str) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.storage}/storage/{one['oid']}"}}}
            for one in json.loads(self.body)["objects"]
        ]
        self.answer_json({"transfer": "basic", "objects": objects})

    def upload(self, sha256: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise HubError(400)
        self.hub.uploads[sha256] = self.body
        self.answer(200)

    def commit(self, name: str, revision: str) -> None:
        repository, parent = self.find(name, revision)
        if not self.is_known():
            raise HubError(403)
        files = dict(repository.commits[parent])
        for line in self.body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                files[item["value"]["path"]] = self.hub.uploads[item["value"]["oid"]]
        oid = repository.commit(files, revision)
        self.answer_json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def find(self, name: str, revision: str) -> tuple[Repository, str]:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.is_known()):
            raise HubError(404 if self.is_known() else 401, "RepoNotFound")
        commit = repository.find(revision)
        if commit is None:
            raise HubError(404, "RevisionNotFound")
        return repository, commit

    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer_file(self, name: str, content: bytes, headers: dict[str, str]) -> None:
        total, start = len(content), 0
        if name in self.hub.damaged:
            content = bytes(byte ^ 1 for byte in content)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked:
            start = int(asked[1])
            headers = {**headers, "Content-Range": f"bytes {start}-{total - 1}/{total}"}
        breaks = self.hub.break_after.get(name)
        cut = breaks.pop(0) if breaks and self.command == "GET" else None
        self.answer(206 if asked else 200, content[start:], headers, cut)

    def answer_json(self, answer: object) -> None:
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def answer(
        self,
        status: int,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[:cut])
        if cut is not None and self.hub.reset:
            self.wfile.flush()
            linger = struct.pack("ii", 1, 0)  # close by reset, without waiting for what is unsent
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Do not log: `hub.requests` records everything."""
