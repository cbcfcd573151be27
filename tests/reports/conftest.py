import pytest

from vitrail.data.datasets import open_dataset


@pytest.fixture(scope="session")
def source():
    return open_dataset("builtin:sign-digits", "test")
