"""The report page: its content, its escaping, and its behaviour in a browser."""

import json
import os
import re
import select
import shutil
import subprocess
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from matplotlib.text import Text
from plotly.offline import get_plotlyjs

from made_runs import line, write_lab, write_run
from sanc.lab import claims, curves, figures, report, style, summary, traces


def claim(statement, panel, measured, spread, holds):
    return SimpleNamespace(statement=statement, panel=panel, measured=measured, spread=spread, holds=holds)


CLAIMS = (
    claim(
        "SANC reaches a given loss with fewer calls than SCR.",
        "fig2a-w1a",
        "12,400 against 21,900 calls to f = 0.2",
        "5 of 5 seeds",
        True,
    ),
    claim('CR & CRM end above <SANC> in "every" panel.', "fig2a-higgs", "1.02 ×", "0.98 to 1.07 ×", False),
    claim("SANC leaves the saddle of covtype first.", "fig3-covtype", "", "", None),
)


class Page(HTMLParser):
    """References, headings, ids and visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.references, self.headings, self.ids, self.words, self._inside = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "xlink:href"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, text):
        if not {"script", "style"} & set(self._inside):
            self.words.append(text)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = write_lab(tmp_path_factory.mktemp("lab"), seeds=2, steps=60)
    return report.write(out, traces.read(out), CLAIMS)


# ---------------------------------------------------------------------------------------------- the file


def test_the_page_is_one_file_that_refers_to_nothing_else(written):
    source = written.read_text(encoding="utf-8")
    assert written.name == "report.html"
    assert [path.name for path in written.parent.iterdir() if "report" in path.name] == ["report.html"]
    assert source.count(get_plotlyjs()) == 1
    page, source = Page(source), source.replace(get_plotlyjs(), "")
    assert page.references and all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "http://" not in source and "https://" not in source
    assert re.search(r"Content-Security-Policy.*default-src 'none'", source)  # this also binds the charting library
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)\w|<link|<iframe|<img|fetch\(|XMLHttpRequest|import\(", source)


def test_the_page_shows_claims_panels_gaps_settings_and_environment(written):
    page = Page(written.read_text(encoding="utf-8"))
    text = page.text
    for one in CLAIMS:
        assert one.statement in text and one.measured in text
    assert "Of 3 claims, 1 holds, 1 does not hold and 1 is undecided." in text
    for word in ("w1a", "higgs", "segment", "Figure 2a", "Figure 2b", "L1", "eta2", "batch_size", "49,540", "0.1.0"):
        assert word in text, word
    assert "fig3-covtype was skipped: covtype.libsvm.binary is not in the data folder" in text
    assert "NCD has finished 1 of 2 runs" in text
    assert "CR and CRM took unconditional steps only; SGD took gradient steps only." in text
    assert "2025-01-01, 2025-01-02" in text
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))


def test_the_page_lists_planned_runs_that_never_started(tmp_path):
    write_run(tmp_path, "fig1-a", "sanc", 0, [line(-1, 2.0, 0), line(0, 1.0, 4, branch="curvature")])
    plan = {"fig1-a": {"sanc": 2, "scr": 2}, "fig1-b": {"sanc": 2}, "fig1-c": {"sanc": 2}}
    (tmp_path / "skipped.json").write_text('{"fig1-c": "no <data>"}')
    text = Page(report.write(tmp_path, traces.read(tmp_path), plan=plan).read_text(encoding="utf-8")).text
    assert "SANC has finished 1 of 2 runs; SCR has finished 0 of 2 runs" in text
    assert "fig1-b : SANC has finished 0 of 2 runs" in text
    assert "fig1-c was skipped: no <data>" in text and "fig1-c : SANC" not in text


def test_all_text_is_escaped(tmp_path):
    evil = "</script><script>alert(1)</script>&\"'<b>"
    rows = [line(-1, 2.0, 0), line(0, 1.0, 4, branch="curvature"), line(1, 0.5, 8, branch="stayed", note=evil)]
    folder = write_run(tmp_path, "p", "sanc", 0, rows, figure=evil, title=evil, subtitle=evil, data_note=evil,
                       options={evil: evil, "deep": {evil: [evil]}}, problem=evil)  # fmt: skip
    (folder / "environment.json").write_text(json.dumps({evil: evil, "started": evil}))
    write_run(tmp_path, "p", "<i>m", 0, rows, figure=evil, title=evil)
    (tmp_path / "skipped.json").write_text(json.dumps({evil: evil}))
    source = report.write(tmp_path, traces.read(tmp_path), [claim(evil, evil, evil, evil, True)]).read_text(
        encoding="utf-8"
    )
    source = source.replace(get_plotlyjs(), "")
    assert "alert(1)</script>" not in source and "<script>alert" not in source and "<i>m" not in source
    assert source.count("</script>") == 3
    assert "<script>alert(1)" in Page(source).text
    data = json.loads(re.search(r'id="data">(.*?)</script>', source, re.S)[1])
    assert set(data["methods"]) == {"sanc", "<i>m"}


def test_a_page_is_written_without_runs_and_without_losses(tmp_path):
    assert "No run has started" in report.write(tmp_path / "new", []).read_text(encoding="utf-8")
    folder = write_run(tmp_path, "p", "sanc", 0, [line(-1, None, 0)], done=False)
    assert "No loss has been measured yet" in report.write(tmp_path, traces.read(tmp_path)).read_text(encoding="utf-8")
    (folder / "trace.jsonl").unlink()
    assert "No loss has been measured yet" in report.write(tmp_path, traces.read(tmp_path)).read_text(encoding="utf-8")


def test_the_curves_in_the_page_are_the_mean_curves(written):
    source = written.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', source, re.S)[1])
    runs = traces.read(written.parent)
    group = [run for run in runs if (run.panel, run.method) == ("fig2a-w1a", "sanc")]
    x, mean, low, _ = curves.mean_curve(group)
    panel = data["panels"][0]
    at, gap, below, _ = panel["charts"]["loss"]["paper_calls"]["sanc"]
    assert list(data["methods"]) == ["sanc", "scr", "cr", "crm", "ncd", "sgd"]
    assert len(gap) == len(at) == 200 and at[-1] == pytest.approx(x[-1], rel=1e-5)
    assert panel["star"] == curves.f_stars(runs)[group[0].objective]
    assert gap[100] + panel["star"] == pytest.approx(mean[100], rel=1e-4)
    assert below[100] + panel["star"] == pytest.approx(low[100], rel=1e-3)


def test_a_page_of_forty_panels_is_below_16_mb(tmp_path):
    """The size depends on panels and methods, not on steps; it is extrapolated from two panels."""
    panels = {f"fig1-{k}": dict(figure="fig1", title=f"data {k}", budget=50_000) for k in range(2)}
    write_lab(tmp_path, seeds=2, steps=400, panels=panels)
    size = report.write(tmp_path, traces.read(tmp_path)).stat().st_size
    fixed = len(report.write(tmp_path / "none", []).read_bytes())
    assert fixed + 20 * (size - fixed) < 16e6


# ---------------------------------------------------------------------------------------------- in a browser


class Browser:
    """Headless Chromium, controlled through a pipe with the standard library alone."""

    def __init__(self, binary, profile):
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        options = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
        )
        # the browser reads commands from descriptor 3 and writes responses to 4
        shell = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{to_read} 4>&{from_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, binary, str(profile)],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self._write, self._read, self._buffer, self._count, self._session = to_write, from_read, b"", 0, None
        self.events = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def _message(self, until):
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser did not respond")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ConnectionError("the browser has exited")
            self._buffer += part
        raw, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(raw)

    def send(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 20
        while True:
            response = self._message(until)
            if response.get("id") == self._count:
                assert "error" not in response, (method, response["error"])
                return response["result"]
            self.events.append(response)

    def run(self, script):
        response = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    def settle(self):
        """Wait for two frames, so that observers have run and charts are drawn."""
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))"
        self.run(frames)

    def open(self, url, width=1280, height=900, dark=False):
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url="about:blank")
        self.events.clear()
        self.send("Page.navigate", url=url)
        until = time.monotonic() + 15
        while self.run("location.protocol + document.readyState") != "file:complete":
            assert time.monotonic() < until, "the script of the page did not end"
            time.sleep(0.03)
        self.settle()

    def mouse(self, kind, x, y, **more):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def chosen(self):
        return self.run("[x, y, off.join(',')]")

    def faults(self):
        """Return exceptions and console errors, requests to other hosts, and the number of requests."""
        bad = [event for event in self.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        bad += [e for e in self.events if e["method"] == "Runtime.consoleAPICalled" and e["params"]["type"] == "error"]
        requested = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return bad, [url for url in requested if not url.startswith(("file:", "about:", "data:"))], len(requested)

    def close(self):
        try:
            self._session = None
            self.send("Browser.close")
        except (OSError, TimeoutError):
            self.process.kill()
        self.process.wait(timeout=10)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH: the report is not tested in a browser")
    chromium = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def drawn_lines(browser):
    """Return the lines of the methods in the first panel, and the text of the chart."""
    return browser.run(
        "({ lines: [...document.querySelector('.chart[data-kind=loss]').querySelectorAll('path.js-line')].map((p) => "
        "p.getAttribute('d')), text: document.querySelector('.chart[data-kind=loss]').textContent })"
    )


def test_the_page_draws_without_errors_or_requests(browser, written):
    browser.open(written.as_uri())
    bad, outside, requests = browser.faults()
    assert bad == [] and outside == [] and requests == 1
    assert browser.chosen() == ["paper_calls", "linear", ""] and browser.run("dark") is False
    found = drawn_lines(browser)
    assert len(found["lines"]) == 6 and "training loss f" in found["text"]
    assert "NaN" not in browser.run("document.body.innerHTML.replace(/<script[^]*?<\\/script>/g, '')")


@pytest.mark.slow
def test_axes_and_methods_are_selected_by_address_and_by_click(browser, written):
    browser.open(written.as_uri())
    before = drawn_lines(browser)
    browser.open(written.as_uri() + "#x=seconds&y=log&off=sgd,nonsense")
    assert browser.chosen() == ["seconds", "log", "sgd"]
    after = drawn_lines(browser)
    assert len(after["lines"]) == 5 and "seconds" in after["text"] and "f − f*" in after["text"]
    assert after["lines"][-1] != before["lines"][-1]
    browser.run("document.querySelector('input[value=calls]').click()")
    browser.run("document.querySelector('input[value=linear]').click()")
    browser.run("document.querySelector('.chip[data-method=sgd]').click()")
    browser.settle()
    assert browser.chosen() == ["calls", "linear", ""]
    assert browser.run("location.hash") == "#x=calls&y=linear&off="
    assert len(drawn_lines(browser)["lines"]) == 6 and "evaluations of values" in drawn_lines(browser)["text"]
    browser.run("for (const chip of document.querySelectorAll('.chip')) chip.click()")
    browser.settle()
    assert "No selected method" in browser.run("document.querySelector('.chart').textContent")
    bad, outside, _ = browser.faults()
    assert bad == [] and outside == []


@pytest.mark.slow
def test_every_chart_is_drawn_on_every_axis(browser, written):
    browser.open(written.as_uri(), height=20_000)
    browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
    browser.settle()
    for x in style.AXES:
        for y in ("linear", "log"):
            for value in (x, y):
                browser.run(f"document.querySelector('input[value={value}]').click()")
            browser.settle()
            drawn = browser.run("[...document.querySelectorAll('.chart')].map((box) => box.dataset.drawn)")
            assert len(drawn) > 12 and set(drawn) == {f"{x} {y}"}
            wrong = "(box) => !box.querySelector('path') || /NaN|Infinity|undefined/.test(box.innerHTML)"
            assert browser.run(f"[...document.querySelectorAll('.chart')].filter({wrong}).length") == 0
    assert browser.faults()[0] == []


@pytest.mark.slow
def test_the_pointer_shows_values_and_zooms(browser, written):
    browser.open(written.as_uri())
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.run("document.querySelector('.chart[data-kind=loss]').scrollIntoView({block: 'center'})")
    browser.settle()
    area = browser.run("document.querySelector('.chart .nsewdrag').getBoundingClientRect().toJSON()")
    whole = browser.run("document.querySelector('.chart').layout.xaxis.range")
    left, top, right, bottom = (area[side] for side in ("left", "top", "right", "bottom"))
    middle = (top + bottom) / 2
    browser.mouse("mouseMoved", (left + right) / 2, middle)
    browser.settle()
    tip = browser.run("document.querySelector('.chart .hoverlayer').textContent")
    assert all(name in tip for name in ("SANC", "SGD"))
    browser.mouse("mousePressed", left + 50, middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + 250, middle + 60, button="left", buttons=1)
    browser.mouse("mouseReleased", left + 250, middle + 60, button="left", clickCount=1)
    browser.settle()
    zoomed = browser.run("document.querySelector('.chart').layout.xaxis.range")
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    for _ in range(2):
        browser.mouse("mousePressed", left + 50, middle, button="left", clickCount=1)
        browser.mouse("mouseReleased", left + 50, middle, button="left", clickCount=1)
    browser.run("new Promise((done) => setTimeout(done, 500))")
    assert browser.run("document.querySelector('.chart').layout.xaxis.range") == pytest.approx(whole)
    assert browser.faults()[0] == []


@pytest.mark.parametrize("dark", [pytest.param(False, marks=pytest.mark.slow), True], ids=["light", "dark"])
def test_colours_follow_the_system_and_the_button(browser, written, dark):
    browser.open(written.as_uri(), dark=dark)
    ground = "getComputedStyle(document.body).backgroundColor"
    line_colour = "getComputedStyle(document.querySelector('.chart path.js-line')).stroke"
    seen = [browser.run(ground), browser.run(line_colour)]
    assert browser.run("dark") is dark
    browser.run("document.getElementById('theme').click()")
    browser.settle()
    assert browser.run("dark") is not dark
    flipped = [browser.run(ground), browser.run(line_colour)]
    assert seen[0] != flipped[0] and seen[1] != flipped[1]
    lightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (seen[0], flipped[0])]
    assert (lightness[0] < lightness[1]) is dark


@pytest.mark.parametrize(
    ("width", "dark"),
    [(375, True), (320, False)],
    ids=["375-dark", "320-light"],
)
@pytest.mark.slow
def test_a_narrow_screen_does_not_scroll_sideways(browser, written, width, dark):
    browser.open(written.as_uri(), width=width, height=812, dark=dark)
    browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
    browser.run("window.scrollTo(0, document.body.scrollHeight / 2)")
    browser.settle()
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.body.scrollWidth") <= width


@pytest.mark.parametrize(
    "name", ["a|b.csv", "*a* _b_ `c`.csv", "<b>&amp;.csv", "[x](y)~~z~~.csv", "a\\|b\\.csv", "1. a.csv", "12) a.csv",
             "- a.csv", "+ a #", "# a ##", "two\nlines.csv", "$_$.csv", "__init__.csv", "breast_cancer.csv",
             "![a](b).csv"]
)  # fmt: skip
def test_names_of_users_are_escaped(tmp_path, name):
    """Another program renders the summary, and shows each name in its own place."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    rows = [line(-1, 1.0, 0), line(0, 0.5, 10, branch="successful")]
    write_run(tmp_path, "own", "sanc", 0, rows, title=name, batch_size=1, budget=400, preset="robust", data_note=name)
    (tmp_path / "skipped.json").write_text(json.dumps({name: name}))
    runs = traces.read(tmp_path)
    claims_of_name = [claims.Claim(name, name, name, name, True)]
    tokens = markdown.parse(summary.write(tmp_path, runs, claims_of_name).read_text())
    shown = ["".join(part.content for part in token.children) for token in tokens if token.type == "inline"]
    whole = " ".join(name.split())
    assert sum(text.startswith(f"{whole}: ") and text.endswith(f"; {whole}.") for text in shown) == 1
    assert shown.count(f"{whole}: {whole}") == 1 and shown.count(whole) == 4  # missing data, and cells of the claims
    assert {part.type for token in tokens for part in token.children or ()} <= {"text", "text_special"}
    if "$" in name:
        assert any(text.get_text() == name for text in figures.draw_panel(runs, 0.0).findobj(Text))
        figures.draw_panel(runs, 0.0).canvas.draw()  # the name is no formula
