"""What is particular to FAISS: structure and tail, filters, growth, configuration."""

# ruff: noqa: PT012 (an update is a block)
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from irkit_kernels.dense_scan import best_of

from irkit import Dense, score
from irkit.config import Config
from irkit.errors import ConfigError, CorruptError, MissingDependencyError, StorageError
from irkit.index import FaissConfig, FlatConfig, Index, Limits, Store, create_index, index_config, open_index
from irkit.index.faiss_package import import_faiss, need_gpu
from irkit.index.flat_dense import CODES

DIM, N = 16, 3000


@pytest.fixture(autouse=True)
def _small(small_limits: Callable[..., None]) -> None:
    small_limits(faiss_scan_per_hit=1)


@pytest.fixture(scope="module")
def data() -> Dense:
    rng = np.random.default_rng(0)
    points = rng.standard_normal((40, DIM))[rng.integers(0, 40, N)] + 0.4 * rng.standard_normal((N, DIM))
    return Dense(torch.nn.functional.normalize(torch.tensor(points, dtype=torch.float32)))


def build(path: Path, config: Any, data: Dense) -> Index:
    with Store.build(path, overwrite=True) as store:
        index = create_index(store, config)
        index.add(data)
        index.finish()
        store.publish()
    return open_index(Store.open(path))


def recall(index: Index, queries: Dense, data: Dense, allowed: np.ndarray | None = None) -> float:
    keep = index.live if allowed is None else index.live & allowed
    truth = np.where(keep, score(queries, data).numpy(), -np.inf)
    best = np.argsort(-truth, axis=1, kind="stable")[:, :10]
    hits = index.search(queries, 10, allowed)
    assert keep[hits.rows].all()
    # one rounding step apart, as FAISS sums in another order
    np.testing.assert_allclose(
        hits.scores, np.take_along_axis(truth, hits.rows, 1), rtol=0, atol=DIM * 2**-24
    )
    return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hits.rows, best, strict=True)]))


def test_finish_tells_its_stages(tmp_path: Path, data: Dense) -> None:
    told: list[tuple[str, int, int | None]] = []
    with Store.build(tmp_path) as store:
        index = create_index(store, "ivf")
        index.add(data)
        index.finish(lambda *given: told.append(given))
        assert told[:2] == [("training", 0, None), ("adding", 0, N)]
        assert {stage for stage, _, _ in told[2:]} == {"adding"}
        assert sum(count for _, count, _ in told[2:]) == N
        assert len(told) > 3


def test_structure_without_growth_is_built_anew(
    tmp_path: Path, data: Dense, small_limits: Callable[..., None]
) -> None:
    small_limits(faiss_scan=50, faiss_scan_per_hit=1)
    build(tmp_path, "NSG16", data[:500])
    with Store.open(tmp_path) as store, store.update():
        index = open_index(store)
        index.add(data[500:1000])
        index.finish()
    index = open_index(Store.open(tmp_path))
    assert index.stats()["covered"] == 1000


FACTORIES = [
    "hnsw",
    "ivf",
    "pq",
    "ivfpqfs",
    "IVF32,RaBitQ",
    "SQ8",
    "PCA8,IVF16,SQfp16",
    "PQ8np",
    "NSG16",
    "Flat",
]


@pytest.mark.sampled
@pytest.mark.parametrize("factory", FACTORIES)
def test_structure_tail_filters_and_removal(tmp_path: Path, data: Dense, factory: str) -> None:
    queries = data[::100]
    index = build(tmp_path / "index", {"kind": "faiss", "factory": factory}, data[:2900])
    assert index.stats()["covered"] == 2900
    floor = 0.5 if factory in ("PCA8,IVF16,SQfp16", "NSG16") else 0.9  # too coarse for these data
    rng = np.random.default_rng(1)
    assert recall(index, queries, data[:2900]) >= floor
    index.add(data[2900:])
    index.finish()
    assert index.stats()["covered"] == 2900  # a tail this short is scanned
    assert recall(index, queries[-2:], data) >= floor
    assert (index.search(queries, 1).rows[:, 0] == np.arange(0, N, 100)).mean() >= floor
    assert recall(index, queries, data, rng.random(N) < 0.8) >= floor
    assert recall(index, queries, data, rng.random(N) < 0.3) >= (0.95 if factory == "pq" else floor)
    assert recall(index, queries, data, rng.random(N) < 0.01) == 1  # so few are scanned
    index.remove(np.arange(0, N, 3))
    assert recall(index, queries, data) >= floor


@pytest.mark.sampled
@pytest.mark.parametrize("factory", FACTORIES)
def test_every_search_is_answered_in_full(tmp_path: Path, data: Dense, factory: str) -> None:
    """Where the structure finds too little, the rest is found by scanning."""
    config = {"kind": "faiss", "factory": factory, "nprobe": 1, "ef_search": 1, "refine": 1}
    index = build(tmp_path / "index", config, data)
    allowed = np.random.default_rng(2).random(N) < 0.9
    for k in (1, 50, 500, 2600, 3500):
        hits = index.search(data[:3], k, allowed)
        count = min(k, int(allowed.sum()))
        assert ((hits.rows >= 0).sum(1) == count).all()
        assert allowed[hits.rows[:, :count]].all()
        assert all(len(set(row)) == count for row in hits.rows[:, :count].tolist())


def test_few_documents_need_no_structure(tmp_path: Path, data: Dense) -> None:
    for factory in ("hnsw", "IVF4096,Flat", "PQ8x12np"):
        for n in (1, 2, 40):
            index = build(tmp_path / "index", factory, data[:n])
            assert (index.stats()["covered"], recall_of_all(index, data[:n])) == (0, 1)
    # enough to look things up, too few to train so many centroids
    index = build(tmp_path / "index", "IVF4096,Flat", data)
    assert (index.stats()["covered"], recall(index, data[:20], data)) == (0, 1)


def recall_of_all(index: Index, data: Dense) -> float:
    rows = index.search(data, len(data)).rows
    return float(np.mean([set(row) == set(range(len(data))) for row in rows.tolist()]))


def test_growth_extends_or_trains_again(
    tmp_path: Path, data: Dense, small_limits: Callable[..., None]
) -> None:
    small_limits(faiss_scan=50, faiss_scan_per_hit=1)
    for factory in ("IVF4,Flat", "HNSW8"):
        index = build(tmp_path / "index", factory, data[:300])
        index.add(data[300:340])
        index.finish()
        assert index.stats()["covered"] == 300
        for stop in (600, 1500, N):
            index.add(data[len(index) : stop])
            index.finish()
            assert index.stats()["covered"] == stop
            assert index.store.meta["index"]["trained"] == (
                0 if factory == "HNSW8" else 300 if stop < 1200 else 1500
            )
            assert recall(index, data[:stop:60], data[:stop]) >= 0.9


def test_search_settings_can_be_changed(tmp_path: Path, data: Dense) -> None:
    index = build(tmp_path / "index", {"kind": "faiss", "factory": "IVF32,Flat", "nprobe": 1}, data)
    narrow = recall(index, data[::50], data)
    index.config = index.config.model_copy(update={"nprobe": 32})
    assert narrow < recall(index, data[::50], data) == 1
    assert open_index(index.store).config.nprobe == 1  # this changes nothing that is stored


@pytest.mark.slow
def test_the_seed_settles_the_build(tmp_path: Path, data: Dense) -> None:
    def content(factory: str, seed: int) -> bytes:
        config = {"kind": "faiss", "factory": factory, "seed": seed, "train_size": 1500}
        return bytes(build(tmp_path / "index", config, data).store.read("faiss.index"))

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        for factory in ("hnsw", "ivf", "ivfpqfs", "IVF16_HNSW8,Flat"):
            assert content(factory, 0) == content(factory, 0)
        assert content("ivf", 0) != content("ivf", 1)
        assert faiss.omp_get_max_threads() == 2  # as it was
    finally:
        faiss.omp_set_num_threads(threads)


def test_a_wrong_factory_is_known_before_the_work(tmp_path: Path, data: Dense) -> None:
    for factory, message in (
        ("HNSWxyz", "cannot make 'HNSWxyz' for 16 dimensions"),
        ("PQ7x8", "cannot make|cannot train"),
        ("IVF16,PQ8,RFlat", "refine"),
        ("IDMap,Flat", "refine"),
    ):
        with Store.build(tmp_path / "index", overwrite=True) as store:
            index = create_index(store, factory)
            with pytest.raises(ConfigError, match=message):
                index.add(data[:1])
            assert len(index) == 0


@pytest.mark.parametrize("factory", ["HNSW8", "Flat"])  # more and less than a buffer of C's files
def test_a_failed_write_of_the_structure_leaves_the_index(
    factory: str,
    tmp_path: Path,
    data: Dense,
    monkeypatch: pytest.MonkeyPatch,
    small_limits: Callable[..., None],
) -> None:
    small_limits(faiss_scan=10, faiss_scan_per_hit=1)
    index = build(tmp_path / "index", factory, data[:20])
    index.add(data[20:40])
    before = {file.name: file.read_bytes() for file in (tmp_path / "index").iterdir()}
    full, opened = Path("/dev/full"), Path.open
    with monkeypatch.context() as context, pytest.raises(StorageError, match=r"No space left.*unchanged"):
        context.setattr(Path, "open", lambda file, mode="r": opened(full if mode == "wb" else file, mode))
        index.finish()
    assert {file.name: file.read_bytes() for file in (tmp_path / "index").iterdir()} == before
    index.finish()
    assert open_index(Store.open(tmp_path / "index")).stats()["covered"] == 40


def test_a_reader_keeps_its_structure(tmp_path: Path, data: Dense) -> None:
    index = build(tmp_path / "index", "IVF16,SQ8", data)
    hits = index.search(data[:9], 5)
    fresh = open_index(Store.open(tmp_path / "index"))  # has not read its structure yet
    build(tmp_path / "index", "HNSW8", data[:100])
    for reader in (index, fresh):
        np.testing.assert_array_equal(reader.search(data[:9], 5).rows, hits.rows)


def test_an_unreadable_structure_is_reported(tmp_path: Path, data: Dense) -> None:
    index = build(tmp_path / "index", "ivf", data)
    (file,) = (tmp_path / "index").glob("faiss.*")
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CorruptError, match="faiss"):
        Store.open(tmp_path / "index")
    with pytest.raises(CorruptError, match="rebuild"):
        open_index(Store.open(tmp_path / "index", verify=False)).search(data[:1], 1)
    assert len(index) == N


def test_many_queries_are_searched_in_blocks(
    tmp_path: Path, data: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build(tmp_path / "index", "ivf", data)
    expected, sizes = index.search(data[:50], 5), []

    def counted(values: np.ndarray, queries: np.ndarray, *arguments: Any) -> Any:
        sizes.append(len(queries))
        return best_of(values, queries, *arguments)

    monkeypatch.setattr("irkit.index.faiss.best_of", counted)
    index.store.limits = Limits(faiss_scan_per_hit=1, faiss_queries=20)
    found = index.search(data[:50], 5)
    assert sizes == [20, 20, 10]
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)


def test_finishing_goes_on_from_what_another_has_finished(tmp_path: Path, data: Dense) -> None:
    index, other = build(tmp_path / "index", "ivf", data), open_index(Store.open(tmp_path / "index"))
    index.add(data)
    other.add(data)
    other.finish()
    index.finish()
    structure, _ = index.store.derived("structure", index._open)
    assert structure.ntotal == len(index) == index.stats()["covered"] == 3 * N


def test_names_of_indexes() -> None:
    assert index_config("flat") == index_config({"kind": "flat"}) == FlatConfig()
    assert index_config("hnsw") == index_config("faiss") == FaissConfig()
    assert index_config("IVF64,Flat") == FaissConfig(factory="IVF64,Flat")
    assert index_config({"kind": "faiss", "nprobe": 3, "seed": None}) == FaissConfig(nprobe=3, seed=None)
    assert isinstance(index_config(FaissConfig()), Config)
    for wrong, message in (
        ("hsnw", "did you mean 'hnsw'"),
        ("annoy", "known: auto, flat"),
        ({"kind": "faise"}, "did you mean 'faiss'"),
        ({"factory": "hnsw"}, "missing key 'kind' in {'factory': 'hnsw'}; known: auto, flat"),
        ({"kind": "faiss", "ef": 3}, "unknown key 'ef'"),
        ({"kind": "faiss", "nprobe": 0}, "nprobe"),
        ({"kind": "flat", "nprobe": 1}, "unknown key 'nprobe'"),
        (3, "expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            index_config(wrong)  # type: ignore[arg-type]


def test_asking_for_a_gpu_that_is_not_there(tmp_path: Path, data: Dense) -> None:
    if faiss.get_num_gpus():
        pytest.skip("there is a GPU")
    message = "needs faiss-gpu in the place of .* pip uninstall -y faiss-cpu && pip install faiss-gpu"
    with pytest.raises(MissingDependencyError, match=message):
        build(tmp_path / "index", {"kind": "faiss", "factory": "ivf", "device": "gpu"}, data)
    index = build(tmp_path / "index", {"kind": "faiss", "factory": "ivf", "device": "auto"}, data)
    assert recall(index, data[::50], data) >= 0.9


def package(folder: Path, *names: str, module: str | None = "") -> None:
    """Packages of these names, and what the last one has left in the folder of the module."""
    for name in names:
        about = folder / f"{name.replace('-', '_')}-1.15.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.15.1\n")
    (folder / "faiss").mkdir()
    if module is not None:
        (folder / "faiss" / "__init__.py").write_text(module)


WHOLE = "def index_factory(): ...\ndef get_num_gpus():\n    return 0\n"
BOTH = r"pip uninstall -y faiss-cpu faiss-gpu && pip install faiss-gpu(?!-)"


@pytest.mark.parametrize(
    ("names", "module", "message"),
    [
        (
            ["faiss-cpu", "faiss-gpu"],
            "raise AttributeError('delete_GpuResourcesVector')",
            f"{BOTH}.*delete_Gpu",
        ),
        (["faiss-cpu", "faiss-gpu"], "raise RuntimeError('no CUDA runtime')", f"replace each other.*{BOTH}"),
        (["faiss-gpu"], None, "install it anew: pip uninstall -y faiss-gpu && pip install faiss-gpu"),
        (["faiss-gpu-cu12"], "", "pip uninstall -y faiss-gpu-cu12 && pip install faiss-gpu-cu12"),
        ([], "import no_such_library", "No module named 'no_such_library'.*pip install faiss-cpu"),
    ],
)
def test_a_faiss_that_is_broken_is_told_with_the_command_that_repairs_it(
    names: list[str], module: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, *names, module=module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "faiss")
    with pytest.raises(MissingDependencyError, match=message):
        import_faiss()


def test_two_packages_of_faiss_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "faiss-cpu", "faiss-gpu", module=WHOLE)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "faiss")
    with pytest.warns(UserWarning, match=BOTH):
        module = import_faiss()
    with pytest.raises(MissingDependencyError, match=f"device 'gpu': faiss-cpu and faiss-gpu .*{BOTH}"):
        need_gpu(module)


def test_faiss_for_gpus_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "faiss-gpu", module=f"{WHOLE}class StandardGpuResources: ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "faiss")
    with pytest.raises(MissingDependencyError, match="FAISS finds none; set it to 'auto' or 'cpu'"):
        need_gpu(import_faiss())


@pytest.mark.parametrize(("factory", "kind"), [("IVF16,Flat", "IndexIVFFlat"), ("IVF16,PQ8x4", "IndexIVFPQ")])
def test_what_a_gpu_does_not_find_is_searched_exactly(
    tmp_path: Path, data: Dense, factory: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build(tmp_path / "index", {"kind": "faiss", "factory": factory, "nprobe": 8}, data)
    monkeypatch.setattr(faiss, "GpuIndex", getattr(faiss, kind), raising=False)  # which tells no code size
    monkeypatch.setattr(getattr(faiss, kind), "sa_code_size", None)
    index.store.limits = Limits(faiss_scan_per_hit=1, faiss_gpu_hits=6)
    exact = np.sort(data.values[:3].numpy() @ data.values.numpy().T, axis=1)[:, ::-1]
    np.testing.assert_allclose(index.search(data[:3], 20).scores, exact[:, :20], atol=1e-5)
    assert recall(index, data[::50], data) >= 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "IVF16,PQ8", "hnsw"])
def test_on_a_gpu(tmp_path: Path, data: Dense, factory: str) -> None:
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        pytest.skip("needs faiss-gpu and a GPU")
    config = {"kind": "faiss", "factory": factory, "device": "gpu", "nprobe": 8}
    index = build(tmp_path / "index", config, data)
    assert recall(index, data[::50], data) >= 0.9
    assert recall(index, data[::50], data, np.random.default_rng(0).random(N) < 0.8) >= 0.9
    index.config = index.config.model_copy(update={"device": "cpu"})  # the same files without a GPU
    assert recall(open_index(Store.open(tmp_path / "index")), data[::50], data) >= 0.9


@pytest.mark.parametrize("value", [1e19, 3e38])
def test_vectors_that_faiss_would_end_the_process_on_are_refused(tmp_path: Path, value: float) -> None:
    with Store.build(tmp_path / "index") as store:
        index = create_index(store, {"kind": "faiss", "factory": "IVF4,Flat"})
        index.add(Dense(torch.full((2500, 4), value)))
        with pytest.raises(ConfigError, match="normalise"):
            index.finish()


@pytest.mark.parametrize("factory", ["hnsw", "ivf", "pq", "ivfpqfs"])
def test_a_lone_query_finds_what_it_finds_in_a_batch(tmp_path: Path, data: Dense, factory: str) -> None:
    index = build(tmp_path, {"kind": "faiss", "factory": factory}, data)
    queries = Dense(data.values[:20] + 0.01)
    for k in (1, 10):
        together = index.search(queries, k)
        alone = [index.search(queries[row : row + 1], k) for row in range(20)]
        np.testing.assert_array_equal(np.concatenate([hits.rows for hits in alone]), together.rows)
        scores = np.concatenate([hits.scores for hits in alone])
        np.testing.assert_allclose(scores, together.scores, rtol=0, atol=DIM * 2**-22)


def test_a_row_of_nsg_comes_once_to_a_query_alone(tmp_path: Path, data: Dense) -> None:
    index = build(tmp_path, "NSG16", data)
    for query in range(100):
        alone, beside = index.search(data[[query]], 50), index.search(data[[query, 0]], 50)
        np.testing.assert_array_equal(alone.rows[0], beside.rows[0])
        assert len(set(alone.rows[0])) == 50


@pytest.mark.parametrize("factory", ["hnsw", "NSG16"])
def test_many_hits_of_a_graph_are_those_of_flat(tmp_path: Path, data: Dense, factory: str) -> None:
    queries, rng = data[::100], np.random.default_rng(3)
    own, flat = (
        build(tmp_path / kind, {"kind": "faiss", "factory": kind}, data[:2900]) for kind in (factory, "Flat")
    )
    exact = build(tmp_path / "exact", "flat", data[:2900])
    for index in (own, exact):
        index.add(data[2900:])
        index.remove(np.arange(0, N, 7))
    for allowed in (None, rng.random(N) < 0.8, rng.random(N) < 0.02):
        for some in (queries, queries[:1]):
            assert all(map(np.array_equal, own.search(some, 100, allowed), exact.search(some, 100, allowed)))
    assert flat.store.rows("codes.bin") == 0  # no graph


def test_a_graph_without_codes_walks(tmp_path: Path, data: Dense) -> None:
    queries, index = data[::100], build(tmp_path / "old", "hnsw", data[:2900])
    found = index.search(queries, 100)
    with Store.open(tmp_path / "old") as store, store.update():
        for name in CODES:  # as in an index that was built before graphs had codes
            store.drop(f"{name}.bin")
    old = open_index(Store.open(tmp_path / "old"))
    walked = old.search(queries, 100)
    assert np.mean([len(np.intersect1d(*pair)) for pair in zip(walked.rows, found.rows, strict=True)]) >= 95
    old.add(data[2900:])
    assert old.store.rows("codes.bin") == 0  # all rows have codes, or none
    with Store.build(tmp_path / "new") as store:
        copied = create_index(store, "hnsw")
        copied.copy(old, np.arange(N))
        copied.finish()
        store.publish()
    copied, exact = open_index(Store.open(tmp_path / "new")), build(tmp_path / "exact", "flat", data)
    assert all(map(np.array_equal, copied.search(queries, 100), exact.search(queries, 100)))


def test_queries_that_codes_tell_nothing_of_walk(tmp_path: Path) -> None:
    alike = Dense(torch.ones(N, DIM) + torch.arange(N)[:, None] * 1e-7)  # codes of 8 bits are all the same
    index = build(tmp_path, "hnsw", alike)
    rows, scores = index.search(alike[:2], 100)
    assert rows.shape == (2, 100)
    assert (scores > 15.9).all()


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("cut", [1, None])
def test_codes_of_a_graph_that_do_not_fit_are_refused(
    tmp_path: Path, data: Dense, name: str, cut: int | None
) -> None:
    build(tmp_path, "hnsw", data[:300])
    with Store.open(tmp_path) as store, store.update():
        kept = store.read(f"{name}.bin")[:-1].copy()
        store.drop(f"{name}.bin")
        if cut:
            store.append(f"{name}.bin", kept)
    with pytest.raises(CorruptError, match=name):
        Store.open(tmp_path)
