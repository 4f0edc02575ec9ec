"""Compiled code is kept on disk, and compiled anew where its file is damaged or cannot be written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from irkit_kernels._jit import compile_ir

pytest.importorskip("llvmlite")

IR = """
define void @fill(ptr %out) {
  store i64 NUMBER, ptr %out
  ret void
}
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path))
    return tmp_path / "code"


def result(number: int = 7) -> int:
    """Compile a function that stores a number, and return what it stored."""
    function: Callable[..., None] = compile_ir(IR.replace("NUMBER", str(number)), "fill", [ctypes.c_void_p])
    out = ctypes.c_int64()
    function(ctypes.addressof(out))
    return out.value


def test_code_is_loaded_from_disk(folder):
    assert result() == 7
    (file,) = folder.iterdir()
    before = file.stat()
    assert result() == 7
    assert file.stat().st_mtime_ns == before.st_mtime_ns  # not written, so not compiled
    assert result(8) == 8
    files = sorted(folder.iterdir(), key=lambda path: path != file)
    assert len(files) == 2

    files[1].replace(file)  # what lies under a name is what runs
    assert result(7) == 8


@pytest.mark.parametrize("keep", [0, 20, 100, None])
def test_damaged_code_is_compiled_anew(folder, keep):
    result()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    damaged = bytearray(whole[:keep])
    if keep is None:
        damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert result() == 7
    assert file.read_bytes() == whole
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_is_not_needed(folder):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder would be")
    assert result() == 7

    folder.unlink()
    result(9)
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()  # neither read nor replaced
    assert result(9) == 9
    assert list(folder.iterdir()) == [file]


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("IRKIT_CACHE", raising=False)

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert result() == 7


def test_another_cpu_has_code_of_its_own(folder, monkeypatch):
    result()
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "generic")  # in the same home
    result()
    assert len(list(folder.iterdir())) == 2
