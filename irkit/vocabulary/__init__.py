"""Moving an encoder onto another vocabulary, as learned sparse retrieval needs it.

`transfer_vocabulary` aligns two vocabularies and lets new tokens begin near those they resemble; what comes
after it - masked language modelling, calibration, training - takes and leaves model directories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.vocabulary.adaptation import AdaptationConfig, adapt
    from irkit.vocabulary.alignment import Alignment, align
    from irkit.vocabulary.calibration import Activations, Calibration, CalibrationConfig, calibrate, probe
    from irkit.vocabulary.domain import DomainConfig, fragmentation, train_vocabulary
    from irkit.vocabulary.initialization import TransferConfig
    from irkit.vocabulary.new_head import head_only
    from irkit.vocabulary.recipe import VocabularyRecipe
    from irkit.vocabulary.report import write_report
    from irkit.vocabulary.simplex import sparsemax
    from irkit.vocabulary.transferring import Transfer, read_new_tokens, transfer_vocabulary

__all__ = [
    "Activations",
    "AdaptationConfig",
    "Alignment",
    "Calibration",
    "CalibrationConfig",
    "DomainConfig",
    "Transfer",
    "TransferConfig",
    "VocabularyRecipe",
    "adapt",
    "align",
    "calibrate",
    "fragmentation",
    "head_only",
    "probe",
    "read_new_tokens",
    "sparsemax",
    "train_vocabulary",
    "transfer_vocabulary",
    "write_report",
]

_HOME = {
    "Activations": "calibration",
    "AdaptationConfig": "adaptation",
    "Alignment": "alignment",
    "Calibration": "calibration",
    "CalibrationConfig": "calibration",
    "DomainConfig": "domain",
    "Transfer": "transferring",
    "TransferConfig": "initialization",
    "VocabularyRecipe": "recipe",
    "adapt": "adaptation",
    "align": "alignment",
    "calibrate": "calibration",
    "fragmentation": "domain",
    "head_only": "new_head",
    "probe": "calibration",
    "read_new_tokens": "transferring",
    "sparsemax": "simplex",
    "train_vocabulary": "domain",
    "transfer_vocabulary": "transferring",
    "write_report": "report",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
