import os

os._exit(7)


def g(completion):
    return 1.0
