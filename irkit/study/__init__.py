"""Studies: variants of one recipe, each trained with several seeds, compared in one report."""

from __future__ import annotations

from irkit.study.query_scores import compare_variants, read_scores
from irkit.study.results import Cell
from irkit.study.study_config import StudyConfig
from irkit.study.study_report import write_report
from irkit.study.study_run import check_study, run_study
from irkit.study.trial import Trial

__all__ = [
    "Cell",
    "StudyConfig",
    "Trial",
    "check_study",
    "compare_variants",
    "read_scores",
    "run_study",
    "write_report",
]
