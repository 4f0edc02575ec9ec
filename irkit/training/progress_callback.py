"""Tell a progress bar how many steps of a training are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

__all__ = ["ProgressCallback"]


class ProgressCallback(transformers.TrainerCallback):
    """Tells ``report``, see `irkit.utils.progress.stage_progress_bar`, how many steps are done."""

    def __init__(self, report: Callable[[str, int, int | None], None]) -> None:
        self.report = report

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell how many steps an interrupted training has done, and how many there are."""
        self.report("training", state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that a step is done."""
        self.report("training", 1, state.max_steps)
