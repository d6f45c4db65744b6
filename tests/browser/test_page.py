"""The report in a browser: tables sort, legends and menus work, both themes are readable, and nothing overflows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_runs import make_run

from foogd.reports.collection import find_runs
from foogd.reports.grouping import collect
from foogd.reports.html import html_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium with its driver here")

WIDTHS = {"phone": 390, "desk": 1280}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page of three methods at two alphas, one method at two settings, with published numbers and thresholds."""
    root = tmp_path_factory.mktemp("runs")
    for alpha in (0.1, 0.5):
        for number, method in enumerate(("fedavg", "fedavg+foogd", "fedrod+foogd")):
            for seed in (0, 1):
                make_run(root / f"{alpha}-{method}-{seed}", method, seed=seed, alpha=alpha, preset="cifar10", rounds=20,
                         good=0.04 * ((number + 1) % 3), samples=seed == 0, calibration=0.05)  # fmt: skip
        make_run(root / f"{alpha}-m", "fedavg+foogd", alpha=alpha, preset="cifar10", rounds=20, lambda_m=0.1,
                 calibration=0.05)  # fmt: skip
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(html_report(collect(find_runs([root])), maps=2))
    return page.as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    home = tmp_path_factory.mktemp("profile")
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={home}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield browser
    browser.quit()


def arrive(browser, go) -> None:
    """Go to a page and wait for all of it: on a busy machine the driver may answer while the page is still read, or
    while the one before is still shown, so that one is marked."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_script("window.left = true")
    go()
    there = "return !window.left && document.readyState === 'complete'"
    WebDriverWait(browser, 60, poll_frequency=0.02).until(lambda one: one.execute_script(there))


@pytest.fixture
def visit(chromium, address):
    """Open the page in a window of this width, with the system's theme, or as it is printed."""

    def go(width: int = 1280, theme: str = "light", media: str = "screen"):
        features = [{"name": "prefers-color-scheme", "value": theme}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        arrive(chromium, lambda: chromium.get(address))
        chromium.execute_script("try { localStorage.clear(); } catch (e) {}")
        arrive(chromium, lambda: chromium.get(address))
        return chromium

    return go


def test_it_opens_from_disk_without_a_complaint_and_loads_nothing(visit):
    browser = visit()
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_the_page_never_moves_sideways(visit, width, theme):
    browser = visit(width, theme)
    wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1] == width
    # Nor does anything stick out, but for what lies in a box that scrolls.
    out = browser.execute_script(
        """return [...document.querySelectorAll('main *')].filter(one => {
             const box = one.getBoundingClientRect();
             return box.width && box.right > innerWidth + 1 && !one.closest('.scroll, pre, svg');
           }).map(one => one.outerHTML.slice(0, 120))"""
    )
    assert out == []


OVERLAPS = """
const found = [];
for (const chart of document.querySelectorAll('svg.chart')) {
  const box = chart.getBoundingClientRect();
  if (!box.width) continue;
  const texts = [...chart.querySelectorAll('text')].filter(one => one.getBoundingClientRect().width);
  const boxes = texts.map(one => one.getBoundingClientRect());
  boxes.forEach((a, i) => {
    if (a.left < box.left - 2 || a.right > box.right + 2 || a.top < box.top - 2 || a.bottom > box.bottom + 2)
      found.push(chart.getAttribute('aria-label') + ': ' + texts[i].textContent + ' sticks out');
    boxes.slice(i + 1).forEach((b, j) => {
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 1 && y > 3)
        found.push([chart.getAttribute('aria-label'), texts[i].textContent, texts[i + 1 + j].textContent].join(': '));
    });
  });
}
return found;
"""


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_texts_in_charts_do_not_overlap(visit, width):
    browser = visit(width)
    assert browser.execute_script("return document.querySelectorAll('svg.chart').length") > 10
    assert browser.execute_script(OVERLAPS) == []


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_charts_have_text_that_can_be_read(visit, width):
    sizes = visit(width).execute_script(
        """return [...document.querySelectorAll('svg.chart text')].map(one => [
             one.getBoundingClientRect().height, one.textContent]).filter(([height]) => height)"""
    )
    assert min(sizes)[0] > 10, min(sizes)


def first_table(browser):
    return browser.execute_script(
        "return [...document.querySelector('#results table').tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.dataset.v))"
    )


def click_head(browser, index):
    browser.execute_script(
        "const heads = document.querySelector('#results thead').rows; heads[heads.length - 1].cells[arguments[0]]"
        ".querySelector('button').click()",
        index,
    )


def test_a_head_sorts_its_column_and_the_other_way_round(visit):
    browser = visit()
    before = first_table(browser)
    click_head(browser, 2)
    down = [float(row[2]) for row in first_table(browser)]
    assert down == sorted(down, reverse=True)
    click_head(browser, 2)
    up = [float(row[2]) for row in first_table(browser)]
    assert up == down[::-1]
    click_head(browser, 0)
    names = [row[0] for row in first_table(browser)]
    assert names == sorted(names)
    assert sorted(map(tuple, first_table(browser)), key=str) == sorted(map(tuple, before), key=str)
    marks = browser.execute_script(
        "return [...document.querySelectorAll('#results table')][0].querySelectorAll('[aria-sort=ascending]').length"
    )
    assert marks == 1


def test_cells_without_a_number_come_last_whichever_way(visit):
    browser = visit()
    for _ in range(2):
        column = browser.execute_script(
            """const table = document.querySelector('#detectors .panel.shown table');
               const heads = [...table.tHead.rows[0].cells];
               const index = heads.findIndex(one => one.textContent.includes('score norm'));
               heads[index].querySelector('button').click();
               return [...table.tBodies[0].rows].map(row => row.cells[index].dataset.v)"""
        )
        assert column[-1] == ""
        numbers = [float(value) for value in column[:-1]]
        assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


def test_a_key_of_the_legend_hides_its_series_in_all_charts_of_the_section(visit):
    browser = visit()
    count = """return [...document.querySelectorAll('#training .panel.shown [data-series="fedavg"]')]
               .filter(one => one.getBoundingClientRect().width).length"""
    shown = browser.execute_script(count)
    assert shown > 2
    press = """const key = [...document.querySelectorAll('#training .panel.shown .key')]
               .find(one => one.dataset.key === 'fedavg'); key.click(); return key.getAttribute('aria-pressed')"""
    assert browser.execute_script(press) == "false"
    assert browser.execute_script(count) == 0
    others = "return document.querySelectorAll('#training .panel.shown [data-series]:not(.off)').length"
    assert browser.execute_script(others) > 0
    assert browser.execute_script(press) == "true"
    assert browser.execute_script(count) == shown


def test_a_menu_shows_one_panel_and_a_setting_counts_for_all_sections(visit):
    browser = visit()
    state = """return [...document.querySelectorAll('select[data-menu="Setting"]')].map(menu => {
        const group = menu.closest('.switch');
        const shown = [...group.children].filter(one => one.classList.contains('shown'));
        return [menu.selectedOptions[0].text, shown.length, shown[0].querySelector('.panel-title').textContent];
      })"""
    first = browser.execute_script(state)
    assert len(first) > 4
    assert all(count == 1 and name == title for name, count, title in first)
    browser.execute_script(
        """const menu = document.querySelector('#training select[data-menu="Setting"]');
           menu.value = '1'; menu.dispatchEvent(new Event('change'))"""
    )
    second = browser.execute_script(state)
    assert all(count == 1 and name == title for name, count, title in second)
    assert {name for name, _, _ in second} == {"alpha = 0.5"}


def background(browser):
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_the_theme_follows_the_system_until_a_reader_chooses(visit):
    light, dark = background(visit(theme="light")), background(visit(theme="dark"))
    assert light != dark
    browser = visit(theme="light")
    press = "document.getElementById('theme').click(); return document.getElementById('theme').textContent"
    assert [browser.execute_script(press) for _ in range(3)] == ["Theme: light", "Theme: dark", "Theme: auto"]
    for _ in range(2):
        browser.execute_script(press)
    assert background(browser) == dark
    arrive(browser, browser.refresh)
    assert background(browser) == dark


CONTRAST = """
const parts = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const back = light(parts(getComputedStyle(document.body).backgroundColor));
const low = [];
for (const query of ['h1', '.lead', '.findings dd', 'tbody th', '.n b', '.n i', '.pub', 'figcaption .note', 'nav a',
                     '.chart text', '.fine']) {
  const one = document.querySelector(query);
  const style = getComputedStyle(one);
  const front = light(parts(one.ownerSVGElement ? style.fill : style.color));
  const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  if (ratio < 4.5) low.push([query, ratio]);
}
return low;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_themes(visit, theme):
    assert visit(theme=theme).execute_script(CONTRAST) == []


def test_the_map_can_be_coloured_by_class(visit):
    browser = visit()
    colours = """return [...new Set([...document.querySelectorAll('#maps .map .k-in path')]
                 .map(one => getComputedStyle(one).stroke))].length"""
    assert browser.execute_script(colours) == 1
    browser.execute_script(
        "const menu = document.querySelector('select[data-paint]'); menu.value = 'class';"
        "menu.dispatchEvent(new Event('change'))"
    )
    assert browser.execute_script(colours) == 5


def test_print_leaves_the_menus_out_and_is_light(visit):
    browser = visit(theme="dark", media="print")
    assert background(browser) == "rgb(255, 255, 255)"
    hidden = browser.execute_script("return getComputedStyle(document.querySelector('nav')).display")
    assert hidden == "none"
    assert browser.execute_script("return getComputedStyle(document.querySelector('.menu')).display") == "none"


def test_without_a_script_everything_is_shown(chromium, visit, address):
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        arrive(chromium, lambda: chromium.get(address))
        shown = chromium.execute_script(
            "return [...document.querySelectorAll('.panel')].every(one => one.getBoundingClientRect().height > 0)"
        )
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert shown


def test_the_page_is_where_the_template_is():
    import foogd.reports.html

    folder = Path(foogd.reports.html.__file__).parent
    assert {"page.html", "style.css", "script.js"} <= {path.name for path in folder.iterdir()}
