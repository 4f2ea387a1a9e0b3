"""The headers and libraries of an installed Python environment, as a repository."""

_PROBE = """
import importlib.util, os, sysconfig

def folder(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise SystemExit("no package " + package + " in this Python environment")
    return os.path.realpath(spec.submodule_search_locations[0])

print(folder("tensorflow"))
print(folder("pybind11"))
print(os.path.realpath(sysconfig.get_path("include")))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# Only what tensorflow/c/kernels.h and ops.h reach: the C API.
cc_library(
    name = "tensorflow",
    srcs = ["tensorflow/libtensorflow_framework.so.2"],
    hdrs = glob([
        "tensorflow/include/tensorflow/c/**/*.h",
        "tensorflow/include/tensorflow/core/common_runtime/next_pluggable_device/c/*.h",
        "tensorflow/include/tensorflow/core/platform/ctstring.h",
        "tensorflow/include/tsl/c/*.h",
        "tensorflow/include/tsl/platform/*.h",
        "tensorflow/include/xla/tsl/c/*.h",
        "tensorflow/include/xla/tsl/platform/*.h",
    ], allow_empty = True),
    includes = ["tensorflow/include"],
)

cc_library(
    name = "pybind11",
    hdrs = glob([
        "pybind11/include/**/*.h",
        "python/**/*.h",
    ]),
    includes = [
        "pybind11/include",
        "python",
    ],
)
"""

def _python_environment_impl(repository_ctx):
    python = repository_ctx.os.environ.get("TF_SMB_PYTHON") or repository_ctx.which("python3")
    if not python:
        fail("no python3 on PATH; set TF_SMB_PYTHON to the interpreter that has TensorFlow and pybind11")
    probe = repository_ctx.execute([python, "-I", "-c", _PROBE])
    if probe.return_code != 0:
        fail("%s: %s" % (python, probe.stderr.strip()))
    tensorflow, pybind11, include = probe.stdout.strip().split("\n")
    repository_ctx.symlink(tensorflow + "/include", "tensorflow/include")
    repository_ctx.symlink(
        tensorflow + "/libtensorflow_framework.so.2",
        "tensorflow/libtensorflow_framework.so.2",
    )
    repository_ctx.symlink(pybind11 + "/include", "pybind11/include")
    repository_ctx.symlink(include, "python")
    repository_ctx.file("BUILD", _BUILD)

python_environment = repository_rule(
    implementation = _python_environment_impl,
    doc = "TensorFlow, pybind11 and Python of the interpreter in TF_SMB_PYTHON, else of python3.",
    environ = ["TF_SMB_PYTHON"],
    local = True,
)
