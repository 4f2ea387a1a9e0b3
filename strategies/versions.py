"""Which TensorFlow and Keras this package works with."""

from __future__ import annotations

import re

from tf_smb.errors import FailedPreconditionError

OLDEST_TENSORFLOW = (2, 16)
OLDEST_KERAS = (3, 8)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_versions(tensorflow_version: str, keras_version: str, keras_backend: str) -> None:
    """Refuses what cannot work, in a sentence with the version found.

    Raises:
        FailedPreconditionError: TensorFlow or Keras is too old, or Keras has another backend.
    """
    if _numbers(tensorflow_version) < OLDEST_TENSORFLOW:
        raise FailedPreconditionError(
            f"tf_smb needs TensorFlow 2.16 or newer, found {tensorflow_version}: "
            "pip install -U tensorflow [SMB-E400]"
        )
    if _numbers(keras_version) < OLDEST_KERAS:
        raise FailedPreconditionError(
            f"tf_smb needs Keras 3.8 or newer, found {keras_version}: "
            "pip install -U 'keras>=3.8' [SMB-E401]"
        )
    if keras_backend != "tensorflow":
        raise FailedPreconditionError(
            "tf_smb needs Keras on its TensorFlow backend, found "
            f"KERAS_BACKEND={keras_backend}: unset it, or set it to tensorflow [SMB-E402]"
        )
