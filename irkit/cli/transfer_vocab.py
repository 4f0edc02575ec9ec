"""``irkit transfer-vocab``: an encoder onto another vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.cli.options import ModelOut, PrintConfig, check_verb, goes_on
from irkit.cli.output import note, show_table
from irkit.errors import BadValueError
from irkit.files import check_folder

if TYPE_CHECKING:
    from irkit.vocabulary.recipe import VocabularyRecipe

__all__ = ["transfer_vocab"]


def transfer_vocab(
    source: Annotated[
        str, typer.Argument(metavar="MODEL|RECIPE", help="Name or directory; or a YAML file for all stages.")
    ],
    out: ModelOut = None,
    target: Annotated[
        str | None, typer.Option(metavar="TOKENIZER|MODEL", help="Whose vocabulary the model gets.")
    ] = None,
    texts: Annotated[
        str | None, typer.Option(metavar="CORPUS", help="To count tokens in, where a bias does not say it.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as initialization=mean.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="Also write a page about it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what was made there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    print_config: PrintConfig = False,
) -> None:
    """Give an encoder the vocabulary of another tokenizer.

    With a model, new tokens are given embeddings, and that is all. With a recipe, masked language modelling,
    calibration and training follow; the same command again goes on where it stopped.
    """
    if Path(source).suffix in (".yaml", ".yml", ".json"):
        if target is not None or texts is not None or report is not None:
            raise BadValueError(
                "irkit transfer-vocab: a recipe names target and texts, and a report is written; leave out "
                "--target, --texts and --report"
            )
        from irkit.vocabulary.recipe import VocabularyRecipe

        check_verb(Path(source), "transfer-vocab")
        recipe = VocabularyRecipe.resolve(source, override or ())
        if print_config:
            typer.echo(recipe.to_yaml(), nl=False)
        else:
            _carry_out(recipe, out, overwrite, dry_run)
        return
    from irkit.config import with_overrides
    from irkit.vocabulary.initialization import TransferConfig

    config = TransferConfig.parse(with_overrides({}, override or ()), "irkit transfer-vocab: --set")
    if print_config:
        typer.echo(config.to_yaml(), nl=False)
        return
    if target is None or out is None:
        raise BadValueError("irkit transfer-vocab: expected MODEL --target TOKENIZER --out DIR, or a recipe")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise BadValueError(f"irkit transfer-vocab: {out} is not empty; --overwrite replaces a model in it")
    check_folder(out, f"irkit transfer-vocab: --out {out}")
    from irkit.training.texts import read_texts
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


def _carry_out(recipe: VocabularyRecipe, out: Path | None, overwrite: bool, dry_run: bool) -> None:
    """All stages of a recipe."""
    if out is None:
        raise BadValueError("irkit transfer-vocab: no --out; give the directory that the model shall have")
    from irkit.config import read_json
    from irkit.training.validation import read_means
    from irkit.vocabulary.running import check, run

    if dry_run:
        check(recipe, out, overwrite=overwrite)
        note(f"would move {recipe.model.name} onto another vocabulary into {out}")
        return
    with goes_on("transfer"):
        run(recipe, out, overwrite=overwrite)
    if (out / "vocabulary_transfer.json").is_file():
        _show(read_json(out / "vocabulary_transfer.json"))
    if (out / "evaluation.jsonl").is_file():
        show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
    note(f"done. Try: irkit index {out} CORPUS --out INDEX")


def _show(facts: Mapping[str, Any]) -> None:
    """What was shared, and a few of the new tokens."""
    sizes = facts["vocabulary"]
    note(
        f"{sizes['shared']:,} of {sizes['target']:,} tokens ({sizes['overlap']:.1%}) are shared, "
        f"{sizes['new']:,} are new: {facts['config']['initialization']} initialisation"
    )
    rows = [
        [each["token"], " ".join(each["subtokens"]), ", ".join(name for name, _ in each["neighbors"])]
        for each in facts["examples"]
    ]
    if rows:
        show_table(["new token", "pieces in the source", "made of"], rows)
