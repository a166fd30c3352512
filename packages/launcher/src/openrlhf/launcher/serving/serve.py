"""`serve_rm`: loads the reward model, binds the address, serves until INT or TERM."""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import Any

from openrlhf.launcher.preflight import check_model
from openrlhf.launcher.redaction import configure_logging, report_error
from openrlhf.launcher.supervised_config import ServeRMConfig

GRACE_SECONDS = 30
"""How long a stopping server waits for the requests that it has accepted."""
BACKLOG = 2048
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve_rm(config: ServeRMConfig) -> int:
    """Serve until a signal. Returns the exit code: 0, or 1 with one message for a mistake of the user."""
    configure_logging(logging.INFO, quiet=("httpx", "filelock"))
    try:
        check_exposure(config)
        model = check_model(config.reward.model_name_or_path, "--reward.model_name_or_path")
        with bind(config.host, config.port) as listener:
            _serve(config, model, listener)
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


def _serve(config: ServeRMConfig, model: str, listener: socket.socket) -> None:
    import uvicorn

    from openrlhf.launcher.serving.app import RewardService
    from openrlhf.launcher.serving.scorer import RewardScorer

    scorer = RewardScorer(
        model,
        config.ds,
        max_len=config.data.max_len,
        batch_size=config.batch_size,
        normalize=config.reward.normalize_enable,
    )
    service = RewardService(scorer, batch_size=config.batch_size, api_key=config.api_key)
    listener.listen(BACKLOG)  # before the address is announced, so that nobody is refused
    sys.stdout.write(greeting(config, listener.getsockname()[1]))
    sys.stdout.flush()
    options = uvicorn.Config(
        service.app(),
        http=_refusing_protocol(),
        log_level="warning",
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=BACKLOG,
        lifespan="on",
    )
    uvicorn.Server(options).run(sockets=[listener])


def _refusing_protocol() -> Any:
    """uvicorn's protocol, with its one refusal of its own, of what is no HTTP, in the form of the others."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Refusing(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        transport: Any

        def send_400_response(self, msg: str) -> None:
            body = json.dumps({"error": msg}).encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return Refusing


def check_exposure(config: ServeRMConfig) -> None:
    """ValueError for an address that others can reach, without a key."""
    if config.host not in _LOOPBACK and config.api_key is None and not config.insecure:
        raise ValueError(
            f"--host {config.host} can be reached from other machines: add --api_key KEY, or --insecure to allow "
            "everybody to use the server"
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before the model is loaded: a port in use is found at once. Raises ValueError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    return listener


def greeting(config: ServeRMConfig, port: int) -> str:
    """What to write into `--reward.remote_url`, and how to be reachable from elsewhere."""
    name = socket.gethostname()
    if config.host in _LOOPBACK:
        return (
            f"reward server: http://{config.host}:{port}/get_reward (this machine only)\n"
            f"to be reachable as http://{name}:{port}/get_reward: --host 0.0.0.0 --api_key KEY, and "
            "--reward.api_key KEY in the trainer\n"
        )
    key = " --reward.api_key KEY" if config.api_key else ""
    return f"reward server: --reward.remote_url http://{name}:{port}/get_reward{key}\n"
