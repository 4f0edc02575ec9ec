"""The package as a whole: light imports, public names, layers that only look down."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import irkit

ROOT = Path(irkit.__file__).parent
KERNELS = ROOT.parent / "kernels" / "irkit_kernels"

# what each part of irkit may import from irkit, beside errors and config
BASE = {"ragged", "representation", "scoring"}
LAYERS = {
    "arguments": set(),
    "bars": set(),
    "ending": set(),
    "errors": set(),
    "files": set(),
    "forking": set(),
    "lazy": set(),
    "config": set(),
    "ragged": set(),
    "representation": {"ragged"},
    "scoring": BASE,
    "encoder": BASE | {"encoder"},
    "heads": BASE | {"heads"},
    "vector_files": {"representation"},
    "late_interaction": BASE | {"encoder"},
    "tokenizer": {"ragged"},
    "run": {"data"},
    "evaluation": {"run", "data", "trec_measures"},
    "fusion": {"run", "evaluation"},
    "feedback": BASE | {"index"},
    "trec_measures": {"run", "data"},
    "preferences": {"run", "data", "trec_measures", "evaluation"},
    "standardization": {"data", "trec_measures", "evaluation"},
    "data": {"data"},
    "index": BASE | {"index", "data"},
    "lookup": {"index", "data"},
    "lexical": BASE | {"index", "data", "tokenizer", "lexical"},
    "model_choice": {"index", "lexical", "model"},
    "formats": BASE | {"encoder", "heads", "tokenizer", "formats"},
    "explanation": BASE | {"tokenizer", "model"},
    "model": BASE | {"bars", "encoder", "heads", "tokenizer", "formats", "model"},
}
TOP = {"building", "hybrid", "reranking", "retriever", "searching", "study", "training", "vocabulary"}


def parts_imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("irkit.")}
    return found


def test_layers_only_look_down() -> None:
    known = {path.stem for path in ROOT.glob("*") if path.stem[0] != "_" and path.suffix != ".typed"}
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if part.startswith("__") or part == "cli":
            continue
        allowed = LAYERS.get(part, set(LAYERS) | TOP) | {"arguments", "errors", "config", "files", "forking"}
        assert part in LAYERS or part in TOP, f"{file}: give its part a layer here"
        assert (parts_imported(file) & known) <= allowed, file


def test_kernels_know_nothing_of_irkit() -> None:
    assert not (KERNELS.parent / "__init__.py").exists()  # it would shadow Hugging Face's `kernels`
    for file in KERNELS.rglob("*.py"):
        assert not parts_imported(file), file


def test_public_names_exist_and_are_sorted() -> None:
    assert irkit.__all__ == sorted(irkit.__all__)
    for name in irkit.__all__:
        assert getattr(irkit, name).__module__.startswith("irkit.")
    with pytest.raises(AttributeError, match="nothing"):
        irkit.nothing  # noqa: B018
    for file in ROOT.rglob("*.py"):
        name = ".".join(["irkit", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None)
        assert all(hasattr(module, each) for each in public or []), name


@pytest.mark.parametrize(
    "code",
    [
        "import irkit",
        "import irkit.cli",
        "import irkit.preferences, irkit.standardization, irkit.fusion, irkit.data",
    ],
)
def test_imports_are_light(code: str) -> None:
    heavy = {"torch", "transformers", "faiss", "numba", "scipy", "ir_measures", "sentence_transformers"}
    check = f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
