"""Every Status code of the core becomes its own exception class, in one place."""

import builtins
import ctypes
import pickle
import re
from pathlib import Path

import pytest

from tf_smb import _smb, errors

# The codes of cc/common/status.h, in order, from 1.
CLASSES = [
    errors.InvalidArgumentError,
    errors.NotFoundError,
    errors.AlreadyExistsError,
    errors.FailedPreconditionError,
    errors.PermissionDeniedError,
    errors.ResourceExhaustedError,
    errors.DeadlineExceededError,
    errors.UnavailableError,
    errors.DataLossError,
    errors.AbortedError,
    errors.InternalError,
]

BUILTIN = {
    errors.InvalidArgumentError: ValueError,
    errors.NotFoundError: LookupError,
    errors.FailedPreconditionError: RuntimeError,
    errors.PermissionDeniedError: PermissionError,
    errors.ResourceExhaustedError: MemoryError,
    errors.DeadlineExceededError: TimeoutError,
    errors.UnavailableError: ConnectionError,
}


@pytest.mark.parametrize(("code", "expected"), list(enumerate(CLASSES, start=1)))
def test_every_code_has_its_class(code, expected):
    with pytest.raises(errors.Error) as caught:
        _smb.raise_status(code, "why: 'ü'")
    assert type(caught.value) is expected
    assert str(caught.value) == "why: 'ü'"


def test_ok_raises_nothing():
    _smb.raise_status(0, "dropped")


def test_code_of_a_newer_core_is_internal():
    with pytest.raises(errors.InternalError, match="from the future"):
        _smb.raise_status(len(CLASSES) + 1, "from the future")
    assert type(errors.from_status("NEVER_HEARD_OF", "x", "call")) is errors.InternalError


@pytest.mark.parametrize(
    ("number", "scope"), list(enumerate(("call", "connection", "lease", "server")))
)
@pytest.mark.parametrize("code", [1, 8, 9, 10])
def test_scope_says_what_to_make_anew(code, number, scope):
    with pytest.raises(errors.Error) as caught:
        _smb.raise_status(code, "why", number)
    assert caught.value.scope == scope
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.args, again.scope) == (type(caught.value), ("why",), scope)


@pytest.mark.parametrize("kind", CLASSES)
def test_scope_of_errors_that_python_raises(kind):
    usual = {errors.UnavailableError: "connection", errors.AbortedError: "lease"}
    assert kind("text").scope == usual.get(kind, "call")


@pytest.fixture(scope="module")
def tensorflow_code():
    """The map of the op library from StatusCode to TF_Code."""
    from tf_smb import ops

    ops._library()
    function = ctypes.CDLL(str(ops.library_path())).tf_smb_tensorflow_code
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return function


@pytest.mark.parametrize(("code", "kind"), list(enumerate(CLASSES, start=1)))
def test_every_code_has_its_tensorflow_class(tensorflow_code, code, kind):
    import tensorflow as tf

    # TensorFlow puts INTERNAL and its own words in the place of an op's UNAVAILABLE.
    ours = errors.FailedPreconditionError if kind is errors.UnavailableError else kind
    theirs = getattr(tf.errors, ours.__name__)(None, None, "why")
    assert tensorflow_code(code) == theirs.error_code
    assert tensorflow_code(code) != tf.errors.UNAVAILABLE


def test_ok_and_codes_of_a_newer_core_in_tensorflow(tensorflow_code):
    import tensorflow as tf

    assert tensorflow_code(0) == tf.errors.OK
    assert tensorflow_code(len(CLASSES) + 1) == tf.errors.UNKNOWN


def test_codes_are_those_of_the_core():
    header = (Path(__file__).parents[2] / "cc/common/status.h").read_text()
    named = re.findall(r"^  k(\w+) = (\d+),", header.partition("enum class FailureScope")[0], re.M)
    assert [(f"{name}Error", int(code)) for name, code in named[1:]] == [
        (kind.__name__, code) for code, kind in enumerate(CLASSES, start=1)
    ]
    assert list(errors._BY_CODE.values()) == CLASSES


def test_all_classes_are_in_the_map():
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.Error)
    }
    assert defined == {errors.Error, *CLASSES}


@pytest.mark.parametrize(("ours", "builtin"), list(BUILTIN.items()))
def test_callers_may_catch_the_builtin_class(ours, builtin):
    assert issubclass(ours, builtin)
    assert getattr(builtins, builtin.__name__) is builtin
    with pytest.raises(builtin):
        raise ours("text")
    assert str(ours("text")) == "text"
