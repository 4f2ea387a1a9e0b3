"""The native files as installed: what they need, and that nothing names the build machine."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CORE, OPS = "libtf_smb_core.so", "_tf_smb_ops.so"
SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux.*)\.so\.\d+$")


def _package() -> Path:
    spec = importlib.util.find_spec("tf_smb")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _module() -> str:
    (found,) = _package().glob("_smb.*.so")
    return found.name


def _run(*command: str | Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: apt-get install binutils")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _dynamic(name: str, tag: str) -> set[str]:
    """Returns the values of one tag (NEEDED, RUNPATH) of a native file."""
    text = _run("readelf", "-d", _package() / name)
    return set(re.findall(rf"\({tag}\).*\[(.*)\]", text))


def _symbols(name: str, which: str) -> set[str]:
    lines = _run("nm", "-D", which, _package() / name).splitlines()
    return {line.split()[-1] for line in lines if not re.search(r" [wv] ", line)}


def test_core_needs_the_system_only():
    assert {n for n in _dynamic(CORE, "NEEDED") if not SYSTEM.match(n)} == set()
    assert _dynamic(CORE, "RUNPATH") | _dynamic(CORE, "RPATH") == set()


@pytest.mark.parametrize("which", ["module", "ops"])
def test_plugins_find_the_core_beside_them(which):
    name = OPS if which == "ops" else _module()
    needed = {n for n in _dynamic(name, "NEEDED") if not SYSTEM.match(n)}
    expected = {CORE, "libtensorflow_framework.so.2"} if which == "ops" else {CORE}
    assert needed == expected
    assert _dynamic(name, "RUNPATH") | _dynamic(name, "RPATH") == {"$ORIGIN"}


def test_op_library_uses_only_the_c_api():
    undefined = {s for s in _symbols(OPS, "--undefined-only") if "@GLIBC" not in s}
    undefined = {s for s in undefined if not re.search(r"@(CXXABI|GCC)", s)}
    foreign = undefined - {s.split("@")[0] for s in _symbols(CORE, "--defined-only")}
    assert {s for s in foreign if not s.startswith("TF_")} == set()
    assert foreign, "the op library registers nothing"


@pytest.mark.parametrize("which", ["module", "ops"])
def test_plugins_export_nothing_of_the_core(which):
    # A second copy of a core class in a plugin would be a second client in the process.
    exported = _symbols(OPS if which == "ops" else _module(), "--defined-only")
    assert {s for s in exported if "6tf_smb" in s} == set()
