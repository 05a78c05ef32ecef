"""The demo and `ema replay` say the same about the same excerpt."""

from dataclasses import replace

import pytest

from ema_cli.demo.command import own_trace
from ema_cli.demo.figures import agree
from ema_cli.demo.layout import lay_out, pool_over
from ema_cli.demo.scale import Scale
from ema_cli.demo.trial import Kind, run
from ema_cli.serving.presets import GI, GPUS, MODELS
from ema_cli.serving.replay import Setup, replay
from ema_cli.serving.trace import read_trace


@pytest.mark.slow
def test_requests_served_agree_within_five_percent() -> None:
    scale = Scale(1024, 2.5)
    asked = Setup(
        requests=list(read_trace(own_trace())),
        pool=pool_over(2, 20 * GI, scale),
        model=MODELS["llama-3.1-8b"],
        gpu=replace(GPUS["a100-80g"], memory=20 * GI),
        link="nvlink",
        gpus=2,
        active=1,
        cycles=1,
        rate=1.5,
        patience=3.0,
        seed=0,
    )
    layout = lay_out(asked, 14.0, scale)
    replayed = replay(layout.setup).outcomes[1].served
    served = []
    for _ in range(3):  # real time: on a machine that is busy with something else a run serves less
        trial = run(layout, Kind("borrowing", 0, borrows=True), lambda _: None)
        assert trial.fetched > 0
        assert trial.wrong == trial.leaked == 0
        served.append(trial.outcome.served)
        if agree(served[-1], replayed):
            return
    pytest.fail(f"served {served}; replay says {replayed}")
