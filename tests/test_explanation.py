"""Explanations add up to the score, point at the right characters, and show what they say."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from irkit import Model, MultiVector, Ragged, score
from irkit.errors import BadValueError, StorageError
from irkit.retrieval.explanation import Explanation, Match, TokenVectors, explain, match_tokens
from irkit.retrieval.highlighting import split_passages
from irkit.tokenizer import TokenSpan


def side(text: str, pieces: list[TokenSpan], seed: int) -> TokenVectors:
    vectors = torch.randn(len(pieces), 4, generator=torch.Generator().manual_seed(seed))
    return TokenVectors(text, MultiVector(Ragged(vectors, torch.tensor([len(pieces)]))), pieces)


@st.composite
def sides(draw: st.DrawFn) -> TokenVectors:
    text = draw(st.text(alphabet="ab 本.é<&\n\u0940", max_size=12))
    places = st.integers(0, len(text))
    spans = draw(st.lists(st.tuples(places, places).map(sorted), max_size=6))
    return side(text, [TokenSpan(text[a:b] or "[MASK]", a, b) for a, b in spans], draw(st.integers(0, 99)))


class Page(HTMLParser):
    """Texts of the elements of a page, by their names; fails where a tag is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.texts[tag] = self.texts.get(tag, "") + data


@settings(max_examples=80, deadline=None)
@given(sides(), sides())
def test_matches_add_up_to_the_score(query: TokenVectors, document: TokenVectors) -> None:
    explanation = match_tokens(query, document)
    assert explanation.score == score(query.vectors, document.vectors).item()
    words = explanation.words()
    if document.spans:
        assert [match.query for match in explanation.matches] == list(query.spans)
        assert sum(match.score for match in explanation.matches) == pytest.approx(explanation.score, abs=1e-5)
        assert sum(match.score for match in words.matches) == pytest.approx(explanation.score, abs=1e-5)
    else:
        assert explanation.matches == ()
    for match in words.matches:
        for text, piece in ((query.text, match.query), (document.text, match.document)):
            assert 0 <= piece.start <= piece.end <= len(text)
            assert piece.start == piece.end or piece.token == text[piece.start : piece.end]
    page = Page(words.to_html())
    assert page.texts.get("h1", "") == query.text
    assert page.texts.get("p", "") == document.text


def test_tokens_of_one_word_are_merged() -> None:
    text = " Hibernation-time, Ġ"
    hi, ber, nation = TokenSpan("Ġhi", 0, 3), TokenSpan("##ber", 3, 6), TokenSpan("##nation", 6, 12)
    dash, time, mask = TokenSpan("-", 12, 13), TokenSpan("time", 13, 17), TokenSpan("[MASK]", 20, 20)
    sleep, den = TokenSpan("sleep", 0, 5), TokenSpan("den", 9, 12)
    explanation = Explanation(
        text,
        "sleep in den",
        3.75,
        (
            Match(hi, sleep, 1.0),
            Match(ber, sleep, 0.5),
            Match(nation, den, 0.25),
            Match(dash, sleep, 0.0),
            Match(time, den, 1.0),
            Match(mask, den, 0.5),
            Match(mask, den, 0.5),
        ),
    )
    assert [(m.query, m.document.token, m.score) for m in explanation.words().matches] == [
        (TokenSpan("Hibernation", 1, 12), "sleep", 1.5),
        (TokenSpan("Hibernation", 1, 12), "den", 0.25),
        (dash, "sleep", 0.0),
        (time, "den", 1.0),
        (mask, "den", 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "piece", "word"),
    [
        ("熊は冬に眠る", (2, 3), "冬"),  # a letter is a word
        ("熊は冬に眠る", (4, 6), "眠る"),
        ("한국어 문서", (1, 2), "한국어"),
        ("हिन्दी भाषा", (0, 1), "हिन्दी"),
        ("cafe\u0301 noir", (0, 3), "cafe\u0301"),
        ("don't", (4, 5), "t"),
        ("a b", (0, 3), "a b"),  # a token over two words
        ("a, b", (1, 2), ","),
    ],
)
def test_words_of_scripts(text: str, piece: tuple[int, int], word: str) -> None:
    match = Match(TokenSpan("?", *piece), TokenSpan("[CLS]", 0, 0), 1.0)
    assert Explanation(text, "", 1.0, (match,)).words().matches[0].query.token == word


def test_weights_of_terms_are_shown() -> None:
    """What a sparse representation has to say fits the same form."""
    term = TokenSpan("bear", 0, 4)
    explanation = Explanation("bear", "bear", 3.0, (Match(term, term, 3.0, (1.5, 2.0)),))
    assert explanation.words().matches == explanation.matches
    assert explanation.to_dict()["matches"][0]["weights"] == [1.5, 2.0]
    assert "3.0000 = 1.5000 x 2.0000" in explanation.to_html()
    assert "3.0000 = 1.5000 x 2.0000" in printed(explanation)


def printed(explanation: Explanation, **options: object) -> str:
    screen = io.StringIO()
    Console(file=screen, width=60, **options).print(explanation)  # type: ignore[arg-type]
    return screen.getvalue()


def test_what_is_printed_and_stored(tmp_path: Path) -> None:
    query = side("[bold]big cat", [TokenSpan("big", 6, 9), TokenSpan("cat", 10, 13)], 0)
    document = side("a <cat> & more", [TokenSpan("cat", 3, 6), TokenSpan("more", 10, 14)], 1)
    explanation = match_tokens(query, document)
    shown = printed(explanation)
    assert shown.split("\n")[0].split() == ["query", "document", "score"]
    assert all(f"{match.score:.4f}" in shown for match in explanation.matches)
    assert "a <cat> & more" in shown
    assert f"score {explanation.score:.4f}" in shown
    colored = printed(explanation, force_terminal=True, color_system="truecolor")
    # rich keeps the code of a style from its first use: where another test used it, for 256 colours
    assert re.search("\x1b\\[30;48;(2;255;176;32|5;214)mmore\x1b", colored)
    assert json.loads(json.dumps(explanation.to_dict()))["matches"][0]["query"] == {
        "token": "big",
        "start": 6,
        "end": 9,
    }
    explanation.write_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == explanation.to_html()
    with pytest.raises(StorageError, match="writing"):
        explanation.write_html(tmp_path / "nowhere" / "page.html")


def test_nothing_to_match() -> None:
    nothing, something = side("", [], 0), side("a", [TokenSpan("a", 0, 1)], 0)
    assert match_tokens(nothing, something).score == 0
    assert match_tokens(something, nothing).score == -float("inf")
    assert "score -inf" in printed(match_tokens(something, nothing))
    stored = json.dumps(match_tokens(something, nothing).to_dict(), allow_nan=False)
    assert json.loads(stored) == {"query": "a", "document": "", "score": None, "matches": []}


def test_tokens_and_vectors_must_agree() -> None:
    query = side("a", [TokenSpan("a", 0, 1)], 0)
    with pytest.raises(BadValueError, match="1 rows of 1 vectors and 0 tokens"):
        match_tokens(query._replace(spans=[]), query)


def test_a_dense_model_explains_what_it_reads(tiny_bert: Path) -> None:
    with pytest.warns(UserWarning, match="mean"):
        model = Model.from_pretrained(tiny_bert)
    model.tokenizer.max_length = 12
    text = "The gnu eats the grass. " * 20
    [match] = explain(model, "gnu", text).matches
    assert text.startswith(match.document.token)
    assert match.document.end == 18  # "g", the twelfth token


def test_what_a_page_shows() -> None:
    text = "A first sentence, long enough. The second has the cat."
    cat, added = TokenSpan("cat", 50, 53), TokenSpan("pet", len(text), len(text))
    query = TokenSpan("cats", 0, 4)
    matches = (Match(query, cat, 2.0, (1.0, 2.0)), Match(query, added, 0.5, (0.5, 1.0)))
    view = Explanation("cats", text, 2.5, matches).view()
    assert json.loads(json.dumps(view, allow_nan=False))["score"] == 2.5
    assert "".join(segment["text"] for segment in view["document"]) == text
    best = [(segment["text"], segment["heat"]) for segment in view["document"] if segment["best"]]
    assert best == [("The second has the ", 0.0), ("cat", 1.0), (".", 0.0)]
    assert view["query"][0]["matches"] == [("cat", 2.0), ("pet", 0.5)]
    assert [(match["in_query"], match["in_document"]) for match in view["matches"]] == [
        (True, True),
        (True, False),
    ]


def test_a_term_is_shown_wherever_it_is() -> None:
    text = "Cats and other animals. A cat hunts by night, and cats sleep. Bears sleep in winter."
    places = [TokenSpan("cat", start, start + 3) for start in (26, 50)]
    cat = Match(TokenSpan("cat", 0, 3), TokenSpan("cat", 0, 3), 2.0, (1.0, 2.0), tuple(places))
    explanation = Explanation("cat", text, 2.0, (cat,)).words()
    [match] = explanation.matches
    assert [match.document.token, *(span.token for span in match.repeats)] == ["Cats", "cat", "cats"]
    assert match.weights == (1.0, 2.0)
    view = explanation.view()
    assert [segment["text"] for segment in view["document"] if segment["heat"] == 1] == [
        "Cats",
        "cat",
        "cats",
    ]
    best = "".join(segment["text"] for segment in view["document"] if segment["best"])
    assert best == "A cat hunts by night, and cats sleep. "


@settings(deadline=None)
@given(st.text(alphabet="ab.! \n\u3002", max_size=400), st.integers(1, 9))
def test_passages_make_up_the_text(text: str, most: int) -> None:
    passages = split_passages(text, most)
    assert "".join(text[start:end] for start, end in passages) == text
    assert len(passages) <= most
    assert all(start < end for start, end in passages)
