# expect: no file `ran`, for nothing is called
open("ran", "w").close()


def attend(q, k, v):
    return v
