"""Learning rates by the name of a parameter; a rate of 0 freezes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from irkit.errors import ConfigError


def plain_name(name: str) -> str:
    """Return the name of a parameter in its model, without the prefixes that a step or a wrapper adds."""
    for wrapper in ("module.", "_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("model.")


def freeze_parameters(step: nn.Module, rates: Mapping[str, float]) -> None:
    """Freeze the parameters whose learning rate is 0.

    Args:
        step: Model and objective.
        rates: Learning rates by regular expression; the first that is found in a name counts.

    Raises:
        ConfigError: A pattern is found in no name, or everything is frozen.
    """
    names = [plain_name(name) for name, _ in step.named_parameters()]
    for pattern in rates:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"learning_rates: {pattern!r} is found in no name of a parameter; there are "
                f"{', '.join(names[:3])} and {max(0, len(names) - 3)} more"
            )
    for name, parameter in step.named_parameters():
        if _find_rate(name, rates) == 0:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in step.parameters()):
        raise ConfigError("learning_rates: all parameters are frozen, nothing is left to train")


def split_groups(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    rates: Mapping[str, float],
) -> None:
    """Split the groups of an optimizer, so that each parameter gets its learning rate.

    Args:
        optimizer: Changed in place; parameters without a rate of their own keep the rate of their group.
        named: All parameters with their names.
        rates: See `freeze_parameters`.
    """
    by_id = {id(parameter): _find_rate(name, rates) for name, parameter in named}
    groups = []
    for group in optimizer.param_groups:
        for rate in dict.fromkeys(by_id[id(parameter)] for parameter in group["params"]):
            params = [parameter for parameter in group["params"] if by_id[id(parameter)] == rate]
            groups.append({**group, "params": params, "lr": group["lr"] if rate is None else rate})
    optimizer.param_groups[:] = groups


def _find_rate(name: str, rates: Mapping[str, float]) -> float | None:
    """Return the rate of the first pattern found in the name of a parameter; None if no pattern is found."""
    return next((rate for pattern, rate in rates.items() if re.search(pattern, plain_name(name))), None)
