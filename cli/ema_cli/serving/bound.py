"""The bound: what no arrangement of copies can beat, and what a serving step takes under it.

A decode step of a batch reads all weights and all keys and values once, so its time is the largest of

    local time   (weights + KV) / read rate          the GPU's own memory
    compute      2 * params * batch / compute rate
    link time    borrowed KV / link rate             each path by itself, they run side by side

and what the link needs beyond the other two is *exposed wait*. Borrowed bytes go through the GPU's memory too, so they
count in the local time. Bytes R hide behind the local time while R / link <= (S + R) / read, that is up to
rho / (1 - rho) * S with rho = link / read and S the bytes read that are local.
"""

from ema_cli.serving.presets import GpuSpec, Model


def hideable(local: int, *, link: float, read: float) -> float:
    """Most borrowed bytes that a memory-bound step hides, when it reads `local` bytes of its own. Rates in bytes/s.

    Infinite where the link is as fast as memory.
    """
    rho = link / read
    return float("inf") if rho >= 1 else rho / (1 - rho) * local


def local_step(model: Model, gpu: GpuSpec, *, kv: float, batch: int) -> float:
    """Seconds of one decode step of `batch` requests whose keys and values are `kv` bytes, without any link."""
    return max((model.weights + kv) / gpu.read, 2 * model.params * batch / gpu.compute)


def prefill(model: Model, gpu: GpuSpec, tokens: int) -> float:
    """Seconds of computing a prompt of `tokens`."""
    return 2 * model.params * tokens / gpu.compute
