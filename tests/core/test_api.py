"""MemoryPool: what is accepted, what is refused, what is warned about."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_core.api import Escalation, LinkKind, MemoryPool, SpillTarget, load_pools
from ema_core.errors import InvalidInput
from ema_core.ids import GpuId, Place
from ema_core.quantity import MAX_BYTES
from ema_core.resolve import GpuFacts, implausible, resolve

GI = 2**30
A, B = GpuId(Place("GPU-a")), GpuId(Place("GPU-b"))


def document(**spec: object) -> dict[str, Any]:
    return {"apiVersion": "ema.dev/v1alpha1", "kind": "MemoryPool", "metadata": {"name": "p"}, "spec": spec}


def pool(**spec: object) -> MemoryPool:
    return load_pools([document(**spec)])[0]


def refusals(*documents: object) -> dict[str, str]:
    with pytest.raises(InvalidInput) as refused:
        load_pools(list(documents))
    return {error.field: str(error) for error in refused.value.errors}


def test_every_field_is_read() -> None:
    spec = pool(
        nodeSelector={"gpu": "h200"},
        gpus={"products": ["NVIDIA H200"], "links": ["NVLink"]},
        chunkSize="32Mi",
        lending={"maxPerGPU": "24Gi", "headroom": "2Gi", "hysteresis": 0, "host": "8Gi", "maxTraffic": "40G"},
        borrowing={
            "maxPerPod": "40Gi",
            "guaranteedPerPod": "1Gi",
            "namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]},
            "quotas": [{"namespace": "team-a", "max": "80Gi"}],
        },
        reclaim={
            "deadline": "50ms",
            "spillTo": ["Host", "Drop"],
            "hostMemory": "64Gi",
            "minHold": "1m",
            "escalation": "Evict",
        },
    ).spec
    assert spec.gpus.links == (LinkKind.NVLINK,)
    assert spec.lending.max_per_gpu.amount == 24 * GI
    assert spec.lending.max_traffic == 40_000_000_000
    assert spec.borrowing.quotas[0].max == 80 * GI
    assert spec.borrowing.namespace_selector.match_expressions[0].values == ("a",)
    assert spec.reclaim.spill_to == (SpillTarget.HOST, SpillTarget.DROP)
    assert (spec.reclaim.deadline, spec.reclaim.min_hold) == (0.05, 60.0)
    assert spec.reclaim.escalation is Escalation.EVICT


def test_an_empty_spec_has_sensible_defaults_without_warning() -> None:
    assert implausible(pool()) == []
    assert pool().spec.chunk_size == 64 * 2**20


def test_a_key_without_a_value_means_the_default() -> None:
    assert pool(lending=None) == pool()
    assert pool(lending={"headroom": None}) == pool()


def test_a_pool_exported_from_a_cluster_is_accepted() -> None:
    exported = document() | {"status": {"conditions": []}}
    exported["metadata"] |= {"uid": "x", "resourceVersion": "1", "generation": 3}
    assert load_pools([exported])[0].metadata.generation == 3


BYTES_FIELDS = [
    ("chunkSize",),
    ("lending", "maxPerGPU"),
    ("lending", "headroom"),
    ("lending", "hysteresis"),
    ("lending", "host"),
    ("lending", "maxTraffic"),
    ("borrowing", "maxPerPod"),
    ("borrowing", "guaranteedPerPod"),
    ("reclaim", "hostMemory"),
]


@pytest.mark.parametrize("path", BYTES_FIELDS, ids=".".join)
@pytest.mark.parametrize("text", ["4GB", "4G ", "-1", "-1Gi", "50 %", "", [], True])
def test_every_place_that_takes_bytes_refuses_what_is_no_quantity(path: tuple[str, ...], text: object) -> None:
    spec: dict[str, object] = {path[-1]: text} if len(path) == 1 else {path[0]: {path[1]: text}}
    field = ".".join(("spec", *path))
    message = refusals(document(**spec))[field]
    assert message.startswith(f"{field}: got {text!r}; expected a")


@pytest.mark.parametrize("path", BYTES_FIELDS, ids=".".join)
@pytest.mark.parametrize("text", ["4Gi", "08G", "1.5Gi", "4096000"])
def test_every_place_that_takes_bytes_accepts_kubernetes_quantities(path: tuple[str, ...], text: str) -> None:
    if path == ("chunkSize",) and text == "08G":
        text = "08192k"
    spec: dict[str, object] = {path[-1]: text} if len(path) == 1 else {path[0]: {path[1]: text}}
    assert pool(**spec) is not None


def test_all_wrong_fields_are_reported_at_once() -> None:
    found = refusals(
        document(
            chunkSize="5",
            lending={"headrom": "1Gi", "maxPerGPU": "110%"},
            reclaim={"spillTo": ["Peer", "Disk"], "deadline": 5},
            borrowing={"quotas": [{"namespace": "Team A"}]},
        )
        | {"kind": "Pool"}
    )
    assert set(found) == {
        "kind",
        "spec.lending.headrom",
        "spec.lending.maxPerGPU",
        "spec.reclaim.spillTo[1]",
        "spec.reclaim.deadline",
        "spec.borrowing.quotas[0].namespace",
        "spec.borrowing.quotas[0].max",
    }
    assert "one of Peer, Host, Drop" in found["spec.reclaim.spillTo[1]"]
    assert "one of MemoryPool" in found["kind"]
    assert "there are maxPerGPU, headroom" in found["spec.lending.headrom"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"chunkSize": "0"}, "spec.chunkSize"),
        ({"chunkSize": "5000"}, "spec.chunkSize"),
        ({"borrowing": {"maxPerPod": "1Gi", "guaranteedPerPod": "2Gi"}}, "spec.borrowing.guaranteedPerPod"),
        ({"reclaim": {"deadline": "0s"}}, "spec.reclaim.deadline"),
        ({"reclaim": {"spillTo": ["Host", "Host"]}}, "spec.reclaim.spillTo"),
        ({"lending": {"maxTraffic": 0}}, "spec.lending.maxTraffic"),
        (
            {"borrowing": {"quotas": [{"namespace": "a", "max": 1}, {"namespace": "a", "max": 2}]}},
            "spec.borrowing.quotas",
        ),
    ],
)
def test_values_that_cannot_hold_together_are_refused(spec: dict[str, object], field: str) -> None:
    assert list(refusals(document(**spec))) == [field]


@pytest.mark.parametrize("wrong", [None, [], "x", 3])
def test_a_document_that_is_no_mapping_is_refused(wrong: object) -> None:
    assert "a mapping with apiVersion" in next(iter(refusals(wrong).values()))
    assert "document 2" in refusals(document(), wrong)


def test_no_document_and_two_of_one_name_are_refused() -> None:
    assert "pool" in refusals()
    assert "metadata.name" in refusals(document(), document())


def test_an_implausible_scale_is_accepted_with_a_warning() -> None:
    low, good = pool(lending={"maxPerGPU": 1}), pool(lending={"maxPerGPU": "20Gi"})
    assert any("spec.lending.maxPerGPU" in warning for warning in implausible(low))
    assert implausible(good) == []
    assert any("check the unit" in warning for warning in implausible(pool(borrowing={"maxPerPod": "40Ti"})))
    assert any("headroom" in warning for warning in implausible(pool(lending={"headroom": 1})))


def test_warnings_of_pools_that_can_lend_nothing_that_must_be_kept() -> None:
    assert any("droppable" in warning for warning in implausible(pool(reclaim={"hostMemory": 0})))
    assert any("2Mi" in warning for warning in implausible(pool(chunkSize="4Ki")))


def test_sizes_are_resolved_per_device() -> None:
    gpus = {A: GpuFacts("small", 16 * GI), B: GpuFacts("big", 80 * GI)}
    assert resolve(pool(), gpus).max_per_gpu == {A: 8 * GI, B: 40 * GI}
    assert resolve(pool(lending={"maxPerGPU": "40Gi"}), gpus).max_per_gpu == {A: 16 * GI, B: 40 * GI}


def test_only_selected_products_take_part() -> None:
    policy = resolve(pool(gpus={"products": ["big"]}), {A: GpuFacts("small", 16 * GI), B: GpuFacts("big", 80 * GI)})
    assert policy.gpus == {B}


def test_spill_targets_reach_the_policy() -> None:
    policy = resolve(pool(reclaim={"spillTo": ["Drop"], "hostMemory": MAX_BYTES}), {})
    assert (policy.spill_to_peer, policy.spill_to_host, policy.spill_to_drop) == (False, False, True)
    assert policy.host_spill == 0


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)
PLACES = [
    (),
    ("metadata",),
    ("spec",),
    ("spec", "gpus"),
    ("spec", "lending"),
    ("spec", "borrowing"),
    ("spec", "reclaim"),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), st.data())
def test_any_value_anywhere_is_accepted_or_refused_by_field(place: tuple[str, ...], data: st.DataObject) -> None:
    whole = document(gpus={}, lending={}, borrowing={}, reclaim={})
    target = whole
    for name in place:
        target = target[name]
    names = ["name", "chunkSize", "maxPerGPU", "headroom", "quotas", "spillTo", "deadline", "links", "spec", "lending"]
    target[data.draw(st.sampled_from(names))] = data.draw(plain)
    with suppress(InvalidInput):
        assert load_pools([whole])


def test_an_integer_too_long_to_be_written_out_is_refused_all_the_same() -> None:
    huge = 1 << 20_000
    found = refusals(document(chunkSize=huge, nodeSelector=[huge], reclaim={"deadline": huge}))
    assert set(found) == {"spec.chunkSize", "spec.nodeSelector", "spec.reclaim.deadline"}
    assert all("too long to be shown" in message for message in found.values())
