"""The few Linux calls that the simulation needs and Python lacks: a timer descriptor, sockets at long paths."""

import ctypes
import os
import socket

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def timer() -> int:
    """A timer descriptor on the monotonic clock."""
    fd = _libc.timerfd_create(1, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(fd)


def set_timer(fd: int, when_ns: int) -> None:
    """Make the timer readable at `when_ns` (monotonic nanoseconds; past times mean now)."""
    when_ns = max(when_ns, 1)
    spec = _Itimerspec(_Timespec(0, 0), _Timespec(when_ns // 10**9, when_ns % 10**9))
    _libc.timerfd_settime(fd, 1, ctypes.byref(spec), None)


def reach(path: str) -> tuple[str, int]:
    """A name short enough for a socket address, and the descriptor to close after its use (-1: none)."""
    if len(path.encode()) < 100:
        return path, -1
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{name}", fd


def connect(path: str) -> socket.socket:
    """Connect to a message socket."""
    name, folder = reach(path)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(name)
    except OSError:
        link.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return link
