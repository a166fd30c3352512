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
from playwright.sync_api import Browser

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


READ = """
async (pages) => Promise.all(pages.map(async (page) => {
  const answer = await fetch(page);
  const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
  const links = [...parsed.querySelectorAll("article a[href]")];
  return {
    page,
    ok: answer.ok,
    links: links.map((link) => new URL(link.getAttribute("href"), page).href),
    escapes: parsed.querySelector("article").textContent.split("\\\\|").length - 1,
    ids: [...parsed.querySelectorAll("[id]")].map((element) => element.id),
  };
}))
"""


def test_every_page_is_there_and_links_within_the_site_lead_somewhere(browser: Browser, site: str) -> None:
    page = browser.new_page()
    page.goto(f"{site}/")
    found = page.locator("nav a[href]").evaluate_all("all => all.map(link => link.href)")
    pages = sorted({link.partition("#")[0] for link in found if link.startswith(site)})
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    read = {entry["page"]: entry for entry in page.evaluate(READ, pages)}
    assert [address for address, entry in read.items() if not entry["ok"]] == []
    assert [address for address, entry in read.items() if entry["escapes"]] == []
    lost = []
    for address, entry in read.items():
        for link in entry["links"]:
            target, _, anchor = link.partition("#")
            if target.startswith(site) and (target not in read or (anchor and anchor not in read[target]["ids"])):
                lost.append(f"{address} -> {link}")
    assert lost == []
    page.close()


def test_the_search_finds(browser: Browser, site: str) -> None:
    page = browser.new_page()
    page.goto(f"{site}/")
    links = page.locator("a").filter(visible=True)

    def shown() -> set[str]:
        return set(links.evaluate_all("all => all.map(a => a.href)"))

    before = shown()
    page.keyboard.press("/")
    page.keyboard.type("staleness")
    for _ in range(75):  # at most 15 s
        if shown() - before:
            break
        page.wait_for_timeout(200)
    found = shown() - before
    assert any("/async_training/" in address for address in found), found
    page.close()
