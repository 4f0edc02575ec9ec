"""The table of encoders in docs/encoders.md is what this module finds, which also writes it as a script."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parent))
import test_encoder_adapter
import test_jina
import test_neobert
from test_encoder import ADAPTED, FAMILIES, OWN, batch, reference
from test_tite_oracle import oracle

from irkit import Model
from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.errors import IrkitError

PAGE = Path(__file__).parents[1] / "docs" / "encoders.md"
BEGIN, END = "<!-- compatibility: tests/test_compatibility.py writes this table -->", "<!-- end -->"
COLUMNS = ("architecture", "runs", "hidden states", "beside other rows")
COLUMNS += ("bfloat16", "int8", "heads", "ONNX", "speed")
SPEEDS = PAGE.parents[1] / "benchmarks" / "results" / "families.jsonl"
MEASURED = {"bert": "BERT", "mpnet": "MPNet", "nomic_bert": "Nomic-BERT", "gte": "GTE", "qwen3": "Qwen3"}
MEASURED |= {"embeddinggemma": "EmbeddingGemma"}  # names in the suite families
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def in_onnx(encoder: Encoder, rows: Ragged, expected: list[torch.Tensor]) -> bool:
    """Tell whether onnxruntime gives the hidden states of rows, to 1e-5 of the largest number."""
    import onnxruntime
    from onnx import TensorProto, helper

    from irkit.exporting.onnx_encoder import encode
    from irkit.heads.onnx_graph import OPSET, Graph

    graph, names = Graph(), ("input_ids", "attention_mask")
    try:
        graph.name(encode(graph, encoder, *names), "hidden")
    except IrkitError:  # a layer that the export refuses
        return False
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "m"]) for name in names]
    output = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["n", "m", encoder.hidden_size])
    made = helper.make_graph(graph.nodes, "encoder", inputs, [output], graph.constants)
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    ids, mask = rows.to_padded(0)
    [found] = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.long().numpy()})
    kept = [torch.from_numpy(got)[: len(row)] for got, row in zip(found, expected, strict=True)]
    return near(torch.cat(kept), expected)


def near(found: torch.Tensor, expected: list[torch.Tensor]) -> bool:
    wanted = torch.cat(expected)
    return bool((found - wanted).abs().max() <= 1e-5 * max(1, float(wanted.abs().max())))


def speed(name: str, results: Path = SPEEDS) -> str:
    """Return how many times as fast as sentence-transformers each precision is, on the shortest texts."""
    lines = map(json.loads, results.read_text("utf-8").splitlines() if results.exists() else ())
    rows = [line for line in lines if name in MEASURED and line.get("family") == MEASURED[name]]
    found: dict[str, float] = {}
    for line in rows:
        if "x sentence-transformers" in line:
            found.setdefault(line["contender"].removeprefix("irkit "), line["x sentence-transformers"])
    return ", ".join(f"{kind} {times:.1f}" for kind, times in found.items()) or "not measured"


# hidden states of a row of token ids, by the reference of an architecture
States = Callable[[torch.Tensor], torch.Tensor]


def of_transformers(make: Callable[[], Any], folder: Path) -> States:
    """Save a model of transformers, and return its hidden states."""
    theirs = make()
    theirs.save_pretrained(folder)
    whole = theirs.get_encoder() if theirs.config.is_encoder_decoder else theirs
    return lambda ids: whole(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None])[0][0]


def of_definition(module: Any, folder: Path, *more: Any) -> States:
    """Save the weights of a test module that has a definition, and return the definition's hidden states."""
    weights = module.make_weights()
    (folder / "config.json").write_text(json.dumps(module.SETTINGS))
    save_file(weights, folder / "model.safetensors")
    return lambda ids: module.define(weights, ids, *more)


def of_oracle(folder: Path) -> States:
    """Save a TITE, and return the outputs of its slow definition."""
    torch.manual_seed(0)
    encoder = Encoder(OWN["tite"]).eval()
    encoder.save_pretrained(folder)
    double = encoder.double()
    return lambda ids: oracle(double, ids).float()


CASES: dict[str, Callable[[Path], States]] = {
    **{name: partial(of_transformers, partial(reference, config)) for name, config in FAMILIES.items()},
    "jina2": lambda folder: of_definition(test_jina, folder, functional.gelu),
    "neobert": lambda folder: of_definition(test_neobert, folder),
    "tite": of_oracle,
    **{name: partial(of_transformers, partial(reference, config)) for name, (config, _) in ADAPTED.items()},
    **{
        name: partial(of_transformers, partial(test_encoder_adapter.make, name, {}))
        for name in ("convbert", "mobilebert", "nystromformer", "fnet")
    },
}


def alike(rows: Ragged, exact: torch.Tensor) -> float:
    """Return the lowest cosine of the mean vectors of rows with ``exact (n, d)``."""
    return float(cosine_similarity(torch.stack([row.float().mean(0) for row in rows]), exact).min())


def in_bfloat16(folder: Path, rows: Ragged, exact: torch.Tensor) -> bool:
    try:
        encoder = Encoder.from_pretrained(folder, dtype=torch.bfloat16)
    except IrkitError:  # an operation that torch does not have in bfloat16
        return False
    return alike(encoder(rows), exact) >= 0.999


def carried(folder: Path) -> str:
    """Return the names of the heads that encode a text on the encoder of a directory."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 60, **names}))
    worked = []
    for head in ("dense", "multi_vector", "sparse"):
        try:
            Model.with_head(head, folder, device="cpu").encode(["a b c", "d"])
        except IrkitError:
            continue
        worked.append(head.replace("_", "-"))
    return ", ".join(worked)


def row(name: str) -> str:
    """One row of the table: what an architecture of random weights does, beside its reference."""
    rows = Ragged.from_rows([ids % 55 + 5 for ids in batch([1, 8, 61, 17], seed=1)])
    with tempfile.TemporaryDirectory() as path, torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(path)
        states = CASES[name](folder)
        ours = Encoder.from_pretrained(folder)
        native = type(ours) is Encoder
        # hidden states alone and together
        wanted = [states(ids) for ids in rows]
        alone = [ours(rows[i : i + 1]).values for i in range(len(rows))]
        cells = [near(torch.cat(alone), wanted), near(ours(rows).values, alone)]
        # lower precision
        exact = torch.stack([part.mean(0) for part in ours(rows)])
        cells.append(in_bfloat16(folder, rows, exact))
        onnx = native and in_onnx(ours, rows, wanted)
        if native:
            ours.quantize_()
        cells.append(native and alike(ours(rows), exact) >= 0.99)
        heads = carried(folder)
    how = "irkit" if native else "packed" if ours.packed else "one row at a time" if ours.alone else "padded"
    way = "irkit" if native else f"transformers, {how}"
    told = [*("yes" if cell else "no" for cell in cells), heads, "yes" if onnx else "no", speed(name)]
    return f"| {name} | {way} | {' | '.join(told)} |"


def table() -> str:
    return "\n".join([HEADER, *map(row, CASES)])


def test_speeds_are_those_of_the_shortest_passages(tmp_path: Path) -> None:
    path = tmp_path / "families.jsonl"
    assert speed("gte", path) == "not measured"
    times = "x sentence-transformers"
    lines = [{"family": "GTE", "contender": "irkit int8", times: value} for value in (5.04, 4.0)]
    lines += [{"family": "GTE", "contender": "irkit float32", "not timed": "differs"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert (speed("gte", path), speed("t5", path)) == ("int8 5.0", "not measured")


@pytest.mark.slow
def test_the_page_has_the_table_that_the_encoders_give() -> None:
    pytest.importorskip("onnxruntime")
    pattern = re.escape(BEGIN) + r"\n\n(.*?)\n\n" + re.escape(END)
    found = re.search(pattern, PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    assert found[1] == table(), "python tests/test_compatibility.py writes the table anew"


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", "utf-8")
