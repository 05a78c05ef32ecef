"""A real GPU's stream whose agent is killed: it goes on, with NaN, and the error is told."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch: pip install '.[torch]'")
import torch
from torch import nn

import ema
from ema.torch import spill_activations
from ema_driver.protocol import MemoryDriver
from nodes import until
from real import POOL

pytestmark = pytest.mark.gpu


def test_gradients_are_nan_and_the_error_is_told(real_gpu: MemoryDriver, tmp_path: Path) -> None:
    assert real_gpu.devices()
    (tmp_path / "pool.yaml").write_text(POOL, "utf-8")
    command = [
        sys.executable,
        "-c",
        "from ema_cli.main import run; run()",
        "up",
        "--driver",
        "cuda",
        "--metrics",
        "off",
    ]
    command += ["--pool", str(tmp_path / "pool.yaml"), "--folder", str(tmp_path)]
    with (tmp_path / "agent.log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: "Ready" in (tmp_path / "agent.log").read_text("utf-8"), within=60, saying="the agent serves")
        with ema.connect(tmp_path / "client.sock") as pool, closing(spill_activations(pool, fraction=1.0)) as spill:
            model = nn.Sequential(*[m for _ in range(16) for m in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
            x = torch.randn(1024, 1024, device="cuda")

            def step() -> list[torch.Tensor]:
                model.zero_grad()
                with spill:
                    model(x).square().mean().backward()
                return [p.grad for p in model.parameters() if p.grad is not None]

            wanted = [grad.clone() for grad in step()]
            for _ in range(3):
                for one, other in zip(step(), wanted, strict=True):
                    torch.testing.assert_close(one, other)
            assert spill.report.spilled_bytes > 0
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000_000)  # about two seconds, in which all of the step is queued
            found = step()
            agent.kill()
            agent.wait(10)
            torch.cuda.synchronize()
            assert any(bool(grad.isnan().any()) for grad in found)
            with pytest.raises(ema.AgentLost), spill:
                raise AssertionError("nothing was run")
            for one, other in zip(step(), wanted, strict=True):
                torch.testing.assert_close(one, other)
            assert spill.report.spilled_bytes == 0
    finally:
        agent.kill()
        agent.wait(10)
