"""``irkit encode``: write representations of texts to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from irkit.cli.options import Devices
from irkit.cli.output import note
from irkit.cli.runs import check_out
from irkit.errors import BadValueError
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.data.vector_files import Parts

_IMPACTS = ("sparse", ".jsonl")  # weights by term, which irkit index impacts and Anserini read


def encode(
    model: str,
    texts: str,
    *,
    out: Path,
    side: Literal["query", "document"] = "document",
    dtype: str | None = None,
    device: Devices = None,
) -> None:
    """Encode texts into a file.

    .npy holds one vector per text; .safetensors holds the arrays of any model, in the order of the texts;
    .jsonl holds one object per line, with id and vector, or with weights by term for a sparse model. Texts
    are streamed, so that any number of them fits in memory.

    Args:
        model: Directory or hub name.
        texts: Documents or queries, as for irkit index and search.
        out: File to write: .npy, .safetensors or .jsonl.
        side: Encode the texts as queries or as documents.
        dtype: auto (default for documents), float32 (default for queries, as in a search), bfloat16 or int8.

    Examples:
        irkit encode sentence-transformers/all-MiniLM-L6-v2 examples/notes --out vectors.npy
    """
    from irkit.data.vector_files import WRITABLE, write_vectors

    if out.suffix not in WRITABLE:
        raise BadValueError(f"--out {out}: expected the extension {', '.join(WRITABLE)}")
    check_out(str(out), None)
    from irkit.data import read_documents, read_queries
    from irkit.encoder_free.settings import is_encoder_free
    from irkit.model import Model

    if is_encoder_free(model):
        raise BadValueError(
            f"irkit encode: {model} encodes nothing without an index; see irkit index {model}"
        )

    # read everything once, so that a malformed line is an error before the encoding
    source = read_queries(texts) if side == "query" else read_documents(texts)
    total = None
    if not source.once:
        with progress_bar("checking", "texts") as update:
            total = 0
            for _ in source:
                total += 1
                update(1)

    dtype = dtype or ("auto" if side == "document" else "float32")  # as irkit index and irkit search
    encoder = Model.from_pretrained(model, device=device.split(",") if device else None, dtype=dtype)
    if encoder.kind != "dense" and out.suffix != ".safetensors" and (encoder.kind, out.suffix) != _IMPACTS:
        raise BadValueError(
            f"--out {out}: {model} makes {encoder.kind}, not one vector a text; give --out FILE.safetensors"
            + (" or FILE.jsonl" if encoder.kind == _IMPACTS[0] else "")
        )
    with progress_bar("encoding", "texts", total) as update:
        vocabulary = encoder.vocabulary if encoder.kind == "sparse" else None
        count = write_vectors(out, _encode(encoder, source, side, update), vocabulary)
    note(f"encoded {count:,} texts into {out}")


def _encode(model: Any, items: Iterable[Any], side: str, update: Any) -> Parts:
    waiting: deque[str] = deque()  # ids of texts that are read, but not encoded yet

    def texts() -> Iterator[str]:
        for item in items:
            waiting.append(item.id)
            yield item.text if side == "query" else item.full_text

    for part in model.stream_representations(texts(), side, progress=update):
        yield [waiting.popleft() for _ in range(len(part))], part
