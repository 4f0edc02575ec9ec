"""Texts by id, datasets and their draws, batches and the collator: what is read, and in which order."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from irkit import Model
from irkit.errors import BadValueError, ConfigError, IrkitError, StorageError
from irkit.training.example import Batch, Example
from irkit.training.losses import KLDivergence
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import (
    Batches,
    Collator,
    DataConfig,
    Dataset,
    Mixture,
    TrainingRow,
    check,
    open_data,
    read_training_rows,
    write_examples,
)
from irkit.training.training_data.dataset import choose
from irkit.training.training_data.row_sequences import Stream
from irkit.training.training_data.text_store import TextStore


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("IRKIT_CACHE", str(folder))
    return folder


def pairs(n: int, queries: int | None = None) -> list[TrainingRow]:
    return [
        TrainingRow(f"q{i % (queries or n)}", f"query {i % (queries or n)}", (), (f"text {i}",))
        for i in range(n)
    ]


def mixture(*parts: list[TrainingRow], **keys: Any) -> Mixture:
    return Mixture([Dataset(part, DataConfig(source=f"part {i}", **keys)) for i, part in enumerate(parts)])


# texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", '{"_id": "a", "title": "T", "text": "é\u2028x"}\r\n\n{"docid": 7, "text": "seven"}'),
        ("x.tsv", "a\tT\té\u2028x\n7\t\tseven\n"),
        ("x.tsv", "\ufeffid\ttitle\ttext\na\tT\té\u2028x\n\n7\t\tseven"),
        ("x.jsonl.gz", '{"_id": "a", "title": "T", "text": "é\u2028x"}\n{"_id": "7", "text": "seven"}'),
    ],
)
def test_texts_are_found_by_id(tmp_path: Path, name: str, content: str) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for _ in range(2):  # built, and from the cache
        store = TextStore(str(tmp_path / name))
        assert (len(store), store["a"], store["7"]) == (2, "T é\u2028x", "seven")
        assert "a" in store
        assert "b" not in store
        with pytest.raises(KeyError):
            store["b"]
        assert (store.sizes(["7", "b", "a"]) > 0).tolist() == [True, False, True]
    assert pickle.loads(pickle.dumps(store))["a"] == store["a"]  # as worker processes get it


def test_texts_follow_their_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"_id": "a", "text": "old"}\n')
    assert TextStore(str(path))["a"] == "old"
    path.write_text('{"_id": "a", "text": "newer"}\n')
    assert TextStore(str(path))["a"] == "newer"


def test_titles_are_of_documents_alone(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "title": "T", "text": "body"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "a", "text": "question"}\n')
    assert TextStore(str(tmp_path))["a"] == "T body"
    assert TextStore(str(tmp_path), "queries")["a"] == "question"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"_id": "a", "text": "1"}\n{"_id": "b"}\n', r"x.jsonl:2: missing key 'text'"),
        ('{"_id": "a", "text": "1"}\nrubbish\n', r"x.jsonl:2: not valid JSON"),
        ('{"_id": "a", "text": "1"}\n{"_id": "a", "text": "2"}\n', "id 'a' comes more than once"),
    ],
)
def test_bad_collections_are_refused(tmp_path: Path, cache: Path, content: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(BadValueError, match=message):
        TextStore(str(path))
    assert list(cache.iterdir()) == []  # nothing half done is left


def test_missing_collections_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="No such file"):
        TextStore(str(tmp_path / "none.jsonl"))
    with pytest.raises(StorageError, match=r"expected corpus\.jsonl"):
        TextStore(str(tmp_path))
    path = tmp_path / "x.jsonl"
    path.write_text('{"_id": "a", "text": "1"}\n')
    monkeypatch.setenv("IRKIT_CACHE", str(path))
    with pytest.raises(StorageError, match="set IRKIT_CACHE to a folder that can be written"):
        TextStore(str(path))


# which documents of a row


@st.composite
def choices(draw: st.DrawFn) -> tuple[TrainingRow, frozenset[str], DataConfig]:
    n = draw(st.integers(1, 8))
    scores = draw(st.none() | st.tuples(*[st.floats(-5, 5)] * n))
    row = TrainingRow("q", "q", (), tuple(map(str, range(n))), scores, draw(st.integers(0, n)))
    known = draw(st.frozensets(st.sampled_from(row.documents or ())))
    sampling = draw(st.sampled_from(["first", "random"] if scores is None else ["first", "random", "top"]))
    count = draw(st.none() | st.integers(1, 9))
    return row, known, DataConfig(source="x", documents=count, sampling=sampling)


@given(choices(), st.integers(0, 99))
def test_what_holds_of_every_choice(case: tuple[TrainingRow, frozenset[str], DataConfig], seed: int) -> None:
    row, known, config = case
    names = row.documents or ()
    relevant = {i for i in range(len(row)) if i < row.positives or names[i] in known}
    chosen, positives = choose(row, known, config, (seed,))
    assert (chosen, positives) == choose(row, known, config, (seed,))
    assert len(set(chosen)) == len(chosen)
    assert set(chosen[:positives]) <= relevant
    assert not set(chosen[positives:]) & relevant
    assert sorted(chosen[:positives]) == chosen[:positives]
    assert sorted(chosen[positives:]) == chosen[positives:]
    if config.documents is None:
        assert sorted(chosen) == list(range(len(row)))
    else:
        assert positives >= min(1, len(relevant))
        if row.scores is not None:
            assert len(chosen) == min(len(row), config.documents)
        else:
            assert positives == min(1, len(relevant))
            assert len(chosen) == min(positives + len(row) - len(relevant), config.documents)


def test_how_documents_are_chosen() -> None:
    row = TrainingRow("q", "q", (), ("p1", "p2", "n1", "n2", "n3"), None, 2)

    def names(row: TrainingRow, seed: int = 0, **keys: Any) -> list[str]:
        chosen, _ = choose(row, frozenset(), DataConfig(source="x", **keys), (seed,))
        return [(row.documents or ())[i] for i in chosen]

    assert names(row) == ["p1", "p2", "n1", "n2", "n3"]
    assert names(row, documents=3, sampling="first") == ["p1", "n1", "n2"]
    drawn = {tuple(names(row, seed, documents=3)) for seed in range(200)}
    assert drawn == {(p, *n) for p in ("p1", "p2") for n in (("n1", "n2"), ("n1", "n3"), ("n2", "n3"))}
    scored = TrainingRow("q", "q", (), row.documents, (0.1, 0.9, 0.5, 0.2, 0.8), 2)
    assert names(scored, documents=3, sampling="top") == ["p2", "n1", "n3"]
    assert names(scored, documents=3, sampling="first") == ["p1", "p2", "n1"]
    with pytest.raises(ConfigError, match="'top' needs scores"):
        names(row, documents=2, sampling="top")


def test_judgments_make_relevant_what_a_file_calls_negative() -> None:
    rows = [TrainingRow("1", "q", ("a", "b", "c"), ("A", "B", "C"))]
    data = Dataset(rows, DataConfig(source="x"), qrels={"1": {"a": 1, "c": 1, "z": 2}})
    assert data.example(0) == Example("q", ("A", "C", "B"), None, 2, ("a", "c", "b"), frozenset("acz"))


def test_limits_and_missing_texts() -> None:
    rows = [TrainingRow(str(i), None, ("a", "b")) for i in range(5)]
    config = DataConfig(source="file", limit=3)
    data = Dataset(rows, config, {"0": "zero"}, {"a": "A", "b": "B"})
    assert len(Mixture([data])) == 3
    assert data.example(0).documents == ("A", "B")
    with pytest.raises(BadValueError, match=r"file: no text of query '1'; give queries: where the texts are"):
        data.example(1)


# batches


def everything(batches: Any) -> list[list[tuple[int, int, int]]]:
    return list(batches)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3), st.booleans())
def test_every_example_comes_once(n: int, size: int, seed: int, shuffle: bool) -> None:
    data = mixture(pairs(n), shuffle=shuffle)
    batches = Batches(data, batch_size=size, seed=seed)
    epoch = everything(batches)
    assert len(epoch) == len(batches) == -(-n // size)
    assert all(len(batch) == size for batch in epoch[:-1])
    positions = [index for batch in epoch for _, index, _ in batch]
    assert sorted(positions) == list(range(n))
    assert (positions == list(range(n))) or shuffle
    assert everything(batches) == epoch
    assert everything(Batches(data, batch_size=size, seed=seed)) == epoch


def test_epochs_and_seeds_differ() -> None:
    data = mixture(pairs(50))
    batches = Batches(data, batch_size=5)
    first = everything(batches)
    batches.set_epoch(1)
    second = everything(batches)
    orders = [[index for batch in epoch for _, index, _ in batch] for epoch in (first, second)]
    orders.append([i for batch in Batches(data, batch_size=5, seed=1) for _, i, _ in batch])
    assert len({tuple(order) for order in orders}) == 3
    assert {cycle for batch in first for *_, cycle in batch}.isdisjoint(
        cycle for batch in second for *_, cycle in batch
    )


@given(st.integers(2, 60), st.integers(1, 5), st.integers(2, 4), st.integers(1, 30), st.booleans())
def test_processes_share_the_batches_of_one(n: int, size: int, world: int, queries: int, drop: bool) -> None:
    data = mixture(pairs(n, queries))
    try:
        one = everything(Batches(data, batch_size=size * world, drop_last=drop))
    except BadValueError:
        return
    try:
        parts = [
            everything(Batches(data, batch_size=size, rank=rank, world_size=world, drop_last=drop))
            for rank in range(world)
        ]
    except BadValueError:
        assert all(len(batch) < world for batch in one)
        return
    assert len({len(part) for part in parts}) == 1
    joined = [list(chain.from_iterable(step)) for step in zip(*parts, strict=True)]
    assert joined == [batch for batch in one if len(batch) >= world][: len(joined)]
    assert all(batch for part in parts for batch in part)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 20))
def test_no_query_twice_in_a_batch(n: int, size: int, queries: int) -> None:
    data = mixture(pairs(n, queries))
    epoch = everything(Batches(data, batch_size=size))
    for batch in epoch:
        names = [index % queries for _, index, _ in batch]
        assert len(set(names)) == len(names)
    assert sorted(index for batch in epoch for _, index, _ in batch) == list(range(n))


def test_skipping_gives_the_rest() -> None:
    rows = pairs(30, 9)
    read = []

    class Watched(list[TrainingRow]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    data = Mixture([Dataset(Watched(rows), DataConfig(source="x"))])
    batches = Batches(data, batch_size=4)
    batches.set_epoch(2)
    whole = everything(batches)
    batches.skip(3)
    read.clear()
    assert everything(batches) == whole[3:]
    assert read == []
    assert everything(batches) == whole


def test_mixtures_see_every_dataset_once() -> None:
    data = mixture(pairs(64), pairs(17), pairs(5))
    batches = Batches(data, batch_size=4)
    epoch = everything(batches)
    assert all(len({number for number, _, _ in batch}) == 1 for batch in epoch)
    counts = Counter(number for batch in epoch for number, _, _ in batch)
    assert counts == {0: 64, 1: 17, 2: 5}
    order = [batch[0][0] for batch in epoch]
    assert order != sorted(order)
    batches.set_epoch(1)
    assert len(everything(batches)) == len(batches)


def test_weights_are_shares_of_the_batches() -> None:
    parts = [Dataset(pairs(n), DataConfig(source="x", weight=w)) for n, w in ((400, 1), (10, 3))]
    data = Mixture(parts)
    batches = Batches(data, batch_size=2)
    epoch = everything(batches)
    assert len(epoch) == len(batches) == 205
    share = sum(batch[0][0] == 1 for batch in epoch) / len(epoch)
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 205) ** 0.5  # 4 standard deviations
    assert len({index for batch in epoch if not batch[0][0] for _, index, _ in batch}) > 10
    small = [(index, cycle) for batch in epoch if batch[0][0] for _, index, cycle in batch]
    assert len(set(small)) == len(small)  # drawn anew in each round
    for rank in range(2):
        part = everything(Batches(data, batch_size=1, rank=rank, world_size=2))
        assert part == [batch[rank : rank + 1] for batch in epoch]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(5, 40))
def test_batches_of_tokens(sizes: list[int], budget: int) -> None:
    data = mixture(pairs(len(sizes)))
    data.datasets[0].sizes = np.asarray(sizes, np.int64)
    epoch = everything(Batches(data, tokens_per_batch=budget))
    assert sorted(index for batch in epoch for _, index, _ in batch) == list(range(len(sizes)))
    totals = [sum(sizes[index] for _, index, _ in batch) for batch in epoch]
    assert all(total <= budget or len(batch) == 1 for total, batch in zip(totals, epoch, strict=True))
    firsts = [sizes[batch[0][1]] for batch in epoch[1:]]
    assert all(total + first > budget for total, first in zip(totals, firsts, strict=False))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expected one of them"),
        ({"batch_size": 2, "tokens_per_batch": 2}, "expected one of them"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"tokens_per_batch": 9}, "call measure first"),
        ({"batch_size": 4, "drop_last": True}, "part 0 has 3 examples, too few"),
        ({"batch_size": 1, "world_size": 4}, "part 0 has 3 examples, too few"),
    ],
)
def test_impossible_batches(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        Batches(mixture(pairs(3)), **keys)


def test_impossible_mixtures() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Mixture([])
    weighted = Dataset(pairs(2), DataConfig(source="x", weight=1))
    with pytest.raises(ConfigError, match="give all a weight"):
        Mixture([weighted, Dataset(pairs(2), DataConfig(source="y"))])


# streams


def stream(n: int, block: int = 4, once: bool = False) -> Stream[TrainingRow]:
    return Stream("numbers", lambda: iter(pairs(n)), once, block)


def test_streams_are_endless_and_shuffled_in_blocks() -> None:
    data = Mixture([Dataset(stream(10), DataConfig(source="x"))])
    batches = Batches(data, batch_size=3)
    epoch = list(islice(batches, 8))
    positions = [index for batch in epoch for _, index, _ in batch]
    for start in range(0, 24, 4):
        assert sorted(positions[start : start + 4]) == list(range(start, start + 4))
    assert positions != sorted(positions)
    texts = [data[key].documents for batch in epoch for key in batch]
    assert texts == [(f"text {position % 10}",) for position in positions]
    with pytest.raises(TypeError, match="max_steps"):
        len(batches)
    with pytest.raises(TypeError, match="max_steps"):
        len(data)


def test_streams_resume_at_a_position() -> None:
    whole = Batches(Mixture([Dataset(stream(50), DataConfig(source="x"))]), batch_size=3)
    expected = list(islice(whole, 12))
    fresh = Mixture([Dataset(stream(50), DataConfig(source="x"))])
    batches = Batches(fresh, batch_size=3)
    batches.skip(7)
    rest = list(islice(batches, 5))
    assert rest == expected[7:]
    assert fresh[rest[0][0]].documents == (f"text {rest[0][0][1]}",)
    assert fresh[0, 0, 0].documents == ("text 0",)  # far back: from the start again


def test_a_forked_process_reads_a_stream_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))

    def lines() -> Iterator[str]:
        with path.open() as stream:
            yield from map(str.strip, stream)

    read = Stream("lines", lines, block=10)
    assert read[5] == "line 5"  # the file is open, and has been read into a buffer

    def is_whole() -> bool:
        return all(read[number] == f"line {number}" for number in range(6, 15_000))

    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(not is_whole())
        finally:
            os._exit(code)
    assert is_whole()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_blank_line_before_the_header_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("\nquery\tpos\tneg\nq1\td1\td2\n")
    data = open_data([DataConfig(source=str(tmp_path / "rows.tsv"))], 0)
    assert len(data) == 1
    assert data[0, 0, 0].query == "q1"


@pytest.mark.parametrize("wrong", [{"q": ["d"]}, {"q": ["d1"]}, {"q": 5}, {"q": {"d": "1"}}, []])
def test_judgments_in_json_that_are_none(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "qrels.json").write_text(json.dumps(wrong))
    (tmp_path / "rows.jsonl").write_text('{"query": "q", "document": "d"}\n')
    config = DataConfig(source=str(tmp_path / "rows.jsonl"), qrels=str(tmp_path / "qrels.json"))
    with pytest.raises(IrkitError, match=r"qrels\.json"):
        open_data([config], 0)


def test_streams_that_end() -> None:
    read: Iterator[TrainingRow] = iter(pairs(5))
    data = Mixture([Dataset(Stream("a pipe", lambda: read, True, 4), DataConfig(source="x"))])
    assert data[0, 4, 0].query == "query 4"
    with pytest.raises(StorageError, match="a pipe: it ended after 5 examples and cannot be read again"):
        data[0, 5, 0]
    with pytest.raises(StorageError, match="ended after 0 examples"):
        Stream("empty", lambda: iter(()))[0]


def test_folders_are_streamed_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "train.tsv").write_text("q1\td1\t1\nq2\td2\t1\n")
    for name, prefix in (("queries", "q"), ("corpus", "d")):
        lines = [json.dumps({"_id": f"{prefix}{i}", "text": f"{name} {i}"}) for i in (1, 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = open_data([DataConfig(source=str(tmp_path), streaming=True)])
    assert [data[0, i, 0].query for i in range(5)] == [f"queries {1 + i % 2}" for i in range(5)]


def test_streamed_files_have_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_examples(path, pairs(6))
    streamed, indexed = (
        open_data([DataConfig(source=str(path), streaming=streaming, limit=5)]) for streaming in (True, False)
    )
    assert [streamed[0, i, 0] for i in range(8)] == [indexed[0, i % 5, 0] for i in range(8)]
    assert check(streamed) == {"datasets": 1, "examples": 0, "documents": 1}
    with pytest.raises(ConfigError, match="give each dataset a weight"):
        Mixture(streamed.datasets + indexed.datasets)
    with pytest.raises(BadValueError, match="not streamed"):
        Batches(streamed, tokens_per_batch=100)


@pytest.mark.parametrize("name", ["x.jsonl", "run.trec"])
def test_a_sample_is_drawn_from_all_and_always_the_same(tmp_path: Path, name: str) -> None:
    path, keys = tmp_path / name, {"source": str(tmp_path / name)}
    if name == "x.jsonl":
        write_examples(path, pairs(200, queries=50))
    else:
        path.write_text("".join(f"q{i} Q0 d{i} 1 {i} x\n" for i in range(200)))
        for key, prefix in (("corpus", "d"), ("queries", "q")):
            lines = [json.dumps({"_id": f"{prefix}{i}", "text": f"text {i}"}) for i in range(200)]
            (tmp_path / f"{key}.jsonl").write_text("\n".join(lines))
            keys[key] = str(tmp_path / f"{key}.jsonl")
    streamed, indexed = (
        open_data([DataConfig(streaming=streaming, sample=40, **keys)], seed=streaming)
        for streaming in (True, False)
    )
    examples = [indexed[0, i, 0] for i in range(40)]
    assert len(indexed) == 40 == check(indexed)["examples"]
    assert [streamed[0, i, 0] for i in range(80)] == 2 * examples
    numbers = [int(example.documents[0].split()[1]) for example in examples]
    assert numbers == sorted(set(numbers))
    assert 60 < np.mean(numbers) < 140  # the mean of 40 drawn is within 40 of 99.5, 4 deviations
    assert max(numbers) > 150
    data = indexed.datasets[0]
    every = open_data([DataConfig(**keys)]).datasets[0]
    expected = every.query_keys()
    assert expected is not None
    assert data.query_keys().tolist() == expected[numbers].tolist()  # type: ignore[union-attr]
    assert len(open_data([DataConfig(sample=300, **keys)])) == 200
    assert [row.query_id for row in read_training_rows(DataConfig(sample=40, **keys))] == [
        every.rows[number].query_id for number in numbers
    ]


def test_a_sample_of_a_pipe_or_with_a_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        DataConfig(source="x", limit=3, sample=3)
    with pytest.raises(ConfigError, match=r"-: sample: what can be read only once"):
        open_data([DataConfig(source="-", streaming=True, sample=3)])


@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_weighted_training_goes_on_as_if_nothing_had_happened(
    tiny_bert: Path, tmp_path: Path, streaming: bool
) -> None:
    configs = []
    for name, n in (("a", 12), ("b", 5)):
        lists = [
            TrainingRow("", f"query {i}", (), (f"text {i}", "search index"), (1.0, 0.0)) for i in range(n)
        ]
        write_examples(tmp_path / name, lists)
        configs.append(DataConfig(source=str(tmp_path / name), streaming=streaming, weight=n % 7))
    values = {"per_device_train_batch_size": 3, "max_steps": 8, "save_steps": 3, "use_cpu": True}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    def train(folder: str, resume: bool = False, callbacks: Any = ()) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8})
        arguments = TrainingArguments.parse(values, tmp_path / folder)
        trainer = Trainer(model, arguments, open_data(configs), [KLDivergence()], callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return model.state_dict()

    whole = train("whole")
    train("parts", callbacks=[Stop()])
    resumed = train("parts", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# the collator


@pytest.fixture(scope="module")
def model(tiny_bert: Path) -> Model:
    return Model.multi_vector(tiny_bert, {"depth": 1, "dim": 8})


def test_batches_have_every_document_once(model: Model) -> None:
    examples = [
        Example("one", ("a", "b"), (2.0, 1.0), 1, ("1", "2"), frozenset({"1", "3"})),
        Example("two", ("c", "a", "d"), (0.5, 0.25, 0.0), 2, ("3", "1", "4"), frozenset({"3", "1"})),
        Example("one", ("d",), (1.0,), 1, ("4",), frozenset({"4"})),
    ]
    batch = Collator(model, texts=True)(examples)
    assert isinstance(batch, Batch)
    assert batch.texts == (["one", "two", "one"], ["a", "b", "c", "d"])
    assert batch.own.tolist() == [[0, 1, -1], [2, 0, 3], [3, -1, -1]]
    assert batch.positives.tolist() == [1, 2, 1]
    same = [True, False, True, True]  # the first and the last are one query
    assert batch.relevant.tolist() == [same, [True, False, True, False], same]
    assert batch.targets is not None
    nan = float("nan")
    expected = torch.tensor([[2.0, 1.0, nan], [0.5, 0.25, 0.0], [1.0, nan, nan]])
    torch.testing.assert_close(batch.targets, expected, rtol=0, atol=0, equal_nan=True)
    for texts, tokens, side in (
        (batch.texts[0], batch.queries, "query"),
        (batch.texts[1], batch.documents, "document"),
    ):
        alone = [model.pipeline(side).tokenize([text])[0].tolist() for text in texts]
        assert [tokens[i].tolist() for i in range(len(tokens))] == alone


def test_documents_of_one_text_are_one(model: Model) -> None:
    examples = [
        Example("one", ("a", "b"), ids=("1", "2"), relevant=frozenset({"1"})),
        Example("two", ("b", "a"), ids=("3", "4"), relevant=frozenset({"3", "2"})),
    ]
    batch = Collator(model)(examples)
    assert batch.own.tolist() == [[0, 1], [1, 0]]
    assert batch.relevant.tolist() == [[True, False], [False, True]]
    assert batch.targets is None
    other = Collator(model)(examples[1:])
    assert other.keys.tolist() == batch.keys.flip(0).tolist()  # of the texts, wherever they are


def test_batches_that_cannot_be(model: Model) -> None:
    examples = [Example("one", ("a",), (1.0,)), Example("two", ("b",))]
    with pytest.raises(BadValueError, match="1 of 2 examples have scores"):
        Collator(model)(examples)
    with pytest.raises(BadValueError, match="0 of 0"):
        Collator(model)([])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_torch(tmp_path: Path, model: Model, workers: int) -> None:
    path, corpus = tmp_path / "x.jsonl", tmp_path / "corpus.tsv"
    corpus.write_text("".join(f"d{i}\ttext {i}\n" for i in range(40)))
    write_examples(path, [TrainingRow("", f"query {i}", (f"d{i}", f"d{i + 20}")) for i in range(20)])
    data = open_data([DataConfig(source=str(path), corpus=str(corpus), documents=2)])
    batches = Batches(data, batch_size=6)
    loader = DataLoader(
        data, batch_sampler=batches, collate_fn=Collator(model, texts=True), num_workers=workers
    )
    texts = [batch.texts for batch in loader]
    assert [len(queries) for queries, _ in texts] == [6, 6, 6, 2]
    for queries, documents in texts:
        numbers = [int(query.split()[1]) for query in queries]
        assert documents == [f"text {n + m}" for n in numbers for m in (0, 20)]


# checks


def test_what_is_wrong_is_found_before_training(tmp_path: Path) -> None:
    path, corpus = tmp_path / "x.jsonl", tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"_id": "d0", "text": "zero"}) + "\n")
    write_examples(path, [TrainingRow("", "a query", ("d0", f"d{i}")) for i in range(4)])
    bare = open_data([DataConfig(source=str(path))])
    with pytest.raises(BadValueError, match=r"no text of 4 of 4 ids .* 'd0'; give corpus: where"):
        check(bare)
    with pytest.raises(BadValueError, match=r"no text of 3 of 4 ids .* 'd1'; not in corpus: .*corpus\.jsonl"):
        check(open_data([DataConfig(source=str(path), corpus=str(corpus))]))
    unscored = mixture(pairs(3))
    assert check(unscored, {"positives"}) == {"datasets": 1, "examples": 3, "documents": 1}
    with pytest.raises(BadValueError, match="a loss needs the scores of a teacher"):
        check(unscored, {"targets"})
    lists = [TrainingRow("", "q", (), ("a", "b"), (1.0, 0.0), 0)]
    assert check(mixture(lists), {"targets"})["documents"] == 2
    with pytest.raises(BadValueError, match="a loss is for examples with the scores of a teacher, and none"):
        check(unscored, {"some_targets"})
    with pytest.raises(BadValueError, match="scores: false keeps them out"):
        check(mixture(lists, scores=False), {"targets"})
    with pytest.raises(BadValueError, match="no example has a document that is known to be relevant"):
        check(mixture(lists), {"positives"})
    with pytest.raises(ConfigError, match="sampling: top needs scores"):
        check(mixture(pairs(3), documents=1, sampling="top"))
    with pytest.raises(BadValueError, match="1 of 2 examples looked at have no scores"):
        check(mixture([*lists, *pairs(1)]))
    with pytest.raises(BadValueError, match=r"the texts are numbers, such as '17'"):
        check(mixture([TrainingRow("", "5", (), ("17", "18"))]))


# real data


@pytest.mark.data
def test_scifact(data_dir: Path) -> None:
    source = str(data_dir / "scifact")
    data = open_data([DataConfig(source=source, documents=1)])
    assert check(data, {"positives"}) == {"datasets": 1, "examples": 809, "documents": 1}
    corpus = {}
    for line in (data_dir / "scifact" / "corpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        corpus[row["_id"]] = f"{row['title']} {row['text']}".strip()
    store = TextStore(source)
    assert len(store) == len(corpus)
    assert all(store[name] == text for name, text in corpus.items())
    judged = [line.split("\t") for line in (data_dir / "scifact/qrels/test.tsv").read_text().splitlines()[1:]]
    tests = {query for query, *_ in judged}
    rows = data.datasets[0].rows
    assert tests.isdisjoint(rows[i].query_id for i in range(len(data)))
    drawn = {(i, data[0, i, cycle].ids) for i in range(len(data)) for cycle in range(30)}
    assert len(drawn) == 919  # all that are relevant come, one in each epoch


@pytest.mark.data
def test_pooled_runs_as_teachers(data_dir: Path, minilm: str) -> None:
    folder = str(data_dir / "msmarco-dl21-pool")
    runs = [f"{folder}/runs/{name}.trec" for name in ("BM25", "SPLADE_P_P_ENSEMBLE_DISTIL")]
    data = open_data(
        [DataConfig(source=run, corpus=folder, split="train", relevant_grade=2, documents=8) for run in runs]
    )
    assert check(data, {"targets", "positives"}) == {"datasets": 2, "examples": 106, "documents": 8}
    model = Model.from_pretrained(minilm)
    data.measure(model)
    batches = Batches(data, tokens_per_batch=4000)
    totals = []
    for batch in DataLoader(data, batch_sampler=batches, collate_fn=Collator(model)):
        assert batch.targets.isfinite().all()
        known = batch.relevant.gather(1, batch.own).sum(1)
        assert (known >= batch.positives).all()  # more where a passage is there under two ids
        totals.append(int(batch.queries.lengths.sum() + batch.documents.lengths.sum()))
    assert len(totals) == len(batches)
    assert max(totals) < 5000  # an estimate, from the bytes of lines
    assert sorted(totals)[len(totals) // 2] > 3000
