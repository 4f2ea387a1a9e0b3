"""Fixtures of several test files."""

import pytest
from children import Child

from tf_smb import Server


@pytest.fixture
def spawn():
    children = []

    def start(script, *arguments):
        children.append(Child(script, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.wait()
        child.process.stdout.close()


@pytest.fixture
def server():
    with Server() as server:
        yield server
