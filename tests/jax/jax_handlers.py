"""The library's handlers of XLA's FFI as XLA sees them: their traits, and how they are called."""

import ctypes
from collections import Counter

COMMAND_BUFFER_COMPATIBLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
_METADATA, _EXECUTE = 1, 3  # XLA_FFI_Extension_Metadata, XLA_FFI_ExecutionStage_EXECUTE
_STREAM_GET = 10  # place of the function in XLA_FFI_Api, in words


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32), ("type_id", ctypes.c_int64),
    ]  # fmt: skip


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    ]  # fmt: skip


class _Frame(ctypes.Structure):
    """XLA_FFI_CallFrame, without the future that newer structs end with."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(ctypes.c_void_p)), ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int), ("arrays_and_attributes", ctypes.c_uint64 * 16),
    ]  # fmt: skip


class _StreamGet(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p),
        ("context", ctypes.c_void_p), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_GetStream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGet))


def traits(handler):
    """The traits that a handler, a symbol of a library, declares to XLA."""
    metadata = _Metadata(struct_size=ctypes.sizeof(_Metadata))
    extension = _Extension(ctypes.sizeof(_Extension), _METADATA, None, ctypes.pointer(metadata))
    frame = _Frame(ctypes.sizeof(_Frame), ctypes.pointer(extension), stage=_EXECUTE)
    error = ctypes.cast(handler, _Handler)(frame)
    assert error is None
    return metadata.traits


class Calls:
    """Counts the calls of all handlers that `jax.ffi.pycapsule` is called with from now on.

    Attributes:
        all, captured: How often each was called, and called while its stream was captured. XLA calls
            a handler when it records a command buffer, and not when it runs one.
    """

    def __init__(self, ffi):
        self.all, self.captured, self._kept = Counter(), Counter(), []
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            self._driver = None
        pycapsule = ffi.pycapsule
        ffi.pycapsule = lambda handler: pycapsule(self._counted(handler))

    def _counted(self, handler):
        name, run = handler.__name__, ctypes.cast(handler, _Handler)

        @_Handler
        def counted(frame):
            if frame.contents.context:  # else XLA reads the metadata
                self.all[name] += 1
                self.captured[name] += self._is_captured(frame.contents)
            return run(frame)

        self._kept.append(counted)
        return counted

    def _is_captured(self, frame):
        if self._driver is None:
            return False
        of = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context)
        if _GetStream(frame.api[_STREAM_GET])(of):
            return False  # an error: a handler of the CPU
        status = ctypes.c_int(0)
        self._driver.cuStreamIsCapturing(ctypes.c_void_p(of.stream), ctypes.byref(status))
        return status.value == 1
