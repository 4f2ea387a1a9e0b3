"""Builds tf_smb: CMake compiles the C++ part (cc/CMakeLists.txt) into the package folder.

Metadata stands in pyproject.toml; here is what needs code: the native build and the
folder that is installed under another name.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def _tool(name: str) -> str:
    """Returns the path of `cmake` or `ninja`: of the build environment, else of the system."""
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which(name, path=beside_python + os.pathsep + os.environ.get("PATH", ""))
    if path is None:
        raise SystemExit(f"Building tf_smb needs {name}: pip install {name}")
    return path


def _package_folder(name: str, hint: str) -> str:
    """Returns where the package `name` lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"Building tf_smb needs {name} in {sys.executable}: {hint}")
    return spec.submodule_search_locations[0]


class CMakeBuild(build_ext):
    """Lets CMake build all native files at once and install them beside the Python files."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            # Kept, unlike an editable install's build_temp: the next one is incremental.
            build, destination = ROOT / "build" / "in_place", ROOT / "tf_smb"
        else:
            build = Path(self.build_temp).resolve() / "cmake"
            destination = Path(self.build_lib).resolve() / "tf_smb"
        tensorflow = _package_folder("tensorflow", "pip install tensorflow-cpu")
        pybind11 = _package_folder("pybind11", "pip install pybind11")
        cmake = _tool("cmake")
        jobs = str(self.parallel or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or os.cpu_count())
        configure = [
            cmake,
            f"-S{ROOT / 'cc'}",
            f"-B{build}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
            # Warnings are errors in `make check`; a newer compiler's new warning must
            # not keep a user from installing.
            f"-DTF_SMB_WERROR={os.environ.get('TF_SMB_WERROR', 'OFF')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={Path(pybind11) / 'share' / 'cmake' / 'pybind11'}",
            f"-DTF_SMB_TENSORFLOW_DIR={tensorflow}",
        ]
        # A cache from another build environment would keep pointing there. (cmake --fresh
        # does this from 3.24 on.)
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        for command in (
            configure,
            [cmake, "--build", str(build), "--parallel", jobs],
            [cmake, "--install", str(build), "--prefix", str(destination)],
        ):
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError:
                raise SystemExit("Building tf_smb failed: see the messages above.") from None

    def _native_files(self) -> list[str]:
        return ["libtf_smb_core.so", "_tf_smb_ops.so", Path(self.get_ext_filename("_smb")).name]

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "tf_smb" / name) for name in self._native_files()]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        return {
            str(Path(self.build_lib) / "tf_smb" / name): str(ROOT / "tf_smb" / name)
            for name in self._native_files()
        }

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them


setup(
    packages=["tf_smb", "tf_smb.bench", "tf_smb.callbacks", "tf_smb.strategies"],
    package_dir={"tf_smb": "tf_smb", "tf_smb.strategies": "strategies"},
    package_data={"tf_smb": ["*.pyi", "py.typed"], "tf_smb.bench": ["*.c"]},
    ext_modules=[Extension("tf_smb._smb", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
