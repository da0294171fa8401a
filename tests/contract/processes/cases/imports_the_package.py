# expect: [] False
import sys

import mhacli

LARGE = "torch numpy rich typer transformers polars pandas textual".split()
print([name for name in LARGE if name in sys.modules])
_ = mhacli.Config, mhacli.MhaError, mhacli.Record, mhacli.load
print("torch" in sys.modules)
