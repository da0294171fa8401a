# expect: it is never imported
raise SystemExit(99)


class Attention:
    pass
