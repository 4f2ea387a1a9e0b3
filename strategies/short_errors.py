"""Errors that a person can read: an uncaught tf_smb error ends a script with its sentence.

The frames of Keras and TensorFlow between the user's line and the sentence say nothing about
the mistake. `TF_SMB_TRACEBACK=full` shows them all.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from tf_smb.errors import Error

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _user_line(frames: TracebackType | None) -> str:
    """Returns "file:line" of the script's own innermost frame."""
    place = ""
    for frame in traceback.extract_tb(frames):
        inside = os.path.abspath(frame.filename)
        if "site-packages" in inside or inside.startswith(_OWN_FOLDER) or "<" in frame.filename:
            break
        place = f"{frame.filename}:{frame.lineno}: "
    return place


def install() -> None:
    """Makes uncaught tf_smb errors short; leaves all other errors to the hook before it."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not issubclass(kind, Error) or os.environ.get("TF_SMB_TRACEBACK") == "full":
            previous(kind, error, frames)
            return
        sys.stdout.flush()
        print(f"{_user_line(frames)}tf_smb.{kind.__name__}: {error}", file=sys.stderr)

    if getattr(previous, "_tf_smb", False):
        return
    hook._tf_smb = True  # type: ignore[attr-defined]
    sys.excepthook = hook
