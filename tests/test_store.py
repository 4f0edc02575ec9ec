"""The store: whole commits or none, one writer, readers that see one state, and nothing altered unnoticed."""

# ruff: noqa: PT012, SIM117 (an update is a block, and blocks are what is tested)
from __future__ import annotations

import copy
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from irkit.errors import BadValueError, CorruptError, LockedError, StorageError
from irkit.index.array_files import Entry, Manifest, allocate
from irkit.index.limits import Limits, use_limits
from irkit.index.store import Store


def make(path: Path, rows: int = 100) -> Path:
    with Store.build(path) as store:
        with store.update():
            store.append("numbers.bin", np.arange(rows))
            store.append("pairs.bin", np.ones((rows, 2), np.float32))
            store.append("empty.bin", np.empty((0, 3), np.int32))
            store.replace("blob.index", lambda target: target.write_bytes(b"structure" * 10))
            store.meta["model"] = {"name": "x"}
        store.publish()
    return path


def state(store: Store) -> tuple[Any, ...]:
    arrays = {name: store.read(name).tolist() for name in store.sizes()}
    return arrays, copy.deepcopy({key: value for key, value in store.meta.items() if key != "build"})


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "irkit.lock"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "index")


dtypes = st.sampled_from(["<f4", "<i8", "<u8", "|u1", "|b1", ">f4", "<f2"]).map(np.dtype)
shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_what_is_appended_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype, shape = data.draw(dtypes), data.draw(shapes)
    pieces = data.draw(
        st.lists(st.integers(0, 5).flatmap(lambda n: hnp.arrays(dtype, (n, *shape))), min_size=1, max_size=4)
    )
    path = tmp_path_factory.mktemp("index")
    with Store.build(path) as store:
        for piece in pieces:
            with store.update():
                store.append("values.bin", piece)
            assert store.rows("values.bin") == len(store.read("values.bin"))
        store.publish()
    whole = np.concatenate(pieces)
    found = Store.open(path).read("values.bin")
    assert found.dtype == dtype.newbyteorder("<")
    np.testing.assert_array_equal(found, whole)
    blocks = list(Store.open(path).blocks("values.bin"))
    np.testing.assert_array_equal(np.concatenate([whole[:0], *blocks]), whole)


def test_blocks_are_bounded_and_in_order(path: Path) -> None:
    with use_limits(Limits(read_bytes=7 * 8)):
        blocks = list(Store.open(path).blocks("numbers.bin", 5, 30))
    assert [len(block) for block in blocks] == [7, 7, 7, 4]
    assert np.concatenate(blocks).tolist() == list(range(5, 30))


def test_taken_rows(path: Path) -> None:
    rows = np.array([0, 1, 1, 7, 50, 98, 99])
    with use_limits(Limits(take_rows=3)):
        store = Store.open(path)
    assert store.take("numbers.bin", rows).tolist() == rows.tolist()
    assert store.take("pairs.bin", rows[:0]).shape == (0, 2)


def test_mapped_arrays_do_not_write_through(path: Path) -> None:
    before = files(path)
    Store.open(path).read("numbers.bin")[:] = 7
    assert files(path) == before


def test_an_update_is_whole_or_nothing(path: Path) -> None:
    store = Store.open(path)
    before, on_disk = state(store), files(path)
    with pytest.raises(KeyError), store.update():
        store.append("numbers.bin", np.arange(3))
        store.append("more.bin", np.arange(3))
        store.replace("blob.index", lambda target: target.write_bytes(b"other"))
        store.meta["model"]["name"] = "y"
        assert len(store.read("numbers.bin")) == 103  # seen inside
        raise KeyError
    assert state(store) == state(Store.open(path)) == before
    assert files(path) == on_disk
    with store.update():
        store.append("numbers.bin", np.arange(3))
        store.replace("blob.index", lambda target: target.write_bytes(b"other"))
    assert store.read("numbers.bin")[-3:].tolist() == [0, 1, 2]
    assert state(store) == state(Store.open(path))
    assert sum(name.startswith("blob") for name in files(path)) == 1  # the replaced file is gone


def test_inner_updates_belong_to_the_outer_one(path: Path) -> None:
    store = Store.open(path)
    before = files(path)
    with store.update():
        with store.update():
            store.append("numbers.bin", np.arange(3))
        assert Store.open(path).rows("numbers.bin") == 100
    assert Store.open(path).rows("numbers.bin") == 103
    before = files(path)
    with pytest.raises(StorageError, match="a step of this update failed"), store.update():
        with pytest.raises(KeyError), store.update():
            store.append("numbers.bin", np.arange(3))
            raise KeyError
    assert files(path) == before


def test_a_replaced_array_has_nothing_of_a_file_that_a_killed_build_left(path: Path) -> None:
    store = Store.open(path)

    def fill(file: Path) -> None:
        file.touch()
        allocate(file, 0, (3,), np.dtype(np.uint8))[...] = 7

    with store.update():
        left = store.path / f"blob.g{store.state.generation + 1}.bin"
        left.write_bytes(bytes(range(1, 200)))
        store.replace("blob.bin", fill)
    assert Store.open(path).read("blob.bin").tolist() == [7, 7, 7]


def test_an_update_that_changes_nothing_writes_nothing(path: Path) -> None:
    stamp = (path / "irkit.json").stat()
    with Store.open(path).update():
        pass
    assert (path / "irkit.json").stat().st_mtime_ns == stamp.st_mtime_ns
    assert (path / "irkit.json").stat().st_ino == stamp.st_ino


def test_a_dropped_array_is_gone_and_may_begin_anew(path: Path) -> None:
    store, reader = Store.open(path), Store.open(path)
    names = list(store.sizes())
    with pytest.raises(ZeroDivisionError), store.update():
        store.drop(names[0])
        raise ZeroDivisionError
    assert list(store.sizes()) == names
    before = store.read(names[0]).copy()
    with store.update():
        store.drop(names[0])
        store.drop("never.bin")
        assert names[0] not in store.sizes()
        store.append(names[0], np.float64([1.5]))
    np.testing.assert_array_equal(reader.read(names[0]), before)
    assert Store.open(path).read(names[0]).tolist() == [1.5]
    with pytest.raises(BadValueError, match="inside"):
        store.drop(names[0])


def test_changes_need_an_update(path: Path) -> None:
    store = Store.open(path)
    before = files(path)
    with pytest.raises(BadValueError, match="inside"):
        store.append("numbers.bin", np.arange(3))
    with pytest.raises(BadValueError, match="inside"):
        store.replace("blob.index", lambda target: target.write_bytes(b""))
    with pytest.raises(BadValueError, match="no build"):
        store.publish()
    assert files(path) == before


def test_bad_arrays_are_refused(path: Path) -> None:
    store = Store.open(path)
    for array in (np.arange(3, dtype=np.int32), np.ones((3, 1), np.int64)):
        with pytest.raises(BadValueError, match="rows of numbers"), store.update():
            store.append("numbers.bin", array)
    for name in ("../evil.bin", "Values.bin", "values", "a b.bin", ""):
        with pytest.raises(BadValueError, match="array name"), store.update():
            store.append(name, np.arange(3))
    with pytest.raises(BadValueError, match=r"no array 'other\.bin'"):
        store.read("other.bin")


def test_derived_values_follow_changes(path: Path) -> None:
    store = Store.open(path)

    def total() -> int:
        return store.derived("total", lambda: int(store.read("numbers.bin").sum()))

    assert total() == 4950
    assert store.derived("total", lambda: 0) == 4950
    with pytest.raises(KeyError), store.update():
        store.append("numbers.bin", np.array([50]))
        assert total() == 5000
        raise KeyError
    assert total() == 4950


def test_readers_keep_their_state(path: Path) -> None:
    reader, other = Store.open(path), Store.open(path)
    before = state(reader)
    with other.update():
        other.append("numbers.bin", np.arange(5))
        other.replace("blob.index", lambda target: target.write_bytes(b"new"))
    assert state(reader) == before
    with Store.build(path, overwrite=True) as build:
        with build.update():
            build.append("numbers.bin", np.arange(7))
        assert state(Store.open(path)) == state(other)  # until it is published
        build.publish()
    assert state(reader) == before
    assert reader.refresh()
    assert reader.read("numbers.bin").tolist() == list(range(7))
    assert sorted(files(path)) == sorted(["irkit.json", reader.state.arrays["numbers.bin"].file])


def test_a_writer_first_moves_to_the_newest_state(path: Path) -> None:
    one, two = Store.open(path), Store.open(path)
    for number, store in enumerate((one, two, one, two)):
        with store.update():
            store.append("numbers.bin", np.array([number]))
    assert Store.open(path).read("numbers.bin")[100:].tolist() == [0, 1, 2, 3]


def test_one_writer_at_a_time(path: Path) -> None:
    one, two = Store.open(path), Store.open(path)
    script = "import sys; from irkit.index.store import Store\nwith Store.open(sys.argv[1]).update(): pass"
    with one.update():
        with pytest.raises(LockedError, match=f"{path}.*try again"), two.update():
            pass
        with pytest.raises(LockedError):
            Store.build(path, overwrite=True)
        Store.open(path).verify()  # readers need no lock
        found = subprocess.run(
            [sys.executable, "-c", script, path], capture_output=True, text=True, check=False
        )
        assert "LockedError" in found.stderr
    with two.update():
        pass
    with Store.build(path, overwrite=True), pytest.raises(LockedError), one.update():
        pass
    with one.update():  # the abandoned build let go
        pass


def test_opening_for_reading_leaves_no_trace(path: Path) -> None:
    (path / "irkit.lock").unlink()
    path.chmod(0o555)
    try:
        before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
        assert Store.open(path).rows("numbers.bin") == 100
        assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
        if os.geteuid() != 0:  # permissions do not bind root
            with pytest.raises(StorageError, match="locking"), Store.open(path).update():
                pass
    finally:
        path.chmod(0o755)


def test_a_build_replaces_only_an_index_and_only_when_told(tmp_path: Path, path: Path) -> None:
    before = files(path)
    with pytest.raises(StorageError, match="overwrite"):
        Store.build(path)
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "irkit.json").write_text('{"head": "pooled"}')
    with pytest.raises(StorageError, match="other files"):
        Store.build(foreign, overwrite=True)
    with pytest.raises(StorageError, match="not the manifest"):
        Store.open(foreign)
    (foreign / "irkit.json").rename(foreign / "notes.txt")
    with pytest.raises(StorageError, match=r"other files \(notes.txt\)"):
        Store.build(foreign)
    assert [file.name for file in foreign.iterdir()] == ["notes.txt"]
    with pytest.raises(StorageError, match="is a file; choose another"):
        Store.build(foreign / "notes.txt")
    for missing in (tmp_path / "none", foreign, foreign / "notes.txt"):
        with pytest.raises(StorageError, match="opening"):
            Store.open(missing)
    assert files(path) == before


def test_other_files_in_the_directory_of_an_index_survive(path: Path) -> None:
    (path / "NOTES.md").write_text("mine")
    make_over = Store.build(path, overwrite=True)
    make_over.publish()
    assert sorted(files(path)) == ["NOTES.md", "irkit.json"]


def test_a_build_is_resumed_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with Store.build(path, key={"corpus": [1, 2.5]}) as store, store.update():
        store.append("numbers.bin", np.arange(3))
    with pytest.raises(StorageError, match="not finished"):
        Store.open(path)
    store = Store.build(path, key={"corpus": [1, 2.5]})
    with pytest.raises(KeyError), store.update():
        store.append("numbers.bin", np.arange(9))
        raise KeyError
    with store.update():
        store.append("numbers.bin", np.arange(2))
    store.close()
    with Store.build(path, key={"corpus": [1, 2.5]}) as store:
        assert store.read("numbers.bin").tolist() == [0, 1, 2, 0, 1]
    with Store.build(path, key="another") as store:
        assert store.rows("numbers.bin") == 0
        assert sorted(files(path)) == ["irkit.building.json"]
        with store.update():
            store.append("numbers.bin", np.arange(1))
    (path / "irkit.building.json").write_bytes(b"{")
    with Store.build(path, key="another") as store:  # what cannot be resumed starts clean
        assert store.rows("numbers.bin") == 0
        store.publish()
    assert Store.open(path).sizes() == {}


def test_a_build_beside_an_index_survives_changes_to_it(path: Path) -> None:
    with Store.build(path, key="new", overwrite=True) as build, build.update():
        build.append("numbers.bin", np.arange(4))
    store = Store.open(path)
    with store.update():
        store.append("more.bin", np.arange(6))
        store.replace("blob.index", lambda target: target.write_bytes(b"new"))
    before = state(store)
    with Store.build(path, key="new", overwrite=True) as build:
        assert build.read("numbers.bin").tolist() == [0, 1, 2, 3]
        assert state(Store.open(path)) == before
        build.publish()
    assert state(Store.open(path)) == ({"numbers.bin": [0, 1, 2, 3]}, {})


def test_bytes_and_files_of_a_killed_writer_go(path: Path) -> None:
    before, clean = state(Store.open(path)), sorted(files(path))
    with (path / "numbers.g1.bin").open("ab") as file:
        file.write(b"tail that was never committed")
    (path / "numbers.g99.bin").write_bytes(b"never named")
    (path / "irkit.json.tmp").write_bytes(b"{")
    store = Store.open(path)
    assert state(store) == before
    with store.update():
        store.append("numbers.bin", np.arange(2))
    assert Store.open(path).read("numbers.bin")[100:].tolist() == [0, 1]
    assert sorted(files(path)) == clean


every_file = pytest.mark.parametrize(
    "name",
    ["irkit.json", "numbers.g1.bin", "pairs.g2.bin", "blob.g4.index"],
    ids=lambda name: name.split(".")[0],
)


@every_file
def test_any_flipped_bit_is_noticed(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    rng = np.random.default_rng(0)
    for position in rng.choice(len(content) * 8, 60, replace=False).tolist():
        content[position // 8] ^= 1 << position % 8
        (path / name).write_bytes(content)
        with pytest.raises(CorruptError, match=f"{path / name}.*(restore|rebuild)"):
            Store.open(path)
        content[position // 8] ^= 1 << position % 8
    (path / name).write_bytes(content)
    Store.open(path).verify()


@every_file
def test_any_truncation_is_noticed(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        (path / name).write_bytes(content[:size])
        for verify in (True, False):
            with pytest.raises(CorruptError, match=str(path / name)):
                Store.open(path, verify=verify)


@every_file
def test_a_missing_file_is_noticed(path: Path, name: str) -> None:
    (path / name).unlink()
    with pytest.raises(StorageError, match="opening index" if name == "irkit.json" else "missing"):
        Store.open(path, verify=False)


def test_verify_finds_what_opening_was_told_to_skip(path: Path) -> None:
    content = bytearray((path / "numbers.g1.bin").read_bytes())
    content[5] ^= 1
    (path / "numbers.g1.bin").write_bytes(content)
    store = Store.open(path, verify=False)
    with pytest.raises(CorruptError, match=r"numbers\.g1\.bin.*checksum"):
        store.verify()


def test_a_corrupt_index_is_not_changed_but_may_be_overwritten(path: Path) -> None:
    store = Store.open(path)
    (path / "irkit.json").write_bytes((path / "irkit.json").read_bytes().replace(b"100", b"101"))
    before = files(path)
    with pytest.raises(CorruptError), store.update():
        pass
    assert files(path) == before
    with Store.build(path, overwrite=True) as build:
        build.publish()
    assert Store.open(path).sizes() == {}


def test_other_formats_are_refused(path: Path) -> None:
    manifest = json.loads((path / "irkit.json").read_bytes())
    (path / "irkit.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CorruptError, match="format 99, expected 1"):
        Store.open(path)
    arrays = {"numbers.bin": Entry("../numbers.g1.bin", "<i8", (), 1, 0)}
    (path / "irkit.json").write_bytes(Manifest(arrays, {}).serialise())
    with pytest.raises(CorruptError, match="not of an index"):
        Store.open(path)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_index_as_it_was(path: Path) -> None:
    store = Store.open(path)
    before, on_disk = state(store), files(path)
    with pytest.raises(StorageError, match=r"writing .*numbers.*too large.*unchanged"), store.update():
        store.append("pairs.bin", np.ones((5, 2), np.float32))
        with file_size_limit(20_000):
            store.append("numbers.bin", np.arange(10_000))
    assert state(store) == state(Store.open(path)) == before
    assert files(path) == on_disk
    with store.update():
        store.append("numbers.bin", np.arange(10_000))
    assert Store.open(path).rows("numbers.bin") == 10_100


def fail_at(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: int) -> None:
    """The ``call``-th use fails as on a full disk."""
    real: Callable[..., Any] = getattr(target, name)
    counter = iter(range(10**6))

    def function(*arguments: Any, **options: Any) -> Any:
        if next(counter) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, function)


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        *((os, "pwrite", call) for call in range(3)),
        *((os, "fsync", call) for call in range(5)),
        *((os, "ftruncate", call) for call in range(2)),
        (Path, "replace", 0),
        (Path, "write_bytes", 0),
    ],
)
def test_a_full_disk_at_any_step(
    path: Path, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: int
) -> None:
    store = Store.open(path)
    before, on_disk = state(store), files(path)

    def update() -> None:
        with store.update():
            store.append("numbers.bin", np.arange(5))
            store.append("other.bin", np.arange(5))
            store.replace("blob.index", lambda target: target.write_bytes(b"new"))

    with monkeypatch.context() as context, pytest.raises(StorageError, match=r"No space left.*unchanged"):
        fail_at(context, target, name, call)
        update()
    assert state(store) == state(Store.open(path)) == before
    assert files(path) == on_disk
    update()
    assert state(store) == state(Store.open(path)) != before


def test_a_change_that_may_not_be_on_the_disk_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sync, that of the directory, fails after the manifest is renamed."""
    store = Store.open(path)
    with (
        monkeypatch.context() as context,
        pytest.raises(
            StorageError, match=r"writing .*No space left.*; the change is made, but may not survive"
        ),
        store.update(),
    ):
        store.append("numbers.bin", np.arange(5))
        fail_at(context, os, "fsync", 2)  # after those of the file and the manifest
    assert state(store) == state(Store.open(path))
    assert store.rows("numbers.bin") == 105
    with Store.build(path, overwrite=True) as build:
        with (
            monkeypatch.context() as context,
            pytest.raises(StorageError, match=r"publishing .*; the change is made, but may not survive"),
        ):
            fail_at(context, os, "fsync", 0)
            build.publish()
        assert not build.building
    with Store.open(path).update() as store:
        assert store.sizes() == {}


def test_an_interrupt_after_the_commit_keeps_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(path)
    real = Path.replace

    def interrupted(self: Path, target: Path) -> None:
        real(self, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt), store.update():
        context.setattr(Path, "replace", interrupted)
        store.append("numbers.bin", np.arange(5))
    assert state(store) == state(Store.open(path))
    assert store.rows("numbers.bin") == 105


def test_nothing_is_named_before_it_is_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every renaming of a manifest, all that it names has been synced since it was written last."""
    unsynced: set[str] = set()
    renamed = []
    real_write, real_sync, real_replace = os.pwrite, os.fsync, Path.replace

    def name_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def pwrite(descriptor: int, *arguments: Any) -> int:
        unsynced.update({name_of(descriptor), str(path)})
        return real_write(descriptor, *arguments)

    def fsync(descriptor: int) -> None:
        unsynced.discard(name_of(descriptor))
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        assert unsynced <= {str(path)}
        assert str(self) not in unsynced
        renamed.append(target)
        unsynced.add(str(path))
        return real_replace(self, target)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    with Store.build(path, overwrite=True) as store:
        with store.update():
            store.append("numbers.bin", np.arange(5))
        store.publish()
    assert [target.name for target in renamed] == [
        "irkit.building.json",
        "irkit.building.json",
        "irkit.json",
    ]
    assert not unsynced


def test_opening_during_a_change_tries_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Store.open(path)
    real = Entry.map

    def slow_map(self: Entry, directory: Path) -> np.ndarray:
        if slow_map.busy:  # a writer replaces a file after the reader has read the manifest
            slow_map.busy = False
            with writer.update():
                writer.replace("blob.index", lambda target: target.write_bytes(b"newer"))
        return real(self, directory)

    slow_map.busy = True
    monkeypatch.setattr(Entry, "map", slow_map)
    assert bytes(Store.open(path).read("blob.index")) == b"newer"


def test_a_file_that_is_cut_in_use_is_said(path: Path) -> None:
    store = Store.open(path)
    array = store.read("numbers.bin")
    [file] = path.glob("numbers.*")
    whole = file.read_bytes()
    with file.open("ab") as stream:  # as a writer does before it commits
        stream.write(b"more")
    store.check_uncut()
    assert array[-1] == 99
    os.truncate(file, 100)
    for _ in range(2):
        with pytest.raises(CorruptError, match=rf"{file}: cut short while it is in use;"):
            store.check_uncut()
    file.unlink()
    file.write_bytes(whole)  # another file of the same name: the mapped one stays cut
    with pytest.raises(CorruptError, match="cut short"):
        store.check_uncut()
    assert Store.open(path).read("numbers.bin")[-1] == 99
