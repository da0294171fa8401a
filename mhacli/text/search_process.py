"""Searches for regular expressions; a process of its own, run by its path, that `search` ends when it takes too long.

It gets a line of JSON, `{"patterns", "most", "max_bytes"}`, and then the text. It answers with a line of JSON for each pattern
when that is done: `{"ranges"}`, `{"count"}` where there are more than `most`, or `{"fault"}`. It imports nothing of ours.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import warnings


def ranges_of(pattern: str, text: str, most: int) -> dict[str, object]:
    """The answer for one pattern: where its matches stand, those of no character left out."""
    try:
        found = []
        for match in re.finditer(pattern, text):
            if match.end() > match.start():
                found.append(match.span())
            if len(found) > most:
                return {"count": len(found)}
    except re.error as fault:
        return {"fault": str(fault)}
    except (OverflowError, RecursionError) as fault:
        return {"fault": f"{fault}"}
    except MemoryError:
        return {"fault": "it takes too much memory"}
    return {"ranges": found}


def main() -> None:
    """Answers what comes on stdin."""
    warnings.simplefilter("ignore")  # what a later Python will read differently is no fault of the text
    asked = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_AS, (asked["max_bytes"], asked["max_bytes"]))
    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    for pattern in asked["patterns"]:
        sys.stdout.write(json.dumps(ranges_of(pattern, text, asked["most"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
