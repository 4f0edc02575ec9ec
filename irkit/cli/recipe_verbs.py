"""The verbs with a recipe: ``irkit train``, ``pretrain``, ``study`` and ``transfer-vocab``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from irkit.cli.options import OptionalCount, Settings
from irkit.cli.output import hint_resume, note, require_out, show_table
from irkit.errors import BadValueError, ConfigError, IrkitError
from irkit.utils.atomic import check_folder
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.config import Config
    from irkit.model import Model
    from irkit.study import Cell, Trial
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe

C = TypeVar("C", bound="Config")


# the verb of a file, by the first of these keys that the file has
_VERBS = {"pretraining": "pretrain", "vocabulary": "transfer-vocab", "baseline": "study", "losses": "train"}


def train(
    recipe: Path,
    *,
    out: Path | None = None,
    override: Settings = None,
    overwrite: bool = False,
    dry_run: bool = False,
    print_config: bool = False,
) -> None:
    """Train a model by a recipe.

    After an interruption, the same command resumes from the last checkpoint. torchrun and accelerate launch
    start it on several devices.

    Args:
        out: Directory to write the model to.
        override: Set a key of the recipe, such as train.learning_rate=2e-5. May be repeated.

    Examples:
        irkit train examples/recipes/notes.yaml --out notes-model --set train.seed=2
    """
    from irkit.training.train_recipe import TrainRecipe

    resolved = _resolve("train", TrainRecipe.resolve, recipe, override, print_config)
    out = require_out(out, "train")
    from irkit.training.train_run import prepare, run_recipe
    from irkit.training.training_data import describe_data

    prepared = prepare(resolved, out, overwrite=overwrite)
    what = _describe(resolved.model.name, prepared.step.model)
    is_main = prepared.trainer.args.process_index == 0
    for line in describe_data(prepared.examples) if is_main else ():
        note(line)
    if dry_run:
        note(f"would train {what} on {prepared.counts['examples']:,} examples into {out}")
        return
    if is_main:
        note(f"training {what} on {prepared.counts['examples']:,} examples")
    _run(lambda: run_recipe(prepared, out, overwrite=overwrite), out, is_main)


def pretrain(
    recipe: Path,
    *,
    out: Path | None = None,
    override: Settings = None,
    overwrite: bool = False,
    dry_run: bool = False,
    print_config: bool = False,
) -> None:
    """Pre-train a model on texts, and train a retriever from it.

    After an interruption, the same command resumes from the last checkpoint. torchrun and accelerate launch
    start it on several devices.

    Args:
        out: Directory to write the model to.
        override: Set a key of the recipe, such as pretraining.train.max_steps=1000. May be repeated.

    Examples:
        irkit pretrain examples/recipes/tite_pretraining_local.yaml --out tite --dry-run
    """
    from irkit.training.pretraining.pretrain_recipe import PretrainRecipe

    resolved = _resolve("pretrain", PretrainRecipe.resolve, recipe, override, print_config)
    out = require_out(out, "pretrain")
    from irkit.training.pretraining.pretrain_run import check, run

    if dry_run:
        what = _describe(resolved.model.name, check(resolved, out, overwrite=overwrite))
        if resolved.trained_vocabulary is not None:
            what = f"a vocabulary of {resolved.trained_vocabulary.size:,} and {resolved.model.name}"
        note(f"would train {what} into {out}")
        return
    _run(lambda: run(resolved, out, overwrite=overwrite), out, os.environ.get("RANK", "0") == "0")


def study(
    words: Annotated[list[str] | None, typer.Argument(metavar="STUDY | compare A B")] = None,
    *,
    out: Path | None = None,
    jobs: OptionalCount = None,
    override: Settings = None,
    dry_run: bool = False,
    report: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    baseline: Annotated[str | None, typer.Option(metavar="VARIANT")] = None,
) -> None:
    """Train and compare variants of a recipe.

    Each variant is trained with several seeds. After an interruption, the same command resumes: it keeps
    finished runs and repeats failed ones.

    Args:
        words: YAML file that names a recipe and its variants. Or the word compare and two variants, each
            as DIR:VARIANT or scores.jsonl.gz:VARIANT, to test B against A.
        out: Directory to write runs and report to.
        jobs: Number of runs at a time; default: one per GPU.
        override: Set a key of the recipe, for all variants. May be repeated.
        dry_run: Check the recipes and list the runs.
        report: Rewrite the report of this directory, and stop.
        baseline: With --report, test all variants against this one.

    Examples:
        irkit study examples/studies/projections_local.yaml --out projections --jobs 2
    """
    from irkit.study import compare_variants, write_report

    words = words or []
    of_runs = out is not None or jobs is not None or bool(override) or dry_run
    if words[:1] == ["compare"]:
        if len(words) != 3 or of_runs or report is not None or baseline is not None:
            raise BadValueError("irkit study compare: expected two variants, A B, and no options")
        show_table(*_cell_table(compare_variants(words[1], words[2])))
        return
    # write the report of an old study again
    if report is not None:
        if words or of_runs:
            raise BadValueError(
                "irkit study: --report DIR goes alone or with --baseline; leave out the study and all options"
            )
        _show_cells(write_report(report, baseline), report)
        return
    if baseline is not None:
        raise BadValueError("irkit study: --baseline goes with --report DIR; a study names its own baseline")
    if len(words) != 1 or out is None:
        raise BadValueError("irkit study: expected STUDY.yaml --out DIR, or --report DIR")
    _run_study(Path(words[0]), out, jobs, override, dry_run)


def _run_study(file: Path, out: Path, jobs: int | None, override: list[str] | None, dry_run: bool) -> None:
    """Check a study, train what is not finished, and show the report."""
    from irkit.study import StudyConfig, check_study, run_study, write_report

    # check the study before the first training
    config = _resolve("study", StudyConfig.resolve, file, override)
    runs = check_study(config, out)
    if dry_run:
        rows = [[trial.variant, trial.seed, "finished" if trial.finished else "to do"] for trial in runs]
        show_table(["variant", "seed", "state"], rows)
        return
    # train what is not finished
    with progress_bar("training", "runs", len(runs)) as update:
        update(sum(trial.finished for trial in runs))

        def report_end(trial: Trial, seconds: float) -> None:
            result, reason = ("failed", f": {trial.failure}") if trial.failure else ("finished", "")
            note(f"{trial.variant}, seed {trial.seed}: {result} in {seconds:,.0f} s{reason}")
            update(1)

        with hint_resume(" to go on with this study"):
            runs = run_study(config, out, jobs=jobs, progress=report_end)
    # report, also if runs failed
    _show_cells(write_report(out), out)
    if failed := [trial for trial in runs if trial.failure]:
        raise IrkitError(
            f"{len(failed)} of {len(runs)} runs failed, such as {failed[0].variant!r} with seed "
            f"{failed[0].seed}: {failed[0].failure}; see {failed[0].beside('.log')}"
        )


def _show_cells(cells: list[Cell], out: Path) -> None:
    if cells:
        show_table(*_cell_table(cells))
    note(f"report: {out / 'report.md'}")


def _cell_table(cells: list[Cell]) -> tuple[list[str], list[list[Any]]]:
    header = ["variant", "measure", "dataset", "seeds", "mean", "deviation", "difference", "p (holm)"]
    rows: list[list[Any]] = []
    for cell in cells:
        optional = (cell.deviation, cell.difference, cell.corrected_p)
        values = ("" if value is None else value for value in optional)
        rows.append([cell.variant, cell.measure, cell.dataset, len(cell.seeds), cell.mean, *values])
    return header, rows


def transfer_vocab(
    source: Annotated[str, typer.Argument(metavar="MODEL|RECIPE")],
    *,
    out: Path | None = None,
    target: Annotated[str | None, typer.Option(metavar="TOKENIZER|MODEL")] = None,
    texts: Annotated[str | None, typer.Option(metavar="CORPUS")] = None,
    override: Settings = None,
    report: Annotated[Path | None, typer.Option(metavar="HTML")] = None,
    overwrite: bool = False,
    dry_run: bool = False,
    print_config: bool = False,
) -> None:
    """Give an encoder the vocabulary of another tokenizer.

    With a model, new tokens get embeddings, and nothing is trained. With a recipe, masked language modelling,
    calibration and training follow; after an interruption, the same command resumes.

    Args:
        source: Name or directory of a model; or a YAML file.
        out: Directory to write the model to.
        target: Source of the new vocabulary.
        texts: Count tokens in this corpus if the target has no output bias.
        override: Set a key, such as initialization=mean. May be repeated.
        report: Also write a report, an HTML page.

    Examples:
        irkit transfer-vocab MODEL --target google-bert/bert-base-uncased --out moved
    """
    # a recipe: transfer, then train
    if Path(source).suffix in (".yaml", ".yml", ".json"):
        if target is not None or texts is not None or report is not None:
            raise BadValueError(
                "irkit transfer-vocab: a recipe names target and texts, and a report is written; leave out "
                "--target, --texts and --report"
            )
        from irkit.vocabulary.transfer_recipe import VocabularyRecipe

        recipe = _resolve("transfer-vocab", VocabularyRecipe.resolve, Path(source), override, print_config)
        _transfer(recipe, require_out(out, "transfer-vocab"), overwrite, dry_run)
        return
    from irkit.config import with_overrides
    from irkit.vocabulary.initialization import TransferConfig

    # a model: check all before it is loaded
    config = TransferConfig.parse(with_overrides({}, override or ()), "irkit transfer-vocab: --set")
    if print_config:
        typer.echo(config.to_yaml(), nl=False)
        return
    if target is None or out is None:
        raise BadValueError("irkit transfer-vocab: expected MODEL --target TOKENIZER --out DIR, or a recipe")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise BadValueError(f"irkit transfer-vocab: {out} is not empty; --overwrite replaces a model in it")
    check_folder(out, f"irkit transfer-vocab: --out {out}")
    from irkit.training.pretraining.corpus import read_texts
    from irkit.vocabulary import transfer_vocabulary, write_report

    # move the model, and show what its tokens come from
    moved = transfer_vocabulary(source, target, config, texts=None if texts is None else read_texts(texts))
    _show_tokens(moved.facts)
    if moved.facts["bias"]["method"] == "prior" and moved.facts["bias"]["target"] == "none":
        note("nothing says how frequent the tokens of the target are; --texts CORPUS counts them")
    if dry_run:
        return
    # write model and report
    moved.save(out)
    if report is not None:
        write_report(moved.facts, report)
    note(f"took {moved.facts['seconds']} s; {out} is a model whose new tokens are still to be trained")


def _transfer(recipe: VocabularyRecipe, out: Path, overwrite: bool, dry_run: bool) -> None:
    """Run all stages of a recipe."""
    from irkit.config import read_json
    from irkit.vocabulary.transfer_run import check, run

    if dry_run:
        check(recipe, out, overwrite=overwrite)
        note(f"would move {recipe.model.name} onto another vocabulary into {out}")
        return
    with hint_resume(" to go on with this transfer"):
        run(recipe, out, overwrite=overwrite)
    if (out / "vocabulary_transfer.json").is_file():
        _show_tokens(read_json(out / "vocabulary_transfer.json"))
    _show_means(out)
    note(f"done. Try: irkit index {out} CORPUS --out INDEX")


def _show_tokens(facts: Mapping[str, Any]) -> None:
    """Print how many tokens are shared, and some of the new ones."""
    sizes = facts["vocabulary"]
    note(
        f"{sizes['shared']:,} of {sizes['target']:,} tokens ({sizes['overlap']:.1%}) are shared, "
        f"{sizes['new']:,} are new: {facts['config']['initialization']} initialisation"
    )
    rows = [
        [token["token"], " ".join(token["subtokens"]), ", ".join(name for name, _ in token["neighbors"])]
        for token in facts["examples"]
    ]
    if rows:
        show_table(["new token", "pieces in the source", "made of"], rows)


def _resolve(
    verb: str,
    resolve: Callable[[Path, list[str]], C],
    file: Path,
    override: list[str] | None,
    print_config: bool = False,
) -> C:
    """Read a recipe; with ``--print-config``, print it and exit.

    Raises:
        ConfigError: The file belongs to another verb, or a key or a value is unknown.
        StorageError: The file cannot be read.
    """
    from irkit.config import read_mapping

    keys = read_mapping(file)
    owner = next((owner for key, owner in _VERBS.items() if key in keys), verb)
    if owner != verb:
        raise ConfigError(f"{file}: it is made for irkit {owner}; give it to that, not to irkit {verb}")
    recipe = resolve(file, override or [])
    if print_config:
        typer.echo(recipe.to_yaml(), nl=False)
        raise typer.Exit
    return recipe


def _describe(name: str, model: Model) -> str:
    size = sum(weights.numel() for weights in model.parameters()) / 1e6
    return f"{name} ({model.kind} {model.dim}, {size:,.1f} million parameters)"


def _run(training: Callable[[], object], out: Path, is_main: bool) -> None:
    """Train. The main process then prints the measures of the model in ``out``, and what to do next."""
    start = time.monotonic()
    with hint_resume(" to go on with this training"):
        training()
    if is_main:
        _show_means(out)
        note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")


def _show_means(out: Path) -> None:
    """Print the measures of a trained model, if it was evaluated."""
    from irkit.training.result_files import read_means

    if (out / "evaluation.jsonl").is_file():
        show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
