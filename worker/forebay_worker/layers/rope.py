"""The table of rotary cosines and sines. It knows frequencies and their scaling, not the heads."""

import math

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i / head_dim) for each pair i: [head_dim / 2] float32."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def llama3_scaled(freq: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3.1: wavelengths under original / high stay, those over original / low are stretched by
    `factor`, those between are blended linearly in original / wavelength."""
    wavelength = 2 * math.pi / freq
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return freq * (blend + (1 - blend) / factor)


def cos_sin_table(freq: Tensor, positions: int) -> Tensor:
    """[positions, head_dim] float32: the cosines of each position's angles, then the sines."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
