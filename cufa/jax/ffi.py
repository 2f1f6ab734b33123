"""XLA calls Python: handlers of its foreign function interface, without a library to be built.

XLA passes a handler one struct, the call frame (xla/ffi/api/c_api.h, API 0.1 and later: fields are added at the end).
:func:`register` reads it with ctypes, wraps the buffers as NumPy or CuPy arrays over the same memory, and calls a
Python function, on a GPU with XLA's stream as CuPy's current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ..problem.checks import import_cupy

#: XLA_FFI_DataType: the elements that attention and score functions take.
_DTYPES = dict(enumerate(map(np.dtype, "?bhilBHILefd"), 1)) | {16: np.dtype(ml_dtypes.bfloat16)}
_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA asks for the handler's version, and runs nothing
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_INVALID_ARGUMENT = 3  # XLA_FFI_Error_Code_INVALID_ARGUMENT
_API_VERSION = (0, 1)


class _Struct(Structure):
    """The first fields of every struct of the interface."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p)]


class _Extension(Structure):
    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)]


class _Version(_Struct):
    _fields_ = [("major", c_int), ("minor", c_int)]


class _Metadata(Structure):
    _fields_ = [("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(_Extension):
    _fields_ = [("metadata", POINTER(_Metadata))]


class _ErrorArgs(_Struct):
    _fields_ = [("message", c_char_p), ("code", c_int)]


class _StreamArgs(_Struct):
    _fields_ = [("context", c_void_p), ("stream", c_void_p)]


_CREATE_ERROR = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArgs))
_GET_STREAM = ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArgs))


class _Api(_Struct):
    _fields_ = [
        ("version", _Version), ("internal", c_void_p), ("create_error", _CREATE_ERROR), ("get_message", c_void_p),
        ("destroy_error", c_void_p), ("register", c_void_p), ("get_stream", _GET_STREAM),
    ]  # fmt: skip


class _Buffer(_Struct):
    _fields_ = [("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))]


class _Buffers(_Struct):
    """XLA_FFI_Args and XLA_FFI_Rets: all of type buffer."""

    _fields_ = [("size", c_int64), ("types", c_void_p), ("buffers", POINTER(POINTER(_Buffer)))]


class _ByteSpan(Structure):
    _fields_ = [("pointer", c_void_p), ("length", c_size_t)]


class _Attributes(_Struct):
    _fields_ = [
        ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("values", POINTER(POINTER(_ByteSpan))),
    ]  # fmt: skip


class _CallFrame(_Struct):
    _fields_ = [
        ("api", POINTER(_Api)), ("context", c_void_p), ("stage", c_int), ("arguments", _Buffers),
        ("results", _Buffers), ("attributes", _Attributes),
    ]  # fmt: skip


_HANDLER = ctypes.CFUNCTYPE(c_void_p, POINTER(_CallFrame))
_kept: list[Any] = []  # XLA keeps the addresses of handlers for good

Function = Callable[[str, list[Any], list[Any]], None]
"""(the attribute, a string; argument arrays; result arrays to be written)"""


def register(name: str, function: Function) -> None:
    """Make ``function`` the target ``name`` of :func:`jax.ffi.ffi_call`, on CPUs and CUDA GPUs.

    The call passes one attribute, a string. An exception becomes an error of the call, with its text.
    """
    for platform in ("cpu", "CUDA"):
        target = _HANDLER(_handler(function, on_gpu=platform == "CUDA"))
        _kept.append(target)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(target), platform=platform)


def _handler(function: Function, on_gpu: bool) -> Callable[[Any], int | None]:
    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        extension = ctypes.cast(frame.extension, POINTER(_MetadataExtension))
        if extension and extension.contents.type == _METADATA:
            metadata = extension.contents.metadata.contents
            metadata.version.major, metadata.version.minor = _API_VERSION
            metadata.traits = 0
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            with _stream(frame) if on_gpu else contextlib.nullcontext():
                wrap = _device_array if on_gpu else _host_array
                arguments, results = (
                    [wrap(x) for x in _buffers(y)] for y in (frame.arguments, frame.results)
                )
                text = frame.attributes.values[0].contents
                function(ctypes.string_at(text.pointer, text.length).decode(), arguments, results)
        except BaseException as error:  # no exception may pass through XLA, not even KeyboardInterrupt
            message = f"{type(error).__name__}: {error}".encode()
            error_args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, _INVALID_ARGUMENT)
            return frame.api.contents.create_error(ctypes.byref(error_args))  # type: ignore[no-any-return]
        return None

    return handle


def _buffers(buffers: _Buffers) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Address, shape and dtype of each buffer."""
    for i in range(buffers.size):
        x = buffers.buffers[i].contents
        yield x.data or 0, tuple(x.dims[: x.rank]), _DTYPES[x.dtype]


def _host_array(buffer: tuple[int, tuple[int, ...], np.dtype[Any]]) -> Any:
    address, shape, dtype = buffer
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype).reshape(shape)


def _device_array(buffer: tuple[int, tuple[int, ...], np.dtype[Any]]) -> Any:
    import cupy

    address, shape, dtype = buffer
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(address, size, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


@contextlib.contextmanager
def _stream(frame: _CallFrame) -> Iterator[None]:
    cupy = import_cupy("q")
    stream_args = _StreamArgs(ctypes.sizeof(_StreamArgs), None, frame.context, None)
    if frame.api.contents.get_stream(ctypes.byref(stream_args)):
        raise RuntimeError("XLA names no stream")
    first = next((address for address, _, _ in _buffers(frame.results) if address), None)
    if first is None:  # nothing to write
        yield
        return
    device = cupy.cuda.runtime.pointerGetAttributes(first).device
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream_args.stream or 0, device):
        yield
