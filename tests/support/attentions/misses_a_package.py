"""A file that needs a package which nobody has."""

import einops_of_the_future  # noqa: F401
