"""Measures the exchange against what memory allows and against what others offer.

`tf-smb bench exchange --help` lists the workloads. Nothing here is imported by training.
"""
