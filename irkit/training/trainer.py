"""The training loop: transformers' trainer with ragged batches, atomic checkpoints and checked numbers."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from irkit.errors import BadTypeError, ConfigError, TrainingError
from irkit.model import Model
from irkit.model.hardware import keep_few_shapes
from irkit.training.checkpoints import (
    STATE,
    load_weights,
    newest_checkpoint,
    put_weights,
    rotate,
    save_weights,
    saving,
    trained_weights,
)
from irkit.training.collapse import CollapseWatch, is_sign
from irkit.training.learning_rates import freeze_parameters, plain_name, split_groups
from irkit.training.losses import Loss
from irkit.training.model_step import ModelStep, add_lora
from irkit.training.progress_callback import ProgressCallback
from irkit.training.regularizers import Regularizer
from irkit.training.train_step import TrainStep
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import Batches, Collator, Mixture
from irkit.utils.atomic import publish_folder
from irkit.utils.progress import stage_progress_bar

Evaluation = Callable[[Model], Mapping[str, float]]
_Stateful = transformers.trainer_callback.ExportableState
_ADVICE = "try a lower learning_rate, a longer warmup_steps, max_grad_norm of 1, or bf16 instead of fp16"


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for retrieval models.

    Everything of transformers' trainer is there, with these differences:

    * Batches are ragged and come from `irkit.training.training_data`; negatives come from all processes.
    * A checkpoint appears whole or not at all. It holds a model directory and, in ``training/``, the trained
      weights, optimizer, scheduler, random states and counters. A resumed training continues with the next
      batch of the same order and gives bit by bit the same weights as one that was never interrupted.
    * A loss or gradient that is NaN or infinite ends the training; the last checkpoint stays.
    * Evaluation calls the function ``evaluation`` with the model instead of reading a data set.

    Attributes:
        step: Module that computes the loss, such as the `TrainStep` of a model.

    Examples:
        >>> trainer = Trainer(model, arguments, mixture, [KLDivergence()])  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
        >>> trainer.finished_model().save_pretrained("out")  # doctest: +SKIP
    """

    args: TrainingArguments
    step: Any

    def __init__(
        self,
        model: Model | nn.Module,
        args: TrainingArguments,
        train_dataset: Mixture | DataLoader[Any],
        losses: Sequence[Loss] = (),
        regularizers: Sequence[Regularizer] = (),
        evaluation: Evaluation | None = None,
        callbacks: Sequence[transformers.TrainerCallback] = (),
        data_collator: Callable[[Any], Any] | None = None,
    ) -> None:
        """Prepare the training.

        Args:
            model: A model to train by ``losses``; or, without losses and regularisers, a module that is
                called with a batch and the share of completed steps and returns the loss, such as a
                `TrainStep`.
            args: Arguments of the training.
            train_dataset: Result of `irkit.training.training_data.open_data`; or a DataLoader of batches for
                a module.
            losses: Losses whose weighted sum is minimised.
            regularizers: Regularisers of a sparse model.
            evaluation: Returns values of the current model by name, such as ``{"nDCG@10": 0.7}``.
            callbacks: Callbacks of transformers.
            data_collator: Makes a batch of examples for a module; a `TrainStep` has its own.

        Raises:
            ConfigError: A pattern of ``learning_rates`` fits no parameter, everything is frozen, LoRA cannot
                be applied, or ``fsdp`` has no GPUs to share weights out to.
            BadValueError: A loss or a regulariser does not fit the model.
        """
        keep_few_shapes()
        transformers.set_seed(args.seed)
        # what is trained
        if isinstance(model, Model):
            size = args.gradient_cache_size
            model = TrainStep(model, losses, regularizers=regularizers, gradient_cache_size=size)
        elif losses or regularizers:
            raise BadTypeError(
                f"Trainer: got a {type(model).__name__} and losses; expected a Model with losses, or a "
                "module that returns its loss"
            )
        self.step, self.evaluation, self._collate = model, evaluation, data_collator
        self.rates, self.folder = args.learning_rates, Path(str(args.output_dir))
        if args.lora is not None:
            if not isinstance(model, ModelStep):
                raise ConfigError(f"lora: for models of irkit, not for a {type(model).__name__}")
            add_lora(model.model, args.lora)
        freeze_parameters(model, self.rates)
        # sums of the parts of the loss since the last log entry, and losses of the current step
        self._sums: dict[str, Any] = {}
        self._steps = 0.0
        self._losses: list[Tensor] = []
        heads = self.step.model.heads.values() if isinstance(model, ModelStep) else ()
        terms = max((head.dim for head in heads if head.kind == "sparse"), default=None)
        self._watch = CollapseWatch(args.learning_rate, terms)
        self._copy = copy.deepcopy(model) if args.fsdp else None  # gets whole weights to save and evaluate
        # transformers' trainer
        if args.early_stopping_patience is not None:
            patience, threshold = args.early_stopping_patience, args.early_stopping_threshold
            callbacks = [transformers.EarlyStoppingCallback(patience, threshold), *callbacks]
        if args.n_gpu > 1:
            args._n_gpu = 1  # one process uses one GPU: ragged batches cannot be split
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=() if evaluation is None else (None,),  # eval_strategy needs one; it is never read
            callbacks=list(callbacks),
        )
        self.remove_callback(transformers.PrinterCallback)
        if args.fsdp and not self.is_fsdp_enabled:
            raise ConfigError("fsdp: accelerate shares weights out to GPUs only; leave fsdp out on a CPU")
        if self.is_fsdp_enabled:  # FSDP does not see inside a Ragged that backward needs the weights again
            self.accelerator.state.fsdp_plugin.reshard_after_forward = False
        if args.torch_compile and isinstance(model, ModelStep):
            model.compile_layers(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
            plugin = self.accelerator.state.dynamo_plugin
            plugin.backend = type(plugin.backend).NO  # accelerate would compile the whole step

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of transformers, with the learning rates of ``learning_rates``."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new and self.rates:
            split_groups(optimizer, (model or self.step).named_parameters(), self.rates)
        return optimizer

    # batches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches of this process, in an order that the seed decides."""
        data: Any = self.train_dataset
        if isinstance(data, DataLoader):
            return data
        if self._collate is None and not isinstance(self.step, TrainStep):
            raise BadTypeError("Trainer: a module of its own takes its batches from a DataLoader")
        args = self.args
        if args.tokens_per_batch is not None:
            data.measure(self.step.model)
        batches = Batches(
            data,
            batch_size=None if args.tokens_per_batch else args.per_device_train_batch_size,
            tokens_per_batch=args.tokens_per_batch,
            seed=args.seed,
            rank=args.process_index,
            world_size=args.world_size,
            drop_last=args.dataloader_drop_last,
        )
        workers = args.dataloader_num_workers
        return _Loader(
            data,
            batch_sampler=batches,
            collate_fn=self._collate or Collator(self.step.model, texts="guide" in self.step.needs),
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            generator=torch.Generator(),  # the global one draws dropout; an epoch must not advance it
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device) if hasattr(inputs, "to") else super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None  # losses are means over the queries of a batch

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: operations are not counted."""
        return 0

    # loss and log

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Compute the loss of a batch; `_get_grad_norm` checks that it is finite."""
        loss: Tensor = model(inputs, self.state.global_step / max(1, self.state.max_steps))
        self._losses.append(loss.detach())
        share = 1 / self.current_gradient_accumulation_steps  # of a step
        for name, value in (getattr(self.step, "parts", {}) | getattr(self.step, "signs", {})).items():
            self._sums[name] = self._sums.get(name, 0.0) + share * value
        self._steps += share
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the gradient.

        The norm and the losses are read from the GPU together. This is the only time that a step waits for
        the GPU.

        Raises:
            TrainingError: The norm or a loss is NaN or infinite.
        """
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # fsdp shares weights out
        norm = torch.as_tensor(whole, dtype=torch.float32)
        *losses, value = torch.stack([*(loss.to(norm) for loss in self._losses), norm]).tolist()
        self._losses = []
        for loss in losses:
            if not math.isfinite(loss):
                self._stop(f"the loss is {loss}")
        if self.accelerator.scaler is None and not math.isfinite(value):  # fp16 skips such a step
            self._stop(f"the gradient has a norm of {value}")
        return value

    def _stop(self, what: str, step: int | None = None) -> NoReturn:
        last, step = newest_checkpoint(self.folder), step or self.state.global_step + 1
        raise TrainingError(
            f"training: {what} at step {step}, learning rate "
            f"{self._get_learning_rate():.3g}; {_ADVICE}. "
            + (f"The last good checkpoint is {last}" if last else "There is no checkpoint yet")
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log ``logs`` and the parts of the loss, and warn if these show a collapse."""
        is_end = "train_loss" in logs
        if self._steps and ("loss" in logs or is_end):
            means = {name: float(value) / self._steps for name, value in self._sums.items()}
            self._sums, self._steps = {}, 0.0
            parts = {name: value for name, value in means.items() if not is_sign(name)}
            messages = self._watch(means, self.state.global_step, self.state.max_steps, last=is_end)
            for message in messages if self.args.process_index == 0 else ():
                warnings.warn(message, stacklevel=2)
            warning: dict[str, Any] = {"warning": "; ".join(messages)} if messages else {}
            logs = logs | ({} if is_end else parts) | warning
        super().log(logs, start_time)

    # evaluation

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate the current model in the first process; return its values by ``eval_NAME``."""
        values: list[Any] = [None]
        step = self._whole()
        if self.evaluation is not None and self.args.process_index == 0:
            values = [dict(self.evaluation(step.model if isinstance(step, TrainStep) else step))]
        if self.args.world_size > 1:
            dist.broadcast_object_list(values)
        metrics = {f"eval_{name}": float(value) for name, value in (values[0] or {}).items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @property
    def whole_step(self) -> Any:
        """The step with whole weights; with fsdp a copy, as of the last evaluation or `finished_model`."""
        return self.step if self._copy is None else self._copy

    def finished_model(self) -> Model:
        """Return the trained model in evaluation mode, adapters merged; the best one if arguments say so."""
        return self._whole().finished_model()  # type: ignore[no-any-return]

    def _whole(self, weights: Mapping[str, Tensor] | None = None) -> Any:
        """Return the step with whole weights.

        With fsdp the result is a copy, and all processes must make the call.
        """
        if self._copy is not None:
            whole = trained_weights(self.step) if weights is None else weights
            put_weights(self._copy, whole, "all processes")
        return self.whole_step

    # resume and checkpoints

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *_: Any, **__: Any) -> Any:
        """Train to the end.

        Args:
            resume_from_checkpoint: Checkpoint to resume from; True for the newest one of ``args.output_dir``,
                or the start if the directory has none.

        Raises:
            TrainingError: A loss or a gradient is NaN or infinite.
            StorageError: The checkpoint does not exist, or one cannot be written.
            CorruptError: The checkpoint is damaged, or of another model.
            ConfigError: The checkpoint was made with fsdp and this training is without it, or the reverse.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.folder)
        resumed = str(Path(resume_from_checkpoint) / STATE) if resume_from_checkpoint else None
        transformers.set_seed(self.args.seed)  # a checkpoint restores its own random states
        with stage_progress_bar("steps") as report:
            bar = ProgressCallback(report)
            self.add_callback(bar)
            try:
                return super().train(resume_from_checkpoint=resumed)
            finally:
                self.remove_callback(bar)

    def _run_epoch(self, *arguments: Any, **values: Any) -> None:
        self._find_best()  # the library looks where the checkpoint was, also if the directory has been moved
        stopped = any(
            part.early_stopping_patience_counter >= part.early_stopping_patience
            for part in self.callback_handler.callbacks
            if isinstance(part, transformers.EarlyStoppingCallback)
        )
        if self.state.global_step < self.state.max_steps and not stopped:
            super()._run_epoch(*arguments, **values)  # type: ignore[no-untyped-call]
        else:  # resumed after the last step; a loader without end has no last epoch
            self.control.should_training_stop = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        weights = load_weights(folder)
        if (folder / "optimizer.pt").is_file() == self.is_fsdp_enabled:
            before, now = ("without", "with") if self.is_fsdp_enabled else ("with", "without")
            raise ConfigError(
                f"resuming from {folder.parent}: it was trained {before} fsdp, which keeps the state of the "
                f"optimizer in another form, and this training is {now}; set fsdp as it was, or begin anew"
            )
        put_weights(self.step, weights, str(folder.parent))

    def _find_best(self, written: Path | None = None) -> None:
        """Note where the best checkpoint is; ``written`` is one that will be there."""
        if self.state.best_global_step:
            best = self.folder / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best) if best.exists() or best == written else None

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(Path(self.state.best_model_checkpoint or "") / STATE))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        final = self.folder / f"checkpoint-{self.state.global_step}"
        with saving(final):
            self._write_checkpoint(final)

    def _write_checkpoint(self, final: Path) -> None:
        """Write a checkpoint aside and publish it; all processes call this."""
        unfinished = final.with_name(f".{final.name}.partial")
        state = unfinished / STATE
        # model and trained weights
        weights = trained_weights(self.step)
        bad = next((name for name, value in weights.items() if not bool(value.isfinite().all())), None)
        if bad is not None:
            self._stop(f"the weight {plain_name(bad)} is no number", self.state.global_step)
        if self.args.should_save:
            for leftover in self.folder.glob(".*checkpoint-*"):  # of a killed process
                shutil.rmtree(leftover)
            save: Any = getattr(self._whole(weights), "save_pretrained", None)
            if save is not None:
                save(unfinished)
            state.mkdir(parents=True)
            save_weights(state, weights)
        self.accelerator.wait_for_everyone()
        # optimizer and random states, partly one file per process
        self._save_optimizer_and_scheduler(str(state))
        for duplicate in state.glob("pytorch_model_fsdp*.bin") if self.args.should_save else ():
            duplicate.unlink()  # the weights are saved already
        self._save_scaler(str(state))
        self._save_rng_state(str(state))
        # counters of the trainer and of its callbacks
        self._find_best(final)
        if self.args.should_save:
            parts = [*self.callback_handler.callbacks, self.control]
            states: Any = self.state.stateful_callbacks
            states.update(
                (type(part).__name__, part.state()) for part in parts if isinstance(part, _Stateful)
            )
            self.state.save_to_json(str(state / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish_folder(unfinished, final)
            rotate(self.folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()


class _Loader(DataLoader[Any]):
    """Passes the number of the epoch to the order of batches."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
