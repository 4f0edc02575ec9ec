"""Writes the weights of inference-free queries: ``python idf_table.py COLLECTION MODEL OUT.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from irkit import Model
from irkit.data import read_documents
from irkit.model.queries import idf_weights

collection, name, out = sys.argv[1:]
tokenizer = Model.sparse(name).tokenizer
weights = idf_weights((document.full_text for document in read_documents(collection)), tokenizer)
Path(out).write_text(json.dumps(weights))
