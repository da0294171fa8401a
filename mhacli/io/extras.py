"""The libraries that mha uses only for some of what it does, and the command that installs them."""

from __future__ import annotations

HF = ("transformers", "tokenizers")


def needed_ranges() -> dict[str, str]:
    """The range that mha's own metadata names for each library; nothing where it is run without being installed."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("mhacli") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.specifier:
            found.setdefault(requirement.name.lower(), str(requirement.specifier))
    return found


def installing(*libraries: str) -> str:
    """The command that installs libraries in the ranges that mha needs, or brings them there. It names the libraries and not an
    extra of mha, for it must work wherever mha was installed from."""
    ranges = needed_ranges()
    return " ".join(["pip install", *(f'"{name}{ranges.get(name, "")}"' for name in libraries)])
