"""Finds the C++ toolchain of a rule that declares the usual hidden attribute."""

def find_cpp_toolchain(ctx):
    """Returns the CcToolchainInfo behind the rule's `_cc_toolchain` attribute."""
    return ctx.attr._cc_toolchain[cc_common.CcToolchainInfo]
