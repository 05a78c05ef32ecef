"""Where there is no usable CUDA, opening a session says what was looked for and what to do; it never crashes."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from ema_core.ids import GpuId, Place
from ema_driver import open_guest, open_node
from ema_driver.cuda.api import Api
from ema_driver.errors import ContextLost, DriverError, DriverUnavailable, InvalidUse

Install = Callable[..., ModuleType]


class Codes:
    """Result codes by number, as the bindings name them."""

    def __init__(self, code: int) -> None:
        self.name = {1: "CUDA_ERROR_INVALID_VALUE", 700: "CUDA_ERROR_ILLEGAL_ADDRESS", 999: "CUDA_ERROR_UNKNOWN"}[code]


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts bindings with these functions in place of what is installed."""

    def install(**functions: object) -> ModuleType:
        module = ModuleType("cuda.bindings.driver")
        for name, function in {"CUresult": Codes, "cuInit": lambda _: (0,), **functions}.items():
            setattr(module, name, function)
        for name in ("cuda", "cuda.bindings"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
        return module

    return install


def fails(error: Exception) -> Callable[..., object]:
    def call(*_: object) -> object:
        raise error

    return call


def test_without_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverUnavailable, match=r"cuda-bindings.*pip install '\.\[cuda\]'"):
        open_node("cuda", "")
    with pytest.raises(DriverUnavailable, match="cuda-bindings"):
        open_guest("cuda", None, GpuId(Place("GPU-x")))


def test_without_a_library_it_says_which(bindings: Install) -> None:
    bindings(cuInit=fails(RuntimeError("no libcuda")))
    with pytest.raises(DriverUnavailable, match=r"libcuda\.so\.1.*install the NVIDIA driver"):
        open_node("cuda", "")


@pytest.mark.parametrize("code", [100, 999, 803])
def test_a_driver_that_does_not_start_says_why(bindings: Install, code: int) -> None:
    bindings(cuInit=lambda _: (code,), CUresult=lambda code: fails(ValueError())() if code == 803 else Codes(code))
    with pytest.raises(DriverUnavailable, match=r"UNKNOWN|code 803|found none"):
        open_node("cuda", "")


def test_a_machine_without_gpus_says_so(bindings: Install) -> None:
    bindings(cuDeviceGetCount=lambda: (0, 0))
    with pytest.raises(DriverUnavailable, match="found none"):
        open_node("cuda", "")


def test_a_function_that_an_old_driver_lacks_is_named(bindings: Install) -> None:
    bindings(cuDeviceGetCount=fails(RuntimeError('Function "cuDeviceGetCount" not found')))
    with pytest.raises(DriverUnavailable, match=r"cuDeviceGetCount.*newer NVIDIA driver"):
        open_node("cuda", "")


def test_importing_the_driver_package_imports_no_cuda() -> None:
    look = "sys.exit(any(m.split('.')[0] in ('cuda', 'pynvml') for m in sys.modules))"
    code = f"import sys, ema_driver, ema_driver.cuda; {look}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sticky_error_is_remembered(bindings: Install) -> None:
    bindings(cuWork=lambda: (700,), cuFine=lambda: (0, 5))
    api = Api()
    assert api.call("cuFine") == 5
    with pytest.raises(ContextLost, match="ILLEGAL_ADDRESS"):
        api.call("cuWork")
    with pytest.raises(ContextLost, match="ILLEGAL_ADDRESS"):
        api.call("cuFine")


def test_misuse_is_told_from_a_lost_context(bindings: Install) -> None:
    module = bindings(cuWork=lambda: (1,), cuImport=lambda: (999,), cuMemGetInfo=lambda: (0, 1, 2), cuFine=lambda: (0,))
    api = Api()
    with pytest.raises(InvalidUse):
        api.call("cuWork")
    with pytest.raises(DriverError, match="UNKNOWN"):
        api.call("cuImport")
    assert api.call("cuFine") is None
    module.cuMemGetInfo = lambda: (999,)  # type: ignore[attr-defined]
    with pytest.raises(ContextLost):
        api.call("cuImport")
