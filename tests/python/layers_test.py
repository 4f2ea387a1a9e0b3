"""The layer law: who may include and import whom. See docs/architecture.md.

The law itself stands in cc/build_settings.bzl (C++) and in the constants below. The
checkers take a folder, so that the tests at the end can show them made-up offenders.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
# Includes that belong to one layer, each with the folder that may have it.
_FOREIGN = {
    re.compile(r"(tensorflow|tsl|xla)/"): "kernels",
    re.compile(r"(pybind11/|Python\.h$|numpy/)"): "python",
    re.compile(r"absl/"): None,
}
# In kernels, TensorFlow's stable C API only: its C++ headers tie a binary to one version.
_TENSORFLOW_C_API = re.compile(r"tensorflow/c/[^/]+\.h$")


def load_layers(root: Path) -> dict[str, list[str]]:
    """Returns LAYERS of cc/build_settings.bzl, whose syntax is also Python's."""
    for node in ast.parse((root / "cc/build_settings.bzl").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return ast.literal_eval(node.value)
    raise AssertionError("cc/build_settings.bzl defines no LAYERS")


def include_violations(root: Path, layers: dict[str, list[str]]) -> list[str]:
    """Returns one line for each #include below root/cc that the law forbids."""
    found = []
    for path in sorted((root / "cc").rglob("*")):
        if path.suffix not in (".cc", ".h"):
            continue
        name = path.relative_to(root).as_posix()
        layer = path.relative_to(root / "cc").parts[0]
        if layer not in layers:
            found.append(f"{name}: cc/{layer} is not in LAYERS")
            continue
        for bracket, header in _INCLUDE.findall(path.read_text()):
            wrong = _include_violation(layer, layers, bracket, header)
            if wrong is None and header.startswith("cc/") and not (root / header).is_file():
                wrong = "there is no such file"
            if wrong:
                found.append(f"{name}: includes {header}: {wrong}")
    return found


def _include_violation(
    layer: str, layers: dict[str, list[str]], bracket: str, header: str
) -> str | None:
    if header.startswith("cc/"):
        target = header.split("/")[1]
        if target != layer and target not in layers[layer]:
            return f"{layer} may include only from {[*layers[layer], layer]}"
        return None
    for pattern, owner in _FOREIGN.items():
        if pattern.match(header):
            if layer != owner:
                return f"only cc/{owner} may" if owner else "not used in this project"
            if owner == "kernels" and not _TENSORFLOW_C_API.match(header):
                return "only tensorflow/c/*.h, the C API"
            return None
    if bracket == '"':
        return 'headers of this project are written from the root: "cc/..."'
    return None


def _module_level_imports(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that importing `tree` imports, relative ones with their dots."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue  # runs later, when called
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            separator = "" if module.endswith(".") else "."
            yield from (module + separator + alias.name for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def import_violations(root: Path) -> list[str]:
    """Returns one line for each module-level import below root/tf_smb that the law forbids."""
    found = []
    for path in sorted((root / "tf_smb").rglob("*.py")):
        if (root / "tf_smb/strategies") in path.parents:
            continue  # a link to strategies/, where someone has one
        for module in _module_level_imports(ast.parse(path.read_text())):
            if re.match(r"(tf_smb\.|\.+)?strategies(\.|$)", module):
                found.append(
                    f"{path.relative_to(root).as_posix()}: imports {module}: tf_smb lies left of "
                    "strategies; import it inside the function that needs it"
                )
    return found


def test_includes_obey_the_law():
    assert include_violations(ROOT, load_layers(ROOT)) == []


def test_imports_obey_the_law():
    assert import_violations(ROOT) == []


def test_law_has_no_cycle():
    layers = load_layers(ROOT)
    order = list(layers)
    for layer, lefts in layers.items():
        assert [left for left in lefts if order.index(left) >= order.index(layer)] == []
        # A layer that includes another gets that one's includes too: say so.
        for left in lefts:
            assert set(layers[left]) <= set(lefts), f"{layer} includes {left}, not what it includes"
    assert "server" not in layers["client"]
    assert "client" not in layers["server"]


@pytest.mark.parametrize("module", ["tf_smb", "tf_smb.cli", "tf_smb._smb"])
def test_import_leaves_tensorflow_out(module):
    code = (
        f"import sys, {module}\n"
        "print([m for m in ('tensorflow', 'keras', 'tf_smb.strategies') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("cc/wire/a.h", '#include "cc/server/b.h"'),
        ("cc/server/a.cc", '#include "cc/client/c.h"'),
        ("cc/client/a.cc", '#include "cc/server/b.h"'),
        ("cc/transport/shm/a.cc", '#  include "cc/server/b.h"'),
        ("cc/common/a.cc", "#include <tensorflow/c/kernels.h>"),
        ("cc/kernels/a.cc", '#include "tensorflow/core/framework/op.h"'),
        ("cc/kernels/a.cc", '#include "tensorflow/c/experimental/grappler/grappler.h"'),
        ("cc/kernels/a.cc", "#include <pybind11/pybind11.h>"),
        ("cc/box/a.cc", '#include "absl/strings/string_view.h"'),
        ("cc/server/a.cc", "#include <Python.h>"),
        ("cc/server/a.cc", '#include "b.h"'),
        ("cc/server/a.cc", '#include "cc/server/missing.h"'),
        ("cc/surprise/a.cc", ""),
    ],
)
def test_bad_include_is_found(tmp_path, name, include):
    _write(tmp_path, {"cc/server/b.h": "", "cc/client/c.h": "", name: f"// x\n{include}\n"})
    found = include_violations(tmp_path, load_layers(ROOT))
    assert len(found) == 1
    assert found[0].startswith(name)


def test_good_includes_are_left_alone(tmp_path):
    _write(
        tmp_path,
        {
            "cc/common/a.h": "#include <vector>\n",
            "cc/server/b.h": '#include "cc/common/a.h"\n#include <sys/mman.h>\n',
            "cc/kernels/c.cc": '#include "tensorflow/c/kernels.h"\n#include "cc/server/b.h"\n',
            "cc/python/d.cc": '#include <pybind11/pybind11.h>\n// #include "cc/kernels/x.h"\n',
        },
    )
    assert include_violations(tmp_path, load_layers(ROOT)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import tf_smb.strategies",
        "from tf_smb.strategies import SMBStrategy",
        "from tf_smb import strategies",
        "from . import strategies",
        "from .strategies import rules",
        "import strategies",
        "try:\n    from tf_smb.strategies import a\nexcept ImportError:\n    pass",
        "class A:\n    from tf_smb import strategies",
    ],
)
def test_bad_import_is_found(tmp_path, code):
    _write(tmp_path, {"tf_smb/a.py": code})
    assert import_violations(tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "import tensorflow as tf",
        "from tf_smb import errors",
        "def f():\n    from tf_smb import strategies",
        "import typing\nif typing.TYPE_CHECKING:\n    from tf_smb import strategies",
    ],
)
def test_good_import_is_left_alone(tmp_path, code):
    _write(tmp_path, {"tf_smb/a.py": code})
    assert import_violations(tmp_path) == []
