"""Reclaim: the lender has its bytes, the borrower has its data, whatever the borrower does."""

from nodes import MIB, Node, pattern


def test_what_is_stored_is_fetched(node: Node) -> None:
    client = node.connect(0)
    region = client.region(4 * MIB)
    data = pattern(1, 4 * MIB)
    region.store(data, at=0)
    assert node.memory(0).used == node.before[node.gpus[0]].used + client._staging.size  # type: ignore[union-attr]
    back = bytearray(4 * MIB)
    region.fetch(0, back)
    assert back == data
    node.settle()
