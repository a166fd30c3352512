"""Secrets are in nothing that is printed or saved. Every test searches by the secret's value."""

from __future__ import annotations

import io
import json
import logging
import sys
import tomllib
from pathlib import Path

import pytest

from openrlhf.launcher import redaction
from openrlhf.launcher.command_line import prepare, run_command
from openrlhf.launcher.commands import COMMANDS, SERVE_RM, TRAIN_PPO_RAY, TRAIN_SFT
from openrlhf.launcher.logging.logger import masked
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.main import main
from openrlhf.launcher.parsing import UsageError, parse
from openrlhf.launcher.redaction import (
    RedactingFormatter,
    find_secrets,
    is_secret_name,
    redact,
    redact_uncaught,
    redact_value,
    remember,
    remember_variables,
    report_error,
    secrets_of_words,
)
from openrlhf.launcher.saved import config_toml
from openrlhf.launcher.secret_flags import VARIABLE, as_variable, split_secret_flags, take_secret_flags
from support.launcher_flags import parse_train_ppo

SECRET = "s3cr3t-Wert"
URL = f"http://user:{SECRET}@host:5000/get_reward"
ENGINE = json.dumps({"hf_token": SECRET, "max_num_seqs": 8})
BASE = ["--actor.model_name_or_path", "A", "--data.prompt_dataset", "D", "--vllm.num_engines", "1"]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_remembered", set())


NAMES = """
key token logger.wandb.key --reward.api_key api-key HF_TOKEN hf_token WANDB_API_KEY AWS_SECRET_ACCESS_KEY
password DB_PASSWORD client_secret use_wandb authToken --x.key
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_l04_names_that_are_secret(name: str) -> None:
    assert is_secret_name(name)


def test_l04_names_that_are_none() -> None:
    names = "data.input_key label_key best_metric_key pad_token eos_token max_num_batched_tokens tokenizer monkey"
    assert [name for name in names.split() if is_secret_name(name)] == []
    flags = {flag.path for command in COMMANDS.values() for flag in command.flags.values() if flag.secret}
    assert flags == {"logger.wandb.key", "ref.api_key", "reward.api_key", "api_key"}


WRONG = [
    # every form in which a command line can carry a secret and be wrong
    ["--logger.wandb.key", SECRET, "x"],
    ["--logger.wandb.key", "x", SECRET],
    ["--logger.wandb.ky", SECRET],
    ["--x.key=" + SECRET],
    ["--train.seed", "1", "-logger.wandb.key", SECRET],
    ["--train.seed", "1", "logger.wandb.key=" + SECRET],
    ["--train.seed", "-reward.api_key=" + SECRET],
    [f"--reward.api_key={SECRET}", "--train.seed", SECRET],
    ["--use_wandb", SECRET, "--pretrain", "m"],
    [f"--use_wandb={SECRET}", "--pretrain", "m"],
    ["--pretrain", "m", "--logger.wandb.kye", SECRET, "--wandb_keys", SECRET],
    ["--remote_rm_url", URL],
    ["--reward.remote_url", URL, URL],
    ["--train.seed", URL],
    ["--train.seed", f"https://{SECRET}@host/x"],
    ["--train.seed", f"http://host/x?a=1&api_key={SECRET}"],
    ["--vllm.engine_args", ENGINE, ENGINE],
    ["--vllm.engine_args", f'{{"hf_token": "{SECRET}"'],
    ["--train.seed", ENGINE],
    ["--train.seed", f"WANDB_API_KEY={SECRET}"],
    ["--train.seed", f"HF_TOKEN='{SECRET}'"],
    ["--train.seed", f"Authorization: Bearer {SECRET}"],
]


@pytest.mark.parametrize("words", WRONG, ids=range(len(WRONG)))
def test_l04_no_usage_error_shows_a_secret(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([*words, "--wrong"], words):
        assert run_command(TRAIN_PPO_RAY, argv, lambda config: 0) == 2
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err
        assert main(["plan", "--", *argv]) == 2
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err


def test_l04_a_broken_rule_shows_no_secret() -> None:
    words = [*BASE, "--reward.remote_url", f"{URL},", "--reward.api_key", SECRET, "--train.agent_func_path", "a.py"]
    words += ["--vllm.engine_args", json.dumps({"hf_token": SECRET, "seed": 1})]
    with pytest.raises(UsageError) as caught:
        prepare(TRAIN_PPO_RAY, words, Machine(gpus=0))
    text = str(caught.value)
    assert text.count("user:***@host") >= 2
    assert SECRET not in text


SECRETS = ["--logger.wandb.key", SECRET, "--reward.api_key", SECRET, "--reward.remote_url", URL]
SECRETS += ["--vllm.engine_args", ENGINE, "--data.prompt_dataset", f"https://{SECRET}@host/data"]


def test_l04_no_saved_or_printed_configuration_holds_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_train_ppo(SECRETS)
    saved = config_toml(TRAIN_PPO_RAY, config)
    assert SECRET not in saved
    tables = tomllib.loads(saved)
    assert json.loads(tables["vllm"]["engine_args"]) == {"hf_token": "***", "max_num_seqs": 8}
    assert tables["reward"]["remote_url"] == URL.replace(SECRET, "***")
    assert SECRET not in str(masked(config))
    args = [*SECRETS, *BASE[:2], *BASE[4:], "--print_config", "--algo.advantage.estimator", "reinforce"]
    assert run_command(TRAIN_PPO_RAY, [*args, "--rollout.n_samples_per_prompt", "1"], lambda config: 0) == 0
    printed = capsys.readouterr()
    assert "prompt_dataset" in printed.out
    assert SECRET not in printed.out + printed.err
    served = parse(SERVE_RM, ["--api_key", SECRET]).config
    assert SECRET not in config_toml(SERVE_RM, served)
    assert SECRET not in config_toml(TRAIN_SFT, parse(TRAIN_SFT, ["--logger.wandb.key", SECRET]).config)


def test_l04_a_masked_part_of_a_value_is_not_read_back_silently(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config_toml(TRAIN_PPO_RAY, parse_train_ppo(SECRETS)), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        parse(TRAIN_PPO_RAY, ["--config", str(path)])
    flags = ("data.prompt_dataset", "reward.remote_url", "vllm.engine_args")
    wanted = [f"{flag} was saved without its secret (***): give --{flag} on the command line" for flag in flags]
    assert sorted(p.removeprefix(f"--config {path}: ") for p in caught.value.problems) == sorted(wanted)
    again = parse(TRAIN_PPO_RAY, ["--config", str(path), *SECRETS]).config
    assert again == parse_train_ppo(SECRETS)
    plain = parse_train_ppo(["--data.input_template", "*** {} ***", "--vllm.engine_args", '{"max_num_seqs":8}'])
    path.write_text(config_toml(TRAIN_PPO_RAY, plain), encoding="utf-8")
    assert parse(TRAIN_PPO_RAY, ["--config", str(path)]).config == plain


def test_l04_no_traceback_and_no_log_line_shows_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    remember([SECRET])

    def fail(reward_api_key: str) -> None:
        raise RuntimeError(f"{reward_api_key} was refused by {URL}")

    with pytest.raises(RuntimeError) as caught:
        fail(SECRET)
    error = caught.value
    assert report_error(error) == 1
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "asked with %s", (SECRET,), None)
    record.exc_info = (type(error), error, error.__traceback__)
    handler.emit(record)
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "was refused by http://user:***@host" in text
    assert "asked with ***" in stream.getvalue()
    assert SECRET not in text + stream.getvalue()


def test_l04_an_exception_that_nobody_catches_shows_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    remember([SECRET])
    redact_uncaught()
    error = KeyboardInterrupt(f"while asking {URL} with {SECRET}")
    sys.excepthook(type(error), error, None)
    text = capsys.readouterr().err
    assert "KeyboardInterrupt: while asking http://user:***@host" in text
    assert SECRET not in text


def test_l04_a_run_remembers_its_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    flags = [*SECRETS, *BASE[:2], *BASE[4:], "--algo.advantage.estimator", "reinforce"]

    def start(config: object) -> int:
        return report_error(OSError(f"{SECRET} and from-the-environment"))

    assert run_command(TRAIN_PPO_RAY, [*flags, "--rollout.n_samples_per_prompt", "1"], start) == 1
    text = capsys.readouterr().err
    assert "*** and ***" in text
    assert SECRET not in text


def test_what_a_package_calls_its_parameter_is_printed_as_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(ValueError("`ds.zero_stage` 3 and `max_length` 8: `this` stays")) == 1
    assert capsys.readouterr().err == "error: --ds.zero_stage 3 and --data.max_len 8: `this` stays\n"
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "longer than `agent.timeout` %s s", (3,), None)
    assert RedactingFormatter("%(message)s").format(record) == "longer than --agent.timeout 3 s"


def test_l04_what_is_no_secret_stays() -> None:
    for text in (
        "sorted(rows, key=len)",
        "--reward.api_key is sent to a reward server",
        "Unexpected token: x",
        "http://host:5000/get_reward?q=a@b",
        "pad_token='<pad>' in step 3 of 4",
        "user@host and key: value",
    ):
        assert redact(text) == text
        assert list(find_secrets("", text)) == []
    assert redact_value("vllm.engine_args", '{"max_num_seqs":8}') == '{"max_num_seqs":8}'
    assert redact("the word keyword stays, KEY does not", ["KEY"]) == "the word keyword stays, *** does not"


def test_l04_the_folder_of_a_shell_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_remembered", set())
    remember_variables({"PWD": "/data/here", "DB_PWD": "hunter22"})
    assert redact("/data/here/model hunter22") == "/data/here/model ***"


def test_l04_secrets_of_a_command_line() -> None:
    words = [
        "--logger.wandb.key",
        "A1",
        "--train.seed",
        "2",
        "--vllm.engine_args",
        ENGINE,
        f"--reward.remote_url={URL}",
    ]
    assert secrets_of_words(words) == ["A1", SECRET, SECRET]


def test_l04_secret_flags_travel_by_the_environment() -> None:
    flags = [*BASE, *SECRETS, "--train.seed", "3", "--input_key=--x"]
    seen, hidden = split_secret_flags(flags)
    assert SECRET not in " ".join(seen)
    environment = as_variable(hidden) | {"HOME": "/h"}
    words = [*seen, *take_secret_flags(environment)]
    assert environment == {"HOME": "/h"}
    known = [w for w in words if w != "--input_key=--x"]
    assert parse_train_ppo(known) == parse_train_ppo([w for w in flags if w != "--input_key=--x"])
    assert as_variable([]) == {}
    assert take_secret_flags({}) == []
    twice = ["--reward.remote_url", URL, "--reward.remote_url", "http://b"]
    assert split_secret_flags(twice) == (["--reward.remote_url", "http://b"], [])
    assert split_secret_flags(list(reversed([twice[3], twice[0], URL, twice[2]])))[1] == []
    assert VARIABLE.startswith("OPENRLHF_")
