"""A shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
