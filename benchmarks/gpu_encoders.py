"""Encoders of random weights on a GPU: token ids in packed steps, and strings to vectors."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_timing import Device, find_device, measure_limits, share
from benchmarks.harness import Row

__all__ = ["SHAPES", "measure_encoder", "measure_texts"]

PASSAGES, TEXTS, TOKENS_PER_STEP, BATCH, ROUNDS = 2048, 2048, 32_768, 32, 3
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SHAPES = {
    "MiniLM-L6": (384, 6, 12, 1536),
    "BERT-base": (768, 12, 12, 3072),
    "ModernBERT-base": (768, 22, 12, 1152),
}
TINY = (32, 2, 4, 64)
PEER = "sentence-transformers"


def measure_encoder(name: str, device: Device | None = None) -> Iterator[Row]:
    """Yield tokens per second in bfloat16: transformers in padded, sorted batches, and irkit by backend."""
    from transformers import AutoModel

    from irkit import Encoder, Ragged
    from irkit.model.pipeline import plan_steps

    device = device or find_device()
    large = device.name == "cuda"
    sizes = dict(zip(SIZES, SHAPES[name] if large else TINY, strict=True))

    # the same random weights for everyone
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device.name):  # which is also where the weights are drawn
            theirs = AutoModel.from_config(_config(name, sizes), attn_implementation="sdpa")
        theirs = theirs.to(torch.bfloat16).eval()
        theirs.save_pretrained(folder)
        encoder = Encoder.from_pretrained(folder, dtype=torch.bfloat16).to(device.name)

    # passages as long as those of MS MARCO, longest first: packed in steps, and padded in batches
    passages = PASSAGES if large else 40
    lengths = torch.empty(passages).log_normal_(4.2, 0.45).clamp(8, 256).long().sort(descending=True).values
    ids = torch.randint(5, 30_000, (int(lengths.sum()),))
    tokens = Ragged(ids, lengths)
    steps = [tokens[rows].to(device.name) for rows in plan_steps(lengths, TOKENS_PER_STEP)]
    batches = [
        tuple(part.to(device.name) for part in tokens[at : at + BATCH].to_padded())
        for at in range(0, passages, BATCH)
    ]

    @torch.inference_mode()
    def padded() -> Any:
        return [theirs(input_ids=i, attention_mask=m.long()).last_hidden_state[m] for i, m in batches]

    @torch.inference_mode()
    def packed(backend: str) -> Any:
        encoder.attention = backend
        return [encoder(step).values for step in steps]

    # time only what agrees with transformers
    ways: dict[str, Callable[[], Any]] = {"transformers": padded}
    expected, cosines = torch.cat(padded()).float(), {}
    for backend in ("flash", "sdpa") if large else ("sdpa",):
        contender = f"irkit {backend}"
        try:
            got = torch.cat(packed(backend)).float()
        except Exception as error:  # one backend may be missing
            yield {"what": name, "contender": contender, "error": f"{type(error).__name__}: {error!s:.200}"}
            continue
        cosines[contender] = float(torch.nn.functional.cosine_similarity(expected, got, dim=-1).min())
        if cosines[contender] < 0.99:
            wrong = f"cosine {cosines[contender]:.4f} with transformers; not timed"
            yield {"what": name, "contender": contender, "error": wrong}
            continue
        ways[contender] = partial(packed, backend)

    # operations of the linear maps and of attention, for the share of what the device can do
    layers, d, inner = sizes["num_hidden_layers"], sizes["hidden_size"], sizes["intermediate_size"]
    products = 4 * d * d + (3 if name.startswith("Modern") else 2) * d * inner
    flops = layers * (2 * len(ids) * products + 4 * d * float((lengths.double() ** 2).sum()))
    for contender, seconds, faster in _turns(ways, "transformers", lambda way: device.seconds(way)[0]):
        limit = share(measure_limits(device), "bfloat16", 2.0 * len(ids) * d, flops, seconds)
        yield {
            "what": name,
            "contender": contender,
            "cosine": cosines.get(contender, 1.0),
            "tokens/s": len(ids) / seconds,
            "x transformers": faster,
            **limit,
        }


def measure_texts(device: Device | None = None) -> Iterator[Row]:
    """Yield texts per second from strings to vectors in memory of the CPU, against sentence-transformers."""
    from irkit import Model

    device = device or find_device()
    large = device.name == "cuda"

    # texts of made-up words, as long as passages of MS MARCO
    draw = random.Random(0)
    words = [f"w{number}" for number in range(30_000)]
    lengths = [min(254, max(6, int(draw.lognormvariate(4.2, 0.45)))) for _ in range(TEXTS if large else 20)]
    texts = [" ".join(draw.choices(words, k=length)) for length in lengths]

    # one model for both
    what = "strings to vectors, MiniLM-L6"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, words, dict(zip(SIZES, SHAPES["MiniLM-L6"] if large else TINY, strict=True)))
        model = Model.from_pretrained(folder, dtype="bfloat16", device=device.name)
        ways: dict[str, Callable[[], Any]] = {"irkit": lambda: model.encode_document(texts)}

        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            yield {"what": what, "contender": PEER, "skipped": f"needs {error.name}"}
        else:
            settings = {"dtype": torch.bfloat16}
            theirs = SentenceTransformer(str(folder), device=device.name, model_kwargs=settings)
            ways[PEER] = lambda: theirs.encode(texts, convert_to_tensor=True).float().cpu().numpy()

    # time only what agrees
    cosine = 1.0
    if PEER in ways:
        vectors = [torch.as_tensor(way()) for way in ways.values()]
        vectors = [each - each.mean(0) for each in vectors]  # vectors of random weights are all alike
        cosine = float(torch.nn.functional.cosine_similarity(*vectors, dim=-1).min())
        if cosine < 0.99:
            raise ValueError(f"vectors of irkit and of {PEER} have a cosine of {cosine:.4f}; not timed")
    for contender, seconds, faster in _turns(ways, PEER, lambda way: device.seconds(way)[1]):
        yield {
            "what": what,
            "contender": contender,
            "cosine": cosine,
            "texts/s": len(texts) / seconds,
            f"x {PEER}": faster,
        }


def write_model(folder: Path, words: list[str], sizes: dict[str, int]) -> None:
    """Write a BERT of random weights that pools the mean, in the layout of sentence-transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoModel

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: number for number, piece in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(piece, vocabulary[piece]) for piece in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "BertTokenizerFast", "model_max_length": 256, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    AutoModel.from_config(_config("BERT", sizes)).save_pretrained(folder)
    steps = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def _config(name: str, sizes: dict[str, int]) -> Any:
    from transformers import BertConfig, ModernBertConfig

    kind = ModernBertConfig if name.startswith("Modern") else BertConfig
    torch.manual_seed(0)
    return kind(vocab_size=30_522, pad_token_id=0, **sizes)


def _turns(
    ways: dict[str, Callable[[], Any]], baseline: str, clock: Callable[[Callable[[], Any]], float]
) -> Iterator[tuple[str, float, float | None]]:
    """Return the median seconds of each way, and its median speed-up over the baseline across rounds."""
    for way in ways.values():
        way()
    rounds = [{name: clock(way) for name, way in ways.items()} for _ in range(ROUNDS)]
    for name in ways:
        faster = median(each[baseline] / each[name] for each in rounds) if baseline in ways else None
        yield name, median(each[name] for each in rounds), faster
