"""What all test files need."""

import signal

# Ignored where the tests run in the background of a shell, and then inherited by all that
# they start: nothing would end with Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
