"""The reward sources of a run, checked before its cluster starts: files, rubrics, servers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx

from openrlhf.agents.files import CodeFile, decode_text
from openrlhf.agents.reward_file import check_reward_file
from openrlhf.agents.reward_sources import chosen_sources
from openrlhf.launcher.config import ALL, RewardConfig, TrainPPOConfig
from openrlhf.launcher.data.prompts import PromptDataset
from openrlhf.launcher.openai_servers import ServerWords, served_model
from openrlhf.launcher.proxies import ProxiedTransport
from openrlhf.launcher.redaction import redact
from openrlhf.launcher.rewards.entries import Entry, named_values, read_entries
from openrlhf.launcher.rewards.judge import JudgeSpec
from openrlhf.launcher.rewards.rubric import Rubric, RubricError, read_rubric
from openrlhf.launcher.rewards.sources import SourceSpec

log = logging.getLogger(__name__)

FLAG = "--reward.remote_url"
KEY = "OPENRLHF_JUDGE_API_KEY"
"""Variable with the key of all judges."""
WORDS = ServerWords(
    flag=FLAG, key=f"the variable {KEY}", model=f"{FLAG} openai:URL?model=NAME with", start="vllm serve JUDGE"
)
TIMEOUT = 30.0
SCHEMES = ("http://", "https://")


def reward_entries(config: RewardConfig) -> list[Entry]:
    """The sources that the flags name. Raises ValueError."""
    try:
        return read_entries(config.remote_url, config.weights)
    except ValueError as error:
        shown = "" if config.remote_url is None else f" {redact(config.remote_url)!r}"
        raise ValueError(f"{FLAG}{shown}: {error}") from error


def key_variable(name: str) -> str:
    """The variable with the key of the judge of this name, which is known as a secret by how it ends."""
    own = name.upper().replace("-", "_")
    return f"OPENRLHF_JUDGE_{own}_API_KEY" if own else KEY


def check_sources(config: TrainPPOConfig, environ: Mapping[str, str] = os.environ) -> tuple[SourceSpec, ...]:
    """The sources with their files and rubrics read; no server is asked. Raises ValueError with the flag to mend."""
    if config.agents_score:
        return ()
    entries = reward_entries(config.reward)
    for entry in entries:
        if (
            entry.kind != "file"
            and not entry.here
            and not (entry.urls and all(url.startswith(SCHEMES) for url in entry.urls))
        ):
            raise ValueError(f"{FLAG} {redact(entry.place)!r}: expected http(s) URLs or the path of a .py file")
    columns = None if ALL in config.data.extra_keys else config.data.extra_keys
    rubrics = _rubrics(config, columns, [entry.name for entry in entries if entry.kind == "judge"])
    sources: list[SourceSpec] = []
    for entry in entries:
        name, weight = entry.name, entry.weight
        if entry.kind == "file":
            sources.append(SourceSpec(name=name, weight=weight, file=_check_file(name, entry.place, columns)))
            continue
        if entry.kind == "servers":
            sources.append(SourceSpec(name=name, weight=weight, urls=entry.urls))
        else:
            key = None if entry.here else environ.get(key_variable(name)) or environ.get(KEY)
            urls = () if entry.here else entry.urls
            model = config.judge.model_name_or_path or "" if entry.here else _model(entry)
            judge = JudgeSpec(urls=urls, model=model, rubric=rubrics[name], config=config.judge, api_key=key)
            sources.append(SourceSpec(name=name, weight=weight, judge=judge))
    return tuple(sources)


def check_columns(sources: Sequence[SourceSpec], columns: Sequence[str]) -> None:
    """Further arguments of reward functions and placeholders of rubrics, once the data's columns are known.

    Raises ValueError for one that names none of them.
    """
    for source in sources:
        if source.file is not None:
            _check_file(source.name, source.file, columns)
        if source.judge is not None:
            try:
                source.judge.rubric.try_out(columns)
            except RubricError as error:
                raise ValueError(f"--judge.rubric: {error}") from error


def check_choices(column: str | None, sources: Sequence[SourceSpec], prompts: PromptDataset) -> None:
    """Whether the column's value names sources in every row. Raises ValueError with the first row where it does not."""
    if column is None or not sources:
        return
    names = [source.name for source in sources]
    for place, value in prompts.column(column):
        try:
            chosen_sources(value, names)
        except ValueError as error:
            raise ValueError(f"{place}, field {column!r} (--reward.choose_by): {error}") from error


def ask_servers(sources: Sequence[SourceSpec]) -> tuple[SourceSpec, ...]:
    """The sources with the name of every judge's model, for which its servers are asked. Raises ValueError.

    A reward server that is away is told: it may be there by the time of the first sample.
    """
    with httpx.Client(transport=ProxiedTransport(), timeout=TIMEOUT) as client:
        for url in (url for source in sources for url in source.urls):
            _look_for(client, url)
        return tuple(s if s.judge is None else replace(s, judge=_asked(client, s.judge)) for s in sources)


def _look_for(client: httpx.Client, url: str) -> None:
    try:
        client.head(url)
    except httpx.ReadTimeout:
        return  # it is there, and knows no such request
    except (httpx.TransportError, httpx.InvalidURL) as error:
        log.warning("%s %s: no answer yet (%s); samples fail until it is there", FLAG, redact(url), redact(str(error)))


def _asked(client: httpx.Client, judge: JudgeSpec) -> JudgeSpec:
    client.headers = {} if judge.api_key is None else {"authorization": f"Bearer {judge.api_key}"}
    model = judge.model
    for url in judge.urls:
        model = served_model(client, url, model, WORDS)
    return replace(judge, model=model)


def _check_file(name: str, file: str | CodeFile, columns: Sequence[str] | None) -> CodeFile:
    try:
        return check_reward_file(file, columns=columns, run=columns is not None)
    except ValueError as error:
        raise type(error)(f"{error} (reward source {name!r})" if name else str(error)) from error


def _model(entry: Entry) -> str:
    """The model that a URL of the judge names; "" where none does."""
    return next((names[0] for url in entry.urls if (names := parse_qs(urlsplit(url).query).get("model"))), "")


def _rubrics(config: TrainPPOConfig, columns: Sequence[str] | None, judges: Sequence[str]) -> dict[str, Rubric]:
    """The rubric of every judge, by its name."""
    words = config.judge.rubric
    plain = [word for word in words if word.partition("=")[0] not in judges]
    if not judges:
        return {}
    if len(words) == 1 and plain:
        rubric = _read(words[0], columns)
        return dict.fromkeys(judges, rubric)
    try:
        files = named_values(words, judges)
    except ValueError as error:
        raise ValueError(f"--judge.rubric {' '.join(words)}: {error}") from error
    if missing := [name for name in judges if name not in files]:
        named = f" {missing[0]!r}" if missing[0] else ""
        raise ValueError(f"--judge.rubric: the judge{named} of {FLAG} has none; give a TOML file")
    return {name: _read(file, columns) for name, file in files.items()}


def _read(name: str, columns: Sequence[str] | None) -> Rubric:
    file = Path(name).expanduser()
    if not file.is_file():
        raise ValueError(f"--judge.rubric: file not found: {name!r} (looked at {file.absolute()})")
    try:
        return read_rubric(decode_text(file.read_bytes()), columns)
    except (RubricError, UnicodeDecodeError) as error:
        raise ValueError(f"--judge.rubric {name!r}: {error}") from error
