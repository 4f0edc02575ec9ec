"""The command line, through `main` and as a process of its own."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from three_heads import make_model

import irkit.data.collection_files
from irkit import Hybrid, Model, Retriever, Run, evaluate
from irkit.cli import main
from irkit.cli.search import parse_filters
from irkit.errors import BadValueError

TEXTS = [
    "neural search",
    "index of vectors",
    "a token model",
    "text of the gnu",
    "cab",
    "fez",
    "hip model",
    "dig",
]
CORPUS = [
    {"_id": f"d{i}", "title": "A" if i % 2 else "", "text": text, "metadata": {"year": 2000 + i}}
    for i, text in enumerate(TEXTS)
]
QRELS = {"q1": {"d0": 2, "d1": 1}, "q2": {"d3": 1}, "d4": {"d4": 1}}

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a BEIR folder, and an index of it."""
    place = tmp_path_factory.mktemp("cli")
    with pytest.warns(UserWarning, match="mean"):
        Model.from_pretrained(tiny_bert).save_pretrained(place / "model")
    (place / "beir" / "qrels").mkdir(parents=True)
    queries = [("q1", "neural index"), ("q2", "gnu"), ("d4", "cab"), ("unjudged", "hip")]
    write_jsonl(place / "beir" / "corpus.jsonl", CORPUS)
    write_jsonl(place / "beir" / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries])
    lines = [f"{query}\t{doc}\t{grade}\n" for query, row in QRELS.items() for doc, grade in row.items()]
    (place / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    Retriever.build(place / "model", place / "beir", place / "index")
    return place


@pytest.fixture
def call(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in ``place``: exit code, standard output and standard error."""
    monkeypatch.chdir(place)

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run


def write_jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def process(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "irkit", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, text=True, capture_output=True, env=environment, check=False, **options)


# ---- as a process --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [[], ["-h"], ["--version"], ["serch"], ["search", "DIR", "--k", "many"]]
    + [[verb, "--help"] for verb in ("index", "search", "evaluate", "encode", "info")],
)
def test_help_and_wrong_usage_are_light(words: list[str]) -> None:
    code = f"""
import sys
from irkit.cli import main
try:
    main({words})
finally:
    heavy = {{"torch", "transformers", "faiss", "scipy", "numba", "ir_measures", "yaml", "numpy"}}
    print("heavy:", sorted(heavy & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == (2 if words[:1] in (["serch"], ["search"]) and "--help" not in words else 0)
    assert "heavy: []" in result.stdout


def test_one_line_a_problem() -> None:
    result = process("fuse", "none.trec", "none.trec")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("irkit: error: reading none.trec: No such file or directory")
    assert result.stderr.count("\n") == 1


def test_search_in_a_process_is_lean(place: Path) -> None:
    code = f"""
import sys
from irkit.cli import main
try:
    main(["search", {str(place / "index")!r}, "--text", "gnu"])
finally:
    heavy = {{"transformers", "faiss", "scipy", "numba", "ir_measures", "rich"}}
    print("heavy:", sorted(heavy & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "heavy: []" in result.stdout
    assert result.stderr == ""


def test_reader_that_has_seen_enough() -> None:
    end, start = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "irkit", "--help"]
    result = subprocess.run(command, stdout=start, stderr=subprocess.PIPE, check=False)
    os.close(start)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("streams", "code", "problem"),
    [
        (">/dev/full", 2, "irkit: error: writing to standard output: No space left on device\n"),
        (">&-", 2, "irkit: error: writing to standard output: Bad file descriptor\n"),
        ("2>&- >/dev/null", 0, ""),  # files must not get the number of stderr
        ("none 2>/dev/full", 2, ""),
    ],
)
def test_streams_that_are_full_or_closed(tmp_path: Path, streams: str, code: int, problem: str) -> None:
    run = tmp_path / "run.trec"
    run.write_text("q Q0 d 1 1.0 x\n")
    command = f"exec {sys.executable} -m irkit fuse {run} {run} {streams}"  # a verb that imports no torch
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, problem)


def test_prompt_on_a_terminal(place: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "irkit", "search", str(place / "index"), "--k", "2"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=place) as running:
        os.close(theirs)
        os.write(ours, b"gnu\n\n")
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other side is closed
            pass
    os.close(ours)
    assert running.returncode == 0
    lines = shown.decode().splitlines()
    assert any("8 documents" in line for line in lines)
    assert sum(line.strip().startswith(("1  ", "2  ")) or "  d" in line for line in lines) >= 2
    assert any("2 of 8 documents in" in line for line in lines)


# ---- index ---------------------------------------------------------------------------------------


def test_index_then_search(call: Call, place: Path, tmp_path: Path) -> None:
    code, out, err = call("index", "model", "beir", "--out", tmp_path / "i", "--dtype", "float32")
    assert (code, out) == (0, "")
    assert err.startswith("irkit: indexed 8 documents")
    assert err.count("\n") == 1
    code, out, err = call("search", tmp_path / "i", "--text", "gnu", "--k", "3")
    expected = Retriever.load(place / "index").search("gnu", k=3)
    assert [line.split("\t")[2] for line in out.splitlines()] == [hit.id for hit in expected]
    assert out.splitlines()[0].split("\t")[0] == "1"
    assert err == ""


def test_index_there_already(call: Call, tmp_path: Path) -> None:
    first = ("index", "model", "beir", "--out", tmp_path / "i")
    assert call(*first)[0] == 0
    write_jsonl(tmp_path / "small.jsonl", CORPUS[:2])
    code, _, err = call("index", "model", tmp_path / "small.jsonl", "--out", tmp_path / "i")
    assert code == 2
    assert "--overwrite" in err
    assert call("index", "model", tmp_path / "small.jsonl", "--out", tmp_path / "i", "--overwrite")[0] == 0
    assert json.loads(call("info", tmp_path / "i", "--json")[1])["documents"] == 2


def test_recipe(call: Call, tmp_path: Path) -> None:
    words = ("--index", "hnsw", "--set", "ef_search=99", "--set", "chunk_size=3", "--dtype", "float32")
    code, out, _ = call("index", "model", "beir", *words, "--print-config")
    assert code == 0
    recipe = yaml.safe_load(out)
    assert recipe["index"] | {"factory": "hnsw", "ef_search": 99} == recipe["index"]
    assert (recipe["model"], recipe["corpus"], recipe["chunk_size"]) == ("model", "beir", 3)
    assert call("index", "model", "beir", *words, "--out", tmp_path / "i")[0] == 0
    assert (tmp_path / "i" / "recipe.yaml").read_text() == out
    named = call("index", "model", "beir", *words[2:], "--set", "index=hnsw", "--print-config")
    assert named[1] != out
    assert yaml.safe_load(named[1])["index"] == yaml.safe_load(out)["index"] | {"ef_search": 128}
    again = ("index", "--index", tmp_path / "i" / "recipe.yaml")
    assert call(*again, "--print-config")[1] == out
    changed = yaml.safe_load(call(*again, "--print-config", "--dtype", "int8", "--set", "index.refine=2")[1])
    assert (changed["dtype"], changed["index"]["refine"]) == ("int8", 2)
    (tmp_path / "kind.yaml").write_text("kind: faiss\nfactory: IVF4,Flat\n")
    code, out, _ = call("index", "model", "beir", "--index", tmp_path / "kind.yaml", "--print-config")
    assert yaml.safe_load(out)["index"]["factory"] == "IVF4,Flat"
    (tmp_path / "plain.yaml").write_text("model: model\ncorpus: beir\n")
    assert call("index", "--index", tmp_path / "plain.yaml", "--out", tmp_path / "plain")[0] == 0
    assert json.loads(call("info", tmp_path / "plain", "--json")[1])["kind"] == "flat"


def test_dry_run_builds_nothing(call: Call, tmp_path: Path) -> None:
    code, out, err = call("index", "model", "beir", "--out", tmp_path / "i", "--dry-run")
    assert (code, out) == (0, "")
    assert "would index 8 documents" in err
    assert not (tmp_path / "i").exists()


def test_each_head_gets_the_index_of_its_kind(call: Call, tiny_bert: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    make_model(tiny_bert, heads)
    code, _, err = call("index", heads, "beir", "--out", tmp_path / "i", "--dry-run")
    assert (code, "would index 8 documents" in err, (tmp_path / "i").exists()) == (0, True, False)
    assert call("index", heads, "beir", "--index", "auto", "--out", tmp_path / "i", "--dry-run")[0] == 0
    assert call("index", heads, "beir", "--out", tmp_path / "i")[0] == 0
    parts = json.loads(call("info", tmp_path / "i", "--json")[1])["parts"]
    assert {name: part["kind"] for name, part in parts.items()} == {
        "dense": "flat",
        "multi_vector": "flat",
        "sparse": "inverted",
    }


def test_corpus_from_standard_input(call: Call, tmp_path: Path) -> None:
    code, _, err = call("index", "model", "-", "--out", tmp_path / "i", stdin="one text\nanother\n")
    assert code == 0
    assert "2 documents" in err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not json"], "c.jsonl:2: not valid JSON"),
        (['{"_id": "d0", "text": "again"}'], "c.jsonl:2: id 'd0' was used before, at 1"),
        (['{"_id": "x"}'], "c.jsonl:2: missing key 'text'"),
    ],
)
def test_corpus_is_checked_before_the_model_is_loaded(
    call: Call, tmp_path: Path, lines: list[str], message: str
) -> None:
    (tmp_path / "c.jsonl").write_text("\n".join([json.dumps(CORPUS[0]), *lines]) + "\n")
    code, _, err = call("index", "no-such-model", tmp_path / "c.jsonl", "--out", tmp_path / "i")
    assert code == 2
    assert message in err
    assert not (tmp_path / "i").exists()


def test_corpus_that_changes_while_it_is_read(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one\ntwo\n")
    check = irkit.data.check_documents

    def checked(documents: object, progress: object) -> int:
        count = check(documents, progress)
        with corpus.open("a") as stream:
            stream.write("three\n")
        return count

    monkeypatch.setattr("irkit.data.check_documents", checked)
    code, _, err = call("index", "bm25", corpus, "--out", tmp_path / "index")
    assert code == 0
    assert "changed meanwhile: it held 2 documents" in err
    assert "indexed 3 documents" in err


def test_interrupted_build_goes_on(
    call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, lines = irkit.data.collection_files.read_lines, []

    def interrupted(path: str, *limits: int) -> Iterator[tuple[int, bytes]]:
        for line in read(path, *limits):
            lines.append(line)
            if len(lines) == 8 + 7:  # in the second reading: the first is the check
                signal.raise_signal(signal.SIGINT)
            yield line

    words = ("index", "model", "beir", "--out", tmp_path / "i", "--set", "chunk_size=2", "--dtype", "float32")
    with monkeypatch.context() as patch:
        patch.setattr(irkit.data.collection_files, "read_lines", interrupted)
        code, _, err = call(*words)
    assert code == 130
    assert err == "irkit: interrupted - give the same command again to go on with this build\n"
    assert "has not finished" in call("search", tmp_path / "i", "--text", "x")[2]
    assert call(*words)[0] == 0
    expected = [hit.id for hit in Retriever.load(place / "index").search("gnu")]
    assert [
        line.split("\t")[2] for line in call("search", tmp_path / "i", "--text", "gnu")[1].splitlines()
    ] == expected


# ---- search --------------------------------------------------------------------------------------


def test_run_file(call: Call, place: Path, tmp_path: Path) -> None:
    code, out, err = call("search", "index", "beir", "--out", tmp_path / "run.trec", "--k", "5")
    assert (code, out, err) == (0, "", "")
    run = Run.read(tmp_path / "run.trec")
    queries = {"q1": "neural index", "q2": "gnu", "d4": "cab", "unjudged": "hip"}
    assert list(run) == list(Retriever.load(place / "index").run(queries, k=5))
    assert (tmp_path / "run.trec").read_text().splitlines()[0].split()[1::4] == ["Q0", "irkit"]
    assert call("search", "index", "beir", "--k", "5")[1] == (tmp_path / "run.trec").read_text()
    assert call("search", "index", "beir", "--k", "5", "--out", "-")[1] == (tmp_path / "run.trec").read_text()
    code, out, _ = call("search", "index", "-", "--k", "5", stdin="q1\tneural index\nq2\tgnu\n")
    assert [line.split()[0] for line in out.splitlines()] == ["q1"] * 5 + ["q2"] * 5
    assert {
        line.split()[0] for line in call("search", "index", "beir", "--split", "test")[1].splitlines()
    } == set(QRELS)


def test_measures(call: Call, place: Path, tmp_path: Path) -> None:
    words = ("search", "index", "beir", "--split", "test", "--qrels", "beir", "--measures", "nDCG@10 RR@10")
    code, out, err = call(*words, "--out", tmp_path / "run.trec")
    assert (code, err) == (0, "")
    expected = evaluate(tmp_path / "run.trec", QRELS, "nDCG@10 RR@10").mean
    assert out == "measure\tvalue\n" + "".join(f"{name}\t{value:.4f}\n" for name, value in expected.items())
    assert call(*words)[1] == out
    code, _, err = call(*words, "--k", "9")
    assert (code, err.count("looks at 10 documents per query, but --k is 9")) == (0, 2)


def test_pages_thresholds_groups_and_fields(call: Call, place: Path) -> None:
    words = ("search", "index", "--text", "neural index")
    whole = [line.split("\t") for line in call(*words, "--k", "8")[1].splitlines()]
    page = call(*words, "--k", "2", "--offset", "3")[1].splitlines()
    assert [line.split("\t") for line in page] == whole[3:5]  # ranks, too
    with Retriever.load(place / "index") as retriever:
        hits = retriever.search("neural index", 8)
        years = {hit.id: str(hit.metadata["year"]) for hit in hits}
    odd = [{**record, "metadata": {"odd": number % 2 > 0}} for number, record in enumerate(CORPUS)]
    Retriever.build(place / "model", odd, place / "grouped").close()
    found = call(*words, "--threshold", hits[2].score)[1].splitlines()
    assert [line.split("\t") for line in found] == whole[:3]
    shown = call(*words, "--fields", "metadata.year, title,metadata,metadata.none", "--k", "2")[
        1
    ].splitlines()
    assert [line.split("\t")[2:] for line in shown] == [
        [row[2], years[row[2]], row[3], f'{{"year": {years[row[2]]}}}', ""] for row in whole[:2]
    ]
    code, out, _ = call("search", "grouped", *words[2:], "--group-by", "odd", "--per-group", "2")
    ids = [line.split("\t")[2] for line in out.splitlines()]
    assert code == 0
    assert sorted(int(name[1:]) % 2 for name in ids) == [0, 0, 1, 1]
    run = call("search", "grouped", "beir", "--group-by", "odd", "--offset", "1")[1].splitlines()
    assert [line.split()[0] for line in run] == ["q1", "q2", "d4", "unjudged"]
    prompt = call("search", "index", "--k", "2", "--offset", "3", "--fields", "id", stdin="neural index\n")[1]
    assert prompt.splitlines() == ["\t".join(row[:3]) for row in whole[3:5]] + [""]
    assert "--offset and --threshold" in call(*words, "--offset", "99")[2]


def test_facets(call: Call, place: Path) -> None:
    values = ["b", None, 3]
    records = [{**record, "metadata": {"of": values[i % 3]}} for i, record in enumerate(CORPUS)]
    Retriever.build("bm25", records, place / "faceted").close()
    words = ("search", "faceted", "--facet", "of")
    counts = [len(range(first, len(CORPUS), 3)) for first in range(3)]
    assert call(*words)[1].splitlines() == [
        "of\tdocuments",
        *map("{}\t{}".format, ("b", "null", "3"), counts),
    ]
    assert call(*words, "--k", "1", "--filter", "of=3")[1] == f"of\tdocuments\n3\t{counts[2]}\n"
    for more in (("beir",), ("--text", "x"), ("--offset", "1"), ("--out", "x.trec"), ("--rm3",)):
        code, out, err = call(*words, *more)
        assert (code, out) == (2, "")
        assert "got --facet" in err or "need QUERIES" in err
    assert "did you mean 'of'?" in call("search", "faceted", "--facet", "off")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "x", "--per-group", "2"), "per_group without group_by"),
        (("--text", "x", "--threshold", "nan"), "threshold is nan"),
        (("--text", "x", "--offset", "-1"), "'--offset': Input should be greater"),
        (("--text", "x", "--fields", "titel"), "did you mean 'title'?"),
        (("--text", "x", "--group-by", "yaer"), "did you mean 'year'?"),
        (("beir", "--fields", "title"), "a run has only ids and scores"),
        (("beir", "--ignore-identical-ids", "--offset", "2"), "leave it or them out"),
    ],
)
def test_bad_pages_thresholds_groups_and_fields(call: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = call("search", "index", *words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_identical_ids_make_room_for_others(call: Call) -> None:
    run = call("search", "index", "beir", "--k", "3", "--ignore-identical-ids")[1].splitlines()
    found = [line.split()[2] for line in run if line.startswith("d4 ")]
    assert len(found) == 3
    assert "d4" not in found


def test_filters(call: Call) -> None:
    def found(*words: str) -> set[str]:
        code, out, err = call("search", "index", "--text", "gnu", *words)
        assert (code, err) == (0, "")
        return {line.split("\t")[2] for line in out.splitlines()}

    assert found("--filter", "year>=2002", "--filter", "year<2004") == {"d2", "d3"}
    assert found("--filter", '{"year": {">": 2005}}') == {"d6", "d7"}
    assert found("--filter", "year=[2000, 2001]") == {"d0", "d1"}
    assert found("--filter", "_id=d5") == {"d5"}


def test_nothing_found_says_so(call: Call, tmp_path: Path) -> None:
    none = ("--filter", "year=1900")
    code, out, err = call("search", "index", "--text", "gnu", *none)
    assert (code, out, err) == (0, "", "irkit: nothing found: no document meets --filter\n")
    code, out, err = call("search", "index", "beir", *none)
    assert (code, out, err) == (0, "", "irkit: nothing found: no document meets --filter\n")
    (tmp_path / "none.tsv").touch()
    code, out, err = call("index", "model", tmp_path / "none.tsv", "--out", tmp_path / "i")
    assert (code, err.splitlines()[0]) == (0, f"irkit: warning: {tmp_path / 'none.tsv'} holds no documents")
    code, out, err = call("search", "index", tmp_path / "none.tsv")
    assert (code, out, err) == (0, "", f"irkit: warning: {tmp_path / 'none.tsv'} holds no queries\n")
    code, out, err = call("search", tmp_path / "i", "--text", "gnu")
    assert (code, out, err) == (0, "", "irkit: nothing found: the index has no documents\n")


def test_ids_that_a_trec_run_cannot_hold(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": "my doc", "text": "a"}, {"_id": "d", "text": "b"}])
    queries = write_jsonl(tmp_path / "q.jsonl", [{"_id": "my query", "text": "a"}])
    assert call("index", "model", corpus, "--out", tmp_path / "i")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Retriever, "run", lambda *_, **__: 1 / 0)  # not reached
        for source, problem in ((queries, "'my query' has a space"), ("beir", "'my doc' has a space")):
            code, out, err = call("search", tmp_path / "i", source)
            assert (code, out) == (2, "")
            assert problem in err
    assert call("search", tmp_path / "i", queries, "--out", tmp_path / "run.jsonl") == (0, "", "")
    assert set(Run.read(tmp_path / "run.jsonl").to_dict()["my query"]) == {"my doc", "d"}


def test_prompt_reads_a_pipe(call: Call, place: Path) -> None:
    code, out, err = call("search", "index", "--k", "2", stdin="gnu\n\n  neural index  \n")
    assert (code, err) == (0, "")
    answers = [block.splitlines() for block in out.split("\n\n") if block]
    retriever = Retriever.load(place / "index")
    expected = [[hit.id for hit in retriever.search(text, k=2)] for text in ("gnu", "neural index")]
    assert [[line.split("\t")[2] for line in lines] for lines in answers] == expected


def test_output_for_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, _ = call("search", "index", "--text", "gnu", "--k", "1")
    assert code == 0
    assert "\t" not in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = call("search", "index", "beir", "--qrels", "beir")[1]
    assert "nDCG@10" in out
    assert "\t" not in out


def test_bar_only_on_a_terminal(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = call("index", "model", "beir", "--out", tmp_path / "i")
    assert (code, out) == (0, "")
    assert "checking" in err
    assert "encoding" in err
    assert "indexed 8 documents" in err.splitlines()[-1]


def test_control_characters_do_not_reach_the_terminal(call: Call, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": "a", "text": "red \x1b[31m\ttext\nline \x07 ü"}])
    assert call("index", "model", corpus, "--out", tmp_path / "i")[0] == 0
    assert call("search", tmp_path / "i", "--text", "x")[1].split("\t")[-1] == "red  [31m text line   ü\n"


# ---- evaluate, encode, info ----------------------------------------------------------------------


def test_evaluate(call: Call, tmp_path: Path) -> None:
    good = {query: dict.fromkeys(row, 1.0) for query, row in QRELS.items()}
    bad = {query: {"d7": 2.0} | row for query, row in good.items()}
    Run.from_dict(good).write(tmp_path / "good.trec")
    Run.from_dict(bad).write(tmp_path / "bad.jsonl")
    runs = (tmp_path / "good.trec", tmp_path / "bad.jsonl")
    code, out, err = call("evaluate", *runs, "--qrels", "beir", "--measures", "RR@10 P@1")
    assert (code, err) == (0, "")
    assert out == f"run\tRR@10\tP@1\n{runs[0]}\t1.0000\t1.0000\n{runs[1]}\t0.5000\t0.0000\n"
    out = call("evaluate", runs[1], "--qrels", "beir", "--measures", "RR@10", "--per-query")[1]
    assert [line.split("\t")[1:] for line in out.splitlines()[1:]] == [
        ["q1", "0.5000"],
        ["q2", "0.5000"],
        ["d4", "0.5000"],
        ["all", "0.5000"],
    ]
    words = ("--measures", "RR@10", "--baseline", runs[0], "--test", "ttest", "--correction", "holm")
    out = call("evaluate", runs[1], "--qrels", "beir", *words)[1]
    assert out.splitlines()[-2:] == [
        "run\tmeasure\tvalue\tdifference\tp\tp (holm)\tsignificant",
        f"{runs[1]}\tRR@10\t0.5000\t-0.5000\t0.0000\t0.0000\tyes",
    ]
    words = ("--ignore-identical-ids", "--measures", "P@1")
    assert call("evaluate", runs[0], "--qrels", "beir", *words)[1].split() == [
        "run",
        "P@1",
        str(runs[0]),
        "0.6667",
    ]


def test_encode(call: Call, place: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(place / "model")
    expected = model.encode_representation(
        [f"{record['title']} {record['text']}".strip() for record in CORPUS], "document"
    )
    for name in ("v.npy", "v.safetensors", "v.jsonl"):
        code, out, err = call("encode", "model", "beir", "--out", tmp_path / name, "--dtype", "float32")
        assert (code, out) == (0, "")
        assert "8 texts" in err
    arrays = [
        np.load(tmp_path / "v.npy"),
        load_file(tmp_path / "v.safetensors")["values"],
        np.array([json.loads(line)["vector"] for line in (tmp_path / "v.jsonl").read_text().splitlines()]),
    ]
    for array in arrays:
        np.testing.assert_allclose(array, expected.values.numpy(), atol=1e-6)
    assert call("encode", "model", "-", "--out", tmp_path / "q.npy", "--side", "query", stdin="gnu\n")[0] == 0
    assert np.load(tmp_path / "q.npy").shape == (1, 32)


def test_encode_streams(call: Call, place: Path, tmp_path: Path) -> None:
    """Several chunks, on one device and on two: the same rows with their ids, one chunk in memory."""
    texts = [f"{word} {number}" for number in range(350) for word in ("search", "an index", "text model")]
    write_jsonl(tmp_path / "c.jsonl", [{"_id": f"é{i}", "text": text} for i, text in enumerate(texts)])
    expected = Model.from_pretrained(place / "model").encode_representation(texts, "document").values.numpy()
    old = os.umask(0o027)
    try:
        for name, device in [("v.npy", "cpu,cpu"), ("v.safetensors", "cpu"), ("v.jsonl", "cpu")]:
            words = ("--out", tmp_path / name, "--dtype", "float32", "--device", device)
            assert call("encode", "model", tmp_path / "c.jsonl", *words)[0] == 0
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)
    assert len(list(tmp_path.iterdir())) == 4
    stored = load_file(tmp_path / "v.safetensors")
    ids = [json.loads(line) for line in bytes(stored["ids"]).splitlines()]
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert ids == [line["id"] for line in lines] == [f"é{i}" for i in range(len(texts))]
    for array in (np.load(tmp_path / "v.npy"), stored["values"], [line["vector"] for line in lines]):
        np.testing.assert_allclose(array, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["v.npy", "v.safetensors", "v.jsonl"])
def test_encode_nothing(call: Call, tmp_path: Path, name: str) -> None:
    (tmp_path / "none.tsv").touch()
    assert call("encode", "model", tmp_path / "none.tsv", "--out", tmp_path / name)[0] == 0
    if name == "v.npy":
        assert np.load(tmp_path / name).shape == (0, 32)
    elif name == "v.safetensors":
        assert load_file(tmp_path / name)["values"].shape == (0, 32)
    else:
        assert (tmp_path / name).read_text() == ""


def test_encode_leaves_nothing_half_written(call: Call, tmp_path: Path) -> None:
    for name in ("v.npy", "v.safetensors", "v.jsonl"):
        code, _, err = call(
            "encode", "model", "-", "--out", tmp_path / name, stdin='{"_id": "1", "text": "a"}\n{'
        )
        assert code == 2
        assert "-:2: not valid JSON" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_index_on_two_devices(call: Call, place: Path, tmp_path: Path) -> None:
    words = ("--dtype", "float32", "--set", "chunk_size=3", "--device", "cpu,cpu")
    assert call("index", "model", "beir", "--out", tmp_path / "i", *words)[0] == 0
    expected = [hit.id for hit in Retriever.load(place / "index").search("gnu")]
    assert [hit.id for hit in Retriever.load(tmp_path / "i").search("gnu")] == expected
    assert yaml.safe_load((tmp_path / "i" / "recipe.yaml").read_text())["device"] == "cpu,cpu"


def test_info(call: Call, place: Path) -> None:
    facts = json.loads(call("info", "index", "--json")[1])
    assert (facts["documents"], facts["kind"], facts["config"]["kind"]) == (8, "flat", "flat")
    assert facts["bytes"] == sum(facts["files"].values())
    assert facts["checksums"] == "verified"
    assert json.loads(call("info", "index", "--json", "--no-verify")[1])["checksums"] == "not compared"
    assert "model.name\t" + str(place / "model") in call("info", "index")[1]
    facts = json.loads(call("info", "model", "--json")[1])
    assert (facts["kind"], facts["dim"], facts["similarity"]) == ("dense", 32, "cosine")


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("index model beir", "--out"),
        ("index model --out x", "no CORPUS; expected MODEL CORPUS"),
        ("index --out x", "no MODEL and no CORPUS"),
        ("index --out x --index beir/none.yaml", "reading beir/none.yaml: No such file or directory\n"),
        ("index model beir --out index/deeper --overwrite", "it is inside the index"),
        ("index model beir --out beir/corpus.jsonl", "corpus.jsonl is a file"),
        ("index model beir --out beir/corpus.jsonl/x", "corpus.jsonl is a file"),
        ("index model beir --out x --index HNSW32,oops", "FAISS cannot make 'HNSW32,oops' for 32 dimensions"),
        ("index model beir --out x --index HNSW32,oops --dry-run", "FAISS cannot make"),
        (
            "index model beir --out x --index plaid",
            "holds multi_vector, got dense; choose flat, dense, hnsw, ivf",
        ),
        ("index model beir --out x --device cpu,tpu", "device 'tpu'"),
        ("search index --text x --device cpu,cpu", "device 'cpu,cpu'"),
        ("search index beir --qrels beir/qrels", "give the folder above it, or one of the files in it"),
        ("index model beir --out x --index hsnw", "did you mean 'hnsw'"),
        ("index model beir --out x --set ef=1", "unknown key"),
        ("index model beir --out x --set chunk_size=0", "chunk_size: "),
        ("index model beir --out x --set chunk_size", "expected key=value"),
        ("index model beir --out x --dtype float", "dtype: "),
        ("index model beir --out x --index none.yaml", "reading none.yaml"),
        ("index model nowhere.jsonl --out x", "reading nowhere.jsonl: No such file"),
        ("index beir beir --out x", "beir"),
        ("index ./no-model beir --out x", "no-model: no such directory"),
        ("index model beir --out beir", "other files"),
        ("index model beir --out index", "--overwrite"),
        ("search index beir --out beir", "it is a directory; name a file"),
        ("search index beir --out /dev/null", "it is a device; name a file"),
        ("info index/irkit.json", "it is a file; expected a directory"),
        ("search index --text x --k 0", "--k"),
        ("search index --text x beir", "give one of them"),
        ("search index --qrels beir", "QUERIES"),
        ("search index nowhere.tsv", "one query is given as --text 'nowhere.tsv'"),
        ("search index beir --out nowhere/run.trec", "nowhere/run.trec"),
        ("search index beir --qrels beir --out -", "standard output"),
        ("search index beir --split dev", "no split 'dev'"),
        ("search index beir/queries.jsonl --split test", "--split test"),
        ("search index nowhere.tsv --split test", "reading nowhere.tsv: No such file"),
        ("search index beir --qrels beir --measures nDGC@10", "nDCG"),
        ("search index beir --qrels nowhere", "nowhere"),
        ("search index --text x --filter year", "year>=2000"),
        ("search index --text x --filter year>1 --filter year>2", "'year'"),
        ("search index --text x --filter {", "not valid JSON"),
        ("search index --text x --model beir", "beir"),
        ("search beir --text x", "irkit.json"),
        ("evaluate nowhere.trec --qrels beir", "nowhere.trec"),
        ("evaluate beir/qrels/test.tsv --qrels beir", "test.tsv:1"),
        ("evaluate x --qrels beir --test anova", "anova"),
        (
            "index model beir --out x --set effort=0.9",
            "'index.effort'; it belongs to another part or another kind",
        ),
        ("index bm25 beir --out x --set k1=much", "bm25.k1: "),
        ("encode bm25 beir --out x.jsonl", "bm25 encodes nothing without an index"),
        ("encode model beir --out x.txt", ".npy"),
        ("encode model beir --out nowhere/x.npy", "nowhere"),
        (
            "info nowhere",
            "irkit info nowhere: no such directory; expected the directory of an index or of a mod",
        ),
        ("info beir", "beir"),
        ("info", "DIR"),
        ("nothing", "nothing"),
        ("search index --frobnicate", "--frobnicate"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call: Call, place: Path, words: str, message: str) -> None:
    before = sorted(place.rglob("*"))
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("irkit: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("words", [("index", "", "beir", "--out", "x"), ("search", "", "--text", "x")])
def test_empty_words_are_refused(call: Call, words: tuple[str, ...]) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert f"word {words.index('') + 1} of the command is empty; is a variable" in err


def test_text_that_is_not_utf8(call: Call) -> None:
    code, _, err = call("search", "index", "--text", os.fsdecode(b"\xff"))
    assert code == 2
    assert "unpaired surrogate" in err


def test_damaged_index(call: Call, tmp_path: Path) -> None:
    assert call("index", "model", "beir", "--out", tmp_path / "i")[0] == 0
    file = next((tmp_path / "i").glob("values.*"))
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    for words in (("search", tmp_path / "i", "--text", "x"), ("info", tmp_path / "i")):
        code, out, err = call(*words)
        assert (code, out) == (2, "")
        assert file.name in err
        assert "Traceback" not in err


def test_traceback_on_request(call: Call) -> None:
    code, _, err = call("info", "nowhere", "--traceback")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("irkit: error: ")


def test_bug_says_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retriever, "load", lambda *_, **__: 1 / 0)
    code, _, err = call("info", "index")
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("irkit: internal error: ZeroDivisionError: division by zero")
    assert "--traceback" in err


@pytest.mark.parametrize("module", ["typer", "irkit.cli.search", "torch"])
def test_interrupt_of_the_start(place: Path, module: str) -> None:
    """Ctrl-C while a module is imported is as quiet as any other."""
    code = f"""
import runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["irkit", "search", {str(place / "index")!r}, "--text", "x"]
runpy.run_module("irkit", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "irkit: interrupted\n")


def test_interrupt(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retriever, "load", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert call("search", "index", "--text", "x") == (130, "", "irkit: interrupted\n")


@pytest.mark.slow
def test_interrupts_are_heard_where_the_suite_starts_with_them_ignored() -> None:
    """As `nohup make test` and `make test &` start it."""
    code = f"""
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {__file__!r}, "-k", "interrupt"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()[-1].split(",")[0]) == (0, "5 passed")


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(call: Call, tiny_bert: Path, tmp_path: Path) -> None:
    code, _, err = call("encode", tiny_bert, "-", "--out", tmp_path / "x.npy", stdin="text\n")
    assert code == 0
    assert err.splitlines()[0].startswith("irkit: warning: ")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], None),
        (["a = b = c"], {"a": "b = c"}),
        (["a==1", "b!=x", "c <= 1.5"], {"a": 1, "b": {"!=": "x"}, "c": {"<=": 1.5}}),
        (['a="1"', "b=null", "c=true"], {"a": "1", "b": None, "c": True}),
        (["a=NaN", "b!=Infinity"], {"a": "NaN", "b": {"!=": "Infinity"}}),
        (["_id=42", '{"a": ["x"]}'], {"_id": "42", "a": ["x"]}),
        (['_id=["42", "43"]'], {"_id": ["42", "43"]}),
        (["date>=2020-01-01", "date<2021-01-01"], {"date": {">=": "2020-01-01", "<": "2021-01-01"}}),
    ],
)
def test_conditions(conditions: list[str], expected: object) -> None:
    assert parse_filters(conditions) == expected


@pytest.mark.parametrize("conditions", [["a"], [">3"], ["a=1", "a=1"], ["a=1", "a>0"], ["[1]"], ['{"a": }']])
def test_bad_conditions(conditions: list[str]) -> None:
    with pytest.raises(BadValueError, match="filter"):
        parse_filters(conditions)


# ---- real data -----------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.slow
def test_scifact_is_as_published(data_dir: Path, minilm: str, tmp_path: Path) -> None:
    """nDCG@10 of all-MiniLM-L6-v2 on the test queries of SciFact is 0.6451 in the MTEB leaderboard."""
    corpus = data_dir / "scifact"
    values = {}
    for kind in ("flat", "hnsw"):
        indexed = process(
            "index", minilm, corpus, "--out", tmp_path / kind, "--index", kind, "--dtype", "float32"
        )
        assert (indexed.returncode, indexed.stdout) == (0, "")
        words = (
            "--split",
            "test",
            "--qrels",
            corpus,
            "--measures",
            "nDCG@10",
            "--k",
            10,
            "--out",
            tmp_path / "run.trec",
        )
        found = process("search", tmp_path / kind, corpus, *words)
        assert (found.returncode, found.stderr) == (0, "")
        values[kind] = float(found.stdout.split()[-1])
    assert values["flat"] == pytest.approx(0.6451, abs=0.004)
    assert values["hnsw"] == pytest.approx(values["flat"], abs=0.005)


@pytest.mark.parametrize("condition", ["year>>1", "year=>1", "lang==!de", "nothing"])
def test_conditions_with_a_slip_are_refused(condition: str) -> None:
    with pytest.raises(BadValueError, match="expected something like"):
        parse_filters([condition])


def test_a_baseline_needs_a_run_to_compare(tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text("q Q0 d 1 1.0 x\n")
    (tmp_path / "qrels.trec").write_text("q 0 d 1\n")
    run = str(tmp_path / "run.trec")
    command = ["evaluate", run, "--qrels", str(tmp_path / "qrels.trec"), "--baseline", run]
    result = subprocess.run([sys.executable, "-m", "irkit", *command], capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no run but the baseline" in result.stderr


@pytest.mark.parametrize(
    ("verb", "key", "taker"),
    [
        ("train", "pretraining", "pretrain"),
        ("train", "baseline", "study"),
        ("study", "losses", "train"),
        ("pretrain", "losses", "train"),
        ("pretrain", "vocabulary", "transfer-vocab"),
        ("transfer-vocab", "losses", "train"),
        ("transfer-vocab", "pretraining", "pretrain"),
    ],
)
def test_file_of_another_verb_is_named(call: Call, tmp_path: Path, verb: str, key: str, taker: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(f"{key}: []")
    code, _, err = call(verb, file, "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{file}: it is made for irkit {taker}" in err


@pytest.mark.parametrize(("rank", "says"), [("0", True), ("1", False)])
def test_of_several_processes_the_first_says_what_is_wrong_with_a_recipe(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, says: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)  # as torchrun sets it
    file = tmp_path / "recipe.yaml"
    file.write_text("model: x\ndata: {source: x}\nlosses: {kind: kld}\n")
    code, _, err = call("train", file, "--out", tmp_path / "out")
    assert (code, "did you mean 'kl'" in err, bool(err)) == (2, says, says)
    code, _, err = call(
        "train", tmp_path / "nothing.yaml", "--out", tmp_path / "out"
    )  # may be so on one alone
    assert (code, "nothing.yaml" in err) == (2, True)


@pytest.mark.filterwarnings("ignore:bfloat16 on cpu")
def test_vectors_in_files_answer_as_the_model_does(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents in bfloat16 where the hardware has it, queries in float32: that is what an index searches."""
    monkeypatch.setattr("irkit.model.hardware.prefers_bfloat16", lambda device: True)
    monkeypatch.setattr(torch.nn.functional, "cosine_similarity", lambda *_: torch.ones(1))
    model = Model.from_pretrained("model", device="cpu", dtype="auto")
    assert next(model.encoder.parameters()).dtype == torch.bfloat16
    docs, queries = tmp_path / "docs.safetensors", tmp_path / "queries.safetensors"
    for words in (
        ("index", "model", "beir", "--out", tmp_path / "encoded"),
        ("encode", "model", "beir", "--out", docs),
        ("encode", "model", "beir", "--side", "query", "--out", queries),
        ("index", "vectors", docs, "--out", tmp_path / "vectors"),
        ("search", tmp_path / "encoded", "beir", "--out", tmp_path / "encoded.trec"),
        ("search", tmp_path / "vectors", queries, "--out", tmp_path / "vectors.trec"),
    ):
        code, _, err = call(*words)
        assert code == 0, err
    expected, found = (Run.read(tmp_path / f"{name}.trec").to_dict() for name in ("encoded", "vectors"))
    assert found.keys() == expected.keys()
    for query, scores in expected.items():
        assert found[query] == pytest.approx(scores, abs=1e-6)


def test_what_finds_nothing_by_mistake_is_told(call: Call, place: Path) -> None:
    """A misspelt key, a value of another type, and judgments of another collection."""
    code, out, err = call("search", "index", "--text", "gnu", "--filter", "yaer>=2000")
    assert (code, out) == (2, "")
    assert err == "irkit: error: filter: no document has the key 'yaer'; did you mean 'year'?\n"
    code, _, err = call("search", "index", "beir", "--filter", 'year="2003"')
    assert code == 2
    assert err.endswith("'year' == '2003' is a string; documents have a number, such as 2000\n")
    with pytest.raises(BadValueError, match="did you mean 'year'"):
        Hybrid([Retriever.load(place / "index")] * 2).search("gnu", filter={"yaer": 2000})
    (place / "other.trec").write_text("q1 Q0 other 1 1.0 x\n")
    with pytest.warns(UserWarning, match="no judged document is in the run"):
        evaluate(place / "other.trec", QRELS)
