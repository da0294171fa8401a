# expect: too-slow
# mentions: than 3 seconds
# words: never_imported.py:Attention --time-limit 1.5
import time

while True:
    time.sleep(0.05)
