"""report.html in a real browser: toggles, axes and hover work, nothing is loaded or logged, 400 px and paper are fine.

Needs Chromium and its driver (Debian: apt-get install chromium chromium-driver).
"""

import base64
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedfp8.paper.report import write_report
from test_paper_records import write_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
selenium = pytest.importorskip("selenium", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium and chromedriver: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """FP32 and UQ over two seeds, a variant of DQ, and a cell that has not learned."""
    runs = tmp_path_factory.mktemp("page")
    for seed in (0, 1):
        write_run(runs, "fp32", seed, [0.40, 0.60 + seed / 100, 0.7], 400_000, sizes=100)
        write_run(runs, "uq", seed, [0.35, 0.55, 0.7], 50_000, sizes=25)
    write_run(runs, "dq", 0, [0.3, 0.5, 0.69], 20_000, name="dq:dq.kappa_up=16-seed0", dq__kappa_up=16.0)
    write_run(runs, "fp32", 0, [0.1], 400, cell="resnet18-cifar10-iid")
    for summary in runs.glob("*/*"):
        (summary / "summary.json").write_text('{"parameters": 1000, "machine": {"cpu": "test"}}')
    return write_report(runs).path


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page, freshly loaded; afterwards: not a word on the console, not a request but for the file."""
    size(browser, 1200, 900)
    load(browser, page.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = [
        e["request"]["url"] for e in sent if e["documentURL"] == page.as_uri()
    ]  # not those of the browser's own tab
    assert asked and all(url == page.as_uri() or url.startswith("data:") for url in asked), asked


def load(browser: Any, address: str = "") -> None:
    """On a busy machine `get` may time out, or return before the page's script has run."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.wait import WebDriverWait

    address = address or browser.current_url
    for _ in range(3):
        with contextlib.suppress(TimeoutException):
            browser.get("about:blank")  # so that nothing of the page as it was can be taken for the new one
            browser.get(address)
            WebDriverWait(browser, 60).until(lambda b: b.find_elements("css selector", "#s0 .controls select"))
            return
    raise AssertionError("the page does not load")


def size(browser: Any, width: int, height: int, mobile: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def names(browser: Any, plot: str = "main") -> list[str]:
    """The lines drawn in a plot of the first section."""
    script = f"return [...document.querySelectorAll('#s0 .plot.{plot} .series')].map(e => e.dataset.name)"
    return list(browser.execute_script(script))


def ticks(browser: Any, plot: str = "main") -> list[str]:
    script = f"return [...document.querySelectorAll('#s0 .plot.{plot} .xtick')].map(e => e.textContent)"
    return list(browser.execute_script(script))


FP32, UQ, DQ = "FP32 FedAvg", "FP8FedAvg-UQ", "FP8FedAvg-DQ (ours), dq.kappa_up=16"


def test_the_page_says_the_result_first(opened: Any) -> None:
    said = opened.find_element("css selector", ".headline").text
    assert said.startswith("lenet-cifar10-iid: FP8FedAvg-DQ (ours), dq.kappa_up=16 needed ")
    assert "times fewer bytes than FP32 to reach 69.0 % accuracy: 60 kB instead of 1.2 MB" in said
    assert [e.text for e in opened.find_elements("css selector", "h2")][:2] == [
        "lenet-cifar10-iid",
        "Smoke check: resnet18-cifar10-iid",
    ]


def test_methods_can_be_switched_off_and_on(opened: Any) -> None:
    assert names(opened) == [FP32, UQ, DQ]
    assert names(opened, "bits") == [f"{name}, {way}" for name in (FP32, UQ, DQ) for way in ("down", "up")]
    box = opened.find_element("css selector", "#s0 input[data-label='uq']")
    box.click()
    assert names(opened) == [FP32, DQ] and f"{UQ}, up" not in names(opened, "bits")
    box.click()
    assert names(opened) == [FP32, UQ, DQ]
    for label in opened.find_elements("css selector", "#s0 .controls input"):
        label.click()
    assert names(opened) == []


def test_the_axis_is_bytes_or_rounds_linear_or_logarithmic(opened: Any) -> None:
    from selenium.webdriver.support.select import Select

    axis, scale = (Select(e) for e in opened.find_elements("css selector", "#s0 .controls select"))
    assert scale.first_selected_option.text == "log" and "kB" in ticks(opened)[0]
    curve = "return document.querySelector('#s0 .plot.main path.line').getAttribute('d')"
    logarithmic = opened.execute_script(curve)
    scale.select_by_visible_text("linear")
    assert opened.execute_script(curve) != logarithmic and "0 B" in ticks(opened)
    axis.select_by_visible_text("rounds")
    assert ticks(opened) == ["0", "1", "2", "3"] == ticks(opened, "bits")  # whole rounds only


@pytest.mark.parametrize("width", [1200, 400])
def test_hovering_shows_the_values_of_the_nearest_point(opened: Any, width: int) -> None:
    size(opened, width, 900)
    load(opened)
    script = """
      const series = `#s0 .plot.main .series[data-name='${arguments[0]}'] circle`;
      const circle = document.querySelectorAll(series)[arguments[1]];
      circle.scrollIntoView({block: 'center'});
      const box = circle.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    """
    for name, point, wanted in (
        (UQ, 1, ["round 2: accuracy 55.0 % ± 0.0", "100 kB sent (mean of 2 seeds)"]),
        (DQ, 2, ["round 3: accuracy 69.0 %", "60 kB sent"]),
        (FP32, 1, ["round 2: accuracy 60.5 % ± 0.7", "800 kB sent (mean of 2 seeds)"]),
    ):
        x, y = opened.execute_script(script, name, point)
        opened.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x + 1, "y": y + 1})
        (tip,) = opened.find_elements("css selector", ".tip")
        assert tip.text.splitlines() == [name, *wanted]
        inside = (
            "const t = document.querySelector('.tip').getBoundingClientRect(); return [t.left, t.right, innerWidth]"
        )
        left, right, window = opened.execute_script(inside)
        assert left >= 0 and right <= window
        far = opened.execute_script(
            "const t = arguments[0].getBoundingClientRect(); return Math.abs(t.top + t.height / 2 - arguments[1])",
            tip,
            y,
        )
        assert far < 80  # beside the point
    opened.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 1, "y": 1})
    assert opened.find_elements("css selector", ".tip") == []


def test_nothing_sticks_out_at_400_pixels(opened: Any) -> None:
    size(opened, 400, 900, mobile=True)
    load(opened)
    opened.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert opened.execute_script("return document.documentElement.scrollWidth") == 400
    assert (
        opened.execute_script("return document.querySelector('#s0 .plot.main svg').getBoundingClientRect().width") > 300
    )


def test_dark_and_light(opened: Any) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"

    def luminance() -> float:
        return sum(int(v) for v in opened.execute_script(background)[4:-1].split(","))

    before = luminance()
    opened.find_element("id", "theme").click()
    assert abs(luminance() - before) > 400
    opened.find_element("id", "theme").click()
    assert luminance() == before
    for scheme, dark in (("dark", True), ("light", False)):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        opened.execute_script("delete document.documentElement.dataset.theme")
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert (luminance() < 200) == dark
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_it_prints(opened: Any) -> None:
    data = base64.b64decode(opened.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert data.startswith(b"%PDF") and 1 <= data.count(b"/Type /Page\n") <= 12


def test_on_paper_no_table_is_cut_off_and_the_colours_of_the_key_are_there(opened: Any) -> None:
    size(opened, 700, 900)  # the width of a printed page
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    wide = "return [...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
    assert max(opened.execute_script(wide)) <= 700
    keys = "return [...document.querySelectorAll('.key')].map(k => getComputedStyle(k).printColorAdjust)"
    assert set(opened.execute_script(keys)) == {"exact"}
    shown = "return [...document.querySelectorAll('#s0 .controls label')].filter(l => l.offsetWidth).length"
    assert opened.execute_script(shown) == 3  # the methods; no controls
    opened.execute_script("document.querySelector('#s0 input').click()")
    assert opened.execute_script(shown) == 2  # what is switched off is not in the key either
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    drawn = "return document.querySelector('#s0 .plot.main svg').viewBox.baseVal.width"
    assert opened.execute_script(drawn) == 700
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_everything_about_the_runs_is_there(opened: Any) -> None:
    opened.execute_script("document.querySelectorAll('#s0 details').forEach(d => { d.open = true })")
    text = opened.find_element("id", "s0").text
    for wanted in (
        "All settings", "dq.kappa_up", "Bits per weight, tensor by tensor", "Who took part", "2 clients took part",
        "Rejected updates: 0", "Where the time went", "Rounds of FP8FedAvg-UQ, seed 1: 3 of 3 rounds",
        "Departs from the paper's setup",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "had sent, both directions" in opened.find_element("css selector", ".about").get_attribute("textContent")
