"""The report while a run goes on: on this machine only, at an address that nobody can guess."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from openrlhf.launcher.report.episodes import pack, step_block
from openrlhf.launcher.report.page import BLOCK, Page, overview, step_stats
from openrlhf.launcher.report.run_files import RunFiles, read_run

HOST = "127.0.0.1"
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class LiveReport:
    """The runs in some folders, read anew with every request. A step that is complete is read once for its numbers."""

    def __init__(self, folders: Sequence[Path | str]) -> None:
        self._folders = list(folders)
        self._stats: dict[tuple[Path, int], dict[str, Any]] = {}

    def page(self) -> str:
        """The page, without data."""
        return Page(title=" and ".join(str(folder) for folder in self._folders), live=True).html()

    def overview(self) -> bytes:
        """All of the runs but their tokens."""
        runs = [read_run(folder) for folder in self._folders]
        return pack({"runs": [overview(run, self._stats_of(run)) for run in runs]})

    def step(self, run: int, step: int) -> bytes | None:
        """The episodes of a step; None where there are none."""
        record = read_run(self._folders[run]).record if run < len(self._folders) else None
        recorded = None if record is None else record.steps().get(step)
        if record is None or recorded is None:
            return None
        return step_block(record, recorded.groups, record.samples(step), step=step)

    def _stats_of(self, run: RunFiles) -> dict[int, dict[str, Any]]:
        record = run.record
        if record is None:
            return {}
        complete = record.complete_steps()
        if missing := [step for step in complete if (record.folder, step) not in self._stats]:
            steps = record.steps()
            for step in missing:
                self._stats[record.folder, step] = step_stats(steps[step].groups, record.samples(step))
        return {step: self._stats[record.folder, step] for step in complete}


def application(report: LiveReport, token: str) -> Starlette:
    """The server below `/{token}/`; everything else is not found.

    Requests for another host than this machine are refused, so that no page of the network reads it by a name of its
    own that leads here.
    """

    async def page(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(report.page), headers=HEADERS)

    async def overview(request: Request) -> Response:
        return Response(await run_in_threadpool(report.overview), media_type=BLOCK, headers=HEADERS)

    async def step(request: Request) -> Response:
        numbers = request.path_params
        block = await run_in_threadpool(report.step, numbers["run"], numbers["step"])
        return Response(block or b"", status_code=404 if block is None else 200, media_type=BLOCK, headers=HEADERS)

    routes = [
        Route("/", page),
        Route("/overview", overview),
        Route("/run-{run:int}-step-{step:int}", step),
    ]
    app = Starlette(routes=[Mount(f"/{token}", routes=routes)])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return app


def serve(folders: Sequence[Path | str], *, port: int) -> int:
    """Serve until the process is interrupted. port: 0 takes a free one. Raises OSError where it is taken."""
    token = secrets.token_urlsafe(24)
    listening = socket.create_server((HOST, port))
    address = f"http://{HOST}:{listening.getsockname()[1]}/{token}/"
    sys.stdout.write(f"report, until you press Ctrl+C: {address}\n")
    sys.stdout.flush()
    config = uvicorn.Config(application(LiveReport(folders), token), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])
    return 0
