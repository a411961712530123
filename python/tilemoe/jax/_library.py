"""Load the libraries for JAX, register their handlers with XLA, and call their functions.

libtilemoe_jax is for the CPU, libtilemoe_jax_cuda for GPUs; the latter links libtilemoe_cuda, which
has the CUDA kernels of the PyTorch package, too. A trace calls their functions to plan sizes.
Neither library links Python or jaxlib.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path
from typing import NamedTuple

try:
    import jax
    import jax.ffi
except ModuleNotFoundError as error:
    raise ImportError(
        "tilemoe.jax requires jax >= 0.10.2, which is not installed; run pip install 'tilemoe[jax]'"
    ) from error

from .._folder import directory

MIN_JAX = (0, 10, 2)
HANDLERS = (
    "forward", "backward", "top_k", "top_k_scores", "top_k_backward", "router_losses",
    "quantize_fp8",
)  # fmt: skip
_STATUS = {1: ValueError, 2: NotImplementedError}
_MAX_KEPT = 4096


def target_of(handler: str) -> str:
    """Return the name of a handler in XLA, which exported programs contain.

    The number in the name changes if the operands change.
    """
    return f"tilemoe.{handler}.v1"


class Sizes(NamedTuple):
    """Sizes of the results of a call that only the library can compute."""

    routing: int  # bytes
    packed: int  # bytes of packed adapters
    capacity: int  # rows
    workspace: int  # bytes on a GPU; the CPU's handlers allocate their own workspace


class Library:
    """One of the two libraries, with its handlers registered for a platform of XLA."""

    def __init__(self, path: Path, platform: str) -> None:
        self.path = path
        self._c = c = ctypes.CDLL(str(path))
        for function in ("last_error", "arrays", "description"):
            getattr(c, f"tilemoe_jax_{function}").restype = ctypes.c_char_p
        for handler in HANDLERS:
            capsule = jax.ffi.pycapsule(getattr(c, f"tilemoe_jax_{handler}"))
            jax.ffi.register_ffi_target(target_of(handler), capsule, platform=platform)

    def check(self, status: int) -> None:
        """Raise the library's error."""
        if status:
            text = self._c.tilemoe_jax_last_error().decode()
            raise _STATUS.get(status, RuntimeError)(_sentence(text))

    def version(self) -> str:
        number = self._c.tilemoe_jax_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def description(self) -> str:
        """Return one line about the device, or why it cannot be used."""
        text = self._c.tilemoe_jax_description().decode()
        failed = re.match(r"tilemoe_\w+: (.*?)( \[\S+: \w+\])?$", text)
        return f"no: {failed[1]}" if failed else text

    def arrays(self, handler: str, results: bool) -> tuple[str, ...]:
        """Return the names of a handler's possible operands or results, in XLA's order."""
        text = self._c.tilemoe_jax_arrays(target_of(handler).encode(), int(results))
        return tuple(text.decode().split())

    def plan(self, handler: str, operands: str, attributes: str, sms: int) -> Sizes:
        sizes = (ctypes.c_int64 * len(Sizes._fields))()
        texts = (text.encode() for text in (target_of(handler), operands, attributes))
        self.check(self._c.tilemoe_jax_plan(*texts, ctypes.c_int32(sms), sizes))
        return Sizes(*sizes)

    def set_num_threads(self, count: int) -> None:
        self.check(self._c.tilemoe_jax_set_num_threads(count))

    def set_ctas_per_sm(self, count: int) -> None:
        self._c.tilemoe_jax_set_ctas_per_sm(count)

    def set_arch(self, name: str) -> None:
        self.check(self._c.tilemoe_jax_set_arch(name.encode()))

    def sms(self, device: int) -> int:
        return self._c.tilemoe_jax_sms(device)


def _sentence(text: str) -> str:
    """Return an error of the library with this package's names of arrays."""
    return re.sub(r"^tilemoe_\w+: ", "", text).replace("weights.", "")


def _check_jax() -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:3])
    if version < MIN_JAX:
        required = ".".join(map(str, MIN_JAX))
        raise ImportError(
            f"tilemoe.jax requires jax >= {required}, got {jax.__version__}; run pip install -U jax"
        )


def _find(name: str) -> Path | None:
    """Return a library in the package's folder, or in bindings/jax of a build tree."""
    folder = directory()
    for path in (folder / name, folder.parent / "jax" / name):
        if path.exists():
            return path
    return None


def _load() -> tuple[Library | None, Library | None, str | None]:
    """Return the libraries of the CPU and of CUDA, and why the latter is missing."""
    _check_jax()
    names = "libtilemoe_jax.so", "libtilemoe_jax_cuda.so"
    found = [_find(name) for name in names]
    if found == [None, None]:
        raise ImportError(
            f"no TileMoE libraries for JAX in {directory()}; install the package (pip "
            "install 'tilemoe[jax]'), or set TILEMOE_LIBRARY_DIR to bindings/jax of a "
            "build"
        )
    cpu, cuda = None, None
    reason: str | None = (
        "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON"
    )
    if found[0] is not None:
        try:
            cpu = Library(found[0], "cpu")
        except OSError as error:
            hint = ": install it (apt-get install libgomp1)" if "libgomp" in str(error) else ""
            raise ImportError(f"cannot load the TileMoE library for JAX: {error}{hint}") from None
    if found[1] is not None:
        try:
            cuda, reason = Library(found[1], "CUDA"), None
        except OSError as error:
            reason = f"the CUDA library of TileMoE cannot be loaded: {error}"
    return cpu, cuda, reason


_cpu, _cuda, _no_cuda = _load()
_any = _cpu if _cpu is not None else _cuda
assert _any is not None
VERSION = _any.version()
OPERANDS = {handler: _any.arrays(handler, False) for handler in HANDLERS}
RESULTS = {handler: _any.arrays(handler, True) for handler in HANDLERS}


# ---------------------------------------------------------------- GPUs and their workspaces

_elsewhere: tuple[int, ...] = ()  # SMs of the GPUs of set_cuda_sms()


@functools.cache
def _sms_here() -> tuple[int, ...]:
    assert _cuda is not None
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()
    return tuple(sorted({_cuda.sms(device.local_hardware_id) for device in devices} - {0}))


def plan(handler: str, operands: str, attributes: str) -> Sizes:
    """Return the sizes of a call's results, on every platform of the traced program.

    The CPU's library also checks the operands.

    Raises:
        ValueError: The library rejects an operand.
        NotImplementedError: The library does not support an operand.
    """
    sms = () if _cuda is None else _elsewhere or _sms_here()
    return _planned(handler, operands, attributes, sms)


@functools.lru_cache(_MAX_KEPT)
def _planned(handler: str, operands: str, attributes: str, sms: tuple[int, ...]) -> Sizes:
    sizes = None if _cpu is None else _cpu.plan(handler, operands, attributes, 0)
    for count in sms:
        assert _cuda is not None
        try:
            here = _cuda.plan(handler, operands, attributes, count)
        except NotImplementedError:
            if sizes is None:
                raise
            continue  # float32, which only a CPU supports: on a GPU the handler returns the error
        workspace = here.workspace if sizes is None else max(sizes.workspace, here.workspace)
        sizes = here._replace(workspace=workspace)
    if sizes is None:
        raise NotImplementedError(
            "this build has no CPU library, and JAX has no GPU here; call "
            "tilemoe.jax.set_cuda_sms()"
        )
    return sizes


# ---------------------------------------------------------------- settings of the process


def set_num_threads(count: int) -> None:
    """Set the number of threads of the CPU's handlers, for the whole process.

    Results have the same bits. These threads are separate from XLA's and from those of the PyTorch
    package. Call the function while no computation runs: after `jax.block_until_ready`.

    Args:
        count: Threads, including the calling one; 0: one per core, the default.

    Raises:
        ValueError: `count` is outside [0, 4096].
    """
    if _cpu is not None:
        _cpu.set_num_threads(count)


def set_ctas_per_sm(count: int) -> None:
    """Set the number of CTAs per SM for grouped GEMMs (1 to 16, default 1).

    The setting applies to the whole process. Compiled programs read it when they run, unless XLA
    has captured them in a command buffer. With 1 a CTA runs for the whole GEMM. If collectives of
    other streams occupy SMs, set 4: the CTAs run in waves, and the free SMs take over the work.
    Results have the same bits.

    Args:
        count: CTAs per SM.

    Raises:
        ValueError: `count` is not an int in [1, 16].
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 16:
        raise ValueError(f"ctas_per_sm must be an int in [1, 16], got {count!r}")
    if _cuda is not None:
        _cuda.set_ctas_per_sm(count)


def set_arch(arch: str | None) -> None:
    """Select the arch, the kernels of the experts' GEMMs on GPUs, for the whole process.

    The arch is also that of the PyTorch package.

    Args:
        arch: "sm80", "sm90", "sm100", or None or "auto" for the newest that a GPU supports.

    Raises:
        ValueError: `arch` has another value.
        NotImplementedError: The library was built without this arch.
    """
    if _cuda is not None:
        _cuda.set_arch("auto" if arch is None else arch)


def set_cuda_sms(*counts: int) -> None:
    """Describe the GPUs on which programs that are traced later will run.

    Call the function if they are not this host's GPUs: to trace or export on a host without a GPU,
    or for several types of GPUs. The size of the workspace depends on the number of SMs.

    Args:
        *counts: SMs of each type, for example 132 for an H100; none: this host's GPUs.

    Raises:
        ValueError: A count is not an int >= 1.
    """
    global _elsewhere
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"counts must be ints >= 1, got {count!r}")
    _elsewhere = tuple(sorted(set(counts)))


def show_config() -> None:
    """Print the versions, the loaded libraries, and each platform or why it is unused.

    Example:
        >>> tilemoe.jax.show_config()  # doctest: +SKIP
        tilemoe    0.2.0
        jax        0.11.2
        python     3.12.3, Linux x86_64
        CPU        cpu: 16 threads, AVX3, oneDNN 2.6.3
        CUDA       no: TileMoE was built without CUDA; install the CUDA wheel or rebuild with ...
    """
    lines = [
        ("tilemoe", VERSION),
        ("jax", jax.__version__),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("CPU", "no: built without its CPU library" if _cpu is None else _cpu.description()),
        ("CUDA", f"no: {_no_cuda}" if _cuda is None else _cuda.description()),
    ]
    for name, text in lines:
        print(f"{name:10} {text}")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the `disabled_checks` with which `jax.export.export` accepts this package's calls.

    The process that runs an exported program must also import `tilemoe.jax`.

    Example:
        >>> checks = tilemoe.jax.export_checks()
        >>> jax.export.export(jax.jit(f), disabled_checks=checks)(x)  # doctest: +SKIP
    """
    from jax import export

    return [export.DisabledSafetyCheck.custom_call(target_of(handler)) for handler in HANDLERS]
