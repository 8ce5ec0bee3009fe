r"""Bidirectional WKV (Vision-RWKV's attention), over true distances.

With positions p, decay d = w / L and bonus u / L (L: tokens of the whole sequence, present or not),

    y_t = N_t / D_t,   N_t = sum_{s != t} exp(k_s - d (|p_t - p_s| - 1)) v_s  +  exp(k_t + u / L)
    v_t,   D_t the same without v.

Both sums are one linear operator K, applied to (e^k v) and to e^k. Because |d| |p_t - p_s| <= |w|
the kernel factors without overflow, exp(-d (p_t - p_s - 1)) = exp(-d (p_t - c - 1/2)) exp(d (p_s -
c + 1/2)), so K is a prefix sum and a suffix sum between two scalings: linear in tokens, no loop
over them. All terms are positive for D, so nothing cancels. K is symmetric: the backward pass
applies the same K to the gradients.

Sources: Duan et al., Vision-RWKV (2403.02308), eq. 2; Fei et al., Diffusion-RWKV (2404.04478).
    Decay over true gaps: ours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.dispatch import KernelError, choose, full_precision, kernel_function, work_dtype

# A larger |w| would overflow float32 in the factors; e^-60 is negligible.
MAX_DECAY = 60.0


def reference(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    position: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """The definition in float64, with all (B, T, T, C) weights written out. Shapes as `biwkv`."""
    length = length or k.shape[1]
    p = torch.arange(k.shape[1], device=k.device) if position is None else position
    p = p.double().expand(k.shape[0], -1)
    distance = (p[:, :, None] - p[:, None, :]).abs()[..., None]  # (B, T, T, 1)
    exponent = k.double()[:, None] - w.double() / length * (distance - 1)
    self_term = k.double()[:, None] + u.double() / length
    same = torch.eye(k.shape[1], dtype=torch.bool, device=k.device)[None, :, :, None]
    weight = torch.softmax(torch.where(same, self_term, exponent), dim=2)
    return torch.einsum("btsc,bsc->btc", weight, v.double()).to(v.dtype)


def biwkv(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    position: Tensor | None = None,
    length: int | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Bidirectional WKV of Vision-RWKV with decay over true distances.

    Args:
        k: (B, T, C) keys; -inf takes a token out of every sum.
        v: (B, T, C) values.
        w: (C,) decay over the whole length; negative values grow with distance. Clamped to +-60.
        u: (C,) bonus of the token itself.
        position: (T,) or (B, T) integer positions below `length`, ascending; None: 0..T-1 (rank
            distance, the released form if `length` is None too).
        length: The normaliser L; by default T.
        kernel: auto | torch | reference | triton | native.

    Returns:
        (B, T, C) in v's dtype. Computed in float32 at least.

    Raises:
        KernelError: The kernel cannot run, or `length` is smaller than the number of tokens.
    """
    length = k.shape[1] if length is None else length
    if length < k.shape[1]:
        raise KernelError(
            f"biwkv: length {length} is smaller than the {k.shape[1]} tokens; pass the full length"
        )
    name = choose("biwkv", kernel, [k, v, w, u])
    if name == "reference":
        return reference(k, v, w, u, position, length)
    dtype = work_dtype(k, v)
    decay = w.to(dtype).clamp(-MAX_DECAY, MAX_DECAY) / length
    bonus = torch.exp(u.to(dtype) / length)
    if name == "triton":
        return kernel_function("biwkv", "triton")(k, v, decay, bonus, position, length)
    if name == "native":
        keys, values = (k, v) if k.dtype == v.dtype else (k.float(), v.float())
        mixed = torch.ops.tread.biwkv(keys, values, decay, bonus, position, length)
        return mixed.to(v.dtype)
    with full_precision(k):
        out = _sums(k.to(dtype), v.to(dtype), decay, bonus, position, length)
    return out.to(v.dtype)


def _sums(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, position: Tensor | None, length: int
) -> Tensor:
    """The torch path: K as a prefix sum and a suffix sum between two scalings."""
    steps = torch.arange(k.shape[1], device=k.device) if position is None else position
    centred = steps.to(k.dtype)[..., None, None] - (length - 1) / 2  # (.., T, 1, 1)
    up, down = torch.exp((centred + 0.5) * decay), torch.exp((0.5 - centred) * decay)
    e = torch.exp(k - k.amax(1, keepdim=True).detach())
    z = torch.stack((e * v, e), dim=2)
    before = F.pad((up * z).cumsum(1)[:, :-1], (0, 0, 0, 0, 1, 0)) * down
    after = F.pad((down * z)[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 1)) * up
    above, below = (before + after + bonus * z).unbind(2)
    return above / below
