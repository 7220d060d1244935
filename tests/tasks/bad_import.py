raise RuntimeError("planted at import")


def f(completion):
    return 1.0
