"""`python -m mhacli` is `mha`."""

from mhacli.cli import main

if __name__ == "__main__":
    main()
