"""The exceptions of tf_smb: one class for each code of the C++ core's Status.

Every message is one sentence for people. Programs tell errors apart by class, and by `scope`
what to make anew before trying again; nobody needs to look at the text.
"""

from __future__ import annotations


class Error(Exception):
    """Any error that tf_smb raises about its use or its surroundings.

    Attributes:
        scope: What has to be made anew before another try can go better: "call" (nothing: the
            same call with other values, or later), "connection" (connect again), "lease" (join
            again) or "server" (it, or its segment, is lost: start it, seed again).
    """

    scope: str = "call"


class InvalidArgumentError(Error, ValueError):
    """A value that can never be right; the message has it and what is accepted."""


class NotFoundError(Error, LookupError):
    """No such segment, member or address."""


class AlreadyExistsError(Error):
    """The name, address or worker index is taken."""


class FailedPreconditionError(Error, RuntimeError):
    """The right request in the wrong state: another layout, another job, a forked child."""


class PermissionDeniedError(Error, PermissionError):
    """It belongs to another user."""


class ResourceExhaustedError(Error, MemoryError):
    """Not enough memory, members or descriptors; the message has needed and available."""


class DeadlineExceededError(Error, TimeoutError):
    """A wait ended before what it waited for came; the message names it."""


class UnavailableError(Error, ConnectionError):
    """The server cannot be reached."""

    scope = "connection"


class DataLossError(Error):
    """Bytes that cannot be what was written: a damaged segment or message."""


class AbortedError(Error):
    """This worker was fenced, or its lock lapsed: what it held is no longer its own."""

    scope = "lease"


class InternalError(Error):
    """A defect of tf_smb or of the system below it."""


# Status codes by the names of cc/common/status.cc.
_BY_CODE: dict[str, type[Error]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": AlreadyExistsError,
    "FAILED_PRECONDITION": FailedPreconditionError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "UNAVAILABLE": UnavailableError,
    "DATA_LOSS": DataLossError,
    "ABORTED": AbortedError,
    "INTERNAL": InternalError,
}


def from_status(code: str, message: str, scope: str) -> Error:
    """Returns the exception for a Status of the core: the one map from codes to classes."""
    error = _BY_CODE.get(code, InternalError)(message)
    error.scope = scope
    return error
