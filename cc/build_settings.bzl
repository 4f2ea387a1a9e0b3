"""The layer law and the compiler flags, each written once.

Bazel loads this file (BUILD), CMake reads the flag lists out of it
(cc/CMakeLists.txt) and the tests evaluate it as Python: it holds literals only.
"""

# The C++ folders in their order, each with the folders whose headers it may
# include besides its own. An arrow that is not here is an error in
# tests/python/layers_test.py, and in Bazel a header that is not found.
LAYERS = {
    "common": [],
    "wire": ["common"],
    "box": ["common", "wire"],
    "transport": ["common", "wire", "box"],
    "server": ["common", "wire", "box", "transport"],
    "client": ["common", "wire", "box", "transport"],
    "kernels": ["common", "wire", "box", "transport", "server", "client"],
    "bench": ["common", "wire", "box", "transport", "server", "client"],
    "python": ["common", "wire", "box", "transport", "server", "client", "bench"],
}

# The layers in libtf_smb_core.so, which the op library and the Python module
# both link, so that a process has one client.
CORE_LAYERS = ["common", "wire", "box", "transport", "server", "client"]

# -O3: GCC vectorises the exchange kernels only from there on. -g1: line tables only,
# so that a backtrace names lines; costs nothing at run time. -ffp-contract=off: no
# fused multiply-add, so that an exchange rule gives the same bits whichever path,
# compiler or processor computes it. No -march: a wheel runs on every machine of its
# architecture. No -DNDEBUG: assertions stay.
COPTS = [
    "-std=c++17",
    "-O3",
    "-g1",
    "-ffp-contract=off",
    "-fno-omit-frame-pointer",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
]

# The op library and the Python module export nothing but what their loaders look
# for. The core keeps default visibility: both of them use its classes.
PLUGIN_COPTS = [
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
]
