"""Disks that are full or read-only, for real: what is stored stays, and every failure is an irkit error."""

# ruff: noqa: PT012, SIM117 (a block that writes is what is tested)
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Model, Sparse
from irkit.errors import CorruptError, StorageError
from irkit.index import (
    Limits,
    Store,
    check_index,
    compact,
    create_index,
    index_config,
    open_index,
    use_limits,
)
from irkit.training.checkpoints import saving
from irkit.training.train_run import TrainingLog
from irkit.utils.atomic import check_folder, publish_entries, replacing, scratch, write_text

CONFIG = {"kind": "inverted", "dtype": "uint8", "mode": "approximate"}
N = 300


def vectors(seed: int) -> Sparse:
    values = np.random.default_rng(seed).standard_normal((N, 400), dtype=np.float32)
    return Sparse.from_dense(torch.from_numpy(values).clamp(min=0))


def act(action: str, path: Path) -> None:
    with use_limits(Limits(inverted_unlisted=64)):  # 300 documents are looked up, not scanned
        run(action, path)


def run(action: str, path: Path) -> None:
    if action == "build":
        with Store.build(path, key=1, overwrite=True) as store:
            index = create_index(store, CONFIG)
            if not len(index):
                index.add(vectors(1))
            index.finish()
            store.publish()
    elif action == "compact":
        compact(path)
    else:
        index = open_index(Store.open(path))
        with index.store.update():
            index.remove(range(0, N, 3))
            index.add(vectors(2))
            index.finish()


def hits(path: Path) -> Any:
    """What is found and what is there; all files are compared with their checksums."""
    index = open_index(Store.open(path))
    return *(part.tolist() for part in index.search(vectors(9)[:5], 9)), index.live.tolist()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system may be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fails_to_build(path: Path) -> None:
    with pytest.raises(StorageError, match="No space left"):
        act("build", path)


def free(place: Path) -> int:
    state = os.statvfs(place)
    return state.f_bavail * state.f_bsize


def fill(place: Path, left: int) -> Path:
    """Leave so many bytes of it; the file that takes the others."""
    with (place / "filler").open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, free(place) - left)
    return place / "filler"


def test_an_index_on_a_full_disk(disk: Path) -> None:
    """Also while lists are written into mapped files, where a full disk would be a signal."""
    path, before = disk / "index", free(disk)
    act("build", path)
    used, built = before - free(disk), hits(path)
    for action, share in (("build", 0.9), ("change", 0.9), ("change", 0.3), ("compact", 0.5)):
        filler = fill(disk, int(share * used))
        if action == "build":  # the others do it likewise
            assert in_child(partial(fails_to_build, path)) == 0  # not ended by a signal
        else:
            with pytest.raises(StorageError, match=r"writing .*No space left.*unchanged"):
                act(action, path)
        filler.unlink()
        assert hits(path) == built
    act("change", path)
    act("compact", path)
    assert len(open_index(Store.open(path))) == 2 * N - len(range(0, N, 3))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_model_on_a_full_disk(share: float, disk: Path, tiny_bert: Path) -> None:
    model, before = Model.multi_vector(tiny_bert, device="cpu"), free(disk)
    model.save_pretrained(disk / "model")
    filler = fill(disk, int(share * (before - free(disk))))
    with pytest.raises(StorageError, match="No space left"):
        model.save_pretrained(disk / "model")
    filler.unlink()
    assert [path.name for path in disk.iterdir()] == ["model"]
    assert Model.from_pretrained(disk / "model", device="cpu").fingerprint == model.fingerprint


def test_a_checkpoint_on_a_full_disk(disk: Path) -> None:
    """torch.save says RuntimeError, and other things, too, are a RuntimeError."""
    fill(disk, 1 << 16)
    with pytest.raises(StorageError, match=r"saving .*point-3: torch could not write it; is the disk full"):
        with saving(disk / "checkpoint-3"):
            torch.save(torch.ones(1 << 20), disk / "optimizer.pt")
    with pytest.raises(RuntimeError, match="out of memory"), saving(disk / "checkpoint-3"):
        raise RuntimeError("CUDA out of memory")


def test_a_read_only_disk(disk: Path) -> None:
    path = disk / "index"
    act("build", path)
    built = hits(path)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert hits(path) == built
    for action, problem in (("change", "the index can be read, not changed"), ("compact", "is not writable")):
        with pytest.raises(StorageError, match=problem):
            act(action, path)
    with pytest.raises(StorageError, match="is not writable"):
        act("build", disk / "new")
    with pytest.raises(StorageError, match=r"writing .*new\.txt: Read-only file system"):
        write_text(disk / "new.txt", "text")
    with pytest.raises(StorageError, match=r"training: .* is not writable; choose another"):
        check_folder(disk / "not" / "there", "training")


# ---- what needs no disk of its own ---------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / ("ж" * 120 + ".txt")  # 244 bytes: there is little room for a name beside it
    write_text(path, "old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises((StorageError, KeyboardInterrupt)) as raised, replacing(path) as aside:
            aside.write_text("ne")
            raise error
        assert isinstance(error, KeyboardInterrupt) or "No space left" in str(raised.value)
        assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    with pytest.raises(StorageError, match="surrogates not allowed"):
        write_text(path, "\ud800")
    write_text(path, "new")
    (tmp_path / "link").symlink_to(path)
    write_text(tmp_path / "link", "newer")
    assert (path.read_text(), (tmp_path / "link").is_symlink()) == ("newer", True)
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises(StorageError, match="folder or a device"):
            write_text(other, "text")


def test_a_save_that_is_interrupted_at_its_end_leaves_the_old_model(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = Model.multi_vector(tiny_bert, device="cpu"), tmp_path / "model"
    model.save_pretrained(path)
    rename: Callable[[Path, Path], Path] = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(Path, "rename", interrupted)
        model.save_pretrained(path)
    assert list(tmp_path.iterdir()) == [path]
    assert Model.from_pretrained(path, device="cpu").fingerprint == model.fingerprint


def in_child(action: Callable[[], Any]) -> int:
    """Do something in a child that is forked; how it ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_while(action: Callable[[], Any], event: str, name: str) -> None:
    """Do something in a child that is killed before ``event`` befalls a path that ends so."""

    def kill(what: str, arguments: tuple[Any, ...]) -> None:
        if what == event and os.fsdecode(arguments[0]).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        sys.addaudithook(kill)
        action()

    assert in_child(act) == -signal.SIGKILL


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    others = [tmp_path / ".notes.txt.0123456789abcdef.part", tmp_path / ".notes.txt.old"]

    killed_while(lambda: write_text(path, "half"), "os.rename", ".part")
    for other in others:  # of a training file, and of somebody
        other.touch()
    assert len(list(tmp_path.iterdir())) == 3
    with replacing(path) as aside:
        aside.write_text("whole")
        assert in_child(lambda: write_text(path, "between")) == 0
        assert (path.read_text(), aside.read_text()) == ("between", "whole")
        assert len(list(tmp_path.iterdir())) == 4
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_what_a_killed_compaction_left_is_removed_by_the_next_update(tmp_path: Path) -> None:
    path = tmp_path / "index"
    act("build", path)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def stopped() -> int:
        with pytest.raises(KeyboardInterrupt):
            compact(path, progress=stop)
        assert (path / "irkit.building.json").exists()
        return len(list(path.iterdir()))

    store = Store.open(path)
    before, left = len(list(path.iterdir())), stopped()
    with store.update():  # changes nothing: the compaction can go on
        pass
    assert len(list(path.iterdir())) == left > before
    open_index(store).remove([0])
    assert len(list(path.iterdir())) == before + 1  # removed.bin
    with pytest.raises(KeyboardInterrupt), Store.build(path, key="another build", overwrite=True) as build:
        with build.update():
            build.append("numbers.bin", np.arange(3))
        raise KeyboardInterrupt
    open_index(store).remove([1])
    with Store.build(path, key="another build", overwrite=True) as build:
        assert build.rows("numbers.bin") == 3


def test_a_model_that_was_moved_aside_by_a_killed_save_comes_back(tmp_path: Path, tiny_bert: Path) -> None:
    model, path = Model.multi_vector(tiny_bert, device="cpu"), tmp_path / "model"
    model.save_pretrained(path)
    (path / "README.md").write_text("about it")
    killed_while(lambda: model.save_pretrained(path), "os.rename", "/new")
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), scratch(path):
        assert Model.from_pretrained(path, device="cpu").fingerprint == model.fingerprint
        raise ZeroDivisionError
    for _ in range(3):
        killed_while(lambda: model.save_pretrained(path), "os.rename", "/model")
    assert len(list(tmp_path.iterdir())) == 2
    with scratch(path) as living:
        model.save_pretrained(path)
        assert living.exists()
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "README.md").read_text() == "about it"


def test_a_folder_for_temporary_files_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(StorageError, match=r"checking an index: No such file.*set TMPDIR"):
        check_index(index_config("flat"), vectors(1))


def test_the_log_of_a_training_on_a_full_disk() -> None:
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=1)
    with pytest.raises(StorageError, match="writing /dev/full: No space left"):
        TrainingLog(Path("/dev/full")).on_log(None, state, None, logs={"loss": 1.0})


@pytest.mark.parametrize("name", ["loop", "nul\0l", "x" * 300])
def test_names_that_no_directory_can_have(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for action in (Store.open, Store.build):
        with pytest.raises(StorageError, match=name.replace("\0", ".*")):
            action(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"checksum": 1}'])
def test_a_damaged_manifest_is_replaced_only_when_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "index"
    act("build", path)
    built = hits(path)
    (path / "recipe.yaml").write_text("of the command line")
    (path / "irkit.json").write_bytes(content)
    with pytest.raises(CorruptError):
        Store.open(path)
    with pytest.raises(StorageError, match="there is one already"):
        Store.build(path)
    act("build", path)
    assert hits(path) == built


def test_a_manifest_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    act("build", path)
    before = sorted(file.name for file in path.iterdir())
    read: Callable[[Path], bytes] = Path.read_bytes

    def refused(self: Path) -> bytes:
        if self.name == "irkit.json":
            raise PermissionError(13, "Permission denied")
        return read(self)

    with monkeypatch.context() as context, pytest.raises(StorageError, match="Permission denied"):
        context.setattr(Path, "read_bytes", refused)
        Store.build(path, overwrite=True)
    assert sorted(file.name for file in path.iterdir()) == before


def test_entries_that_are_published_again_leave_nothing_hidden(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    folder.mkdir()
    (source / "1_Dense").mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "1_Dense/model.safetensors"):
        (source / name).write_text(name)
    for _ in range(2):  # weights are links to one file from the second time on
        publish_entries(sorted(source.iterdir()), folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            "1_Dense",
            "config.json",
            "model.safetensors",
        ]
    assert (folder / "1_Dense" / "model.safetensors").read_text() == "1_Dense/model.safetensors"
