"""The Markdown check on texts made for it."""

from __future__ import annotations

import pytest

import check_docs


@pytest.fixture
def faults(tmp_path, monkeypatch):
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A `first` heading\n\n## Second, with a comma\n")

    def check(text: str) -> list[str]:
        file = tmp_path / "page.md"
        file.write_text(text)
        return check_docs.check(file, {"train.seed", "algo.kl.init_coef"})

    return check


@pytest.mark.parametrize(
    "text",
    [
        "[file](other.md)",
        "[anchor](other.md#second-with-a-comma)",
        "[anchor](other.md#a-first-heading)",
        "[site](https://example.invalid/nothing)",
        "# Here\n\n[own](#here)",
        "```python\nx = await f()\n```",
        "`--train.seed` and `--algo.kl.*`",
        "```text\n[no](link.md)\n```",
    ],
)
def test_good(faults, text):
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[file](absent.md)", "'absent.md' leads nowhere"),
        ("[anchor](other.md#third)", "'other.md#third' leads nowhere"),
        ("[out](../../etc)", "leads nowhere"),
        ("```python\nx = = 1\n```", "does not compile"),
        ("`core/absent.py`", "there is no core/absent.py"),
        ("`--train.sed 1`", "--train.sed is no flag"),
    ],
)
def test_bad(faults, text, said):
    assert len(faults(text)) == 1
    assert said in faults(text)[0]
