"""What TensorFlow and Keras are refused, and in which words."""

from __future__ import annotations

import pytest

from tf_smb.errors import FailedPreconditionError
from tf_smb.strategies.versions import check_versions


@pytest.mark.parametrize("tensorflow", ["2.16.1", "2.21.0", "2.100.0", "3.0.0-rc1"])
@pytest.mark.parametrize("keras", ["3.8.0", "3.15.1", "4.0.0.dev0"])
def test_accepted(tensorflow, keras):
    check_versions(tensorflow, keras, "tensorflow")


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        (("2.15.1", "3.8.0", "tensorflow"), "TensorFlow 2.16 or newer, found 2.15.1"),
        (("2.16.2", "3.7.0", "tensorflow"), "Keras 3.8 or newer, found 3.7.0"),
        (("2.16.2", "2.15.0", "tensorflow"), "Keras 3.8 or newer, found 2.15.0"),
        (("2.16.2", "3.8.0", "jax"), "found KERAS_BACKEND=jax"),
    ],
)
def test_refused(versions, sentence):
    with pytest.raises(FailedPreconditionError, match=sentence):
        check_versions(*versions)
