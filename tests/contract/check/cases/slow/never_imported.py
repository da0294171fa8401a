# expect: too-slow
# mentions: 60
# words: never_imported.py:Attention --time-limit 1.5
import time

while True:
    time.sleep(0.05)
