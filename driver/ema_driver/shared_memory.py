"""Memory files that nobody can resize, mapped in several processes, and the futexes on their words.

Both drivers' pages of words are such files: a page that could shrink under its mapping would kill whoever reads it.
"""

import ctypes
import fcntl
import mmap
import os
import platform

from ema_driver.errors import DriverUnavailable

_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_SYS_FUTEX = _FUTEX_NUMBERS.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_prototype = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, use_errno=True
)
_futex = _prototype(("syscall", _libc))
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = 2**64 - 1
_MAP_FIXED = 0x10


def require() -> None:
    """Raise DriverUnavailable on a machine whose system call numbers are not known here."""
    if _SYS_FUTEX < 0:
        known = ", ".join(sorted(_FUTEX_NUMBERS))
        raise DriverUnavailable(f"EMA runs on {known}; this machine is {platform.machine()}")


def sealed_memory(name: str, size: int) -> int:
    """A close-on-exec descriptor of `size` zero bytes that nobody can resize."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether the descriptor is a memory file that can neither shrink nor grow."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    return seals & wanted == wanted


def map_shared(fd: int, size: int) -> int:
    """Map a file for reading and writing; the address. Unlike `mmap.mmap` it keeps no descriptor."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(address)


def map_over(address: int, fd: int, offset: int, size: int) -> None:
    """Map part of a file over pages that this process already has at `address`."""
    result = _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    if result != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def unmap(address: int, size: int) -> None:
    """Undo `map_shared`."""
    _libc.munmap(address, size)


def wake(address: int) -> None:
    """Wake every thread that waits for the word at `address`; also a full memory fence."""
    _futex(_SYS_FUTEX, address, _FUTEX_WAKE, _ALL_WAITERS, None)


def sleep_on(address: int, value: int, timeout: float) -> None:
    """Sleep while the word at `address` is `value`, until a `wake`, a signal, or `timeout` seconds."""
    spec = _Timespec(int(timeout), int(timeout % 1 * 1e9))
    _futex(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.addressof(spec))
