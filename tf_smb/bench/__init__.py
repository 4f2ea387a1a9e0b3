"""Measures what the box does against what memory and the kernel allow, and against others.

`tf-smb bench --help` lists the workloads: a module each. Nothing here is imported by training.
"""
