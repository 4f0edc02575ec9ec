"""The numbers of the papers in recipes and studies, each with its place in the paper."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import ttest_rel

from irkit.config import as_list
from irkit.errors import IrkitError
from irkit.evaluation.significance import correct_p
from irkit.study.study_config import StudyConfig
from irkit.study.study_run import check_study
from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
from irkit.training.train_recipe import TrainRecipe
from irkit.vocabulary.transfer_recipe import VocabularyRecipe

EXAMPLES = Path(__file__).parents[1] / "examples"
STUDY_ROWS = Path(__file__).parent / "golden" / "study_rows.txt"  # what every study varies, and its place
Numbers = dict[str, tuple[Any, str]]  # key -> value, place in the paper

# "train" stands for the arguments that the trainer gets, defaults included
MEMORY = "of this implementation: changes memory or speed, not the result"
DATA = "the data of the paper, or the public ones nearest to them"


def collections(*names: str) -> Numbers:
    """The judged collections that a recipe measures the finished model on."""
    sources = {
        "DL19": "msmarco-passage/trec-dl-2019/judged",
        "MS MARCO dev": "msmarco-passage/dev/small",
        "DL20": "msmarco-passage/trec-dl-2020/judged",
        "COVID": "beir/trec-covid",
        "SciFact": "beir/scifact/test",
        "NFCorpus": "beir/nfcorpus/test",
        "FiQA": "beir/fiqa/test",
    }
    found: Numbers = {}
    for number, name in enumerate(names):
        found[f"evaluation.{number}.source"] = (f"ir_datasets:{sources[name]}", DATA)
        found[f"evaluation.{number}.name"] = (name, "its name in the tables")
        found[f"evaluation.{number}.at_end"] = (True, "no model is chosen on it")
    return found


def files(**names: str) -> Numbers:
    return {f"data.0.{key}": (name, DATA) for key, name in names.items()}


MSMARCO = {"corpus": "ir_datasets:msmarco-passage", "queries": "ir_datasets:msmarco-passage/train"}
BGE = {
    part: f"hf:lightonai/ms-marco-en-bge:{name}:train"
    for part, name in {"source": "train", "queries": "queries", "corpus": "documents"}.items()
}
SCHEDULE: Numbers = {
    "lr_scheduler_type": ("cosine_with_min_lr", "TITE 4.1: a cosine decay"),
    "lr_scheduler_kwargs.min_lr_rate": (0.02, "TITE 4.1: down to 2 %"),
    "warmup_steps": (3000, "TITE 4.1: 3k warm-up steps"),
    "weight_decay": (0.01, "TITE 4.1: the default of PyTorch's AdamW"),
    "adam_beta1": (0.9, "TITE 4.1: likewise"),
    "adam_beta2": (0.999, "TITE 4.1: likewise"),
    "adam_epsilon": (1e-8, "TITE 4.1: likewise"),
    "bf16": (True, MEMORY),
    "save_steps": (5000, MEMORY),
}
TITE_MODEL: Numbers = {
    "model.kind": ("new", "TITE 4.1: random weights"),
    "model.preset": ("2-late", "TITE 4.1: kernel and stride of 2, the last layers"),
    "model.tokenizer": ("google-bert/bert-base-uncased", "TITE 4.1"),
    "model.similarity": ("dot", "the authors' configuration"),
}
TITE_FINE_TUNING: Numbers = {
    **{f"train.{key}": pair for key, pair in SCHEDULE.items()},
    "train.max_steps": (50_000, "TITE 4.1: 50k steps"),
    "train.per_device_train_batch_size": (256, "TITE 4.1: 256 queries a batch"),
    "train.gradient_cache_size": (512, MEMORY),
    "train.learning_rate": (1e-5, "TITE 4.1"),
    **files(source="monoelectra.jsonl", **MSMARCO),
    "data.0.documents": (8, "TITE 4.1: 8 passages a query"),
    "data.0.sampling": ("random", "TITE 4.1: randomly sampled"),
    "model.query_length": (32, "TITE 4.1: queries are cut at 32 tokens"),
    "model.similarity": ("dot", "the authors' configuration"),
    "losses.0.kind": ("margin_mse", "TITE 3.4"),
    "losses.1.kind": ("kl", "TITE 3.4"),
    "losses.2.kind": ("infonce", "TITE 3.4"),
    "losses.2.threshold": (3.0, "theta of the authors' configuration"),
    **collections("DL19", "DL20"),
    "evaluation.2.source": ("ir_datasets:beir/arguana", "TITE 4.2: the first of BEIR-14"),
    "evaluation.2.at_end": (True, "no model is chosen on it"),
}
TITE_PRETRAINING: Numbers = {
    **{f"pretraining.train.{key}": pair for key, pair in SCHEDULE.items()},
    "pretraining.texts": (["hf:HuggingFaceFW/fineweb-edu"], "TITE 4.1"),
    "pretraining.train.optim": ("adamw_torch", "TITE 4.1: AdamW"),
    "pretraining.train.max_steps": (200_000, "TITE 4.1: 200k steps"),
    "pretraining.train.per_device_train_batch_size": (256, "TITE 4.1"),
    "pretraining.train.learning_rate": (1e-4, "TITE 4.1"),
    "pretraining.max_length": (512, "TITE 4.1: inputs are cut at 512 tokens"),
    "pretraining.objectives.0.kind": ("masked_auto_encoding", "TITE 3.3"),
    "pretraining.objectives.0.mask_rate": (0.5, "TITE 4.1: 50 % of what the decoder sees"),
    "pretraining.objectives.1.kind": ("bag_of_words", "TITE 3.3"),
}
ENSEMBLE_DISTIL = "naver/splade, config_splade++_cocondenser_ensembledistil"
INFERENCE_FREE = "Shen et al. 2025, arXiv 2504.14839, as the recipe's head says"
SPLADE: Numbers = {
    "model.kind": ("sparse", ENSEMBLE_DISTIL),
    "model.max_length": (256, ENSEMBLE_DISTIL),
    **files(source="cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl.gz", format="pickle", **MSMARCO),
    "data.0.qrels": ("ir_datasets:msmarco-passage/train", DATA),
    "data.0.documents": (2, "Margin-MSE of a positive and a negative"),
    "data.0.sampling": ("random", ENSEMBLE_DISTIL),
    "losses.0.kind": ("margin_mse", ENSEMBLE_DISTIL),
    "regularizers.0.kind": ("flops", ENSEMBLE_DISTIL),
    "regularizers.0.query": (0.5, ENSEMBLE_DISTIL),
    "regularizers.0.document": (0.4, ENSEMBLE_DISTIL),
    "regularizers.0.schedule": ("quadratic", ENSEMBLE_DISTIL),
    "regularizers.0.warmup": (0.3333, f"{ENSEMBLE_DISTIL}: T of 50,000 steps"),
    "train.max_steps": (150_000, ENSEMBLE_DISTIL),
    "train.per_device_train_batch_size": (128, ENSEMBLE_DISTIL),
    "train.gradient_cache_size": (64, MEMORY),
    "train.learning_rate": (2e-5, ENSEMBLE_DISTIL),
    "train.lr_scheduler_type": ("linear", ENSEMBLE_DISTIL),
    "train.warmup_steps": (6000, ENSEMBLE_DISTIL),
    "train.weight_decay": (0.01, ENSEMBLE_DISTIL),
    "train.bf16": (True, MEMORY),
    "train.save_steps": (10_000, MEMORY),
}
C4: Numbers = {
    "pretraining.texts": (["hf:allenai/c4:en:train"], "MVA 3: C4"),
    "pretraining.objectives.0.kind": ("masked_language_modeling", "MVA 2.3"),
    "pretraining.objectives.1.kind": ("next_sentence", "MVA 2.3"),
    "pretraining.masking.rate": (0.15, "BERT's; MVA says none"),
    "pretraining.masking.emphasis": (1.0, "no token is new"),
    "pretraining.max_length": (112, "MVA 3"),
    "pretraining.train.per_device_train_batch_size": (8192, "MVA 3"),
    "pretraining.train.optim": ("adamw_torch", "MVA 3: Adam"),
    "pretraining.train.learning_rate": (3e-4, "MVA 3"),
    "pretraining.train.weight_decay": (0.0, "MVA 3: Adam"),
    "pretraining.train.lr_scheduler_type": ("linear", "BERT's; MVA says none"),
    "pretraining.train.bf16": (True, MEMORY),
    "pretraining.train.save_steps": (5000, MEMORY),
    "train.seed": (1, "the paper says none"),
}

MVA: Numbers = {
    "model.name": ("google-bert/bert-base-uncased", "MVA 3: BERT-base; the paper pre-trains its own"),
    "model.kind": ("multi_vector", "MVA 2"),
    "model.projection": (None, "MVA 2.1: attention projects"),
    "model.normalize": (False, "MVA 2.1: attention reads hidden states"),
    "model.config.query_length": (32, "MVA 3"),
    "model.config.document_length": (112, "MVA 3"),
    "model.config.skiplist_words": ([], "MVA 2.1: all tokens"),
    "interaction.kind": ("mva", "MVA 2.1"),
    "interaction.dim": (128, "MVA table 5, MVA1"),
    **files(source="triples.train.small.tsv"),
    "data.0.shuffle": (False, "the file is in random order"),
    "data.0.streaming": (True, MEMORY),
    "losses.0.kind": ("cross_entropy", "MVA 2.3: softmax loss of triples"),
    "losses.0.temperature": (1.0, "MVA 2.3: a softmax without a temperature"),
    "train.seed": (1, "the paper says none"),
    "train.max_steps": (40_000, "the paper says none"),
    "train.per_device_train_batch_size": (256, "MVA 3: 256 triples"),
    "train.gradient_cache_size": (128, MEMORY),
    "train.learning_rate": (3e-5, "MVA 3"),
    "train.weight_decay": (0.0, "MVA 3: Adam"),
    "train.bf16": (True, MEMORY),
    "train.save_steps": (5000, MEMORY),
    "evaluation.0.source": ("ir_datasets:msmarco-passage/dev/small", "MVA 3: MS MARCO dev"),
    "evaluation.0.name": ("MS MARCO dev", "its name in the tables"),
    "evaluation.0.measures": ("RR@10", "MVA 3: MRR@10"),
    "evaluation.0.run": ("bm25.trec", "MVA 5: the top 1,000 of BM25"),
    "evaluation.0.at_end": (True, "no model is chosen on it"),
}

RECIPES: dict[str, Numbers] = {
    "tite_finetuning": TITE_FINE_TUNING
    | {
        "model.name": ("webis/tite-2-late", "the authors' checkpoint"),
        "model.max_length": (512, "TITE 4.1: passages at 512"),
        "train.seed": (0, "the paper says none"),
    },
    "tite_pretraining": TITE_FINE_TUNING
    | TITE_PRETRAINING
    | TITE_MODEL
    | {
        "pretraining.masking": (None, "TITE 4.1: without masking the input"),
        "pretraining.objectives.0.average": ("texts", "TITE 3.3: the mean over the tokens of a text"),
        "model.variant": ("paper", "TITE 3.1: rotary positions only"),
        "model.sizes.max_length": (512, "TITE 4.1: passages at 512"),
        "train.seed": (42, "the paper says none"),
    },
    "tite_pretraining_released": TITE_PRETRAINING
    | TITE_MODEL
    | {
        "model.variant": ("released", "the authors' configuration"),
        "pretraining.masking.rate": (0.3, "likewise"),
        "pretraining.masking.masked": (1.0, "likewise"),
        "pretraining.masking.random": (0.0, "likewise"),
        "pretraining.train.per_device_train_batch_size": (128, "likewise"),
        "pretraining.train.max_grad_norm": (1.0, "likewise"),
        "train.seed": (42, "the paper says none"),
    },
    "colbert_study": {
        "model.name": ("jhu-clsp/ettin-encoder-32m", "ColBERT projections 5.2"),
        "model.kind": ("multi_vector", "5.2"),
        "model.projection.depth": (1, "4.1: the usual linear projection"),
        "model.projection.dim": (128, "5.2"),
        "model.config.query_expansion.length": (32, "5.2: queries of 32 tokens"),
        "model.config.document_length": (300, "5.2: documents of 300 tokens"),
        "model.markers": (["[Q] ", "[D] "], "PyLate, its library"),
        **files(**BGE),
        "data.0.sample": (640_000, "5.2: 640,000 rows drawn at random"),
        "data.0.limit": (None, "5.2: not the first ones"),
        "data.0.documents": (16, "5.2: 16-way tuples"),
        "data.0.sampling": ("random", "5.2"),
        "losses.0.kind": ("kl", "5.2"),
        "losses.0.normalize_scores": ("minmax", "PyLate's default"),
        "train.seed": (42, "5.3: one of five"),
        "train.per_device_train_batch_size": (64, "5.2"),
        "train.gradient_cache_size": (256, MEMORY),
        "train.learning_rate": (1e-4, "5.2"),
        "train.lr_scheduler_type": ("linear", "5.2"),
        "train.warmup_steps": (0.1, "5.2: 10 % of the steps"),
        "train.weight_decay": (0.0, "not said; the default of its library"),
        "train.num_train_epochs": (1, "10,000 steps of 64 are 640,000 rows"),
        "train.bf16": (True, MEMORY),
        "train.save_steps": (1000, MEMORY),
        **collections("DL19", "DL20", "COVID", "SciFact", "NFCorpus", "FiQA"),
        **{f"evaluation.{n}.index.kind": ("plaid", "5.4") for n in range(6)},
        **{f"evaluation.{n}.index.nbits": (4, "5.4: 4 bits") for n in range(6)},
    },
    "mva": MVA,
    "mva_dual_encoder": C4
    | {
        "model.kind": ("new", "MVA 3: pre-trained from random weights"),
        "model.preset": ("bert-base", "MVA 3: 12 layers, 12 heads, 768"),
        "model.tokenizer": ("google-bert/bert-base-uncased", "of BERT; MVA says none"),
        "model.similarity": ("dot", "MVA 1: the dot product"),
        "model.query_length": (32, "MVA 3"),
        "model.document_length": (112, "MVA 3"),
        "pretraining.train.max_steps": (100_000, "MVA 3"),
        "pretraining.train.warmup_steps": (10_000, "BERT's; MVA says none"),
    },
    "mva_pretraining": MVA
    | C4
    | {
        "model.name": ("dual-encoder", "MVA 3: from the dual encoder"),
        "pretraining.train.max_steps": (20_000, "MVA 3"),
        "pretraining.train.warmup_steps": (2_000, "a tenth, as of the dual encoder"),
    },
    "splade_ensemble_distil": SPLADE
    | {
        "model.name": ("Luyu/co-condenser-marco", ENSEMBLE_DISTIL),
        "train.seed": (123, ENSEMBLE_DISTIL),
        **collections("DL19", "DL20"),
    },
    "vocabulary_transfer": SPLADE
    | {
        "model.name": ("answerdotai/ModernBERT-base", "Vocabulary gaps 5.2"),
        "vocabulary.texts": (["wikipedia.jsonl.gz", "bookcorpus.jsonl.gz"], "5.3"),
        "vocabulary.target": ("google-bert/bert-base-uncased", "5.2"),
        "vocabulary.initialization.initialization": ("semantic", "4.2.1"),
        "vocabulary.initialization.bias": ("prior", "4.2.1: eq. 10"),
        "vocabulary.adaptation.preset": ("20k", "5.3"),
        "vocabulary.adaptation.max_length": (128, "5.3"),
        "vocabulary.adaptation.masking.rate": (0.3, "5.3"),
        "vocabulary.adaptation.masking.emphasis": (2.0, "5.3: lambda"),
        "vocabulary.adaptation.train_head": (False, "4.2.3: only the embedding layer"),
        "vocabulary.adaptation.train.max_steps": (20_000, "5.3"),
        "vocabulary.adaptation.train.learning_rate": (3e-4, "5.3"),
        "vocabulary.adaptation.train.warmup_steps": (0.2, "5.3: 4,000 of 20,000"),
        "vocabulary.adaptation.train.lr_scheduler_type": ("cosine", "5.3"),
        "vocabulary.adaptation.train.total_batch": (2048, "5.3"),
        "vocabulary.adaptation.train.bf16": (True, MEMORY),
        "vocabulary.calibration.rate": (0.4, "5.3: about 40 % at first"),
        "train.seed": (42, "5.3"),
        **collections("DL19", "MS MARCO dev"),
        **{f"evaluation.{n}.measures": ("nDCG@10 RR@10 R@1000", "5.1") for n in (0, 1)},
        **{f"evaluation.{n}.k": (1000, "5.1: R@1000") for n in (0, 1)},
        **{f"evaluation.{n}.document_length": (512, "5.3") for n in (0, 1, 2)},
        "evaluation.2.source": ("ir_datasets:beir/arguana", "5.1: the first of BEIR-13"),
        "evaluation.2.at_end": (True, "no model is chosen on it"),
    },
    "vocabulary_chemistry": {
        key: pair
        for key, pair in SPLADE.items()
        if key.startswith("regularizers")
        or key in ("model.kind", "model.max_length", "train.learning_rate", "train.lr_scheduler_type")
    }
    | {
        "model.name": ("answerdotai/ModernBERT-base", "Vocabulary gaps 6.6"),
        "vocabulary.texts": (["dolma-chem.jsonl.gz"], "6.6: dolma-chem"),
        "vocabulary.target.algorithm": ("bpe", "6.6: BPE"),
        "vocabulary.target.size": (30_000, "6.6: the middle one of five sizes"),
        "vocabulary.initialization.initialization": ("subtoken", "6.6"),
        "vocabulary.initialization.bias": ("prior", "4.2.1: eq. 10"),
        "vocabulary.adaptation.preset": ("20k", "5.3: the schedule"),
        "vocabulary.adaptation.masking.rate": (0.3, "5.3"),
        "vocabulary.adaptation.masking.emphasis": (2.0, "5.3: lambda"),
        "vocabulary.adaptation.train_head": (False, "4.2.3: only the embedding layer"),
        "vocabulary.adaptation.train.max_steps": (3000, "6.6: 3k steps"),
        "vocabulary.adaptation.train.bf16": (True, MEMORY),
        "vocabulary.calibration.rate": (0.4, "5.3: about 40 % at first"),
        **files(source="chemistry-pairs.jsonl"),
        "data.0.documents": (1, "6.6: pairs"),
        "losses.0.kind": ("infonce", "6.6"),
        "train.seed": (42, "A.1"),
        "train.num_train_epochs": (1, "not said"),
        "train.warmup_steps": (0.04, "6,000 of 150,000"),
        "train.weight_decay": (0.01, ENSEMBLE_DISTIL),
        "train.per_device_train_batch_size": (128, ENSEMBLE_DISTIL),
        "train.gradient_cache_size": (64, MEMORY),
        "train.bf16": (True, MEMORY),
        "train.save_steps": (1000, MEMORY),
        **{f"evaluation.{n}.source": (name, "6.6") for n, name in enumerate(("ChemHotpotQA", "ChemNQ"))},
        **{f"evaluation.{n}.split": ("test", "6.6") for n in range(2)},
        **{f"evaluation.{n}.document_length": (512, "5.3") for n in range(2)},
        **{f"evaluation.{n}.at_end": (True, "no model is chosen on it") for n in range(2)},
    },
    "inference_free": {
        "model.name": ("Luyu/co-condenser-marco", INFERENCE_FREE),
        "model.kind": ("sparse", INFERENCE_FREE),
        "model.max_length": (256, INFERENCE_FREE),
        "model.config.activation": ("log1p_log1p_relu", INFERENCE_FREE),
        "model.queries.kind": ("static", INFERENCE_FREE),
        "model.queries.weights": ("idf.json", INFERENCE_FREE),
        "model.queries.frozen": (True, INFERENCE_FREE),
        **files(**BGE),
        "data.0.documents": (2, INFERENCE_FREE),
        "data.0.sampling": ("random", INFERENCE_FREE),
        "losses.0.kind": ("kl", INFERENCE_FREE),
        "regularizers.0.kind": ("flops", INFERENCE_FREE),
        "regularizers.0.document": (0.08, INFERENCE_FREE),
        "regularizers.0.threshold": (150, INFERENCE_FREE),
        "regularizers.0.schedule": ("quadratic", INFERENCE_FREE),
        "regularizers.0.warmup": (0.4, INFERENCE_FREE),
        "train.seed": (42, "not said"),
        "train.per_device_train_batch_size": (160, INFERENCE_FREE),
        "train.gradient_cache_size": (64, MEMORY),
        "train.max_steps": (100_000, INFERENCE_FREE),
        "train.learning_rate": (2e-5, INFERENCE_FREE),
        "train.lr_scheduler_type": ("linear", INFERENCE_FREE),
        "train.warmup_steps": (6000, INFERENCE_FREE),
        "train.weight_decay": (0.01, INFERENCE_FREE),
        "train.bf16": (True, MEMORY),
        "train.save_steps": (10_000, MEMORY),
        **collections("SciFact", "NFCorpus", "FiQA"),
    },
}
LISTS = {"data", "losses", "regularizers", "evaluation", "objectives"}  # keys that take one part or a list


def listed(node: Any) -> Any:
    """Return a recipe in which every key of ``LISTS`` has a list."""
    if isinstance(node, Mapping):
        return {key: listed(as_list(value) if key in LISTS else value) for key, value in node.items()}
    return [listed(part) for part in node] if isinstance(node, list) else node


def leaves(node: Any, *path: str | int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the keys that lead to every setting, and its value."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, *path, key)
    elif isinstance(node, list) and any(isinstance(part, Mapping | list) for part in node):
        for number, part in enumerate(node):
            yield from leaves(part, *path, number)
    else:
        yield path, node


def look_up(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node[part] if isinstance(node, Mapping) else node[int(part)]
    return getattr(node, "value", node)  # enumerations of transformers as their names


def mutants(keys: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key of every setting, with dots, and a copy in which this setting is another."""
    for (*path, last), value in leaves(keys):
        if path[:1] == ["prepare"]:  # where files come from
            continue
        mutant: Any = copy.deepcopy(keys)
        node = mutant
        for part in path:
            node = node[part]
        node[last] = changed(value)
        yield ".".join(map(str, [*path, last])), mutant


def changed(value: Any) -> Any:
    if isinstance(value, bool | None):
        return not value
    if isinstance(value, list | dict):
        return [*value, "other"]
    try:
        return value + 1 if isinstance(value, int | float) else float(value) + 1
    except ValueError:
        return f"{value}-other"


def read(name: str) -> dict[str, Any]:
    keys: dict[str, Any] = listed(yaml.safe_load((EXAMPLES / "recipes" / f"{name}.yaml").read_text()))
    return keys


def differing(keys: Mapping[str, Any], numbers: Numbers, out: Path) -> list[str]:
    """The keys of a recipe whose values are not the paper's, after all defaults."""
    stages = {"pretraining": PretrainRecipe, "vocabulary": VocabularyRecipe}
    recipe: Any = next((stages[key] for key in stages if key in keys), TrainRecipe).resolve(keys)
    node = {**recipe.model_dump(mode="json"), "train": vars(recipe.arguments(out))}
    if "pretraining" in keys:
        node["pretraining"]["train"] = vars(recipe.pretraining.arguments(out))
    if "vocabulary" in keys:
        train = recipe.vocabulary.adaptation.arguments(out, {})
        batch = train.per_device_train_batch_size * train.gradient_accumulation_steps
        node["vocabulary"]["adaptation"]["train"] = {**vars(train), "total_batch": batch}
    return [key for key, (value, _) in numbers.items() if look_up(node, key) != value]


@pytest.fixture(autouse=True)
def _any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are the same on a CPU without bfloat16, which trains in float32."""
    monkeypatch.setattr("irkit.training.training_arguments.prefers_bfloat16", lambda _: True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_numbers_of_its_paper(name: str, tmp_path: Path) -> None:
    assert differing(read(name), RECIPES[name], tmp_path) == []


def test_no_setting_of_a_full_size_recipe_is_unguarded() -> None:
    names = {path.stem for path in (EXAMPLES / "recipes").glob("*.yaml")} - {"notes", "three_heads_local"}
    assert RECIPES.keys() == {name for name in names if not name.endswith("_local")}
    for name, numbers in RECIPES.items():
        assert {key for key, _ in mutants(read(name))} <= numbers.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_change_of_any_setting_is_seen(name: str, tmp_path: Path) -> None:
    unseen = []
    for key, mutant in mutants(read(name)):
        try:
            found = differing(mutant, RECIPES[name], tmp_path)
        except (IrkitError, ValueError):  # no longer a recipe
            continue
        unseen += [key] if key not in found else []
    assert unseen == []


def test_a_wrong_number_is_seen(tmp_path: Path) -> None:
    wrong = {"train.learning_rate": 1e-3, "train.weight_decay": 0.1, "data.0.documents": 2}
    for key, mutant in mutants(read("colbert_study")):
        if key in wrong:
            assert differing(mutant, RECIPES["colbert_study"], tmp_path) == [key]


def guard(study: StudyConfig) -> list[str]:
    """The lines of STUDY_ROWS about a study: baseline and seeds, then what each row changes."""
    seeds = ", ".join(map(str, study.seeds))
    rows = [f"{row} | {json.dumps(changes, ensure_ascii=False)}" for row, changes in study.changes().items()]
    return [f"baseline {study.baseline}; seeds {seeds}; keep_models {study.keep_models}", *rows]


def guarded() -> dict[str, list[str]]:
    """The lines of STUDY_ROWS by study; the heading of a study ends in its place in the paper."""
    sections = STUDY_ROWS.read_text(encoding="utf-8").strip().split("\n\n")
    found = {}
    for section in sections:
        heading, *rows = section.splitlines()
        name, _, place = heading.partition(": ")
        assert place, heading
        found[name] = rows
    return found


def test_studies_have_the_rows_of_the_papers() -> None:
    found = {path.stem: guard(StudyConfig.resolve(path)) for path in (EXAMPLES / "studies").glob("*.yaml")}
    assert found == guarded()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((EXAMPLES / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_runs_of_a_study_have_recipes(path: Path, tmp_path: Path) -> None:
    assert check_study(StudyConfig.resolve(path), tmp_path / "study")  # as --dry-run does


def test_every_study_is_on_a_page() -> None:
    pages = "".join((EXAMPLES.parent / "docs" / f"{name}.md").read_text() for name in ("papers", "studies"))
    assert [path.name for path in (EXAMPLES / "studies").glob("*.*") if path.name not in pages] == []


def test_the_page_counts_the_runs_of_each_study() -> None:
    page = (EXAMPLES.parent / "docs" / "papers.md").read_text()
    told = {name: int(runs) for name, runs in re.findall(r"`(\w+)\.yaml`[^|]*\| (\d+) \|", page)}
    assert {name for name in guarded() if "_table" in name} <= told.keys()
    found = {}
    for name in told:
        study = StudyConfig.resolve(EXAMPLES / "studies" / f"{name}.yaml")
        found[name] = len(study.changes()) * len(study.seeds)
    assert told == found


@pytest.mark.slow
def test_a_change_of_any_row_is_seen() -> None:
    rows = guarded()
    unseen = []
    for path in (EXAMPLES / "studies").glob("*.yaml"):
        keys = yaml.safe_load(path.read_text())
        recipe = yaml.safe_load((path.parent / keys.pop("recipe")).read_text())
        for key, mutant in mutants({key: value for key, value in keys.items() if key != "name"}):
            try:
                found = guard(StudyConfig.resolve({**mutant, "recipe": recipe}))
            except (IrkitError, ValueError, KeyError):  # no longer a study
                continue
            unseen += [f"{path.stem}: {key}"] if found == rows[path.stem] else []
    assert unseen == []


def test_the_parts_of_a_transfer_are_tested_against_the_transfer() -> None:
    """What docs/vocabulary_transfer.md says of its ablation follows from the seeds of its table."""
    root = EXAMPLES.parent
    lines = (root / "benchmarks" / "results" / "study_vocabulary.jsonl").read_text().splitlines()
    rows = {row.get("variant"): row for row in map(json.loads, lines)}
    seeds = {name: [float(seed) for seed in row["seeds"].split(", ")] for name, row in rows.items() if name}
    names = ["No APC", "No OMC", "No PDA"]
    ps = [float(ttest_rel(seeds[name], seeds["Transfer"]).pvalue) for name in names]
    corrected = correct_p(ps, "holm")
    page = " ".join((root / "docs" / "vocabulary_transfer.md").read_text().split())
    assert [f"{p:.2g}" for p in ps] == ["0.00058", "0.79", "0.047"]
    assert "p = 0.0006, 0.0017 corrected" in page
    assert "-0.002 (p = 0.79)" in page
    assert "+0.021 (p = 0.047, corrected 0.094)" in page
    assert list(corrected) == pytest.approx([0.0017, 0.79, 0.094], rel=0.03)
