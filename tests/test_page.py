"""The page of ``irkit serve`` in headless Chromium, with models of random weights.

Where ``IRKIT_AXE`` is the path of ``axe.min.js`` (``npm install axe-core``), the rules of axe are checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from serving import serving
from three_heads import make_model

from irkit import Model, Retriever
from irkit.data import Document

HOSTILE = '<img src=x onerror="hacked=1"><script>hacked=1</script>'
LONG = "The index is small. " * 60 + "Here \U0001f98c the gnu eats. " + "The text is long. " * 60
DOCUMENTS = [
    Document("gnu", "The gnu eats the grass.", "Gnu", {"topic": "animals", "year": 2016, "old": None}),
    Document("cat", "A cat hunts the gnu in the grass.", "Cat", {"topic": "animals", "year": 2011}),
    Document("index", "The index of the model.", "", {"topic": "search", "new": True, "old": None}),
    Document("token", "A token of the text.", "Token", {"topic": "search", "tags": ["a", "b"]}),
    Document("long", LONG, "Long \U0001f98c", {"topic": HOSTILE, "year": 2016}),
    Document("hostile", f"A gnu {HOSTILE} in text", f"{HOSTILE} gnu", {"topic": HOSTILE}),
    *(Document(f"d{number}", f"A gnu in text {number}") for number in range(12)),
]
KEY = "secret-of-the-gnu"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def indexes(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexes")
    with pytest.warns(UserWarning, match="mean"):
        Model.from_pretrained(tiny_bert).save_pretrained(folder / "dense-model")
    Model.multi_vector(tiny_bert).save_pretrained(folder / "tokens-model")
    limits = {"document_max_active_dims": 16, "query_max_active_dims": 16}
    Model.sparse(tiny_bert, limits).save_pretrained(folder / "terms-model")
    for name in ("dense", "tokens", "terms"):
        Retriever.build(folder / f"{name}-model", DOCUMENTS, folder / name)
    Retriever.build("bm25", DOCUMENTS, folder / "words")
    make_model(tiny_bert, folder / "several-model")
    Retriever.build(folder / "several-model", DOCUMENTS, folder / "several")
    return folder


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., str]]:
    """Return a function that serves indexes and returns the address."""
    with contextlib.ExitStack() as stack:
        yield lambda *paths, **settings: stack.enter_context(serving(*paths, **settings))


@pytest.fixture(scope="module")
def address(start: Callable[..., str], indexes: Path) -> str:
    return start(*(indexes / name for name in ("words", "dense", "tokens", "terms", "several")))


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    shared_browser.messages.clear()
    shared_browser.show_as()
    return shared_browser


def titles(browser: Browser, column: int = 0) -> list[str]:
    script = f"document.querySelectorAll('.column')[{column}].querySelectorAll('.title')"
    return list(browser.run(f"[...{script}].map(title => title.innerText)"))


def show(browser: Browser, address: str, query: str, *systems: list[str], **filters: list[Any]) -> None:
    """Open the page with a query, and wait for the hits of every column."""
    systems = systems or (["words"],)
    fragment = "&".join([f"q={query}", *(f"in={json.dumps(names)}" for names in systems)])
    fragment += f"&filter={json.dumps(filters)}" if filters else ""
    browser.open(f"{address}#{fragment}")
    browser.wait(f"document.querySelectorAll('.column').length === {len(systems)}")
    browser.wait(
        "[...document.querySelectorAll('.status')].every(line => /ms$|Nothing/.test(line.innerText))"
    )
    browser.wait("document.querySelector('#facets').hasChildNodes()")


def test_hits_come_while_one_types(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelector('select') !== null")
    assert "18 documents" in browser.text(".facts")
    browser.type("gn")
    browser.wait("document.querySelector('.status').innerText.startsWith('Nothing found')")
    browser.type("u ")
    browser.wait("document.querySelectorAll('.title').length === 10")
    assert re.fullmatch(r"10 of 18 documents, \d+ ms", browser.text(".status"))
    first = titles(browser)
    browser.click(".column .link")  # more hits
    browser.wait("document.querySelectorAll('.title').length === 16")
    assert titles(browser)[:10] == first
    assert browser.run("document.activeElement.dataset.id") == browser.run(
        "document.querySelectorAll('.title')[10].dataset.id"
    )
    assert browser.messages == []


def test_what_is_typed_before_the_indexes_are_known_is_searched(browser: Browser, address: str) -> None:
    late = "const now = fetch; fetch = async (...all) => {await new Promise(go => setTimeout(go, 700));"
    source = late + " return now(...all)}"
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]
    try:
        browser.open(f'{address}#in=["dense"]')
        browser.type("gnu grass")
        assert browser.run("document.querySelector('select')") is None  # nothing is known yet
        browser.wait("document.querySelectorAll('.title').length > 0")
        assert browser.run("document.getElementById('query').value") == "gnu grass"
        assert browser.run("document.querySelector('select').value") == "dense"
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_the_keyboard_is_enough(browser: Browser, address: str) -> None:
    show(browser, address, "gnu grass", ["words"], ["dense"])
    focused = "document.activeElement.innerText"
    browser.press("ArrowDown")
    assert browser.run(focused) == titles(browser)[0] == "Gnu"
    browser.press("ArrowDown")
    assert browser.run(focused) == titles(browser)[1] == "Cat"
    browser.press("ArrowRight")
    assert browser.run(focused) == titles(browser, 1)[1]
    browser.press("Enter")
    browser.wait("document.querySelector('.why') !== null")
    assert browser.run("document.activeElement.ariaExpanded") == "true"
    browser.press("Enter")
    assert browser.run("document.activeElement.ariaExpanded") == "false"
    browser.press("ArrowLeft")
    assert browser.run(focused) == "Cat"
    browser.press("/", "/")
    assert browser.run("document.activeElement.id") == "query"
    assert browser.run("document.activeElement.value") == "gnu grass"
    browser.press("ArrowDown")
    browser.press("ArrowUp")
    assert browser.run("document.activeElement.id") == "query"


def test_texts_are_shown_as_they_are(browser: Browser, address: str) -> None:
    show(browser, address, "gnu", ["words"], ["terms", "dense"], topic=[HOSTILE])
    assert titles(browser) == [f"{HOSTILE} gnu", "Long \U0001f98c"]
    browser.run("document.querySelectorAll('.title').forEach(title => title.click())")
    browser.wait("document.querySelectorAll('.why').length === 6")
    assert HOSTILE in browser.text(".snippet")
    assert HOSTILE in browser.text("#facets")
    assert browser.run("document.images.length + document.body.querySelectorAll('script').length") == 0
    assert browser.run("typeof hacked") == "undefined"
    assert browser.messages == []
    # the snippet is the passage with the words, and marks stand where they stand after a rare letter
    assert browser.run(
        "[...document.querySelectorAll('.snippet mark')].every(mark => mark.innerText === 'gnu')"
    )
    snippet = browser.run("document.querySelectorAll('.snippet')[1].innerText")
    assert snippet.startswith("… ")
    assert "Here \U0001f98c the gnu eats." in snippet
    assert len(snippet) < 340
    # a long text is scrolled to the best passage
    assert browser.run("document.querySelectorAll('.heat')[1].scrollTop") > 100


def test_scores_of_parts_and_why(browser: Browser, address: str) -> None:
    show(browser, address, "the gnu", ["words", "dense", "tokens", "terms"])
    names = "[...document.querySelector('.scores').querySelectorAll('dt')].map(name => name.innerText)"
    assert browser.run(names) == [
        "fused",
        "bm25 (words)",
        "dense (dense)",
        "tokens (tokens)",
        "sparse (terms)",
    ]
    browser.click(".title")
    browser.wait("document.querySelectorAll('.why').length === 4")
    captions = browser.run("[...document.querySelectorAll('.why caption')].map(line => line.innerText)")
    assert [caption for caption in captions if caption] == [  # not those that are folded away
        "Terms that both texts have",
        "Passages, each scored on its own",
        "Tokens that match",
        "Expansion: terms that the model adds",
    ]
    heats = "[...document.querySelectorAll('.heat mark')].map(mark => mark.style.getPropertyValue('--heat'))"
    assert "100%" in browser.run(heats)
    # a word of the query leaves only its own matches
    why = "document.querySelectorAll('.why')[2]"
    word = f"{why}.querySelectorAll('.word')[1]"
    browser.run(f"{word}.click()")
    assert browser.run(f"{word}.ariaPressed") == "true"
    assert browser.run(f"{why}.querySelectorAll('.heat mark').length") <= 1
    browser.run(f"{word}.click()")
    assert browser.run(f"{word}.ariaPressed") == "false"


def test_each_head_has_its_score_and_its_reasons(browser: Browser, address: str) -> None:
    show(browser, address, "gnu grass", ["several"])
    names = "[...document.querySelector('.scores').querySelectorAll('dt')].map(name => name.innerText)"
    assert browser.run(names) == ["fused", "dense", "sparse", "multi_vector"]
    assert "dense, sparse, tokens" in browser.text(".facts")
    browser.click(".title")
    browser.wait("document.querySelectorAll('.why').length === 3")
    headings = browser.run("[...document.querySelectorAll('.why h4')].map(line => line.innerText)")
    assert [line.partition(":")[0] for line in headings] == ["dense", "sparse", "multi_vector"]
    show(browser, address, "gnu grass", ["several", "words"])
    assert browser.run(names)[1:3] == ["dense (several)", "sparse (several)"]
    assert browser.messages == []


def test_filters(browser: Browser, address: str) -> None:
    def choose(key: str, value: Any) -> None:
        name = json.dumps(json.dumps([key, value], separators=(",", ":")))
        browser.run(
            f"[...document.querySelectorAll('input')].find(box => box.dataset.facet === {name}).click()"
        )

    show(browser, address, "gnu index text")
    choose("topic", "animals")
    browser.wait("document.querySelectorAll('.title').length === 2")
    choose("topic", "search")  # either value
    browser.wait("document.querySelectorAll('.title').length === 4")
    assert browser.run("document.activeElement.type") != "text"
    choose("old", None)
    browser.wait("document.querySelectorAll('.title').length === 2")
    assert sorted(titles(browser)) == ["Gnu", "index"]
    choose("new", True)
    browser.wait("document.querySelectorAll('.title').length === 1")
    browser.open(browser.run("location.href"))  # the address has it all
    browser.wait("document.querySelectorAll('.title').length === 1")
    browser.click("#facets .link")
    browser.wait("document.querySelectorAll('.title').length === 10")
    assert browser.messages == []


def test_numbers_are_filtered_by_ranges(browser: Browser, address: str) -> None:
    def set_end(comparison: str, number: str) -> None:
        name = json.dumps(json.dumps(["year", comparison], separators=(",", ":")))
        browser.run(
            "{const fields = [...document.querySelectorAll('input')];"
            f"const field = fields.find(box => box.dataset.facet === {name});"
            f"field.value = {number!r}; field.dispatchEvent(new Event('change'));}}"
        )

    show(browser, address, "gnu index text")
    set_end(">=", "2012")
    browser.wait("document.querySelectorAll('.title').length === 2")
    assert sorted(titles(browser)) == ["Gnu", "Long \U0001f98c"]
    browser.wait("document.querySelector('.range input')?.value === '2012'")
    set_end("<=", "2015")
    browser.wait("document.querySelector('.status').innerText.startsWith('Nothing found')")
    browser.open(browser.run("location.href"))  # the address has the range
    browser.wait("document.querySelectorAll('.range input')[1]?.value === '2015'")
    set_end("<=", "")
    browser.wait("document.querySelectorAll('.title').length === 2")
    assert browser.messages == []


def test_two_models_are_compared(browser: Browser, address: str) -> None:
    show(browser, address, "gnu grass", ["words"])
    browser.click("#compare")
    browser.wait("document.querySelectorAll('.column:nth-child(2) .title').length === 10")
    for number, model in enumerate(("dense-model", "terms-model")):
        browser.run(
            f"{{const select = document.querySelector('#by-{number}'); select.value = {model!r};"
            "select.dispatchEvent(new Event('change'));}"
        )
        name = f"document.querySelectorAll('.column')[{number}].querySelector('.scores dt')?.innerText"
        browser.wait(f"{name} === {model!r}")
    assert browser.text("#difference").startswith("In both columns: ")
    browser.open(browser.run("location.href"))
    browser.wait("document.querySelector('#by-1')?.value === 'terms-model'")
    assert browser.messages == []


def test_columns_are_compared(browser: Browser, address: str) -> None:
    show(browser, address, "gnu grass", ["words"])
    browser.click("#compare")
    browser.wait("document.querySelectorAll('.column:nth-child(2) .title').length === 10")
    one, two = titles(browser), titles(browser, 1)
    changes = browser.run(
        "[...document.querySelectorAll('.column')].map(column => "
        "[...column.querySelectorAll('.hits > li')].map(item => item.className))"
    )
    for mine, theirs, marks in ((one, two, changes[0]), (two, one, changes[1])):
        for rank, (title, mark) in enumerate(zip(mine, marks, strict=True)):
            there = theirs.index(title) if title in theirs else None
            expected = "only" if there is None else "same" if there == rank else "higher"
            assert mark == ("lower" if there is not None and there < rank else expected)
    both = len(set(one) & set(two))
    assert browser.text("#difference").startswith(f"In both columns: {both}, ")
    browser.click("#compare")
    browser.wait("document.querySelectorAll('.column').length === 1")
    assert browser.run("document.querySelector('#difference').hidden")


def test_an_answer_that_comes_late_is_not_shown(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelector('select') !== null")
    browser.run(
        "{const ask = fetch; window.fetch = async (route, options) => {"
        "  const late = options.body?.includes('cat');"
        "  if (late) await new Promise(resolve => { window.release = resolve; });"
        "  const answer = await ask(route, {...options, signal: null});"
        "  if (late) answer.clone().json().then(() => setTimeout(() => { window.answered = true; }));"
        "  return answer; }}"
    )
    browser.type("cat")
    browser.wait("window.release !== undefined")
    browser.run("document.querySelector('#query').select()")
    browser.type("token")
    browser.wait("document.querySelector('.title')?.innerText === 'Token'")
    browser.run("release()")
    browser.wait("window.answered")
    assert titles(browser) == ["Token"]


def test_a_key_is_asked_for(browser: Browser, start: Callable[..., str], indexes: Path) -> None:
    locked = start(indexes / "words", keys=(("read", hashlib.sha256(KEY.encode()).hexdigest()),))
    browser.open(locked)
    browser.wait("!document.querySelector('#unlock').hidden")
    for key in ("wrong", KEY):
        browser.run(f"document.querySelector('#key').value = {key!r}")
        browser.click("#unlock button")
        browser.wait(
            f"document.querySelector({'#problem' if key == 'wrong' else 'select'!r})?.innerText > ''"
        )
    assert browser.run("document.querySelector('#unlock').hidden")
    assert browser.text("#problem") == ""
    browser.run("document.querySelector('#query').focus()")
    browser.type("token")
    browser.wait("document.querySelector('.title') !== null")
    assert browser.run("Object.values(sessionStorage)") == [KEY]
    assert browser.run("localStorage.length + document.cookie.length") == 0


def test_problems_are_said(browser: Browser, address: str) -> None:
    browser.open(f"{address}#q=gnu&filter={json.dumps({'nowhere': ['x']})}")
    for place in (".status", "#facets"):
        browser.wait(f"document.querySelector('{place}')?.innerText.includes('no document has the key')")
    browser.click("#facets .link")  # remove the filter
    browser.wait("document.querySelectorAll('.title').length === 10")
    browser.run("window.fetch = async () => { throw new TypeError('gone'); }")
    browser.run("document.querySelector('#query').focus()")
    browser.type("s")
    browser.wait("document.querySelector('.status').innerText.startsWith('The server does not answer')")


def test_the_policy_forbids_scripts_of_documents(browser: Browser, address: str) -> None:
    browser.open(address)
    policy = browser.run(f"fetch({address!r}).then(page => page.headers.get('content-security-policy'))")
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    names = ["page.js", "%2e%2e%2fapp.py", "..%2fapp.py", "nothing.js"]
    answers = [browser.run(f"fetch('static/{name}').then(answer => answer.status)") for name in names]
    assert answers == [200, 404, 404, 404]
    browser.run("document.body.append(Object.assign(document.createElement('script'), {text: 'hacked=1'}))")
    assert browser.run("typeof hacked") == "undefined"


@pytest.mark.parametrize(
    ("width", "dark"), [(1100, False), (1100, True), (360, False)], ids=["light", "dark", "narrow"]
)
def test_axe_finds_nothing_serious(browser: Browser, address: str, width: int, dark: bool) -> None:
    axe = Path(os.environ.get("IRKIT_AXE", ""))
    if not axe.is_file():
        pytest.skip("needs axe-core: npm install axe-core, and IRKIT_AXE=.../axe.min.js")
    browser.show_as(width, dark=dark)
    show(browser, address, "the gnu", ["words", "dense", "tokens", "terms"], ["dense"], topic=["animals"])
    browser.run("document.querySelectorAll('.title').forEach(title => title.click())")
    browser.wait("document.querySelectorAll('.why').length === 10")
    browser.run("document.querySelector('#unlock').hidden = false")
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.run(axe.read_text() + "; 0")
    found = browser.run("axe.run().then(found => found.violations.map(rule => [rule.id, rule.impact]))")
    assert found == []
