"""MemoryPool `ema.dev/v1alpha1`, as people write it in pool.yaml and in the cluster.

Names in YAML are camelCase. Amounts are Kubernetes quantities, durations Go's; what is held here is bytes and seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

import msgspec

from ema_core.errors import FieldError, InvalidInput
from ema_core.quantity import parse_duration, parse_percent, parse_quantity
from ema_core.reading import Parser, read

KIND = "MemoryPool"

Bytes = NewType("Bytes", int)
"""In YAML a quantity."""
BytesPerSecond = NewType("BytesPerSecond", int)
"""In YAML a quantity of bytes per second."""
Seconds = NewType("Seconds", float)
"""In YAML a duration."""
Name = NewType("Name", str)
"""A DNS label or subdomain, as Kubernetes names objects."""

MI = 2**20
GI = 2**30


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a GPU's memory: in YAML a quantity (`24Gi`) or a percentage (`50%`). Just one of the two is set."""

    amount: int | None = None
    """Bytes."""
    percent: int | None = None

    def of(self, total: int) -> int:
        """In bytes, never more than `total`."""
        if self.percent is not None:
            return total * self.percent // 100
        return min(total, self.amount or 0)


class LinkKind(StrEnum):
    """How bytes get from one GPU to another."""

    NVLINK = "NVLink"
    PCIE = "PCIe"


class SpillTarget(StrEnum):
    """Where reclaimed bytes go."""

    PEER = "Peer"
    """Another lender with room."""
    HOST = "Host"
    """Host memory, within `hostMemory`."""
    DROP = "Drop"
    """Nowhere; only bytes that the borrower declared droppable."""


class Escalation(StrEnum):
    """What happens to a borrower whose bytes are overdue."""

    NONE = "None"
    EVICT = "Evict"
    """Its pod is evicted through the Eviction API."""


class _Spec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What all parts of a spec have in common."""


class Requirement(_Spec, frozen=True):
    """One entry of a label selector's `matchExpressions`."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelector(_Spec, frozen=True):
    """Kubernetes' label selector; empty selects everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


class GpuSelector(_Spec, frozen=True):
    """Which GPUs of the selected nodes take part. Empty lists select all."""

    products: tuple[str, ...] = ()
    """Product names as the driver gives them, such as `NVIDIA H200`."""
    links: tuple[LinkKind, ...] = ()
    """Links over which bytes may be lent."""


class Lending(_Spec, frozen=True):
    """What a GPU lends."""

    max_per_gpu: Share = msgspec.field(default=Share(percent=50), name="maxPerGPU")
    headroom: Bytes = Bytes(GI)
    """Kept free on every lending GPU."""
    hysteresis: Bytes = Bytes(256 * MI)
    """Free beyond headroom before a GPU lends more."""
    host: Bytes = Bytes(0)
    """Host memory offered as a lender of last resort."""
    max_traffic: BytesPerSecond | None = None
    """Most that copies may read from or write to one lender; none: whatever the link carries."""


class Quota(_Spec, frozen=True):
    """Most that all pods of a namespace may borrow together."""

    namespace: Name
    max: Bytes


class Borrowing(_Spec, frozen=True):
    """Who may borrow, and how much."""

    max_per_pod: Bytes | None = None
    """None: whatever can be lent."""
    guaranteed_per_pod: Bytes = Bytes(0)
    namespace_selector: LabelSelector = LabelSelector()
    quotas: tuple[Quota, ...] = ()


class Reclaim(_Spec, frozen=True):
    """How bytes are taken back."""

    deadline: Seconds = Seconds(1.0)
    """After it, bytes that could not leave their lender are overdue."""
    spill_to: tuple[SpillTarget, ...] = (SpillTarget.PEER, SpillTarget.HOST, SpillTarget.DROP)
    host_memory: Bytes = Bytes(32 * GI)
    """Host memory for reclaimed bytes. Bytes that must not be lost are lent only while room for them is left in it."""
    min_hold: Seconds = Seconds(5.0)
    """How long a borrower keeps what it got against its equals; never against the lender."""
    escalation: Escalation = Escalation.NONE


class PoolSpec(_Spec, frozen=True):
    """What a pool is."""

    node_selector: dict[str, str] = {}
    """Labels of the nodes that it spans; empty: all."""
    gpus: GpuSelector = GpuSelector()
    chunk_size: Bytes = Bytes(64 * MI)
    """Bytes are lent and moved in whole chunks."""
    lending: Lending = Lending()
    borrowing: Borrowing = Borrowing()
    reclaim: Reclaim = Reclaim()


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What we read of Kubernetes' metadata; the rest of it is Kubernetes' own."""

    name: Name
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    generation: int = 0


class MemoryPool(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """GPUs that lend idle memory to each other, and the rules for it."""

    api_version: Literal["ema.dev/v1alpha1"]
    kind: Literal["MemoryPool"]
    metadata: Metadata
    spec: PoolSpec = PoolSpec()
    status: dict[str, object] = {}
    """Written by the operator; accepted and ignored in a file, so that `kubectl get -o yaml` gives a usable one."""


def _share(value: object, field: str) -> Share:
    if isinstance(value, str) and "%" in value:
        return Share(percent=parse_percent(value, field))
    try:
        return Share(amount=parse_quantity(value, field))
    except InvalidInput as refused:
        raise InvalidInput.of(field, value, f"{refused.errors[0].expected}, or a percentage such as 50%") from None


def _name(value: object, field: str) -> str:
    if (
        isinstance(value, str)
        and 0 < len(value) <= 253
        and value.isascii()
        and all(part and part.replace("-", "a").isalnum() and part.strip("-") == part for part in value.split("."))
        and value == value.lower()
    ):
        return value
    raise InvalidInput.of(field, value, "a name of lower-case letters, digits, '-' and '.', at most 253 long")


_PARSERS: dict[object, Parser] = {
    Bytes: parse_quantity,
    BytesPerSecond: parse_quantity,
    Seconds: parse_duration,
    Share: _share,
    Name: _name,
}
_MIN_CHUNK = 4096


def load_pools(documents: Sequence[object]) -> list[MemoryPool]:
    """MemoryPools from parsed YAML documents (mappings, lists, strings, numbers), in order.

    Raises InvalidInput with every wrong field of every document.
    """
    errors: list[FieldError] = []
    pools: list[MemoryPool] = []
    for index, document in enumerate(documents):
        path = "" if len(documents) == 1 else f"document {index + 1}"
        try:
            pool = read(MemoryPool, document, path=path, parsers=_PARSERS)
        except InvalidInput as refused:
            errors += refused.errors
            continue
        errors += _contradictions(pool, f"{path}.spec" if path else "spec")
        pools.append(pool)
    seen: set[str] = set()
    for pool in pools:
        if pool.metadata.name in seen:
            errors.append(FieldError("metadata.name", pool.metadata.name, "a name that no other pool here has"))
        seen.add(pool.metadata.name)
    if not documents:
        errors.append(FieldError("pool", None, f"at least one {KIND} document"))
    if errors:
        raise InvalidInput(errors)
    return pools


def _contradictions(pool: MemoryPool, path: str) -> Iterable[FieldError]:
    """Values that are well formed each and cannot hold together."""
    spec = pool.spec
    chunk, borrowing, reclaim = spec.chunk_size, spec.borrowing, spec.reclaim
    if chunk < _MIN_CHUNK or chunk % _MIN_CHUNK:
        yield FieldError(f"{path}.chunkSize", chunk, "a positive multiple of 4Ki (of 2Mi on real GPUs), such as 64Mi")
    if borrowing.max_per_pod is not None and borrowing.guaranteed_per_pod > borrowing.max_per_pod:
        yield FieldError(
            f"{path}.borrowing.guaranteedPerPod", borrowing.guaranteed_per_pod, "at most borrowing.maxPerPod"
        )
    if spec.lending.max_traffic == 0:
        yield FieldError(f"{path}.lending.maxTraffic", 0, "a rate above 0, such as 40G, or no such field")
    if reclaim.deadline <= 0:
        yield FieldError(f"{path}.reclaim.deadline", reclaim.deadline, "a duration longer than 0s")
    if len(set(reclaim.spill_to)) != len(reclaim.spill_to):
        yield FieldError(f"{path}.reclaim.spillTo", [str(t) for t in reclaim.spill_to], "each target once")
    quota_names = [quota.namespace for quota in borrowing.quotas]
    if len(set(quota_names)) != len(quota_names):
        yield FieldError(f"{path}.borrowing.quotas", quota_names, "each namespace once")
