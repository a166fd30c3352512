"""The runtime environment's `setup_commands`: run once per node and job, or refused with what to use instead."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.runtime_env.plugin import RuntimeEnvPluginManager, create_for_plugin_if_needed
from ray.runtime_env import RuntimeEnv

from openrlhf.launcher.ray.setup_commands import JOB_VARIABLE, PLUGINS_VARIABLE, check_setup_commands

PLUGIN = json.dumps([{"class": "openrlhf.launcher.ray.setup_commands.SetupCommands"}])
LOG = logging.getLogger(__name__)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> RuntimeEnvPluginManager:
    """Ray's own loader, as its agent on a node calls it."""
    monkeypatch.setenv(PLUGINS_VARIABLE, PLUGIN)
    monkeypatch.setenv("RAY_RUNTIME_ENV_SETUP_COMMANDS_CACHE_SIZE_GB", "")
    return RuntimeEnvPluginManager()


async def set_up(manager: RuntimeEnvPluginManager, commands: object, *, jobs: int = 1) -> list[RuntimeEnvContext]:
    """What Ray's agent does for `jobs` workers that need the same runtime environment at the same time."""
    plugin = manager.plugins["setup_commands"]
    runtime_env = RuntimeEnv(setup_commands=commands)
    contexts = [RuntimeEnvContext() for _ in range(jobs)]
    await asyncio.gather(
        *(create_for_plugin_if_needed(runtime_env, plugin.class_instance, plugin.uri_cache, c, LOG) for c in contexts)
    )
    return contexts


def job_environment(commands: list[str] | None, *contexts: RuntimeEnvContext) -> dict[str, str]:
    """The driver's environment in a Ray job."""
    runtime_env = {"working_dir": "gcs://x.zip"} | ({} if commands is None else {"setup_commands": commands})
    environ = {JOB_VARIABLE: json.dumps({"runtime_env": runtime_env, "metadata": {}})}
    return environ | {k: v for context in contexts for k, v in context.env_vars.items()}


def test_commands_run_once_for_all_workers_of_a_job(manager: RuntimeEnvPluginManager, tmp_path: Path) -> None:
    commands = [f"sleep 0.1; echo one >> {tmp_path}/ran", f"echo two >> {tmp_path}/ran"]
    contexts = asyncio.run(set_up(manager, commands, jobs=3))
    assert (tmp_path / "ran").read_text().split() == ["one", "two"]
    check_setup_commands(job_environment(commands, contexts[2]))


def test_the_next_job_runs_them_again(manager: RuntimeEnvPluginManager, tmp_path: Path) -> None:
    commands = [f"echo x >> {tmp_path}/ran"]
    asyncio.run(set_up(manager, commands))
    plugin = manager.plugins["setup_commands"]
    for uri in plugin.class_instance.get_uris(RuntimeEnv(setup_commands=commands)):
        plugin.uri_cache.mark_unused(uri)
    asyncio.run(set_up(manager, commands))
    assert (tmp_path / "ran").read_text().split() == ["x", "x"]


def test_commands_run_in_the_working_dir(
    manager: RuntimeEnvPluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_CREATE_WORKING_DIR", str(tmp_path))
    asyncio.run(set_up(manager, ["pwd > here"]))
    assert (tmp_path / "here").read_text().strip() == os.path.realpath(tmp_path)


def test_a_failing_command_says_what_it_printed(manager: RuntimeEnvPluginManager, tmp_path: Path) -> None:
    commands = [f"{sys.executable} -c 'import sys; print(12); sys.exit(3)'", f"touch {tmp_path}/never"]
    with pytest.raises(RuntimeError, match=r"(?s)setup_commands: .* ended with 3:\n12"):
        asyncio.run(set_up(manager, commands))
    assert not (tmp_path / "never").exists()


def test_commands_must_be_strings(manager: RuntimeEnvPluginManager) -> None:
    with pytest.raises(ValueError, match="setup_commands must be a list of shell commands, not 'pip install x'"):
        asyncio.run(set_up(manager, "pip install x"))


def test_a_job_whose_commands_were_not_run_is_refused(manager: RuntimeEnvPluginManager) -> None:
    commands = ["pip install openrlhf[vllm]"]
    with pytest.raises(ValueError, match=r'this Ray ignores.*"pip".*"uv".*RAY_RUNTIME_ENV_PLUGINS=') as refusal:
        check_setup_commands(job_environment(commands))
    assert PLUGIN in str(refusal.value)
    other = asyncio.run(set_up(manager, ["true"]))
    with pytest.raises(ValueError, match="this Ray ignores"):
        check_setup_commands(job_environment(commands, *other))
    check_setup_commands(job_environment(None))
    check_setup_commands({})
