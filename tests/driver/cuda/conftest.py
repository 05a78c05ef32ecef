"""What of the CUDA driver can be tested without a GPU. No fixture of the contract suite runs here."""

import pytest


@pytest.fixture
def nothing_leaks() -> None:
    """Nothing here takes memory."""
