"""``irkit transfer-vocab``: give an encoder the vocabulary of another tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.cli.output import note, show_table
from irkit.cli.recipe_files import check_verb, hint_resume, print_recipe, require_out, show_means
from irkit.cli.shared_options import DryRun, ModelOut, PrintConfig, set_option
from irkit.errors import BadValueError
from irkit.utils.atomic import check_folder

if TYPE_CHECKING:
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe


def transfer_vocab(
    source: Annotated[
        str, typer.Argument(metavar="MODEL|RECIPE", help="Name or directory of a model; or a YAML file.")
    ],
    out: ModelOut = None,
    target: Annotated[
        str | None, typer.Option(metavar="TOKENIZER|MODEL", help="Source of the new vocabulary.")
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="CORPUS", help="Count tokens in this corpus if the target has no output bias."),
    ] = None,
    override: Annotated[list[str] | None, set_option("Set a key, such as initialization=mean.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Also write a report, an HTML page.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that is there.")] = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Give an encoder the vocabulary of another tokenizer.

    With a model, new tokens get embeddings, and nothing is trained. With a recipe, masked language modelling,
    calibration and training follow; after an interruption, the same command resumes.
    """
    if Path(source).suffix in (".yaml", ".yml", ".json"):
        if target is not None or texts is not None or report is not None:
            raise BadValueError(
                "irkit transfer-vocab: a recipe names target and texts, and a report is written; leave out "
                "--target, --texts and --report"
            )
        from irkit.vocabulary.transfer_recipe import VocabularyRecipe

        check_verb(Path(source), "transfer-vocab")
        recipe = VocabularyRecipe.resolve(source, override or ())
        if print_config:
            print_recipe(recipe)
        else:
            _run_recipe(recipe, require_out(out, "transfer-vocab"), overwrite, dry_run)
        return
    from irkit.config import with_overrides
    from irkit.vocabulary.initialization import TransferConfig

    config = TransferConfig.parse(with_overrides({}, override or ()), "irkit transfer-vocab: --set")
    if print_config:
        print_recipe(config)
        return
    if target is None or out is None:
        raise BadValueError("irkit transfer-vocab: expected MODEL --target TOKENIZER --out DIR, or a recipe")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise BadValueError(f"irkit transfer-vocab: {out} is not empty; --overwrite replaces a model in it")
    check_folder(out, f"irkit transfer-vocab: --out {out}")
    from irkit.training.pretraining.corpus import read_texts
    from irkit.vocabulary import transfer_vocabulary, write_report

    moved = transfer_vocabulary(source, target, config, texts=None if texts is None else read_texts(texts))
    _show(moved.facts)
    if moved.facts["bias"]["method"] == "prior" and moved.facts["bias"]["target"] == "none":
        note("nothing says how frequent the tokens of the target are; --texts CORPUS counts them")
    if dry_run:
        return
    moved.save(out)
    if report is not None:
        write_report(moved.facts, report)
    note(f"took {moved.facts['seconds']} s; {out} is a model whose new tokens are still to be trained")


def _run_recipe(recipe: VocabularyRecipe, out: Path, overwrite: bool, dry_run: bool) -> None:
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
        _show(read_json(out / "vocabulary_transfer.json"))
    show_means(out)
    note(f"done. Try: irkit index {out} CORPUS --out INDEX")


def _show(facts: Mapping[str, Any]) -> None:
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
