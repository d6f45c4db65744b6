"""Triton kernels for batch normalisation, ReLU and dropout in one go; imported by `fused` alone, on first use.

A channels-last batch is a matrix of M rows (pixels) and C columns (channels). Each program writes the sums over its
part of the rows, and a second, small kernel joins them in a fixed order: results are the same in every run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

SUM_PROGRAMS = 256  # about two with 8 warps for each multiprocessor of a large GPU; also the most parts that are joined
STRIP_PROGRAMS = 512  # about four with 4 warps
WIDEST = 128  # columns of a tile; wider batches are split
SUM_TILE = 8192  # elements that a program with 8 warps holds at once: 4 loads of 16 bytes a thread
STRIP_TILE = 1024  # the same for one of four strips and 4 warps
JOIN_COLUMNS = 8  # 32 bytes of a row of parts, the smallest unit that memory hands out


@triton.jit
def statistics_kernel(x_ptr, mean_ptr, m2_ptr, M, C, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and sum of squared deviations of a part's rows, from sums of x − (the part's first row).

    With n rows, Σ(x−a)² is at most about n times Σ(x−mean)² where a is one of the x: the rounding error of the
    difference stays below n·2⁻²⁴ of the result, however far the mean is from 0.
    """
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = cols < C
    first = part * (TILES * BLOCK_M)
    last = tl.minimum(first + TILES * BLOCK_M, M)
    pivot = tl.load(x_ptr + first * C + cols, mask=valid, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for tile in range(TILES):
        row = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row < last)[:, None] & valid[None, :]
        x = tl.load(x_ptr + (row[:, None] * C + cols[None, :]), mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, x - pivot[None, :], 0.0)
        sums += away
        squares += away * away
    count = (last - first).to(tl.float32)
    shift = tl.sum(sums, axis=0) / count
    m2 = tl.sum(squares, axis=0) - count * shift * shift
    tl.store(mean_ptr + (part * C + cols), pivot + shift, mask=valid)
    tl.store(m2_ptr + (part * C + cols), tl.where(m2 < 0.0, 0.0, m2), mask=valid)


@triton.jit
def join_statistics_kernel(
    part_mean_ptr,
    part_m2_ptr,
    mean_ptr,
    rstd_ptr,
    running_mean_ptr,
    running_var_ptr,
    counter_ptr,
    M,
    C,
    parts,
    rows,
    over_m,
    over_m_less_1,
    momentum,
    eps,
    COUNTED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """mean = Σ nₚ·meanₚ/M and M·var = Σ M2ₚ + Σ nₚ·(meanₚ − mean)² (Chan et al. 1979); moves the running values."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = cols < C
    part = tl.arange(0, BLOCK_P)
    inside = (part < parts)[:, None] & valid[None, :]
    places = part[:, None] * C + cols[None, :]
    count = tl.where(part < parts, tl.minimum(M - part * rows, rows), 0).to(tl.float32)
    part_mean = tl.load(part_mean_ptr + places, mask=inside, other=0.0)
    part_m2 = tl.load(part_m2_ptr + places, mask=inside, other=0.0)
    mean = tl.sum(part_mean * count[:, None], axis=0) * over_m
    apart = part_mean - mean[None, :]
    m2 = tl.sum(part_m2 + apart * apart * count[:, None], axis=0)
    tl.store(mean_ptr + cols, mean, mask=valid)
    tl.store(rstd_ptr + cols, 1.0 / tl.sqrt(m2 * over_m + eps), mask=valid)
    running_mean = tl.load(running_mean_ptr + cols, mask=valid, other=0.0)
    running_var = tl.load(running_var_ptr + cols, mask=valid, other=0.0)
    running_mean = (1.0 - momentum) * running_mean + momentum * mean
    running_var = (1.0 - momentum) * running_var + momentum * (m2 * over_m_less_1)
    tl.store(running_mean_ptr + cols, running_mean, mask=valid)
    tl.store(running_var_ptr + cols, running_var, mask=valid)
    if COUNTED:
        tl.store(counter_ptr, tl.load(counter_ptr) + 1, mask=tl.program_id(0) == 0)


# Rows are also seen as four strips of H = ⌈M/4⌉ rows each. One call of the generator yields four words: for row q and
# a column they decide about the rows q, q+H, q+2H and q+3H. So masks do not depend on how a kernel cuts its tiles.


@triton.jit
def _strip(q, strip: tl.constexpr, valid, M, H):
    """Which elements of these rows of a strip exist."""
    return ((q < H) & (q + strip * H < M))[:, None] & valid[None, :]


@triton.jit
def _kept(word, threshold):
    """The 24 high bits of a random word against p·2²⁴."""
    return (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32) >= threshold


@triton.jit
def _output(x, mean, scale, bias, word, threshold, gain, DROP: tl.constexpr):
    value = (x.to(tl.float32) - mean[None, :]) * scale[None, :] + bias[None, :]
    # Written so that NaN passes, as in torch.
    value = tl.where(value <= 0.0, 0.0, value)
    if DROP:
        value = tl.where(_kept(word, threshold), value * gain, 0.0)
    return value


@triton.jit
def _through(x, grad, mean, scale, bias, word, threshold, gain, DROP: tl.constexpr):
    """The centred input x − mean and the gradient behind dropout and ReLU."""
    centred = x.to(tl.float32) - mean[None, :]
    value = centred * scale[None, :] + bias[None, :]
    passed = tl.where(value <= 0.0, 0.0, grad.to(tl.float32))
    if DROP:
        passed = tl.where(_kept(word, threshold), passed * gain, 0.0)
    return centred, passed


@triton.jit
def apply_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    M,
    C,
    H,
    threshold,
    gain,
    DROP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """y = dropout(relu(x̂·weight + bias))."""
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = cols < C
    q = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    places = q[:, None] * C + cols[None, :]
    step = H * C
    in0 = _strip(q, 0, valid, M, H)
    in1 = _strip(q, 1, valid, M, H)
    in2 = _strip(q, 2, valid, M, H)
    in3 = _strip(q, 3, valid, M, H)
    # All loads come before the first store, past which the compiler could not move them.
    x0 = tl.load(x_ptr + places, mask=in0, other=0.0)
    x1 = tl.load(x_ptr + (places + step), mask=in1, other=0.0)
    x2 = tl.load(x_ptr + (places + 2 * step), mask=in2, other=0.0)
    x3 = tl.load(x_ptr + (places + 3 * step), mask=in3, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=valid, other=0.0)
    mean = tl.load(mean_ptr + cols, mask=valid, other=0.0)
    rstd = tl.load(rstd_ptr + cols, mask=valid, other=0.0)
    scale = rstd * tl.load(weight_ptr + cols, mask=valid, other=0.0)
    if DROP:
        # 7 rounds pass all tests of randomness (Salmon et al. 2011).
        w0, w1, w2, w3 = tl.randint4x(tl.load(seed_ptr), places, 7)
    else:
        w0 = places
        w1 = places
        w2 = places
        w3 = places
    y0 = _output(x0, mean, scale, bias, w0, threshold, gain, DROP)
    y1 = _output(x1, mean, scale, bias, w1, threshold, gain, DROP)
    y2 = _output(x2, mean, scale, bias, w2, threshold, gain, DROP)
    y3 = _output(x3, mean, scale, bias, w3, threshold, gain, DROP)
    tl.store(y_ptr + places, y0.to(y_ptr.dtype.element_ty), mask=in0)
    tl.store(y_ptr + (places + step), y1.to(y_ptr.dtype.element_ty), mask=in1)
    tl.store(y_ptr + (places + 2 * step), y2.to(y_ptr.dtype.element_ty), mask=in2)
    tl.store(y_ptr + (places + 3 * step), y3.to(y_ptr.dtype.element_ty), mask=in3)


@triton.jit
def gradient_sums_kernel(
    x_ptr,
    grad_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    sum_ptr,
    product_ptr,
    M,
    C,
    H,
    threshold,
    gain,
    DROP: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Σ g and Σ g·x̂ over a part's rows of the four strips, where g is the gradient behind dropout and ReLU."""
    part = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = cols < C
    step = H * C
    bias = tl.load(bias_ptr + cols, mask=valid, other=0.0)
    mean = tl.load(mean_ptr + cols, mask=valid, other=0.0)
    rstd = tl.load(rstd_ptr + cols, mask=valid, other=0.0)
    scale = rstd * tl.load(weight_ptr + cols, mask=valid, other=0.0)
    sums = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    products = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for tile in range(TILES):
        q = (part * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        places = q[:, None] * C + cols[None, :]
        in0 = _strip(q, 0, valid, M, H)
        in1 = _strip(q, 1, valid, M, H)
        in2 = _strip(q, 2, valid, M, H)
        in3 = _strip(q, 3, valid, M, H)
        # Outside, the gradient is 0 and so are all terms.
        x0 = tl.load(x_ptr + places, mask=in0, other=0.0)
        g0 = tl.load(grad_ptr + places, mask=in0, other=0.0)
        x1 = tl.load(x_ptr + (places + step), mask=in1, other=0.0)
        g1 = tl.load(grad_ptr + (places + step), mask=in1, other=0.0)
        x2 = tl.load(x_ptr + (places + 2 * step), mask=in2, other=0.0)
        g2 = tl.load(grad_ptr + (places + 2 * step), mask=in2, other=0.0)
        x3 = tl.load(x_ptr + (places + 3 * step), mask=in3, other=0.0)
        g3 = tl.load(grad_ptr + (places + 3 * step), mask=in3, other=0.0)
        if DROP:
            w0, w1, w2, w3 = tl.randint4x(tl.load(seed_ptr), places, 7)
        else:
            w0 = places
            w1 = places
            w2 = places
            w3 = places
        c0, p0 = _through(x0, g0, mean, scale, bias, w0, threshold, gain, DROP)
        c1, p1 = _through(x1, g1, mean, scale, bias, w1, threshold, gain, DROP)
        c2, p2 = _through(x2, g2, mean, scale, bias, w2, threshold, gain, DROP)
        c3, p3 = _through(x3, g3, mean, scale, bias, w3, threshold, gain, DROP)
        sums += (p0 + p1) + (p2 + p3)
        products += (p0 * c0 + p1 * c1) + (p2 * c2 + p3 * c3)
    tl.store(sum_ptr + (part * C + cols), tl.sum(sums, axis=0), mask=valid)
    tl.store(product_ptr + (part * C + cols), rstd * tl.sum(products, axis=0), mask=valid)


@triton.jit
def join_sums_kernel(
    sum_ptr,
    product_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    C,
    parts,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = cols < C
    part = tl.arange(0, BLOCK_P)
    inside = (part < parts)[:, None] & valid[None, :]
    places = part[:, None] * C + cols[None, :]
    sums = tl.load(sum_ptr + places, mask=inside, other=0.0)
    products = tl.load(product_ptr + places, mask=inside, other=0.0)
    tl.store(grad_bias_ptr + cols, tl.sum(sums, axis=0), mask=valid)
    tl.store(grad_weight_ptr + cols, tl.sum(products, axis=0), mask=valid)


@triton.jit
def _input_gradient(centred, passed, scale, grad_mean, slope):
    return scale[None, :] * (passed - grad_mean[None, :] - centred * slope[None, :])


@triton.jit
def gradient_kernel(
    x_ptr,
    grad_ptr,
    out_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    seed_ptr,
    M,
    C,
    H,
    over_m,
    threshold,
    gain,
    DROP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """∂/∂x = weight·rstd·(g − mean(g) − x̂·mean(g·x̂)) (Ioffe & Szegedy 2015)."""
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = cols < C
    q = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    places = q[:, None] * C + cols[None, :]
    step = H * C
    in0 = _strip(q, 0, valid, M, H)
    in1 = _strip(q, 1, valid, M, H)
    in2 = _strip(q, 2, valid, M, H)
    in3 = _strip(q, 3, valid, M, H)
    x0 = tl.load(x_ptr + places, mask=in0, other=0.0)
    g0 = tl.load(grad_ptr + places, mask=in0, other=0.0)
    x1 = tl.load(x_ptr + (places + step), mask=in1, other=0.0)
    g1 = tl.load(grad_ptr + (places + step), mask=in1, other=0.0)
    x2 = tl.load(x_ptr + (places + 2 * step), mask=in2, other=0.0)
    g2 = tl.load(grad_ptr + (places + 2 * step), mask=in2, other=0.0)
    x3 = tl.load(x_ptr + (places + 3 * step), mask=in3, other=0.0)
    g3 = tl.load(grad_ptr + (places + 3 * step), mask=in3, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=valid, other=0.0)
    mean = tl.load(mean_ptr + cols, mask=valid, other=0.0)
    rstd = tl.load(rstd_ptr + cols, mask=valid, other=0.0)
    scale = rstd * tl.load(weight_ptr + cols, mask=valid, other=0.0)
    grad_mean = tl.load(grad_bias_ptr + cols, mask=valid, other=0.0) * over_m
    slope = rstd * tl.load(grad_weight_ptr + cols, mask=valid, other=0.0) * over_m
    if DROP:
        w0, w1, w2, w3 = tl.randint4x(tl.load(seed_ptr), places, 7)
    else:
        w0 = places
        w1 = places
        w2 = places
        w3 = places
    c0, p0 = _through(x0, g0, mean, scale, bias, w0, threshold, gain, DROP)
    c1, p1 = _through(x1, g1, mean, scale, bias, w1, threshold, gain, DROP)
    c2, p2 = _through(x2, g2, mean, scale, bias, w2, threshold, gain, DROP)
    c3, p3 = _through(x3, g3, mean, scale, bias, w3, threshold, gain, DROP)
    d0 = _input_gradient(c0, p0, scale, grad_mean, slope)
    d1 = _input_gradient(c1, p1, scale, grad_mean, slope)
    d2 = _input_gradient(c2, p2, scale, grad_mean, slope)
    d3 = _input_gradient(c3, p3, scale, grad_mean, slope)
    tl.store(out_ptr + places, d0.to(out_ptr.dtype.element_ty), mask=in0)
    tl.store(out_ptr + (places + step), d1.to(out_ptr.dtype.element_ty), mask=in1)
    tl.store(out_ptr + (places + 2 * step), d2.to(out_ptr.dtype.element_ty), mask=in2)
    tl.store(out_ptr + (places + 3 * step), d3.to(out_ptr.dtype.element_ty), mask=in3)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    counter: Tensor | None,
    momentum: float,
    eps: float,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the mean and 1/std of a channels-last batch; moves the running values and the counter."""
    m, c, block_c, columns = _shape(x)
    block_m = SUM_TILE // block_c
    parts, tiles = _parts(m, block_m, SUM_PROGRAMS // columns)
    part_mean, part_m2 = x.new_empty((2, parts, c), dtype=torch.float32)
    mean, rstd = (x.new_empty(c, dtype=torch.float32) for _ in range(2))
    y = torch.empty_like(x, memory_format=torch.channels_last)
    h = triton.cdiv(m, 4)
    with torch.cuda.device_of(x):
        statistics_kernel[(parts, columns)](
            x, part_mean, part_m2, m, c, TILES=tiles, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=8
        )
        join_statistics_kernel[(triton.cdiv(c, JOIN_COLUMNS),)](
            part_mean, part_m2, mean, rstd, running_mean, running_var, mean if counter is None else counter,
            m, c, parts, tiles * block_m, 1 / m, 1 / (m - 1), momentum, eps,
            COUNTED=counter is not None, BLOCK_P=triton.next_power_of_2(parts), BLOCK_C=JOIN_COLUMNS, num_warps=4,
        )  # fmt: skip
        block_m = STRIP_TILE // block_c
        apply_kernel[(triton.cdiv(h, block_m), columns)](
            x, y, weight, bias, mean, rstd, mean if seed is None else seed,
            m, c, h, _threshold(p), 1 / (1 - p),
            DROP=seed is not None, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return y, mean, rstd


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    p: float,
    seed: Tensor | None,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of x (None where it is not needed), weight and bias."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    m, c, block_c, columns = _shape(x)
    h = triton.cdiv(m, 4)
    block_m = STRIP_TILE // block_c
    parts, tiles = _parts(h, block_m, STRIP_PROGRAMS // columns)
    sums, products = x.new_empty((2, parts, c), dtype=torch.float32)
    grad_weight, grad_bias = (x.new_empty(c, dtype=torch.float32) for _ in range(2))
    grad_x = torch.empty_like(x, memory_format=torch.channels_last) if needs_x else None
    source, drop = mean if seed is None else seed, seed is not None
    threshold, gain = _threshold(p), 1 / (1 - p)
    with torch.cuda.device_of(x):
        gradient_sums_kernel[(parts, columns)](
            x, grad, weight, bias, mean, rstd, source, sums, products, m, c, h, threshold, gain,
            DROP=drop, TILES=tiles, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
        join_sums_kernel[(triton.cdiv(c, JOIN_COLUMNS),)](
            sums, products, grad_weight, grad_bias, c, parts,
            BLOCK_P=triton.next_power_of_2(parts), BLOCK_C=JOIN_COLUMNS, num_warps=4,
        )  # fmt: skip
        if grad_x is not None:
            gradient_kernel[(triton.cdiv(h, block_m), columns)](
                x, grad, grad_x, weight, bias, mean, rstd, grad_weight, grad_bias, source,
                m, c, h, 1 / m, threshold, gain,
                DROP=drop, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=4,
            )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, the columns of a tile and the number of tiles side by side."""
    n, c, height, width = x.shape
    block = min(WIDEST, max(JOIN_COLUMNS, triton.next_power_of_2(c)))
    return n * height * width, c, block, triton.cdiv(c, block)


def _parts(m: int, block_m: int, most: int) -> tuple[int, int]:
    """In how many parts m rows are cut, and the tiles of a part."""
    tiles = triton.cdiv(m, block_m)
    each = triton.cdiv(tiles, max(1, most))
    return triton.cdiv(tiles, each), each


def _threshold(p: float) -> int:
    return round(p * 2**24)
