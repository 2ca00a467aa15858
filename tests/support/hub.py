"""A hub on loopback: the routes of the Hugging Face hub that downloads of models use."""

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK_BYTES = 2**16


@dataclass
class Repository:
    """A model of the hub.

    revisions: commit of each branch and tag. token: needed to read anything, if not None.
    is_gated: the listing is public, the files are refused. cut_after: connections break after this
    many bytes of a file's response, `num_cuts` times. is_held: they stop there until it is False.
    """

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    is_gated: bool = False
    cut_after: int | None = None
    num_cuts: int = 0
    is_held: bool = False
    is_waiting: threading.Event = field(default_factory=threading.Event)
    """Set once a response is held."""


class Hub:
    """Serves repositories, and records what is asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.downloads: Counter[str] = Counter()
        """GETs of each file."""
        self.ranges: list[str] = []
        """Range headers of GETs."""
        self.num_bytes = 0
        """Bytes of files that were sent."""
        self.address = ""
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(
                    routes=[
                        Route("/api/models/{name:path}/revision/{revision:path}", self._info),
                        Route("/api/models/{name:path}/tree/{revision:path}", self._tree),
                        Route("/{owner}/{name}/resolve/{revision}/{path:path}", self._resolve),
                    ]
                ),
                host="127.0.0.1",
                port=0,
                log_level="critical",
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def add(self, name: str, folder: Path, **options: object) -> Repository:
        """Serves the files of a folder, by their relative paths."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.repositories[name] = Repository(files, **options)  # type: ignore[arg-type]
        return self.repositories[name]

    def __enter__(self) -> "Hub":
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _open(
        self, request: Request, name: str, revision: str
    ) -> tuple[Repository, str] | Response:
        repository = self.repositories.get(name)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token is not None and given != repository.token):
            return _refusal(401, "RepoNotFound", "Invalid username or password.")
        commit = repository.revisions.get(revision)
        if commit is None and revision in repository.revisions.values():
            commit = revision
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    async def _info(self, request: Request) -> Response:
        name = request.path_params["name"]
        opened = self._open(request, name, request.path_params["revision"])
        if isinstance(opened, Response):
            return opened
        repository, commit = opened
        siblings = [{"rfilename": file} for file in repository.files]
        return JSONResponse({"id": name, "sha": commit, "siblings": siblings})

    async def _tree(self, request: Request) -> Response:
        opened = self._open(request, request.path_params["name"], request.path_params["revision"])
        if isinstance(opened, Response):
            return opened
        return JSONResponse(
            [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                for path, content in opened[0].files.items()
            ]
        )

    async def _resolve(self, request: Request) -> Response:
        place = request.path_params
        opened = self._open(request, f"{place['owner']}/{place['name']}", place["revision"])
        if isinstance(opened, Response):
            return opened
        repository, commit = opened
        if repository.is_gated:
            return _refusal(403, "GatedRepo", "Access to this model is restricted.")
        content = repository.files.get(place["path"])
        if content is None:
            return _refusal(404, "EntryNotFound", "Entry not found")
        headers = {
            "ETag": f'"{_etag(content)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        start = 0
        if wanted := request.headers.get("range"):
            self.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        headers["Content-Length"] = str(len(content) - start)
        if request.method == "HEAD":
            return Response(headers=headers)
        self.downloads[place["path"]] += 1
        body = self._send(repository, content[start:])
        return StreamingResponse(body, status_code=206 if start else 200, headers=headers)

    async def _send(self, repository: Repository, content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), CHUNK_BYTES):
            if repository.cut_after is not None and start >= repository.cut_after:
                while repository.is_held:
                    repository.is_waiting.set()
                    await asyncio.sleep(0.01)
                if repository.num_cuts:
                    repository.num_cuts -= 1
                    return  # short of its Content-Length: uvicorn closes the connection
            chunk = content[start : start + CHUNK_BYTES]
            self.num_bytes += len(chunk)
            yield chunk


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _refusal(status: int, code: str, message: str) -> Response:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return Response(json.dumps({"error": message}), status_code=status, headers=headers)
