"""The two operations of a Mamba-2 mixer, chosen once for all calls in a block."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from backbones.ops.conv import causal_conv
from backbones.ops.native import OPERATIONS, REQUESTS
from backbones.ops.ssd import ssd


class MixerOperations(NamedTuple):
    """Convolution and scan, with the same arguments in every implementation.

    Attributes:
        conv: `conv(x, weight, bias, position, silu)`, as `conv.causal_conv`.
        ssd: `ssd(xbc, dt, A, D, decay_gap, width)`, as `ssd.ssd`.
    """

    conv: Callable[..., Tensor]
    ssd: Callable[..., Tensor]


def mixer_operations(x: Tensor, kernel: str, chunk: int) -> MixerOperations:
    """Return the operations for the mixers of a block with tokens x.

    They are the native operators themselves if these take such tokens: a mixer on a CPU spends no
    time in Python to choose again. Otherwise every call chooses a kernel for its inputs.
    """
    native = OPERATIONS[x.device.type]
    if kernel in REQUESTS and not torch.compiler.is_compiling() and native.takes([x]):
        return native
    return MixerOperations(causal_conv, functools.partial(ssd, chunk=chunk, kernel=kernel))
