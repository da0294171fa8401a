# expect: a pause before torch.nn
import sys


class Pausing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch.nn":
            import pause  # noqa: F401


sys.meta_path.insert(0, Pausing)
