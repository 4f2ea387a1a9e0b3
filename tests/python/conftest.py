"""Fixtures of several test files."""

import sys

import pytest
from children import Child

from tf_smb import Server


@pytest.fixture(autouse=True)
def no_global_seed():
    """A seed that a test sets is TensorFlow's for the whole process."""
    yield
    if "tensorflow" in sys.modules:
        from tensorflow.python.eager import context

        context.set_global_seed(None)


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
