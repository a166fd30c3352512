# pyright: reportMissingImports=false
"""Requests that schemathesis makes from the schema of the three formats: no 5xx, and nothing of a failed one stays.

OPENRLHF_SCHEMA_REQUESTS: how many are drawn for each of the four routes, beside those that schemathesis makes of every
schema to cover it (about 1,900 in all).
"""

import asyncio
import os
import threading
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from support.agents_chat import Direct
from support.agents_templates import QWEN3
from support.chat_openapi import description

pytestmark = [pytest.mark.timeout(1500), pytest.mark.xdist_group("schema")]  # one server counts all routes

SCOPES = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
REQUESTS = int(os.environ.get("OPENRLHF_SCHEMA_REQUESTS", "1250"))
SCHEMA = schemathesis.openapi.from_dict(description())
ANSWERS = ('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "plain", "", "<think>\na\n</think>\n\nb")


class Served:
    """A session behind the real server, on a loop of its own."""

    def __init__(self):
        self.direct = Direct(ANSWERS, template=QWEN3, max_length=10**6, max_turns=10**9)
        self.session, self.server = self.direct.session, self.direct.server
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.wait(self.server.start())
        self.url = f"{self.server.url}/s/{self.direct.session_id}/v1"
        self.headers = {"Authorization": f"Bearer {self.server.token}"}
        self.statuses: Counter[tuple[str, int]] = Counter()

    def wait(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def state(self):
        """What is recorded."""
        s = self.session
        tokens = [list(branch.recorder.token_ids) for branch in s.branches]
        return tokens, len(s.turns), s.template_breaks, s.failure, s.calls, len(s.stored), s.malformed

    def close(self):
        self.wait(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.direct.loop.close()


@pytest.fixture(scope="module")
def served():
    served = Served()
    yield served
    served.close()
    total = sum(served.statuses.values())
    print("\nschema:", dict(sorted(served.statuses.items())), total, "requests")
    assert total >= len(SCHEMA) * REQUESTS
    answered = {path for path, status in served.statuses if status == 200}
    assert len(answered) == len(SCHEMA), "a schema whose requests are all refused tests little"


@SCHEMA.parametrize()
@settings(max_examples=REQUESTS, deadline=None, derandomize=True, suppress_health_check=SCOPES)
def test_no_request_gets_a_5xx_and_no_failed_one_is_recorded(served, case):
    served.session.branches = served.session.branches[-3:]
    before = served.state()
    reply = case.call(base_url=served.url, headers=served.headers)
    served.statuses[case.path, reply.status_code] += 1
    assert reply.status_code < 500, reply.text
    if reply.status_code != 200:
        assert reply.status_code in (400, 404, 405), reply.text
        assert reply.json()["error"]["message"]
        assert served.state() == before
    elif not case.path.endswith("count_tokens"):
        assert served.state()[1] == before[1] + (case.body.get("n") or 1 if "chat" in case.path else 1)
