import subprocess
import sys

import pytest
from reward import answer_of, reward_func

PROMPT = "<|user|>sort 31200<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("00123<|end|>", 1.0),
        ("00123", 1.0),
        ("0123<|end|>", 0.0),
        (" 00123<|end|>", 0.0),
        ("00123<|pad|><|end|>", 0.0),
        ("", 0.0),
        ("9<|assistant|>00123<|end|>", 0.0),
    ],
)
def test_reward_is_exact_match(response: str, reward: float) -> None:
    assert reward_func([PROMPT + response], [PROMPT], ["00123"])["rewards"] == [reward]


def test_one_value_per_sample() -> None:
    queries = [PROMPT + "00123<|end|>", PROMPT + "32100<|end|>", PROMPT + "junk<|end|>"]
    out = reward_func(queries, [PROMPT] * 3, ["00123"] * 3)
    assert out["rewards"] == [1.0, 0.0, 0.0]
    assert out["scores"] == out["rewards"]
    assert out["extra_logs"] == {"well_formed": [1.0, 1.0, 0.0]}


def test_query_without_an_assistant_tag_has_no_answer() -> None:
    assert answer_of("00123") == ""


def test_reward_file_imports_no_torch(quickstart) -> None:
    code = "import sys, reward; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=quickstart, check=False).returncode == 0
