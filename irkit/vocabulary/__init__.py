"""Move an encoder onto another vocabulary, which helps learned sparse retrieval.

Read in this order::

    alignment.py        which tokens two vocabularies share
    initialization.py   embeddings of the new tokens; simplex.py: sparsemax, which weighs their neighbours
    transfer.py         both applied to a model
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
    from irkit.vocabulary.adaptation import AdaptationConfig as AdaptationConfig
    from irkit.vocabulary.adaptation import adapt as adapt
    from irkit.vocabulary.alignment import Alignment as Alignment
    from irkit.vocabulary.alignment import align as align
    from irkit.vocabulary.calibration import Activations as Activations
    from irkit.vocabulary.calibration import Calibration as Calibration
    from irkit.vocabulary.calibration import CalibrationConfig as CalibrationConfig
    from irkit.vocabulary.calibration import calibrate as calibrate
    from irkit.vocabulary.calibration import probe as probe
    from irkit.vocabulary.initialization import TransferConfig as TransferConfig
    from irkit.vocabulary.new_head import head_only as head_only
    from irkit.vocabulary.simplex import sparsemax as sparsemax
    from irkit.vocabulary.transfer import Transfer as Transfer
    from irkit.vocabulary.transfer import read_new_tokens as read_new_tokens
    from irkit.vocabulary.transfer import transfer_vocabulary as transfer_vocabulary
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe as VocabularyRecipe
    from irkit.vocabulary.transfer_report import write_report as write_report
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
