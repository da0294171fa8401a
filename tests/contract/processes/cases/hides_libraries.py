# expect: the libraries that the test writes into HIDDEN are missing
import sys
from importlib.machinery import PathFinder

HIDDEN = ()


class Without(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
