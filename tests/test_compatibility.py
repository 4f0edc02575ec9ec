"""The table of encoders in docs/encoders.md is what this module finds, which also writes it as a script."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parent))
from test_encoder import ADAPTED, FAMILIES, batch, reference

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.families import masked_lm

PAGE = Path(__file__).parents[1] / "docs" / "encoders.md"
BEGIN, END = "<!-- compatibility: tests/test_compatibility.py writes this table -->", "<!-- end -->"
COLUMNS = ("architecture", "runs", "hidden states", "beside other rows")
COLUMNS += ("bfloat16", "int8", "masked language model", "ONNX", "speed")
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
    graph.name(encode(graph, encoder, *names), "hidden")
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


def row(name: str) -> str:
    """One row of the table: what an architecture of random weights does, beside transformers."""
    config = FAMILIES[name] if name in FAMILIES else ADAPTED[name][0]
    theirs, rows = reference(config), batch([1, 8, 61, 17], seed=1)
    whole = theirs.get_encoder() if config.is_encoder_decoder else theirs
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(folder)
        ours = Encoder.from_pretrained(folder)
        native = type(ours) is Encoder
        wanted = [whole(input_ids=ids[None]).last_hidden_state[0] for ids in rows]
        alone = [ours(rows[i : i + 1]).values for i in range(len(rows))]
        found = ours(rows).values
        cells = [near(torch.cat(alone), wanted), near(found, alone)]
        exact = torch.stack([part.mean(0) for part in ours(rows)])
        half = Encoder.from_pretrained(folder, dtype=torch.bfloat16)(rows)
        cells.append(
            bool(cosine_similarity(torch.stack([x.float().mean(0) for x in half]), exact).min() >= 0.999)
        )
        onnx = native and in_onnx(ours, rows, wanted)
        if native:
            ours.quantize_()
            cells.append(
                bool(cosine_similarity(torch.stack([x.mean(0) for x in ours(rows)]), exact).min() >= 0.99)
            )
        else:
            cells.append(False)
        cells += [native and masked_lm(ours.settings) is not None, onnx]
    how = "irkit" if native else "packed" if ours.packed else "alone" if ours.alone else "padded"
    way = "irkit" if native else f"transformers, {how}"
    return (
        f"| {name} | {way} | " + " | ".join("yes" if cell else "no" for cell in cells) + f" | {speed(name)} |"
    )


def table() -> str:
    return "\n".join([HEADER, *map(row, [*FAMILIES, *ADAPTED])])


def test_speeds_are_those_of_the_shortest_passages(tmp_path: Path) -> None:
    path = tmp_path / "families.jsonl"
    assert speed("gte", path) == "not measured"
    times = "x sentence-transformers"
    lines = [{"family": "GTE", "contender": "irkit int8", times: value} for value in (5.04, 4.0)]
    lines += [{"family": "GTE", "contender": "irkit float32", "not timed": "differs"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert (speed("gte", path), speed("t5", path)) == ("int8 5.0", "not measured")


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
