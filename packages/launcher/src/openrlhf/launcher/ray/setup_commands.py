"""`{"setup_commands": [...]}` in the runtime environment of a Ray job: shell commands, run once per node and job.

Ray itself ignores that key. `SetupCommands` makes it work in a Ray whose nodes were all started with

    RAY_RUNTIME_ENV_PLUGINS='[{"class": "openrlhf.launcher.ray.setup_commands.SetupCommands"}]' ray start ...

and everywhere else `check_setup_commands` stops the run with a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray._private.runtime_env.plugin import RuntimeEnvPlugin

if TYPE_CHECKING:
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray.runtime_env import RuntimeEnv

KEY = "setup_commands"
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Where `ray job submit` leaves the job's runtime environment for the driver."""
DONE_VARIABLE = "OPENRLHF_SETUP_COMMANDS"
"""In every process for which the commands were run: their digest."""
FOLDER_VARIABLE = "RAY_RUNTIME_ENV_CREATE_WORKING_DIR"
"""Where Ray's agent says into which folder it has unpacked the working_dir, while it sets a job up."""
PLUGINS_VARIABLE = "RAY_RUNTIME_ENV_PLUGINS"
SHOWN = 4000
"""Characters of a failed command's output in the error."""


class SetupCommands(RuntimeEnvPlugin):
    """Ray's runtime-environment agent on a node makes one of these."""

    name = KEY
    priority = 20  # after Ray's own keys, which have 10 at most

    def __init__(self) -> None:
        # With a cache of no size Ray forgets a URI once no job uses it, and the next job runs the commands again.
        os.environ[f"RAY_RUNTIME_ENV_{KEY.upper()}_CACHE_SIZE_GB"] = "0"
        self._done: set[str] = set()
        self._lock = asyncio.Lock()

    @staticmethod
    def validate(runtime_env_dict: dict[str, Any]) -> None:
        """Raises ValueError for anything but a list of strings."""
        commands = runtime_env_dict[KEY]
        if not isinstance(commands, list) or not all(isinstance(command, str) for command in commands):
            raise ValueError(f"{KEY} must be a list of shell commands, not {commands!r}")

    def get_uris(self, runtime_env: RuntimeEnv) -> list[str]:
        """One URI per list of commands and working_dir; Ray counts who uses it."""
        commands = runtime_env.get(KEY)
        return [f"{KEY}://{digest([*commands, runtime_env.get('working_dir') or ''])}"] if commands else []

    async def create(
        self, uri: str | None, runtime_env: RuntimeEnv, context: RuntimeEnvContext, logger: logging.Logger
    ) -> int:
        """Run the commands in the job's working_dir, unless they were run for this URI. Returns its size."""
        folder = os.environ.get(FOLDER_VARIABLE)  # now: another job may change it while this one waits
        async with self._lock:
            if uri is not None and uri not in self._done:
                await run_commands(runtime_env[KEY], os.environ | context.env_vars, logger, folder)
                self._done.add(uri)
        return 1

    def modify_context(
        self, uris: list[str], runtime_env: RuntimeEnv, context: RuntimeEnvContext, logger: logging.Logger
    ) -> None:
        """Tell the worker that the commands were run."""
        context.env_vars[DONE_VARIABLE] = digest(runtime_env[KEY])

    def delete_uri(self, uri: str, logger: logging.Logger) -> int:
        """The last user is gone. Returns the freed size."""
        self._done.discard(uri)
        return 1


async def run_commands(
    commands: Sequence[str], environ: Mapping[str, str], logger: logging.Logger, folder: str | None = None
) -> None:
    """Run shell commands one after the other. Raises RuntimeError with the output of the first one that fails.

    Bounded by Ray's `setup_timeout_seconds`, which cancels this; the command and its children are killed then.
    """
    for command in commands:
        logger.info("%s: %s", KEY, command)
        process = await asyncio.create_subprocess_shell(
            command,
            env=environ,
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        text = output.decode(errors="replace")
        logger.info("%s", text)
        if process.returncode:
            raise RuntimeError(f"{KEY}: {command!r} ended with {process.returncode}:\n{text[-SHOWN:]}")


def digest(commands: Sequence[str]) -> str:
    """A short name of a list of commands."""
    return hashlib.sha256(json.dumps(list(commands)).encode()).hexdigest()[:16]


def check_setup_commands(environ: Mapping[str, str]) -> None:
    """Raises ValueError in the driver of a Ray job whose `setup_commands` nobody has run."""
    runtime_env = json.loads(environ.get(JOB_VARIABLE) or "{}").get("runtime_env") or {}
    commands = runtime_env.get(KEY)
    if not commands or environ.get(DONE_VARIABLE) == digest(commands):
        return
    plugins = json.dumps([{"class": f"{SetupCommands.__module__}.{SetupCommands.__name__}"}])
    raise ValueError(
        f'--runtime-env-json has {{"{KEY}": ...}}, which this Ray ignores. For packages use Ray\'s own keys, as '
        '{"pip": ["PACKAGE"]} or {"uv": ["PACKAGE"]}; for other commands start Ray on every node with '
        f"{PLUGINS_VARIABLE}='{plugins}'"
    )
