"""Moving an encoder onto another vocabulary, as learned sparse retrieval needs it.

`transfer_vocabulary` aligns two vocabularies and lets new tokens begin near those they resemble; what comes
after it - masked language modelling, calibration, training - takes and leaves model directories.
"""

from __future__ import annotations

from irkit.vocabulary.adaptation import AdaptationConfig, adapt
from irkit.vocabulary.alignment import Alignment, align
from irkit.vocabulary.calibration import Activations, Calibration, CalibrationConfig, calibrate, probe
from irkit.vocabulary.head_only import head_only
from irkit.vocabulary.initialization import TransferConfig
from irkit.vocabulary.report import write_report
from irkit.vocabulary.simplex import sparsemax
from irkit.vocabulary.transferring import Transfer, read_new_tokens, transfer_vocabulary

__all__ = [
    "Activations",
    "AdaptationConfig",
    "Alignment",
    "Calibration",
    "CalibrationConfig",
    "Transfer",
    "TransferConfig",
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
