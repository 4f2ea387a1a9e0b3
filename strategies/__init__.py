"""The strategy of tf_smb, for Keras on TensorFlow."""

from tf_smb.strategies.strategy import SMBStrategy

__all__ = ["SMBStrategy"]
