"""One instance: nothing is lost, nothing is over memory, speed is the bound's."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_cli.serving.bound import hideable, local_step, prefill
from ema_cli.serving.instance import Instance
from ema_cli.serving.presets import GPUS, MODELS, GpuSpec, Model, find_gpu, find_model, kv_share
from ema_cli.serving.step import MacroStep, Memory, Path
from ema_cli.serving.trace import Request
from ema_core.errors import InvalidInput

MODEL = Model("toy", weights=8_500, kv_per_token=1, params=10, layers=4)
GPU = GpuSpec("toy", memory=10_000, reserved=0, compute=10**6, read=10_000, nvlink=1_000, pcie=100)
SHARE = 1_500


def serve(instance: Instance, requests: Sequence[Request], memories: Sequence[Memory], until: float) -> list[MacroStep]:
    """Run to `until`; the memory is the next of `memories` at every macro-step, the last one for ever."""
    now, came = 0.0, 0
    steps: list[MacroStep] = []
    while now < until:
        while came < len(requests) and requests[came].arrival <= now:
            instance.arrive([requests[came]])
            came += 1
        following = requests[came].arrival if came < len(requests) else inf
        memory = memories[min(len(steps), len(memories) - 1)]
        step = instance.step(now, memory, following)
        if step is None:
            now = min(following, until)
            continue
        assert step.end > now
        assert instance.used_local <= memory.local
        assert instance.used_borrowed <= memory.borrowed
        steps.append(step)
        now = step.end
    return steps


def saturated(count: int, prompt: int = 100, generated: int = 5) -> list[Request]:
    return [Request(number, 0.0, prompt, generated) for number in range(count)]


def throughput(steps: Sequence[MacroStep]) -> float:
    """Tokens a second, without the ramp at the start."""
    settled = steps[len(steps) // 4 :]
    return sum(step.tokens for step in settled) / (settled[-1].end - settled[0].start)


def decode_gain(*, share: int, weights: float, borrowed: float, link: float, read: float) -> float:
    """Throughput of a memory-bound decode that borrows, over one that does not: (1 + R/((1-w)S)) / (1 + R/S).

    `share` is S in bytes, all of it in use, `weights` the part w of it, `borrowed` R in bytes; what does not hide
    stretches the step.
    """
    more = 1 + borrowed / ((1 - weights) * share)
    longer = max((share + borrowed) / read, borrowed / link) / (share / read)
    return more / longer


@pytest.mark.parametrize("borrowed", [0, 300, 600, 1_000])
def test_a_saturated_instance_gains_what_the_bound_predicts(borrowed: int) -> None:
    gpu = GpuSpec("no compute bound", 10_000, 0, 10**12, GPU.read, GPU.nvlink, GPU.pcie)
    alone = serve(Instance(model=MODEL, gpu=gpu, share=SHARE), saturated(8_000), [Memory(SHARE)], 4_000)
    memory = Memory(SHARE, (Path(borrowed, gpu.nvlink),))
    instance = Instance(model=MODEL, gpu=gpu, share=SHARE, link=gpu.nvlink, limit=borrowed)
    gain = throughput(serve(instance, saturated(12_000), [memory], 4_000)) / throughput(alone)
    # A prompt of 100 in a share of 1,500 leaves up to one request's room unused on either side.
    expected = decode_gain(share=10_000, weights=0.85, borrowed=borrowed, link=gpu.nvlink, read=gpu.read)
    assert gain == pytest.approx(expected, rel=0.08)


def test_borrowing_stops_where_bytes_hide_no_more() -> None:
    instance = Instance(model=MODEL, gpu=GPU, share=SHARE, link=GPU.nvlink, limit=9_000)
    steps = serve(instance, saturated(5_000), [Memory(SHARE, (Path(9_000, GPU.nvlink),))], 60)
    most = hideable(MODEL.weights + SHARE, link=GPU.nvlink, read=GPU.read)
    assert most == pytest.approx(10_000 / 9)
    assert most * 0.8 < instance.used_borrowed <= most * 1.1
    assert instance.demand().borrowed <= most * 1.1
    assert sum(step.exposed for step in steps) < 0.01 * steps[-1].end


def test_a_lone_step_takes_as_long_as_the_formula_says() -> None:
    instance = Instance(model=MODEL, gpu=GPU, share=SHARE)
    instance.arrive([Request(0, 0.0, 200, 1)])
    step = instance.step(0.0, Memory(SHARE))
    assert step is not None
    assert (step.steps, step.tokens, step.exposed) == (1, 1, 0.0)
    expected = prefill(MODEL, GPU, 200) + local_step(MODEL, GPU, kv=200.5, batch=1)
    assert step.end == pytest.approx(expected)


def test_requests_are_parked_when_memory_moves_to_a_slower_place_and_go_on_later() -> None:
    instance = Instance(model=MODEL, gpu=GPU, share=SHARE, link=GPU.nvlink, limit=900)
    instance.arrive(saturated(23, prompt=90, generated=10))
    fast, slow = Memory(SHARE, (Path(900, GPU.nvlink),)), Memory(SHARE, (Path(900, GPU.pcie),))
    first = instance.step(0.0, fast)
    assert first is not None
    borrowing = instance.borrowing()
    assert len(borrowing) == 8
    second = instance.step(first.end, slow)
    assert second is not None
    assert second.parked
    assert {active.order for active in second.parked} <= {active.order for active in borrowing}
    assert instance.used_borrowed == 800  # their bytes stay
    third = instance.step(second.end, fast)
    assert third is not None
    assert {a.order for a in (*third.resumed, *third.moved_home)} == {a.order for a in second.parked}


def test_a_request_that_nothing_can_hold_is_refused() -> None:
    instance = Instance(model=MODEL, gpu=GPU, share=SHARE)
    instance.arrive([Request(0, 0.0, 1_500, 1), Request(1, 0.0, 1_400, 1)])
    assert [request.id for request in instance.refused] == [0]
    assert [request.id for request in instance.queue] == [1]


def test_patience_ends() -> None:
    instance = Instance(model=MODEL, gpu=GPU, share=SHARE, patience=3)
    steps = serve(instance, saturated(200), [Memory(SHARE)], 30)
    begun = [active for step in steps for active in step.admitted]
    assert instance.left
    assert len(instance.left) + len(begun) + len(instance.queue) == 200
    assert all(step.start <= 3 for step in steps if step.admitted)


requests = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=60)
# Borrowed bytes never vanish, they only change place: so the sum grows or stays, as in a node's plan.
splits = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(requests, splits)
def test_every_request_is_served_once_with_all_its_tokens(
    rows: list[tuple[float, int, int]], places: list[tuple[int, int]]
) -> None:
    trace = [Request(i, at, prompt, made) for i, (at, prompt, made) in enumerate(sorted(rows))]
    memories = [Memory(SHARE, (Path(80 * near, GPU.nvlink), Path(800 - 80 * near, GPU.pcie))) for near, _ in places]
    instance = Instance(model=MODEL, gpu=GPU, share=SHARE, link=GPU.nvlink, limit=800)
    steps = serve(instance, trace, memories, until=10_000)
    finished = [active.request.id for step in steps for active in step.finished]
    assert sorted(finished) == [request.id for request in trace]
    assert sum(step.tokens for step in steps) == sum(request.generated for request in trace)
    assert (instance.used_local, instance.used_borrowed, instance.running, instance.parked) == (0, 0, 0, 0)
    assert instance.demand().local == instance.demand().borrowed == 0


def test_a_model_that_does_not_fit_is_refused_with_the_bytes() -> None:
    with pytest.raises(InvalidInput, match=r"141107412992.*the GPU has 85899345920"):
        kv_share(MODELS["llama-3.1-70b"], GPUS["a100-80g"])
    assert kv_share(MODELS["llama-3.1-70b"], GPUS["h200"]) > 8 * 10**9


def test_presets_and_numbers() -> None:
    assert find_model("Llama-3.1-8B").kv_per_token == 128 * 1024
    assert find_model("Llama-3.1-70B").kv_per_token == 320 * 1024
    assert find_model("weights=16Gi,kv=128Ki,params=8G,layers=32").weights == 16 * 2**30
    assert find_gpu("memory=24Gi,reserved=1Gi,compute=100T,read=1T,nvlink=0,pcie=25G").link("pcie") == 25 * 10**9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt", "--model: got 'gpt'; expected one of llama-3.1-8b"),
        ("weights=16GB,kv=1Ki,params=8G,layers=32", "--model weights: got '16GB'"),
        ("weights=16Gi,kv=0,params=8G,layers=32", "--model kv: got '0'; expected more than 0"),
        ("weights=16Gi,kv=1Ki,layers=32", "--model params: got None"),
        ("weights=16Gi,kv=1Ki,params=8G,layers=32,heads=8", "--model heads: got '8'; expected one of weights"),
    ],
)
def test_wrong_numbers_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        find_model(text)


def test_a_link_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="link: got 'nvlink'"):
        find_gpu("memory=24Gi,reserved=1Gi,compute=100T,read=1T,nvlink=0,pcie=25G").link("nvlink")
