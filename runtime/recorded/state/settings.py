"""Global settings of torch that recorded work depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def settings_of(device: str) -> tuple[Hashable, ...]:
    """The global settings that work on devices of the type ``device`` depends on."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *_kernels(),
    )


def _by_name() -> tuple[Hashable, ...]:
    """The settings for how a GPU may round products, convolutions and recurrent layers, and for
    which kernels torch may choose for them and for attention.
    """
    products, attention = torch.backends.cuda.matmul, torch.backends.cuda
    return (
        products.fp32_precision,
        _cudnn.conv.fp32_precision,
        _cudnn.rnn.fp32_precision,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_fp16_accumulation,
        _cudnn.enabled,
        _cudnn.benchmark,
        _cudnn.deterministic,
        attention.preferred_blas_library(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        attention.fp16_bf16_reduction_math_sdp_allowed(),
    )


def _at_once() -> tuple[Hashable, ...]:
    """The same through torch's internal getters, in a fifth of the time."""
    return (
        _c._get_fp32_precision_getter("cuda", "matmul"),
        _c._get_fp32_precision_getter("cuda", "conv"),
        _c._get_fp32_precision_getter("cuda", "rnn"),
        _c._get_cublas_allow_bf16_reduced_precision_reduction(),
        _c._get_cublas_allow_fp16_reduced_precision_reduction(),
        _c._get_cublas_allow_fp16_accumulation(),
        _c._get_cudnn_enabled(),
        _c._get_cudnn_benchmark(),
        _c._get_cudnn_deterministic(),
        int(_c._get_blas_preferred_backend()),  # the enum itself takes 1 us to compare
        _c._get_flash_sdp_enabled(),
        _c._get_mem_efficient_sdp_enabled(),
        _c._get_math_sdp_enabled(),
        _c._get_cudnn_sdp_enabled(),
        _c._get_math_sdp_allow_fp16_bf16_reduction(),
    )


_c: Any = torch._C
_cudnn: Any = torch.backends.cudnn
try:
    _at_once()
    _kernels = _at_once
except (AttributeError, TypeError):  # another version of torch
    _kernels = _by_name
