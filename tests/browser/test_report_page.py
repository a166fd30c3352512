"""The report in a real browser: a run of 200 steps of 64 samples, clicked through; two runs; a run that goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from openrlhf.launcher.main import main
from openrlhf.launcher.report.live import LiveReport, application
from support.report_runs import HOSTILE, PER_STEP, WORST, write_run

STEPS = 200
MIB = 2**20


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "large", steps=STEPS)
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@contextmanager
def opened(browser: Browser, address: str, **options: object) -> Iterator[Page]:
    """The page, without any request but for itself and without a word in its console."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.locator("html[data-ready]").wait_for(state="attached")
    yield page
    assert said == []
    if address.startswith("file:"):
        assert [url for url in asked if not url.startswith("blob:")] == [address]
    context.close()


def rows(page: Page) -> list[str]:
    return page.locator(".list button").all_inner_texts()


def background(page: Page, text: str) -> str:
    """The colour behind the last token that shows this text."""
    return page.locator(".token", has_text=text).last.evaluate("e => e.style.background")


def test_the_worst_episode_is_found_and_coloured(browser: Browser, report: Path) -> None:
    assert report.stat().st_size <= 15 * MIB
    with opened(browser, report.as_uri()) as page:
        expect(page.locator("#summary")).to_contain_text("The reward rose")
        assert page.locator("#curves .u-over").count() >= 3
        assert rows(page)[0].startswith("-3")
        page.keyboard.press("j")
        expect(page.locator(".own .text")).to_have_text(WORST)
        page.keyboard.press("j")
        expect(page.locator(".own .text")).not_to_have_text(WORST)
        page.keyboard.press("k")
        expect(page.locator(".own .text")).to_have_text(WORST)
        page.select_option("#step", "3")
        page.select_option("#sort", "gap")
        assert len(rows(page)) == PER_STEP + 1
        page.locator(".list button").first.click()
        page.select_option("#colour", "difference")
        expect(page.locator(".legend")).to_contain_text("0.9 and more")
        body = page.locator(".own .token")
        assert "0.75" in body.last.evaluate("e => e.style.background")
        assert body.first.evaluate("e => e.style.background") != body.last.evaluate("e => e.style.background")
        body.last.hover()
        expect(page.locator("#tip")).to_contain_text("trainer log-prob")
        page.select_option("#colour", "version")
        expect(page.locator(".legend")).to_contain_text("version 2")


def test_hostile_text_is_text(browser: Browser, report: Path) -> None:
    with opened(browser, report.as_uri()) as page:
        page.select_option("#step", "2")
        page.select_option("#sort", "order")
        page.locator(".list button").nth(2).click()
        shown = page.locator(".own .text")
        expect(shown).to_contain_text(HOSTILE[: HOSTILE.index("\x1b")])
        expect(shown).to_contain_text("⟨U+001B⟩[31mred▯▯⟨U+202E⟩esrever ▯Ω▯▯漢▯▯▯🙂")
        page.select_option("#sort", "failed")
        page.locator(".list button").first.click()
        expect(page.locator(".detail pre")).to_contain_text("Traceback")
        assert page.title() == "large"


def test_turns_tools_images_branches_and_search(browser: Browser, report: Path) -> None:
    with opened(browser, report.as_uri()) as page:
        page.select_option("#step", "1")
        page.select_option("#sort", "order")
        page.locator(".list button").nth(1).click()
        expect(page.locator(".segment > summary")).to_contain_text(
            ["prompt", "turn 1, ended by stop, reward 0.25", "environment", "turn 2, ended by stop, reward 0.5"]
        )
        expect(page.locator(".region[data-what='tool call']")).to_have_count(2)
        expect(page.locator(".region[data-what='tool response']")).to_have_count(1)
        assert page.locator(".detail img").evaluate("e => e.decode().then(() => e.naturalWidth)") == 48
        page.locator(".list button").nth(4).click()
        expect(page.locator(".tree")).to_contain_text("2 branches of this episode")
        page.locator(".branch").nth(1).click()
        expect(page.locator(".own .text")).to_contain_text("all others by size")
        page.keyboard.press("/")
        page.keyboard.type("CALCULATOR")
        page.keyboard.press("Enter")
        expect(page.locator(".list button")).to_have_count(1)
        assert page.locator(".hit").count() == 2 * len("calculator")


def test_two_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    one, two = (
        write_run(tmp_path / name, steps=4, actor__eps_clip=clip) for name, clip in (("one", 0.2), ("two", 0.1))
    )
    page_file = tmp_path / "both.html"
    assert main(["report", str(one), "--compare", str(two), "--output", str(page_file)]) == 0
    with opened(browser, page_file.as_uri()) as page:
        legend = page.locator("#curves .u-legend").first
        expect(legend).to_contain_text("one")
        expect(legend).to_contain_text("two")
        differing = page.locator("#settings table").first
        expect(differing).to_contain_text("--actor.eps_clip")
        expect(differing).to_contain_text("0.1")
        page.select_option("#run", "1")
        page.keyboard.press("j")
        expect(page.locator(".own .text").first).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_and_phones(browser: Browser, report: Path, theme: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": theme}
    with opened(browser, report.as_uri(), **phone) as page:
        colour = "getComputedStyle(document.body).backgroundColor"
        first = page.evaluate(colour)
        assert first == {"light": "rgb(255, 255, 255)", "dark": "rgb(14, 17, 22)"}[theme]
        page.locator("#theme").click()
        assert page.evaluate(colour) != first
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator(".list button").first.click()
        expect(page.locator(".detail")).to_be_visible()
        expect(page.locator(".side")).to_be_hidden()
        page.locator(".back").click()
        expect(page.locator(".side")).to_be_visible()


def test_a_run_that_goes_on_is_shown_as_it_goes(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=2)
    config = uvicorn.Config(application(LiveReport([run]), "token"), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        with opened(browser, f"http://127.0.0.1:{port}/token/") as page:
            page.keyboard.press("j")
            expect(page.locator(".own .text").first).to_be_visible()
            kept = page.locator(".own .text").first.inner_text()
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 3, "time": 0.0, "train/reward": 0.9, "new/metric": 1.0}) + "\n")
            expect(page.locator("#curves summary")).to_contain_text("6 more", timeout=15_000)
            assert page.locator(".own .text").first.inner_text() == kept
    finally:
        server.should_exit = True
        thread.join()
