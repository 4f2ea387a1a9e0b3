"""Every Status code of the core becomes its own exception class, in one place."""

import builtins

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
    assert type(errors.from_status("NEVER_HEARD_OF", "x")) is errors.InternalError


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
