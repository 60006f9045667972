"""Muon for matrices and AdamW for the rest, without a kernel for every matrix.

The same update as `torch.optim.Muon` (tested), but matrices of one shape are orthogonalised
in one batched product: a small drafter has some thirty matrices of seven shapes, and
launching their kernels one by one takes longer than computing them. The learning rate is a
tensor, so that a recorded step follows its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_MOMENTUM = 0.95
_MUON_WEIGHT_DECAY = 0.1
_NS_STEPS = 5
# Quintic iteration of Keller Jordan's Muon (2024), steepest at zero; it does not converge to exactly one.
_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# The match of Muon's update size to AdamW's, so that both take one learning rate (Liu et al. 2025).
_RMS_MATCH = 0.2


class BatchedMuon:
    """Momentum, orthogonalised, with Nesterov's step; learning rate scaled to AdamW's update size.

    Parameters
    ----------
    parameters
        Matrices, [out, in].
    lr
        Scalar tensor, read at every step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: torch.Tensor) -> None:
        self._lr = lr
        groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            rows, columns = sorted(parameter.shape)
            groups.setdefault((rows, columns), []).append(parameter)
        self._groups = list(groups.values())
        self._momenta = [
            torch.zeros((len(group), *shape), device=group[0].device)
            for shape, group in zip(groups, self._groups, strict=True)
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters from their gradients."""
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradients = torch.stack([_wide(parameter.grad) for parameter in group])
            momentum.lerp_(gradients, 1 - _MOMENTUM)
            updates = _orthogonal(gradients.lerp_(momentum, _MOMENTUM))
            size = _RMS_MATCH * max(group[0].shape) ** 0.5
            for parameter, update in zip(group, updates, strict=True):
                turned = update if parameter.shape[0] <= parameter.shape[1] else update.T
                parameter.mul_(1 - self._lr * _MUON_WEIGHT_DECAY)
                parameter.sub_(turned.to(parameter.dtype) * (self._lr * size))

    def state_dict(self) -> dict[str, Any]:
        """Momenta by group."""
        return {"momenta": self._momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores momenta in place."""
        for held, saved in zip(self._momenta, state["momenta"], strict=True):
            held.copy_(saved)


def _wide(gradient: torch.Tensor | None) -> torch.Tensor:
    """The gradient with at most as many rows as columns."""
    if gradient is None:
        raise RuntimeError("a parameter of the drafter got no gradient")
    return gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Nearly orthogonal matrices with the row and column spaces of `matrices` [n, rows, columns]."""
    a, b, c = _NS_COEFFICIENTS
    found = matrices.bfloat16()
    found = found / found.flatten(1).norm(dim=1).clamp(min=_EPS)[:, None, None]
    for _ in range(_NS_STEPS):
        gram = found @ found.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, update, found, beta=a)
    return found


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon takes the parameter: a matrix that is no table of vocabulary entries."""
    return parameter.ndim == 2 and min(parameter.shape) > 1 and "codebook" not in name


def build_optimizers(model: nn.Module, kind: str, lr: torch.Tensor, *, weight_decay: float) -> list[Any]:
    """Optimizers that share the learning rate `lr`: `muon` (with AdamW for the rest) or `adamw` alone."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if kind == "muon" and is_matrix(name, parameter)]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for _, parameter in named if id(parameter) not in chosen]
    found: list[Any] = [BatchedMuon(matrices, lr)] if matrices else []
    if others:
        on_gpu = others[0].is_cuda
        found.append(
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, capturable=on_gpu, fused=on_gpu)
        )
    return found
