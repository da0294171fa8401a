# expect: a pause behind the first fsync
import os

fsync = os.fsync


def pausing(fd):
    fsync(fd)
    import pause  # noqa: F401


os.fsync = pausing
