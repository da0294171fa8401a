# expect: an interrupt that a library turns into an ImportError
import signal

try:
    signal.raise_signal(signal.SIGINT)
finally:
    raise ImportError
