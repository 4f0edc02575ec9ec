"""Models as ONNX files: onnxruntime computes what irkit computes, for any batch and length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Model
from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.exporting import export_onnx
from irkit.exporting.onnx_encoder import encode
from irkit.heads import Head, MultiVectorHead, Normalize, PooledHead
from irkit.heads.onnx_graph import Graph
from irkit.heads.projection import Projection

runtime = pytest.importorskip("onnxruntime")

_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**_SIZES, "model_type": "bert"},
    "xlm-roberta": {**_SIZES, "model_type": "xlm-roberta", "pad_token_id": 1},
    "modernbert": {
        **_SIZES,
        "model_type": "modernbert",
        "local_attention": 6,
        "global_attn_every_n_layers": 2,
    },
    "jina": {
        **_SIZES,
        "model_type": "bert",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "num_attention_heads": 4,
    },
    "mpnet": {**_SIZES, "model_type": "mpnet"},
    "neobert": {**_SIZES, "model_type": "neobert"},
    "deberta-v2": {
        **{**_SIZES, "model_type": "deberta-v2", "relative_attention": True, "share_att_key": True},
        **{"pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "position_buckets": 8},
    },
    "deberta-convolution": {
        **{**_SIZES, "model_type": "deberta-v2", "conv_kernel_size": 5, "conv_groups": 2},
        **{"relative_attention": True, "pos_att_type": "c2p", "share_att_key": False},
    },
    "nomic_bert": {**_SIZES, "model_type": "nomic_bert"},
    "gte": {**_SIZES, "model_type": "gte"},
    "t5": {
        "model_type": "t5",
        "vocab_size": 40,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_heads": 4,
        "num_layers": 2,
        "feed_forward_proj": "gated-gelu",
    },
    "qwen3": {**_DECODER, "model_type": "qwen3"},
    "llama": {**_DECODER, "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gemma2": {
        **_DECODER,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
ROWS = [[5, 6, 7], [8], list(range(3, 24))]


def padded(rows: list[list[int]]) -> dict[str, Any]:
    """Inputs of a file for rows, padded at the end."""
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows], np.int64)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int64)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states(family: str) -> None:
    """Every part of the encoder's configuration gives the hidden states of irkit."""
    from onnx import TensorProto, helper

    torch.manual_seed(0)
    encoder = Encoder(FAMILIES[family]).eval()
    for parameter in encoder.parameters():
        parameter.data.normal_(std=0.3)
    graph = Graph()
    graph.name(encode(graph, encoder, "input_ids", "attention_mask"), "hidden")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", "length", 16])
    made = helper.make_graph(graph.nodes, "encoder", inputs, [output], graph.constants)
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        for rows in (ROWS, [[4, 9]], [list(range(2, 36))] * 2):
            [theirs] = session.run(None, padded(rows))
            ours = encoder(Ragged.from_rows(rows))
            for row, values in enumerate(ours):
                np.testing.assert_allclose(theirs[row, : len(values)], values.numpy(), rtol=1e-4, atol=1e-5)


def run(folder: Path, texts: list[str], side: str) -> tuple[Any, dict[str, Any], list[list[int]]]:
    """Run an exported model on texts, by nothing but its files."""
    from tokenizers import Tokenizer

    about = json.loads((folder / "irkit_onnx.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if about["max_length"][side]:
        tokenizer.enable_truncation(about["max_length"][side])
    rows = [tokenizer.encode(about["prompts"][side] + text).ids for text in texts]
    session = runtime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert {item.name for item in session.get_inputs()} == about["inputs"].keys()
    assert [item.name for item in session.get_outputs()] == [*about["outputs"]]
    return session.run(None, padded(rows))[0], about, rows


TEXTS = ["neural search", "cab dig fez gnu hip. index", "text"]


@pytest.mark.parametrize(
    "pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_dense(pooling: str, tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model.with_head("dense", tiny_bert, {"pooling": pooling}, device="cpu")
    width = model.encoder.hidden_size
    layers = [
        Projection(width, width, activation=torch.nn.Tanh(), residual="identity"),
        Projection(width, 6, activation=torch.nn.GELU(), gated=True),
        Normalize(),
    ]
    model.head = PooledHead(width, pooling, layers)
    model.prompts["query"] = "search "
    model.truncate_dim = 4
    export_onnx(model, tmp_path / "out")
    for side in ("query", "document"):
        found, _, _ = run(tmp_path / "out", TEXTS, side)
        ours = model.encode_representation(TEXTS, side).values.numpy()
        np.testing.assert_allclose(found, ours, atol=1e-5)


def test_multi_vector(tiny_bert: Path, tmp_path: Path) -> None:
    """Documents leave skipped tokens out; queries are filled up by mask tokens, which nobody attends to."""
    torch.manual_seed(0)
    config = {"query_expansion": {"length": 12}, "skiplist_words": ["."], "document_length": 20}
    model = Model.multi_vector(tiny_bert, {"dim": 8}, config=config, device="cpu")
    export_onnx(model, tmp_path / "out")
    found, about, rows = run(tmp_path / "out", TEXTS, "document")
    ours = model.encode_representation(TEXTS, "document").tokens
    for vectors, row, expected in zip(found, rows, ours, strict=True):
        kept = [place for place, token in enumerate(row) if token not in about["skip_ids"]]
        np.testing.assert_allclose(vectors[kept], expected.numpy(), atol=1e-5)
    assert any(len(row) > len(expected) for row, expected in zip(rows, ours, strict=True))
    # a query, as irkit_onnx.json says
    _, about, rows = run(tmp_path / "out", TEXTS, "query")
    length, attend = about["query_expansion"]["length"], about["query_expansion"]["attend"]
    filled = [row + [about["mask_id"]] * (length - len(row)) for row in rows]
    mask = [[1] * len(row) + [int(attend)] * (length - len(row)) for row in rows]
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    inputs = {"input_ids": np.array(filled), "attention_mask": np.array(mask)}
    [found] = session.run(None, inputs)
    for vectors, expected in zip(found, model.encode_representation(TEXTS, "query").tokens, strict=True):
        np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_sparse(pooling: str, tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model.sparse(tiny_bert, {"pooling": pooling}, device="cpu")
    model.head.weight.data += 0.1 * torch.randn_like(model.head.weight)
    export_onnx(model, tmp_path / "out")
    found, _, _ = run(tmp_path / "out", TEXTS, "document")
    ours = model.encode_representation(TEXTS, "document").to_dense().numpy()
    assert ours.max() > 0
    np.testing.assert_allclose(found, ours, rtol=1e-5, atol=1e-5)


def test_several_heads(tiny_bert: Path, tmp_path: Path) -> None:
    """One file gives what all heads make."""
    torch.manual_seed(0)
    heads = {"dense": {}, "sparse": "token_weight", "multi_vector": {"projection": {"dim": 8}}}
    model = Model.several(tiny_bert, heads, device="cpu")
    export_onnx(model, tmp_path / "out")
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    about = json.loads((tmp_path / "out" / "irkit_onnx.json").read_text())
    assert [*about["heads"]] == [*about["outputs"]] == [*heads]
    rows = [row.tolist() for row in model.pipeline("document").tokenize([*TEXTS, "index index"])]
    found = dict(zip(about["outputs"], session.run(None, padded(rows)), strict=True))
    ours = model.encode_representation([*TEXTS, "index index"], "document").parts
    dense = found["dense"] / np.linalg.norm(found["dense"], axis=1, keepdims=True)  # compared by cosine
    np.testing.assert_allclose(dense, ours["dense"].values.numpy(), atol=1e-5)
    np.testing.assert_allclose(found["sparse"], ours["sparse"].to_dense().numpy(), atol=1e-5)
    skipped = about["heads"]["multi_vector"]["skip_ids"]
    for vectors, row, expected in zip(found["multi_vector"], rows, ours["multi_vector"].tokens, strict=True):
        kept = [place for place, token in enumerate(row) if token not in skipped]
        np.testing.assert_allclose(vectors[kept], expected.numpy(), atol=1e-5)


def test_command_line(command: Callable[..., tuple[int, str, str]], tiny_dense: Path, tmp_path: Path) -> None:
    status, _, error = command("export", str(tiny_dense), "--to", "onnx", "--out", str(tmp_path / "out"))
    assert status == 0, error
    found, _, _ = run(tmp_path / "out", TEXTS, "document")
    ours = Model.from_pretrained(tiny_dense).encode(TEXTS, prompt_name="document")
    np.testing.assert_allclose(found, ours, atol=1e-5)
    status, _, error = command("export", str(tiny_dense), "--to", "onnx", "--out", str(tmp_path / "out"))
    assert status != 0
    assert "exists already" in error


def test_a_head_without_operations_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    class Bare(PooledHead):
        to_onnx = Head.to_onnx

    model = Model.with_head("dense", tiny_bert, {"pooling": "mean"}, device="cpu")
    model.head = Bare(model.encoder.hidden_size)
    with pytest.raises(BadValueError, match="the head is a Bare, whose class does not define to_onnx"):
        export_onnx(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refused(tiny_bert: Path, tmp_path: Path) -> None:
    """What the graph cannot express is refused before anything is written."""
    out = tmp_path / "out"
    with pytest.raises(BadTypeError, match="expected a Model"):
        export_onnx(7, out)  # type: ignore[arg-type]
    model = Model.with_head("dense", tiny_bert, {"pooling": "mean"}, device="cpu")
    (tmp_path / "there").mkdir()
    with pytest.raises(StorageError, match="exists already"):
        export_onnx(model, tmp_path / "there")
    model.prompts["query"], model.head.include_prompt = "search ", False
    with pytest.raises(BadValueError, match="include_prompt"):
        export_onnx(model, out)
    model.head.include_prompt = True
    model.head.layers.append(torch.nn.Softplus())
    with pytest.raises(BadValueError, match="Softplus"):
        export_onnx(model, out)
    pooled = Model.multi_vector(
        tiny_bert, {"dim": 8}, config={"token_pooling": {"pool_factor": 2}}, device="cpu"
    )
    assert isinstance(pooled.head, MultiVectorHead)
    with pytest.raises(BadValueError, match="clusters"):
        export_onnx(pooled, out)
    with pytest.raises(BadValueError, match="model of their own"):
        export_onnx(Model.sparse(tiny_bert, queries="static", device="cpu"), out)
    whole = Model.with_head("dense", tiny_bert, {"pooling": "mean"}, device="cpu")
    whole.encoder.quantize_()
    with pytest.raises(BadValueError, match="int8"):
        export_onnx(whole, out)
    assert not out.exists()
