"""A script rather than a module."""

import sys

sys.exit("usage: exits_on_import.py FILE")
