"""Score runs and test one against another: no model, no index, only ids and scores.

Run ``python examples/evaluate_run.py``. Two simple systems rank the notes beside this file: one counts the
words that question and note share, the other counts shared word beginnings.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from irkit import Run, evaluate
from irkit.data import read_documents, read_qrels, read_queries
from irkit.evaluation.significance import compare

NOTES = Path(__file__).parent / "notes"


def overlap(letters: int) -> Run:
    """Rank by the number of words that agree in their first letters."""

    def words(text: str) -> set[str]:
        return {word[:letters] for word in re.findall(r"\w+", text.lower())}

    notes = {document.id: words(document.full_text) for document in read_documents(NOTES)}
    results = {}
    for query in read_queries(NOTES, split="test"):
        shared = {name: len(words(query.text) & found) for name, found in notes.items()}
        results[query.id] = {name: count for name, count in shared.items() if count}
    return Run.from_dict(results)


def main() -> None:
    """Evaluate, look at single queries, test, write and read."""
    qrels = read_qrels(NOTES)
    whole, beginnings = overlap(letters=100), overlap(letters=4)
    baseline = evaluate(whole, qrels, "nDCG@10 RR@10")
    system = evaluate(beginnings, qrels, "nDCG@10 RR@10")
    print("whole words    ", {name: round(value, 4) for name, value in baseline.mean.items()})
    print("word beginnings", {name: round(value, 4) for name, value in system.mean.items()})

    values = system.per_query["RR@10"]
    hardest = min(values, key=values.get)
    print(f"hardest query of the second: {hardest} ({values[hardest]:.2f}), it found {beginnings[hardest]}")

    for row in compare(baseline, {"beginnings": system}):
        print(f"{row.measure}: {row.difference:+.4f}, p = {row.corrected_p:.3f}, {row.significant=}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "beginnings.trec")
        beginnings.cut(3).write(path, tag="beginnings")
        print(path.read_text().splitlines()[0])
        print(Run.read(path))


if __name__ == "__main__":
    main()
