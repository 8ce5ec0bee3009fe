r"""Causal depthwise convolution along a path, by rank or by true distance.

Compact, y_t = b + sum_j weight[W-1-j] x_{t-j}: taps skip gaps and take the previous tokens present.
With positions p, tap j of token t is the token at p_t - j, or 0 if that one was dropped: the dense
convolution of the masked input, read at the present tokens. Weights are stored as in
torch.nn.Conv1d: the last tap is the token itself.

The torch path is W shifted multiply-adds, which need no transposition to channels-first.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops import native
from backbones.ops.dispatch import choose, kernel_function


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    position: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """The definition in float64, by the distances of all pairs of tokens.

    Shapes as `causal_conv`.
    """
    batch, tokens, _ = x.shape
    p = torch.arange(tokens, device=x.device) if position is None else position
    p = p.expand(batch, -1)
    distance = p[:, :, None] - p[:, None, :]  # (B, T, T), token t minus token s
    y = torch.zeros_like(x, dtype=torch.float64)
    for tap in range(weight.shape[1]):
        hit = (distance == tap).double()
        y = y + torch.einsum("bts,bsc->btc", hit, x.double()) * weight[:, -1 - tap].double()
    if bias is not None:
        y = y + bias.double()
    return (F.silu(y) if silu else y).to(x.dtype)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    position: Tensor | None = None,
    silu: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Causal depthwise convolution over the tokens.

    Args:
        x: (B, T, C) tokens in path order.
        weight: (C, W) taps, the last one for the token itself.
        bias: (C,) or None.
        position: (T,) or (B, T) strictly ascending coordinates along the full path: taps by true
            distance, dropped tokens count as 0. None: compact, the previous W-1 tokens present.
        silu: Apply SiLU to the result.
        kernel: auto | torch | reference | causal-conv1d (compact only) | triton | native.

    Returns:
        (B, T, C) in x's dtype.

    Raises:
        KernelError: The requested kernel cannot run on these inputs.
    """
    fits = functools.partial(
        kernel_misfit, channels=x.shape[2], width=weight.shape[1], compact=position is None
    )
    tensors = [x, weight] if bias is None else [x, weight, bias]
    name = choose("conv", kernel, tensors, fits)
    if name == "reference":
        return reference(x, weight, bias, position, silu)
    if name == "causal-conv1d":
        # It takes (B, C, T) with channels last in memory, which a transposed view is.
        channels = x.contiguous().transpose(1, 2)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return kernel_function("conv", "causal-conv1d")(
            channels, weight, bias, activation="silu" if silu else None
        ).transpose(1, 2)
    if name == "triton":
        return kernel_function("conv", "triton")(x, weight, bias, position, silu)
    if name == "native":
        return torch.ops.tread.conv(x, weight, bias, position, silu)
    rows = weight.to(x.dtype).t().flip(0)  # (W, C), row j for distance j
    y = _shifted(x, rows, None if bias is None else bias.to(x.dtype), position)
    return F.silu(y) if silu else y


def kernel_misfit(kernel: str, channels: int, width: int, compact: bool) -> str | None:
    """Return why a kernel does not take these inputs, or None (causal-conv1d: strides of 8)."""
    if kernel == "native":
        return f"width {width} exceeds {native.TAPS}" if width > native.TAPS else None
    if kernel == "triton":
        return None
    if not compact:
        return "it knows no positions (use conv=compact or conv=none for it)"
    if channels % 8:
        return f"{channels} channels are not a multiple of 8"
    return None if 2 <= width <= 4 else f"width {width} is not 2, 3 or 4"


def _shifted(x: Tensor, rows: Tensor, bias: Tensor | None, position: Tensor | None) -> Tensor:
    """The torch path: the sum of x shifted by 0..W-1 places, each weighted by true distance."""
    y = x * rows[0] if bias is None else torch.addcmul(bias, x, rows[0])
    taps = torch.arange(len(rows), device=x.device)
    for back in range(1, min(len(rows), x.shape[1])):
        near = rows[back]
        if position is not None:
            # Positions ascend, so the token at a tap is at most that many places back.
            apart = position[..., back:] - position[..., :-back]
            near = (apart[..., None] == taps).to(x.dtype) @ rows
        y = y + F.pad(x[:, :-back] * near, (0, 0, back, 0))
    return y
