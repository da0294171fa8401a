# expect: a byte in the FIFO `reached`, and then no end
import time

with open("modules/reached", "wb", 0) as fifo:
    fifo.write(b"!")
time.sleep(600)
