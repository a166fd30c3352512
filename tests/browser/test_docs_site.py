"""The documentation site, built and opened: its links lead somewhere and its search finds."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).resolve().parents[2]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the site, built anew and served on this machine."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    handler = functools.partial(Quiet, directory=str(folder / "out" / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_page_is_there_and_links_within_the_site_lead_somewhere(browser: Browser, site: str) -> None:
    page = browser.new_page()
    page.goto(f"{site}/")
    seen: set[str] = set()
    links = page.locator("nav a[href]").evaluate_all("all => all.map(a => a.href)")
    pages = sorted({link.partition("#")[0] for link in links if link.startswith(site)})
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    for address in pages:
        answer = page.request.get(address)
        assert answer.ok, address
        page.goto(address, wait_until="domcontentloaded")
        own = page.locator("article a[href]").evaluate_all("all => all.map(a => a.href)")
        anchors = page.locator("article [id]").evaluate_all("all => all.map(e => e.id)")
        for link in own:
            target, _, anchor = link.partition("#")
            if target == address and anchor:
                assert anchor in anchors, link
            elif target.startswith(site) and target not in seen:
                seen.add(target)
                assert page.request.get(target).ok, f"{address} links to {target}"
    page.close()


def test_the_search_finds(browser: Browser, site: str) -> None:
    page = browser.new_page()
    page.goto(f"{site}/")
    page.keyboard.press("/")
    page.keyboard.type("staleness")
    result = page.locator("a", has_text="Async").filter(visible=True).last
    expect(result).to_be_visible(timeout=15_000)
    page.close()
