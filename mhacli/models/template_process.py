"""Renders a chat template in a child process, run by its path, which the system ends if it takes too long.

It reads a line of JSON, `{"template", "chats", "tokens", "limit_s", "more_bytes", "most"}`, and answers with one:
`{"texts"}`, or `{"fault"}`. It imports neither mha nor torch.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from typing import Any


def rendered(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request: the text of each chat, or the error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_to(request["limit_s"], request["more_bytes"])
    try:
        made: Any = render_jinja_template(
            conversations=request["chats"], chat_template=request["template"], **request["tokens"]
        )
    except MemoryError:
        return {"fault": "it takes too much memory"}
    except RecursionError:
        return {"fault": "it calls itself without end"}
    except Exception as fault:  # a template can raise anything
        said = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        return {"fault": said}
    texts = list(map(str, made[0]))
    if len(texts[0]) > request["most"]:
        return {"fault": f"a text of {len(texts[0])} characters, more than {request['most']}"}
    return {"texts": texts}


def limit_to(seconds: float, more_bytes: int) -> None:
    """Limits the processor time from now on, and the memory in addition to that in use."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    ends_s = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (ends_s, ends_s + 1))
    with open("/proc/self/statm") as sizes:
        has_bytes = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + more_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answers the request on stdin."""
    answer = rendered(json.loads(sys.stdin.buffer.readline()))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
