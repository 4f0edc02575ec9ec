"""Export an index: documents, metadata and stored vectors, to files and engines that other tools read.

`export` streams the `Contents` of an index (contents.py) to a `Target` (target.py). Each target is a module
of its own, to_qdrant.py and so on, listed in `TARGETS`. marks.py has the keywords that stand for what engines
cannot filter by themselves. `irkit.remote` searches what Qdrant and LanceDB hold.

`export_onnx` (to_onnx.py) writes a model instead, as a graph of ONNX operations: the encoder
(onnx_encoder.py), then the head (`irkit.heads.Head.to_onnx`).
"""

from __future__ import annotations

from irkit.exporting.target import Target
from irkit.exporting.targets import TARGETS, export
from irkit.exporting.to_onnx import export_onnx

__all__ = ["TARGETS", "Target", "export", "export_onnx"]
