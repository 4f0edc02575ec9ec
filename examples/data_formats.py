"""Write a small collection in every format, and read it back.

Run ``python examples/data_formats.py``.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

from irkit import Run
from irkit.data import check_documents, read_documents, read_qrels, read_queries
from irkit.errors import BadValueError


def write(folder: Path) -> None:
    """One file a format."""
    records = [
        {"_id": "d1", "title": "Bears", "text": "They sleep in winter.", "metadata": {"year": 2011}},
        {"_id": "d2", "title": "", "text": "Copper conducts.", "metadata": {}},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)

    beir = folder / "beir"  # corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv
    (beir / "qrels").mkdir(parents=True)
    (beir / "corpus.jsonl").write_text(lines)
    (beir / "queries.jsonl").write_text('{"_id": "q1", "text": "hibernation"}\n{"_id": "q2", "text": "x"}\n')
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")

    (folder / "other_names.jsonl").write_text('{"docid": 7, "contents": "A text.", "lang": "en"}\n')
    (folder / "msmarco.tsv").write_text("d1\tThey sleep in winter.\nd2\tCopper conducts.\n")
    (folder / "header.tsv").write_text("lang\tid\ttext\nen\td1\tCopper conducts.\n")
    (folder / "lines.txt").write_text("They sleep in winter.\n\nCopper conducts.\n")
    with gzip.open(folder / "compressed.jsonl.gz", "wt") as stream:
        stream.write(lines)

    (folder / "qrels.trec").write_text("q1 0 d1 1\nq1 0 d2 0\n")
    (folder / "run.trec").write_text("q1 Q0 d2 2 0.25 mine\nq1 Q0 d1 1 0.75 mine\n")
    (folder / "twice.tsv").write_text("d1\tone\nd1\ttwo\n")
    (folder / "broken.jsonl").write_text('{"_id": "d1", "text": "one"}\n{"_id": "d2", "body": 3}\n')


def main() -> None:
    """Read what was written; the last two are wrong on purpose."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder)
        names = ["beir", "other_names.jsonl", "msmarco.tsv", "header.tsv", "lines.txt", "compressed.jsonl.gz"]
        for name in names:
            print(f"{name}:")
            for document in read_documents(folder / name):
                print(f"  {document.id}  {document.full_text!r}  {dict(document.metadata)}")

        print("all queries:   ", [query.id for query in read_queries(folder / "beir")])
        print("of split test: ", [query.id for query in read_queries(folder / "beir", split="test")])
        print("judgments:     ", read_qrels(folder / "beir"), read_qrels(folder / "qrels.trec"))

        run = Run.read(folder / "run.trec")
        run.write(folder / "run.jsonl.gz")
        print("run:           ", run["q1"], run.to_dict() == Run.read(folder / "run.jsonl.gz").to_dict())

        for name in ("twice.tsv", "broken.jsonl"):
            try:
                check_documents(read_documents(folder / name))
            except BadValueError as error:
                print(f"error: {str(error).replace(temporary + '/', '')}")


if __name__ == "__main__":
    main()
