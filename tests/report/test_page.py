# SPDX-License-Identifier: Apache-2.0
"""Reports: what the page is told, and that it is one safe file."""

import base64
import hashlib
import html.parser
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from tests.meshes import mesh_of

import treetap as tt
from treetap._core.errors import CaptureError
from treetap._observe.records import Record, Site
from treetap._report import page
from treetap._report.pictures import pictures_of


class Parsed(html.parser.HTMLParser):
    """The tags of a page and the text of its scripts, as a browser finds them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = (
            dict(attrs).get("type", tag) if tag in ("script", "style") else tag
        )

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        self.texts[self.inside] = self.texts.get(self.inside, "") + data

    @property
    def payload(self):
        return json.loads(self.texts["application/json"])


def recorded(**values):
    """A record of values by name, as `tap` gives it."""

    def fn():
        for name, value in values.items():
            tt.tap(value, name)

    return tt.observe(fn)()[1]


def entry(record, **options):
    """What the page is told of a record's only site."""
    (found,) = tt.report(record, **options).payload["sites"]
    return found


def tiles_of(picture):
    shape = picture["rows"], picture["columns"]
    return [
        np.frombuffer(base64.b64decode(tile["data"]), np.uint8).reshape(shape)
        for tile in picture["tiles"]
    ]


def patterns(shape, dtype=jnp.float32):
    """Rows that are shares of one."""
    weights = np.exp(np.random.default_rng(0).normal(size=shape))
    return jnp.asarray(weights / weights.sum(-1, keepdims=True), dtype)


# The page.


def test_the_page_holds_its_data_and_allows_only_its_script():
    found = tt.report(recorded(a=jnp.arange(6.0).reshape(2, 3)), title="A <b> & 'c'")
    page = Parsed(found.html)
    assert page.payload == found.payload
    assert page.texts["title"] == "A <b> & 'c'"
    digest = hashlib.sha256(page.texts["script"].encode()).digest()
    policies = [
        attrs["content"]
        for tag, attrs in page.tags
        if tag == "meta" and "content-security" in attrs.get("http-equiv", "").lower()
    ]
    assert len(policies) == 1
    assert "default-src 'none'" in policies[0]
    script = f"script-src 'sha256-{base64.b64encode(digest).decode()}'"
    assert script in policies[0]


def test_the_page_refers_to_nothing_outside():
    page = Parsed(tt.report(recorded(a=jnp.ones(3))).html)
    assert not {"img", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert "@import" not in page.texts["style"]
    assert "url(" not in page.texts["style"]


def test_names_are_data_and_never_markup():
    name = "</script><img src=x onerror=alert(1)>\u2028&amp;"
    record = recorded(**{name: jnp.ones(3)})
    found = tt.report(record, title=name)
    page = Parsed(found.html)
    assert "img" not in [tag for tag, _ in page.tags]
    assert page.payload["sites"][0]["text"] == repr(name)[1:-1]
    assert "<" not in page.texts["application/json"]
    assert "innerHTML" not in page.texts["script"]


def test_a_report_is_made_of_numbers_and_outlives_its_values():
    value = jnp.arange(12.0).reshape(3, 4)
    found = tt.report(recorded(a=value))
    value.delete()
    assert Parsed(found.html).payload["sites"][0]["values"][0]["high"] == 11.0


def test_repr_says_what_it_is_about():
    records = [recorded(a=jnp.ones(3)), recorded(a=jnp.array([1.0, jnp.nan, jnp.inf]))]
    found = tt.report(records, title="T", steps=[10, 20])
    verdict = "First non-finite: a at step 20 (1 NaN, 1 Inf)"
    assert repr(found) == f"Report('T', 1 site, 2 steps: {verdict})"
    assert found.verdict == verdict


def test_in_a_notebook_it_is_in_a_frame_of_its_own():
    found = tt.report(recorded(a=jnp.ones(3)), title='"><script>alert(1)</script>')
    ((tag, attrs),) = Parsed(found._repr_html_()).tags
    assert tag == "iframe"
    assert attrs["srcdoc"] == found.html
    assert attrs["sandbox"] == "allow-scripts"


# Saving.


def test_save_writes_and_replaces_a_file(tmp_path):
    found = tt.report(recorded(a=jnp.ones(3)), title="ü")
    path = tmp_path / "report.html"
    path.write_text("old")
    path.chmod(0o600)
    assert found.save(str(path)) == path
    assert path.read_text("utf-8") == found.html
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["report.html"]


def test_save_survives_names_that_are_no_text(tmp_path):
    found = tt.report(recorded(a=jnp.ones(3)), title="half \ud800")
    assert b"half" in found.save(tmp_path / "a.html").read_bytes()


def test_save_refuses_a_folder_and_a_missing_one(tmp_path):
    found = tt.report(recorded(a=jnp.ones(3)))
    with pytest.raises(IsADirectoryError, match=r"Report\.save.*is a folder"):
        found.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"Report\.save: there is no folder"):
        found.save(tmp_path / "missing" / "a.html")


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    found = tt.report(recorded(a=jnp.ones(3)))
    path = tmp_path / "report.html"
    path.write_text("old")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match=r"Report\.save.*Permission denied"):
        found.save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


# Figures.


def test_figures_are_those_of_the_record():
    value = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    (figures,) = entry(recorded(a=value))["values"]
    assert figures["count"] == 200
    assert figures["mean"] == pytest.approx(value.mean(), rel=1e-4)
    assert figures["std"] == pytest.approx(value.std(), rel=1e-4)
    assert figures["abs_max"] == pytest.approx(abs(value).max(), rel=1e-4)
    assert figures["bars"]["edges"] == pytest.approx([value.min(), value.max()])
    counts, _ = np.histogram(value, bins=len(figures["bars"]["counts"]))
    assert np.abs(np.array(figures["bars"]["counts"]) - counts).max() <= 1
    assert (figures["nan"], figures["infinite"], figures["dead"]) == (0, 0, 0.0)


def test_a_site_says_what_it_is():
    class Inner(tt.Module):
        def __call__(self, x):
            self.sow(tt.Intermediate, "x", x)
            return 2 * x

    class Outer(tt.Module):
        def __init__(self):
            self.inner = tt.List([Inner()])

        def __call__(self, x):
            return self.inner[0](x)

    model = Outer()
    found = tt.report(tt.observe(model)(jnp.ones((2, 3)))[1], model=model)
    assert found.title == "Outer"
    assert "0 parameters" in found.payload["about"]
    sown, output, _ = found.payload["sites"]
    assert (sown["how"], sown["kind"], sown["type"]) == (
        "sow",
        "Intermediate",
        "float32[2,3]",
    )
    assert (output["text"], output["module"]) == ("inner/0:__call__", "Inner")
    assert output["path"] == ["inner", "0"]
    assert output["bytes"] == 24


@pytest.mark.parametrize(
    "value",
    [
        jnp.array(3),
        jnp.ones((0, 4)),
        jnp.array([[True, False]]),
        jnp.ones((2, 3), jnp.complex64),
        jnp.ones((2, 3), jnp.bfloat16),
        {"a": jnp.ones(2), "b": (jnp.ones((2, 2)), jnp.arange(3))},
        jnp.array([[3.4e38, -3.4e38]]),
    ],
    ids=["scalar", "empty", "bool", "complex", "bfloat16", "tree", "huge"],
)
def test_values_of_any_sort_can_be_shown(value):
    found = tt.report(tt.observe(lambda x: tt.tap(x, "a"))(value)[1])
    assert Parsed(found.html).payload == found.payload
    assert found.verdict == "All finite"


def test_keys_have_no_figures():
    found = tt.report(recorded(key=jax.random.split(jax.random.key(0), (2, 2))))
    assert "values" not in found.payload["sites"][0]
    assert found.verdict == "Whether values are finite was not measured"


def test_a_tree_has_a_picture_of_its_first_matrix():
    site = entry(
        tt.observe(lambda x: tt.tap(x, "a"))((jnp.ones(2), jnp.ones((3, 5))))[1]
    )
    assert site["type"] == "float32[2] +1"
    assert (site["pictures"]["rows"], site["pictures"]["columns"]) == (3, 5)


def test_listed_sites_have_shapes_only():
    found = tt.report(tt.sites(lambda x: tt.tap(x, "a"), jnp.ones((2, 3))))
    (site,) = found.payload["sites"]
    assert site["type"] == "float32[2,3]"
    assert "values" not in site
    assert "pictures" not in site


def test_statistics_are_shown_without_values():
    reduce = [tt.Moments(), tt.Histogram(), tt.NonFinite()]
    watch = tt.observe(lambda x: tt.tap(x, "a"), reduce=reduce)
    site = entry(watch(jnp.array([[0.0, 0.5], [2.0, 4.0]]))[1])
    (figures,) = site["values"]
    assert figures["mean"] == 1.625
    assert figures["bars"]["log"] is True
    assert sum(figures["bars"]["counts"]) == 4
    assert "low" not in figures
    assert "pictures" not in site


def test_uneven_bins_keep_all_edges():
    bars = page.Bars(np.array([1, 2]), np.array([0.0, 1.0, 5.0]))
    assert page._bars(bars) == {"counts": [1, 2], "edges": [0.0, 1.0, 5.0]}


def scanned(x, count=5):
    def body(x, n):
        return tt.tap(x * 2, "h"), None

    return jax.lax.scan(body, x, jnp.arange(count))[0]


def test_iterations_are_told_apart():
    site = entry(tt.observe(scanned)(jnp.ones((2, 3)))[1])
    (figures,) = site["values"]
    assert site["under"] == ["scan"]
    assert figures["parts"]["count"] == 5
    assert figures["parts"]["mean"] == [2.0, 4.0, 8.0, 16.0, 32.0]
    labels = [tile["label"] for tile in site["pictures"]["tiles"]]
    assert labels == ["0", "1", "2", "3", "4"]


def test_iterations_that_are_not_finite_are_marked():
    site = entry(tt.observe(scanned)(jnp.full((2, 3), 1.1e37))[1])
    assert site["values"][0]["parts"]["bad"] == [0, 0, 0, 0, 1]


def test_branches_and_loops_say_how_often_they_ran():
    def fn(x):
        x = jax.lax.cond(x[0] > 9, lambda x: tt.tap(x, "never"), lambda x: x, x)
        return jax.lax.while_loop(
            lambda x: x[0] < 4, lambda x: tt.tap(x + 1, "often"), x
        )

    sites = tt.report(tt.observe(fn)(jnp.zeros(2))[1]).payload["sites"]
    notes = {site["name"]: site["note"] for site in sites}
    assert notes == {"never": "branch not taken", "often": "ran 4 times"}


# The verdict.


def test_the_first_value_that_is_not_finite_is_named():
    record = recorded(
        a=jnp.ones(3), b=jnp.array([1.0, jnp.nan]), c=jnp.full(2, jnp.nan)
    )
    found = tt.report(record)
    assert found.verdict == "First non-finite: b (1 NaN)"
    assert found.payload["first"] == {"site": 1, "step": 0}
    assert found.payload["verdicts"][0]["site"] == 1


def test_the_first_gradient_is_the_last_site():
    def loss(x):
        a = tt.tap(x * 2, "a")
        b = tt.tap(a - 2.0, "b")
        return jnp.sum(tt.tap(jnp.sqrt(b), "c") * 0.0)

    found = tt.report(tt.observe(jax.grad(loss), grads=True)(jnp.array([1.0, 3.0]))[1])
    assert found.verdict == "First non-finite gradient: b (1 NaN)"


def test_the_sooner_step_comes_first():
    good, bad = {"value": jnp.ones(2)}, {"value": jnp.full(2, jnp.inf)}

    def site(name, value, grad):
        return Site(value=value["value"], grad=grad["value"], name=name)

    records = [
        Record((site("a", good, good), site("b", good, good))),
        Record((site("a", good, bad), site("b", good, good))),
        Record((site("a", bad, good), site("b", bad, good))),
    ]
    found = tt.report(records, steps=[3, 5, 8])
    first, second = found.payload["verdicts"]
    assert (first["text"], first["site"], first["step"]) == (
        "First non-finite gradient:",
        0,
        1,
    )
    assert (second["text"], second["site"], second["step"]) == (
        "First non-finite:",
        0,
        2,
    )
    assert found.payload["first"] == {"site": 0, "step": 1}


def test_a_single_bit_is_enough_for_the_verdict():
    watch = tt.observe(lambda x: tt.tap(x, "a"), reduce=[tt.AllFinite()])
    found = tt.report(watch(jnp.array([1.0, jnp.inf]))[1])
    assert found.verdict == "First non-finite: a (not finite)"
    assert found.payload["sites"][0]["values"][0]["bad"] is True


def test_what_was_not_measured_is_not_called_finite():
    watch = tt.observe(lambda x: tt.tap(x, "a"), reduce=[tt.AbsMax()])
    found = tt.report(watch(jnp.array([1.0, jnp.inf]))[1])
    assert found.verdict == "Whether values are finite was not measured"
    some = Record((*recorded(b=jnp.ones(2)).sites, *watch(jnp.ones(2))[1].sites))
    assert tt.report(some).verdict == "All finite, of 1 values that were measured"


def test_gradients_are_part_of_the_verdict():
    watch = tt.observe(jax.grad(lambda x: tt.tap(x, "a") ** 2), grads=True)
    found = tt.report(watch(jnp.array(3.0))[1])
    assert found.verdict == "All finite, values and gradients"
    assert found.payload["sites"][0]["grads"][0]["norm"] == 6.0


# Several steps.


def test_steps_are_kept_in_order():
    records = [recorded(a=jnp.full(2, float(n))) for n in range(3)]
    found = tt.report(iter(records), steps=range(0, 30, 10))
    assert found.payload["steps"] == [0, 10, 20]
    means = [figures["mean"] for figures in found.payload["sites"][0]["values"]]
    assert means == [0.0, 1.0, 2.0]
    assert "3 steps, 0 to 20" in found.payload["about"]


def test_sites_that_only_some_steps_have_stand_where_they_ran():
    one = jnp.ones(2)
    records = [recorded(a=one, x=one, y=one, b=one), recorded(a=one, b=one, c=one)]
    sites = tt.report(records).payload["sites"]
    assert [site["text"] for site in sites] == ["a", "x", "y", "b", "c"]
    assert sites[1]["values"][1] is None
    assert sites[4]["values"][0] is None


def test_pictures_are_of_the_last_step_that_has_the_site():
    one = jnp.ones((2, 2))
    records = [recorded(a=one, b=one), recorded(a=one)]
    sites = tt.report(records).payload["sites"]
    assert [site["pictures"]["step"] for site in sites] == [1, 0]


def test_with_very_many_sites_only_the_last_step_has_histograms(monkeypatch):
    monkeypatch.setattr(page, "MOST_BARS", 3)
    found = tt.report([recorded(a=jnp.ones(3)), recorded(a=jnp.ones(3))])
    first, last = found.payload["sites"][0]["values"]
    assert "bars" not in first
    assert "bars" in last
    assert "last step only" in found.payload["notes"][0]


# Pictures.


def test_a_picture_has_means_of_blocks():
    value = np.random.default_rng(1).normal(size=(2, 130, 100)).astype(np.float32)
    picture = entry(recorded(a=value))["pictures"]
    assert (picture["kind"], picture["block"]) == ("heat", [3, 2])
    assert (picture["rows"], picture["columns"]) == (44, 50)
    assert picture["of"] == "[0, :, :] of float32[2,130,100]"
    padded = np.full((132, 100), np.nan, np.float32)
    padded[:130] = value[0]
    means = np.nanmean(padded.reshape(44, 3, 50, 2), axis=(1, 3))
    scale = np.quantile(abs(means), 0.99)
    assert picture["scale"] == pytest.approx(scale, rel=1e-3)
    wanted = np.round(127 + 127 * np.clip(means / scale, -1, 1))
    assert np.abs(tiles_of(picture)[0].astype(int) - wanted).max() <= 1


def test_what_is_not_finite_is_marked_in_a_picture():
    value = jnp.ones((4, 4)).at[1, 2].set(jnp.nan)
    picture = entry(recorded(a=value))["pictures"]
    (tile,) = tiles_of(picture)
    assert picture["wrong"] is True
    assert np.argwhere(tile == 255).tolist() == [[1, 2]]
    assert set(np.unique(tile)) == {254, 255}


@pytest.mark.parametrize("value", [jnp.ones((3, 4, 5, 6)), patterns((3, 4, 5, 6))])
def test_the_item_that_is_not_finite_is_shown(value):
    picture = entry(recorded(a=value.at[2, 1, 3].set(jnp.nan)))["pictures"]
    heads = picture["kind"] == "attention"
    assert picture["of"] == f"[2, {'h' if heads else 1}, :, :] of float32[3,4,5,6]"
    assert (tiles_of(picture)[int(heads)][3] == 255).all()


def test_zeros_are_in_the_middle():
    (tile,) = tiles_of(entry(recorded(a=jnp.zeros((2, 2))))["pictures"])
    assert (tile == 127).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_is_drawn_by_head(dtype):
    picture = entry(recorded(a=patterns((2, 3, 6, 6), dtype)))["pictures"]
    assert picture["kind"] == "attention"
    assert [tile["label"] for tile in picture["tiles"]] == [
        "head 0",
        "head 1",
        "head 2",
    ]
    assert picture["of"].startswith("[0, h, :, :] of")
    assert max(tile.max() for tile in tiles_of(picture)) == 254


def test_attention_with_broken_rows_is_still_attention():
    value = patterns((2, 3, 6, 6)).at[0, 1, 2].set(jnp.nan)
    picture = entry(recorded(a=value))["pictures"]
    assert picture["kind"] == "attention"
    assert (tiles_of(picture)[1][2] == 255).all()


@pytest.mark.parametrize(
    "value",
    [
        patterns((6, 6)),
        patterns((3, 6, 6)) + 0.002,
        patterns((3, 6, 6)).at[0, 0].set(jnp.array([1.5, -0.5, 0, 0, 0, 0])),
        jnp.full((3, 6, 6), jnp.nan),
        jnp.ones((3, 6, 1)),
    ],
    ids=["matrix", "sums", "negative", "nothing", "column"],
)
def test_what_only_looks_like_attention_is_not(value):
    assert entry(recorded(a=value))["pictures"]["kind"] == "heat"


def test_attention_in_a_scan_is_by_iteration_and_head():
    def fn(x):
        step = lambda x, _: (x, tt.tap(jax.nn.softmax(x), "a"))
        return jax.lax.scan(step, x, length=3)[0]

    picture = entry(tt.observe(fn)(patterns((2, 8, 6, 6)))[1])["pictures"]
    labels = [tile["label"] for tile in picture["tiles"]]
    assert len(labels) == 15
    assert labels[4:6] == ["0 · head 4", "1 · head 0"]
    assert (picture["shown"], picture["total"]) == (15, 24)


def test_pictures_stop_at_their_budget_and_the_page_says_so(monkeypatch):
    monkeypatch.setattr(page, "PICTURE_BUDGET", 12_000)
    values = {f"a{n}": jnp.ones((64, 64)) for n in range(4)}
    found = tt.report(recorded(**values))
    assert ["pictures" in site for site in found.payload["sites"]] == [
        True,
        True,
        False,
        False,
    ]
    (note,) = found.payload["notes"]
    assert note.startswith("Pictures of 2 sites were left out")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_values_that_are_spread_over_devices_are_shown(kind):
    mesh = mesh_of((2, 2), ("x", "y"), kind)
    value = jnp.arange(4.0 * 8 * 8).reshape(4, 8, 8)
    spread = jax.device_put(value, NamedSharding(mesh, jax.P("x", None, "y")))
    shown = entry(Record((Site(value=spread, name="a"),)))
    whole = entry(Record((Site(value=value, name="a"),)))
    assert shown["pictures"] == whole["pictures"]
    assert shown["values"][0]["mean"] == whole["values"][0]["mean"]


def test_two_thousand_sites_are_quick_to_measure():
    value = jnp.ones((4, 8))
    sites = [
        Site(value=value, path=("blocks", n), name="__call__") for n in range(2_000)
    ]
    found = tt.report(Record(tuple(sites)))
    assert len(found.payload["sites"]) == 2_000
    assert len(found.html) < 4_000_000


# Errors.


@pytest.mark.parametrize("records", [3, "text", [recorded, 2]])
def test_only_records_are_taken(records):
    with pytest.raises(TypeError, match=r"report: .*Give"):
        tt.report(records)


def test_there_must_be_a_record():
    with pytest.raises(CaptureError, match="report: there are no records"):
        tt.report([])


def test_steps_must_fit():
    with pytest.raises(CaptureError, match="1 records and 2 steps"):
        tt.report(recorded(a=jnp.ones(2)), steps=[1, 2])


def test_a_traced_record_is_refused():
    @jax.jit
    def fn(x):
        tt.report(tt.observe(lambda x: tt.tap(x, "a"))(x)[1])

    with pytest.raises(CaptureError, match="traced"):
        fn(jnp.ones((2, 2)))


def test_a_record_without_sites_is_an_empty_page():
    found = tt.report(Record(()))
    assert found.payload["sites"] == []
    assert found.title == "Report"


class Host(tt.Module):
    """Returns what it was given to hold: an array of the host, for instance."""

    def __init__(self, value):
        self.value = value

    def __call__(self):
        return self.value


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1.0, -1.0], [1e300, 0.0]]),
        np.array([[3 + 4j, 0], [5, 1j]]),
        np.array([[1, 2], [3, 4]], np.int8),
    ],
    ids=["float64", "complex128", "int8"],
)
def test_arrays_of_the_host_have_pictures(value):
    _, record = tt.observe(Host(value))()
    assert record[0].value is value
    (tile,) = tiles_of(entry(record)["pictures"])
    largest = np.unravel_index(tile.argmax(), (2, 2))
    assert largest == np.unravel_index(np.abs(value).argmax(), (2, 2))


def test_values_of_other_processes_have_no_picture(monkeypatch):
    record = recorded(h=jnp.ones((2, 3)))
    elsewhere = property(lambda self: False)
    monkeypatch.setattr(type(record[0].value), "is_fully_addressable", elsewhere)
    assert pictures_of(list(record), [None], 10**6) == ({}, 0)


def test_a_single_step_is_in_the_title():
    record = recorded(h=jnp.ones(3))
    assert "step 7" in tt.report(record, steps=[7]).payload["about"]


def test_a_branch_that_some_rows_took_says_how_many():
    def row(x):
        return tt.cond(x > 0, lambda x: tt.tap(x, "h"), lambda x: x, x)

    _, record = tt.observe(jax.vmap(row))(jnp.array([1.0, -1.0, 2.0]))
    assert entry(record)["note"] == "taken 2 of 3 times"
