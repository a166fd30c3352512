"""Files of users in every encoding that editors write."""

import codecs
import json

import pytest

from openrlhf.agents.agent_file import check_agent_file, load_executor
from openrlhf.agents.cli.subject import read_prompts
from openrlhf.agents.files import CodeFileError, decode_text, read_code, text_lines
from openrlhf.agents.reward_file import check_reward_file
from openrlhf.agents.testing import run_episode

MARKED = {
    "no mark": "x=1 # ü\n".encode(),
    "utf-8": codecs.BOM_UTF8 + "x=1 # ü\n".encode(),
    "utf-16 le": codecs.BOM_UTF16_LE + "x=1 # ü\n".encode("utf-16-le"),
    "utf-16 be": codecs.BOM_UTF16_BE + "x=1 # ü\n".encode("utf-16-be"),
    "utf-32 le": codecs.BOM_UTF32_LE + "x=1 # ü\n".encode("utf-32-le"),
    "utf-32 be": codecs.BOM_UTF32_BE + "x=1 # ü\n".encode("utf-32-be"),
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")
REWARD = "# ü\ndef reward_func(queries, prompts, labels): return [1.0] * len(queries)\n"
AGENT = """# ü
class Agent:
    async def reset(self, states):
        return states
    async def step(self, states):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}
"""


@pytest.mark.parametrize("content", MARKED.values(), ids=MARKED)
def test_r03_text_with_and_without_a_byte_order_mark(content, tmp_path):
    assert decode_text(content) == "x=1 # ü\n"
    path = tmp_path / "f.py"
    path.write_bytes(content)
    assert read_code(path, "--flag").source == "x=1 # ü\n"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_r03_reward_and_agent_files_with_a_byte_order_mark(encoding, tmp_path):
    reward, agent = tmp_path / "my_reward.py", tmp_path / "my_agent.py"
    reward.write_text(REWARD, encoding=encoding)
    agent.write_text(AGENT, encoding=encoding)
    assert check_reward_file(reward).source == REWARD
    check_agent_file(agent)
    assert run_episode(load_executor(agent), ["x"]).reward == 1.0


def test_r03_a_coding_line_counts_as_it_does_for_python(tmp_path):
    path = tmp_path / "f.py"
    path.write_bytes('# -*- coding: latin-1 -*-\nx = "ü"\r\n'.encode("latin-1"))
    assert read_code(path, "--flag").source == '# -*- coding: latin-1 -*-\nx = "ü"\n'
    for wrong in (b"# coding: no-such\n", b"x = '\xff'\n"):
        path.write_bytes(wrong)
        with pytest.raises(CodeFileError, match=r"--flag: '.*f.py' cannot be decoded: "):
            read_code(path, "--flag")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_r03_data_rows_end_at_line_feeds_only(encoding, tmp_path):
    prompts = ["a\u2028b", "c\u0085d\x7f", "e\u2029"]
    path = tmp_path / "data.jsonl"
    rows = "\r\n".join(json.dumps({"prompt": p, "label": "x"}, ensure_ascii=False) for p in prompts)
    path.write_bytes((rows + "\r\n").encode(encoding))
    items = read_prompts(path, "prompt", "label", None)
    assert [item.prompt for item in items] == prompts
    assert [item.group_id for item in items] == ["line-1", "line-2", "line-3"]


def test_r03_lines():
    assert text_lines("a\u2028b\r\n\nc\x0b\x1c\n") == ["a\u2028b", "", "c\x0b\x1c"]
    assert text_lines("a") == ["a"]
