"""Write encoder and head of a model as one ONNX file, for those who serve it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from torch import nn

from irkit.encoder import Encoder
from irkit.encoder.families import FAMILIES
from irkit.errors import BadTypeError, BadValueError, MissingDependencyError, StorageError
from irkit.exporting.onnx_encoder import encode
from irkit.exporting.target import refuse_uri
from irkit.heads import Normalize, Side
from irkit.heads.onnx_graph import OPSET, Graph, add_layers
from irkit.model import Model
from irkit.utils.atomic import explained, publish_folder, scratch

_IR_VERSION = 8  # of the file format, which readers of the opset know
_INLINE = 1 << 30  # bytes of weights from which they are a file of their own; one file holds 2 GiB
_OUTPUTS = {"dense": "embeddings", "multi_vector": "token_embeddings", "sparse": "weights"}


def export_onnx(model: Model, out: str | Path) -> None:
    """Write ``model.onnx``, the files of the tokenizer, and ``irkit_onnx.json``, which describes both.

    The inputs are ``input_ids`` and ``attention_mask``, int64 ``(batch, length)`` of any sizes, padded at the
    end. The output depends on the kind of the model: ``embeddings (batch, dim)``; ``token_embeddings (batch,
    length, dim)``, of which the embeddings of real tokens outside the skip list count; or ``weights (batch,
    dim)`` of all terms. A model with several heads has an output for each, by its name. irkit_onnx.json has
    prompts, lengths, skip list and query expansion.

    Args:
        model: In float32, with one of irkit's own encoders.
        out: A new directory.

    Raises:
        BadValueError: The graph cannot express the model; the message says what can be exported.
        StorageError: There is something at ``out``, or the disk is full.
        MissingDependencyError: The package onnx is not installed.
    """
    if not isinstance(model, Model):
        raise BadTypeError(f"exporting to ONNX: got {type(model).__name__}; expected a Model")
    refuse_uri(out)
    path = Path(out)
    if path.exists():
        raise StorageError(f"exporting to {out}: it exists already; choose another path, or delete it")
    _check(model)
    try:
        import onnx
    except ImportError as error:
        raise MissingDependencyError(
            "exporting to ONNX needs the package onnx: pip install 'irkit[onnx]'"
        ) from error
    proto = _build(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with explained(f"exporting to {out}"), scratch(path) as aside:
        folder = aside / "new"
        folder.mkdir()
        large = sum(weight.numel() * 4 for weight in model.parameters()) > _INLINE
        onnx.save_model(proto, folder / "model.onnx", save_as_external_data=large, location="model.onnx_data")
        model.tokenizer.save(folder)
        (folder / "irkit_onnx.json").write_text(json.dumps(_describe(model), indent=2) + "\n", "utf-8")
        publish_folder(folder, path)


def _check(model: Model) -> None:
    """Refuse a model that the graph cannot express, before anything is written."""
    encoder, head = model.encoder, model.head
    if not isinstance(encoder, Encoder):
        raise BadValueError(
            f"exporting to ONNX: the encoder is a {encoder.family}, which irkit does not run itself; "
            f"expected one of {', '.join(sorted(FAMILIES))}"
        )
    if head.parts:
        for part in model.heads.values():
            _check(part)
        return
    if model.query_model is not None:
        raise BadValueError(
            "exporting to ONNX: queries have a model of their own; export model.query_model, and a copy of "
            "the model after attach_query_encoder(None)"
        )
    if not head.include_prompt and any(model.prompts.values()):
        raise BadValueError(
            "exporting to ONNX: the head leaves the tokens of prompts out, whose number differs by side; "
            "expected a head that pools all tokens (include_prompt), or no prompts"
        )


def _build(model: Model) -> Any:
    """Return the file as a message of protocol buffers."""
    from onnx import TensorProto, helper

    graph, encoder = Graph(), model.encoder
    assert isinstance(encoder, Encoder)
    hidden = encode(graph, encoder, "input_ids", "attention_mask")
    for name, part in _parts(model).items():
        graph.name(_add_head(graph, part, hidden), name)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, _sizes(part))
        for name, part in _parts(model).items()
    ]
    made = helper.make_graph(graph.nodes, "irkit", inputs, outputs, graph.constants)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(made, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="irkit")


def _parts(model: Model) -> dict[str, Model]:
    """Return the model of each output, by the name of the output."""
    return dict(model.heads) if model.head.parts else {_OUTPUTS[model.kind]: model}


def _sizes(model: Model) -> list[Any]:
    """Return the dimensions of the output of a model; a free dimension is given by its name."""
    length = ["length"] if model.kind == "multi_vector" else []
    return ["batch", *length, model.dim]


def _add_head(graph: Graph, model: Model, hidden: str) -> str:
    result = model.head.to_onnx(graph, hidden, "input_ids", "attention_mask")
    if model.truncate_dim is not None:
        result = graph("Slice", result, graph.ints(0), graph.ints(model.truncate_dim), graph.ints(-1))
        if model.head.unit:
            result = add_layers(graph, nn.ModuleList([Normalize()]), result)
    return result


def _describe(model: Model) -> dict[str, Any]:
    """Return the description that users of the file need, as JSON values."""
    sides = get_args(Side)
    about: dict[str, Any] = {
        "kind": model.kind,
        "inputs": {name: ["batch", "length"] for name in ("input_ids", "attention_mask")},
        "outputs": {name: _sizes(part) for name, part in _parts(model).items()},
        "padding": "right",
        "pad_id": model.tokenizer.special_ids.get("pad", 0),
        "prompts": model.prompts,
        "max_length": {side: model.max_length(side) for side in sides},
        "max_positions": model.encoder.max_positions,
        "opset": OPSET,
    }
    if model.head.parts:
        return about | {"heads": {name: _describe_head(part) for name, part in model.heads.items()}}
    return about | _describe_head(model)


def _describe_head(model: Model) -> dict[str, Any]:
    return {"dim": model.dim, "similarity": model.similarity_name, **model.head.onnx_settings()}
