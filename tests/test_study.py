"""Variants of a study, its statistics and its report, without a training."""

from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from irkit.errors import BadValueError, ConfigError, CorruptError, IrkitError, StorageError
from irkit.evaluation.measures import Evaluation
from irkit.evaluation.significance import compare
from irkit.heads.projection import PRESETS, projection_config
from irkit.study import StudyConfig, check_study, compare_variants, write_report
from irkit.study.results import paired_p, tabulate, tabulate_costs
from irkit.study.study_config import folder_name
from irkit.study.trial import trials
from irkit.training.result_files import read_results, write_costs

RECIPE = {"model": {"name": "m", "kind": "multi_vector"}, "evaluation": {"source": "beir"}}
STUDY = {
    "recipe": RECIPE,
    "variants": {"linear": {"model.projection": "linear"}, "slow": {"train.learning_rate": 1e-6}},
    "baseline": "linear",
    "seeds": [1, 2],
}


def study_of(**changes):
    return StudyConfig.parse({**STUDY, **changes})


def test_variants_then_every_combination_of_the_grid():
    grid = {
        "family": {"FFN": {"model.projection.glu": False}, "GLU": {"model.projection.glu": True}},
        "model.projection.depth": [2, 3],
    }
    study = study_of(grid=grid, exclude=[{"family": "GLU", "model.projection.depth": 3}])
    assert study.changes() == {
        **STUDY["variants"],
        "FFN, depth=2": {"model.projection.glu": False, "model.projection.depth": 2},
        "FFN, depth=3": {"model.projection.glu": False, "model.projection.depth": 3},
        "GLU, depth=2": {"model.projection.glu": True, "model.projection.depth": 2},
    }
    runs = list(study.recipes())
    assert [(variant, seed) for variant, seed, _ in runs[:6]] == [
        *((variant, 1) for variant in study.changes()),
        ("linear", 2),
    ]
    assert runs[-1][2] == {
        "model": {**RECIPE["model"], "projection": {"glu": True, "depth": 2}},
        "evaluation": RECIPE["evaluation"],
        "train": {"seed": 2},
    }
    assert study.recipe == RECIPE  # as it was


def test_what_belongs_to_the_whole_grid_may_be_excluded_by_one_axis():
    study = study_of(grid={"a.b": [1, 2], "c": {"x": {}, "y": {}}}, exclude=[{"c": "x"}, {"a.b": 2}])
    assert list(study.changes()) == ["linear", "slow", "b=1, y"]
    equal = study_of(grid={"a.b": [1, 2]}, exclude=[{"a.b": 2.0}])
    assert list(equal.changes()) == ["linear", "slow", "b=1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "liner"}, "baseline: no variant 'liner'; did you mean 'linear'?"),
        ({"variants": {"linear": {}}}, "expected two variants or more, got 1"),
        ({"seeds": [1, 2, 1]}, "seed '1' is there twice"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"variants": {"linear": {}, "Linear ": {}}}, "folder of a variant 'linear' is there twice"),
        ({"grid": {"linear": {"linear": {}}}}, "variant 'linear' is in variants and in grid"),
        ({"grid": {"model.projection": []}}, "axis 'model.projection' has no values"),
        ({"grid": {"d": {"2": {}}}, "exclude": [{"e": 2}]}, "the grid has no axis 'e'; known: d"),
        ({"grid": {"d": {"2": {}}}, "exclude": [{"d": 3}]}, "axis 'd' has no 3; known: 2"),
        ({"seed": [1]}, "unknown key 'seed'; did you mean 'seeds'?"),
    ],
)
def test_wrong_studies_are_refused(changes, message):
    with pytest.raises(ConfigError) as refused:
        study_of(**changes)
    assert message in str(refused.value)


def test_a_change_that_does_not_fit_the_recipe_names_its_variant():
    study = study_of(variants={"linear": {}, "odd": {"model.name.depth": 2}})
    with pytest.raises(ConfigError, match=r"variant 'odd': .*'name' is a value and has no keys below it"):
        list(study.recipes())


def test_a_study_file_and_its_recipe(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {name: m}\ntrain: {learning_rate: 1e-5, max_steps: 10}\n")
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**STUDY, "recipe": "base.yaml"}))
    study = StudyConfig.resolve(tmp_path / "study.yaml", ["train.max_steps=3", "train.bf16=true"])
    assert study.recipe["train"] == {"learning_rate": 1e-5, "max_steps": 3, "bf16": True}
    assert next(iter(study.recipes()))[2]["train"]["seed"] == 1
    assert StudyConfig.resolve(study) == study
    with pytest.raises(ConfigError, match="recipe"):
        StudyConfig.resolve({**STUDY, "recipe": 3})
    with pytest.raises(StorageError, match=r"none\.yaml"):
        StudyConfig.resolve({**STUDY, "recipe": "none.yaml"})


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans() | st.none()


@given(st.dictionaries(st.text(min_size=1), NUMBERS | st.text() | st.lists(NUMBERS), max_size=3))
def test_values_reach_the_recipe_as_they_are(values):
    study = study_of(variants={"linear": {}, "odd": {"model.extra": values}})
    assert list(study.recipes())[1][2]["model"]["extra"] == values


@given(st.text())
def test_folder_names_stay_in_their_folder(variant):
    name = folder_name(variant)
    assert name
    assert "/" not in name
    assert name not in (".", "..")


def values_of(seed: int, queries: int, shift: float = 0.0) -> dict[str, float]:
    values = np.random.default_rng(seed).random(queries) + shift
    return {f"q{number}": float(value) for number, value in enumerate(values)}


def runs_of(variants: int, datasets: int, seeds: int = 2) -> dict:
    """Random values: variant -> seed -> (measure, dataset) -> query; datasets of 7, 8, ... queries."""
    return {
        f"v{v}": {
            seed: {
                ("nDCG@10", f"d{d}"): values_of(100 * v + 10 * seed + d, 7 + d, v / 20)
                for d in range(datasets)
            }
            for seed in range(seeds)
        }
        for v in range(variants)
    }


def test_one_dataset_is_tested_as_evaluations_are():
    runs = runs_of(4, 1, seeds=3)
    means = {}
    for variant, seeds in runs.items():
        rows = [scores["nDCG@10", "d0"] for scores in seeds.values()]
        of_queries = {query: float(np.mean([row[query] for row in rows])) for query in rows[0]}
        mean = float(np.mean(list(of_queries.values())))
        means[variant] = Evaluation({"nDCG@10": mean}, {"nDCG@10": of_queries})
    baseline = means.pop("v0")
    cells = tabulate(runs, "v0")
    assert cells[0].p is None
    for cell, row in zip(cells[1:], compare(baseline, means), strict=True):
        assert cell.variant == row.system
        assert (cell.mean, cell.difference, cell.p, cell.corrected_p) == pytest.approx(row[2:6], abs=1e-12)
        assert cell.significant() == row.significant
        of_seeds = [np.mean(list(run["nDCG@10", "d0"].values())) for run in runs[cell.variant].values()]
        assert list(cell.seeds.values()) == pytest.approx(of_seeds)
        assert cell.deviation == pytest.approx(np.std(of_seeds, ddof=1))


def test_the_average_weighs_datasets_equally():
    runs = runs_of(2, 2)
    cells = {(cell.variant, cell.dataset): cell for cell in tabulate(runs, "v0")}
    assert [dataset for _, dataset in cells] == [
        *["d0"] * 2,
        *["d1"] * 2,
        *["average"] * 2,
        *["geometric mean"] * 2,
    ]
    for seed in range(2):
        parts = [cells["v1", name].seeds[seed] for name in ("d0", "d1")]
        assert cells["v1", "average"].seeds[seed] == pytest.approx(np.mean(parts))
        assert cells["v1", "geometric mean"].seeds[seed] == pytest.approx(np.sqrt(np.prod(parts)))
    parts = [cells["v1", name].difference for name in ("d0", "d1")]
    assert cells["v1", "average"].difference == pytest.approx(np.mean(parts))
    assert cells["v1", "geometric mean"].p is None


def test_a_group_of_datasets_counts_once():
    """Its parts weigh half of what others weigh, in the mean and in its test."""
    runs = runs_of(2, 3)
    cells = {(c.variant, c.dataset): c for c in tabulate(runs, "v0", groups={"d0": "g", "d2": "g"})}
    assert list(dict.fromkeys(dataset for _, dataset in cells)) == ["g", "d1", "average", "geometric mean"]
    alone = {(c.variant, c.dataset): c for c in tabulate(runs, "v0")}
    of_parts = [alone["v1", name].difference for name in ("d0", "d1", "d2")]
    assert cells["v1", "g"].difference == pytest.approx((of_parts[0] + of_parts[2]) / 2)
    assert cells["v1", "average"].difference == pytest.approx(np.dot(of_parts, [0.25, 0.5, 0.25]))
    values = [
        np.mean([[*seed["nDCG@10", name].values()] for seed in runs["v1"].values()], 0)
        - np.mean([[*seed["nDCG@10", name].values()] for seed in runs["v0"].values()], 0)
        for name in ("d0", "d1", "d2")
    ]
    assert cells["v1", "average"].p == pytest.approx(paired_p(values, [0.25, 0.5, 0.25]))
    assert cells["v1", "average"].p != pytest.approx(paired_p(values))


def test_labels_of_a_grid_that_are_the_same():
    with pytest.raises(ConfigError, match=r"axis 'train\.x' has 'x=2' twice"):
        list(study_of(grid={"train.x": [2, "2"]}).recipes())
    grid = {"a": {"x, y": {}, "x": {}}, "b": {"z": {}, "y, z": {}}}
    with pytest.raises(ConfigError, match="two combinations are named 'x, y, z'"):
        list(study_of(grid=grid).recipes())


def test_costs_are_means_without_a_test():
    costs = {
        "v0": {0: {("FLOPS", "d"): 2.0}, 1: {("FLOPS", "d"): 4.0}},
        "v1": {0: {("FLOPS", "d"): 5.0}},
        "v2": {},
    }
    base, other = tabulate_costs(costs, "v0")
    assert (base.mean, other.mean, other.difference, other.p) == (3, 5, 2, None)
    assert tabulate_costs(costs, "v0", ["e"]) == []


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(-1, 1))
def test_p_of_one_dataset_is_that_of_the_paired_test(seed, queries, shift):
    first, second = np.random.default_rng(seed).random((2, queries))
    expected = ttest_rel(first + shift, second).pvalue
    assert paired_p([first + shift - second]) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_p_of_several_datasets_by_hand():
    one, two = np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0, 4.0, 6.0])
    # variances of the means 1/3 and 5/3; freedom 2^2 / ((1/9)/2 + (25/9)/3) = 4.0755; t = 5 / sqrt(2)
    from scipy.stats import t

    freedom = 4 / (1 / 18 + 25 / 27)
    assert paired_p([one, two]) == pytest.approx(2 * t.sf(5 / np.sqrt(2), freedom), rel=1e-12)
    assert paired_p([np.zeros(3), np.zeros(2)]) == 1
    assert paired_p([np.ones(3), np.zeros(2)]) == 0
    with pytest.raises(BadValueError, match="one query"):
        paired_p([one, np.ones(1)])


def test_the_test_of_the_average_keeps_its_level():
    # datasets of very different sizes and spreads, where the variants do not differ: 5 % are found different
    generator = np.random.default_rng(0)
    ps = [
        paired_p([generator.normal(0, 1, 8), generator.normal(0, 0.2, 60), generator.normal(0, 3, 20)])
        for _ in range(4000)
    ]
    found = np.mean(np.array(ps) < 0.05)
    assert abs(found - 0.05) < 3 * np.sqrt(0.05 * 0.95 / 4000)  # three standard errors


def test_runs_on_other_queries_are_refused():
    runs = runs_of(2, 1)
    del runs["v1"][1]["nDCG@10", "d0"]["q3"]
    with pytest.raises(BadValueError, match=r"'v1' with seed 1 has 6 queries, the first run 7"):
        tabulate(runs, "v0")
    with pytest.raises(BadValueError, match="'d9'"):
        tabulate(runs_of(2, 1), "v0", ["d9"])


def test_datasets_may_have_measures_of_their_own():
    runs = runs_of(2, 2)
    for seeds in runs.values():
        for scores in seeds.values():
            scores["RR@10", "d2"] = scores["RR@10", "d0"] = scores["nDCG@10", "d0"]
    found = {(cell.measure, cell.dataset) for cell in tabulate(runs, "v0")}
    means = {"average", "geometric mean"}
    assert found == {("nDCG@10", name) for name in {"d0", "d1"} | means} | {
        ("RR@10", name) for name in {"d0", "d2"} | means
    }
    plain = {cell for cell in map(str, tabulate(runs_of(2, 2), "v0")) if "nDCG@10" in cell}
    assert plain == {cell for cell in map(str, tabulate(runs, "v0")) if "nDCG@10" in cell}


def test_a_dataset_of_one_query_is_not_tested():
    runs = runs_of(2, 2)
    for seeds in runs.values():
        for scores in seeds.values():
            scores["nDCG@10", "d1"] = {"q0": scores["nDCG@10", "d1"]["q0"]}
    tested = {(cell.dataset, cell.variant): cell.p for cell in tabulate(runs, "v0")}
    assert tested["d0", "v1"] is not None
    assert tested["d1", "v1"] is None
    assert tested["average", "v1"] is None


def test_representations_are_compared_where_a_variant_has_them():
    """A model alone stands beside the head of a model with several heads; nothing is averaged over heads."""
    runs = runs_of(2, 2)
    together = {
        seed: {("nDCG@10", f"d/{name}"): scores["nDCG@10", "d0"] for name in ("dense", "fusion")}
        for seed, scores in runs["v0"].items()
    }
    alone = {seed: {("nDCG@10", "d/dense"): scores["nDCG@10", "d0"]} for seed, scores in runs["v1"].items()}
    cells = tabulate({"together": together, "alone": alone}, "together", ["d"])
    assert [(cell.variant, cell.dataset) for cell in cells] == [
        ("together", "d/dense"),
        ("alone", "d/dense"),
        ("together", "d/fusion"),
    ]
    assert cells[1].p == tabulate({"v0": runs["v0"], "v1": runs["v1"]}, "v0", ["d0"])[1].p
    costs = {"together": {1: {("floats", "d/dense"): 3.0}}, "alone": {1: {("floats", "d/dense"): 4.0}}}
    assert len(tabulate_costs(costs, "together", ["d"])) == 2


def write_runs(out, study, runs):
    (out / "study.yaml").write_text(study.to_yaml())
    for trial in trials(study, out):
        if scores := runs.get(trial.variant, {}).get(trial.seed):
            trial.folder.mkdir(parents=True)
            keys = ("measure", "dataset", "query_id", "value")
            rows = [
                dict(zip(keys, (*key, *item), strict=True)) for key, v in scores.items() for item in v.items()
            ]
            trial.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
            (trial.folder / "modules.json").touch()


def three_variants(**changes):
    variants = {"v0": {}, "v1": {"train.bf16": True}, "v2": {"model.name": "a|b"}}
    return study_of(name="Three", variants=variants, baseline="v0", seeds=[0, 1], **changes)


def test_the_report_shows_what_was_found(tmp_path):
    runs = runs_of(3, 2)
    runs["v1"][0] = {key: {q: v + 1 for q, v in row.items()} for key, row in runs["v0"][0].items()}
    runs["v1"][1] = {key: {q: v + 1.001 for q, v in row.items()} for key, row in runs["v0"][1].items()}
    del runs["v2"][1]
    study = three_variants()
    write_runs(tmp_path, study, runs)
    trial = next(trial for trial in trials(study, tmp_path) if (trial.variant, trial.seed) == ("v2", 1))
    trial.folder.parent.mkdir(exist_ok=True)
    trial.beside(".failed").write_text("exit code 2: no memory")
    done = next(trial for trial in trials(study, tmp_path) if trial.finished)
    done.beside(".failed").write_text("exit code 1: an attempt before")
    assert done.failure is None
    cells = {(cell.variant, cell.dataset): cell for cell in write_report(tmp_path)}
    report = (tmp_path / "report.md").read_text()
    assert cells["v1", "d0"].corrected_p < 1e-4
    base, better, partial = (cells[name, "d0"] for name in ("v0", "v1", "v2"))
    assert "# Three\n" in report
    assert "3 variants, seeds 0, 1: 5 of 6 runs finished." in report
    assert f"| v0 (baseline) | {base.mean:.4f} ± {base.deviation:.4f} |" in report
    assert f"| v1 | **{better.mean:.4f}** ± {better.deviation:.4f}† |" in report
    assert f"| v2 | {partial.mean:.4f} (1 of 2) |" in report
    assert f"| v1 | {better.difference:+.4f} (<0.0001) |" in report
    assert '| v2 | `model.name: "a\\|b"` |' in report
    assert "* v2, seed 1: exit code 2: no memory" in report
    assert "for the 2 variants tested" in report
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    assert lines[1]["significant"] is True
    assert lines[1]["seeds"] == {str(seed): value for seed, value in better.seeds.items()}
    root = ET.fromstring((tmp_path / "nDCG-10.svg").read_text())
    groups = [group for group in root.iter() if group.get("id", "").startswith("PathCollection")]
    marks = [shape for group in groups for shape in group.iter() if shape.tag.endswith("use")]
    assert len(marks) == 9 + 3 * 5  # means, seeds
    assert {"v0", "v1", "v2", "d0", "average", "better"} <= {text.text for text in root.iter() if text.text}
    assert root.get("width", "").endswith("pt")


def test_every_p_comes_from_the_stored_scores(tmp_path, command):
    """The file of scores is enough to compare two variants, of one study or of two."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_runs(tmp_path / name, three_variants(), runs_of(3, 2))
    cells = {(cell.variant, cell.dataset): cell for cell in write_report(tmp_path / "one", "v1")}
    write_report(tmp_path / "two")
    stored = tmp_path / "two" / "scores.jsonl.gz"
    packed = stored.read_bytes()
    write_report(tmp_path / "two")
    assert stored.read_bytes() == packed
    a, b = f"{tmp_path / 'one'}:v1", f"{stored}:v2"
    again = {(cell.variant, cell.dataset): cell for cell in compare_variants(a, b)}
    for dataset in ("d0", "d1", "average"):
        assert again[b, dataset].p == pytest.approx(cells["v2", dataset].p)
        assert again[b, dataset].corrected_p == again[b, dataset].p  # one test
    code, out, _ = command("study", "compare", a, b)
    assert code == 0
    assert f"{again[b, 'd0'].p:.6f}"[:5] in out
    assert compare_variants(str(stored), a)[0].variant == str(stored)  # the baseline of the study
    for words, message in [
        ((a, a), "twice"),
        ((a, f"{stored}:v9"), "no results of 'v9'"),
        ((a, str(tmp_path / "none")), "none"),
        ((a, f"{tmp_path / 'one' / 'report.md'}:v1"), "no scores of a study"),
    ]:
        with pytest.raises(IrkitError, match=message):
            compare_variants(*words)
    code, _, err = command("study", "compare", a)
    assert code == 2
    assert "expected two variants" in err


def test_costs_are_in_the_report(tmp_path):
    study = three_variants()
    write_runs(tmp_path, study, runs_of(3, 1))
    for trial in trials(study, tmp_path):
        if trial.folder.exists():
            write_costs({"d0": {"FLOPS": 1.5 + trial.seed}}, trial.folder / "costs.jsonl")
    cells = [cell for cell in write_report(tmp_path) if cell.measure == "FLOPS"]
    assert [cell.mean for cell in cells] == [2.0, 2.0, 2.0]
    report = (tmp_path / "report.md").read_text()
    assert "## Cost: FLOPS\n\n| variant | d0 |\n| --- | ---: |\n| v0 | 2 |" in report
    assert not (tmp_path / "FLOPS.svg").exists()


def test_the_tokens_per_word_of_a_transfer_are_a_cost(tmp_path):
    from irkit.vocabulary.transfer import FACTS

    study = three_variants()
    write_runs(tmp_path, study, runs_of(3, 1))
    for number, trial in enumerate(trials(study, tmp_path)[1:3], 1):
        write_costs({"d0": {"FLOPS": 1.0}}, trial.folder / "costs.jsonl")
        facts = {"fragmentation": {"source": 1.5, "target": 1 + number / 4}}
        (trial.folder / FACTS).write_text(json.dumps(facts))
        trial.drop_model()
    cells = [cell for cell in write_report(tmp_path) if cell.measure == "tokens per word"]
    assert [(cell.variant, cell.dataset, cell.mean) for cell in cells] == [
        ("v1", "d0", 1.25),
        ("v2", "d0", 1.5),
    ]


def test_what_a_training_looks_at_does_not_count(tmp_path):
    evaluation = [{"source": "tuning"}, {"source": "x/d1", "at_end": True}]
    study = three_variants(recipe={**RECIPE, "evaluation": evaluation})
    write_runs(tmp_path, study, runs_of(3, 2))
    assert {cell.dataset for cell in write_report(tmp_path)} == {"d1"}


def test_the_collections_of_a_variant_count(tmp_path):
    """A variant may be measured on collections, and in groups, that the recipe does not name."""
    variants = {
        "v0": {"evaluation": [{"source": "x/d0", "at_end": True}, {"source": "tuning"}]},
        "v1": {"evaluation": [{"source": f"x/d{i}", "at_end": True, "group": "d"} for i in range(2)]},
    }
    study = study_of(recipe=RECIPE, variants=variants, baseline="v0", seeds=[0, 1])
    runs = runs_of(2, 2)
    runs["v0"] = {
        seed: {key: row for key, row in scores.items() if key[1] == "d0"}
        | {("nDCG@10", "tuning"): {"q": 1.0}}
        for seed, scores in runs["v0"].items()
    }
    del study.variants["v1"]["evaluation"][0]
    for scores in runs["v1"].values():
        del scores["nDCG@10", "d0"]
    write_runs(tmp_path, study, runs)
    assert [(cell.variant, cell.dataset) for cell in write_report(tmp_path)] == [("v0", "d0"), ("v1", "d")]


def test_a_group_counts_once_for_each_head(tmp_path):
    evaluation = [{"source": f"x/d{i}", "at_end": True, "group": "g"} for i in range(2)]
    study = study_of(
        recipe={**RECIPE, "evaluation": evaluation},
        variants={"v0": {}, "v1": {"train.bf16": True}},
        baseline="v0",
        seeds=[0, 1],
    )
    runs = {
        variant: {
            seed: {
                (measure, f"{dataset}/{head}"): {f"{query}\u2028": value for query, value in values.items()}
                for (measure, dataset), values in scores.items()
                for head in ("dense", "sparse")
            }
            for seed, scores in seeds.items()
        }
        for variant, seeds in runs_of(2, 2).items()
    }
    write_runs(tmp_path, study, runs)
    assert {cell.dataset for cell in write_report(tmp_path)} == {"g/dense", "g/sparse"}
    compared = {cell.dataset for cell in compare_variants(f"{tmp_path}:v0", f"{tmp_path}:v1")}
    assert compared == {"g/dense", "g/sparse", "average", "geometric mean"}


def test_a_report_against_another_baseline(tmp_path):
    write_runs(tmp_path, three_variants(), runs_of(3, 2))
    first = {cell.variant: cell for cell in write_report(tmp_path) if cell.dataset == "d0"}
    again = {cell.variant: cell for cell in write_report(tmp_path, "v1") if cell.dataset == "d0"}
    assert "| v1 (baseline) |" in (tmp_path / "report.md").read_text()
    assert again["v0"].p == pytest.approx(first["v1"].p)
    assert again["v0"].difference == pytest.approx(-first["v1"].difference)
    with pytest.raises(ConfigError, match="no variant 'v9'"):
        write_report(tmp_path, "v9")


def test_names_that_look_like_numbers_are_found_again(tmp_path):
    study = study_of(variants={"1e-5": {}, "2e5": {"train.bf16": True}}, baseline="1e-5", seeds=[0, 1])
    runs = dict(zip(("1e-5", "2e5"), runs_of(2, 1).values(), strict=True))
    write_runs(tmp_path, study, runs)
    cells = write_report(tmp_path)
    assert [cell.variant for cell in cells if cell.measure == "nDCG@10"] == ["1e-5", "2e5"]
    assert "4 of 4 runs" in (tmp_path / "report.md").read_text()


def test_plots_have_files_of_their_own(tmp_path):
    runs = runs_of(3, 1)
    for seeds in runs.values():
        for scores in seeds.values():
            scores["P@5", "d0"] = scores["P_5", "d0"] = scores.pop(("nDCG@10", "d0"))
    write_runs(tmp_path, three_variants(), runs)
    write_report(tmp_path)
    assert {path.name for path in tmp_path.glob("*.svg")} == {"P-5.svg", "P-5-1.svg"}


def test_damaged_scores_are_told(tmp_path):
    write_runs(tmp_path, three_variants(), runs_of(3, 1))
    write_report(tmp_path)
    file = tmp_path / "scores.jsonl.gz"
    content = file.read_bytes()
    for position in range(12, len(content), 7):
        file.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        with contextlib.suppress(CorruptError):
            compare_variants(f"{tmp_path}:v0", f"{tmp_path}:v1")


def test_a_report_of_nothing_yet(tmp_path):
    with pytest.raises(StorageError, match=r"study\.yaml"):
        write_report(tmp_path)
    study = three_variants()
    runs = runs_of(3, 1)
    del runs["v0"]
    write_runs(tmp_path, study, {})
    assert write_report(tmp_path) == []
    assert "0 of 6 runs finished" in (tmp_path / "report.md").read_text()
    write_runs(tmp_path, study, runs)  # without a baseline there is nothing to test
    assert all(cell.p is None and cell.difference is None for cell in write_report(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", '{"dataset": "d"}\n', "[1]\n", '{"measure":1,"dataset":1,"query_id":1,"value":"x"}']
)
def test_damaged_results_are_named(tmp_path, text):
    (tmp_path / "evaluation.jsonl").write_text(text)
    with pytest.raises(CorruptError, match=r"evaluation.jsonl: .*remove its folder"):
        read_results(tmp_path / "evaluation.jsonl")


STUDIES = Path(__file__).parents[1] / "examples" / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_examples_would_run(path, tmp_path):
    study = StudyConfig.resolve(path)
    assert len(check_study(study, tmp_path)) == len(study.changes()) * len(study.seeds)


def test_the_papers_tables_are_the_presets():
    counts = {1: 7, 2: 10, 3: 13, 4: 17}  # rows of the paper
    found = []
    for number, count in counts.items():
        study = StudyConfig.resolve(STUDIES / f"colbert_table{number}.yaml")
        assert study.seeds == [1, 42, 1337, 1789, 1861]
        recipes = [recipe for _, seed, recipe in study.recipes() if seed == 1]
        rows = [projection_config(recipe["model"]["projection"]) for recipe in recipes]
        assert len(rows) == len(set(rows)) == count
        found += rows
    assert set(found) == set(PRESETS.values())
