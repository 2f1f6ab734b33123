"""Quantisation to e4m3: :func:`quantize`, :func:`dequantize` and :class:`QuantizedValues`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..problem import float8
from ..problem.checks import as_array, check_choice, check_flag, is_device_array
from ..problem.lengths import DENSE, Lengths, Packed, Padded
from ..problem.problem import MAX_HEAD_DIM
from . import arrays, optional_operands
from .dispatch import check_not_capturing, cuda_module
from .shapes import AXES, LAYOUTS, check_layout

_ROLES, _DTYPES = ("q", "k", "v"), ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedValues:
    """Values in e4m3 as the kernels read them: transposed, each 32 keys of a sequence in the order
    :data:`cufa.problem.float8.KEY_ORDER`, so that keys are contiguous and weights need no shuffle. Made by
    :func:`cufa.quantize`; taken as ``v`` by :func:`cufa.flash_attention`."""

    data: Any
    """uint8, (batch, kv_heads, head_dim, keys padded to a multiple of 128); packed: (1, kv_heads, head_dim, 128 ·
    (keys // 128 + sequences)), where sequence b begins at 128 · (cu_seqlens[b] // 128 + b). Zeros in the padding."""
    shape: tuple[int, ...]
    """Shape of the rows before the transposition, in ``layout``: (batch, kv_heads, seqlen, head_dim), or packed (keys,
    kv_heads, head_dim)."""
    scale: Any
    """float32: see :func:`cufa.quantize`."""
    layout: str = "bhsd"
    lengths: Lengths = DENSE

    @property
    def seqlen(self) -> int:
        """Keys of a sequence; of all sequences if they are packed."""
        return self.shape[-3 if self.layout == "bshd" or len(self.shape) == 3 else -2]

    def get(self) -> QuantizedValues:
        """On the host. Synchronises."""
        if not is_device_array(self.data):
            return self
        return dataclasses.replace(self, data=self.data.get(), scale=self.scale.get())

    def rows(self) -> Any:
        """The values as e4m3 of shape :attr:`shape`, on the host. Raises ValueError for values on a GPU (first
        :meth:`get`) and if the host does not know the lengths of the sequences."""
        if is_device_array(self.data) or not self.lengths.known:
            raise ValueError(
                "the values, or the lengths that they were quantised with, are on a GPU: take rows() of v.get(), "
                "quantised with seqlens or cu_seqlens of the host"
            )
        found = np.empty(self.shape, np.uint8)
        _host().rows_of(self.data, _canonical(found, self.layout), self.lengths)
        return found.view(ml_dtypes.float8_e4m3fn)


def quantize(
    x: Any, *, role: str, per: str = "head", rotate: int | None = None, smooth: bool = False,
    layout: str = "bhsd", seqlens: Any = None, cu_seqlens: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Queries, keys or values in e4m3 for :func:`flash_attention`: ``x ≈ scale · e4m3``, with 448 the largest number.

    To begin with, pass one seed for q and k (``rotate=1``), scales per head, and ``smooth=True`` if the mean key is not
    0. Finer scales help only unrotated arrays with outliers: e4m3 is as precise for small numbers as for large ones.

    Parameters
    ----------
    x : array, (batch, heads, seqlen, head_dim), or with ``cu_seqlens`` (tokens, heads, head_dim)
        NumPy or CuPy array of float16, bfloat16 or float32, finite. head_dim is a multiple of 16, at most 256. On a
        GPU (sm_89 or later) numbers are not checked: inf or NaN give a scale that is inf or NaN.
    role : "q", "k" or "v"
        Values come back transposed, as :class:`QuantizedValues`.
    per : "tensor", "head", "block" or "token"
        The elements that share a scale. A block is 64 queries, or as many keys as a tile of the kernel has
        (:func:`cufa.problem.float8.key_tile`).
    rotate : int, optional
        Seed of random signs: rows are multiplied by diag(signs) H / √n, H a Hadamard matrix (FlashAttention-3,
        section 3.3). Outliers are spread over the head's columns, and scores are unchanged if q and k have the same
        seed. n is the largest power of two that divides head_dim. The scale then follows from Σ|x| / √n, a bound of the
        rotated row: the largest e4m3 number may lie well below 448. Not for values.
    smooth : bool
        Subtract the mean key of each head (SageAttention). For keys only. Without a sink or a soft cap the result of
        attention is unchanged; lse belongs to the smoothed keys.
    layout : "bhsd" or "bshd"
        As for :func:`flash_attention`.
    seqlens, cu_seqlens : int32 array, optional
        Lengths of padded sequences, (batch,), or the begins of packed sequences and the end, (sequences + 1,). Padding
        is not read, and gives zeros. Lengths on the GPU are read by kernels only, as in :func:`flash_attention`.

    Returns
    -------
    array, scale
        For q and k ``ml_dtypes.float8_e4m3fn`` (CuPy: ``uint8``) in x's shape, for v :class:`QuantizedValues`; NumPy or
        CuPy as x. The scale is float32 and positive: per tensor (), per head (batch, heads), per block (batch, heads,
        blocks), per token (batch, heads, seqlen). With ``cu_seqlens``: (), (sequences, heads), (1, heads, tokens //
        block + sequences) where sequence b begins with block cu_seqlens[b] // block + b, and (1, heads, tokens).

        A GPU computes the same bits as the CPU, except for mean keys in their last bit and for subnormal float32 and
        bfloat16, which it reads as 0. It launches on CuPy's current stream.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value and the cure.

    >>> k8, k_scale = cufa.quantize(np.ones((1, 8, 1000, 128), np.float32), role="k")
    >>> k8.dtype, k_scale.shape
    (dtype(float8_e4m3fn), (1, 8))
    """
    x = as_array("x", x)
    check_choice("role", role, {name: repr(name) for name in _ROLES})
    check_choice("per", per, {name: repr(name) for name in float8.MODES})
    if check_flag("smooth", smooth) and role != "k":
        raise ValueError(
            f"smooth=True with role={role!r}: softmax is unchanged only if a mean key is subtracted"
        )
    lengths, given = _lengths(x, layout, seqlens, cu_seqlens)
    head_dim = _check_numbers(x)
    signs = None if rotate is None else _signs(rotate, role, head_dim)
    if is_device_array(x):
        import cupy

        with cupy.cuda.Device(x.data.device_id):
            return _quantized(x, role, per, signs, smooth, layout, lengths, given, cupy)
    return _quantized(x, role, per, signs, smooth, layout, lengths, given, np)


def _quantized(
    x: Any, role: str, per: str, signs: Any, smooth: bool, layout: str, lengths: Lengths, given: Any, xp: Any
) -> tuple[Any, Any]:
    """``xp``: NumPy, or CuPy with x's device as the current one."""
    rows, transpose = _canonical(x, layout), role == "v"
    batch, heads, seqlen, head_dim = rows.shape
    sequences = len(given) - 1 if isinstance(lengths, Packed) else batch
    block = float8.block_of(role, head_dim)
    shape = float8.scale_shape(per, block, heads, sequences, seqlen, lengths)
    if transpose:
        keys = float8.padded_keys(seqlen, sequences if isinstance(lengths, Packed) else None)
        out = data = xp.empty((batch, heads, head_dim, keys), np.uint8)
    else:
        out = xp.empty(x.shape, np.uint8)
        data = _canonical(out, layout)
    if xp is np:
        scale = np.empty(shape, np.float32)
        _host().quantize(rows, data, scale, lengths, per, block, signs, smooth, transpose)
    else:
        device = _device()
        build = device.Quantizer(
            head_dim, str(x.dtype), arrays.alignment(rows), lengths.kind, per, block, signs is not None, smooth,
            transpose,
        )  # fmt: skip
        bits = b"" if signs is None else np.packbits(signs < 0).tobytes()
        there = None if given is None else xp.asarray(given)
        scale = device.quantize(build, rows, data, shape, there, sequences, bits)
    if transpose:
        return QuantizedValues(data, x.shape, scale, layout, lengths), scale
    return (out.view(ml_dtypes.float8_e4m3fn) if xp is np else out), scale


def dequantize(
    x: Any, scale: Any, *, role: str, layout: str = "bhsd", cu_seqlens: Any = None, dtype: str | None = None
) -> Any:
    """``scale · x``, for ``x`` and ``scale`` that :func:`quantize` returned; ``role`` and the other arguments are as in
    that call. A rotation is not undone, and a mean key is not added. The result is float64 without ``dtype``, else
    float32 products rounded to ``dtype``, "float16" or "bfloat16". CuPy arrays need ``dtype``, and four axes of rows
    that are not transposed: quantise values with role="k" for this.

    Raises TypeError or ValueError, naming the argument.
    """
    check_choice("role", role, {name: repr(name) for name in _ROLES})
    if dtype is not None:
        check_choice("dtype", dtype, {name: repr(name) for name in _DTYPES[:2]})
        from .widened import widened

        return widened("x", x, scale, dtype, layout, role)
    bits = _host_array("x", x.rows() if isinstance(x, QuantizedValues) else x)
    if not float8.is_float8(bits):
        raise TypeError(f"x is {bits.dtype}: it takes {' or '.join(float8.DTYPES)}, as quantize returns")
    lengths, given = _lengths(bits, layout, None, cu_seqlens)
    rows = _canonical(bits, layout)
    batch, heads, seqlen, head_dim = rows.shape
    sequences = len(given) - 1 if isinstance(lengths, Packed) else batch
    block = float8.block_of(role, head_dim)
    scale = np.asarray(scale)
    mode = float8.mode_of(f"{role}_scale", scale.shape, block, heads, sequences, seqlen, lengths)
    found = np.empty(bits.shape)
    wide = _canonical(found, layout)
    wide[...] = rows.view(ml_dtypes.float8_e4m3fn)
    wide *= float8.of_tokens(scale.astype(np.float64), mode, block, seqlen, lengths)[..., None]
    return found


def _host() -> Any:
    """The quantiser on the CPU, imported on first use."""
    from ..run.cpu import quantize as host

    return host


def _device() -> Any:
    """The quantiser on the GPU, imported on first use: it needs CuPy."""
    cuda_module()  # refuses forks of a process that has used a GPU
    from ..run.cuda import quantize as device

    return device


def _host_array(name: str, x: Any) -> Any:
    """``x`` as a NumPy array."""
    x = as_array(name, x)
    if is_device_array(x):
        raise TypeError(f"{name} is on a GPU; there dequantize takes dtype='bfloat16' or 'float16': pass one")
    return x


def _canonical(x: Any, layout: str) -> Any:
    """A view with axes (batch, heads, seqlen, head_dim); packed tokens, of three axes, have batch 1."""
    return x.swapaxes(0, 1)[None] if x.ndim == 3 else x.transpose(LAYOUTS[layout])


def _check_numbers(x: Any) -> int:
    """The array's head dim. Raises TypeError or ValueError if the array cannot be quantised."""
    if str(x.dtype) not in _DTYPES:
        raise TypeError(
            f"x is {x.dtype}; quantize takes {', '.join(_DTYPES)}: convert with x.astype('float32')"
        )
    arrays.check_last_axis("x", x)
    arrays.check_address("x", x)
    head_dim = int(x.shape[-1])
    if head_dim % float8.HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {head_dim} (last axis of x); e4m3 takes multiples of {float8.HEAD_DIM_STEP} up to "
            f"{MAX_HEAD_DIM}: pad with zeros, and pass scale={head_dim}**-0.5 to flash_attention"
        )
    return head_dim


def _signs(seed: Any, role: str, head_dim: int) -> npt.NDArray[np.float32]:
    """±1 for each column."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise ValueError(f"rotate={seed!r} is not possible; use a seed from 0 to 2**32 - 1, or None")
    if role == "v":
        raise ValueError(f"rotate={seed} with role='v': values are not rotated; pass rotate=None")
    return _signs_of(int(seed), head_dim)


@functools.lru_cache(64)  # seeding takes 200 µs
def _signs_of(seed: int, head_dim: int) -> npt.NDArray[np.float32]:
    """RandomState's numbers are the same in every version of NumPy."""
    bits = np.unpackbits(np.frombuffer(np.random.RandomState(seed).bytes(head_dim // 8), np.uint8))
    return np.where(bits == 1, np.float32(-1), np.float32(1))


def _lengths(x: Any, layout: str, seqlens: Any, cu_seqlens: Any) -> tuple[Lengths, Any]:
    """The lengths of the sequences of x, and the array that states them, or None."""
    check_layout(layout)
    axes = 3 if cu_seqlens is not None else 4
    if x.ndim != axes:
        takes = "(tokens, heads, head_dim) with cu_seqlens" if axes == 3 else AXES[layout]
        raise ValueError(f"x has shape {x.shape}; it takes {axes} axes, {takes}")
    if cu_seqlens is not None:
        if seqlens is not None:
            raise ValueError("seqlens and cu_seqlens both say where sequences end: pass one of them")
        begins = _given_lengths("cu_seqlens", cu_seqlens, x)
        begins, counts = optional_operands.cumulative("cu_seqlens", begins, len(x), "x")
        return Packed(len(x), len(x), counts, counts), begins
    if seqlens is None:
        return DENSE, None
    valid = _given_lengths("seqlens", seqlens, x)
    batch, _, seqlen, _ = _canonical(x, layout).shape
    valid = optional_operands.checked_lengths("seqlens", valid, batch, seqlen)
    if is_device_array(valid):
        return Padded(on_host=False), valid
    return Padded(None, tuple(valid.tolist())), valid


def _given_lengths(name: str, given: Any, x: Any) -> Any:
    """Lengths as an array where x is, or on the host."""
    found = optional_operands.read({name: given}, None)[name]
    if is_device_array(found):
        arrays.same_place({"x": x, name: found})
    elif is_device_array(x):
        check_not_capturing(name)
    return found
