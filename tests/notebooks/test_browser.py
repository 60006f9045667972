"""Reports and JupyterLab in a real browser without a network: charts have marks, nothing is fetched."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from specnb import report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

NAMES = [path.stem for path in report.find_notebooks()]
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
]
MARKS = """figures => figures.map(f => ({
    live: f.dataset.live,
    marks: f.querySelectorAll(['path', 'text', 'line'].map(t => `.live svg .role-mark ${t}`).join()).length,
    width: f.getBoundingClientRect().width,
    cut: f.scrollWidth > f.clientWidth + 1,
    title: f.title,
}))"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


class Watched:
    """A page with everything that it asked for or complained about."""

    def __init__(self, browser, *, width=1200):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        self.page = self.context.new_page()
        self.requests = []
        self.complaints = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )

    def open(self, path: Path):
        self.page.goto(path.as_uri())
        return self

    def wait_for_charts(self, number: int):
        self.page.wait_for_function(
            "n => document.querySelectorAll('figure.chart[data-live]').length === n",
            arg=number,
            timeout=30_000,
        )


@pytest.fixture
def watched(browser):
    made = Watched(browser)
    yield made
    made.context.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_chart_becomes_interactive_and_has_marks(small_report, watched, name):
    watched.open(small_report.out_dir / f"{name}.html")
    number = watched.page.locator("figure.chart").count()
    assert number >= 1
    watched.wait_for_charts(number)
    for figure in watched.page.eval_on_selector_all("figure.chart", MARKS):
        assert figure["live"] == "yes", figure
        assert figure["marks"] >= 2, figure
        assert figure["width"] > 300
        assert not figure["cut"]
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith("file:")] == []
    assert len(watched.requests) == 1


def test_the_index_has_working_links_and_no_script(small_report, watched):
    watched.open(small_report.out_dir / "index.html")
    links = watched.page.eval_on_selector_all("a[href]", "links => links.map(a => a.getAttribute('href'))")
    files = {link for link in links if not link.startswith("#")}
    assert files == {"index.html", "verdict.json", *(f"{name}.html" for name in NAMES)}
    assert all((small_report.out_dir / link).exists() for link in files)
    assert watched.page.locator("script").count() == 0
    assert watched.page.locator(".watermark").inner_text() == "SIMULATED"
    assert watched.complaints == []


def test_pages_are_read_on_a_narrow_screen_without_scrolling_sideways(small_report, browser):
    narrow = Watched(browser, width=400).open(small_report.out_dir / "index.html")
    sideways = narrow.page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    narrow.context.close()
    assert sideways <= 0


def test_without_scripts_the_static_pictures_are_there(small_report, browser):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto((small_report.out_dir / "02_suffix_decay.html").as_uri())
    number = page.locator("figure.chart").count()
    assert number >= 3
    assert page.locator("figure.chart .still svg").count() == number
    context.close()


def test_a_tooltip_shows_n(small_report, watched):
    watched.open(small_report.out_dir / "04_speedup_by_concurrency.html")
    watched.wait_for_charts(watched.page.locator("figure.chart").count())
    watched.page.locator("figure.chart .live svg .mark-symbol.role-mark path").first.hover(force=True)
    tip = watched.page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible", timeout=10_000)
    text = tip.inner_text()
    assert "distinct prompts" in text
    assert "interval from" in text
    assert watched.complaints == []


def test_an_injected_script_does_not_run(small_report, browser, tmp_path):
    """Should escaping ever fail, the page's policy still holds."""
    text = (small_report.out_dir / "index.html").read_text(encoding="utf-8")
    evil = "<script>document.title = 'owned'</script><img src='x:' onerror='document.title = 1'>"
    (tmp_path / "evil.html").write_text(text.replace("</main>", evil + "</main>"), encoding="utf-8")
    page = Watched(browser).open(tmp_path / "evil.html")
    page.page.wait_for_timeout(300)
    title = page.page.title()
    page.context.close()
    assert title.startswith("Should this drafter go in front of this target?")


@pytest.fixture(scope="module")
def lab(small_run, tmp_path_factory):
    """A JupyterLab server on a copy of one notebook, with settings of its own."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    root = tmp_path_factory.mktemp("lab")
    source = next(path for path in report.find_notebooks() if path.stem == "02_suffix_decay")
    node = report.read_notebook(source)
    for cell in node.cells:
        cell.source = cell.source.replace('"data/samples/demo"', repr(str(small_run.path)))
    nbformat.write(node, root / "copy.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}_DIR": str(root / name) for name in ("CONFIG", "DATA", "RUNTIME")},
    }
    command = [
        *(
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={port}",
        ),
        *("--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={root}"),
        *("--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
    ]
    log = (root / "lab.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2).close()
                break
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()


def test_jupyterlab_draws_the_charts_with_its_own_renderer(lab, browser):
    context = browser.new_context(viewport={"width": 1300, "height": 16000})
    page = context.new_page()
    foreign = []
    page.on(
        "request",
        lambda request: (
            foreign.append(request.url)
            if not request.url.startswith((lab, "data:", "blob:", lab.replace("http", "ws", 1)))
            else None
        ),
    )
    page.goto(f"{lab}/lab/tree/copy.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle", state="attached", timeout=60_000)
    page.click("text=Run")
    page.click("text=Run All Cells")
    page.wait_for_selector("text=analysed by revision", timeout=120_000)
    page.wait_for_function("document.querySelectorAll('.vega-embed svg').length >= 14", timeout=60_000)
    marks = page.eval_on_selector_all(
        ".vega-embed", "found => found.map(e => e.querySelectorAll('svg .role-mark path').length)"
    )
    errors = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count()
    context.close()
    assert len(marks) == 14
    assert min(marks) >= 2
    assert errors == 0
    assert foreign == []
