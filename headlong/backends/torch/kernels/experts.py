"""Mixture of experts: choose, multiply, mix; grouped by expert, or in fixed shapes a graph can hold."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, mixtures
from headlong.backends.torch.kernels.linear import FIXED_TILE, Int8Weight, Weight, linear
from headlong.backends.torch.kernels.norm import gated, swiglu

Product = Callable[[Tensor, Weight | Int8Weight], Tensor]


class Experts:
    """One projection of every expert, [E, out, in]."""

    def __init__(self, matrices: Tensor) -> None:
        self.shape = matrices.shape
        self.each = [Weight(matrix) for matrix in matrices]
        # Where a device may capture rounds, an expert is looked up by a tensor, never by a number on the host.
        looked_up = not (self.each[0].native or self.each[0].packed)
        self.stacked = matrices if looked_up else None


@dataclass(frozen=True)
class Mixture:
    """Experts of which a token chooses some, and a shared one that all use, with a gate of its own."""

    routers: Weight | Int8Weight  # [E + 1, H]: of each expert, then of the shared one's gate
    gate_up: Experts  # [E, 2 I, H], gate first
    down: Experts  # [E, H, I]
    shared_gate_up: Weight | Int8Weight  # [2 J, H]
    shared_down: Weight | Int8Weight  # [H, J]
    chosen: int  # by a token
    renormalise: bool


def window_experts(x: Tensor, mixture: Mixture) -> Tensor:
    """The tokens of windows, x [N, H] -> [N, H]: each row as if it were alone."""
    if fused(x):
        return mixtures().mix(x, mixture)
    shares, ids, shared = _routed(x, mixture, linear)
    fixed = mixture.gate_up.stacked is not None
    parts = looked_up(x, ids, mixture) if fixed else grouped(x, ids, mixture, linear)
    return add_parts(shares, parts) + shared


def chunk_experts(x: Tensor, mixture: Mixture) -> Tensor:
    """The tokens of a prompt chunk, x [N, H] -> [N, H]."""
    if fused(x):
        return mixtures().mix(x, mixture)
    shares, ids, shared = _routed(x, mixture, _multiply)
    return add_parts(shares, grouped(x, ids, mixture, _multiply)) + shared


def _multiply(x: Tensor, weight: Weight | Int8Weight) -> Tensor:
    return weight.multiply(x)


def _routed(x: Tensor, mixture: Mixture, product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """Shares and ids [N, T] of the experts that tokens chose, and what the shared one adds [N, H]."""
    scores, gate = product(x, mixture.routers).split([len(mixture.gate_up.each), 1], -1)
    shares, ids = route(scores, mixture.chosen, mixture.renormalise)
    shared = product(swiglu(product(x, mixture.shared_gate_up)), mixture.shared_down)
    return shares, ids, gated(shared, gate.expand(x.shape).contiguous())


def route(scores: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router scores [N, E] -> shares [N, T] in float32 and expert ids [N, T], the best first, of equals the lower."""
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    shares = scores.float().softmax(-1).gather(-1, ids)
    return (shares / shares.sum(-1, keepdim=True) if renormalise else shares), ids


def looked_up(x: Tensor, ids: Tensor, mixture: Mixture) -> Tensor:
    """x [N, H] through the experts ids [N, T], one product for each of them -> [N T, H]."""
    gate_up, down, (n, t) = mixture.gate_up.stacked, mixture.down.stacked, ids.shape
    assert gate_up is not None
    assert down is not None
    parts = []
    for pair in range(n * t):
        expert = ids.flatten()[pair : pair + 1]
        row = torch.nn.functional.pad(x[pair // t : pair // t + 1], (0, 0, 0, FIXED_TILE - 1))
        inner = swiglu(torch.nn.functional.linear(row, gate_up[expert][0]))
        parts.append(torch.nn.functional.linear(inner, down[expert][0])[:1])
    return torch.cat(parts)


def grouped(x: Tensor, ids: Tensor, mixture: Mixture, product: Product) -> Tensor:
    """x [N, H] through the experts ids [N, T], whose tokens are multiplied together -> [N T, H]."""
    n, t = ids.shape
    gate_up, down = mixture.gate_up.each, mixture.down.each
    parts = x.new_empty(n * t, x.shape[1])
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(gate_up)).tolist()
    for expert, group in enumerate(order.split(counts)):
        if len(group):
            parts[group] = product(swiglu(product(x[group // t], gate_up[expert])), down[expert])
    return parts


def add_parts(shares: Tensor, parts: Tensor) -> Tensor:
    """parts [N T, H] added by shares [N, T], in the order of each token's own choice, so that its sum does not depend
    on who else came to the same expert."""
    return torch.bmm(shares[:, None].to(parts.dtype), parts.view(*shares.shape, -1))[:, 0]
