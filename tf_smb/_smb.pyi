# The native module, built from cc/python/module.cc; box.py documents its classes.
from typing import Any

def __getattr__(name: str) -> Any: ...
