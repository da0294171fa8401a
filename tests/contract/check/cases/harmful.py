# right in short calls; in others each breaks the limit of time or leaves processes
import ctypes
import faulthandler
import os
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path


def plain(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def then_hangs(act):
    def attention(q, k, v):
        if k.shape[-2] > 64:
            act()
            time.sleep(600)
        return plain(q, k, v)

    return attention


def noted(pid):
    with Path(os.environ.get("STARTED", "../started")).open("a") as file:
        print(pid, file=file)


def leaves_session(then=lambda: time.sleep(600)):
    if os.fork() == 0:
        os.setsid()
        noted(os.getpid())
        then()
        os._exit(0)


@then_hangs
def cancels():
    signal.setitimer(signal.ITIMER_REAL, 0)


@then_hangs
def ignores():
    faulthandler.unregister(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


@then_hangs
def handles():
    signal.signal(signal.SIGALRM, lambda *_: None)
    faulthandler.cancel_dump_traceback_later()


@then_hangs
def blocks():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])


@then_hangs
def holds_the_interpreter():
    signal.setitimer(signal.ITIMER_REAL, 0)
    ctypes.PyDLL(None).sleep(600)


@then_hangs
def stops():
    os.kill(os.getpid(), signal.SIGSTOP)


@then_hangs
def stops_the_group():
    os.kill(0, signal.SIGSTOP)


class Unsaid(Exception):
    def __str__(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(600)


@then_hangs
def never_says():
    raise Unsaid


@then_hangs
def closes():
    os.closerange(0, 100)


@then_hangs
def forks():
    leaves_session()


@then_hangs
def forks_twice():
    leaves_session(leaves_session)


@then_hangs
def forks_many():
    signal.setitimer(signal.ITIMER_REAL, 0)
    for _ in range(10):
        leaves_session(lambda: [leaves_session() for _ in range(3)])


@then_hangs
def starts_a_program():
    noted(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)


@then_hangs
def floods():
    def print_on():
        while True:
            os.write(1, b"x\n" * 30_000)

    leaves_session(print_on)


@then_hangs
def leaves_files():
    tempfile.mkdtemp()
    subprocess.run(["mktemp"], check=True)
    leaves_session()


def leaves_and_aborts(q, k, v):
    if k.shape[-2] > 64:
        leaves_session()
        os.abort()
    return plain(q, k, v)


def leaves_and_returns(q, k, v):
    if k.shape[-2] == 65:
        leaves_session(leaves_session)
    return plain(q, k, v)


def into_pipes(data, times=1):
    def attention(q, k, v):
        if k.shape[-2] == 65:
            for _ in range(times):
                for number in range(3, 40):
                    try:
                        if stat.S_ISFIFO(os.fstat(number).st_mode):
                            os.write(number, data)
                    except OSError:
                        pass
        return plain(q, k, v)

    return attention


no_message = into_pipes(b"hello")
half_a_message = into_pipes(b'["stage", ')
unknown_message = into_pipes(b'["hello", 1]\n')
nested_message = into_pipes(b'["' + b'["' * 30_000 + b"\n")
not_utf8 = into_pipes(b'["\xff\xfe"]\n')
many_lines = into_pipes(b"x\n" * 30_000, 10**9)
endless_line = into_pipes(b'["result' + b"x" * 60_000, 10**9)


class Long(Exception):
    def __str__(self):
        return "long " + "x\n" * 10**6


def says_much(q, k, v):
    raise Long
