"""Shards searched by actors of Ray give what one process gives, also after actors were killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from irkit import Retriever
from irkit.encoder_free import RM3
from irkit.errors import BadValueError, StorageError
from irkit.ray_engine import PartialResultWarning, ShardedRetriever
from irkit.ray_engine.ray_start import parse_engine

WORDS = [f"word{number}" for number in range(40)]


def make(count: int, prefix: str, numbers: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "_id": f"{prefix}{number}",
            "text": " ".join(numbers.choices(WORDS, k=numbers.randint(1, 12))),
            "metadata": {"year": 2000 + number % 3},
        }
        for number in range(count)
    ]


def test_what_is_no_engine_and_not_in_shards_is_refused(tmp_path: Path) -> None:
    assert parse_engine("ray") is None
    assert parse_engine("ray://host:10001") == "ray://host:10001"
    for wrong in ("spark", "ray://", "", None):
        with pytest.raises(BadValueError, match="expected ray"):
            parse_engine(wrong)  # type: ignore[arg-type]
    Retriever.build("bm25", ["one text"], tmp_path / "one")
    with pytest.raises(StorageError, match="reshard"):
        ShardedRetriever.load(tmp_path / "one")
    for options in ({"replicas": 0}, {"timeout": 0}, {"timeout": float("nan")}):
        with pytest.raises(BadValueError):
            ShardedRetriever.load(tmp_path / "one", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, on this machine only."""
    pytest.importorskip("ray", reason="needs: pip install 'irkit[ray]'")
    from irkit.ray_engine.ray_start import start_ray

    started = start_ray()
    yield started
    started.shutdown()


def pids(ray: Any, retriever: ShardedRetriever) -> list[int]:
    """Processes of the first actor of each shard."""
    return [
        ray.get(actors[0].__ray_call__.remote(lambda self: os.getpid())) for actors in retriever.index.actors
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_actors_find_what_one_process_finds(ray: Any, tmp_path: Path) -> None:
    numbers = random.Random(0)
    documents = make(200, "d", numbers)
    one = Retriever.build("bm25", documents, tmp_path / "one")
    Retriever.build("bm25", documents, tmp_path / "many", shards=2).close()
    queries = [" ".join(numbers.choices(WORDS, k=3)) for _ in range(20)]
    with ShardedRetriever.load(tmp_path / "many", timeout=120) as many:

        def check() -> None:
            assert many.search(queries) == one.search(queries)
            assert many.missing == ()

        check()
        assert many.search(queries, 5, {"year": 2001}) == one.search(queries, 5, {"year": 2001})
        assert many.search(queries, feedback=RM3(3, 5)) == one.search(queries, feedback=RM3(3, 5))
        # changes are seen by the next search
        for retriever in (one, many):
            retriever.add(make(9, "n", random.Random(1)))
            retriever.remove(["d3", "d4"])
        check()
        # a killed actor comes again
        os.kill(pids(ray, many)[0], signal.SIGKILL)
        check()
        # served
        from irkit.serve.catalogue import Catalogue
        from irkit.serve.serve_config import ServeConfig

        catalogue = Catalogue(ServeConfig(paths=(str(tmp_path / "many"),), engine="ray"))
        served = catalogue.index("many").retriever()
        assert isinstance(served, ShardedRetriever)
        assert served.search(queries) == one.search(queries)
        served.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_dead_shard_is_an_error_or_a_marked_partial_result(ray: Any, tmp_path: Path) -> None:
    documents = make(60, "d", random.Random(2))
    Retriever.build("bm25", documents, tmp_path / "many", shards=2).close()
    with ShardedRetriever.load(tmp_path / "many", timeout=5, partial_results=True) as many:
        whole = many.search("word1 word2 word3", 60)
        ray.kill(many.index.actors[0][0])  # for good
        with pytest.warns(PartialResultWarning, match="shard-1-000"):
            some = many.search("word1 word2 word3", 60)
        assert many.missing == ("shard-1-000",)
        assert 0 < len(some) < len(whole)
        assert [hit for hit in whole if hit in some] == some
        with many.watch(False), pytest.raises(StorageError, match="no answer of shard-1-000"):
            many.search("word1 word2 word3")
        with many.watch(True) as answers:
            assert many.search("word1 word2 word3", 60) == some  # without a warning
        assert (answers.asked, answers.missing) == (2, {"shard-1-000"})
        assert answers.repeated > 0
