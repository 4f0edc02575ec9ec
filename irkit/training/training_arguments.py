"""Arguments of a training: arguments of transformers, with the same names, and a few of irkit."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch
import transformers
from pydantic import ConfigDict, TypeAdapter, ValidationError

from irkit.arguments import suggest
from irkit.errors import ConfigError, MissingDependencyError, require
from irkit.model.hardware import prefers_bfloat16

_EVALUATING = ("eval_steps", "load_best_model_at_end", "early_stopping_patience", "eval_on_start")
_OF_TRANSFORMERS = (
    "per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps learning_rate "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon max_grad_norm bf16 fp16 tf32 activation_checkpointing activation_checkpointing_kwargs "
    "gradient_checkpointing gradient_checkpointing_kwargs torch_compile torch_compile_backend "
    "torch_compile_mode torch_empty_cache_steps logging_strategy logging_steps logging_first_step report_to "
    "run_name project eval_strategy eval_steps eval_delay eval_on_start save_strategy save_steps "
    "save_total_limit load_best_model_at_end metric_for_best_model greater_is_better full_determinism seed "
    "use_cpu accelerator_config dataloader_drop_last dataloader_num_workers "
    "dataloader_persistent_workers dataloader_prefetch_factor ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config log_level"
)
_RANGES = {
    (1, "1 or more"): "per_device_train_batch_size gradient_accumulation_steps tokens_per_batch "
    "gradient_cache_size early_stopping_patience save_total_limit dataloader_prefetch_factor",
    (0, "0 or more"): "learning_rate warmup_steps weight_decay max_grad_norm early_stopping_threshold seed "
    "dataloader_num_workers",
    (math.ulp(0.0), "more than 0"): "num_train_epochs save_steps eval_steps logging_steps",
}


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` with defaults for retrieval, and arguments of irkit.

    Attributes:
        tokens_per_batch: Maximum number of tokens in a batch of one process, instead of
            ``per_device_train_batch_size``.
        gradient_cache_size: Number of texts that are encoded at once, see `irkit.training.TrainStep`; the
            gradients are the same. None encodes all at once.
        learning_rates: Learning rates by regular expression; the first that is found in the name of a
            parameter counts, and 0 freezes it.
        lora: Keys of `peft.LoraConfig`; None trains the weights themselves.
        early_stopping_patience: Training ends after this many evaluations in a row without a better value.
        early_stopping_threshold: How much better a value must be to count.

    Examples:
        >>> arguments = TrainingArguments.parse({"learning_rate": 1e-4, "max_steps": 10}, "out")
        >>> arguments.learning_rate, arguments.per_device_train_batch_size
        (0.0001, 32)
    """

    per_device_train_batch_size: int = 32
    num_train_epochs: float = 1
    learning_rate: float = 2e-5
    warmup_steps: float = 0.1
    logging_steps: float = 50
    logging_first_step: bool = True
    logging_nan_inf_filter: bool = False  # NaN ends the training at once
    report_to: str | list[str] | None = "none"
    save_total_limit: int | None = 2
    disable_tqdm: bool | None = True  # irkit has its own bars
    remove_unused_columns: bool = False
    fsdp: bool | str | None = None  # type: ignore[assignment] # they accept true, but declare only str
    tokens_per_batch: int | None = None
    gradient_cache_size: int | None = None
    learning_rates: dict[str, float] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    restore_callback_states_from_checkpoint: bool = True  # such as that of early stopping

    def __post_init__(self) -> None:
        require("accelerate", "train", "Training")
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()  # otherwise bf16 requires a GPU
        if self.bf16 and self.use_cpu and not prefers_bfloat16(torch.device("cpu")):
            warnings.warn(
                "train.bf16: this CPU multiplies float32 faster than bfloat16; it trains in float32",
                stacklevel=2,
            )
            self.bf16 = False
        if self.eval_steps is not None and self.eval_strategy == "no":
            self.eval_strategy = "steps"
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.load_best_model_at_end or self.early_stopping_patience is not None:
            self.load_best_model_at_end = True
            self.save_strategy = "steps" if self.save_strategy == "best" else self.eval_strategy
            self.save_steps = self.eval_steps or self.save_steps  # the best model must have been saved
        for name in ("", "_kwargs"):  # newer versions of transformers warn about the old name
            value = getattr(self, f"gradient_checkpointing{name}")
            if value is not None and hasattr(self, f"activation_checkpointing{name}"):
                setattr(self, f"activation_checkpointing{name}", value)
                setattr(self, f"gradient_checkpointing{name}", None)
        super().__post_init__()  # type: ignore[no-untyped-call]
        _check_reports(self.report_to or ())
        if self.fsdp and self.world_size == 1:
            raise ValueError("fsdp: shares weights out to processes, there is one; start it with torchrun")

    @classmethod
    def parse(cls, settings: Mapping[str, Any], output_dir: str | Path, source: str = "train") -> Self:
        """Make arguments from the settings of a recipe.

        Args:
            settings: Values by name.
            output_dir: Directory of the checkpoints.
            source: Origin of the settings, for messages.

        Raises:
            ConfigError: An argument does not exist, does nothing in irkit, or has an impossible value.
            MissingDependencyError: accelerate, or a package in ``report_to``, is not installed.
        """
        values = cls.check(settings, source)
        try:
            arguments = cls(output_dir=str(output_dir), **values)
            _try(arguments)
        except MissingDependencyError:
            raise
        except (ImportError, RuntimeError, TypeError, ValueError) as error:  # of transformers and torch
            raise ConfigError(f"{source}: {error}") from error
        return arguments

    @classmethod
    def check(cls, settings: Mapping[str, Any], source: str = "train") -> dict[str, Any]:
        """Check settings, and return their values with the right types; no device is touched.

        Raises:
            ConfigError: An argument does not exist, does nothing in irkit, or has another type or an
                impossible value.
        """
        existing = {argument.name for argument in fields(cls)}
        theirs = {argument.name for argument in fields(transformers.TrainingArguments)}
        known = existing - theirs | existing & {*_OF_TRANSFORMERS.split()}
        hints, values = get_type_hints(cls), {}
        for name, value in settings.items():
            if name not in known:
                hint = suggest(str(name), sorted(known), "docs/training.md has the names")
                if name in existing:
                    hint = "it does nothing in irkit, or irkit decides; leave it out"
                raise ConfigError(f"{source}: unknown key {name!r}; {hint}")
            adapter = TypeAdapter(hints[name], config=ConfigDict(arbitrary_types_allowed=True))
            try:
                values[name] = adapter.validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ConfigError(f"{source}.{name}: {reason}, got {value!r:.60}") from error
        _check_values(values, source)
        return values


def first_evaluating(values: Mapping[str, Any]) -> str | None:
    """Return the first argument that needs something to evaluate on."""
    if values.get("eval_strategy", "no") != "no":
        return "eval_strategy"
    if values.get("save_strategy") == "best":
        return "save_strategy"
    return next((name for name in _EVALUATING if values.get(name)), None)


def _check_values(values: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if a number is out of its range, or a pattern of ``learning_rates`` malformed."""
    if values.get("early_stopping_patience") is not None:
        steps = values.get("eval_steps"), values.get("save_steps")
        others = {
            "load_best_model_at_end: false": values.get("load_best_model_at_end") is False,
            "save_strategy: no": values.get("save_strategy") == "no",
            f"save_steps: {steps[1]}": None not in steps and steps[0] != steps[1],
        }
        if wrong := [name for name, is_there in others.items() if is_there]:
            raise ConfigError(
                f"{source}.early_stopping_patience: the best checkpoint is taken, and each evaluation saves "
                f"one; leave {wrong[0]} out"
            )
    for (least, expected), names in _RANGES.items():
        for name in names.split():
            if (number := values.get(name)) is not None and not least <= number < math.inf:
                raise ConfigError(f"{source}.{name}: expected {expected}, got {number!r}")
    if values.get("learning_rate") == 0 and not any(values.get("learning_rates", {}).values()):
        raise ConfigError(f"{source}.learning_rate: expected more than 0, got 0, by which nothing is trained")
    alpha = (values.get("lora") or {}).get("lora_alpha")
    if isinstance(alpha, int | float) and not 0 < alpha < math.inf:
        raise ConfigError(f"{source}.lora.lora_alpha: expected more than 0, got {alpha!r}")
    steps = values.get("max_steps", -1)
    if steps < 1 and steps != -1:
        raise ConfigError(f"{source}.max_steps: expected 1 or more, or -1 for none, got {steps!r}")
    _check_rates(values.get("learning_rates", {}), source)


def _check_rates(rates: Mapping[str, float], source: str) -> None:
    for pattern, rate in rates.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{source}.learning_rates: {pattern!r} is no pattern: {error}") from error
        if not 0 <= rate < math.inf:
            raise ConfigError(f"{source}.learning_rates: expected 0 or more for {pattern!r}, got {rate!r}")


def _try(arguments: TrainingArguments) -> None:
    """Make the optimizer and the schedule for a single weight, so that bad settings fail early."""
    options: Any = arguments.lr_scheduler_kwargs
    kind, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **settings)
    steps = {"num_warmup_steps": 0, "num_training_steps": 1, "scheduler_specific_kwargs": options}
    transformers.get_scheduler(arguments.lr_scheduler_type, optimizer, **steps)
    if arguments.torch_compile:
        backend: Any = arguments.torch_compile_backend
        torch.compile(torch.nn.Identity(), backend=backend, mode=arguments.torch_compile_mode)
    if arguments.save_strategy == "best" and arguments.metric_for_best_model is None:
        raise ValueError("save_strategy: best by which metric_for_best_model? Give that, too")


def _check_reports(names: Iterable[str]) -> None:
    """Raise an error if a service to report to is unknown or not installed."""
    integrations: Any = transformers.integrations.integration_utils
    known = integrations.INTEGRATION_TO_CALLBACK
    installed = {*integrations.get_available_reporting_integrations(), "flyte"}
    for name in names:
        if name not in known:
            raise ValueError(f"report_to: unknown {name!r}; there are {', '.join(known)}, all and none")
        if name not in installed:
            raise MissingDependencyError(
                f"train.report_to: {name} is not installed. Install it with: pip install {name}"
            )
