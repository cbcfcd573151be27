import pytest

from vitrail.data.datasets import open_dataset


@pytest.fixture(scope="session")
def source():
    """The test split of a built-in dataset."""
    return open_dataset("builtin:sign-digits", "test")
