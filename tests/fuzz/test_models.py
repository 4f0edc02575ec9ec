"""Model directories that were damaged, or made by somebody else: an error, or vectors of finite numbers."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from irkit import Model
from irkit.data import Document, Query
from irkit.encoder import Encoder
from irkit.encoder.presets import tite_settings
from irkit.model.cross_encoder import CrossEncoder
from irkit.tokenizer import Tokenizer

TEXTS = ["neural search of the index, 42", "a", ""]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
POSITIONS = {"max_position_embeddings": 64}
PLAIN = {**POSITIONS, **SIZES}
GROUPED = {"num_key_value_heads": 1, "head_dim": 16, **POSITIONS}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}
FAMILIES: dict[str, dict[str, Any]] = {  # beside BERT; electra runs in the adapter
    "electra": POSITIONS,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, **POSITIONS},
    "modernbert": {"pad_token_id": 0, "local_attention": 8, **POSITIONS},
    "mpnet": POSITIONS,
    "deberta-v2": {"position_buckets": 8, "conv_kernel_size": 3, **RELATIVE, **POSITIONS},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2},
    "nomic_bert": POSITIONS,
    "gte": POSITIONS,
    "qwen3": GROUPED,
    "gemma3_text": {"use_bidirectional_attention": True, **GROUPED, **WINDOW},
}


def dense(tiny: Path, folder: Path) -> None:
    model = Model.from_pretrained(tiny)
    model.save_pretrained(folder)
    place = folder / "2_Dense"
    place.mkdir()
    write(
        place / "config.json", {"in_features": 32, "out_features": 16, "activation_function": "torch.nn.Tanh"}
    )
    save(place, {"linear.weight": torch.randn(16, 32), "linear.bias": torch.zeros(16)})
    modules = read(folder / "modules.json")
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    modules.append({"idx": 3, "name": "3", "path": "3_N", "type": "sentence_transformers.models.Normalize"})
    write(folder / "modules.json", modules)


def multi_vector(tiny: Path, folder: Path) -> None:
    pooling = {"pool_factor": 2.0}
    Model.multi_vector(tiny, {"dim": 8}, {"document_length": 12, "token_pooling": pooling}).save_pretrained(
        folder
    )


def pylate(tiny: Path, folder: Path) -> None:
    Model.multi_vector(tiny, {"dim": 8}).save_pretrained(folder)
    names = {"Dense": "pylate.models.Dense.Dense"}
    modules = [
        entry | {"type": names.get(entry["type"].rpartition(".")[2], entry["type"])}
        for entry in read(folder / "modules.json")
        if entry["type"].rpartition(".")[2] in ("Transformer", "Dense")
    ]
    write(folder / "modules.json", modules)
    settings = {"query_prefix": "[unused0] ", "document_prefix": "[unused1] ", "query_length": 8}
    more = {"document_length": 16, "attend_to_expansion_tokens": True, "skiplist_words": [",", "."]}
    write(folder / "config_sentence_transformers.json", {"model_type": "ColBERT", **settings, **more})


def stanford(tiny: Path, folder: Path) -> None:
    projection = {"dim": 8, "bias": False}
    config = {"query_expansion": {"length": 8}, "document_length": 20}
    model = Model.multi_vector(tiny, projection, config, markers=("[Q] ", "[D] "))
    model.save_pretrained(folder, format="stanford")


def splade(tiny: Path, folder: Path) -> None:
    config = transformers.BertConfig(vocab_size=read(tiny / "config.json")["vocab_size"], **PLAIN)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer(tiny, folder)


def sparse(tiny: Path, folder: Path) -> None:
    Model.sparse(tiny).save_pretrained(folder)


def static(tiny: Path, folder: Path) -> None:
    weights = {"index": 2.0, "text": 0.5}
    Model.sparse(tiny).set_queries({"kind": "static", "weights": weights}).save_pretrained(folder)


def bare(tiny: Path, folder: Path) -> None:
    shutil.copytree(tiny, folder)


def tite(tiny: Path, folder: Path) -> None:
    size = read(tiny / "config.json")["vocab_size"]
    settings = tite_settings(1, layers=3, hidden_size=32, heads=2, max_length=8, vocab_size=size)
    Encoder(settings).save_pretrained(folder)
    tokenizer(tiny, folder)


def family(tiny: Path, folder: Path, model_type: str) -> None:
    """An encoder of transformers with random weights."""
    settings = {"vocab_size": read(tiny / "config.json")["vocab_size"], **SIZES, **FAMILIES[model_type]}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    kind = transformers.AutoModelForTextEncoding if model_type == "t5" else transformers.AutoModel
    kind.from_config(config).save_pretrained(folder)
    tokenizer(tiny, folder)


def several_heads(tiny: Path, folder: Path) -> None:
    heads = {
        "dense": {"pooling": "cls"},
        "sparse": "token_weight",
        "multi_vector": {"projection": {"dim": 8}},
    }
    Model.several(tiny, heads).save_pretrained(folder)


def bge_m3(tiny: Path, folder: Path) -> None:
    heads = {"dense": {"pooling": "cls"}, "sparse": "token_weight"}
    Model.several(tiny, heads).heads["dense"].save_pretrained(folder)
    for name, rows in (("sparse", 1), ("colbert", 8)):
        torch.save(torch.nn.Linear(32, rows).state_dict(), folder / f"{name}_linear.pt")


def model2vec(tiny: Path, folder: Path) -> None:
    folder.mkdir()
    size = read(tiny / "config.json")["vocab_size"]
    mapping = torch.randint(0, 9, (size,))
    save(folder, {"embeddings": torch.randn(9, 6), "mapping": mapping, "weights": torch.rand(size)})
    write(
        folder / "config.json", {"normalize": True, "model_type": "model2vec", "embedding_dtype": "float32"}
    )
    tokenizer(tiny, folder)


def static_embedding(tiny: Path, folder: Path) -> None:
    place = folder / "0_StaticEmbedding"
    place.mkdir(parents=True)
    save(place, {"embedding.weight": torch.randn(read(tiny / "config.json")["vocab_size"], 6)})
    tokenizer(tiny, place)
    kind = "sentence_transformers.models.StaticEmbedding"
    write(folder / "modules.json", [{"idx": 0, "name": "0", "path": place.name, "type": kind}])


def lora(tiny: Path, folder: Path) -> None:
    shutil.copytree(tiny, folder)
    target = "base_model.model.encoder.layer.0.attention.self.query"
    factors = {f"{target}.lora_A.weight": torch.randn(2, 32), f"{target}.lora_B.weight": torch.randn(32, 2)}
    safetensors.torch.save_file(factors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"], "bias": "none"}
    write(folder / "adapter_config.json", {"base_model_name_or_path": str(tiny), **settings})


def cross_encoder(tiny: Path, folder: Path) -> None:
    size = read(tiny / "config.json")["vocab_size"]
    config = transformers.BertConfig(vocab_size=size, num_labels=1, **PLAIN)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer(tiny, folder)


FORMATS: dict[str, Callable[[Path, Path], None]] = {
    "sentence_transformers": dense,
    "multi_vector": multi_vector,
    "pylate": pylate,
    "stanford": stanford,
    "splade": splade,
    "sparse": sparse,
    "static": static,
    "huggingface": bare,
    "tite": tite,
    "several_heads": several_heads,
    "bge_m3": bge_m3,
    "model2vec": model2vec,
    "static_embedding": static_embedding,
    "lora": lora,
    "cross_encoder": cross_encoder,
    **{name: partial(family, model_type=name) for name in FAMILIES},
}


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def write(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data))


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    from irkit.utils.weights import write_weights

    write_weights(folder, tensors)


def tokenizer(tiny: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, folder / name)


def score(folder: Path) -> list[Tensor]:
    """The scores of a few pairs."""
    documents = [Document(str(number), text) for number, text in enumerate(TEXTS)]
    scores = CrossEncoder(str(folder))([Query("1", "a"), Query("2", "")], [documents, documents])
    return [*map(torch.from_numpy, scores)]


def encode(folder: Path) -> list[Tensor]:
    """All numbers of what the model makes of a few texts."""
    model = Model.from_pretrained(folder, device="cpu")
    found: list[Tensor] = []
    for run in (model.encode_query, model.encode_document):
        output = run(TEXTS)
        for outputs in output.values() if isinstance(output, dict) else [output]:
            for part in outputs if isinstance(outputs, list) else [outputs]:
                numbers = torch.as_tensor(part)
                found.append((numbers.to_dense() if numbers.is_sparse else numbers).float())
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_directory(
    name: str,
    fuzz: Any,
    mutate: SimpleNamespace,
    tiny_bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))  # of models that are merged
    torch.manual_seed(0)
    folder, use = tmp_path / "model", score if name == "cross_encoder" else encode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FORMATS[name](tiny_bert, folder)
        wanted = use(folder)
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    plain = sorted(file for file in files if file.endswith((".json", ".metadata")))
    values = {file: json.loads(files[file]) for file in plain}

    def make(random: Random) -> list[Any]:
        case = []
        for _ in range(random.randint(1, 3)):
            if random.random() < 0.7:
                file = random.choice(plain)
                case.append([file, mutate.choose(random, values[file])])
            else:
                file = random.choice(sorted(files))
                case.append([file, mutate.choose(random, files[file])])
        return case

    def run(case: list[Any]) -> str:
        changed: dict[str, Any] = {}
        for file, edit in case:
            if file not in files:
                continue
            is_json = edit[0] in ("set", "drop", "deep")
            now = changed.get(file, values[file] if is_json and file in values else files[file])
            if isinstance(now, bytes) != is_json:
                changed[file] = mutate.apply(now, edit)
        with tempfile.TemporaryDirectory() as place:
            os.environ["IRKIT_CACHE"] = f"{place}/cache"
            copy = Path(place) / "model"
            shutil.copytree(folder, copy)
            for file, content in changed.items():
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                (copy / file).write_bytes(data)
            found = use(copy)
        if not all(bool(part.isfinite().all()) for part in found):
            return "wrong"
        same = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        return "right" if same else "different"

    fuzz(f"model_{name}", make, run)


def byte_level() -> tokenizers.Tokenizer:
    words = ["<s>", "</s>", "<unk>", "<mask>", "<pad>", *"aestrhniocdlmu", "Ġ", "th", "the", "er", "Ġthe"]
    ids = {word: number for number, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e"), ("e", "r"), ("Ġ", "the")]
    made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", dropout=None, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("_"), normalizers.Strip()])
    return made


def unigram() -> tokenizers.Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("\u2581", -1.0),
        *((letter, -3.0) for letter in "aestrhniocdlmu"),
        ("the", -2.0),
    ]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace("a", "e")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    made.enable_padding(pad_id=0, pad_token="<unk>", pad_to_multiple_of=8)
    made.enable_truncation(20, stride=2)
    return made


def word_level() -> tokenizers.Tokenizer:
    words = {word: number for number, word in enumerate(["[UNK]", "[SEP]", "[CLS]", "search", "the", ","])}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.add_tokens(
        [AddedToken("of the", lstrip=True, normalized=False), AddedToken("index", single_word=True)]
    )
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.StripAccents()])
    split = pre_tokenizers.Split(tokenizers.Regex("[aeiou]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True), pre_tokenizers.Punctuation(), split]
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 2))
    return made


@pytest.mark.parametrize("build", [byte_level, unigram, word_level])
def test_a_tokenizer(build: Any, fuzz: Any, mutate: SimpleNamespace, tmp_path: Path) -> None:
    """The library behind it is of Rust, whose panics are no exceptions and whose aborts end the process."""
    whole = json.loads(build().to_str())
    config = {"model_max_length": 16, "unk_token": "[UNK]", "truncation_side": "right", "do_lower_case": True}
    files = {"tokenizer.json": whole, "tokenizer_config.json": config}

    def make(random: Random) -> list[Any]:
        names = random.choices(list(files), [5, 1], k=random.randint(1, 3))
        return [[name, mutate.choose(random, files[name])] for name in names]

    def run(case: list[Any]) -> str:
        changed = dict(files)
        for name, edit in case:
            changed[name] = mutate.apply(changed[name], edit)
        with tempfile.TemporaryDirectory() as place:
            for name, value in changed.items():
                write(Path(place) / name, value)
            made = Tokenizer.from_pretrained(place)
        highest = made.highest_id()
        ids = made([*TEXTS, "the of the index", "x" * 300], "a prompt ").values
        made.token_spans("the search")
        return "different" if int(ids.max() if len(ids) else -1) <= highest else "wrong"

    run([])
    fuzz(f"tokenizer_{build.__name__}", make, run)
