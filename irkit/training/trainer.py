"""The training loop: that of transformers, with ragged batches, whole checkpoints and checked numbers."""

from __future__ import annotations

import copy
import math
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from irkit.bars import stage_bar
from irkit.errors import BadTypeError, ConfigError, TrainingError
from irkit.model import Model
from irkit.model.hardware import keep_few_shapes
from irkit.training.arguments import TrainingArguments
from irkit.training.checkpoints import (
    STATE,
    load_weights,
    newest_checkpoint,
    publish,
    put_weights,
    rotate,
    save_weights,
    saving,
    trained_weights,
)
from irkit.training.collapse import CollapseWatch, is_sign
from irkit.training.lora import add_lora
from irkit.training.model_step import ModelStep
from irkit.training.step import TrainStep

if TYPE_CHECKING:
    from irkit.training.data import Mixture
    from irkit.training.losses import Loss
    from irkit.training.regularizers import Regularizer

__all__ = ["Trainer"]

Evaluation = Callable[[Model], Mapping[str, float]]
_Stateful = transformers.trainer_callback.ExportableState
_ADVICE = "try a lower learning_rate, a longer warmup_steps, max_grad_norm of 1, or bf16 instead of fp16"


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for retrieval models: all that it does is there, with these differences.

    Batches are ragged and come from `irkit.training.data`; negatives come from all processes. A checkpoint
    appears whole or not at all, and holds a model directory besides what resuming takes, which gives the
    same weights as never having stopped. A loss or a gradient that is no number ends the training and leaves
    the last checkpoint. Evaluation is a function of the model.

    Attributes:
        step: The module that makes the loss, a `TrainStep` of a model.

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
    ) -> None:
        """Make everything ready.

        Args:
            model: What is trained by the losses. Or a module that is called with a batch and the share of
                steps that are done, and returns the loss: a `TrainStep`, or one for another objective; then
                without ``losses`` and ``regularizers``.
            args: Names and defaults in `TrainingArguments`.
            train_dataset: What `irkit.training.data.open_data` gives; or a DataLoader whose batches the
                module takes.
            losses: Their weighted sum is minimised.
            regularizers: Of sparse models.
            evaluation: Values by name, such as ``{"nDCG@10": 0.7}``, of the model as it stands.
            callbacks: As in transformers.

        Raises:
            ConfigError: A pattern of ``learning_rates`` fits no parameter, everything is frozen, LoRA cannot
                be applied, or ``fsdp`` has no GPUs to share weights out to.
            BadValueError: A loss or a regulariser is not for such a model.
        """
        keep_few_shapes()
        transformers.set_seed(args.seed)
        if isinstance(model, Model):
            size = args.gradient_cache_size
            model = TrainStep(model, losses, regularizers=regularizers, gradient_cache_size=size)
        elif losses or regularizers:
            raise BadTypeError(
                f"Trainer: got a {type(model).__name__} and losses; expected a Model with losses, or a "
                "module that returns its loss"
            )
        self.step, self.evaluation = model, evaluation
        self.rates, self.folder = args.learning_rates, Path(str(args.output_dir))
        self._sums: dict[str, Any] = {}
        self._steps = 0.0
        self._losses: list[Tensor] = []
        terms = self.step.model.dim if isinstance(model, ModelStep) and model.model.kind == "sparse" else None
        self._watch = CollapseWatch(args.learning_rate, terms)
        if args.lora is not None:
            if not isinstance(model, ModelStep):
                raise ConfigError(f"lora: for models of irkit, not for a {type(model).__name__}")
            add_lora(model.model, args.lora)
        self._freeze()
        self._copy = copy.deepcopy(model) if args.fsdp else None  # to be saved and evaluated
        added: list[transformers.TrainerCallback] = []
        if args.early_stopping_patience is not None:
            patience, threshold = args.early_stopping_patience, args.early_stopping_threshold
            added.append(transformers.EarlyStoppingCallback(patience, threshold))
        if args.n_gpu > 1:
            args._n_gpu = 1  # one process uses one GPU, or padding would be needed to split a batch
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=() if evaluation is None else (None,),  # asked for by eval_strategy, never read
            callbacks=[*added, *callbacks],
        )
        self.remove_callback(transformers.PrinterCallback)
        if args.fsdp and not self.is_fsdp_enabled:
            raise ConfigError("fsdp: accelerate shares weights out to GPUs only; leave fsdp out on a CPU")
        if self.is_fsdp_enabled:  # of what a Ragged holds it would not see that backward needs it again
            self.accelerator.state.fsdp_plugin.reshard_after_forward = False
        plugin = self.accelerator.state.dynamo_plugin
        if args.torch_compile and isinstance(model, ModelStep):
            model.compile_layers(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
            plugin.backend = type(plugin.backend).NO  # or the whole step would be compiled

    # what is trained, and how fast

    def _rate(self, name: str) -> float | None:
        """Learning rate that ``learning_rates`` gives a parameter; None is that of all."""
        fits = (rate for pattern, rate in self.rates.items() if re.search(pattern, _plain(name)))
        return next(fits, None)

    def _freeze(self) -> None:
        names = [_plain(name) for name, _ in self.step.named_parameters()]
        for pattern in self.rates:
            if not any(re.search(pattern, name) for name in names):
                raise ConfigError(
                    f"learning_rates: {pattern!r} is found in no name of a parameter; there are "
                    f"{', '.join(names[:3])} and {max(0, len(names) - 3)} more"
                )
        for name, parameter in self.step.named_parameters():
            if self._rate(name) == 0:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.step.parameters()):
            raise ConfigError("learning_rates: all parameters are frozen, nothing is left to train")

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in transformers, with the learning rates of ``learning_rates``."""
        fresh = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if not (fresh and self.rates):
            return optimizer
        named = (model or self.step).named_parameters()
        rates = {id(parameter): self._rate(name) for name, parameter in named}
        groups = []
        for group in optimizer.param_groups:
            for rate in dict.fromkeys(rates[id(parameter)] for parameter in group["params"]):
                params = [parameter for parameter in group["params"] if rates[id(parameter)] == rate]
                groups.append({**group, "params": params, "lr": group["lr"] if rate is None else rate})
        optimizer.param_groups[:] = groups
        return optimizer

    # batches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of this process, in an order that the seed decides."""
        given: Any = self.train_dataset
        if isinstance(given, DataLoader):
            return given
        from irkit.training.data import Collator, make_batches

        if not isinstance(self.step, TrainStep):
            raise BadTypeError("Trainer: a module of its own takes its batches from a DataLoader")
        args, model = self.args, self.step.model
        if args.tokens_per_batch is not None:
            given.measure(model)
        batches = make_batches(
            given,
            batch_size=None if args.tokens_per_batch else args.per_device_train_batch_size,
            tokens_per_batch=args.tokens_per_batch,
            seed=args.seed,
            rank=args.process_index,
            world_size=args.world_size,
            drop_last=args.dataloader_drop_last,
        )
        workers = args.dataloader_num_workers
        return _Loader(
            given,
            batch_sampler=batches,
            collate_fn=Collator(model, texts="guide" in self.step.needs),
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            generator=torch.Generator(),  # or each start of an epoch would draw from that of the dropout
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device) if hasattr(inputs, "to") else super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None  # losses are means over the queries of a batch

    def floating_point_ops(self, inputs: Any) -> int:
        """0: they are not counted."""
        return 0

    # the loss

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """The loss of a batch; `_get_grad_norm` looks whether it is a number."""
        loss: Tensor = model(inputs, self.state.global_step / max(1, self.state.max_steps))
        self._losses.append(loss.detach())
        share = 1 / self.current_gradient_accumulation_steps  # of a step
        for name, value in (getattr(self.step, "parts", {}) | getattr(self.step, "signs", {})).items():
            self._sums[name] = self._sums.get(name, 0.0) + share * value
        self._steps += share
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm, read together with the losses of the step: the only time in it that a GPU is waited for.

        Raises:
            TrainingError: It is no number, or a loss is none.
        """
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of weights that are shared out
        norm = torch.as_tensor(whole, dtype=torch.float32)
        *losses, found = torch.stack([*(loss.to(norm) for loss in self._losses), norm]).tolist()
        self._losses = []
        for loss in losses:
            if not math.isfinite(loss):
                self._stop(f"the loss is {loss}")
        if self.accelerator.scaler is None and not math.isfinite(found):  # fp16 skips such a step
            self._stop(f"the gradient has a norm of {found}")
        return found

    def _stop(self, what: str, step: int | None = None) -> NoReturn:
        last, step = newest_checkpoint(self.folder), step or self.state.global_step + 1
        raise TrainingError(
            f"training: {what} at step {step}, learning rate "
            f"{self._get_learning_rate():.3g}; {_ADVICE}. "
            + (f"The last good checkpoint is {last}" if last else "There is no checkpoint yet")
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in transformers, with the parts of the loss, and a warning where they show a collapse."""
        is_end = "train_loss" in logs
        if self._steps and ("loss" in logs or is_end):
            means = {name: float(value) / self._steps for name, value in self._sums.items()}
            self._sums, self._steps = {}, 0.0
            shown = {name: value for name, value in means.items() if not is_sign(name)}
            logs = logs | ({} if is_end else shown) | self._warned(means, is_end)
        super().log(logs, start_time)

    def _warned(self, means: Mapping[str, float], last: bool) -> dict[str, Any]:
        """Warn of what has collapsed, in a line that the log gets, too."""
        said = self._watch(means, self.state.global_step, self.state.max_steps, last=last)
        for message in said if self.args.process_index == 0 else ():
            warnings.warn(message, stacklevel=2)
        return {"warning": "; ".join(said)} if said else {}

    # evaluation

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """What the evaluation says of the model as it stands, each name after ``eval_``."""
        found: list[Any] = [None]
        step = self._whole()
        if self.evaluation is not None and self.args.process_index == 0:
            found = [dict(self.evaluation(step.model if isinstance(step, TrainStep) else step))]
        if self.args.world_size > 1:
            dist.broadcast_object_list(found)
        metrics = {f"eval_{name}": float(value) for name, value in (found[0] or {}).items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def finished_model(self) -> Model:
        """The trained model in evaluation mode, adapters merged; the best one, if that was asked for."""
        return self._whole().finished_model()  # type: ignore[no-any-return]

    def _whole(self, weights: Mapping[str, Tensor] | None = None) -> Any:
        """The step, or its copy where each process has a part of the weights, which all have to call."""
        if self._copy is None:
            return self.step
        put_weights(self._copy, trained_weights(self.step) if weights is None else weights, "all processes")
        return self._copy

    # going on

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *_: Any, **__: Any) -> Any:
        """Train to the end.

        Args:
            resume_from_checkpoint: Go on from there; True is the newest checkpoint of ``args.output_dir``, or
                the start if there is none.

        Raises:
            TrainingError: A loss or a gradient is no number.
            StorageError: There is no such checkpoint, or one cannot be written.
            CorruptError: The checkpoint is damaged, or of another model.
            ConfigError: The checkpoint was made with fsdp and this training is without, or the reverse.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.folder)
        resumed = str(Path(resume_from_checkpoint) / STATE) if resume_from_checkpoint else None
        transformers.set_seed(self.args.seed)  # a checkpoint has states of its own
        with stage_bar("steps") as report:
            shown = _Bar(report)
            self.add_callback(shown)
            try:
                return super().train(resume_from_checkpoint=resumed)
            finally:
                self.remove_callback(shown)

    def _run_epoch(self, *arguments: Any, **values: Any) -> None:
        if self.state.global_step < self.state.max_steps:  # or what was finished would go on for a step
            super()._run_epoch(*arguments, **values)  # type: ignore[no-untyped-call]

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

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(Path(self.state.best_model_checkpoint or "") / STATE))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        final = self.folder / f"checkpoint-{self.state.global_step}"
        with saving(final):
            self._write_checkpoint(final)

    def _write_checkpoint(self, final: Path) -> None:
        folder = self.folder
        unfinished = final.with_name(f".{final.name}.partial")
        state = unfinished / STATE
        weights = trained_weights(self.step)
        bad = next((name for name, value in weights.items() if not bool(value.isfinite().all())), None)
        if bad is not None:
            self._stop(f"the weight {_plain(bad)} is no number", self.state.global_step)
        if self.args.should_save:
            for left in folder.glob(".*checkpoint-*"):  # by a kill, also while a model was saved into it
                shutil.rmtree(left)
            save: Any = getattr(self._whole(weights), "save_pretrained", None)
            if save is not None:
                save(unfinished)
            state.mkdir(parents=True)
            save_weights(state, weights)
        self.accelerator.wait_for_everyone()
        self._save_optimizer_and_scheduler(str(state))
        for double in state.glob("pytorch_model_fsdp*.bin") if self.args.should_save else ():
            double.unlink()  # the weights are there
        self._save_scaler(str(state))
        self._save_rng_state(str(state))
        if self.state.best_global_step:
            best = folder / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best) if best.exists() or best == final else None
        if self.args.should_save:
            parts = [*self.callback_handler.callbacks, self.control]
            states: Any = self.state.stateful_callbacks
            states.update(
                (type(each).__name__, each.state()) for each in parts if isinstance(each, _Stateful)
            )
            self.state.save_to_json(str(state / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish(unfinished, final)
            rotate(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()


class _Loader(DataLoader[Any]):
    """Tells the order of batches which epoch it is."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class _Bar(transformers.TrainerCallback):
    """Shows how many steps are done."""

    def __init__(self, report: Callable[[str, int, int | None], None]) -> None:
        self.report = report

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.report("training", state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.report("training", 1, state.max_steps)


def _plain(name: str) -> str:
    """Name of a parameter as the model has it, whatever the step and distributed training put before it."""
    for wrapper in ("module.", "_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("model.")
