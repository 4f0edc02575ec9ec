"""The numbers of the papers in the recipes that stand for them, each with its place in the paper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from irkit.evaluation.significance import correct_p
from irkit.study.study_config import StudyConfig
from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
from irkit.training.train_recipe import TrainRecipe
from irkit.training.training_arguments import TrainingArguments
from irkit.vocabulary.transfer_recipe import VocabularyRecipe

EXAMPLES = Path(__file__).parents[1] / "examples"
Numbers = dict[str, tuple[Any, str]]  # key -> value, place in the paper

# "train" stands for the arguments that the trainer gets, defaults included
SCHEDULE: Numbers = {
    "train.lr_scheduler_type": ("cosine_with_min_lr", "TITE 4.1: a cosine decay"),
    "train.lr_scheduler_kwargs": ({"min_lr_rate": 0.02}, "TITE 4.1: down to 2 %"),
    "train.warmup_steps": (3000, "TITE 4.1: 3k warm-up steps"),
    "train.weight_decay": (0.01, "TITE 4.1: the default of PyTorch's AdamW"),
    "train.adam_beta1": (0.9, "TITE 4.1: likewise"),
    "train.adam_beta2": (0.999, "TITE 4.1: likewise"),
    "train.adam_epsilon": (1e-8, "TITE 4.1: likewise"),
}
TITE_FINE_TUNING: Numbers = {
    **SCHEDULE,
    "train.max_steps": (50_000, "TITE 4.1: 50k steps"),
    "train.per_device_train_batch_size": (256, "TITE 4.1: 256 queries a batch"),
    "train.learning_rate": (1e-5, "TITE 4.1"),
    "data.0.documents": (8, "TITE 4.1: 8 passages a query"),
    "data.0.sampling": ("random", "TITE 4.1: randomly sampled"),
    "model.query_length": (32, "TITE 4.1: queries are cut at 32 tokens"),
    "losses.0.kind": ("margin_mse", "TITE 3.4"),
    "losses.1.kind": ("kl", "TITE 3.4"),
    "losses.2.kind": ("infonce", "TITE 3.4"),
    "losses.2.threshold": (3.0, "theta of the authors' configuration"),
}
TITE_PRETRAINING: Numbers = {
    **SCHEDULE,
    "train.optim": ("adamw_torch", "TITE 4.1: AdamW"),
    "train.max_steps": (200_000, "TITE 4.1: 200k steps"),
    "train.per_device_train_batch_size": (256, "TITE 4.1"),
    "train.learning_rate": (1e-4, "TITE 4.1"),
    "max_length": (512, "TITE 4.1: inputs are cut at 512 tokens"),
    "masking": (None, "TITE 4.1: without masking the input"),
    "objectives.0.kind": ("masked_auto_encoding", "TITE 3.3"),
    "objectives.0.mask_rate": (0.5, "TITE 4.1: 50 % of what the decoder sees"),
    "objectives.1.kind": ("bag_of_words", "TITE 3.3"),
}
RECIPES: dict[str, Numbers] = {
    "tite_finetuning": TITE_FINE_TUNING | {"model.max_length": (512, "TITE 4.1: passages at 512")},
    "tite_pretraining": TITE_FINE_TUNING | {"model.sizes.max_length": (512, "TITE 4.1: passages at 512")},
    "colbert_study": {
        "model.name": ("jhu-clsp/ettin-encoder-32m", "ColBERT projections 5.2"),
        "model.config.query_expansion.length": (32, "5.2: queries of 32 tokens"),
        "model.config.document_length": (300, "5.2: documents of 300 tokens"),
        "data.0.sample": (640_000, "5.2: 640,000 rows drawn at random"),
        "data.0.limit": (None, "5.2: not the first ones"),
        "data.0.documents": (16, "5.2: 16-way tuples"),
        "losses.0.kind": ("kl", "5.2"),
        "train.per_device_train_batch_size": (64, "5.2"),
        "train.learning_rate": (1e-4, "5.2"),
        "train.lr_scheduler_type": ("linear", "5.2"),
        "train.warmup_steps": (0.1, "5.2: 10 % of the steps"),
        "train.weight_decay": (0.0, "not said; the default of its library"),
        "train.num_train_epochs": (1, "10,000 steps of 64 are 640,000 rows"),
    },
    "mva": {
        "model.config.query_length": (32, "MVA 3"),
        "model.config.document_length": (112, "MVA 3"),
        "interaction.dim": (128, "MVA table 5, MVA1"),
        "losses.0.kind": ("cross_entropy", "MVA 2.3: softmax loss of triples"),
        "train.per_device_train_batch_size": (256, "MVA 3: 256 triples"),
        "train.learning_rate": (3e-5, "MVA 3"),
        "train.weight_decay": (0.0, "MVA 3: Adam"),
    },
    "vocabulary_transfer": {
        "model.name": ("answerdotai/ModernBERT-base", "Vocabulary gaps 5.2"),
        "model.max_length": (256, "5.3"),
        "vocabulary.target": ("google-bert/bert-base-uncased", "5.2"),
        "vocabulary.adaptation.max_length": (128, "5.3"),
        "vocabulary.adaptation.masking.rate": (0.3, "5.3"),
        "vocabulary.adaptation.masking.emphasis": (2.0, "5.3: lambda"),
        "vocabulary.calibration.rate": (0.4, "5.3: about 40 % at first"),
        "losses.0.kind": ("margin_mse", "5.3"),
        "regularizers.0.kind": ("flops", "5.3"),
        "train.max_steps": (150_000, "5.3"),
        "train.seed": (42, "5.3"),
    },
    "splade_ensemble_distil": {
        "model.max_length": (256, "naver/splade, config_splade++_cocondenser_ensembledistil"),
        "losses.0.kind": ("margin_mse", "likewise"),
        "regularizers.0.query": (0.5, "likewise"),
        "regularizers.0.document": (0.4, "likewise"),
        "train.max_steps": (150_000, "likewise"),
        "train.per_device_train_batch_size": (128, "likewise"),
        "train.learning_rate": (2e-5, "likewise"),
        "train.warmup_steps": (6000, "likewise"),
        "train.weight_decay": (0.01, "likewise"),
    },
}
ADAPTATION: Numbers = {
    "max_steps": (20_000, "5.3"),
    "learning_rate": (3e-4, "5.3"),
    "warmup_steps": (0.2, "5.3: 4,000 of 20,000"),
    "lr_scheduler_type": ("cosine", "5.3"),
}


def plain(value: Any) -> Any:
    """Enumerations of transformers as their names."""
    return getattr(value, "value", value)


def differing(recipe: Any, arguments: TrainingArguments, numbers: Numbers) -> dict[str, Any]:
    """What the recipe says where the paper says something else."""
    found = {}
    for key, (value, _) in numbers.items():
        node: Any = {**recipe.model_dump(), "train": vars(arguments)}
        for part in key.split("."):
            node = node[part] if isinstance(node, Mapping) else node[int(part)]
        if plain(node) != value:
            found[key] = plain(node)
    return found


def read(name: str) -> Any:
    kinds: dict[str, type[TrainRecipe]] = {
        "tite_pretraining": PretrainRecipe,
        "vocabulary_transfer": VocabularyRecipe,
    }
    return kinds.get(name, TrainRecipe).resolve(EXAMPLES / "recipes" / f"{name}.yaml")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_numbers_of_its_paper(name: str, tmp_path: Path) -> None:
    recipe = read(name)
    assert differing(recipe, recipe.arguments(tmp_path), RECIPES[name]) == {}


@pytest.mark.parametrize("name", ["tite_pretraining", "tite_pretraining_released"])
def test_a_pretraining_has_the_numbers_of_its_paper(name: str, tmp_path: Path) -> None:
    plan = PretrainRecipe.resolve(EXAMPLES / "recipes" / f"{name}.yaml").pretraining
    released = {"masking", "train.per_device_train_batch_size"}  # as the recipe says in its first lines
    numbers = {key: TITE_PRETRAINING[key] for key in TITE_PRETRAINING.keys() - released}
    wanted = TITE_PRETRAINING if name == "tite_pretraining" else numbers
    assert differing(plan, plan.arguments(tmp_path), wanted) == {}


def test_an_adaptation_has_the_numbers_of_its_paper(tmp_path: Path) -> None:
    arguments = read("vocabulary_transfer").vocabulary.adaptation.arguments(tmp_path, {})
    found = {key: plain(getattr(arguments, key)) for key in ADAPTATION}
    assert found == {key: value for key, (value, _) in ADAPTATION.items()}
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 2048  # 5.3


def test_a_wrong_number_is_seen(tmp_path: Path) -> None:
    path = EXAMPLES / "recipes" / "colbert_study.yaml"
    for wrong in ("train.learning_rate=1e-3", "train.weight_decay=0.1", "data.documents=2"):
        recipe = TrainRecipe.resolve(path, [wrong])
        assert len(differing(recipe, recipe.arguments(tmp_path), RECIPES["colbert_study"])) == 1


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


def test_studies_have_the_rows_of_the_papers() -> None:
    def rows(name: str) -> list[str]:
        return list(StudyConfig.resolve(EXAMPLES / "studies" / f"{name}.yaml").changes())

    sizes = (56, 28, 14)  # MVA, table 1: timesteps; 112 tokens joined by 2, 4 and 8
    assert set(rows("mva_table1")) == {
        "All tokens",
        *(f"{name}, size={size}" for name in ("First k", "Multiple CLS") for size in sizes),
        *(f"Temporal pooling, {size}" for size in sizes),
    }
    assert rows("mva_table2") == [f"dim={width}" for width in (768, 128, 64, 32, 16)]
    study = StudyConfig.resolve(EXAMPLES / "studies" / "mva_table1.yaml")
    joined = [changes["interaction"].get("size") for name, changes in study.variants.items()]
    assert joined == [None, *(112 // size for size in sizes)]
    assert (
        len(rows("tite_table2")) == 6
    )  # TITE, table 2: S-BERT, RetroMAE, CLS-BERT, and TITE with both or one
    table3 = StudyConfig.resolve(EXAMPLES / "studies" / "tite_table3.yaml").changes().values()
    assert [changes["model.preset"] for changes in table3] == [
        "2-late",
        "2-staggered",
        "3-late",
        "3-staggered",
        "2-late-pre",
        "2-late-post",
        "2-late-upscale",
    ]
