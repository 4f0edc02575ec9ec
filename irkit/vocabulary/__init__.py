"""Move an encoder onto another vocabulary, which helps learned sparse retrieval.

Read in this order::

    alignment.py        which tokens two vocabularies share
    initialization.py   embeddings of the new tokens; simplex.py: sparsemax, which weighs their neighbours
    transfer.py         both applied to a model; embedding_swap.py: the change inside its encoder
    adaptation.py       masked language modelling afterwards
    calibration.py      how many terms get a weight
    new_head.py         an alternative: only a new output matrix
    transfer_recipe.py  all stages as one YAML file; transfer_run.py runs them; transfer_report.py describes
    them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.utils.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.vocabulary.adaptation import AdaptationConfig, adapt
    from irkit.vocabulary.alignment import Alignment, align
    from irkit.vocabulary.calibration import Activations, Calibration, CalibrationConfig, calibrate, probe
    from irkit.vocabulary.initialization import TransferConfig
    from irkit.vocabulary.new_head import head_only
    from irkit.vocabulary.simplex import sparsemax
    from irkit.vocabulary.transfer import Transfer, read_new_tokens, transfer_vocabulary
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe
    from irkit.vocabulary.transfer_report import write_report

__all__ = [
    "Activations",
    "AdaptationConfig",
    "Alignment",
    "Calibration",
    "CalibrationConfig",
    "Transfer",
    "TransferConfig",
    "VocabularyRecipe",
    "adapt",
    "align",
    "calibrate",
    "head_only",
    "probe",
    "read_new_tokens",
    "sparsemax",
    "transfer_vocabulary",
    "write_report",
]

_HOME = {
    "Activations": "calibration",
    "AdaptationConfig": "adaptation",
    "Alignment": "alignment",
    "Calibration": "calibration",
    "CalibrationConfig": "calibration",
    "Transfer": "transfer",
    "TransferConfig": "initialization",
    "VocabularyRecipe": "transfer_recipe",
    "adapt": "adaptation",
    "align": "alignment",
    "calibrate": "calibration",
    "head_only": "new_head",
    "probe": "calibration",
    "read_new_tokens": "transfer",
    "sparsemax": "simplex",
    "transfer_vocabulary": "transfer",
    "write_report": "transfer_report",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
