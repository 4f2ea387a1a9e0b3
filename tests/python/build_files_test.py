"""CMake and Bazel build the same files with the same flags, and the package ships them all."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = {"_smb.so": "_smb", "_tf_smb_ops.so": "_tf_smb_ops"}


def _settings() -> dict:
    settings: dict = {}
    exec((ROOT / "cc/build_settings.bzl").read_text(), settings)
    return settings


class Targets(dict[str, dict]):
    """The targets of BUILD by name. Its few Starlark constructs are Python's too."""

    def __init__(self) -> None:
        super().__init__()

        def rule(**attributes):
            self[attributes["name"]] = attributes

        def load(label, *names):
            namespace.update({name: settings[name] for name in names})

        def nothing(*args, **kwargs):
            return None

        settings = _settings()
        namespace: dict = {
            "load": load,
            "glob": self._glob,
            "cc_library": rule,
            "cc_binary": rule,
            "cc_test": rule,
            "package": nothing,
            "licenses": nothing,
            "exports_files": nothing,
        }
        exec((ROOT / "BUILD").read_text(), namespace)

    @staticmethod
    def _glob(patterns):
        return sorted(p.relative_to(ROOT).as_posix() for one in patterns for p in ROOT.glob(one))

    def sources(self, name: str) -> set[str]:
        return {source for source in self[name].get("srcs", []) if source.endswith(".cc")}


@pytest.fixture(scope="module")
def bazel() -> Targets:
    return Targets()


@pytest.fixture(scope="module")
def cmake(tmp_path_factory) -> dict[str, dict[str, set[str]]]:
    """Source -> flags for each target of CMakeLists.txt, from a configured build folder."""
    beside_python = Path(sys.executable).parent / "cmake"
    program = str(beside_python) if beside_python.exists() else shutil.which("cmake")
    if program is None:
        pytest.skip("no cmake: pip install cmake")
    build = tmp_path_factory.mktemp("cmake")
    configure = [program, "-S", str(ROOT / "cc"), "-B", str(build), "-DTF_SMB_BUILD_TESTS=ON"]
    done = subprocess.run(
        [*configure, f"-DPython_EXECUTABLE={sys.executable}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    targets: dict[str, dict[str, set[str]]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = entry["command"].split()
        output = words[words.index("-o") + 1]
        target = output.split("CMakeFiles/")[1].split(".dir/")[0]
        # What CMake adds by itself: where things are, and position-independent code.
        by_cmake = re.compile(r"-(D|I|o|c|isystem$|fPI[CE]$|ffile-prefix-map=)")
        flags = {w for w in words[1:] if w.startswith("-") and not by_cmake.match(w)}
        source = Path(entry["file"]).resolve().relative_to(ROOT).as_posix()
        targets.setdefault(target, {})[source] = flags
    return targets


def test_every_source_is_in_one_bazel_target(bazel):
    owners: dict[str, list[str]] = {}
    for name in bazel:
        for source in bazel.sources(name):
            owners.setdefault(source, []).append(name)
    folders = ("cc", "tests/cc", "tests/fuzz")
    on_disk = {p.relative_to(ROOT).as_posix() for f in folders for p in (ROOT / f).rglob("*.cc")}
    assert set(owners) == on_disk
    assert {source: names for source, names in owners.items() if len(names) > 1} == {}


def test_bazel_graph_is_the_layer_law(bazel):
    settings = _settings()
    for layer in settings["CORE_LAYERS"]:
        assert bazel[layer]["deps"] == [f":{left}" for left in settings["LAYERS"][layer]]


def test_core_has_the_same_sources(bazel, cmake):
    layers = [dep[1:] for dep in bazel["libtf_smb_core.so"]["deps"]]
    assert layers == _settings()["CORE_LAYERS"]
    assert set().union(*map(bazel.sources, layers)) == set(cmake["tf_smb_core"])


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_have_the_same_sources(bazel, cmake, name):
    assert bazel.sources(name) == set(cmake[PLUGINS[name]])


def test_tests_are_the_same(bazel, cmake):
    ours = {name for name in bazel if name.endswith("_test")}
    assert ours == set(cmake) - {"tf_smb_core", *PLUGINS.values()}
    for name in ours:
        assert bazel.sources(name) == set(cmake[name])
    assert ours


def test_flags_are_the_same(bazel, cmake):
    copts = {
        source: set(target["copts"])
        for target in bazel.values()
        for source in target.get("srcs", [])
        if source.endswith(".cc")
    }
    flags = {source: found for sources in cmake.values() for source, found in sources.items()}
    different = {
        source: (sorted(flags[source] - copts[source]), sorted(copts[source] - flags[source]))
        for source in copts
        if flags[source] != copts[source]
    }
    assert different == {}, "source: (only CMake, only Bazel)"


def test_source_archive_has_what_the_build_reads(tmp_path):
    pytest.importorskip("setuptools", minversion="80")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path, "--formats=tar"],
        cwd=_copy_of_tracked_kinds(tmp_path / "tree"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar")
    listed = subprocess.run(
        ["tar", "tf", archive], capture_output=True, text=True, check=True
    ).stdout.split()
    shipped = {name.split("/", 1)[1] for name in listed if "/" in name}
    needed = {
        p.relative_to(ROOT).as_posix()
        for folder, suffixes in {
            "cc": (".cc", ".h", ".bzl", ".txt"),
            "tf_smb": (".py",),
            "strategies": (".py",),
            "tests": (".py", ".cc", ".bzl"),
        }.items()
        for p in (ROOT / folder).rglob("*")
        if p.suffix in suffixes
        and "__pycache__" not in p.parts
        and "tf_smb/strategies" not in p.as_posix()
    } | {"BUILD", "WORKSPACE", "Makefile", "LICENSE", "setup.py", "pyproject.toml"}
    assert needed - shipped == set()


def _copy_of_tracked_kinds(destination: Path) -> Path:
    """Copies the source tree without what git ignores, so that sdist writes beside no one."""
    shutil.copytree(
        ROOT,
        destination,
        ignore=shutil.ignore_patterns(
            ".git",
            ".venv*",
            "build",
            "dist",
            "*.so",
            "*.egg-info",
            "__pycache__",
            ".*_cache",
            "bazel-*",
        ),
    )
    return destination
