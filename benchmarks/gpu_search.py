"""Indexes on a GPU: token vectors beside fast-plaid, and dense vectors beside a plain product of torch."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_collections import CHUNK, Sizes, exact_scores, make_texts, make_vectors
from benchmarks.gpu_timing import Device, ends_all, find_device, in_words
from benchmarks.harness import Row
from irkit import Dense, MultiVector, Ragged
from irkit.index import Index, Store, create_index, open_index

__all__ = ["LARGE", "TINY", "Sizes", "measure_search"]

K = 10  # hits
ROUNDS, SECONDS = 3, 1.0  # the most rounds of a block, and seconds after which none follows
WARM_UP = 10  # queries that are searched one by one before time is taken
LEAST = 0.7  # recall of approximate searches that are timed
TIES = 1e-5  # relative difference of scores that are the same
WARM = 2000  # documents of an index that is built before time is taken
VECTORS = 50_000  # vectors that are added at once
SPACE = 12 << 30  # bytes of all index files, so many in memory
PEER = "fast-plaid"
RATES = ("documents/s", "tokens/s", "queries/s", "queries/s one by one")

Array = np.ndarray[Any, Any]
Search = Callable[[Any], Array]  # from queries in a form of their own to documents (n, 10)
Made = tuple[Row, Callable[[slice], Any], Search]  # columns of the build, queries by number, the search


LARGE = Sizes(100_000, 1000, 200, 1_000_000, 200_000, 256, 100)
TINY = Sizes(300, 20, 10, 3000, 2500, 20, 3)


def measure_search(device: Device | None = None, sizes: Sizes | None = None) -> Iterator[Row]:
    """Yield documents per second of builds, queries per second in one block and one by one, and recall."""
    device = device or find_device()
    sizes = sizes or (LARGE if device.name == "cuda" else TINY)
    places = ["gpu", "cpu"] if device.name == "cuda" else ["cpu"]
    with tempfile.TemporaryDirectory(dir=_memory()) as name:
        folder = Path(name)
        tokens = _guarded("token vectors", _token_rows(device, places, sizes, folder))
        vectors = _guarded("dense vectors", _dense_rows(device, places, sizes, folder))
        # what tells most comes first, and the CPU last
        yield from islice(tokens, 1)
        yield from islice(vectors, 3)
        yield from islice(tokens, 2)
        yield from vectors
        yield from tokens


# ---- token vectors ----


def _token_rows(device: Device, places: list[str], sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Yield rows of irkit on the first place, of the peer, of their ratios, and of irkit on other places."""
    texts = make_texts(device, sizes)
    scores = exact_scores(texts, sizes.exact)
    values, lengths = texts.values.cpu(), texts.lengths
    texts = texts._replace(values=values)
    _say(f"{len(values)} token vectors made")
    labels: Row = {"what": f"{len(values):,} token vectors", "documents": len(lengths)}

    def built(count: int, build: Callable[[], Any]) -> Row:
        seconds = _seconds(build)
        return {"documents/s": count / seconds, "tokens/s": len(values) / seconds}

    def irkit(place: str) -> Made:
        path = folder / "plaid"
        columns: Row = dict.fromkeys(RATES[:2])
        if not path.exists():
            documents = Ragged(values, lengths)
            config = {"kind": "plaid", "device": place}
            _build(folder / "plaid-warm", config, [MultiVector(documents[:WARM])])  # compiles kernels
            parts = (MultiVector(documents[at : at + CHUNK]) for at in range(0, len(lengths), CHUNK))
            columns |= built(len(lengths), lambda: _build(path, config, parts))
            _say(f"plaid built in {len(lengths) / columns['documents/s']:.1f} s")

        def queries(part: slice) -> MultiVector:
            some = texts.queries[part]
            return MultiVector(Ragged(some.flatten(0, 1), torch.full((len(some),), some.shape[1])))

        index = _open(path, place)
        return columns, queries, lambda asked: index.search(asked, K).rows

    def fast_plaid() -> Made:
        plaid = import_module("fast_plaid.search").FastPlaid

        threads = torch.get_num_threads()
        documents = list(torch.split(values, lengths.tolist()))
        warm, index = (plaid(str(folder / name), device=device.name) for name in ("peer-warm", "peer"))
        warm.create(documents_embeddings=documents[:WARM])
        warm.search(texts.queries[:1], top_k=K, show_progress=False)
        columns = built(len(lengths), lambda: index.create(documents_embeddings=documents))
        _say(f"{PEER} built in {len(lengths) / columns['documents/s']:.1f} s")
        torch.set_num_threads(threads)  # for those that come later

        def search(asked: Tensor) -> Array:
            rows = np.full((len(asked), K), -1)
            for number, hits in enumerate(index.search(asked, top_k=K, show_progress=False)):
                rows[number, : len(hits)] = [row for row, _ in hits]
            return rows

        return columns, lambda part: texts.queries[part], search

    asked = len(texts.queries), sizes.singles
    ours = measured(labels, f"irkit plaid, {places[0]}", partial(irkit, places[0]), asked, scores)
    yield ours
    theirs = measured(labels, PEER, fast_plaid, asked, scores)
    yield theirs
    yield from over(ours, theirs)
    for place in places[1:]:
        yield measured(labels, f"irkit plaid, {place}", partial(irkit, place), asked, scores)


# ---- dense vectors ----


def _dense_rows(device: Device, places: list[str], sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Yield rows of torch, of ``flat`` and of their ratios, of ``dense``, and of ``flat`` on other places."""
    there, queries = make_vectors(device, sizes)
    scores, values = queries.to(device.name) @ there.T, there.cpu()
    _say(f"{len(values)} dense vectors made")

    def irkit(kind: str, count: int, place: str) -> Made:
        path = folder / kind
        columns: Row = {"documents/s": None}
        if not path.exists():
            config = {"kind": kind}
            _build(folder / f"{kind}-warm", config, [Dense(values[: 2 * WARM])])
            parts = (Dense(values[at : min(count, at + VECTORS)]) for at in range(0, count, VECTORS))
            columns["documents/s"] = count / _seconds(lambda: _build(path, config, parts))
            _say(f"{kind} built in {count / columns['documents/s']:.1f} s")
        index = _open(path, place)
        return columns, lambda part: Dense(queries[part]), lambda asked: index.search(asked, K).rows

    def product() -> Made:
        def search(asked: Tensor) -> Array:
            return (asked.to(device.name) @ there.T).topk(K, dim=1).indices.cpu().numpy()

        return {"documents/s": None}, lambda part: queries[part], search

    def row(kind: str, count: int, place: str, least: float) -> Row:
        labels: Row = {"what": f"{count:,} dense vectors", "documents": count}
        name, make = f"irkit {kind}, {place}", lambda: irkit(kind, count, place)
        return measured(labels, name, make, asked, scores[:, :count], least)

    asked, n = (len(queries), sizes.singles), len(values)
    labels: Row = {"what": f"{n:,} dense vectors", "documents": n}
    theirs = measured(labels, "torch", product, asked, scores, 1.0)
    yield theirs
    ours = row("flat", n, places[0], 1.0)
    yield ours
    yield from over(ours, theirs)
    for place in places:
        yield row("dense", sizes.coded, place, LEAST)
    for place in places[1:]:
        yield row("flat", n, place, 1.0)


# ---- what is measured of a contender ----


def measured(
    labels: Row,
    contender: str,
    make: Callable[[], Made],
    asked: tuple[int, int],
    scores: Tensor,
    least: float = LEAST,
) -> Row:
    """Build, search and compare with exact scores; time what is right.

    Args:
        labels: First columns of the row.
        contender: Its name.
        make: Builds and opens.
        asked: Queries in a block, and one by one.
        scores: ``(m, n)`` exact scores of the first queries and all documents.
        least: Smallest recall that is right.
    """
    row: Row = {"what": labels["what"], "contender": contender}
    _say(f"{row['what']}: {contender}")
    try:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # others see only what is free
        columns, queries, search = make()
        block, singles = queries(slice(asked[0])), [queries(slice(at, at + 1)) for at in range(asked[1])]
        recall = recall_of(search(block), scores)
        if not recall >= least:
            return {**row, "error": f"recall@{K} is {recall:.3f}; not timed"}
        gc.collect()
        rounds = list[float]()
        while len(rounds) < ROUNDS and sum(rounds) < SECONDS:
            rounds.append(_seconds(lambda: search(block)))
        for single in singles[:WARM_UP]:
            search(single)
        alone = list[float]()
        while len(alone) < len(singles) and sum(alone) < 2 * SECONDS:
            alone.append(_seconds(lambda: search(singles[len(alone)])))
    except ModuleNotFoundError as error:
        return {**row, "skipped": f"needs {error.name}"}
    except BaseException as error:  # a panic of Rust is no Exception
        if ends_all(error) or isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        traceback.print_exc()
        return {**row, "error": in_words(error)}
    rates = {RATES[2]: asked[0] / median(rounds), RATES[3]: 1 / median(alone)}
    return {**row, "documents": labels["documents"], **columns, **rates, f"recall@{K}": recall}


def recall_of(rows: Array, scores: Tensor) -> float:
    """Return the share of the best documents that are in ``rows (n, 10)``; equal scores are equally good.

    Args:
        rows: Different documents of each query; -1 is none.
        scores: ``(m, n)`` exact scores of the first ``m`` queries, m <= n.
    """
    found = torch.from_numpy(np.sort(rows[: len(scores)], axis=1)).to(scores.device)
    good = found >= 0
    good[:, 1:] &= found[:, 1:] != found[:, :-1]
    tenth = scores.topk(K, dim=1).values[:, -1:]
    good &= scores.gather(1, found.clamp(min=0)) >= tenth - TIES * tenth.abs()
    return float(good.double().mean())


def over(ours: Row, theirs: Row) -> Iterator[Row]:
    """Yield how many times as many a second one row has as another, if both were measured."""
    if f"recall@{K}" in ours and f"recall@{K}" in theirs:
        row = {**dict.fromkeys(ours), "what": ours["what"]}
        row |= {name: ours[name] / theirs[name] for name in RATES if ours.get(name) and theirs.get(name)}
        yield {**row, "contender": f"{ours['contender']}: x {theirs['contender']}"}


def _guarded(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows, and the error that ends them."""
    try:
        yield from rows
    except Exception as error:
        if ends_all(error) or isinstance(error, ModuleNotFoundError):
            raise
        traceback.print_exc()
        yield {"what": what, "error": in_words(error)}


def _build(folder: Path, config: Mapping[str, Any], parts: Iterable[MultiVector | Dense]) -> None:
    with Store.build(folder) as store:
        index = create_index(store, dict(config))
        for part in parts:
            index.add(part)
        index.finish()
        store.publish()


def _open(folder: Path, place: str) -> Index:
    index = open_index(Store.open(folder))
    index.config = index.config.model_copy(update={"device": place})
    return index


def _seconds(run: Callable[[], Any]) -> float:
    """Return the time from the call to the result in memory of the CPU."""
    _wait()
    begin = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory() -> str | None:
    """Return a folder in memory for files, if there is one large enough."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free > SPACE else None


def _say(text: str) -> None:
    print(f"search: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
