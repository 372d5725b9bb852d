# SPDX-License-Identifier: Apache-2.0
"""Reports in a real browser: what people see, press and wait for."""

import shutil
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._observe.records import Record, Site

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

SECONDS = 1000  # in the milliseconds that the browser counts
QUICK = 100


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield started
        started.close()


@pytest.fixture
def load(browser, tmp_path):
    """Opens a report; at the end nothing may have gone wrong or been asked for."""
    opened = []

    def open_page(report, size=(1440, 900), scheme="light", **options):
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            **options,
        )
        page = context.new_page()
        page.set_default_timeout(20 * SECONDS)
        problems, requests = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        path = report.save(tmp_path / f"report{len(opened)}.html")
        page.goto(path.as_uri())
        opened.append((context, problems, requests, path.as_uri()))
        return page

    yield open_page
    for context, problems, requests, address in opened:
        context.close()
        assert problems == []
        assert requests == [address]


def site(path, name="__call__", value=None, grad=None, **options):
    if value is None:
        value = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    return Site(value=value, grad=grad, path=path, name=name, how="output", **options)


NAN = np.array([[1.0, np.nan, 2.0]], np.float32)


def decoder():
    """A record as of a decoder of two blocks; the second one breaks."""
    weights = np.tril(np.ones((2, 3, 6, 6), np.float32))
    weights /= weights.sum(-1, keepdims=True)
    grad = np.full((4, 8), 0.5, np.float32)
    return Record(
        (
            site(("embed",), grad=grad),
            site(("blocks", 0, "attn"), "weights", value=weights),
            site(("blocks", 0, "attn"), grad=grad),
            site(("blocks", 0, "mlp"), grad=grad),
            site(("blocks", 0), grad=grad),
            site(("blocks", 1, "attn"), "weights", value=weights),
            site(("blocks", 1, "attn"), grad=grad),
            site(("blocks", 1, "mlp"), value=NAN, grad=NAN),
            site(("blocks", 1, "mlp"), value=NAN, grad=NAN, index=1),
            site(("blocks", 1), value=NAN, grad=NAN),
            site((), value=NAN),
        )
    )


def texts(page):
    """The sites that are shown and meant, from above."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".row.site:not(.outside)")]
               .sort((a, b) => a.ariaRowIndex - b.ariaRowIndex)
               .map((row) => row.node.site.text)"""
    )


def labels(page):
    return page.locator(".row .label").all_inner_texts()


def cursor(page):
    """What the table says is active, as assistive technology is told."""
    active = page.get_attribute("#table", "aria-activedescendant")
    return page.locator(f"#{active} .label").inner_text()


def test_the_tree_shows_modules_with_their_calls(load):
    page = load(tt.report(decoder(), title="A decoder"))
    assert page.inner_text("h1") == "A decoder"
    assert page.title() == "A decoder"
    assert labels(page) == [
        "A decoder",
        "embed",
        "blocks",
        "0",
        "attn",
        "weights",
        "mlp",
        "1",
        "attn",
        "weights",
        "mlp",
        "__call__#1",
    ]
    rows = page.locator("[role=row][aria-level]")
    assert rows.nth(0).get_attribute("aria-expanded") == "true"
    assert rows.nth(5).get_attribute("aria-level") == "5"
    assert page.get_attribute("#table", "aria-rowcount") == "13"


def test_rows_fold_and_unfold(load):
    page = load(tt.report(decoder()))
    page.locator(".row", has_text="blocks").locator(".twisty").click()
    assert labels(page)[-1] == "blocks"
    assert page.locator(".row .dot").count() == 1
    page.locator(".row", has_text="blocks").click()
    assert len(labels(page)) == 12
    page.click("#fold")
    assert labels(page)[1:] == ["embed", "blocks"]
    assert page.inner_text("#fold") == "Expand all"


def test_numbers_are_those_of_the_record(load):
    value = np.array([[0.0, 0.5], [0.0, 1.5]], np.float32)
    record = Record((site(("a",), value=value, grad=2 * value),))
    page = load(tt.report(record))
    heads = page.locator("#head > *").all_inner_texts()
    cells = page.locator(".row [role=gridcell]").all_inner_texts()
    row = dict(zip(heads, cells))
    assert row["Mean"] == "0.500"
    assert row["Std"] == "0.612"
    assert row["Max |x|"] == "1.50"
    assert row["Dead"] == "50 %"
    assert row["Grad norm"] == "3.16"
    assert row["Grad / value"] == "2.00"
    assert row["Memory"] == "16 B"
    assert row["Type"] == "2\N{MULTIPLICATION SIGN}2 f32"


def test_the_verdict_leads_to_the_site(load):
    page = load(tt.report(decoder()))
    verdicts = page.locator("a.verdict").all_inner_texts()
    assert verdicts == [
        "First non-finite: blocks/1/mlp:__call__ (1 NaN)",
        "First non-finite gradient: blocks/1:__call__ (1 NaN)",
    ]
    page.locator("a.verdict").first.click()
    assert page.locator("#panel h2").inner_text() == "blocks/1/mlp:__call__"
    assert "1 NaN of 3 values" in page.inner_text(".alarm")
    assert page.locator(".row.first .chip.first").inner_text() == "first: 1 NaN"
    assert page.url.endswith("#blocks%2F1%2Fmlp%3A__call__")


def test_an_address_opens_its_site(load):
    page = load(tt.report(decoder()))
    page.evaluate("location.hash = 'blocks%2F0%3A__call__'")
    page.wait_for_selector("#panel h2")
    assert page.locator("#panel h2").inner_text() == "blocks/0:__call__"


def test_all_finite_is_said(load):
    page = load(tt.report(Record((site(("a",)),))))
    assert page.inner_text(".verdict") == "All finite"
    assert page.is_disabled("#bad")


@pytest.mark.parametrize(
    "glob",
    [
        "blocks/*",
        "blocks/**",
        "**/mlp",
        "**:weights",
        "blocks/*/attn:weights",
        "**/[am]*",
        "**/[!a]*",
        "blocks/?/mlp:",
        "**#1",
        "**/mlp:__call__#1",
        "*",
        "**",
        "blocks/1/**",
        "*:__call__",
        "blocks/*:nothing",
    ],
)
def test_globs_mean_what_they_mean_to_the_library(load, glob):
    record = decoder()
    page = load(tt.report(record))
    page.fill("#filter", glob)
    chosen = tt.Select(glob)
    assert set(texts(page)) == {one.text for one in record if chosen(one)}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 11),
        ("MLP", 3),
        ("attn weights", 2),
        ("attn & ~weights", 2),
        ("embed | **:weights", 3),
        ("~blocks", 2),
        (r"re:blocks/\d:", 2),
        ("nowhere", 0),
    ],
)
def test_words_and_operators_filter(load, text, count):
    page = load(tt.report(decoder()))
    page.fill("#filter", text)
    assert len(texts(page)) == count
    assert page.is_visible("#empty") == (count == 0)
    shown = f"{count} of 11 sites" if count < 11 else "11 sites"
    assert page.inner_text("#shown") == shown


def test_a_broken_expression_is_marked_and_changes_nothing(load):
    page = load(tt.report(decoder()))
    page.fill("#filter", "embed")
    page.fill("#filter", "re:(")
    assert page.get_attribute("#filter", "aria-invalid") == "true"
    assert texts(page) == ["embed:__call__"]
    page.fill("#filter", "")
    assert page.get_attribute("#filter", "aria-invalid") is None


def test_only_what_is_not_finite(load):
    page = load(tt.report(decoder()))
    assert page.inner_text("#bad") == "Non-finite only (4)"
    page.click("#bad")
    assert page.get_attribute("#bad", "aria-pressed") == "true"
    wanted = ["__call__", "blocks/1:__call__", "blocks/1/mlp:__call__"]
    assert texts(page) == [*wanted, "blocks/1/mlp:__call__#1"]
    page.click("#bad")
    assert len(texts(page)) == 11


def test_columns_sort_down_then_up_then_back(load):
    values = {"a": 2.0, "b": 3.0, "c": 1.0}
    record = Record(
        tuple(site((n,), value=np.full((2, 2), x)) for n, x in values.items())
    )
    page = load(tt.report(record))
    head = page.get_by_role("columnheader", name="Mean")
    orders = []
    for _ in range(3):
        head.get_by_role("button").click()
        orders.append([head.get_attribute("aria-sort"), *labels(page)])
    assert orders == [
        ["descending", "b:__call__", "a:__call__", "c:__call__"],
        ["ascending", "c:__call__", "a:__call__", "b:__call__"],
        [None, "a", "b", "c"],
    ]


def test_the_panel_has_drawings_and_all_numbers(load):
    page = load(tt.report(decoder()))
    page.locator(".row", has_text="embed").click()
    titles = page.locator("#panel h3").all_inner_texts()
    assert titles == ["Distribution", "Gradient", "Values", "Numbers"]
    assert page.locator("#panel canvas").count() == 2
    numbers = page.locator(".numbers tr").all_inner_texts()
    assert "Norm\t3.37\t2.83" in numbers
    box = page.locator("#panel svg.chart").first.bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    told = page.locator("#panel .title span").first.inner_text()
    assert told.replace("\N{MINUS SIGN}", "-") == "-1.00 to -0.950: 1 (3.1 %)"
    page.get_by_label("log counts").check()
    assert page.get_by_label("log counts").is_checked()


def test_attention_is_drawn_by_head(load):
    page = load(tt.report(decoder()))
    page.get_by_text("weights", exact=True).first.click()
    assert "Attention patterns" in page.locator("#panel h3").all_inner_texts()
    assert page.locator(".tiles figcaption").all_inner_texts() == [
        "head 0",
        "head 1",
        "head 2",
    ]
    corner = page.evaluate(
        """() => { const c = document.querySelector(".tiles canvas");
                   return [...c.getContext("2d").getImageData(0, 0, 2, 1).data]; }"""
    )
    assert corner == [0, 56, 50, 255, 250, 250, 249, 255]


def test_iterations_have_lines(load):
    def fn(x):
        step = lambda x, _: (tt.tap(x * 1.5, "h"), None)
        return jax.lax.scan(step, x, length=6)[0]

    page = load(tt.report(tt.observe(fn)(jnp.ones((2, 3)))[1]))
    assert "Iterations" in page.locator("#head > *").all_inner_texts()
    page.locator(".row").click()
    section = page.locator("section", has_text="By iteration")
    assert section.locator("svg").count() == 3
    assert "6 iterations" in section.inner_text()


def test_steps_can_be_gone_through(load):
    good = np.ones((2, 2), np.float32)
    values = good, good * 3, good * np.nan
    records = [Record((site(("a",), value=value),)) for value in values]
    page = load(tt.report(records, steps=[0, 100, 200]))
    assert page.inner_text("#at") == "200"
    assert page.locator(".row.bad").count() == 1
    page.locator("#step").fill("1")
    assert page.inner_text("#at") == "100"
    assert page.locator(".row.bad").count() == 0
    assert "3.00" in page.locator(".row").inner_text()
    page.locator("a.verdict").click()
    assert page.inner_text("#at") == "200"
    assert "Over steps" in page.locator("#panel h3").all_inner_texts()


@pytest.mark.parametrize(
    "numbers",
    [(1e30, 1e30), (-1.7e308, 1.7e308), (0.0, 0.0), (5e-324, 1e-300), (1e16, 1e16 + 2)],
)
def test_extreme_numbers_are_drawn(load, numbers):
    values = [np.full((2, 2), number) for number in numbers]
    values.append(np.array([numbers, numbers]))
    sites = [site(("a",), value=value, grad=value) for value in values]
    page = load(tt.report([Record((one,)) for one in sites]))
    page.locator(".row").click()
    drawn = page.locator("#panel").inner_html()
    assert "Over steps" in drawn
    assert "NaN" not in page.locator("#panel section").first.inner_html()
    paths = page.evaluate(
        "[...document.querySelectorAll('path')].map((p) => p.getAttribute('d'))"
    )
    assert not [path for path in paths if "NaN" in path or "Infinity" in path]


def test_the_keyboard_is_enough(load):
    page = load(tt.report(decoder(), title="Top"))
    press = page.keyboard.press
    page.focus("#table")
    assert cursor(page) == "Top"
    press("j")
    press("ArrowDown")
    assert cursor(page) == "blocks"
    press("ArrowLeft")
    assert labels(page) == ["Top", "embed", "blocks"]
    press("ArrowRight")
    press("End")
    assert cursor(page) == "__call__#1"
    press("Home")
    press("n")
    press("n")
    assert cursor(page) == "mlp"
    press("Enter")
    assert page.locator("#panel h2").inner_text() == "blocks/1/mlp:__call__"
    press("k")
    assert page.locator("#panel h2").inner_text() == "blocks/1/attn:weights"
    press("Escape")
    assert page.is_hidden("#panel")
    press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("embed")
    press("Enter")
    press("Enter")
    assert page.locator("#panel h2").inner_text() == "embed:__call__"
    press("/")
    press("Escape")
    assert len(texts(page)) == 11


def test_focus_can_be_seen(load):
    page = load(tt.report(decoder()))
    page.focus("#table")
    page.keyboard.press("j")
    shadow = "getComputedStyle(document.querySelector('.row.cursor')).boxShadow"
    assert "inset" in page.evaluate(shadow)
    page.keyboard.press("Shift+Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def luminance(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour[4:-1].split(",")))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(load, scheme):
    page = load(tt.report(decoder()), scheme=scheme)
    assert (luminance(page) > 600) == (scheme == "light")
    page.click("#theme")
    assert (luminance(page) > 600) == (scheme == "dark")
    page.keyboard.press("t")
    assert (luminance(page) > 600) == (scheme == "light")


def test_a_narrow_page_keeps_what_matters(load):
    page = load(tt.report(decoder()), size=(600, 900))
    heads = page.locator("#head > *").all_inner_texts()
    assert {"Site", "Non-finite", "Distribution"} <= set(heads)
    assert page.evaluate("document.documentElement.scrollWidth") <= 600
    page.locator(".row", has_text="embed").click()
    assert page.locator("#panel").bounding_box()["width"] == 600
    page.get_by_role("button", name="Close").click()
    assert page.is_hidden("#panel")


def test_hostile_names_stay_text(load):
    name = "</script><img src=x onerror=alert(1)>"
    record = Record((site((name,), name),))
    page = load(tt.report(record, title=name))
    assert page.inner_text("h1") == name
    page.locator(".row").click()
    assert page.locator("#panel h2").inner_text() == f"{name}:{name}"
    assert page.locator("img").count() == 0


def test_it_lives_in_a_frame_of_a_notebook(load, browser, tmp_path):
    context = browser.new_context()
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.set_content(f"<p>{tt.report(decoder())._repr_html_()}</p>")
    frame = page.frame_locator("iframe")
    frame.locator(".row", has_text="embed").click()
    assert frame.locator("#panel h2").inner_text() == "embed:__call__"
    frame.locator("a.verdict").first.click()
    assert frame.locator("#panel h2").inner_text() == "blocks/1/mlp:__call__"
    context.close()
    assert problems == []


def test_printing_shows_all_rows(load):
    record = Record(tuple(site(("blocks", n)) for n in range(200)))
    page = load(tt.report(record))
    page.click("#fold") if page.inner_text("#fold") == "Expand all" else None
    assert page.locator(".row").count() < 100
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".row").count() == 201


def test_an_empty_record_is_an_empty_table(load):
    page = load(tt.report(Record(())))
    assert page.is_visible("#empty")
    page.keyboard.press("j")


INTERACTIONS = {
    "filter": "filter.value = 'blocks/*/mlp'; filter.dispatchEvent(new Event('input'))",
    "open": "document.querySelector('.row.site').click()",
    "clear": "filter.value = ''; filter.dispatchEvent(new Event('input'))",
    "toggle": "document.getElementById('bad').click()",
    "fold": "document.getElementById('fold').click()",
    "sort": "document.querySelector('#head button').click()",
    "move": "document.dispatchEvent(new KeyboardEvent('keydown', {key: ends[n % 2]}))",
    "scroll": "table.scrollTop = 3000 * n; table.dispatchEvent(new Event('scroll'))",
    "theme": "document.getElementById('theme').click()",
}


def test_two_thousand_sites_answer_at_once(load):
    parts = ("attn", "mlp", "norm", "attn/q", "attn/k", "attn/v", "mlp/up", "mlp/down")
    sites = [
        site(("blocks", n, *part.split("/")), value=NAN if n == 200 else None, grad=NAN)
        for n in range(250)
        for part in parts
    ]
    page = load(tt.report(Record(tuple(sites))))
    assert "2,000 sites" in page.inner_text("#about")
    for name, action in INTERACTIONS.items():
        times = page.evaluate(
            f"""() => {{
                const filter = document.getElementById("filter");
                const table = document.getElementById("table");
                const times = [], ends = ["End", "Home"];
                for (let n = 0; n < 4; n++) {{
                    const start = performance.now();
                    {action};
                    table.getBoundingClientRect();
                    times.push(performance.now() - start);
                }}
                return times;
            }}"""
        )
        assert statistics.median(times) < QUICK, f"{name}: {times}"
    assert page.locator(".row").count() < 120
