# expect: the largest memory of the process in KiB, in the file `peak`
import os

end = os._exit


def report(code):
    with open("/proc/self/status") as status, open("modules/peak", "w") as file:
        file.write(next(line.split()[1] for line in status if line.startswith("VmHWM")))
    end(code)


os._exit = report
